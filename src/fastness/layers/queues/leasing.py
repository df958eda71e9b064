"""Leasing: delivering messages. `settling` has what consumers do with them.

                 ┌────────── nack, or the lease ends ──────────┐
                 ▼                                             │
    put ──► ready ──► leased (fence + 1) ── ack ──► gone       │        cancel, in any state ──► gone
      │       ▲          │  └─ extend ─┘                        │
      └─ delayed         ├──── failures < max_attempts ─────────┘
              ▲          └──── failures = max_attempts, reject ──► dead letters ── redrive ──► ready
              └── nack with a delay, or as a failure with the back-off of the policy

What makes a dead letter is a rule of the policy: failures, as above; or deliveries, which a receive counts before the
next one; or only a reject.

A lease that expires counts as a failure, so a message that crashes its consumers becomes a dead letter too. A consumer
may settle its message after the lease's end until a transaction processes the expiry; then its fence is refused.

A power failure may undo a delivery after its consumer got it (`transact(..., may_lose=True)`): the message is ready
again, and its next fence is above the fence floor. It undoes nothing else: a transaction that also processed due
entries, or leased workflow states, is kept.
"""

from collections.abc import Iterator, Sequence
from typing import Required, TypedDict, Unpack

from fastness.kv import Pair, Transaction
from fastness.layers.queues import (
    dead_letters,
    groups,
    key_flow,
    locations,
    message_leases,
    sidecars,
    unique_keys,
)
from fastness.layers.queues.counters import NEVER_MS, QueueCounters, QueueTransaction
from fastness.layers.queues.expiry import process_due
from fastness.layers.queues.failures import (
    Failures,
    delivered_failures,
)
from fastness.layers.queues.keys import QueueKey, priority_at
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.policies import check_exists, kept_ms, policy_of, since_ms, takes_dead_letters
from fastness.layers.queues.rate_budgets import RateBudget
from fastness.layers.queues.settling import settle_packed
from fastness.limits import LEASE_CONTENT_BYTES_MAX, MESSAGES_MAX, PRIORITY_MAX
from fastness.plurals import counted
from fastness.wire.deliveries import delivery_of
from fastness.wire.queues import (
    Delivery,
    MessageLease,
    PackedAck,
    PackedLease,
    QueuePolicy,
    RefusedAck,
    SidecarState,
)
from fastness.wire.stored_messages import StoredHead, StoredMessage, decode, decode_head, format_id, put_at_ms

_FIRST = b"\x00"  # Before the place of every message.
PREFETCH_MAX = 64  # Messages that one scan reads and keeps for later deliveries.


class Prefetched:
    """Ready messages read before their delivery, so that most deliveries need no scan.

    They are valid while the queue's front directly precedes them and `order_version` is unchanged, that is, while no
    message became ready or was removed out of order. Both are in the counters and so part of the commit. Otherwise they
    are dropped.
    """

    __slots__ = ("fence_floor", "front", "messages", "order_version", "priority")

    def __init__(self) -> None:
        self.messages: list[Pair] = []  # Stored pairs in reverse order: the next one is last.
        self.order_version = -1
        self.priority = -1
        self.front = b""
        self.fence_floor = 0  # Another one means that counters may have been lost, and their versions repeat.


