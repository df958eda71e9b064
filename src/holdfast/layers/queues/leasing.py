"""Deliveries: leasing messages, and what becomes of them.

                 ┌────────── nack, or the lease ends ──────────┐
                 ▼                                             │
    put ──► ready ──► leased (fence + 1) ── ack ──► gone       │
      │       ▲          │  └─ extend ─┘                        │
      └─ delayed         ├──── failures < max_attempts ─────────┘
              ▲          └──── failures = max_attempts, reject ──► dead letters ── redrive ──► ready
              └── nack with a delay

A lease that ends counts as a failure, so that what kills its consumers becomes a dead letter too. A consumer that comes
late is heard as long as nobody has noticed that its lease ended; from then on its fence is an old one, and refused.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import InvalidArgument, QueueMessageLeaseMismatch
from holdfast.kv import Pair, Transaction
from holdfast.layers.idempotency import KeyedCall, forget_one, recall, recall_any, remember
from holdfast.layers.leases import check_owner
from holdfast.layers.queues import dead_letters, sidecars
from holdfast.layers.queues.admin import purge
from holdfast.layers.queues.counters import NEVER_MS, QueueCounters, QueueTransaction
from holdfast.layers.queues.dead_letters import redrive
from holdfast.layers.queues.expiry import process_due
from holdfast.layers.queues.keys import QueueKey, QueueKeys, StoredMessage, decode, delivery_of, id_of, keys_of, text_of
from holdfast.layers.queues.policies import policy_of
from holdfast.limits import ACK_MEMORY_SECONDS, DELAY_SECONDS_MAX, LAST_ERROR_BYTES_MAX, MESSAGES_MAX
from holdfast.wire.queues import Delivery, MessageLease, QueuePolicy, SidecarState

READ_AHEAD = 64  # Messages whose keys are remembered after a search.


class Ahead:
    """Ready messages that were read ahead of their delivery, so that the next one costs a look and not a search.

    They are what is stored for as long as the queue's front is the one that they follow, and no message became ready in
    front of others or was taken out of its turn since: all of that is in the tally, so it is part of what is committed.
    Otherwise they are forgotten.
    """

    __slots__ = ("disorder", "front", "messages", "priority")

    def __init__(self) -> None:
        self.messages: list[Pair] = []  # As they are stored; the next one last.
        self.disorder = -1
        self.priority = -1
        self.front = b""


class Leased(NamedTuple):
    """Messages that were leased, their workflow states if asked for, and when it is worth looking for more."""

    messages: list[StoredMessage]
    again_in_ms: int
    states: list[SidecarState | None]
    events: list[tuple[Any, ...]]  # What is to be told once it is committed.
    repeated: bool = False  # They were leased before, by the same call.
    more: bool = False  # Others are ready, too.


def lease(tx: Transaction, queue: QueueKey, *, owner: str, limit: int = 1, **options: Any) -> list[StoredMessage]:
    """Lease at most `limit` messages that are ready; `lease_or_wait` says more."""
    return lease_or_wait(tx, queue, owner=owner, limit=limit, **options).messages


def lease_or_wait(
    tx: Transaction,
    queue: QueueKey,
    *,
    owner: str,
    limit: int = 1,
    visibility_ms: int | None = None,
    txn_id: str | None = None,
    with_state: bool = False,
    ahead: Ahead | None = None,
) -> Leased:
    """Lease at most `limit` messages that are ready, the most urgent first, then the oldest.

    Raises:
        InvalidArgument: more than one batch may have.
    """
    check_owner(owner, txn_id)
    if not 0 < limit <= MESSAGES_MAX:
        raise InvalidArgument(f"One delivery has 1 to {MESSAGES_MAX} messages, not {limit}")
    queue_tx = QueueTransaction(tx, queue)
    policy = policy_of(tx, queue)
    changed = process_due(queue_tx)
    taken: list[StoredMessage] = []
    allowed = 0 if policy.paused else _within_rate(queue_tx, policy, limit)
    while len(taken) < allowed:
        found = _next(queue_tx, allowed - len(taken), ahead)
        if not found:
            break
        for message in found:
            queue_tx.take_ready(message, in_order=True)
            changed = True
            if message.ttl_at_ms and message.ttl_at_ms <= tx.now_ms:
                dead_letters.outlived(queue_tx, message)
                continue
            message.owner, message.txn_id = owner, txn_id
            message.due_ms = tx.now_ms + (message.visibility_ms if visibility_ms is None else visibility_ms)
            message.stateful = message.stateful or with_state
            _hand_over(queue_tx, message)
            taken.append(message)
    if policy.rate_per_second is not None:
        queue_tx.counters.budget -= len(taken)  # Not worth a commit by itself: it grows by the time alone.
    if changed:
        queue_tx.save()
    states: list[SidecarState | None] = [None] * len(taken)
    if with_state:
        states = [sidecars.open(tx, queue, message) for message in taken]
    more = _most_urgent(queue_tx.counters.ready) >= 0
    return Leased(taken, _again_in_ms(queue_tx, policy), states, tx.events, more=more)


def deliveries_of(leased: Leased) -> list[Delivery]:
    """Messages that were leased, in the words of the wire."""
    return [delivery_of(message, state) for message, state in zip(leased.messages, leased.states, strict=True)]


def ack(tx: Transaction, queue: QueueKey, proof: MessageLease) -> str | None:
    """Let a message go for good; its correlation id. Doing so twice with one lease is fine, and tells nothing.

    Raises:
        QueueMessageLeaseMismatch: somebody else has it by now, or it is gone by another way.
    """
    keys = keys_of(queue)
    message = _held(tx, keys, proof)
    if message is None:
        if _was_acked(tx, keys, proof):
            return None
        raise _mismatch(proof)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    queue_tx.counters.acked += 1
    tx.put(keys.ack_key(tx.now_ms // 60_000, message.id), message.fence.to_bytes(8, "big"))
    dead_letters.remove(queue_tx, message)
    queue_tx.save()
    queue_tx.emit("acked", message)
    return message.correlation_id


def nack(
    tx: Transaction,
    queue: QueueKey,
    proof: MessageLease,
    *,
    delay_seconds: float = 0.0,
    counts: bool = True,
    error: str | None = None,
) -> str:
    """Give a message back, to be delivered again after the delay; its correlation id.

    With `counts` it is a failure, and the last one that a message may have makes it a dead letter. Whoever has no
    `error` to tell of leaves the last one standing.

    Raises:
        QueueMessageLeaseMismatch: somebody else has it by now.
    """
    if not 0 <= delay_seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"delay_seconds is {delay_seconds}; choose 0 to {DELAY_SECONDS_MAX:.0f}")
    message = _require(tx, queue, proof)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    if counts:
        _note_failure(queue_tx, message, error)
    queue_tx.emit("nacked" if counts else "deferred", message)
    if counts and dead_letters.is_due(message):
        dead_letters.dead_letter(queue_tx, message)
    else:
        dead_letters.give_back(queue_tx, message, delay_ms=round(delay_seconds * 1_000))
    queue_tx.save()
    return message.correlation_id


def defer_all(tx: Transaction, queue: QueueKey, messages: Sequence[StoredMessage]) -> list[tuple[Any, ...]]:
    """Give back what was leased and never delivered, uncounted; what is to be told of it once it is committed."""
    for message in messages:
        with suppress(QueueMessageLeaseMismatch):
            nack(tx, queue, MessageLease(text_of(message.id), message.lease_id, message.fence), counts=False)
    return tx.events


def reject(tx: Transaction, queue: QueueKey, proof: MessageLease, *, error: str | None = None) -> str:
    """Make a message a dead letter at once; its correlation id.

    Raises:
        QueueMessageLeaseMismatch: somebody else has it by now.
    """
    message = _require(tx, queue, proof)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.unpark(message)
    _note_failure(queue_tx, message, error)
    if message.origin is None:
        dead_letters.dead_letter(queue_tx, message)
    else:  # Nothing dies twice.
        dead_letters.give_back(queue_tx, message, delay_ms=0)
    queue_tx.save()
    return message.correlation_id


def extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
    """Let a lease last at least `by_ms` from now; it never gets shorter.

    Raises:
        InvalidArgument: by nothing at all, which would end it while the message stays hidden.
        QueueMessageLeaseMismatch: somebody else has it by now.
    """
    if by_ms < 1:
        raise InvalidArgument("A lease is extended by 0.001 s at least; to give the message back, nack it")
    message = _require(tx, queue, proof)
    due_ms = tx.now_ms + by_ms
    if due_ms > message.due_ms:
        queue_tx = QueueTransaction(tx, queue)
        queue_tx.unpark(message)
        message.due_ms = due_ms
        queue_tx.park(message)
        sidecars.keep(tx, queue, message)
        queue_tx.save()
    return message


def check(tx: Transaction, queue: QueueKey, proof: MessageLease) -> None:
    """Raise QueueMessageLeaseMismatch unless the message is leased by this proof, and its time is not over."""
    if tx.now_ms >= _require(tx, queue, proof).due_ms:
        raise _mismatch(proof)


def _next(queue_tx: QueueTransaction, limit: int, ahead: Ahead | None) -> Sequence[StoredMessage]:
    """The next messages that are ready, at most `limit`."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if tx.writer:
        return [decode(value) for _, value in tx.scan(*keys.ready_range(), limit=limit)]
    priority = _most_urgent(counters.ready)
    if priority < 0:
        return ()
    if ahead is not None:
        found = _from_ahead(counters, priority, limit, ahead)
        if found:
            return found
    begin, end = keys.priority_range(priority, counters.fronts.get(priority, b""))
    pairs = tx.scan(begin, end, limit=limit if ahead is None else max(limit, READ_AHEAD))
    if ahead is not None:
        ahead.disorder, ahead.priority = counters.disorder, priority
        ahead.messages = pairs[limit:][::-1]
        pairs = pairs[:limit]
    if pairs:
        counters.fronts[priority] = pairs[-1][0][-16:] + b"\x00"
        if ahead is not None:
            ahead.front = counters.fronts[priority]
    return [decode(value) for _, value in pairs]


