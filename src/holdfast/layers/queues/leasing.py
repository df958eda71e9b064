"""Leasing: delivering messages, and settling them.

                 ┌────────── nack, or the lease ends ──────────┐
                 ▼                                             │
    put ──► ready ──► leased (fence + 1) ── ack ──► gone       │
      │       ▲          │  └─ extend ─┘                        │
      └─ delayed         ├──── failures < max_attempts ─────────┘
              ▲          └──── failures = max_attempts, reject ──► dead letters ── redrive ──► ready
              └── nack with a delay, or as a failure with the back-off of the policy

A lease that expires counts as a failure, so a message that crashes its consumers becomes a dead letter too. A consumer
may settle its message after the lease's end until a transaction processes the expiry; then its fence is refused.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import InvalidArgument, QueueMessageLeaseMismatch
from holdfast.kv import Pair, Transaction
from holdfast.layers.idempotency import KeyedCall, delete_result, read_result, store_result, stored_result
from holdfast.layers.leases import check_owner
from holdfast.layers.queues import dead_letters, failures, sidecars
from holdfast.layers.queues.counters import NEVER_MS, QueueCounters, QueueTransaction
from holdfast.layers.queues.deliveries import delivery_of
from holdfast.layers.queues.expiry import process_due
from holdfast.layers.queues.failures import (
    FAILED,
    REJECTED,
    Failures,
    delivered_failures,
    makes_dead_letter,
    retry_delay_ms,
)
from holdfast.layers.queues.keys import (
    QueueKey,
    QueueKeys,
    StoredMessage,
    decode,
    format_id,
    keys_of,
    parse_id,
)
from holdfast.layers.queues.policies import policy_of
from holdfast.limits import ACK_MEMORY_SECONDS, DELAY_SECONDS_MAX, MESSAGES_MAX
from holdfast.wire.queues import Delivery, MessageLease, QueuePolicy, SidecarState

PREFETCH_MAX = 64  # Messages that one scan reads and keeps for later deliveries.
_FENCE_BYTES = 8  # At the start of an ack record; the correlation id follows.


class Prefetched:
    """Ready messages read before their delivery, so that most deliveries need no scan.

    They are valid while the queue's front directly precedes them and `order_version` is unchanged, that is, while no
    message became ready or was removed out of order. Both are in the counters and so part of the commit. Otherwise they
    are dropped.
    """

    __slots__ = ("front", "messages", "order_version", "priority")

    def __init__(self) -> None:
        self.messages: list[Pair] = []  # Stored pairs in reverse order: the next one is last.
        self.order_version = -1
        self.priority = -1
        self.front = b""


class Leased(NamedTuple):
    """The result of a lease call: messages, their workflow states if requested, and when to try again."""

    messages: list[StoredMessage]
    retry_in_ms: int
    states: list[SidecarState | None]
    events: list[tuple[Any, ...]]  # To publish after the commit.
    repeated: bool = False  # An earlier attempt of the same call leased them.
    more: bool = False  # More messages are ready.
    failures: Failures | None = None  # Of the messages that have failed before.


def lease(
    tx: Transaction,
    queue: QueueKey,
    *,
    owner: str,
    limit: int = 1,
    visibility_ms: int | None = None,
    txn_id: str | None = None,
    with_state: bool = False,
    prefetched: Prefetched | None = None,
) -> list[StoredMessage]:
    """The messages of `lease_or_wait`."""
    return lease_or_wait(
        tx,
        queue,
        owner=owner,
        limit=limit,
        visibility_ms=visibility_ms,
        txn_id=txn_id,
        with_state=with_state,
        prefetched=prefetched,
    ).messages


def lease_or_wait(
    tx: Transaction,
    queue: QueueKey,
    *,
    owner: str,
    limit: int = 1,
    visibility_ms: int | None = None,
    txn_id: str | None = None,
    with_state: bool = False,
    prefetched: Prefetched | None = None,
) -> Leased:
    """Lease at most `limit` ready messages, the most urgent first, then the oldest.

    Raises:
        InvalidArgument: `limit` is out of range.
    """
    check_owner(owner, txn_id)
    if not 0 < limit <= MESSAGES_MAX:
        raise InvalidArgument(f"limit is {limit}; one delivery has 1 to {MESSAGES_MAX} messages")
    queue_tx = QueueTransaction(tx, queue)
    policy = policy_of(tx, queue)
    changed = process_due(queue_tx)
    leased: list[StoredMessage] = []
    allowed = 0 if policy.paused else _allowed_by_rate(queue_tx, policy, limit)
    while len(leased) < allowed:
        found = _next_ready(queue_tx, allowed - len(leased), prefetched)
        if not found:
            break
        for message in found:
            queue_tx.remove_ready(message, in_order=True)
            changed = True
            if message.ttl_at_ms and message.ttl_at_ms <= tx.now_ms:
                dead_letters.expire_message(queue_tx, message)
                continue
            message.owner, message.txn_id = owner, txn_id
            message.due_ms = tx.now_ms + (message.visibility_ms if visibility_ms is None else visibility_ms)
            message.stateful = message.stateful or with_state
            _deliver(queue_tx, message)
            leased.append(message)
    if policy.rate_per_second is not None:
        queue_tx.counters.budget -= len(leased)  # A refilled budget alone is not committed: it follows from the time.
    if changed:
        queue_tx.save()
    states: list[SidecarState | None] = [None] * len(leased)
    if with_state:
        states = [sidecars.open(tx, queue, message) for message in leased]
    more = _most_urgent(queue_tx.counters.ready) >= 0
    failed = delivered_failures(tx, queue, leased) if any(message.has_failures for message in leased) else None
    return Leased(leased, _retry_in_ms(queue_tx, policy), states, tx.events, more=more, failures=failed)


def deliveries_of(leased: Leased) -> list[Delivery]:
    """The wire form of leased messages."""
    failed = leased.failures or {}
    return [
        delivery_of(message, state, failed.get(message.id))
        for message, state in zip(leased.messages, leased.states, strict=True)
    ]


def ack(tx: Transaction, queue: QueueKey, proof: MessageLease) -> str | None:
    """Remove a leased message for good, unless this lease acknowledged it before; returns its correlation id.

    The correlation id is None if the record of an earlier ack has none: it was written by an older version.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    keys = keys_of(queue)
    message = _leased_message(tx, keys, proof)
    if message is None:
        record = _ack_record(tx, keys, proof)
        if record is None:
            raise _mismatch(proof)
        return record[_FENCE_BYTES:].decode() or None
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    queue_tx.counters.acked += 1
    record = message.fence.to_bytes(_FENCE_BYTES, "big") + message.correlation_id.encode()
    tx.put(keys.ack_key(tx.now_ms // 60_000, message.id), record)
    dead_letters.remove(queue_tx, message)
    queue_tx.save()
    queue_tx.emit("acked", message)
    return message.correlation_id


def nack(
    tx: Transaction,
    queue: QueueKey,
    proof: MessageLease,
    *,
    delay_seconds: float | None = None,
    counts: bool = True,
    error: str | None = None,
    error_type: str | None = None,
    traceback: str | None = None,
) -> str:
    """Return a leased message to the queue, for delivery after the delay; returns its correlation id.

    With `counts` it is a failure: the default delay is the back-off of the policy, and the last allowed failure makes
    it a dead letter. Without an `error` the message keeps the error of its last failure. Without `counts` it is
    delivered again at once by default.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    if delay_seconds is not None and not 0 <= delay_seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"delay_seconds is {delay_seconds}; choose 0 to {DELAY_SECONDS_MAX:.0f}")
    message = _require_leased(tx, queue, proof)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    delay_ms = 0 if delay_seconds is None else round(delay_seconds * 1_000)
    if counts:
        policy = _record_failure(queue_tx, message, FAILED, error=error, error_type=error_type, traceback=traceback)
        if delay_seconds is None:
            delay_ms = retry_delay_ms(policy, message)
    queue_tx.emit("nacked" if counts else "deferred", message)
    if counts and makes_dead_letter(message, FAILED):
        dead_letters.dead_letter(queue_tx, message)
    else:
        dead_letters.requeue(queue_tx, message, delay_ms=delay_ms)
    queue_tx.save()
    return message.correlation_id


def defer_all(tx: Transaction, queue: QueueKey, messages: Sequence[StoredMessage]) -> list[tuple[Any, ...]]:
    """Return leased messages that were never delivered, without counting a failure; returns the events to publish."""
    for message in messages:
        with suppress(QueueMessageLeaseMismatch):
            nack(tx, queue, MessageLease(format_id(message.id), message.lease_id, message.fence), counts=False)
    return tx.events


def reject(
    tx: Transaction,
    queue: QueueKey,
    proof: MessageLease,
    *,
    error: str | None = None,
    error_type: str | None = None,
    traceback: str | None = None,
) -> str:
    """Make a leased message a dead letter at once; returns its correlation id.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    message = _require_leased(tx, queue, proof)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    _record_failure(queue_tx, message, REJECTED, error=error, error_type=error_type, traceback=traceback)
    if makes_dead_letter(message, REJECTED):
        dead_letters.dead_letter(queue_tx, message)
    else:  # It is a dead letter already.
        queue_tx.emit("nacked", message)
        dead_letters.requeue(queue_tx, message, delay_ms=0)
    queue_tx.save()
    return message.correlation_id


def extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
    """Extend a lease to at least `by_ms` from now. It never gets shorter.

    Raises:
        InvalidArgument: `by_ms` is not positive.
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    if by_ms < 1:
        raise InvalidArgument("A lease is extended by at least 0.001 s; to return the message to the queue, nack it")
    message = _require_leased(tx, queue, proof)
    due_ms = tx.now_ms + by_ms
    if due_ms > message.due_ms:
        queue_tx = QueueTransaction(tx, queue)
        queue_tx.unpark(message)
        message.due_ms = due_ms
        queue_tx.park(message)
        sidecars.extend(tx, queue, message)
        queue_tx.save()
    return message


def check(tx: Transaction, queue: QueueKey, proof: MessageLease) -> None:
    """Raise QueueMessageLeaseMismatch unless the message is leased by `proof` and the lease has not expired."""
    if tx.now_ms >= _require_leased(tx, queue, proof).due_ms:
        raise _mismatch(proof)


def _next_ready(queue_tx: QueueTransaction, limit: int, prefetched: Prefetched | None) -> Sequence[StoredMessage]:
    """At most `limit` ready messages, in delivery order. Moves the front behind them."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if tx.writer:
        return [decode(value) for _, value in tx.scan(*keys.ready_range(), limit=limit)]
    priority = _most_urgent(counters.ready)
    if priority < 0:
        return ()
    if prefetched is not None:
        found = _take_prefetched(counters, priority, limit, prefetched)
        if found:
            return found
    begin, end = keys.priority_range(priority, counters.fronts.get(priority, b""))
    pairs = tx.scan(begin, end, limit=limit if prefetched is None else max(limit, PREFETCH_MAX))
    if prefetched is not None:
        prefetched.order_version, prefetched.priority = counters.order_version, priority
        prefetched.messages = pairs[limit:][::-1]
        pairs = pairs[:limit]
    if pairs:
        counters.fronts[priority] = pairs[-1][0][-16:] + b"\x00"
        if prefetched is not None:
            prefetched.front = counters.fronts[priority]
    return [decode(value) for _, value in pairs]


def _most_urgent(ready: dict[int, int]) -> int:
    """The highest priority with a ready message; -1 if there is none."""
    highest = -1
    for priority, count in ready.items():
        if count > 0 and priority > highest:
            highest = priority
    return highest


def _take_prefetched(counters: QueueCounters, priority: int, limit: int, prefetched: Prefetched) -> list[StoredMessage]:
    messages = prefetched.messages
    if (prefetched.order_version, prefetched.priority, prefetched.front) != (
        counters.order_version,
        priority,
        counters.fronts.get(priority, b""),
    ):
        messages.clear()
    found: list[StoredMessage] = []
    while messages and len(found) < limit:
        key, value = messages.pop()
        found.append(decode(value))
        counters.fronts[priority] = prefetched.front = key[-16:] + b"\x00"
    return found


def _deliver(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    message.attempts += 1
    message.fence += 1
    message.leased_ms = queue_tx.tx.now_ms
    queue_tx.park(message)
    queue_tx.counters.delivered += 1
    queue_tx.emit("leased", message)
    if message.has_body:
        message.payload = queue_tx.tx.get(queue_tx.keys.body_key(message.id))


def _leased_message(tx: Transaction, keys: QueueKeys, proof: MessageLease) -> StoredMessage | None:
    """The message, if it is leased by `proof`."""
    stored = tx.get(keys.parked_key(parse_id(proof.id)))
    if stored is None:
        return None
    message = decode(stored)
    if message.owner is None or message.fence != proof.fence or message.lease_id != proof.lease_id:
        return None
    return message


def _require_leased(tx: Transaction, queue: QueueKey, proof: MessageLease) -> StoredMessage:
    message = _leased_message(tx, keys_of(queue), proof)
    if message is None:
        raise _mismatch(proof)
    return message


def _ack_record(tx: Transaction, keys: QueueKeys, proof: MessageLease) -> bytes | None:
    """The record of an earlier ack under the same lease, if it is still remembered."""
    id, minute = parse_id(proof.id), tx.now_ms // 60_000
    for ago in range(ACK_MEMORY_SECONDS // 60 + 1):
        record = tx.get(keys.acks.key(minute - ago) + id)
        if record is not None:
            fence = int.from_bytes(record[:_FENCE_BYTES], "big")
            return record if (fence, f"{id.hex()}-{fence}") == (proof.fence, proof.lease_id) else None
    return None


def _retry_in_ms(queue_tx: QueueTransaction, policy: QueuePolicy) -> int:
    """In how many milliseconds a message may become available."""
    retry_in_ms = queue_tx.counters.next_due_ms - queue_tx.tx.now_ms
    if policy.rate_per_second is not None and not policy.paused and queue_tx.counters.budget < 1:
        wait_ms = (1 - queue_tx.counters.budget) / policy.rate_per_second * 1_000
        retry_in_ms = min(retry_in_ms, math.ceil(wait_ms))
    return retry_in_ms


def _allowed_by_rate(queue_tx: QueueTransaction, policy: QueuePolicy, limit: int) -> int:
    """How many messages the queue's rate allows now, at most `limit`."""
    rate, counters = policy.rate_per_second, queue_tx.counters
    if rate is None:
        return limit
    passed_ms = max(queue_tx.tx.now_ms - counters.budget_ms, 0)
    # An idle queue accumulates the budget of one second, and at least one message.
    counters.budget = min(counters.budget + passed_ms * rate / 1_000, max(rate, 1.0))
    counters.budget_ms = queue_tx.tx.now_ms
    return min(limit, int(counters.budget))


def _record_failure(
    queue_tx: QueueTransaction,
    message: StoredMessage,
    outcome: str,
    *,
    error: str | None,
    error_type: str | None,
    traceback: str | None,
) -> QueuePolicy:
    """Count and store a failure that its consumer reported; returns the policy of the queue."""
    queue_tx.counters.failed += 1
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    failures.record(
        queue_tx,
        policy,
        message,
        outcome,
        failed_ms=queue_tx.tx.now_ms,
        error=error,
        error_type=error_type,
        traceback=traceback,
    )
    return policy


def _mismatch(proof: MessageLease) -> QueueMessageLeaseMismatch:
    return QueueMessageLeaseMismatch(
        f"Message {proof.id} is not leased as {proof.lease_id} any more; stop working on it. It was settled, or its "
        "lease expired and it is delivered again"
    )


# Receives with an idempotency key: the ids and fences of the leased messages are stored under the key.
#
# A consumer that lost the response repeats the call and gets the messages it still leases, with the same fences.
# Messages whose lease expired or that were settled are left out, and no others are leased instead.


class _KeyedLease(msgspec.Struct, frozen=True, array_like=True):
    """The messages that were leased under a key."""

    messages: list[tuple[bytes, int]]  # Ids and fences.
    retried: bool = False  # The call was repeated, so its consumer has the messages.


_decode = msgspec.msgpack.Decoder(_KeyedLease).decode


def lease_keyed(
    tx: Transaction,
    queue: QueueKey,
    *,
    call: KeyedCall,
    owner: str,
    limit: int = 1,
    visibility_ms: int | None = None,
    txn_id: str | None = None,
    with_state: bool = False,
    prefetched: Prefetched | None = None,
) -> Leased:
    """`lease_or_wait`, or the messages that an earlier attempt still leases. An empty result is not stored."""
    before = stored_lease(tx, queue, call=call, with_state=with_state)
    if before is not None:
        return before
    leased = lease_or_wait(
        tx,
        queue,
        owner=owner,
        limit=limit,
        visibility_ms=visibility_ms,
        txn_id=txn_id,
        with_state=with_state,
        prefetched=prefetched,
    )
    if leased.messages:
        store_result(tx, call, _KeyedLease([(message.id, message.fence) for message in leased.messages]))
    return leased


def stored_lease(tx: Transaction, queue: QueueKey, *, call: KeyedCall, with_state: bool) -> Leased | None:
    """The messages that an earlier attempt of the call still leases; None if there was none."""
    before = stored_result(tx, call)
    if before is None:
        return None
    keyed = _decode(before)
    if not keyed.retried:
        store_result(tx, call, msgspec.structs.replace(keyed, retried=True))
    messages = [found for id, fence in keyed.messages if (found := _still_leased(tx, queue, id, fence)) is not None]
    states = [sidecars.read(tx, queue, message) if with_state else None for message in messages]
    failed = delivered_failures(tx, queue, messages)
    return Leased(messages, NEVER_MS, states, tx.events, repeated=True, failures=failed)


def release_undelivered(tx: Transaction, queue: QueueKey, leased: Leased, call: KeyedCall) -> list[tuple[Any, ...]]:
    """`defer_all` messages whose consumer disconnected, and forget its call; returns the events to publish.

    Does nothing if the consumer repeated the call on another connection, because it has the messages then.
    """
    return [] if leased.repeated or not abandon_receive(tx, call) else defer_all(tx, queue, leased.messages)


def abandon_receive(tx: Transaction, call: KeyedCall) -> bool:
    """Delete the stored result of a receive whose consumer disconnected; False if the call was repeated since."""
    before = read_result(tx, call)
    if before is None or _decode(before).retried:
        return False
    delete_result(tx, call)
    return True


def _still_leased(tx: Transaction, queue: QueueKey, id: bytes, fence: int) -> StoredMessage | None:
    keys = keys_of(queue)
    stored = tx.get(keys.parked_key(id))
    if stored is None:
        return None
    message = decode(stored)
    if message.owner is None or message.fence != fence or message.due_ms <= tx.now_ms:
        return None
    if message.has_body:
        message.payload = tx.get(keys.body_key(id))
    return message