class Leased:
    """The result of a lease call: leases with their messages, and when to try again."""

    __slots__ = (
        "_messages",
        "blobs",
        "bodies",
        "failures",
        "leases",
        "more",
        "refused",
        "repeated",
        "retry_in_ms",
        "states",
    )

    def __init__(
        self,
        leases: list[HeldLease],
        retry_in_ms: int = NEVER_MS,
        *,
        repeated: bool = False,
        more: bool = False,
    ) -> None:
        self.leases = leases
        self.retry_in_ms = retry_in_ms
        self.repeated = repeated  # An earlier attempt of the same call leased them.
        self.more = more  # More messages are ready.
        self.states: list[SidecarState | None] = []  # The workflow states, if requested: one for each message.
        self.failures: Failures = {}  # Of the messages that have failed before.
        self.bodies: dict[bytes, bytes | None] = {}  # Payloads that are not stored with their messages, by id.
        self.refused: list[RefusedAck] = []  # Of the acks that came with the call.
        self.blobs: list[StoredHead] = []  # Messages whose payloads are blobs.
        self._messages: list[StoredMessage] | None = None

    @property
    def messages(self) -> list[StoredMessage]:
        """The messages with their payloads."""
        if self._messages is None:
            self._messages = [message for held in self.leases for message in held.messages()]
            for message in self._messages if self.bodies else ():
                message.payload = self.bodies.get(message.id, message.payload)
        return self._messages

    def proofs(self) -> list[MessageLease]:
        """What settles the messages."""
        return [MessageLease(format_id(each.id), each.lease_id, each.fence) for each in self.messages]

    def read_rest(self, queue_tx: QueueTransaction, heads: Sequence[StoredHead], *, with_state: bool) -> None:
        """Read what belongs to the messages and is stored apart from them."""
        tx, queue, has_failures = queue_tx.tx, queue_tx.queue, False
        for head in heads:
            if head.blob is not None:
                self.blobs.append(head)
            elif head.has_body:
                self.bodies[head.id] = tx.get(queue_tx.keys.body_key(head.id))
            has_failures = has_failures or head.has_failures
        if with_state:
            read = sidecars.read if self.repeated else sidecars.open
            self.states = [read(tx, queue, message) for message in self.messages]
        if has_failures:
            self.failures = delivered_failures(tx, queue, heads)


class LeaseOptions(TypedDict, total=False):
    """What a consumer requests from `lease_or_wait`."""

    owner: Required[str]
    limit: int
    visibility_ms: int | None
    txn_id: str | None
    with_state: bool
    must_exist: bool


def lease(
    tx: Transaction, queue: QueueKey, *, prefetched: Prefetched | None = None, **options: Unpack[LeaseOptions]
) -> list[StoredMessage]:
    """The messages of `lease_or_wait`."""
    return lease_or_wait(tx, queue, prefetched=prefetched, **options).messages


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
    acks: Sequence[PackedAck] = (),
    must_exist: bool = False,
) -> Leased:
    """Lease at most `limit` ready messages, the most urgent first, then the oldest. Before that, `ack_packed`.

    Raises:
        InvalidArgument: a position of `acks` is out of range.
        QueueNotFound: the queue does not exist, and `must_exist` is set.
    """
    queue_tx = QueueTransaction(tx, queue)
    policy = policy_of(tx, queue)
    if must_exist:
        check_exists(tx, queue, policy)
    refused, has_acked = settle_packed(queue_tx, acks) if acks else ([], False)
    changed = process_due(queue_tx) or has_acked
    if changed or with_state or acks:  # An ack that is repeated here may not be synced yet.
        tx.keep()
    heads: list[StoredHead] = []
    taken: list[bytes] = []
    has_jobs, removed = False, 0
    rate = None if policy.rate_per_second is None else RateBudget(queue_tx, policy.rate_per_second)
    allowed = 0 if policy.paused else limit if rate is None else rate.allowed(limit)
    more = True  # Whether more messages may be ready.
    while more and len(heads) < allowed and removed < MESSAGES_MAX:
        found, more = _next_ready(queue_tx, allowed - len(heads), prefetched)
        if found:
            changed = True
            jobs_found, removed_now = _take_ready(
                queue_tx, policy, found, prefetched, heads=heads, taken=taken, limit=allowed
            )
            has_jobs, removed = has_jobs or jobs_found, removed + removed_now
            # One with a key or a group may have made another one ready. Those of a group may leave others unused.
            more = more or has_jobs or removed > 0 or (policy.group_batches and len(heads) == allowed)
    leases: list[HeldLease] = []
    for run, lasts_ms in _runs(heads, taken, visibility_ms):
        held = message_leases.grant(
            queue_tx,
            heads[run],
            taken[run],
            owner=owner,
            txn_id=txn_id,
            lasts_ms=lasts_ms,
            with_state=with_state,
        )
        leases.append(held)
        if has_jobs:
            _begin_jobs(queue_tx, held, heads[run])
    for head in heads:
        queue_tx.emit("leased", head)
    if rate is not None:
        rate.spend(len(heads))
    if changed:
        queue_tx.save()
    rate_wait_ms = NEVER_MS if rate is None or policy.paused else rate.wait_ms()
    retry_in_ms = min(queue_tx.counters.next_due_ms - tx.now_ms, rate_wait_ms)
    if removed >= MESSAGES_MAX and len(heads) < allowed:
        retry_in_ms = 0  # Another transaction goes on.
    leased = Leased(leases, retry_in_ms, more=more if tx.writer else _most_urgent(queue_tx.counters.ready) >= 0)
    leased.refused = refused
    leased.read_rest(queue_tx, heads, with_state=with_state)
    return leased


