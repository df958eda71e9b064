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
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, InvalidArgument, QueueMessageLeaseMismatch
from holdfast.kv import Pair, Transaction
from holdfast.layers.idempotency import KeyedCall, delete_result, read_result, store_result, stored_result
from holdfast.layers.leases import check_owner
from holdfast.layers.queues import dead_letters, failures, message_leases, sidecars
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
from holdfast.layers.queues.keys import QueueKey, StoredHead, StoredMessage, decode, decode_head, format_id
from holdfast.layers.queues.message_leases import LEASE_BYTES, HeldLease, HeldLeases, mismatch
from holdfast.layers.queues.policies import policy_of
from holdfast.limits import DELAY_SECONDS_MAX, LEASE_CONTENT_BYTES_MAX, MESSAGES_MAX, PRIORITY_MAX
from holdfast.wire.queues import Delivery, MessageLease, QueuePolicy, SidecarState

PREFETCH_MAX = 64  # Messages that one scan reads and keeps for later deliveries.


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


class Leased:
    """The result of a lease call: messages, their workflow states if requested, and when to try again."""

    __slots__ = ("events", "failures", "leases", "messages", "more", "repeated", "retry_in_ms", "states")

    def __init__(
        self,
        messages: list[StoredMessage],
        retry_in_ms: int = NEVER_MS,
        states: list[SidecarState | None] | None = None,
        events: list[tuple[Any, ...]] | None = None,
        *,
        repeated: bool = False,
        more: bool = False,
        failures: Failures | None = None,
    ) -> None:
        self.messages = messages
        self.retry_in_ms = retry_in_ms
        self.states: list[SidecarState | None] = [None] * len(messages) if states is None else states
        self.events = events or []  # To publish after the commit.
        self.repeated = repeated  # An earlier attempt of the same call leased them.
        self.more = more  # More messages are ready.
        self.failures = failures  # Of the messages that have failed before.
        self.leases = list(dict.fromkeys(message.lease_ref[:LEASE_BYTES] for message in messages))


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
    delivery = _NextDelivery(queue_tx, owner, txn_id, visibility_ms, with_state)
    allowed = 0 if policy.paused else _allowed_by_rate(queue_tx, policy, limit)
    while delivery.count < allowed:
        found = _take_ready(queue_tx, allowed - delivery.count, prefetched)
        if not found:
            break
        changed = True
        for stored in found:
            head = decode_head(stored)
            if head.ttl_at_ms and head.ttl_at_ms <= tx.now_ms:
                dead_letters.expire_message(queue_tx, decode(stored))
            else:
                delivery.add(head, stored)
    messages = delivery.complete()
    if policy.rate_per_second is not None:
        queue_tx.counters.budget -= len(messages)  # A refilled budget alone is not committed: it follows from the time.
    if changed:
        queue_tx.save()
    states: list[SidecarState | None] | None = None
    if with_state:
        states = [sidecars.open(tx, queue, message) for message in messages]
    more = _most_urgent(queue_tx.counters.ready) >= 0
    failed = delivered_failures(tx, queue, messages) if any(message.has_failures for message in messages) else None
    retry_in_ms = _retry_in_ms(queue_tx, policy)
    return Leased(messages, retry_in_ms, states, tx.events, more=more, failures=failed)


class _NextDelivery:
    """The messages of a delivery, and their leases: one for all, unless they are too large or last differently."""

    def __init__(
        self,
        queue_tx: QueueTransaction,
        owner: str,
        txn_id: str | None,
        visibility_ms: int | None,
        with_state: bool,
    ) -> None:
        self.count = 0
        self._queue_tx = queue_tx
        self._owner = owner
        self._txn_id = txn_id
        self._visibility_ms = visibility_ms
        self._with_state = with_state
        self._heads: list[StoredHead] = []
        self._stored: list[bytes] = []
        self._size = 0
        self._lasts_ms = 0
        self._leases: list[HeldLease] = []

    def add(self, head: StoredHead, stored: bytes) -> None:
        """Add a message that was removed from the ready ones."""
        lasts_ms = head.visibility_ms if self._visibility_ms is None else self._visibility_ms
        if self._heads and (lasts_ms != self._lasts_ms or self._size + len(stored) > LEASE_CONTENT_BYTES_MAX):
            self._grant()
        self._lasts_ms = lasts_ms
        self._heads.append(head)
        self._stored.append(stored)
        self._size += len(stored)
        self.count += 1

    def complete(self) -> list[StoredMessage]:
        """Grant the leases; returns the messages with their payloads."""
        if self._heads:
            self._grant()
        queue_tx, messages = self._queue_tx, list[StoredMessage]()
        for held in self._leases:
            for message in message_leases.messages_of(queue_tx.tx, queue_tx.keys, held):
                queue_tx.emit("leased", message)
                if message.has_body:
                    message.payload = queue_tx.tx.get(queue_tx.keys.body_key(message.id))
                messages.append(message)
        return messages

    def _grant(self) -> None:
        held = message_leases.grant(
            self._queue_tx,
            self._heads,
            self._stored,
            owner=self._owner,
            txn_id=self._txn_id,
            lasts_ms=self._lasts_ms,
            with_state=self._with_state,
            fence_floor=0,
        )
        self._queue_tx.counters.delivered += len(self._heads)
        self._leases.append(held)
        self._heads, self._stored, self._size = [], [], 0