def _most_urgent(ready: dict[int, int]) -> int:
    """The highest priority that has a message; -1 if none has."""
    highest = -1
    for priority, count in ready.items():
        if count > 0 and priority > highest:
            highest = priority
    return highest


def _from_ahead(counters: QueueCounters, priority: int, limit: int, ahead: Ahead) -> list[StoredMessage]:
    messages = ahead.messages
    if (ahead.disorder, ahead.priority, ahead.front) != (
        counters.disorder,
        priority,
        counters.fronts.get(priority, b""),
    ):
        messages.clear()
    found: list[StoredMessage] = []
    while messages and len(found) < limit:
        key, value = messages.pop()
        found.append(decode(value))
        counters.fronts[priority] = ahead.front = key[-16:] + b"\x00"
    return found


def _hand_over(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    message.attempts += 1
    message.fence += 1
    queue_tx.park(message)
    queue_tx.counters.delivered += 1
    queue_tx.emit("leased", message)
    if message.has_body:
        message.payload = queue_tx.tx.get(queue_tx.keys.body_key(message.id))


def _held(tx: Transaction, keys: QueueKeys, proof: MessageLease) -> StoredMessage | None:
    """The message, if it is leased and the proof is that of its lease."""
    stored = tx.get(keys.parked_key(id_of(proof.id)))
    if stored is None:
        return None
    message = decode(stored)
    # The lease id is made of the id, by which it was found, and the fence.
    if message.owner is None or message.fence != proof.fence or message.lease_id != proof.lease_id:
        return None
    return message


def _require(tx: Transaction, queue: QueueKey, proof: MessageLease) -> StoredMessage:
    message = _held(tx, keys_of(queue), proof)
    if message is None:
        raise _mismatch(proof)
    return message


def _was_acked(tx: Transaction, keys: QueueKeys, proof: MessageLease) -> bool:
    id, minute = id_of(proof.id), tx.now_ms // 60_000
    for ago in range(ACK_MEMORY_SECONDS // 60 + 1):
        fence = tx.get(keys.acks.key(minute - ago) + id)
        if fence is not None:
            return int.from_bytes(fence, "big") == proof.fence and proof.lease_id == f"{id.hex()}-{proof.fence}"
    return False


def _again_in_ms(queue_tx: QueueTransaction, policy: QueuePolicy) -> int:
    """In how many milliseconds something may be there that is not there now."""
    again_in_ms = queue_tx.counters.next_due_ms - queue_tx.tx.now_ms
    if policy.rate_per_second is not None and not policy.paused and queue_tx.counters.budget < 1:
        wait_ms = (1 - queue_tx.counters.budget) / policy.rate_per_second * 1_000
        again_in_ms = min(again_in_ms, math.ceil(wait_ms))
    return again_in_ms


def _within_rate(queue_tx: QueueTransaction, policy: QueuePolicy, limit: int) -> int:
    """How many messages the queue's rate allows now, `limit` at most."""
    rate, counters = policy.rate_per_second, queue_tx.counters
    if rate is None:
        return limit
    passed_ms = max(queue_tx.tx.now_ms - counters.budget_ms, 0)
    # A queue that rested may deliver what it is allowed in one second at once, and one message in any case.
    counters.budget = min(counters.budget + passed_ms * rate / 1_000, max(rate, 1.0))
    counters.budget_ms = queue_tx.tx.now_ms
    return min(limit, int(counters.budget))


def _note_failure(queue_tx: QueueTransaction, message: StoredMessage, error: str | None) -> None:
    message.failures += 1
    queue_tx.counters.failed += 1
    if error is not None:  # What went wrong before says more than nothing.
        message.last_error = error.encode(errors="replace")[:LAST_ERROR_BYTES_MAX].decode(errors="ignore")


def _mismatch(proof: MessageLease) -> QueueMessageLeaseMismatch:
    return QueueMessageLeaseMismatch(
        f"Message {proof.id} is not leased as {proof.lease_id} any more; whoever has it now will settle it, so stop"
    )


# Repeated calls: what is stored for a call that may be sent again, where the answer alone is not enough.
#
#     receive          the ids and fences of the leased messages, and whether the call was repeated
#     purge, redrive   progress: these take many commits, and a repeated call resumes after the last one
#
# A consumer that lost the answer gets the messages it still leases, with the same fences. Messages whose lease ended
# or that were settled are left out, and no others are leased instead: one call leases once.


class _Taken(msgspec.Struct, frozen=True, array_like=True):
    """What was leased under a key."""

    messages: list[tuple[bytes, int]]
    asked_again: bool = False


_decode = msgspec.msgpack.Decoder(_Taken).decode


def lease_once(
    tx: Transaction, queue: QueueKey, *, call: KeyedCall, with_state: bool = False, **options: Any
) -> Leased:
    """`lease_or_wait`, or what is left of that if it was done before. To have found nothing is to have done nothing."""
    before = leased_before(tx, queue, call=call, with_state=with_state)
    if before is not None:
        return before
    leased = lease_or_wait(tx, queue, with_state=with_state, **options)
    if leased.messages:
        remember(tx, call, _Taken([(message.id, message.fence) for message in leased.messages]))
    return leased


def leased_before(tx: Transaction, queue: QueueKey, *, call: KeyedCall, with_state: bool) -> Leased | None:
    """What is left of what a call has leased before; None if it has not."""
    before = recall(tx, call)
    if before is None:
        return None
    taken = _decode(before)
    if not taken.asked_again:
        remember(tx, call, msgspec.structs.replace(taken, asked_again=True))
    messages = [found for id, fence in taken.messages if (found := _still_leased(tx, queue, id, fence)) is not None]
    states = [sidecars.look(tx, queue, message) if with_state else None for message in messages]
    return Leased(messages, NEVER_MS, states, tx.events, repeated=True)


def give_back_once(tx: Transaction, queue: QueueKey, leased: Leased, call: KeyedCall) -> list[tuple[Any, ...]]:
    """`defer_all` what was leased for a consumer that is gone, as if its call had never been; unless it has asked
    again, on another connection, and has these messages now. What is to be told of it once it is committed."""
    return [] if leased.repeated or not give_up(tx, call) else defer_all(tx, queue, leased.messages)


def give_up(tx: Transaction, call: KeyedCall) -> bool:
    """Forget a receive whose consumer is gone, as if it had never been; whether it is, and has not asked again."""
    before = recall_any(tx, call)
    if before is None or _decode(before).asked_again:
        return False
    forget_one(tx, call)
    return True


class Purged(msgspec.Struct, frozen=True, array_like=True):
    """How far a purge came, and where it goes on; None at its end."""

    count: int = 0
    after: bytes | None = b""


class Redriven(msgspec.Struct, frozen=True, array_like=True):
    """How far a redrive came: how many letters were put back, and how many it has looked for."""

    count: int = 0
    tried: int = 0
    is_over: bool = False


_decode_purged = msgspec.msgpack.Decoder(Purged).decode
_decode_redriven = msgspec.msgpack.Decoder(Redriven).decode


def purge_on(
    tx: Transaction, queue: QueueKey, so_far: Purged, call: KeyedCall | None
) -> tuple[Purged, list[tuple[Any, ...]]]:
    """The next part of a purge that came `so_far`, or as far as is remembered of it; and what is to be told of it."""
    before = None if call is None else recall(tx, call)
    so_far = so_far if before is None else _decode_purged(before)
    if so_far.after is None:
        return so_far, []
    count, after = purge(tx, queue, after=so_far.after, limit=MESSAGES_MAX)
    so_far = Purged(so_far.count + count, after)
    if call is not None:
        remember(tx, call, so_far)
    return so_far, tx.events


def redrive_on(
    tx: Transaction, queue: QueueKey, so_far: Redriven, call: KeyedCall | None, *, ids: Sequence[str] | None, limit: int
) -> tuple[Redriven, list[tuple[Any, ...]]]:
    """The next part of a redrive that came `so_far`, or as far as is remembered of it; and what is to be told of it."""
    before = None if call is None else recall(tx, call)
    so_far = so_far if before is None else _decode_redriven(before)
    asked = limit if ids is None else len(ids)
    size = min(MESSAGES_MAX, asked - so_far.tried)
    if so_far.is_over or size < 1:
        return msgspec.structs.replace(so_far, is_over=True), []
    batch = None if ids is None else ids[so_far.tried : so_far.tried + size]
    count = redrive(tx, queue, ids=batch, limit=size)
    tried = so_far.tried + size
    so_far = Redriven(so_far.count + count, tried, tried >= asked or (ids is None and count < size))
    if call is not None:
        remember(tx, call, so_far)
    return so_far, tx.events


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