def _take_ready(
    queue_tx: QueueTransaction,
    policy: QueuePolicy,
    found: Sequence[Pair],
    prefetched: Prefetched | None,
    *,
    heads: list[StoredHead],
    taken: list[bytes],
    limit: int,
) -> tuple[bool, int]:
    """Take ready messages, and append them to `heads` and `taken`.

    Returns whether one of them has job options, and how many were removed instead.

    Leaves the rest of them if a message of a key became ready that goes first, or if there are `limit` messages now:
    each may have brought others of its group.
    """
    tx, ready, first = queue_tx.tx, queue_tx.counters.ready, len(queue_tx.keys.ready)
    has_jobs, earliest = False, b""  # The first of the places of messages that became ready.
    over, removed = _Over(policy, tx.now_ms), 0
    for index, (key, stored) in enumerate(found):
        if (earliest and earliest < key[first:]) or len(heads) == limit:
            _return_ready(queue_tx, found[index:], prefetched)
            break
        tx.delete(key)
        priority = PRIORITY_MAX - key[first]
        ready[priority] = ready.get(priority, 0) - 1
        head = decode_head(stored)
        is_over = (over.has_rule or head.ttl_at_ms > 0) and over.removes(queue_tx, head, stored)
        if is_over:
            removed += 1
            if head.group is not None:
                earliest = _FIRST  # The next one of its group may be anywhere.
        else:
            heads.append(head)
            taken.append(stored)
            if policy.group_batches and head.group is not None:
                jobs_found, removed_now = _take_followers(
                    queue_tx, head, head.group, over, heads=heads, taken=taken, limit=limit
                )
                has_jobs, removed = has_jobs or jobs_found, removed + removed_now
        if head.job is not None:
            has_jobs = True
            if head.job.key is not None:
                place = key_flow.deliver(queue_tx, policy, head.job.key, is_over=is_over)
                earliest = min(earliest or place, place or earliest)
    return has_jobs, removed


def _take_followers(
    queue_tx: QueueTransaction,
    first: StoredHead,
    group: str,
    over: "_Over",
    *,
    heads: list[StoredHead],
    taken: list[bytes],
    limit: int,
) -> tuple[bool, int]:
    """Take the next messages of the group of a message that was just taken; the same as `_take_ready` returns."""
    has_jobs, removed, begin = False, 0, len(heads) - 1
    for stored in groups.take_followers(queue_tx, first, limit - len(heads)):
        head = decode_head(stored)
        if over.removes(queue_tx, head, stored):
            removed += 1
            continue
        heads.append(head)
        taken.append(stored)
        has_jobs = has_jobs or head.job is not None
    if len(heads) > begin + 1:
        groups.lease_together(queue_tx, group, [head.id for head in heads[begin:]])
    return has_jobs, removed


class _Over:
    """Which messages a receive removes instead of delivering them: they are kept no longer, or delivered too often."""

    __slots__ = ("_deliveries_max", "_now_ms", "_over_ms", "_policy", "_takes_dead_letters", "has_rule")

    def __init__(self, policy: QueuePolicy, now_ms: int) -> None:
        allowed_ms = kept_ms(policy)
        self._policy = policy
        self._takes_dead_letters: bool | None = None  # Read for the first message that needs it.
        self._now_ms = now_ms
        self._deliveries_max = policy.max_attempts if policy.dead_letter_rule == "deliveries" else NEVER_MS
        self._over_ms = -1 if allowed_ms is None else now_ms - allowed_ms
        # Whether the policy has a rule. Otherwise only messages with TTLs are looked at.
        self.has_rule = allowed_ms is not None or policy.dead_letter_rule == "deliveries"

    def removes(self, queue_tx: QueueTransaction, head: StoredHead, stored: bytes) -> bool:
        """Remove a message that was taken out, if it is one of these; whether it was."""
        if (
            not 0 < head.ttl_at_ms <= self._now_ms
            and head.attempts < self._deliveries_max
            and (self._over_ms < 0 or put_at_ms(head.id) > self._over_ms)
        ):
            return False
        message = decode(stored)
        if 0 < message.ttl_at_ms <= self._now_ms or since_ms(message) <= self._over_ms:
            dead_letters.expire_message(queue_tx, message)
        elif message.attempts >= self._deliveries_max and message.origin is None and self._can_move(queue_tx):
            message.last_error = message.last_error or (
                f"It was delivered {counted(message.attempts, 'time')} and not acknowledged"
            )
            dead_letters.dead_letter(queue_tx, message)
        else:
            return False
        queue_tx.tx.keep()
        return True

    def _can_move(self, queue_tx: QueueTransaction) -> bool:
        """Whether the dead letter queue takes messages. Otherwise they are delivered again, and counted."""
        if self._takes_dead_letters is None:
            self._takes_dead_letters = takes_dead_letters(queue_tx.tx, queue_tx.queue, self._policy)
        return self._takes_dead_letters


