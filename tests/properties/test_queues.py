"""Random histories of a queue and its dead letters on every backend are what plain lists and dicts say.

The model below is DESIGN section 6 in Python: messages in dicts, an order by sorting, and a clock that is moved. It
knows nothing of keys, fronts, notes and tallies, and after every step all of those must say the same as it does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.postgres import PostgresDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.clock import IdSource
from holdfast.errors import QueueMessageLeaseMismatch
from holdfast.kv import Database, Transaction
from holdfast.layers import queues
from holdfast.layers.queues import Ahead, QueueKey, StoredMessage
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues.counters import load_counters
from holdfast.testing.clock import ManualClock
from holdfast.wire.queues import MessageLease, NewMessage, QueuePolicy, Receipt

IDEMPOTENCY_MS = 300_000  # Five minutes.
ACK_MEMORY_MS = 300_000
INLINE_BYTES = 1_024  # A longer payload is stored apart from its message.
MESSAGES_MAX = 30  # Each has at most two moments, and one transaction attends to 64 of them.


# The model.


@dataclass
class Known:
    """What there is to know of a message."""

    id: str
    payload: bytes
    priority: int
    group: str | None
    correlation_id: str
    created_ms: int
    max_attempts: int
    visibility_ms: int
    ttl_at_ms: int | None
    delayed_until_ms: int
    place: str = ""  # ready, delayed, leased or blocked
    attempts: int = 0
    failures: int = 0
    fence: int = 0
    last_error: str | None = None
    origin: str | None = None
    died_ms: int = 0
    owner: str | None = None
    expires_ms: int = 0


@dataclass
class Pile:
    """One queue: its messages by id, who leads each group, and what happened so far."""

    name: str
    messages: dict[str, Known] = field(default_factory=dict)
    leads: dict[str, str] = field(default_factory=dict)
    acked: dict[str, tuple[int, int]] = field(default_factory=dict)  # Id to the fence and the moment.
    put: int = 0
    delivered: int = 0
    failed: int = 0
    expired: int = 0
    died: int = 0

    def at(self, place: str) -> list[Known]:
        """The messages of a place in the order of delivery: the most urgent first, then the oldest."""
        return sorted(
            (each for each in self.messages.values() if each.place == place), key=lambda each: (-each.priority, each.id)
        )


class Model:
    """A queue, the queue of its dead letters, and everything that can happen to them."""

    def __init__(self, name: str, clock: ManualClock) -> None:
        self.clock = clock
        self.policy = QueuePolicy()
        self.jobs, self.dead = Pile(name), Pile(f"{name}.dlq")
        self.keys: dict[str, tuple[str, int]] = {}  # Idempotency key to the message and the moment.

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
        message = Known(
            id=receipt.id,
            payload=new.payload,
            priority=new.priority,
            group=new.group,
            correlation_id=receipt.correlation_id,
            created_ms=self.now_ms,
            max_attempts=self.policy.max_attempts if new.max_attempts is None else new.max_attempts,
            visibility_ms=round(visibility * 1_000),
            ttl_at_ms=None if ttl is None else self.now_ms + round(ttl * 1_000),
            delayed_until_ms=self.now_ms + round(new.delay_seconds * 1_000),
        )
        self.jobs.put += 1
        self.join(self.jobs, message)

    def join(self, pile: Pile, message: Known) -> None:
        """It waits for its turn: behind its group, for its delay, or to be delivered."""
        pile.messages[message.id] = message
        message.owner = None
        in_order = message.group is not None and message.origin is None
        if in_order and pile.leads.setdefault(str(message.group), message.id) != message.id:
            message.place = "blocked"
        else:
            message.place = "delayed" if message.delayed_until_ms > self.now_ms else "ready"

    def leave(self, pile: Pile, message: Known) -> None:
        """It is gone from this queue, and the next one of its group can be delivered."""
        del pile.messages[message.id]
        if message.group is None or pile.leads.get(message.group) != message.id:
            return
        del pile.leads[message.group]
        behind = [each for each in pile.messages.values() if each.group == message.group and each.place == "blocked"]
        if behind:
            self.join(pile, min(behind, key=lambda each: each.id))

    def notice(self, pile: Pile) -> None:
        """Somebody looks at what is due."""
        now_ms = self.now_ms
        for message in sorted(pile.messages.values(), key=lambda each: each.id):
            if message.place == "leased" and message.expires_ms <= now_ms:
                pile.expired += 1
                self.fail(pile, message, f"The lease of {message.owner} ended before it was settled", delay_ms=0)
            elif message.place == "delayed" and message.delayed_until_ms <= now_ms:
                message.place = "ready"
        for message in list(pile.messages.values()):
            if message.id in pile.messages and message.place != "leased" and self.is_over(message):
                self.leave(pile, message)

    def is_over(self, message: Known) -> bool:
        return message.ttl_at_ms is not None and message.ttl_at_ms <= self.now_ms

    def fail(self, pile: Pile, message: Known, error: str | None, *, delay_ms: int) -> None:
        message.failures += 1
        message.last_error = message.last_error if error is None else error
        if message.origin is None and message.failures >= message.max_attempts:
            self.die(pile, message)
        else:
            self.give_back(pile, message, delay_ms)

    def reject(self, pile: Pile, message: Known, error: str | None) -> None:
        """It dies at once; a dead letter, which cannot die again, has failed once more."""
        if message.origin is None:
            message.failures += 1
            message.last_error = message.last_error if error is None else error
            self.die(pile, message)
        else:
            self.fail(pile, message, error, delay_ms=0)

    def give_back(self, pile: Pile, message: Known, delay_ms: int) -> None:
        if self.is_over(message):
            self.leave(pile, message)
            return
        message.delayed_until_ms = self.now_ms + delay_ms
        self.join(pile, message)

    def die(self, pile: Pile, message: Known) -> None:
        assert message.origin is None, "a dead letter never dies again"
        pile.died += 1
        self.leave(pile, message)
        message.origin, message.died_ms = pile.name, self.now_ms
        message.ttl_at_ms = self.now_ms + round(self.policy.dead_letter_retention_seconds * 1_000)
        message.delayed_until_ms = 0
        self.join(self.dead, message)

    def lease(self, pile: Pile, *, owner: str, limit: int, visibility_ms: int | None) -> list[Known]:
        self.notice(pile)
        if pile is self.jobs and self.policy.paused:
            return []
        taken = pile.at("ready")[:limit]
        for message in taken:
            message.place, message.owner = "leased", owner
            message.expires_ms = self.now_ms + (message.visibility_ms if visibility_ms is None else visibility_ms)
            message.attempts += 1
            message.fence += 1
            pile.delivered += 1
        return taken

    def redrive(self, ids: list[str] | None, limit: int) -> int:
        ready = self.dead.at("ready")
        letters = ready[:limit] if ids is None else [each for each in ready if each.id in ids]
        for message in sorted(letters, key=lambda each: each.id):  # Groups go on in the order of their puts.
            self.leave(self.dead, message)
            message.origin, message.died_ms, message.failures = None, 0, 0
            retention = self.policy.retention_seconds
            message.ttl_at_ms = None if retention is None else self.now_ms + round(retention * 1_000)
            message.delayed_until_ms = 0
            self.join(self.jobs, message)
        return len(letters)

    def moments(self) -> list[int]:
        """When something is due, of all that is known."""
        moments = [
            moment
            for pile in (self.jobs, self.dead)
            for each in pile.messages.values()
            for moment in (each.expires_ms if each.place == "leased" else each.delayed_until_ms, each.ttl_at_ms or 0)
        ]
        return sorted({moment for moment in moments if moment > self.now_ms})


# What is done, at random.

seconds = st.sampled_from((0.001, 0.5, 1.0, 2.0, 5.0, 30.0))
news = st.builds(
    NewMessage,
    payload=st.binary(max_size=4) | st.sampled_from((INLINE_BYTES, INLINE_BYTES + 1, 3_000)).map(lambda n: b"\x07" * n),
    priority=st.sampled_from((5, 5, 5, 0, 9)),
    group=st.sampled_from((None, None, None, "a", "a", "b")),
    delay_seconds=st.sampled_from((0.0, 0.0, 0.0, 0.5, 2.0)),
    ttl_seconds=st.sampled_from((None, None, None, 0.001, 1.0, 5.0)),
    max_attempts=st.none() | st.integers(1, 3),
    visibility_seconds=st.none() | seconds,
    idempotency_key=st.sampled_from((None, None, None, None, "k", "l")),
    correlation_id=st.none() | st.just("because"),
)
owners = st.sampled_from(("ada", "bob", "eve"))
errors = st.none() | st.sampled_from(("boom", "bang"))
outcomes = st.one_of(
    st.just(("ack", {})),
    st.fixed_dictionaries({"counts": st.booleans(), "error": errors}).map(lambda options: ("nack", options)),
    st.fixed_dictionaries({"delay_seconds": seconds, "counts": st.booleans()}).map(lambda options: ("nack", options)),
    st.fixed_dictionaries({"error": errors}).map(lambda options: ("reject", options)),
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
)
picks = st.integers(0, 1_000)


class OnPurpose(Exception):
    """Ends a transaction that must leave nothing behind."""


class Queues(RuleBasedStateMachine):
    """A queue, its dead letters and their model; every rule is a transaction."""

    openers: Iterator[Callable[..., Database]]  # Each example takes one; it opens that example's database.
    names: Iterator[int]  # Queues of all examples may share a database.
    lasting: bool  # Whether a database that is opened again finds what was written.
    shared: bool  # Whether others may write too, whose ids are not in the order of puts.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.opener = next(self.openers)
        self.seeds = count()
        self.database = self.open()
        name = f"jobs-{next(self.names)}"
        self.queue, self.dlq = QueueKey("main", name), QueueKey("main", f"{name}.dlq")
        self.model = Model(name, self.clock)
        self.ahead = {self.queue: Ahead(), self.dlq: Ahead()}
        self.ids: set[str] = set()  # Of every message that was ever put.
        self.proofs: list[tuple[QueueKey, MessageLease]] = []  # Every one that was ever handed out.

    def open(self, seed: int = 0) -> Database:
        """As another process would, whose ids begin anywhere in the millisecond that the clock shows."""
        return self.opener(clock=self.clock, ids=IdSource(1_001 * next(self.seeds) + seed))  # Never one seed twice.

    def pile(self, queue: QueueKey) -> Pile:
        return self.model.dead if queue == self.dlq else self.model.jobs

    # Putting and delivering.

    @initialize(some=st.lists(news, min_size=3, max_size=8))
    def there_are_messages(self, some: list[NewMessage]) -> None:
        self.put(some)

    @precondition(lambda self: len(self.model.jobs.messages) + len(self.model.dead.messages) < MESSAGES_MAX)
    @rule(some=st.lists(news, min_size=1, max_size=4))
    def messages_are_put(self, some: list[NewMessage]) -> None:
        self.put(some)

    def put(self, some: list[NewMessage]) -> None:
        receipts = self.database.transact(queues.put, self.queue, some)
        assert len(receipts) == len(some)
        fresh = [receipt.id for receipt in receipts if not receipt.duplicate]
        assert self.shared or (fresh == sorted(fresh) and all(id > max(self.ids, default="") for id in fresh))
        self.ids |= set(fresh)
        for new, receipt in zip(some, receipts, strict=True):
            self.model.put(new, receipt)

    @rule(dead=rarely, owner=owners, limit=st.integers(1, 3), ms=visibilities_ms, ahead=mostly)
    def messages_are_leased(self, dead: bool, owner: str, limit: int, ms: int | None, ahead: bool) -> None:
        queue = self.dlq if dead else self.queue
        expected = self.model.lease(self.pile(queue), owner=owner, limit=limit, visibility_ms=ms)
        found = self.database.transact(
            queues.lease,
            queue,
            owner=owner,
            limit=limit,
            visibility_ms=ms,
            ahead=self.ahead[queue] if ahead else None,
        )
        assert [told(message) for message in found] == [said(message) for message in expected]
        assert [message.payload for message in found] == [message.payload for message in expected]
        proofs = [(queue, proof(message)) for message in found]
        assert not {each.lease_id for _, each in proofs} & {each.lease_id for _, each in self.proofs}
        self.proofs += proofs

    @rule(some=st.lists(outcomes, min_size=1, max_size=4), dead=rarely, ahead=mostly)
    def a_consumer_comes_by(self, some: list[tuple[str, dict[str, Any]]], dead: bool, ahead: bool) -> None:
        """Takes a message at a time, and settles each in its way."""
        for outcome, options in some:
            before = len(self.proofs)
            self.messages_are_leased(dead=dead, owner="ada", limit=1, ms=None, ahead=ahead)
            for queue, shown in self.proofs[before:]:
                self.settle(queue, shown, outcome, options)

    # Settling with the proof of a lease that is the message's own, whether its time is over or not.

    def holder(self, queue: QueueKey, shown: MessageLease) -> Known | None:
        message = self.pile(queue).messages.get(shown.id)
        return message if message and message.place == "leased" and message.fence == shown.fence else None

    def current(self) -> list[tuple[QueueKey, MessageLease]]:
        return [each for each in self.proofs if self.holder(*each)]

    @precondition(lambda self: self.current())
    @rule(pick=picks, outcome=outcomes)
    def a_message_is_settled(self, pick: int, outcome: tuple[str, dict[str, Any]]) -> None:
        held = self.current()
        self.settle(*held[pick % len(held)], *outcome)

    def settle(self, queue: QueueKey, shown: MessageLease, outcome: str, options: dict[str, Any]) -> None:
        pile, message = self.pile(queue), self.holder(queue, shown)
        assert message is not None
        answer = self.database.transact(getattr(queues, outcome), queue, shown, **options)
        error, delay_ms = options.get("error"), round(options.get("delay_seconds", 0) * 1_000)
        if outcome == "extend":
            message.expires_ms = max(message.expires_ms, self.model.now_ms + options["by_ms"])
            assert answer.due_ms == message.expires_ms
            return
        assert answer == message.correlation_id
        if outcome == "ack":
            pile.acked[message.id] = (message.fence, self.model.now_ms)
            self.model.leave(pile, message)
        elif outcome == "reject":
            pile.failed += 1
            self.model.reject(pile, message, error)
        elif options["counts"]:
            pile.failed += 1
            self.model.fail(pile, message, error, delay_ms=delay_ms)
        else:
            self.model.give_back(pile, message, delay_ms)

    # Settling with any other proof.

    @precondition(lambda self: self.proofs)
    @rule(pick=picks, how=st.sampled_from(("ack", "nack", "reject", "extend")), forged=st.integers(0, 3))
    def somebody_shows_what_is_no_lease(self, pick: int, how: str, forged: int) -> None:
        """An old one, one with another fence or name, or one of another queue: nothing happens, and they are told."""
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
        fence, at_ms = self.pile(queue).acked.get(shown.id, (0, 0))
        ago_ms = self.model.now_ms - at_ms
        if how == "ack" and forged != 2 and fence == shown.fence and ago_ms < ACK_MEMORY_MS + 60_000:
            # With the same lease a second ack succeeds, for five minutes at least and six at most.
            if ago_ms < ACK_MEMORY_MS:
                assert self.database.transact(queues.ack, queue, shown) is None
        else:
            with pytest.raises(QueueMessageLeaseMismatch):
                self.database.transact(settle, queue, shown)

    @precondition(lambda self: self.proofs)
    @rule(pick=picks)
    def a_lease_is_checked(self, pick: int) -> None:
        """Unlike settling, what is done under a lease is refused as soon as its time is over."""
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
        moments = self.model.moments()
        if moments:
            self.clock.advance_ms(max(moments[pick % len(moments)] - early_ms - self.model.now_ms, 0))
        queue = self.dlq if dead else self.queue
        self.model.notice(self.pile(queue))
        assert self.database.transact(queues.process_due_of, queue) > self.model.now_ms

    # Looking after a queue.

    @rule(policy=policies)
    def the_policy_changes(self, policy: QueuePolicy) -> None:
        assert self.database.transact(queues.set_policy, self.queue, policy) == policy
        assert self.database.read(queues.policy_of, self.queue) == policy
        self.model.policy = policy

    @rule(ids=st.none() | st.lists(picks, max_size=3), limit=st.integers(1, 4))
    def dead_letters_are_put_back(self, ids: list[int] | None, limit: int) -> None:
        """Those named, or all; what is no dead letter, or is in somebody's hands, is left alone."""
        known = sorted(self.model.dead.messages) + sorted(self.model.jobs.messages)
        named = None if ids is None else [known[pick % len(known)] for pick in ids if known]
        moved = self.database.transact(queues.redrive, self.queue, ids=named, limit=limit)
        assert moved == self.model.redrive(named, limit)

    @rule(purged=rarely, dead=rarely, limit=st.integers(1, 5))
    def somebody_peeks_or_purges(self, purged: bool, dead: bool, limit: int) -> None:
        """What is in somebody's hands is left alone."""
        queue = self.dlq if dead else self.queue
        found = self.database.read(queues.peek, queue, limit=limit)
        first = self.pile(queue).at("ready")[:limit]
        assert [(told(each), each.payload) for each in found] == [(said(each), each.payload) for each in first]
        if purged:
            expected = [each for each in self.pile(queue).messages.values() if each.place != "leased"]
            assert purge(self.database, queue, limit) == len(expected)
            for message in sorted(expected, key=lambda each: each.place != "blocked"):
                self.model.leave(self.pile(queue), message)

    @precondition(lambda self: self.current())
    @rule(some=st.lists(news, min_size=1, max_size=2), owner=owners)
    def a_commit_that_fails_has_done_nothing(self, some: list[NewMessage], owner: str) -> None:
        """Nor has it spoiled what was read ahead."""

        def work(tx: Transaction) -> None:
            queues.ack(tx, *self.current()[-1])
            queues.put(tx, self.queue, some)
            queues.redrive(tx, self.queue)
            queues.lease(tx, self.queue, owner=owner, limit=3, ahead=self.ahead[self.queue])
            raise OnPurpose

        with pytest.raises(OnPurpose):
            self.database.transact(work)

    @precondition(lambda self: self.lasting)
    @rule(seed=picks)
    def the_database_is_opened_again(self, seed: int) -> None:
        """What was read ahead is gone with the process. On PostgreSQL, a writer with a tally of its own begins."""
        self.database.close()
        self.database = self.open(seed)
        self.ahead = {self.queue: Ahead(), self.dlq: Ahead()}

    # What must hold after every step.

    @invariant()
    def every_message_is_where_the_model_says_once_and_nothing_else_is_there(self) -> None:
        for queue in (self.queue, self.dlq):
            stored, bodies, events, heads = self.database.read(contents, queue)
            known = self.pile(queue).messages
            assert sorted(place_and_id for place_and_id, _ in stored) == sorted(
                ({"delayed": "p", "leased": "p", "ready": "r", "blocked": "w"}[each.place], each.id)
                for each in known.values()
            )
            for _, message in stored:
                assert told(message) == said(known[queues.text_of(message.id)])
            assert bodies == {each.id: each.payload for each in known.values() if len(each.payload) > INLINE_BYTES}
            assert heads == self.pile(queue).leads
            # A note of a TTL that was over when somebody looked is gone, while whoever leases the message goes on.
            ends = {(each.ttl_at_ms, each.id, b"T") for each in known.values() if each.ttl_at_ms}
            waits = {
                (each.expires_ms if each.place == "leased" else each.delayed_until_ms, each.id, b"")
                for each in known.values()
                if each.place in ("leased", "delayed")
            }
            assert waits <= events <= waits | ends
            assert ends - events <= {
                (each.ttl_at_ms, each.id, b"T")
                for each in known.values()
                if each.place == "leased" and self.model.is_over(each)
            }

    @invariant()
    def the_stats_are_the_counts_of_the_model(self) -> None:
        for queue, pile in ((self.queue, self.model.jobs), (self.dlq, self.model.dead)):
            stats = self.database.read(queues.stats, queue)
            assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == tuple(
                len(pile.at(place)) for place in ("ready", "delayed", "leased", "blocked")
            )
            assert stats.dead == (len(self.model.dead.messages) if queue == self.queue else 0)
            counts = (stats.put_total, stats.delivered_total, stats.acked_total, stats.failed_total)
            assert counts == (pile.put, pile.delivered, len(pile.acked), pile.failed)
            assert (stats.expired_total, stats.dead_total) == (pile.expired, pile.died)
            head = next(iter(pile.at("ready")), None)
            assert stats.head_message_id == (head.id if head else None)
            assert stats.head_age_seconds == ((self.model.now_ms - head.created_ms) / 1_000 if head else 0.0)
            assert stats.paused == (queue == self.queue and self.model.policy.paused)

    @invariant()
    def nothing_is_hidden_behind_a_front_or_due_before_it_is_expected(self) -> None:
        def look(tx: Transaction, queue: QueueKey) -> None:
            events = [at_ms for at_ms, _, _ in contents(tx, queue)[2]]
            assert queues.next_due(tx, queue) <= min(events, default=queues.NEVER_MS)
            if tx.writer:
                return
            counters = load_counters(tx, queues.keys_of(queue))
            assert counters.due_front_ms <= min(events, default=queues.NEVER_MS)
            for message in self.pile(queue).at("ready"):
                assert queue_keys.id_of(message.id) >= counters.fronts.get(message.priority, b"")

        for queue in (self.queue, self.dlq):
            self.database.read(look, queue)

    @invariant()
    def one_message_of_a_group_is_in_flight_and_those_behind_it_wait(self) -> None:
        """Of the model itself: with the equality above, of the queue."""
        pile = self.model.jobs
        for group in ("a", "b"):
            members = [each for each in pile.messages.values() if each.group == group]
            assert len([each for each in members if each.place != "blocked"]) == bool(members)
        assert not self.model.dead.at("blocked")
        assert all(each.origin == self.queue.name for each in self.model.dead.messages.values())
        assert all(each.failures < each.max_attempts for each in pile.messages.values())
        assert not set(pile.messages) & (set(self.model.dead.messages) | set(pile.acked) | set(self.model.dead.acked))

    def teardown(self) -> None:
        self.database.close()


