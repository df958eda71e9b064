"""Random lives of jobs match a plain Python model, on every backend: keys, unique keys, debounce, cancel and results.

The model has messages in dicts and computes whose turn it is by looking at all of them. It has no lanes, locations,
states of keys or due entries; after every step, what `get` says of each message must agree with it.
"""

import math
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
from fastness.errors import (
    MessageCancelled,
    MessageFailed,
    MessageFinished,
    MessageLeased,
    MessageNotFound,
    QueueMessageLeaseMismatch,
)
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import Prefetched, QueueKey
from fastness.testing.clock import ManualClock
from fastness.wire.queues import (
    MessageInfo,
    MessageLease,
    NewMessage,
    NewResult,
    PackedAck,
    QueuePolicy,
    bits_of,
)
from fastness.wire.stored_messages import parse_id

RATE_PER_KEY = 62.5  # One message in 16 ms: exact in binary, so that the model and the queue round alike.
LIVE_MAX = 25  # One transaction processes 64 due entries.
RESULT_TTL_MS = 2_000
FAILURES_KEPT = 4  # A message that is redriven has more.
WAITS = ("ready", "delayed", "blocked")


@dataclass
class Job:
    """A message in the model."""

    id: str
    new: NewMessage
    number: int  # The order of puts.
    priority: int
    state: str = ""
    due_ms: int = 0
    lease: MessageLease | None = None
    ack: PackedAck | None = None  # Acknowledges it by its position in the lease.
    expires_ms: int = 0
    failures: int = 0
    errors: list[str | None] = field(default_factory=list)  # Of all failed attempts, the oldest first.
    max_attempts: int = 3
    finished_ms: int = -1
    result: bytes | None = None
    is_kept: bool = False
    position: int = 0  # Its turn, if the keys take turns.
    first_ms: int = 0  # When the first message with its debounce key was put.

    @property
    def place(self) -> tuple[int, str]:
        return -self.priority, self.id


@dataclass
class Key:
    """The limits of a key, in the model."""

    budget: float
    budget_ms: int = 0
    paused_until_ms: int = 0


@dataclass
class Ended:
    """A lease that does not hold any more."""

    id: str
    lease: MessageLease
    ack: PackedAck
    is_cancelled: bool


news = st.builds(
    lambda unique, **options: NewMessage(
        b"body", unique_key=unique[0], unique_until=unique[1], visibility_seconds=0.2, **options
    ),
    unique=st.sampled_from(
        [(None, "done"), (None, "done"), (None, "done"), ("u", "done"), ("u", "leased"), ("v", "done"), ("v", 0.1)]
    ),
    key=st.sampled_from([None, "a", "a", "b", "c"]),
    priority=st.sampled_from([5, 5, 5, 1, 9]),
    delay_seconds=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
    keep_result=st.booleans(),
)