def _begin_jobs(queue_tx: QueueTransaction, held: HeldLease, heads: Sequence[StoredHead]) -> None:
    """Note where leased messages with job options are, and free the keys that they have until they are leased."""
    for position, head in enumerate(heads):
        if head.job is not None:
            locations.set_lease(queue_tx, head.id, held.ref(position))
            unique_keys.release_leased(queue_tx, head, head.job)


def _runs(heads: list[StoredHead], taken: list[bytes], visibility_ms: int | None) -> Iterator[tuple[slice, int]]:
    """Runs of messages for one lease each: all of them, unless they are too large or are leased for different times."""
    begin = size = 0
    for index, head in enumerate(heads):
        is_same = visibility_ms is not None or head.visibility_ms == heads[begin].visibility_ms
        size += len(taken[index])
        if not is_same or size > LEASE_CONTENT_BYTES_MAX:
            yield slice(begin, index), heads[begin].visibility_ms if visibility_ms is None else visibility_ms
            begin, size = index, len(taken[index])
    if heads:
        yield slice(begin, len(heads)), heads[begin].visibility_ms if visibility_ms is None else visibility_ms


def deliveries_of(leased: Leased) -> list[Delivery]:
    """The wire form of leased messages."""
    messages = leased.messages
    for message in messages if leased.bodies else ():
        message.payload = leased.bodies.get(message.id, message.payload)
    states = leased.states or [None] * len(messages)
    return [
        delivery_of(message, state, leased.failures.get(message.id))
        for message, state in zip(messages, states, strict=True)
    ]


def packed_of(leased: Leased) -> list[PackedLease]:
    """The wire form of leased messages, packed by lease."""
    packed = [held.packed() for held in leased.leases]
    if leased.bodies or leased.states or leased.failures:
        states = iter(leased.states)
        for lease in packed:
            for position in lease.positions:
                id = lease.id_at(position)
                if (body := leased.bodies.get(id)) is not None:
                    lease.bodies[position] = body
                if (state := next(states, None)) is not None:
                    lease.states[position] = state
                if id in leased.failures:
                    lease.failures[position] = leased.failures[id]
    return packed


def _next_ready(queue_tx: QueueTransaction, limit: int, prefetched: Prefetched | None) -> tuple[Sequence[Pair], bool]:
    """At most `limit` ready messages, in delivery order, and whether there may be more. Moves the front behind them."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if tx.writer:
        pairs = tx.scan(*keys.ready_range(), limit=limit + 1)
        return pairs[:limit], len(pairs) > limit
    priority = _most_urgent(counters.ready)
    if priority < 0:
        return (), False
    if prefetched is not None:
        if prefetched.fence_floor != tx.fence_floor:
            prefetched.messages.clear()
            prefetched.fence_floor = tx.fence_floor
        found = _take_prefetched(counters, priority, limit, prefetched)
        if found:
            return found, True
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
    return pairs, bool(pairs)


def _return_ready(queue_tx: QueueTransaction, pairs: Sequence[Pair], prefetched: Prefetched | None) -> None:
    """Leave the rest of what `_next_ready` found ready: a message that became ready may go first."""
    counters = queue_tx.counters
    if queue_tx.tx.writer:
        return
    place = pairs[0][0][len(queue_tx.keys.ready) :]
    priority = priority_at(place)
    counters.fronts[priority] = min(counters.fronts.get(priority, b""), place[1:])
    counters.order_version += 1
    if prefetched is not None:
        prefetched.messages.clear()


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
