"""Random histories of a queue and its dead letters match a plain Python model, on every backend.

The model has messages in dicts, an order by sorting, and a manual clock. It has no keys, fronts, due entries or
counters; after every step the stored data must agree with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import IdSource
from fastness.errors import QueueInUse, QueueMessageLeaseMismatch
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import queues
from fastness.layers.queues import Prefetched, QueueKey, StoredMessage, message_leases
from fastness.layers.queues.counters import load_counters
from fastness.plane.sharing import share_queues
from fastness.plurals import counted
from fastness.testing.clock import ManualClock
from fastness.wire import stored_messages
from fastness.wire.deliveries import delivery_at
from fastness.wire.queues import (
    Failure,
    MessageEvent,
    MessageLease,
    NewMessage,
    PackedAck,
    PackedLease,
    PutMessages,
    QueuePolicy,
    Receipt,
    RefusedAck,
    bits_of,
    positions_in,
)

IDEMPOTENCY_MS = 300_000  # Five minutes.
ACK_MEMORY_MS = 300_000
INLINE_BYTES = 1_024  # A longer payload has a record of its own.
MESSAGES_MAX = 30  # Each has at most two due entries, and one transaction processes 64.


# The model.


@dataclass
class ModelMessage:
    """A message in the model."""

    id: str
    payload: bytes
    priority: int
    group: str | None
    correlation_id: str
    created_ms: int
    max_attempts: int
    visibility_ms: int
    retry_delay_ms: int | None
    ttl_at_ms: int | None
    delayed_until_ms: int
    state: str = ""  # ready, delayed, leased or blocked
    attempts: int = 0
    failures: int = 0
    fence: int = 0
    last_error: str | None = None
    origin: str | None = None
    died_ms: int = 0
    owner: str | None = None
    leased_ms: int = 0
    expires_ms: int = 0
    history: list[Failure] = field(default_factory=list)


@dataclass
class ModelQueue:
    """One queue of the model: messages by id, group heads, and totals."""

    name: str
    messages: dict[str, ModelMessage] = field(default_factory=dict)
    group_heads: dict[str, str] = field(default_factory=dict)
    acked: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # Id to fence, time and correlation id.
    put: int = 0
    delivered: int = 0
    failed: int = 0
    expired: int = 0
    dead_lettered: int = 0

    def at(self, state: str) -> list[ModelMessage]:
        """The messages in a state, in delivery order: the most urgent first, then the oldest."""
        return sorted(
            (each for each in self.messages.values() if each.state == state), key=lambda each: (-each.priority, each.id)
        )


class Model:
    """The model: a queue, its dead letter queue, and all operations on them."""

    def __init__(self, name: str, clock: ManualClock) -> None:
        self.clock = clock
        self.policy = QueuePolicy()
        self.jobs, self.dead = ModelQueue(name), ModelQueue(f"{name}.dlq")
        self.keys: dict[str, tuple[str, int]] = {}  # Idempotency key to message and time.

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def put(self, new: NewMessage, receipt: Receipt) -> None:
        first = self.keys.get(new.idempotency_key or "")
        if first is not None and self.now_ms < first[1] + IDEMPOTENCY_MS:
            assert (receipt.id, receipt.duplicate) == (first[0], True)
            return
        assert not receipt.duplicate
        assert receipt.correlation_id == (new.correlation_id or receipt.id)
        if new.idempotency_key is not None:
            self.keys[new.idempotency_key] = (receipt.id, self.now_ms)
        ttl = self.policy.retention_seconds if new.ttl_seconds is None else new.ttl_seconds
        visibility = self.policy.visibility_seconds if new.visibility_seconds is None else new.visibility_seconds
        message = ModelMessage(
            id=receipt.id,
            payload=new.payload,
            priority=new.priority,
            group=new.group,
            correlation_id=receipt.correlation_id,
            created_ms=self.now_ms,
            max_attempts=self.policy.max_attempts if new.max_attempts is None else new.max_attempts,
            visibility_ms=round(visibility * 1_000),
            retry_delay_ms=None if new.retry_delay_seconds is None else round(new.retry_delay_seconds * 1_000),
            ttl_at_ms=None if ttl is None else self.now_ms + round(ttl * 1_000),
            delayed_until_ms=self.now_ms
            + round((self.policy.delay_seconds if new.delay_seconds is None else new.delay_seconds) * 1_000),
        )
        self.jobs.put += 1
        self.insert(self.jobs, message)

    def insert(self, model_queue: ModelQueue, message: ModelMessage) -> None:
        """Insert it as blocked, delayed or ready."""
        model_queue.messages[message.id] = message
        message.owner = None
        in_order = message.group is not None and message.origin is None
        if in_order and model_queue.group_heads.setdefault(str(message.group), message.id) != message.id:
            message.state = "blocked"
        else:
            message.state = "delayed" if message.delayed_until_ms > self.now_ms else "ready"

    def remove(self, model_queue: ModelQueue, message: ModelMessage) -> None:
        """Remove it from this queue, and advance its group."""
        del model_queue.messages[message.id]
        if message.group is None or model_queue.group_heads.get(message.group) != message.id:
            return
        del model_queue.group_heads[message.group]
        successors = [
            each for each in model_queue.messages.values() if each.group == message.group and each.state == "blocked"
        ]
        if successors:
            self.insert(model_queue, min(successors, key=lambda each: each.id))

    def process_due(self, model_queue: ModelQueue) -> None:
        """Process what is due."""
        now_ms = self.now_ms
        for message in sorted(model_queue.messages.values(), key=lambda each: each.id):
            if message.state == "leased" and message.expires_ms <= now_ms:
                model_queue.expired += 1
                error = f"The lease of {message.owner} ended before it was settled"
                self.fail(model_queue, message, "expired", message.expires_ms, {"error": error}, delay_ms=0)
            elif message.state == "delayed" and message.delayed_until_ms <= now_ms:
                message.state = "ready"
        for message in list(model_queue.messages.values()):
            if message.id in model_queue.messages and message.state != "leased" and self.is_expired(message):
                self.remove(model_queue, message)

    def is_expired(self, message: ModelMessage) -> bool:
        return message.ttl_at_ms is not None and message.ttl_at_ms <= self.now_ms

    def policy_of(self, model_queue: ModelQueue) -> QueuePolicy:
        return self.policy if model_queue is self.jobs else QueuePolicy()

    def record(
        self,
        model_queue: ModelQueue,
        message: ModelMessage,
        outcome: str,
        failed_ms: int,
        options: dict[str, Any],
    ) -> None:
        """Count a failure, and keep it with the newest ones."""
        message.failures += 1
        error, kind = options.get("error"), options.get("error_type")
        reason = ": ".join(part for part in (kind, error) if part is not None)
        message.last_error = reason or message.last_error
        failure = Failure(
            message.attempts,
            str(message.owner),
            outcome,
            message.leased_ms,
            failed_ms,
            kind,
            error,
            options.get("traceback"),
        )
        kept = self.policy_of(model_queue).failures_kept
        message.history = [*message.history, failure][-kept:] if kept else []

    def back_off_ms(self, model_queue: ModelQueue, message: ModelMessage) -> tuple[float, float]:
        """The shortest and the longest back-off after the next failure."""
        policy = self.policy_of(model_queue)
        first = policy.retry_delay_seconds if message.retry_delay_ms is None else message.retry_delay_ms / 1_000
        longest = min(first * policy.retry_factor**message.failures, policy.retry_delay_max_seconds) * 1_000
        return longest * (1 - policy.retry_jitter), longest * (1 + policy.retry_jitter)

    def fail(
        self,
        model_queue: ModelQueue,
        message: ModelMessage,
        outcome: str,
        failed_ms: int,
        options: dict[str, Any],
        *,
        delay_ms: int,
    ) -> None:
        self.record(model_queue, message, outcome, failed_ms, options)
        if self.is_exhausted(model_queue, message):
            self.dead_letter(model_queue, message)
        else:
            self.requeue(model_queue, message, delay_ms)

    def is_exhausted(self, model_queue: ModelQueue, message: ModelMessage, more: int = 0) -> bool:
        """Whether so many failures more make it a dead letter."""
        by_failures = self.policy_of(model_queue).dead_letter_rule == "failures"
        return by_failures and message.origin is None and message.failures + more >= message.max_attempts

    def reject(self, model_queue: ModelQueue, message: ModelMessage, options: dict[str, Any]) -> None:
        """Dead-letter it at once; for a dead letter this is one more failure."""
        if message.origin is None:
            self.record(model_queue, message, "rejected", self.now_ms, options)
            self.dead_letter(model_queue, message)
        else:
            self.fail(model_queue, message, "rejected", self.now_ms, options, delay_ms=0)

    def requeue(self, model_queue: ModelQueue, message: ModelMessage, delay_ms: int) -> None:
        if self.is_expired(message):
            self.remove(model_queue, message)
            return
        message.delayed_until_ms = self.now_ms + delay_ms
        self.insert(model_queue, message)

    def dead_letter(self, model_queue: ModelQueue, message: ModelMessage) -> None:
        assert message.origin is None, "a dead letter never dies again"
        model_queue.dead_lettered += 1
        self.remove(model_queue, message)
        message.origin, message.died_ms = model_queue.name, self.now_ms
        message.ttl_at_ms = self.now_ms + round(self.policy.dead_letter_retention_seconds * 1_000)
        message.delayed_until_ms = 0
        self.insert(self.dead, message)

    def lease(
        self, model_queue: ModelQueue, *, owner: str, limit: int, visibility_ms: int | None
    ) -> list[ModelMessage]:
        self.process_due(model_queue)
        if model_queue is self.jobs and self.policy.paused:
            return []
        chosen: list[ModelMessage] = []
        while len(chosen) < limit and (ready := model_queue.at("ready")):
            message, policy = ready[0], self.policy_of(model_queue)
            is_counted = policy.dead_letter_rule == "deliveries" and message.origin is None
            if is_counted and message.attempts >= policy.max_attempts:  # The next one of its group is ready then.
                delivered = counted(message.attempts, "time")
                message.last_error = message.last_error or f"It was delivered {delivered} and not acknowledged"
                self.dead_letter(model_queue, message)
                continue
            chosen.append(message)
            message.state, message.owner, message.leased_ms = "leased", owner, self.now_ms
            message.expires_ms = self.now_ms + (message.visibility_ms if visibility_ms is None else visibility_ms)
            message.attempts += 1
            message.fence += 1
            model_queue.delivered += 1
        return chosen

    def redrive(self, ids: list[str] | None, limit: int) -> int:
        ready = self.dead.at("ready")
        letters = ready[:limit] if ids is None else [each for each in ready if each.id in ids]
        for message in sorted(letters, key=lambda each: each.id):  # Keeps the order within a group.
            self.remove(self.dead, message)
            message.origin, message.died_ms, message.failures = None, 0, 0
            if self.policy.dead_letter_rule != "failures":
                message.attempts = 0
            retention = self.policy.retention_seconds
            message.ttl_at_ms = None if retention is None else self.now_ms + round(retention * 1_000)
            message.delayed_until_ms = 0
            self.insert(self.jobs, message)
        return len(letters)

    def due_times(self) -> list[int]:
        """All due times in the model."""
        due_times = [
            time_ms
            for model_queue in (self.jobs, self.dead)
            for each in model_queue.messages.values()
            for time_ms in (each.expires_ms if each.state == "leased" else each.delayed_until_ms, each.ttl_at_ms or 0)
        ]
        return sorted({time_ms for time_ms in due_times if time_ms > self.now_ms})


# Strategies.

seconds = st.sampled_from((0.001, 0.5, 1.0, 2.0, 5.0, 30.0))
news = st.builds(
    NewMessage,
    payload=st.binary(max_size=4) | st.sampled_from((INLINE_BYTES, INLINE_BYTES + 1, 3_000)).map(lambda n: b"\x07" * n),
    priority=st.sampled_from((5, 5, 5, 0, 9)),
    group=st.sampled_from((None, None, None, "a", "a", "b")),
    delay_seconds=st.sampled_from((None, None, 0.0, 0.5, 2.0)),
    ttl_seconds=st.sampled_from((None, None, None, 0.001, 1.0, 5.0)),
    max_attempts=st.none() | st.integers(1, 3),
    visibility_seconds=st.none() | seconds,
    retry_delay_seconds=st.sampled_from((None, None, 0.0, 0.5, 40.0)),
    idempotency_key=st.sampled_from((None, None, None, None, "k", "l")),
    correlation_id=st.none() | st.just("because"),
)
owners = st.sampled_from(("ada", "bob", "eve"))
reasons: dict[str, st.SearchStrategy[str | None]] = {
    "error": st.sampled_from((None, "boom", "bang")),
    "error_type": st.sampled_from((None, "ValueError")),
    "traceback": st.sampled_from((None, "Traceback (most recent call last): …")),
}
delays = st.sampled_from((0.0, 0.001, 0.5, 5.0))
outcomes: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.just(("ack", {})),
    st.fixed_dictionaries({"counts": st.booleans(), **reasons}).map(lambda options: ("nack", options)),
    st.fixed_dictionaries({"delay_seconds": delays, "counts": st.booleans()}).map(lambda options: ("nack", options)),
    st.fixed_dictionaries(reasons).map(lambda options: ("reject", options)),
    st.fixed_dictionaries({"by_ms": st.integers(1, 40_000)}).map(lambda options: ("extend", options)),
)
visibilities_ms = st.none() | st.integers(1, 3_000)
rarely = st.sampled_from((False, False, False, True))
mostly = st.sampled_from((True, True, True, False))
policies = st.builds(
    QueuePolicy,
    visibility_seconds=st.sampled_from((1.0, 30.0)),
    max_attempts=st.integers(1, 3),
    retention_seconds=st.none() | st.none() | seconds,
    dead_letter_retention_seconds=st.sampled_from((1_209_600.0, 5.0)),
    paused=st.sampled_from((False, False, False, False, True)),
    failures_kept=st.sampled_from((10, 2, 1, 0)),
    retry_delay_seconds=st.sampled_from((0.0, 1.0, 10.0)),
    retry_factor=st.sampled_from((1.0, 2.0)),
    retry_delay_max_seconds=st.sampled_from((0.0, 1.5, 300.0)),
    retry_jitter=st.sampled_from((0.0, 0.1, 1.0)),
    delay_seconds=st.sampled_from((0.0, 0.0, 0.0, 2.0)),
    dead_letter_rule=st.sampled_from(("failures", "failures", "deliveries", "never")),
)
picks = st.integers(0, 1_000)


DURABLE = QueuePolicy(history="durable", history_seconds=30_000_000.0)  # No example takes as long.


class OnPurpose(Exception):
    """Aborts a transaction, which must write nothing."""


class Queues(RuleBasedStateMachine):
    """A queue, its dead letters and the model; every rule is a transaction."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    names: Iterator[int]  # Examples may share a database, so each has its own queue.
    lasting: bool  # Whether data survives reopening the database.
    shared: bool  # Whether several processes write, whose ids are not in the order of puts.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.opener = next(self.openers)
        self.seeds = count()
        self.database = self.open()
        self.other = self.open() if self.shared else None  # Another process.
        name = f"jobs-{next(self.names)}"
        self.queue, self.dlq = QueueKey("main", name), QueueKey("main", f"{name}.dlq")
        self.model = Model(name, self.clock)
        self.prefetched = {self.queue: Prefetched(), self.dlq: Prefetched()}
        self.ids: set[str] = set()  # Every message ever put.
        self.proofs: list[tuple[QueueKey, MessageLease]] = []  # Every lease ever granted.
        self.packed: dict[bytes, PackedLease] = {}
        self.durable: set[QueueKey] = set()  # The queues with a history since their first message.

    def open(self, seed: int = 0) -> Database:
        """Open as another process, whose ids start anywhere in the current millisecond."""
        ids = IdSource(1_001 * next(self.seeds) + seed)  # A new random seed each time.
        return self.opener(clock=self.clock, ids=ids)

    def model_queue(self, queue: QueueKey) -> ModelQueue:
        return self.model.dead if queue == self.dlq else self.model.jobs

    # Putting and delivering.

    @initialize(some=st.lists(news, min_size=3, max_size=8), durable=st.booleans())
    def initial_messages_are_put(self, some: list[NewMessage], durable: bool) -> None:
        if durable:
            for queue in (self.queue, self.dlq):
                self.database.transact(queues.set_policy, queue, DURABLE)
            self.durable = {self.queue, self.dlq}
            self.model.policy = DURABLE
        self.put(some)

    @precondition(lambda self: len(self.model.jobs.messages) + len(self.model.dead.messages) < MESSAGES_MAX)
    @rule(some=st.lists(news, min_size=1, max_size=4))
    def messages_are_put(self, some: list[NewMessage]) -> None:
        self.put(some)

    def put(self, some: list[NewMessage]) -> None:
        receipts = self.database.transact(put_alone, self.queue, some)
        assert len(receipts) == len(some)
        new_ids = [receipt.id for receipt in receipts if not receipt.duplicate]
        assert self.shared or (new_ids == sorted(new_ids) and all(id > max(self.ids, default="") for id in new_ids))
        self.ids |= set(new_ids)
        for new, receipt in zip(some, receipts, strict=True):
            self.model.put(new, receipt)

    @rule(dead=rarely, owner=owners, limit=st.integers(1, 3), ms=visibilities_ms, prefetched=mostly)
    def messages_are_leased(self, dead: bool, owner: str, limit: int, ms: int | None, prefetched: bool) -> None:
        self.lease(self.dlq if dead else self.queue, owner=owner, limit=limit, ms=ms, prefetched=prefetched)

    def lease(
        self,
        queue: QueueKey,
        *,
        owner: str,
        limit: int,
        ms: int | None,
        prefetched: bool,
        acks: Sequence[PackedAck] = (),
    ) -> list[RefusedAck]:
        expected = self.model.lease(self.model_queue(queue), owner=owner, limit=limit, visibility_ms=ms)
        leased = self.database.transact(
            queues.lease_or_wait,
            queue,
            owner=owner,
            limit=limit,
            visibility_ms=ms,
            prefetched=self.prefetched[queue] if prefetched else None,
            acks=acks,
        )
        found = leased.messages
        packed = queues.packed_of(leased)
        assert [delivery_at(each, position) for each in packed for position in each.positions] == queues.deliveries_of(
            leased
        )
        self.packed |= {each.id: each for each in packed}
        assert [each.failures for each in queues.deliveries_of(leased)] == [
            [msgspec.structs.replace(failure, traceback=None) for failure in message.history] for message in expected
        ]
        assert [stored_fields(message) for message in found] == [model_fields(message) for message in expected]
        assert [message.payload for message in found] == [message.payload for message in expected]
        proofs = [(queue, proof(message)) for message in found]
        assert not {each.lease_id for _, each in proofs} & {each.lease_id for _, each in self.proofs}
        self.proofs += proofs
        return leased.refused

    @rule(some=st.lists(outcomes, min_size=1, max_size=4), dead=rarely, prefetched=mostly)
    def a_consumer_settles_messages(self, some: list[tuple[str, dict[str, Any]]], dead: bool, prefetched: bool) -> None:
        """Lease one message at a time, and settle each in one of the ways."""
        for outcome, options in some:
            before = len(self.proofs)
            self.messages_are_leased(dead=dead, owner="ada", limit=1, ms=None, prefetched=prefetched)
            for queue, shown in self.proofs[before:]:
                self.settle(queue, shown, outcome, options)

    # Settling with the current lease, expired or not.

    def holder(self, queue: QueueKey, shown: MessageLease) -> ModelMessage | None:
        message = self.model_queue(queue).messages.get(shown.id)
        return message if message and message.state == "leased" and message.fence == shown.fence else None

    def current(self) -> list[tuple[QueueKey, MessageLease]]:
        return [each for each in self.proofs if self.holder(*each)]

    @precondition(lambda self: self.current())
    @rule(pick=picks, outcome=outcomes)
    def a_message_is_settled(self, pick: int, outcome: tuple[str, dict[str, Any]]) -> None:
        held = self.current()
        self.settle(*held[pick % len(held)], *outcome)

    @precondition(lambda self: self.current())
    @rule(
        chosen=st.sets(st.integers(0, 5), min_size=1),
        by_ms=st.sampled_from((1, 700, 30_000)),
        how=st.sampled_from(("extend", "ack", "ack by position", "ack and lease")),
    )
    def several_messages_are_settled(self, chosen: set[int], by_ms: int, how: str) -> None:
        """Some messages of one or more leases, and one that nobody holds, are acknowledged or extended."""
        held = self.current()
        queue = held[min(chosen) % len(held)][0]
        shown = list(
            dict.fromkeys(each for where, each in (held[pick % len(held)] for pick in chosen) if where == queue)
        )
        strange = msgspec.structs.replace(shown[0], fence=shown[0].fence + 7)
        if how in ("ack by position", "ack and lease"):
            self.ack_by_position(queue, shown, then_lease=how == "ack and lease")
            return
        ack = how == "ack"
        outcomes: list[Any]
        if ack:
            outcomes = self.database.transact(queues.ack_many, queue, [*shown, strange])
        else:
            outcomes = self.database.transact(queues.extend_many, queue, [*shown, strange], by_ms=by_ms)
        assert isinstance(outcomes.pop(), QueueMessageLeaseMismatch)
        for each, outcome in zip(shown, outcomes, strict=True):
            message, model_queue = self.holder(queue, each), self.model_queue(queue)
            assert message is not None
            if ack:
                assert outcome == message.correlation_id
                model_queue.acked[message.id] = (message.fence, self.model.now_ms, message.correlation_id)
                self.model.remove(model_queue, message)
            else:
                message.expires_ms = max(message.expires_ms, self.model.now_ms + by_ms)
                assert outcome.due_ms == message.expires_ms

    def ack_by_position(self, queue: QueueKey, shown: list[MessageLease], *, then_lease: bool) -> None:
        masks: dict[bytes, int] = {}
        for each in shown:
            *lease, position = bytes.fromhex(each.lease_id.rpartition("-")[2])
            masks[bytes(lease)] = masks.get(bytes(lease), 0) | 1 << position
        acks = [
            PackedAck(lease, self.packed[lease].fence, self.packed[lease].fences, bits_of(mask))
            for lease, mask in masks.items()
        ]
        strange = msgspec.structs.replace(acks[0], fence=acks[0].fence + 7, fences=[])
        for each in shown:
            message, model_queue = self.holder(queue, each), self.model_queue(queue)
            assert message is not None
            model_queue.acked[message.id] = (message.fence, self.model.now_ms, message.correlation_id)
            self.model.remove(model_queue, message)
        if then_lease:
            refused = self.lease(queue, owner="ada", limit=2, ms=None, prefetched=True, acks=[*acks, strange])
        else:
            refused = self.database.transact(queues.ack_packed, queue, [*acks, strange])
        assert sorted((each.lease, each.position) for each in refused) == [
            (strange.lease, position) for position in positions_in(masks[strange.lease])
        ]
        assert self.database.transact(queues.ack_packed, queue, acks) == [], "acknowledging twice is fine"

    def settle(self, queue: QueueKey, shown: MessageLease, outcome: str, options: dict[str, Any]) -> None:
        model_queue, message = self.model_queue(queue), self.holder(queue, shown)
        assert message is not None
        answer = self.database.transact(getattr(queues, outcome), queue, shown, **options)
        if outcome == "extend":
            message.expires_ms = max(message.expires_ms, self.model.now_ms + options["by_ms"])
            assert answer.due_ms == message.expires_ms
            return
        assert answer == message.correlation_id
        if outcome == "ack":
            model_queue.acked[message.id] = (message.fence, self.model.now_ms, message.correlation_id)
            self.model.remove(model_queue, message)
        elif outcome == "reject":
            model_queue.failed += 1
            self.model.reject(model_queue, message, options)
        elif options["counts"]:
            model_queue.failed += 1
            delay_ms = self.delay_ms(queue, message, options)
            self.model.fail(model_queue, message, "failed", self.model.now_ms, options, delay_ms=delay_ms)
        else:
            self.model.requeue(model_queue, message, round(options.get("delay_seconds", 0) * 1_000))

    def delay_ms(self, queue: QueueKey, message: ModelMessage, options: dict[str, Any]) -> int:
        """The delay of a failure: the given one, or the stored back-off, which the policy bounds."""
        if "delay_seconds" in options:
            return round(float(options["delay_seconds"]) * 1_000)
        shortest, longest = self.model.back_off_ms(self.model_queue(queue), message)
        delayed = self.database.read(
            lambda tx: tx.get(queues.keys_of(queue).delayed_key(stored_messages.parse_id(message.id)))
        )
        delay_ms = 0 if delayed is None else stored_messages.decode(delayed).due_ms - self.model.now_ms
        exhausted = self.model.is_exhausted(self.model_queue(queue), message, more=1)
        assert exhausted or self.model.is_expired(message) or shortest - 1 <= delay_ms <= longest + 1
        return delay_ms

    # Settling with any other proof.

    @precondition(lambda self: self.proofs)
    @rule(pick=picks, how=st.sampled_from(("ack", "nack", "reject", "extend")), forged=st.integers(0, 3))
    def wrong_leases_are_refused(self, pick: int, how: str, forged: int) -> None:
        """An old lease, one with another fence or id, or one of another queue is refused and changes nothing."""
        queue, shown = self.proofs[pick % len(self.proofs)]
        if forged == 1:
            shown = msgspec.structs.replace(shown, fence=shown.fence + 1_000)
        elif forged == 2:
            shown = msgspec.structs.replace(shown, lease_id=shown.lease_id + "0")
        elif forged == 3:
            queue = self.queue if queue == self.dlq else self.dlq
        if not forged and self.holder(queue, shown):
            return
        settle = partial(queues.extend, by_ms=1_000) if how == "extend" else getattr(queues, how)
        fence, at_ms, correlation_id = self.model_queue(queue).acked.get(shown.id, (0, 0, ""))
        ago_ms = self.model.now_ms - at_ms
        if how == "ack" and forged != 2 and fence == shown.fence and ago_ms < ACK_MEMORY_MS + 60_000:
            # A second ack with the same lease succeeds for at least five and at most six minutes.
            if ago_ms < ACK_MEMORY_MS:
                assert self.database.transact(queues.ack, queue, shown) == correlation_id
        else:
            with pytest.raises(QueueMessageLeaseMismatch):
                self.database.transact(settle, queue, shown)

    @precondition(lambda self: self.proofs)
    @rule(pick=picks)
    def a_message_is_acknowledged_late(self, pick: int) -> None:
        """After its lease has ended, until it is delivered again."""
        queue, shown = self.proofs[pick % len(self.proofs)]
        model_queue = self.model_queue(queue)
        message = model_queue.messages.get(shown.id)
        if message is None or message.fence != shown.fence:
            if shown.id not in model_queue.acked:
                with pytest.raises(QueueMessageLeaseMismatch):
                    self.database.transact(queues.ack, queue, shown, late=True)
            return
        assert self.database.transact(queues.ack, queue, shown, late=True) == message.correlation_id
        model_queue.acked[message.id] = (message.fence, self.model.now_ms, message.correlation_id)
        self.model.remove(model_queue, message)

    @precondition(lambda self: self.proofs)
    @rule(pick=picks)
    def a_lease_is_checked(self, pick: int) -> None:
        """Unlike settling, `check` refuses a lease as soon as it expires."""
        queue, shown = self.proofs[-1 - pick % len(self.proofs)]
        message = self.holder(queue, shown)
        if message is not None and self.model.now_ms < message.expires_ms:
            self.database.read(queues.check, queue, shown)
        else:
            with pytest.raises(QueueMessageLeaseMismatch):
                self.database.read(queues.check, queue, shown)

    # Time.

    @rule(ms=st.sampled_from((1, 499, 1_000, 2_000, 5_000, 30_000, 61_000, 300_000)))
    def time_passes(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule(pick=picks, early_ms=st.integers(0, 1), dead=rarely)
    def time_passes_until_something_is_due(self, pick: int, early_ms: int, dead: bool) -> None:
        due_times = self.model.due_times()
        if due_times:
            self.clock.advance_ms(max(due_times[pick % len(due_times)] - early_ms - self.model.now_ms, 0))
        queue = self.dlq if dead else self.queue
        self.model.process_due(self.model_queue(queue))
        assert self.database.transact(queues.sweep, queue) > self.model.now_ms

    # Administration.

    @rule(policy=policies)
    def the_policy_changes(self, policy: QueuePolicy) -> None:
        if self.queue in self.durable:
            policy = msgspec.structs.replace(policy, history="durable", history_seconds=DURABLE.history_seconds)
        assert self.database.transact(queues.set_policy, self.queue, policy) == policy
        assert self.database.read(queues.policy_of, self.queue) == policy
        self.model.policy = policy

    @rule(ids=st.none() | st.lists(picks, max_size=3), limit=st.integers(1, 4))
    def dead_letters_are_redriven(self, ids: list[int] | None, limit: int) -> None:
        """By id, or all; messages that are not dead letters or are leased stay."""
        if self.model.policy.dead_letter_rule != "failures":
            self.clock.advance_ms(1)  # Attempts begin anew, and order the events of a message within a millisecond.
        known = sorted(self.model.dead.messages) + sorted(self.model.jobs.messages)
        named = None if ids is None else [known[pick % len(known)] for pick in ids if known]
        moved = self.database.transact(queues.redrive, self.queue, ids=named, limit=limit)
        assert moved == self.model.redrive(named, limit)

    @rule(purged=rarely, dead=rarely, limit=st.integers(1, 5), leased=st.booleans())
    def messages_are_peeked_or_purged(self, purged: bool, dead: bool, limit: int, leased: bool) -> None:
        """Leased messages stay, unless they are purged too."""
        queue = self.dlq if dead else self.queue
        found = self.database.read(queues.peek, queue, limit=limit)
        first = self.model_queue(queue).at("ready")[:limit]
        failures = self.database.read(queues.failures_of, queue, found)
        assert [failures.get(each.id, []) for each in found] == [each.history for each in first]
        assert [(stored_fields(each), each.payload) for each in found] == [
            (model_fields(each), each.payload) for each in first
        ]
        if purged:
            known = self.model_queue(queue).messages.values()
            expected = [each for each in known if leased or each.state != "leased"]
            assert purge(self.database, queue, limit, leased=leased) == len(expected)
            for message in sorted(expected, key=lambda each: each.state != "blocked"):
                self.model.remove(self.model_queue(queue), message)

    @rule(deleted=rarely, dead=rarely, force=st.booleans())
    def the_queue_is_deleted(self, deleted: bool, dead: bool, force: bool) -> None:
        """The dead letters are a queue of their own, and stay."""
        if not deleted:
            return
        queue, name = (self.dlq, "dead") if dead else (self.queue, "jobs")
        model_queue = self.model_queue(queue)
        if model_queue.at("leased") and not force:
            with pytest.raises(QueueInUse):
                delete(self.database, queue, force=force)
            return
        assert delete(self.database, queue, force=force) == len(model_queue.messages)
        setattr(self.model, name, ModelQueue(model_queue.name))
        self.durable.discard(queue)  # Its policy and its history are deleted, too.
        if not dead:
            self.model.policy, self.model.keys = QueuePolicy(), {}
            self.ids = set()  # The newest id is forgotten, too.

    @precondition(lambda self: self.current())
    @rule(some=st.lists(news, min_size=1, max_size=2), owner=owners)
    def a_failed_commit_writes_nothing(self, some: list[NewMessage], owner: str) -> None:
        """Prefetched messages stay valid, too."""

        def work(tx: Transaction) -> None:
            queues.ack(tx, *self.current()[-1])
            queues.put(tx, self.queue, some)
            queues.redrive(tx, self.queue)
            queues.lease(tx, self.queue, owner=owner, limit=3, prefetched=self.prefetched[self.queue])
            raise OnPurpose

        with pytest.raises(OnPurpose):
            self.database.transact(work)

    @precondition(lambda self: self.lasting)
    @rule(seed=picks)
    def the_database_is_reopened(self, seed: int) -> None:
        """Prefetched messages are lost with the process. On PostgreSQL a new writer with its own counters starts."""
        self.database.close()
        self.database = self.open(seed)
        self.prefetched = {self.queue: Prefetched(), self.dlq: Prefetched()}

    @precondition(lambda self: self.shared)
    @rule()
    def another_process_goes_on(self) -> None:
        """It has counters of its own."""
        assert self.other is not None
        self.database, self.other = self.other, self.database

    @precondition(lambda self: self.shared)
    @rule(dead=rarely)
    def the_counters_of_all_processes_are_folded(self, dead: bool) -> None:
        queue = self.dlq if dead else self.queue
        self.database.transact(queues.fold, queue)
        stored = self.database.read(lambda tx: tx.scan(*queues.keys_of(queue).all_counters.range(), limit=10))
        assert {key for key, _ in stored} <= {queues.keys_of(queue).own_counters}

    @precondition(lambda self: self.shared)
    @rule(dead=rarely)
    def upkeep_changes_no_message(self, dead: bool) -> None:
        self.database.transact(queues.run_upkeep, self.dlq if dead else self.queue)

    # Invariants.

    @invariant()
    def stored_messages_equal_the_model(self) -> None:
        for queue in (self.queue, self.dlq):
            stored, bodies, events, heads, failures = self.database.read(contents, queue)
            known = self.model_queue(queue).messages
            assert sorted(state_and_id for state_and_id, _ in stored) == sorted(
                (each.state, each.id) for each in known.values()
            )
            for _, message in stored:
                assert stored_fields(message) == model_fields(known[queues.format_id(message.id)])
            assert bodies == {each.id: each.payload for each in known.values() if len(each.payload) > INLINE_BYTES}
            assert heads == self.model_queue(queue).group_heads
            assert failures == {each.id: each.history for each in known.values() if each.history}
            # The due entry of a TTL is removed when it is processed, even while the message is leased.
            ends = {(each.ttl_at_ms, each.id, b"T") for each in known.values() if each.ttl_at_ms}
            waits = {(each.delayed_until_ms, each.id, b"") for each in known.values() if each.state == "delayed"}
            assert waits <= events <= waits | ends
            assert ends - events <= {
                (each.ttl_at_ms, each.id, b"T")
                for each in known.values()
                if each.state == "leased" and self.model.is_expired(each)
            }

    @invariant()
    def the_stats_equal_the_model(self) -> None:
        for queue, model_queue in ((self.queue, self.model.jobs), (self.dlq, self.model.dead)):
            stats = self.database.read(queues.stats, queue)
            assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == tuple(
                len(model_queue.at(state)) for state in ("ready", "delayed", "leased", "blocked")
            )
            assert stats.dead == (len(self.model.dead.messages) if queue == self.queue else 0)
            listed = self.database.read(queues.leased, queue, after="", limit=MESSAGES_MAX).messages
            assert [each.expires_ms for each in listed] == sorted(each.expires_ms for each in listed)
            assert sorted(
                (each.id, each.owner, each.attempts, each.fence, each.expires_ms) for each in listed
            ) == sorted(
                (each.id, each.owner, each.attempts, each.fence, each.expires_ms) for each in model_queue.at("leased")
            )
            counts = (stats.put_total, stats.delivered_total, stats.acked_total, stats.failed_total)
            assert counts == (model_queue.put, model_queue.delivered, len(model_queue.acked), model_queue.failed)
            assert (stats.expired_total, stats.dead_total) == (model_queue.expired, model_queue.dead_lettered)
            head = next(iter(model_queue.at("ready")), None)
            assert stats.head_message_id == (head.id if head else None)
            assert stats.head_age_seconds == ((self.model.now_ms - head.created_ms) / 1_000 if head else 0.0)
            assert stats.paused == (queue == self.queue and self.model.policy.paused)

    @invariant()
    def the_history_replays_to_the_same_counts(self) -> None:
        for queue in self.durable:
            events = self.database.read(read_all, queue)
            model_queue, stats = self.model_queue(queue), self.database.read(queues.stats, queue)
            counts = Counter(event.event for event in events)
            assert (counts["put"], counts["leased"], counts["acked"]) == (
                stats.put_total,
                stats.delivered_total,
                stats.acked_total,
            )
            assert (counts["expired"], counts["dead-lettered"]) == (stats.expired_total, stats.dead_total)
            assert replay(events) == {
                id: "leased" if each.state == "leased" else "waiting" for id, each in model_queue.messages.items()
            }

    @invariant()
    def fronts_and_due_times_hide_nothing(self) -> None:
        def check_queue(tx: Transaction, queue: QueueKey) -> None:
            events = [at_ms for at_ms, _, _ in contents(tx, queue)[2]]
            assert queues.next_due(tx, queue) <= min(events, default=queues.NEVER_MS)
            if tx.writer:
                return
            counters = load_counters(tx, queues.keys_of(queue))
            assert counters.due_front_ms <= min(events, default=queues.NEVER_MS)
            for message in self.model_queue(queue).at("ready"):
                assert stored_messages.parse_id(message.id) >= counters.fronts.get(message.priority, b"")

        for queue in (self.queue, self.dlq):
            self.database.read(check_queue, queue)

    @invariant()
    def a_group_has_one_unblocked_message(self) -> None:
        """Checked on the model, which the queue equals."""
        model_queue = self.model.jobs
        for group in ("a", "b"):
            members = [each for each in model_queue.messages.values() if each.group == group]
            assert len([each for each in members if each.state != "blocked"]) == bool(members)
        assert not self.model.dead.at("blocked")
        assert all(each.origin == self.queue.name for each in self.model.dead.messages.values())
        assert not set(model_queue.messages) & (
            set(self.model.dead.messages) | set(model_queue.acked) | set(self.model.dead.acked)
        )

    def teardown(self) -> None:
        self.database.close()
        if self.other is not None:
            self.other.close()


def put_alone(tx: Transaction, queue: QueueKey, messages: list[NewMessage]) -> list[Receipt]:
    """A put that is a transaction of its own, and shares its queue if it can."""
    share_queues(tx, [PutMessages(queue.name, messages, queue.universe)])
    return queues.put(tx, queue, messages)


def read_all(tx: Transaction, queue: QueueKey) -> list[MessageEvent]:
    found, after = list[MessageEvent](), ""
    while True:
        page = queues.read_history(tx, queue, after=after, limit=7)
        found += page.events
        if page.next is None:
            return found
        after = page.next


def replay(events: list[MessageEvent]) -> dict[str, str]:
    """The state of every message in a queue after these events."""
    states: dict[str, str] = {}
    for event in events:
        if event.event in ("acked", "dead-lettered", "outlived", "purged", "cancelled", "returned"):
            del states[event.id]
        else:
            states[event.id] = "leased" if event.event == "leased" else "waiting"
    return states


def proof(message: StoredMessage) -> MessageLease:
    return MessageLease(queues.format_id(message.id), message.lease_id, message.fence)


def purge(database: Database, queue: QueueKey, limit: int = 256, *, leased: bool = False) -> int:
    removed, after = 0, b""
    while True:
        count, following = database.transact(queues.purge, queue, after=after, limit=limit, leased=leased)
        removed += count
        if following is None:
            return removed
        after = following


def delete(database: Database, queue: QueueKey, *, force: bool) -> int:
    work, do = queues.Work(), partial(queues.delete_step, force=force)
    while not work.is_done:
        work = database.transact(queues.step, queue, do, work, None)
    assert database.read(lambda tx: tx.scan(*Subspace("u", queue.universe, "q", queue.name).range(), limit=1)) == []
    return work.count


def contents(
    tx: Transaction, queue: QueueKey
) -> tuple[
    list[tuple[tuple[str, str], StoredMessage]],
    dict[str, bytes],
    set[tuple[int, str, bytes]],
    dict[str, str],
    dict[str, list[Failure]],
]:
    """All stored data of a queue: messages by state, payload records, due entries, group heads, and failures."""
    stored_keys = queues.keys_of(queue)
    stored = [
        ((state, queues.format_id(message.id)), message)
        for state, prefix in (
            ("ready", stored_keys.ready),
            ("delayed", stored_keys.delayed),
            ("blocked", stored_keys.waiting.prefix),
        )
        for _, value in tx.scan(prefix, prefix + b"\xff", limit=1_000)
        for message in [stored_messages.decode(value)]
    ]
    leased = list(message_leases.leased_messages(tx, stored_keys))
    stored += [(("leased", queues.format_id(message.id)), message) for message in leased]
    if not leased:
        for prefix in (stored_keys.contents, stored_keys.settled, stored_keys.moved):
            assert not tx.scan(prefix, prefix + b"\xff" * 18, limit=1)
    bodies = tx.scan(stored_keys.body, stored_keys.body + b"\xff", limit=1_000)
    events = [
        key[len(stored_keys.due) :]
        for key, value in tx.scan(stored_keys.due, stored_keys.due + b"\xff" * 9, limit=1_000)
        if not message_leases.is_lease(value)
    ]
    heads = tx.scan(*stored_keys.head.range(), limit=1_000)
    failures = tx.scan(stored_keys.failures, stored_keys.failures + b"\xff" * 17, limit=1_000)
    return (
        stored,
        {queues.format_id(key[len(stored_keys.body) :]): value for key, value in bodies},
        {(int.from_bytes(entry[:8], "big"), queues.format_id(entry[8:24]), entry[24:]) for entry in events},
        {str(stored_keys.head.unpack(key)[0]): queues.format_id(value[:16]) for key, value in heads},
        {
            queues.format_id(key[len(stored_keys.failures) :]): msgspec.msgpack.decode(value, type=list[Failure])
            for key, value in failures
        },
    )


def stored_fields(message: StoredMessage) -> dict[str, Any]:
    """The fields of a stored message."""
    return {
        "id": queues.format_id(message.id),
        "size": message.size,
        "priority": message.priority,
        "group": message.group,
        "correlation_id": message.correlation_id,
        "created_ms": message.created_ms,
        "max_attempts": message.max_attempts,
        "visibility_ms": message.visibility_ms,
        "retry_delay_ms": message.retry_delay_ms,
        "leased_ms": message.leased_ms,
        "has_failures": message.has_failures,
        "ttl_at_ms": message.ttl_at_ms or None,
        "attempts": message.attempts,
        "failures": message.failures,
        "fence": message.fence,
        "last_error": message.last_error,
        "origin": message.origin,
        "died_ms": message.died_ms,
        "owner": message.owner,
        "expires_ms": message.due_ms if message.owner is not None else None,
    }


def model_fields(message: ModelMessage) -> dict[str, Any]:
    """The same fields of a message in the model."""
    leased = message.state == "leased"
    names = (
        "id priority group correlation_id created_ms max_attempts visibility_ms retry_delay_ms ttl_at_ms attempts "
        "failures fence last_error origin died_ms leased_ms"
    )
    return {name: getattr(message, name) for name in names.split()} | {
        "size": len(message.payload),
        "has_failures": bool(message.history),
        "owner": message.owner if leased else None,
        "expires_ms": message.expires_ms if leased else None,
    }


@pytest.mark.examples(80)
def test_a_queue_in_memory_matches_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Queues, steps=40, openers=repeat(MemoryDatabase), names=count(), lasting=False, shared=False)


@pytest.mark.examples(25)
def test_a_queue_on_rocksdb_matches_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    new_ids = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Queues, steps=40, openers=new_ids, names=count(), lasting=True, shared=False)


@pytest.mark.examples(12)
def test_a_queue_on_postgres_matches_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(
        Queues,
        steps=40,
        openers=repeat(open_postgres),
        names=count(),
        lasting=True,
        shared=True,
    )