class Jobs(RuleBasedStateMachine):
    """A queue, and the model of it."""

    openers: Iterator[Callable[..., Database]]
    names: Iterator[int]
    nodes = 1

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        opener = next(self.openers)
        self.databases = [opener(clock=self.clock, ids=IdSource(node)) for node in range(self.nodes)]
        self.turns = count()
        self.queue = QueueKey("main", f"jobs-{next(self.names)}")
        self.jobs: dict[str, Job] = {}
        self.keys: dict[str, Key] = {}
        self.unique: dict[str, tuple[str, int]] = {}  # Key to its message, and until when; 0: while that is there.
        self.ended: list[Ended] = []
        self.numbers = count(1)
        self.prefetched = Prefetched()
        self.policy = QueuePolicy()

    @initialize(
        concurrency=st.sampled_from([None, None, 1, 2]),
        rate=st.sampled_from([None, None, RATE_PER_KEY]),
        burst=st.sampled_from([1, 3]),
        fair=st.booleans(),
        some=st.lists(news, min_size=4, max_size=10),
    )
    def the_queue_begins(
        self, concurrency: int | None, rate: float | None, burst: int, fair: bool, some: list[NewMessage]
    ) -> None:
        self.policy = QueuePolicy(
            concurrency_per_key=concurrency,
            rate_per_key=rate,
            burst_per_key=burst,
            fair=fair and self.nodes == 1,  # Nodes do not agree about the order of turns in one millisecond.
            max_attempts=3,
            retry_jitter=0.0,
            failures_kept=FAILURES_KEPT,
            result_ttl_seconds=RESULT_TTL_MS / 1_000,
        )
        self.database.transact(queues.set_policy, self.queue, self.policy)
        self.messages_are_put(some)

    @property
    def database(self) -> Database:
        """The nodes take turns."""
        return self.databases[next(self.turns) % self.nodes]

    # The model.

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def at(self, *states: str) -> list[Job]:
        return sorted((job for job in self.jobs.values() if job.state in states), key=lambda job: job.place)

    def of_key(self, key: str, state: str) -> list[Job]:
        return [job for job in self.at(state) if job.new.key == key]

    def key(self, name: str) -> Key:
        return self.keys.setdefault(name, Key(float(self.policy.burst_per_key or 1)))

    def budget(self, name: str) -> float:
        key, rate = self.key(name), self.policy.rate_per_key
        assert rate is not None
        assert self.policy.burst_per_key is not None
        return min(key.budget + (self.now_ms - key.budget_ms) * rate / 1_000, float(self.policy.burst_per_key))

    def may_go_on(self, name: str) -> bool:
        limit = self.policy.concurrency_per_key
        if limit is not None and len(self.of_key(name, "leased")) >= limit:
            return False
        if self.key(name).paused_until_ms > self.now_ms:
            return False
        return self.policy.rate_per_key is None or self.budget(name) >= 1

    def go_on(self, name: str) -> None:
        """Make the first waiting message of a key ready, if none is and it may be."""
        waiting = self.of_key(name, "blocked")
        if waiting and not self.of_key(name, "ready") and self.may_go_on(name):
            waiting[0].state, waiting[0].position = "ready", next(self.numbers)

    def insert(self, job: Job, delay_ms: int, *, newest: bool = False) -> None:
        job.lease, name = None, job.new.key
        if delay_ms > 0:
            job.state, job.due_ms = "delayed", self.now_ms + delay_ms
            return
        if name is None:
            job.state, job.position = "ready", job.number
            return
        ready = self.of_key(name, "ready")
        if ready and job.place < ready[0].place:
            job.state, job.position, ready[0].state = "ready", ready[0].position, "blocked"
            return
        is_first = newest and not self.of_key(name, "blocked")
        job.state = "blocked"
        self.go_on(name)
        if is_first and job.state == "ready":
            job.position = job.number

    def leave(self, job: Job, *, cancelled: bool = False) -> None:
        """A message is taken out of its lease."""
        assert job.lease is not None
        assert job.ack is not None
        self.ended.append(Ended(job.id, job.lease, job.ack, cancelled))
        job.state = "taken"
        if job.new.key is not None:
            self.go_on(job.new.key)

    def finish(self, job: Job, state: str, *, kept: bool, result: bytes | None = None) -> None:
        """A message leaves the queue."""
        was_ready, job.state = job.state == "ready", state
        job.finished_ms, job.is_kept, job.result = self.now_ms, kept, result
        holder = self.unique.get(job.new.unique_key or "")
        if holder is not None and holder == (job.id, 0):
            del self.unique[job.new.unique_key or ""]
        if was_ready and job.new.key is not None:
            self.go_on(job.new.key)

    def fail(self, job: Job, delay_ms: int, error: str) -> None:
        job.failures += 1
        job.errors.append(error)
        if job.failures >= job.max_attempts:
            self.finish(job, "dead", kept=job.new.keep_result)
        else:
            self.insert(job, delay_ms)

    def process_due(self) -> None:
        """End the leases and delays that are over, and let keys go on, in the order of their times."""
        due: list[tuple[int, bytes, int, Callable[[], None]]] = []
        for job in self.at("leased"):
            if job.expires_ms <= self.now_ms and job.ack is not None:
                due.append((job.expires_ms, job.ack.lease, job.ack.mask, partial(self.expire, job)))
        for job in self.at("delayed"):
            if job.due_ms <= self.now_ms:
                due.append((job.due_ms, parse_id(job.id), 0, partial(self.end_delay, job)))
        for name in self.keys:
            if self.of_key(name, "blocked") and not self.of_key(name, "ready") and self.may_go_on(name):
                due.append((self.goes_on_ms(name), b"K" + name.encode(), 0, partial(self.go_on, name)))
        for *_, work in sorted(due, key=lambda each: each[:3]):
            work()

    def goes_on_ms(self, name: str) -> int:
        """When a key may go on that has to wait for its pause or its rate."""
        key, rate = self.key(name), self.policy.rate_per_key
        if rate is None or key.budget >= 1:
            return key.paused_until_ms
        return max(key.paused_until_ms, key.budget_ms + math.ceil((1 - key.budget) / rate * 1_000))

    def end_delay(self, job: Job) -> None:
        job.first_ms = 0
        self.insert(job, 0)

    def expire(self, job: Job) -> None:
        self.leave(job)
        self.fail(job, 0, "The lease of ada ended before it was settled")

    def deliverable(self) -> list[Job]:
        """The ready messages, in the order in which they are delivered."""

        def order(job: Job) -> tuple[int, int, str]:
            if not self.policy.fair:
                return -job.priority, 0, job.id
            return (-5 if job.new.key is not None else -job.priority), job.position, job.id

        return sorted(self.at("ready"), key=order)

    # The rules.

    @rule(some=st.lists(news, min_size=1, max_size=4))
    @precondition(lambda self: len(self.at(*WAITS, "leased")) < LIVE_MAX)
    def messages_are_put(self, some: list[NewMessage]) -> None:
        for new in some:
            self.put(new)

    def put(self, new: NewMessage) -> None:
        (receipt,) = self.database.transact(queues.put, self.queue, [new])
        holder = self.unique.get(new.unique_key or "")
        if holder is not None and (not holder[1] or self.now_ms < holder[1]):
            assert (receipt.id, receipt.duplicate) == (holder[0], True)
            return
        assert not receipt.duplicate
        job = self.jobs[receipt.id] = Job(receipt.id, new, next(self.numbers), new.priority)
        if new.unique_key is not None:
            self.unique[new.unique_key] = (job.id, self.now_ms + 100 if new.unique_until == 0.1 else 0)
        self.insert(job, round((new.delay_seconds or 0.0) * 1_000), newest=True)

    @rule(key=st.sampled_from([None, "a"]), debounce=st.sampled_from(["d", "e"]), body=st.binary(max_size=2_000))
    @precondition(lambda self: len(self.at(*WAITS, "leased")) < LIVE_MAX)
    def a_message_is_debounced(self, key: str | None, debounce: str, body: bytes) -> None:
        new = NewMessage(
            body, key=key, debounce_key=debounce, debounce_seconds=0.05, debounce_max_seconds=0.12, max_attempts=3
        )
        (receipt,) = self.database.transact(queues.put, self.queue, [new])
        held = [job for job in self.at("delayed") if job.new.debounce_key == debounce and job.first_ms]
        if held:
            (job,) = held
            assert (receipt.id, receipt.duplicate) == (job.id, True)
            job.new, job.priority = new, new.priority
            self.insert(job, max(min(50, 120 - (self.now_ms - job.first_ms)), 1))
            return
        assert not receipt.duplicate
        job = self.jobs[receipt.id] = Job(receipt.id, new, next(self.numbers), new.priority, first_ms=self.now_ms)
        self.insert(job, 50, newest=True)

    @rule(limit=st.integers(1, 6), prefetched=st.booleans())
    def messages_are_leased(self, limit: int, prefetched: bool) -> None:
        leased = self.database.transact(
            queues.lease_or_wait,
            self.queue,
            owner="ada",
            limit=limit,
            prefetched=self.prefetched if prefetched else None,
        )
        self.process_due()
        acks = [
            PackedAck(held.id, held.record.fence, held.record.fences, bits_of(1 << position))
            for held in leased.leases
            for position in held.remaining()
        ]
        for message, ack in zip(leased.messages, acks, strict=True):
            (job, *_) = self.deliverable()
            assert queues.format_id(message.id) == job.id, "messages are delivered in order"
            job.state, job.expires_ms = "leased", self.now_ms + message.visibility_ms
            job.lease, job.ack = MessageLease(job.id, message.lease_id, message.fence), ack
            if job.new.unique_until == "leased" and self.unique.get(job.new.unique_key or "") == (job.id, 0):
                del self.unique[job.new.unique_key or ""]
            if job.new.key is not None:
                if self.policy.rate_per_key is not None:
                    self.key(job.new.key).budget = self.budget(job.new.key) - 1
                    self.key(job.new.key).budget_ms = self.now_ms
                self.go_on(job.new.key)
        assert len(acks) == limit or not self.deliverable(), "nothing that may be delivered is held back"

    @rule(pick=st.integers(0, 100), how=st.sampled_from(["ack", "ack", "packed", "result", "nack", "defer", "reject"]))
    @precondition(lambda self: bool(self.at("leased")))
    def a_message_is_settled(self, pick: int, how: str) -> None:
        leased = self.at("leased")
        job = leased[pick % len(leased)]
        assert job.lease is not None
        if how in ("ack", "result"):
            result = NewResult(b"42", "text/plain") if how == "result" else None
            self.database.transact(queues.ack, self.queue, job.lease, result)
        elif how == "packed":
            assert job.ack is not None
            assert self.database.transact(queues.ack_packed, self.queue, [job.ack]) == []
        elif how == "reject":
            self.database.transact(queues.reject, self.queue, job.lease, error="rejected")
        else:
            self.database.transact(
                queues.nack, self.queue, job.lease, counts=how == "nack", error="failed", delay_seconds=0
            )
        self.leave(job)
        if how in ("ack", "result", "packed"):
            value = b"42" if how == "result" else None
            self.finish(job, "done", kept=job.new.keep_result or how == "result", result=value)
        elif how == "reject":
            job.failures += 1
            job.errors.append("rejected")
            self.finish(job, "dead", kept=job.new.keep_result)
        elif how == "nack":
            self.fail(job, 0, "failed")
        else:
            self.insert(job, 0)

    @rule(pick=st.integers(0, 100))
    @precondition(lambda self: bool(self.jobs))
    def a_message_is_cancelled(self, pick: int) -> None:
        job = list(self.jobs.values())[pick % len(self.jobs)]
        try:
            found = self.database.transact(queues.cancel, self.queue, job.id)
        except MessageNotFound:
            assert not self.is_known(job)
            return
        assert isinstance(found, MessageInfo)
        if job.state not in (*WAITS, "leased"):
            assert found.state == job.state
            return
        assert found.state == "cancelled"
        assert [each.message for each in found.failures] == job.errors[-FAILURES_KEPT:]
        if job.state == "leased":
            self.leave(job, cancelled=True)
        self.finish(job, "cancelled", kept=True)

    @rule(pick=st.integers(0, 100), priority=st.sampled_from([None, 2, 9]), delay_ms=st.sampled_from([None, 0, 70]))
    @precondition(lambda self: bool(self.jobs))
    def a_message_is_updated(self, pick: int, priority: int | None, delay_ms: int | None) -> None:
        if priority is None and delay_ms is None:
            return
        job = list(self.jobs.values())[pick % len(self.jobs)]
        seconds = None if delay_ms is None else delay_ms / 1_000
        try:
            self.database.transact(queues.update, self.queue, job.id, priority=priority, delay_seconds=seconds)
        except MessageNotFound:
            assert not self.is_known(job)
            return
        except MessageLeased:
            assert job.state == "leased"
            return
        except MessageFinished:
            assert job.state in ("done", "dead", "cancelled")
            assert self.is_known(job)
            return
        assert job.state in WAITS
        left_ms = max(job.due_ms - self.now_ms, 0) if job.state == "delayed" else 0
        was_ready, job.state = job.state == "ready", "taken"
        if was_ready and job.new.key is not None:
            self.go_on(job.new.key)
        job.priority = job.priority if priority is None else priority
        delay_ms = left_ms if delay_ms is None else delay_ms
        if not delay_ms:
            job.first_ms = 0
        self.insert(job, delay_ms)

    @rule(name=st.sampled_from(["a", "b", "new"]), ms=st.sampled_from([0, 30, 200]))
    def a_key_is_paused(self, name: str, ms: int) -> None:
        key = self.key(name)
        info = self.database.transact(queues.pause_key, self.queue, name, until_ms=self.now_ms + ms)
        key.paused_until_ms = self.now_ms + ms
        if ms:
            for job in self.of_key(name, "ready"):
                job.state = "blocked"
        self.go_on(name)
        assert info.paused_until_ms == (self.now_ms + ms if ms else None)

    @rule(pick=st.integers(0, 100))
    @precondition(lambda self: bool(self.at("dead")))
    def a_dead_letter_is_redriven(self, pick: int) -> None:
        dead = self.at("dead")
        job = dead[pick % len(dead)]
        count = self.database.transact(queues.redrive, self.queue, ids=[job.id])
        unique = job.new.unique_key or ""
        holder = self.unique.get(unique)
        if holder is not None and (not holder[1] or self.now_ms < holder[1]):
            assert count == 0
            return
        assert count == 1
        job.failures, job.is_kept = 0, False
        if job.new.unique_key is not None:
            self.unique[unique] = (job.id, self.now_ms + 100 if job.new.unique_until == 0.1 else 0)
        self.insert(job, 0)

    @rule(ms=st.sampled_from([1, 7, 16, 60, 250, RESULT_TTL_MS]))
    def time_passes(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule(pick=st.integers(0, 100), how=st.sampled_from(["ack", "packed", "nack", "extend"]))
    @precondition(lambda self: bool(self.ended))
    def an_ended_lease_is_refused(self, pick: int, how: str) -> None:
        ended = self.ended[pick % len(self.ended)]
        if self.jobs[ended.id].state == "done":
            return  # An ack may be repeated.
        kind = QueueMessageLeaseMismatch
        if ended.is_cancelled and self.now_ms < self.jobs[ended.id].finished_ms + RESULT_TTL_MS:
            kind = MessageCancelled
        if how == "packed":
            (refused,) = self.database.transact(queues.ack_packed, self.queue, [ended.ack])
            assert refused.code in (kind.code, MessageCancelled.code if ended.is_cancelled else kind.code)
            return
        with pytest.raises(kind):
            if how == "ack":
                self.database.transact(queues.ack, self.queue, ended.lease)
            elif how == "nack":
                self.database.transact(queues.nack, self.queue, ended.lease)
            else:
                self.database.transact(queues.extend, self.queue, ended.lease, by_ms=1_000)

    # What must hold.

    def is_known(self, job: Job) -> bool:
        if job.state in (*WAITS, "leased", "dead"):
            return True
        return job.is_kept and self.now_ms < job.finished_ms + RESULT_TTL_MS

    @invariant()
    def everything_agrees_with_the_model(self) -> None:
        self.database.read(self.compare)

    def compare(self, tx: Transaction) -> None:
        for job in self.jobs.values():
            self.compare_info(tx, job)
            self.compare_result(tx, job)
        for name in ("a", "b", "c", "new"):
            info = queues.key_info(tx, self.queue, name)
            counts = [len(self.of_key(name, state)) for state in ("ready", "blocked", "leased")]
            assert [info.ready, info.blocked, info.leased] == counts
            limit = self.policy.concurrency_per_key
            assert limit is None or info.leased <= limit
        stats = queues.stats(tx, self.queue)
        found = (stats.ready, stats.delayed, stats.blocked, stats.leased, stats.dead)
        assert found == tuple(len(self.at(state)) for state in ("ready", "delayed", "blocked", "leased", "dead"))

    def compare_info(self, tx: Transaction, job: Job) -> None:
        try:
            found = queues.get(tx, self.queue, job.id)
        except MessageNotFound:
            assert not self.is_known(job), f"{job} is not found"
            return
        assert isinstance(found, MessageInfo)
        assert found.state == job.state
        assert self.is_known(job)
        assert [each.message for each in found.failures] == job.errors[-FAILURES_KEPT:]
        if job.state in WAITS:
            assert (found.priority, found.key) == (job.priority, job.new.key)
            assert found.payload == job.new.payload

    def compare_result(self, tx: Transaction, job: Job) -> None:
        try:
            found = queues.result(tx, self.queue, job.id)
        except (MessageFailed, MessageCancelled) as error:
            outcome: bytes | str | None = error.code
        else:
            outcome = None if found is None else found.value
        if not (job.is_kept and self.now_ms < job.finished_ms + RESULT_TTL_MS):
            assert outcome is None
        elif job.state == "done":
            assert outcome == (job.result or b"")
        else:
            assert outcome == ("message_failed" if job.state == "dead" else "message_cancelled")

    def teardown(self) -> None:
        """Nothing is left behind once every message is gone and every record has expired."""
        try:
            try:
                self.database.read(self.compare)
            except AssertionError:
                return  # A step has failed, and is reported.
            for job in self.at("leased"):
                assert job.lease is not None
                self.database.transact(queues.ack, self.queue, job.lease)
            for queue in (self.queue, QueueKey(self.queue.universe, f"{self.queue.name}.dlq")):
                after: bytes | None = b""
                while after is not None:
                    _, after = self.database.transact(queues.purge, queue, after=after, limit=100)
            for _ in range(5):
                self.clock.advance_ms(130_000)
                for _ in range(3):
                    self.database.transact(queues.sweep, self.queue)
            self.database.transact(queues.put, self.queue, [NewMessage(b"last")])  # Deletes expired ack records.
            left = self.database.read(leftovers, self.queue)
            assert left == [], left
        finally:
            for database in self.databases:
                database.close()


def leftovers(tx: Transaction, queue: QueueKey) -> list[bytes]:
    """The keys of a queue other than its policy, its counters, and the message that was put last."""
    keys = queues.keys_of(queue)
    pairs = tx.scan(keys.prefix, keys.prefix + b"\xff", limit=1_000)
    kept = (keys.policy, keys.all_counters.prefix, keys.ready, keys.ids.prefix, keys.acks.prefix)
    return [key[len(keys.prefix) :] for key, _ in pairs if not key.startswith(kept)]


@pytest.mark.examples(80)
def test_jobs_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Jobs, steps=40, openers=repeat(MemoryDatabase), names=count())


@pytest.mark.examples(20)
def test_jobs_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    openers = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Jobs, steps=40, openers=openers, names=count())


@pytest.mark.examples(10)
def test_jobs_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Jobs, steps=40, openers=repeat(open_postgres), names=count())


@pytest.mark.examples(10)
def test_jobs_of_two_nodes_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Jobs, steps=40, openers=repeat(open_postgres), names=count(), nodes=2)