def proof(message: StoredMessage) -> MessageLease:
    return MessageLease(queues.text_of(message.id), message.lease_id, message.fence)


def purge(database: Database, queue: QueueKey, limit: int = 256) -> int:
    removed, after = 0, b""
    while True:
        count, following = database.transact(queues.purge, queue, after=after, limit=limit)
        removed += count
        if following is None:
            return removed
        after = following


def contents(
    tx: Transaction, queue: QueueKey
) -> tuple[list[tuple[tuple[str, str], StoredMessage]], dict[str, bytes], set[tuple[int, str, bytes]], dict[str, str]]:
    """Everything in a queue's room: messages by place, payloads stored apart, notes of moments, and leads of groups."""
    room = queues.keys_of(queue)
    stored = [
        ((place, queues.text_of(message.id)), message)
        for place, prefix in (("r", room.ready), ("p", room.parked), ("w", room.waiting.prefix))
        for _, value in tx.scan(prefix, prefix + b"\xff", limit=1_000)
        for message in [queue_keys.decode(value)]
    ]
    bodies = tx.scan(room.body, room.body + b"\xff", limit=1_000)
    events = [key[len(room.due) :] for key, _ in tx.scan(room.due, room.due + b"\xff" * 9, limit=1_000)]
    heads = tx.scan(*room.head.range(), limit=1_000)
    return (
        stored,
        {queues.text_of(key[len(room.body) :]): value for key, value in bodies},
        {(int.from_bytes(note[:8], "big"), queues.text_of(note[8:24]), note[24:]) for note in events},
        {str(room.head.unpack(key)[0]): queues.text_of(value[:16]) for key, value in heads},
    )


