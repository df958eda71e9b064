"""Short forms of the queue functions for the tests of queues, each in one transaction."""

from typing import Any

from fastness.kv import Database
from fastness.layers import queues
from fastness.layers.queues import Leased, QueueKey, StoredMessage
from fastness.plane.executor import execute
from fastness.wire.queues import (
    LeasedMessages,
    MessageLease,
    NewMessage,
    QueuePolicy,
    QueueStats,
    Receipt,
    SetQueuePolicy,
)

JOBS = QueueKey("main", "jobs")
DEAD = QueueKey("main", "jobs.dlq")
SIZES = [
    0,
    1,
    1_024,
    1_025,
    16_384,
]  # Up to 1,024 bytes are part of the message record; more have a record of their own.


def put(database: Database, *payloads: bytes, queue: QueueKey = JOBS, **options: Any) -> list[Receipt]:
    return database.transact(queues.put, queue, [NewMessage(payload=payload, **options) for payload in payloads])


def lease(database: Database, limit: int = 1, *, queue: QueueKey = JOBS, **options: Any) -> list[StoredMessage]:
    return database.transact(queues.lease, queue, **{"owner": "ada", "limit": limit, **options})


def lease_one(database: Database, **options: Any) -> StoredMessage:
    (message,) = lease(database, **options)
    return message


def lease_or_wait(database: Database, **options: Any) -> Leased:
    return database.transact(queues.lease_or_wait, JOBS, **{"owner": "ada", **options})


def payloads(messages: list[StoredMessage]) -> list[bytes | None]:
    return [message.payload for message in messages]


def proof(message: StoredMessage) -> MessageLease:
    return MessageLease(queues.format_id(message.id), message.lease_id, message.fence)


def ack(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> str | None:
    return database.transact(queues.ack, queue, proof(message))


def nack(database: Database, message: StoredMessage, queue: QueueKey = JOBS, **options: Any) -> str:
    return database.transact(queues.nack, queue, proof(message), **options)


def reject(database: Database, message: StoredMessage, error: str | None = None) -> str:
    return database.transact(queues.reject, JOBS, proof(message), error=error)


def extend(database: Database, message: StoredMessage, by_ms: int) -> StoredMessage:
    return database.transact(queues.extend, JOBS, proof(message), by_ms=by_ms)


def process_due(database: Database, queue: QueueKey = JOBS) -> int:
    return database.transact(queues.sweep, queue)


def set_policy(database: Database, queue: QueueKey = JOBS, **options: Any) -> QueuePolicy:
    policy: QueuePolicy = database.transact(execute, SetQueuePolicy(queue.name, QueuePolicy(**options), queue.universe))
    return policy


def stats(database: Database, queue: QueueKey = JOBS) -> QueueStats:
    return database.read(queues.stats, queue)


def peek(database: Database, queue: QueueKey = JOBS, limit: int = 100) -> list[StoredMessage]:
    return database.read(queues.peek, queue, limit=limit)


def leased(database: Database, *, after: str = "", limit: int = 100) -> LeasedMessages:
    return database.read(queues.leased, JOBS, after=after, limit=limit)


def counts(database: Database, queue: QueueKey = JOBS) -> dict[str, int]:
    """How many messages are in which state, without empty states."""
    found = stats(database, queue)
    states = ("ready", "delayed", "leased", "blocked", "dead")
    return {state: getattr(found, state) for state in states if getattr(found, state)}


def purge(database: Database, queue: QueueKey = JOBS) -> int:
    removed, after = 0, b""
    while True:
        count, following = database.transact(queues.purge, queue, after=after, limit=256)
        removed += count
        if following is None:
            return removed
        after = following


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def remaining_keys(database: Database) -> list[bytes]:
    """All keys except those that outlast messages: counters, policies and ack records."""
    kept = tuple(
        prefix
        for keys in map(queues.keys_of, (JOBS, DEAD))
        for prefix in (keys.all_counters.prefix, keys.policy, keys.acks.prefix)
    )
    return [key for key, _ in everything(database) if not key.startswith(kept)]
