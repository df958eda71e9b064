"""Keys that one message has at a time: unique keys, and debounce keys.

    "u", key  ->  id | until | correlation id    until: 0 while the message is in the queue, or when the key is free
    "n", key  ->  id | when the first message was put

A unique key belongs to its message until that is acknowledged, dead or cancelled, or until it is leased, or for a time.
A debounce key belongs to its message while that is delayed.
"""

from typing import Final

from fastness.kv import Transaction
from fastness.layers.queues import outcomes
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.keys import QueueKeys
from fastness.wire.queues import NewMessage
from fastness.wire.stored_messages import (
    ID_BYTES,
    UNIQUE_UNTIL_DONE,
    UNIQUE_UNTIL_LEASED,
    JobOptions,
    StoredHead,
    StoredMessage,
    decode,
)

_TIME_END: Final = ID_BYTES + 8


def job_of(new: NewMessage) -> JobOptions:
    """The job options of a new message."""
    until = new.unique_until
    if until == "done":
        until_ms = UNIQUE_UNTIL_DONE
    elif until == "leased":
        until_ms = UNIQUE_UNTIL_LEASED
    else:
        until_ms = round(float(until) * 1_000)
    return JobOptions(new.key, new.keep_result, new.unique_key, until_ms, new.debounce_key)


def holder_of(tx: Transaction, keys: QueueKeys, unique_key: str) -> tuple[bytes, str] | None:
    """The id and the correlation id of the message that has a unique key; None if the key is free."""
    found = tx.get(keys.unique.key(unique_key))
    if found is None or 0 < int.from_bytes(found[ID_BYTES:_TIME_END], "big") <= tx.now_ms:
        return None
    return found[:ID_BYTES], found[_TIME_END:].decode()


def claim(queue_tx: QueueTransaction, message: StoredMessage, job: JobOptions) -> None:
    """Give a free unique key to a message."""
    if job.unique_key is None:
        return
    tx, keys = queue_tx.tx, queue_tx.keys
    until_ms = tx.now_ms + job.unique_until if job.unique_until > 0 else 0
    key = keys.unique.key(job.unique_key)
    tx.put(key, message.id + until_ms.to_bytes(8, "big") + message.correlation_id.encode())
    if until_ms:
        outcomes.expire_at(queue_tx, key, until_ms)


def release(queue_tx: QueueTransaction, message: StoredHead) -> None:
    """Free the unique key of a message that leaves the queue. A key that it has for a time stays."""
    job = message.job
    if job is not None and job.unique_key is not None and job.unique_until <= 0:
        _free(queue_tx, job.unique_key, message.id)


def release_leased(queue_tx: QueueTransaction, message: StoredHead, job: JobOptions) -> None:
    """Free the unique key of a message that it has until it is leased."""
    if job.unique_key is not None and job.unique_until == UNIQUE_UNTIL_LEASED:
        _free(queue_tx, job.unique_key, message.id)


def _free(queue_tx: QueueTransaction, unique_key: str, id: bytes) -> None:
    tx, key = queue_tx.tx, queue_tx.keys.unique.key(unique_key)
    found = tx.get(key)
    if found is not None and found[:ID_BYTES] == id:  # Another message may have it since this one was leased.
        tx.delete(key)


def debounced(tx: Transaction, keys: QueueKeys, debounce_key: str) -> tuple[StoredMessage, int] | None:
    """The delayed message that has a debounce key, and when the first one was put; None if there is none."""
    found = tx.get(keys.debounced.key(debounce_key))
    stored = None if found is None else tx.get(keys.delayed_key(found[:ID_BYTES]))
    if found is None or stored is None:
        return None
    return decode(stored), int.from_bytes(found[ID_BYTES:_TIME_END], "big")


def debounce(queue_tx: QueueTransaction, debounce_key: str, id: bytes, first_ms: int) -> None:
    """Give a debounce key to a message."""
    queue_tx.tx.put(queue_tx.keys.debounced.key(debounce_key), id + first_ms.to_bytes(8, "big"))


def end_debounce(queue_tx: QueueTransaction, message: StoredHead) -> None:
    """Free the debounce key of a message that is not delayed any more."""
    job = message.job
    if job is None or job.debounce_key is None:
        return
    tx, key = queue_tx.tx, queue_tx.keys.debounced.key(job.debounce_key)
    found = tx.get(key)
    if found is not None and found[:ID_BYTES] == message.id:
        tx.delete(key)