def told(message: StoredMessage) -> dict[str, Any]:
    """What a stored message says of itself."""
    return {
        "id": queues.text_of(message.id),
        "size": message.size,
        "priority": message.priority,
        "group": message.group,
        "correlation_id": message.correlation_id,
        "created_ms": message.created_ms,
        "max_attempts": message.max_attempts,
        "visibility_ms": message.visibility_ms,
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


def said(message: Known) -> dict[str, Any]:
    """The same of the model."""
    leased = message.place == "leased"
    names = (
        "id priority group correlation_id created_ms max_attempts visibility_ms ttl_at_ms attempts failures fence "
        "last_error origin died_ms"
    )
    return {name: getattr(message, name) for name in names.split()} | {
        "size": len(message.payload),
        "owner": message.owner if leased else None,
        "expires_ms": message.expires_ms if leased else None,
    }


def run_machine(
    openers: Iterator[Callable[..., Database]], *, examples: int, lasting: bool = False, shared: bool = False
) -> None:
    parts = {"openers": openers, "names": count(), "lasting": lasting, "shared": shared}
    machine = type("Machine", (Queues,), parts)
    bounds = settings(max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=bounds)


def often(examples: int) -> pytest.MarkDecorator:
    nightly = pytest.param(20 * examples, id="nightly", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("examples", [pytest.param(examples, id="suite"), nightly])


@often(400)
def test_a_queue_in_memory_does_what_lists_and_dicts_do(examples: int) -> None:
    run_machine(repeat(MemoryDatabase), examples=examples)


@often(40)
def test_a_queue_on_rocksdb_does_what_lists_and_dicts_do(examples: int, tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(fresh, examples=examples, lasting=True)


@often(20)
def test_a_queue_on_postgres_does_what_lists_and_dicts_do(examples: int, postgres_url: str) -> None:
    run_machine(repeat(partial(PostgresDatabase, postgres_url)), examples=examples, lasting=True, shared=True)