def deliveries_of(leased: Leased) -> list[Delivery]:
    """The wire form of leased messages."""
    failed = leased.failures or {}
    return [
        delivery_of(message, state, failed.get(message.id))
        for message, state in zip(leased.messages, leased.states, strict=True)
    ]


def ack(tx: Transaction, queue: QueueKey, proof: MessageLease) -> str:
    """Remove a leased message for good, unless this lease acknowledged it before; returns its correlation id.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    outcome = ack_many(tx, queue, [proof])[0]
    if isinstance(outcome, HoldfastError):
        raise outcome
    return outcome


def ack_many(tx: Transaction, queue: QueueKey, proofs: Sequence[MessageLease]) -> list[str | HoldfastError]:
    """`ack` several messages; returns the correlation id of each, or why it was refused."""
    queue_tx = QueueTransaction(tx, queue)
    held_leases = HeldLeases(queue_tx)
    outcomes: list[str | HoldfastError] = []
    for proof in proofs:
        try:
            outcomes.append(_ack(queue_tx, held_leases, proof))
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            outcomes.append(error)
    if held_leases.save():
        queue_tx.save()
    return outcomes


def _ack(queue_tx: QueueTransaction, held_leases: HeldLeases, proof: MessageLease) -> str:
    tx, keys = queue_tx.tx, queue_tx.keys
    found = held_leases.find(proof)
    if found is None:
        before = message_leases.acked_before(tx, keys, proof)
        if before is None:
            raise mismatch(proof)
        return before
    held, position = found
    if held.acked >> position & 1:
        return held.correlation_id(tx, keys, position)
    held.acked |= 1 << position
    held_leases.change(held)
    queue_tx.counters.leased -= 1
    queue_tx.counters.acked += 1
    message = held.message(tx, keys, position)
    if not held.record.is_plain:
        dead_letters.remove(queue_tx, message)
    queue_tx.emit("acked", message)
    return message.correlation_id


def _take(queue_tx: QueueTransaction, proof: MessageLease) -> StoredMessage:
    """Take a message out of its lease.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    held, position = _unsettled(HeldLeases(queue_tx).find(proof), proof)
    message = held.message(queue_tx.tx, queue_tx.keys, position)
    held.left |= 1 << position
    held.save(queue_tx)
    queue_tx.counters.leased -= 1
    return message


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
    queue_tx = QueueTransaction(tx, queue)
    message = _take(queue_tx, proof)
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
    queue_tx = QueueTransaction(tx, queue)
    message = _take(queue_tx, proof)
    _record_failure(queue_tx, message, REJECTED, error=error, error_type=error_type, traceback=traceback)
    if makes_dead_letter(message, REJECTED):
        dead_letters.dead_letter(queue_tx, message)
    else:  # It is a dead letter already.
        queue_tx.emit("nacked", message)
        dead_letters.requeue(queue_tx, message, delay_ms=0)
    queue_tx.save()
    return message.correlation_id


def extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
    """Extend the lease of a message to at least `by_ms` from now. It never gets shorter.

    Raises:
        InvalidArgument: `by_ms` is not positive.
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    outcome = extend_many(tx, queue, [proof], by_ms=by_ms)[0]
    if isinstance(outcome, HoldfastError):
        raise outcome
    return outcome


def extend_many(
    tx: Transaction, queue: QueueKey, proofs: Sequence[MessageLease], *, by_ms: int
) -> list[StoredMessage | HoldfastError]:
    """`extend` several messages; returns each as it is leased now, or why it was refused.

    Messages that are all that is left of a lease keep it, and the lease is extended. Others leave it.
    """
    if by_ms < 1:
        raise InvalidArgument("A lease is extended by at least 0.001 s; to return the message to the queue, nack it")
    queue_tx, due_ms = QueueTransaction(tx, queue), tx.now_ms + by_ms
    held_leases = HeldLeases(queue_tx)
    found: list[tuple[HeldLease, int] | HoldfastError] = []
    for proof in proofs:
        try:
            found.append(_unsettled(held_leases.find(proof), proof))
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            found.append(error)
    extended: dict[bytes, tuple[HeldLease, set[int]]] = {}
    for each in found:
        if not isinstance(each, HoldfastError):
            held, position = each
            extended.setdefault(held.id, (held, set()))[1].add(position)
    outcomes = [
        each if isinstance(each, HoldfastError) else each[0].message(tx, queue_tx.keys, each[1]) for each in found
    ]
    for held, positions in extended.values():
        if due_ms > held.record.due_ms:
            _extend(queue_tx, held, positions, due_ms)
    for outcome in outcomes:
        if isinstance(outcome, StoredMessage) and due_ms > outcome.due_ms:
            outcome.due_ms = due_ms
            sidecars.extend(tx, queue, outcome)
    if extended:
        queue_tx.save()
    return outcomes


def _extend(queue_tx: QueueTransaction, held: HeldLease, positions: set[int], due_ms: int) -> None:
    if positions.issuperset(held.remaining()):
        held.move(queue_tx, due_ms)
        return
    for position in positions:
        held.separate(queue_tx, position, due_ms)
    held.save(queue_tx)


def check(tx: Transaction, queue: QueueKey, proof: MessageLease) -> None:
    """Raise QueueMessageLeaseMismatch unless the message is leased by `proof` and the lease has not expired."""
    held, _ = _unsettled(HeldLeases(QueueTransaction(tx, queue)).find(proof), proof)
    if tx.now_ms >= held.record.due_ms:
        raise mismatch(proof)


def _unsettled(found: tuple[HeldLease, int] | None, proof: MessageLease) -> tuple[HeldLease, int]:
    if found is None or found[0].acked >> found[1] & 1:
        raise mismatch(proof)
    return found


def _take_ready(queue_tx: QueueTransaction, limit: int, prefetched: Prefetched | None) -> list[bytes]:
    """Remove at most `limit` ready messages in delivery order, and move the front behind them; their records."""
    delete, ready, first = queue_tx.tx.delete, queue_tx.counters.ready, len(queue_tx.keys.ready)
    pairs = _next_ready(queue_tx, limit, prefetched)
    for key, _ in pairs:
        delete(key)
        priority = PRIORITY_MAX - key[first]
        ready[priority] = ready.get(priority, 0) - 1
    return [stored for _, stored in pairs]


def _next_ready(queue_tx: QueueTransaction, limit: int, prefetched: Prefetched | None) -> Sequence[Pair]:
    """At most `limit` ready messages, in delivery order. Moves the front behind them."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if tx.writer:
        return tx.scan(*keys.ready_range(), limit=limit)
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
    return pairs


def _most_urgent(ready: dict[int, int]) -> int:
    """The highest priority with a ready message; -1 if there is none."""
    highest = -1
    for priority, count in ready.items():
        if count > 0 and priority > highest:
            highest = priority
    return highest


def _take_prefetched(counters: QueueCounters, priority: int, limit: int, prefetched: Prefetched) -> list[Pair]:
    messages = prefetched.messages
    if (prefetched.order_version, prefetched.priority, prefetched.front) != (
        counters.order_version,
        priority,
        counters.fronts.get(priority, b""),
    ):
        messages.clear()
    found: list[Pair] = []
    while messages and len(found) < limit:
        found.append(messages.pop())
    if found:
        counters.fronts[priority] = prefetched.front = found[-1][0][-16:] + b"\x00"
    return found


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


# Receives with an idempotency key: the leases are stored under the key.
#
# A consumer that lost the response repeats the call and gets the messages it still leases, with the same fences.
# Messages whose lease expired or that were settled are left out, and no others are leased instead.


class _KeyedLease(msgspec.Struct, frozen=True, array_like=True):
    """The leases that were granted under a key."""

    leases: list[bytes]
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
        store_result(tx, call, _KeyedLease(leased.leases))
    return leased


def stored_lease(tx: Transaction, queue: QueueKey, *, call: KeyedCall, with_state: bool) -> Leased | None:
    """The messages that an earlier attempt of the call still leases; None if there was none."""
    before = stored_result(tx, call)
    if before is None:
        return None
    keyed = _decode(before)
    if not keyed.retried:
        store_result(tx, call, msgspec.structs.replace(keyed, retried=True))
    messages = _still_leased(QueueTransaction(tx, queue), keyed.leases)
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


def _still_leased(queue_tx: QueueTransaction, leases: Sequence[bytes]) -> list[StoredMessage]:
    tx, keys, found = queue_tx.tx, queue_tx.keys, list[StoredMessage]()
    for id in leases:
        held = message_leases.load(tx, keys, id)
        for position in range(MESSAGES_MAX if held is None else len(held.record)):
            if held is None or held.left >> position & 1:
                own = message_leases.load(tx, keys, id + bytes((position,)))
                found += [] if own is None else message_leases.messages_of(tx, keys, own)
            elif not held.acked >> position & 1:
                found.append(held.message(tx, keys, position))
    messages = [message for message in found if tx.now_ms < message.due_ms]
    for message in messages:
        if message.has_body:
            message.payload = tx.get(keys.body_key(message.id))
    return messages
