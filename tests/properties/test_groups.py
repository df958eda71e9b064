"""Random histories of message groups match a plain Python model, on every backend.

The model has messages in dicts, and of each group the message that goes first, and those that were leased together. It
knows nothing of keys, counters, due entries or leases. What a receive delivers is checked once more, without the model:
by the order of the messages, and by what was leased before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import IdSource
from fastness.errors import FastnessError, MessageLeased, QueueMessageLeaseMismatch
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import Prefetched, QueueKey, StoredMessage, message_leases
from fastness.testing.clock import ManualClock
from fastness.wire import stored_messages
from fastness.wire.queues import MessageLease, NewMessage, PackedAck, QueuePolicy, VisibilityChange, bits_of

MESSAGES_MAX = 24  # Each has at most two due entries, and one transaction processes 64.
GROUPS = (None, "a", "a", "a", "b", "b")


# The model.


@dataclass
class ModelMessage:
    """A message in the model."""

    id: str
    group: str | None
    priority: int
    max_attempts: int
    ttl_at_ms: int | None
    delayed_until_ms: int
    state: str = ""  # ready, delayed, leased or blocked
    failures: int = 0
    deliveries: int = 0
    expires_ms: int = 0
    lease: MessageLease | None = None
    packed: PackedAck | None = None  # Acknowledges it by its position in the lease.
    keeps_result: bool = False
    is_late: bool = False  # A younger message of its group was in the queue before it.


@dataclass
class ModelQueue:
    """One queue of the model with its dead letters."""

    policy: QueuePolicy
    messages: dict[str, ModelMessage] = field(default_factory=dict)
    dead: dict[str, ModelMessage] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # Of each group: the message that goes first, if there is one.
    together: dict[str, set[str]] = field(default_factory=dict)  # Of each group: messages that were leased together.

    def at(self, state: str) -> list[ModelMessage]:
        """The messages in a state, in delivery order: the most urgent first, then the oldest."""
        return sorted(
            (each for each in self.messages.values() if each.state == state), key=lambda each: (-each.priority, each.id)
        )

    def of_group(self, group: str | None, state: str) -> list[ModelMessage]:
        """The messages of a group in a state, the oldest first."""
        return sorted((each for each in self.at(state) if each.group == group), key=lambda each: each.id)

    def insert(self, message: ModelMessage, now_ms: int) -> None:
        """Add a message, or return one that was leased."""
        group = message.group
        if group is not None and message.id not in self.messages:
            message.is_late = any(each.group == group and each.id > message.id for each in self.messages.values())
        self.messages[message.id] = message
        if group is None or self.first.get(group) == message.id:
            message.state = "delayed" if message.delayed_until_ms > now_ms else "ready"
            return
        message.state = "blocked"
        self.together.get(group, set()).discard(message.id)
        self.go_on(group, now_ms)

    def remove(self, message: ModelMessage, now_ms: int) -> None:
        """Remove a message, and let its group go on."""
        del self.messages[message.id]
        if message.group is None:
            return
        self.together.get(message.group, set()).discard(message.id)
        if self.first.get(message.group) == message.id:
            del self.first[message.group]
        self.go_on(message.group, now_ms)

    def go_on(self, group: str, now_ms: int) -> None:
        """Let the oldest blocked message of a group go first, if none does, and none before it is leased."""
        blocked = self.of_group(group, "blocked")
        if blocked and group not in self.first and not self.before(group, blocked[0].id):
            self.first[group] = blocked[0].id
            self.insert(blocked[0], now_ms)

    def before(self, group: str, id: str) -> bool:
        """Whether a message that was leased with others is before this one."""
        return any(leased < id for leased in self.together.get(group, set()))

    def lease(self, limit: int, now_ms: int) -> list[ModelMessage]:
        """Take messages in delivery order. Each brings the next ones of its group, if the policy says so."""
        taken: list[ModelMessage] = []
        while len(taken) < limit and (ready := self.at("ready")):
            first = ready[0]
            batch = [first]
            if self.policy.group_batches and first.group is not None:
                for each in self.of_group(first.group, "blocked")[: limit - len(taken) - 1]:
                    if each.id < first.id or each.delayed_until_ms > now_ms or self.before(first.group, each.id):
                        break
                    batch.append(each)
            for each in batch:
                each.state = "leased"
                each.deliveries += 1
            if len(batch) > 1:
                del self.first[str(first.group)]
                self.together.setdefault(str(first.group), set()).update(each.id for each in batch)
            taken += batch
        return taken


# Strategies.

news = st.builds(
    NewMessage,
    priority=st.sampled_from((5, 5, 5, 9)),
    group=st.sampled_from(GROUPS),
    delay_seconds=st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.5, 2.0)),
    ttl_seconds=st.sampled_from((None, None, None, None, None, 1.0, 5.0)),
    max_attempts=st.sampled_from((None, None, 1, 2)),
    keep_result=st.sampled_from((False, False, False, True)),  # Such messages have locations.
)
policies = st.builds(
    QueuePolicy,
    group_batches=st.sampled_from((True, True, True, True, False)),
    max_attempts=st.sampled_from((1, 2, 3)),
    retry_delay_seconds=st.sampled_from((0.0, 0.0, 1.0)),
    retry_jitter=st.just(0.0),
)
picks = st.integers(0, 1_000)
choices = st.lists(picks, min_size=1, max_size=4)
rarely = st.sampled_from((False, False, False, True))
visibilities_ms = st.sampled_from((1, 500, 1_000, 3_000, 30_000))
outcomes = st.sampled_from(("ack", "ack", "nack", "reject", "return", "cancel", "late"))
times = st.sampled_from((0.0, 0.0, 0.001, 0.5, 2.0, 60.0))


class Groups(RuleBasedStateMachine):
    """Two queues with groups, their dead letters, and the model; every rule is a transaction."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    names: Iterator[int]  # Examples may share a database, so each has its own queues.
    lasting: bool  # Whether data survives reopening the database.
    shared: bool  # Whether several processes write.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.opener = next(self.openers)
        self.seeds = count()
        self.database = self.open()
        self.other_process = self.open() if self.shared else None
        number = next(self.names)
        self.jobs, self.others = QueueKey("main", f"jobs-{number}"), QueueKey("main", f"others-{number}")
        self.models = {key: ModelQueue(QueuePolicy()) for key in (self.jobs, self.others)}
        self.prefetched = {key: Prefetched() for key in self.models}
        self.ended: list[tuple[QueueKey, str, MessageLease]] = []  # Leases that must be refused from now on.

    def open(self) -> Database:
        return self.opener(clock=self.clock, ids=IdSource(1_001 * next(self.seeds)))

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @initialize(some=st.lists(news, min_size=3, max_size=10), batches=st.sampled_from((True, True, True, False)))
    def initial_messages_are_put(self, some: list[NewMessage], batches: bool) -> None:
        for queue in self.models:
            self.set_policy(queue, QueuePolicy(group_batches=batches, max_attempts=3, retry_delay_seconds=0.0))
        self.put(self.jobs, some)

    def set_policy(self, queue: QueueKey, policy: QueuePolicy) -> None:
        self.database.transact(queues.set_policy, queue, policy)
        self.models[queue].policy = policy

    def put(self, queue: QueueKey, some: list[NewMessage]) -> None:
        receipts = self.database.transact(queues.put, queue, some)
        for new, receipt in zip(some, receipts, strict=True):
            model = self.models[queue]
            message = ModelMessage(
                id=receipt.id,
                group=new.group,
                priority=new.priority,
                max_attempts=model.policy.max_attempts if new.max_attempts is None else new.max_attempts,
                ttl_at_ms=None if new.ttl_seconds is None else self.now_ms + round(new.ttl_seconds * 1_000),
                delayed_until_ms=self.now_ms + round((new.delay_seconds or 0.0) * 1_000),
                keeps_result=new.keep_result,
            )
            model.insert(message, self.now_ms)

    @precondition(lambda self: sum(len(each.messages) + len(each.dead) for each in self.models.values()) < MESSAGES_MAX)
    @rule(some=st.lists(news, min_size=1, max_size=6), other=rarely)
    def messages_are_put(self, some: list[NewMessage], other: bool) -> None:
        self.put(self.others if other else self.jobs, some)

    @rule(limit=st.sampled_from((1, 2, 3, 10)), ms=visibilities_ms, prefetched=st.booleans(), other=rarely)
    def messages_are_leased(self, limit: int, ms: int, prefetched: bool, other: bool) -> None:
        self.lease(self.others if other else self.jobs, limit, ms, prefetched=prefetched)

    def lease(self, queue: QueueKey, limit: int, ms: int, *, prefetched: bool) -> list[ModelMessage]:
        model = self.models[queue]
        self.process_due(queue)
        held = [(each.group, each.id) for each in model.at("leased")]
        waiting = [each for each in model.messages.values() if each.state != "leased"]
        leased = self.database.transact(
            queues.lease_or_wait,
            queue,
            owner="ada",
            limit=limit,
            visibility_ms=ms,
            prefetched=self.prefetched[queue] if prefetched else None,
        )
        found = [(queues.format_id(each.id), each.group) for each in leased.messages]
        # The promises, without the model of how they are kept.
        for id, group in found:
            assert group is None or not [other for in_group, other in held if in_group == group and other < id]
            older = {each.id for each in waiting if group is not None and each.group == group and each.id < id}
            late = {each.id for each in waiting if each.is_late}
            assert older - late <= {other for other, _ in found[: found.index((id, group))]}
        # The model.
        expected = model.lease(limit, self.now_ms)
        assert [id for id, _ in found] == [each.id for each in expected]
        assert [each.attempts for each in leased.messages] == [each.deliveries for each in expected]
        assert leased.more or not model.at("ready")
        acks = [
            PackedAck(each.id, each.fence, each.fences, bits_of(1 << position))
            for each in queues.packed_of(leased)
            for position in each.positions
        ]
        for message, stored, packed in zip(expected, leased.messages, acks, strict=True):
            message.expires_ms, message.lease, message.packed = self.now_ms + ms, proof(stored), packed
        return expected

    # Settling, with leases that have not ended by the clock, or whose end was not processed yet.

    def held(self, queue: QueueKey) -> list[ModelMessage]:
        return sorted(self.models[queue].at("leased"), key=lambda each: each.id)

    def chosen(self, queue: QueueKey, choice: list[int]) -> list[ModelMessage]:
        """Leased messages, in any order."""
        held = self.held(queue)
        return [held[index] for index in dict.fromkeys(pick % len(held) for pick in choice)]

    def end_lease(self, queue: QueueKey, message: ModelMessage) -> None:
        assert message.lease is not None
        self.ended.append((queue, message.id, message.lease))
        message.lease = None

    @rule(limit=st.sampled_from((2, 3, 10)), some=st.lists(st.tuples(picks, outcomes), min_size=1, max_size=6))
    def a_consumer_settles_what_it_receives(self, limit: int, some: list[tuple[int, str]]) -> None:
        """In any order, one message at a time, and not all of them."""
        received = self.lease(self.jobs, limit, 30_000, prefetched=True)
        for pick, outcome in some:
            left = [each for each in received if each.lease is not None]
            if not left:
                return
            index = self.held(self.jobs).index(left[pick % len(left)])
            if outcome == "ack":
                self.messages_are_acknowledged([index], packed=True)
            elif outcome == "nack":
                self.messages_are_nacked([index], counts=True, delay=None)
            elif outcome == "reject":
                self.messages_are_rejected([index])
            elif outcome == "cancel":
                self.a_message_is_cancelled(pick)
            else:
                self.clock.advance_ms(30_000 if outcome == "late" else 0)
                self.visibility_changes([index], [0.0], same=True)
            self.stored_messages_equal_the_model()
            self.lease(self.jobs, 1, 30_000, prefetched=True)

    @precondition(lambda self: self.held(self.jobs))
    @rule(choice=choices, packed=st.booleans())
    def messages_are_acknowledged(self, choice: list[int], packed: bool) -> None:
        queue, model = self.jobs, self.models[self.jobs]
        messages = self.chosen(queue, choice)
        proofs = [each.lease for each in messages if each.lease is not None]
        if packed:
            acks = [each.packed for each in messages if each.packed is not None]
            assert self.database.transact(queues.ack_packed, queue, acks) == []
        else:
            answers = self.database.transact(queues.ack_many, queue, proofs)
            assert not [each for each in answers if isinstance(each, FastnessError)]
        for message in messages:
            message.lease = None
            model.remove(message, self.now_ms)

    @precondition(lambda self: self.held(self.jobs))
    @rule(choice=choices, counts=st.booleans(), delay=st.sampled_from((None, 0.0, 0.5, 2.0)))
    def messages_are_nacked(self, choice: list[int], counts: bool, delay: float | None) -> None:
        queue, model = self.jobs, self.models[self.jobs]
        for message in self.chosen(queue, choice):
            self.database.transact(queues.nack, queue, message.lease, delay_seconds=delay, counts=counts)
            self.end_lease(queue, message)
            delay_ms = round((delay or 0.0) * 1_000)
            if counts and delay is None:
                delay_ms = round(model.policy.retry_delay_seconds * 2**message.failures * 1_000)
            self.give_back(queue, message, delay_ms=delay_ms, counts=counts)

    @precondition(lambda self: self.held(self.jobs))
    @rule(choice=choices)
    def messages_are_rejected(self, choice: list[int]) -> None:
        for message in self.chosen(self.jobs, choice):
            self.database.transact(queues.reject, self.jobs, message.lease)
            self.end_lease(self.jobs, message)
            self.dead_letter(self.jobs, message)

    @precondition(lambda self: self.held(self.jobs))
    @rule(choice=choices, seconds=st.lists(times, min_size=4, max_size=4), same=st.booleans(), late=st.booleans())
    def visibility_changes(self, choice: list[int], seconds: list[float], same: bool, late: bool = False) -> None:
        """Sooner, later, or now; also for some that have ended by the clock, which only a late owner may change."""
        queue = self.jobs
        messages = self.chosen(queue, choice)
        changes = [
            VisibilityChange(each.lease, seconds[0] if same else lasts)
            for each, lasts in zip(messages, seconds, strict=False)
            if each.lease is not None
        ]
        answers = self.database.transact(queues.change_visibility, queue, changes, late_owner="ada" if late else "")
        for message, change, answer in sorted(
            zip(messages, changes, answers, strict=True), key=lambda each: each[0].id
        ):
            if message.expires_ms <= self.now_ms and not late:
                assert isinstance(answer, QueueMessageLeaseMismatch)
            else:
                assert isinstance(answer, StoredMessage)
                message.expires_ms = self.now_ms + round(change.seconds * 1_000)
                assert (answer.due_ms if answer.lease_ref else 0) == (message.expires_ms if change.seconds else 0)
                if not change.seconds:
                    self.end_lease(queue, message)
                    self.give_back(queue, message, delay_ms=0, counts=False)

    @precondition(lambda self: self.held(self.jobs))
    @rule(choice=choices, by_ms=visibilities_ms)
    def leases_are_extended(self, choice: list[int], by_ms: int) -> None:
        messages = self.chosen(self.jobs, choice)
        proofs = [each.lease for each in messages if each.lease is not None]
        answers = self.database.transact(queues.extend_many, self.jobs, proofs, by_ms=by_ms)
        assert not [each for each in answers if isinstance(each, FastnessError)]
        for message in messages:
            message.expires_ms = max(message.expires_ms, self.now_ms + by_ms)

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def an_ended_lease_is_refused(self, pick: int) -> None:
        queue, _, lease = self.ended[-1 - pick % len(self.ended)]
        with pytest.raises(QueueMessageLeaseMismatch):
            self.database.transact(queues.nack, queue, lease)
        (answer,) = self.database.transact(queues.change_visibility, queue, [VisibilityChange(lease, 0.0)])
        assert isinstance(answer, QueueMessageLeaseMismatch)

    @precondition(lambda self: self.ended)
    @rule(pick=picks, seconds=times)
    def an_ended_lease_is_changed_late(self, pick: int, seconds: float) -> None:
        """Its message is leased again, if it waits since then; otherwise another consumer has it, or it is gone."""
        at = -1 - pick % min(len(self.ended), 4)
        queue, id, lease = self.ended[at]
        model = self.models[queue]
        message = model.messages.get(id)
        changes = [VisibilityChange(lease, seconds)]
        (answer,) = self.database.transact(queues.change_visibility, queue, changes, late_owner="ada")
        is_last = not [each for _, other, each in self.ended if other == id and each.fence > lease.fence]
        is_behind = message is not None and model.first.get(message.group or "", "") > id  # It was redriven.
        if message is None or message.state == "leased" or not is_last or message.keeps_result or is_behind:
            assert isinstance(answer, QueueMessageLeaseMismatch)
            return
        assert isinstance(answer, StoredMessage)
        message.expires_ms = self.now_ms + round(seconds * 1_000)
        if not seconds:
            self.give_back(queue, message, delay_ms=0, counts=False)
            return
        del self.ended[at]
        if message.group is not None and model.first.get(message.group) != id:
            model.together.setdefault(message.group, set()).add(id)
        message.state, message.lease = "leased", lease

    def give_back(self, queue: QueueKey, message: ModelMessage, *, delay_ms: int, counts: bool) -> None:
        """Return a message to its queue, or to the dead letters; one whose TTL has expired is removed."""
        message.failures += counts
        if counts and message.failures >= message.max_attempts:
            self.dead_letter(queue, message)
        elif message.ttl_at_ms is not None and message.ttl_at_ms <= self.now_ms:
            self.models[queue].remove(message, self.now_ms)
        else:
            message.delayed_until_ms = self.now_ms + delay_ms
            self.models[queue].insert(message, self.now_ms)

    def dead_letter(self, queue: QueueKey, message: ModelMessage) -> None:
        model = self.models[queue]
        model.remove(message, self.now_ms)
        model.dead[message.id] = message
        message.state, message.ttl_at_ms = "dead", None

    # Time.

    @rule(ms=st.sampled_from((1, 499, 1_000, 3_000, 30_000)))
    def time_passes(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule(ms=st.sampled_from((0, 1, 500, 2_000)), other=rarely)
    def what_is_due_is_processed(self, ms: int, other: bool) -> None:
        queue = self.others if other else self.jobs
        self.clock.advance_ms(ms)
        self.process_due(queue)
        assert self.database.transact(queues.sweep, queue) > self.now_ms

    def process_due(self, queue: QueueKey) -> None:
        """What a receive or a sweep does first: leases, delays and TTLs end."""
        model, now_ms = self.models[queue], self.now_ms
        for message in self.held(queue):
            if message.expires_ms <= now_ms:
                self.end_lease(queue, message)
                self.give_back(queue, message, delay_ms=0, counts=True)
        for message in model.at("delayed"):
            if message.delayed_until_ms <= now_ms:
                model.insert(message, now_ms)
        for message in list(model.messages.values()):
            if message.state != "leased" and message.ttl_at_ms is not None and message.ttl_at_ms <= now_ms:
                model.remove(message, now_ms)

    # Administration.

    @rule(policy=policies, other=rarely)
    def the_policy_changes(self, policy: QueuePolicy, other: bool) -> None:
        """Also while messages of a group are leased together."""
        self.set_policy(self.others if other else self.jobs, policy)

    @rule(picked=st.none() | choices)
    def dead_letters_are_redriven(self, picked: list[int] | None) -> None:
        model = self.models[self.jobs]
        known = sorted(model.dead)
        ids = None if picked is None else [known[pick % len(known)] for pick in picked if known]
        letters = [model.dead[id] for id in (known if ids is None else sorted(set(ids)))]
        assert self.database.transact(queues.redrive, self.jobs, ids=ids) == len(letters)
        for message in letters:
            del model.dead[message.id]
            message.failures = message.delayed_until_ms = 0
            model.insert(message, self.now_ms)

    @rule(purged=rarely, limit=st.integers(1, 5))
    def messages_are_purged(self, purged: bool, limit: int) -> None:
        """Leased messages stay, and hold their groups."""
        if not purged:
            return
        model, removed = self.models[self.jobs], 0
        after: bytes | None = b""
        while after is not None:
            removed_now, after = self.database.transact(queues.purge, self.jobs, after=after, limit=limit)
            removed += removed_now
        waiting = [each for each in model.messages.values() if each.state != "leased"]
        assert removed == len(waiting)
        for message in sorted(waiting, key=lambda each: each.state != "blocked"):
            model.remove(message, self.now_ms)

    def any_message(self, pick: int) -> ModelMessage | None:
        known = sorted(self.models[self.jobs].messages)
        return self.models[self.jobs].messages[known[pick % len(known)]] if known else None

    @rule(pick=picks)
    def a_message_is_cancelled(self, pick: int) -> None:
        """Leased or not."""
        message = self.any_message(pick)
        if message is not None:
            info = self.database.transact(queues.cancel, self.jobs, message.id)
            assert getattr(info, "state", None) == "cancelled"
            if message.lease is not None:
                self.end_lease(self.jobs, message)
            self.models[self.jobs].remove(message, self.now_ms)

    @rule(pick=picks, deleted=rarely, back=st.booleans(), dead=rarely)
    def a_message_is_moved_or_deleted(self, pick: int, deleted: bool, back: bool, dead: bool) -> None:
        """To another queue with groups, or from there; a dead letter becomes ready."""
        source, target = (self.others, self.jobs) if back else (self.jobs, self.others)
        model = self.models[source]
        known = sorted(model.dead if dead else model.messages)
        if not known:
            return
        message = (model.dead if dead else model.messages)[known[pick % len(known)]]
        change = queues.delete_messages if deleted else partial(queues.move_messages, to=target)
        (refusal,) = self.database.transact(change, source, [message.id])
        if message.state == "leased":
            assert isinstance(refusal, MessageLeased)
            return
        assert refusal is None
        if message.state == "dead":
            del model.dead[message.id]
            message.failures = message.delayed_until_ms = 0
        else:
            model.remove(message, self.now_ms)
        if not deleted:
            self.models[target].insert(message, self.now_ms)

    @rule(pick=picks, delay=st.sampled_from((None, 0.0, 1.0)), priority=st.sampled_from((5, 9)))
    def a_waiting_message_is_changed(self, pick: int, delay: float | None, priority: int) -> None:
        message = self.any_message(pick)
        if message is None or message.state == "leased":
            return
        self.database.transact(queues.update, self.jobs, message.id, priority=priority, delay_seconds=delay)
        message.priority = priority
        if delay is not None:
            message.delayed_until_ms = self.now_ms + round(delay * 1_000)
        self.models[self.jobs].insert(message, self.now_ms)

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()
        self.prefetched = {key: Prefetched() for key in self.models}

    @precondition(lambda self: self.shared)
    @rule()
    def another_process_goes_on(self) -> None:
        assert self.other_process is not None
        self.database, self.other_process = self.other_process, self.database

    # Invariants.

    @invariant()
    def stored_messages_equal_the_model(self) -> None:
        for queue, model in self.models.items():
            stored, leased = self.database.read(contents, queue)
            assert stored == sorted((each.state, each.id) for each in model.messages.values())
            assert leased == {each.id: (each.expires_ms, each.lease) for each in model.at("leased")}
            dead, _ = self.database.read(contents, QueueKey("main", f"{queue.name}.dlq"))
            assert dead == sorted(("ready", id) for id in model.dead)

    @invariant()
    def the_stats_equal_the_model(self) -> None:
        for queue, model in self.models.items():
            stats = self.database.read(queues.stats, queue)
            assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == tuple(
                len(model.at(state)) for state in ("ready", "delayed", "leased", "blocked")
            )

    @invariant()
    def an_empty_queue_has_no_groups(self) -> None:
        """Groups leave nothing behind."""
        for queue, model in self.models.items():
            heads = self.database.read(lambda tx, queue=queue: tx.scan(*queues.keys_of(queue).head.range(), limit=10))
            groups = {str(queues.keys_of(queue).head.unpack(key)[0]) for key, _ in heads}
            assert groups == {each.group for each in model.messages.values() if each.group is not None}

    def teardown(self) -> None:
        """Whatever happened, consumers that go on get every message, each group in order."""
        try:
            for queue in self.models:
                self.drain(queue)
        finally:
            self.database.close()
            if self.other_process is not None:
                self.other_process.close()

    def drain(self, queue: QueueKey) -> None:
        model = self.models[queue]
        for _ in range(3 * MESSAGES_MAX):
            if not model.messages:
                break
            self.clock.advance_ms(60_000)
            for message in reversed(self.lease(queue, 10, 1_000, prefetched=False)):
                self.database.transact(queues.ack, queue, message.lease)
                model.remove(message, self.now_ms)
                self.stored_messages_equal_the_model()
        assert not model.messages
        self.stored_messages_equal_the_model()


def contents(
    tx: Transaction, queue: QueueKey
) -> tuple[list[tuple[str, str]], dict[str, tuple[int, MessageLease | None]]]:
    """The stored messages of a queue with their states, and the leases with their ends."""
    keys = queues.keys_of(queue)
    found = [
        (state, queues.format_id(stored_messages.decode(value).id))
        for state, prefix in (("ready", keys.ready), ("delayed", keys.delayed), ("blocked", keys.waiting.prefix))
        for _, value in tx.scan(prefix, prefix + b"\xff", limit=1_000)
    ]
    leased = list(message_leases.leased_messages(tx, keys))
    found += [("leased", queues.format_id(each.id)) for each in leased]
    return sorted(found), {queues.format_id(each.id): (each.due_ms, proof(each)) for each in leased}


def proof(message: StoredMessage) -> MessageLease:
    return MessageLease(queues.format_id(message.id), message.lease_id, message.fence)


@pytest.mark.examples(150)
def test_groups_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Groups, steps=40, openers=repeat(MemoryDatabase), names=count(), lasting=False, shared=False)


@pytest.mark.examples(30)
def test_groups_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    folders = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Groups, steps=40, openers=folders, names=count(), lasting=True, shared=False)


@pytest.mark.examples(8)
def test_groups_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Groups, steps=30, openers=repeat(open_postgres), names=count(), lasting=True, shared=True)
