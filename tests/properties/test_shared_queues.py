"""A transaction that shares a queue adds new keys there, and changes no key that others change.

Random calls run through the code that puts transactions together, on a key space that records reads and locks.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastness.backends.memory import Pairs
from fastness.clock import IdSource
from fastness.errors import FastnessError
from fastness.kv import Event, Pair, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey, keys_of
from fastness.layers.queues.keys import QueueKeys
from fastness.limits import PAYLOAD_CARRIED_BYTES_MAX
from fastness.plane.atomic import commit
from fastness.plane.executor import AsyncExecutor, Work, execute_alone
from fastness.plane.operations import handler_of
from fastness.testing.clock import ManualClock
from fastness.tiers import TierPolicy
from fastness.wire.atomic import CommitAtomic
from fastness.wire.frames import Call
from fastness.wire.queues import (
    AckMessages,
    ExtendMessages,
    GetQueuePolicy,
    MessageLease,
    NackMessages,
    NewMessage,
    PutMessages,
    QueuePolicy,
)
from fastness.wire.requests import Request
from fastness.wire.states import UpdateState
from tests.support.failures import Failures

JOBS, OTHERS = QueueKey("main", "jobs"), QueueKey("main", "others")
ALL = (JOBS, OTHERS, QueueKey("main", "jobs.dlq"), QueueKey("main", "others.dlq"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class RecordingView:
    """Committed pairs, with a record of what a transaction reads and shares."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.keys_read: list[bytes] = []
        self.ranges_read: list[tuple[bytes, bytes]] = []
        self.shared: set[bytes] = set()

    def get(self, key: bytes) -> bytes | None:
        self.keys_read.append(key)
        return self._pairs.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        self.ranges_read.append((begin, end))
        return self._pairs.scan(begin, end, limit, reverse)

    def share(self, prefix: bytes) -> None:
        read_before = [key for key in self.keys_read if key.startswith(prefix)]
        read_before += [begin for begin, end in self.ranges_read if begin < prefix + b"\xff" and end > prefix]
        assert not read_before, "it is shared after it was read"
        self.shared.add(prefix)


class SharedKeySpace:
    """A key space in memory with the writers of several processes."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.pairs = Pairs()
        self.clock = ManualClock()
        self.ids = {"one": IdSource(1), "two": IdSource(2)}
        self.writer = "one"
        self.is_committing = True
        self.last: tuple[Transaction, RecordingView]

    def transact(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        options.pop("tier", None)
        view = RecordingView(self.pairs)
        batch = Transaction(view, clock=self.clock, ids=self.ids[self.writer], writer=self.writer)
        nested = batch.nested()  # As in a group of jobs.
        self.last = batch, view
        result = work(nested, *args, **options)
        batch.merge(nested)
        check_shared(batch, view, self.pairs)
        if self.is_committing:
            self.pairs.apply(batch)
        return result

    @property
    def stale(self) -> "SharedKeySpace":
        return self

    def publish(self, events: Sequence[Event]) -> None:
        """Publish to no subscriber."""

    async def transact_async(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return self.transact(work, *args, **options)

    read_async = transact_async

    @property
    def stores(self) -> Any:
        services = SimpleNamespace(
            database=self,
            shared=True,
            shared_locks=True,
            policy=TierPolicy(),
            publish=lambda events: None,
            repeats=SimpleNamespace(received=lambda again: lambda: False),
        )
        stores: Any = SimpleNamespace(services=services, transact=self.transact)
        stores.call_all = partial(AsyncExecutor.call_all, stores)
        return stores

    def run(self, how: str, requests: list[Request[Any]]) -> set[bytes]:
        """Run calls as transactions; returns the prefixes that the last one shared."""
        try:
            if how == "alone":
                for request in requests:
                    self.transact(execute_alone, Work(handler_of(request), request))
            elif how == "atomic":
                commit(self.stores, CommitAtomic(requests))
            else:
                key = "call" if how == "keyed" else None
                calls = [Call(number, request, key and f"{key}-{number}") for number, request in enumerate(requests)]
                self.runner.run(self.stores.call_all(calls))
        except FastnessError:
            pass  # A call that is refused has written nothing.
        return self.last[1].shared


def check_shared(tx: Transaction, view: RecordingView, before: Pairs) -> None:
    """Assert that other transactions that share the same queues can run at the same time."""
    for queue in [keys_of(each) for each in ALL if keys_of(each).prefix in view.shared]:
        for key in written(tx, queue):
            assert before.get(key) is None or key == queue.counters_key(tx.writer), key
            assert tx.writes[key] is not None, key
        # Whether a queue exists that has no policy is seen from the counters of any process. None of them is changed.
        ranges = [bounds for bounds in view.ranges_read if bounds != queue.all_counters.range()]
        assert not [bounds for bounds in (*tx.cleared, *ranges) if meets(bounds, queue)]
        read = {key for key in view.keys_read if key.startswith(queue.prefix)}
        assert read <= {queue.policy, queue.counters_key(tx.writer), queue.own_counters}


def written(tx: Transaction, queue: QueueKeys) -> set[bytes]:
    return {key for key in tx.writes if key.startswith(queue.prefix)}


def meets(bounds: tuple[bytes, bytes], queue: QueueKeys) -> bool:
    return bounds[0] < queue.prefix + b"\xff" and bounds[1] > queue.prefix


def rare(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None,) * 8 + values)


texts = rare("a", "b")
messages = st.builds(
    NewMessage,
    payload=st.sampled_from((b"", b"x", b"x" * (PAYLOAD_CARRIED_BYTES_MAX + 1))),
    priority=st.sampled_from((5, 5, 0, 9)),
    delay_seconds=st.sampled_from((None, 0.0, 0.5)),
    ttl_seconds=st.sampled_from((None, 1.0, 600.0)),
    keep_result=st.booleans(),
    correlation_id=st.none() | st.just("because"),
    group=texts,
    idempotency_key=texts,
    key=texts,
    unique_key=texts,
) | st.builds(NewMessage, debounce_key=st.just("d"), debounce_seconds=st.just(1.0))
names = st.sampled_from(("jobs", "others"))
puts = st.builds(PutMessages, names, st.lists(messages, min_size=1, max_size=3), must_exist=st.booleans())
leases = st.lists(st.integers(0, 3), max_size=2)
settlements = st.tuples(st.sampled_from(("ack", "nack", "extend")), names, leases)
calls = st.one_of(
    puts,
    puts,
    settlements,
    st.builds(UpdateState, st.sampled_from(("s", "t")), st.just(b"{}")),
    st.builds(GetQueuePolicy, names),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(("one", "two")),
        st.sampled_from(("alone", "batch", "keyed", "atomic")),
        st.lists(calls, min_size=1, max_size=4),
        st.sampled_from((0, 1, 700, 61_000, 400_000)),
    ),
    max_size=8,
)
policies = st.builds(
    QueuePolicy,
    history=st.sampled_from((QueuePolicy().history, "durable")),
    retention_seconds=st.sampled_from((None, 60.0)),
    max_attempts=st.just(1),
    dead_letter_queue=st.sampled_from((None, "others")),
    delay_seconds=st.sampled_from((0.0, 0.5)),
    dead_letter_rule=st.sampled_from(("failures", "deliveries", "never")),
    retention_by_age=st.booleans(),
)


def request_of(call: Any, held: dict[str, list[MessageLease]]) -> Request[Any]:
    if isinstance(call, Request):
        return call
    kind, queue, positions = call
    chosen = [held[queue][position] for position in positions if position < len(held[queue])]
    if kind == "ack":
        return AckMessages(queue, chosen)
    return NackMessages(queue, chosen) if kind == "nack" else ExtendMessages(queue, chosen, 60.0)


@settings(max_examples=150)
@given(policy=policies, history=steps)
def test_a_transaction_that_shares_a_queue_only_adds_to_it(
    runner: asyncio.Runner, policy: QueuePolicy, history: Any
) -> None:
    space = SharedKeySpace(runner)
    space.transact(queues.set_policy, JOBS, policy)
    held: dict[str, list[MessageLease]] = {"jobs": [], "others": []}
    for writer, how, called, pass_ms in history:
        space.writer = writer
        space.run(how, [request_of(call, held) for call in called])
        space.clock.advance_ms(pass_ms)
        for queue in (JOBS, OTHERS):
            leased = space.transact(queues.lease, queue, owner="ada", limit=1, visibility_ms=1_000)
            held[queue.name] += [MessageLease(queues.format_id(each.id), each.lease_id, each.fence) for each in leased]


@settings(max_examples=100)
@given(first=st.lists(puts, min_size=1, max_size=3), second=st.lists(puts, min_size=1, max_size=3), before=steps)
def test_transactions_that_share_a_queue_write_different_keys(
    runner: asyncio.Runner, first: list[PutMessages], second: list[PutMessages], before: Any
) -> None:
    space = SharedKeySpace(runner)
    for writer, how, called, pass_ms in before:
        space.writer = writer
        space.run(how, [request_of(call, {"jobs": [], "others": []}) for call in called])
        space.clock.advance_ms(pass_ms)
    space.is_committing = False  # Neither sees the other.
    done = []
    for writer, requests in (("one", first), ("two", second)):
        space.writer = writer
        space.run("batch", list(requests))
        done.append(space.last)
    (one, one_view), (two, two_view) = done
    for prefix in one_view.shared & two_view.shared:
        queue = next(keys_of(each) for each in ALL if keys_of(each).prefix == prefix)
        assert not written(one, queue) & written(two, queue)


PLAIN = PutMessages("jobs", [NewMessage(b"x", delay_seconds=1.0, ttl_seconds=5.0, keep_result=True), NewMessage()])
OTHER = PutMessages("others", [NewMessage()])
GROUPED = PutMessages("jobs", [NewMessage(), NewMessage(group="g")])
LEASE = MessageLease("0" * 36, "0" * 36, 1)
SHARED_JOBS, SHARED_OTHERS = keys_of(JOBS).prefix, keys_of(OTHERS).prefix


def test_a_transaction_shares_the_queues_that_all_its_calls_can_share(runner: asyncio.Runner) -> None:
    cases: list[tuple[list[Request[Any]], set[bytes]]] = [
        ([PLAIN], {SHARED_JOBS}),
        ([PLAIN, PLAIN, OTHER], {SHARED_JOBS, SHARED_OTHERS}),
        ([PLAIN, UpdateState("s", b"{}")], {SHARED_JOBS}),
        ([PLAIN, GROUPED], set()),
        ([GROUPED, OTHER], {SHARED_OTHERS}),
        ([PLAIN, AckMessages("jobs", [LEASE])], set()),
        ([PLAIN, ExtendMessages("others", [LEASE], 1.0)], {SHARED_JOBS}),
        ([OTHER, NackMessages("jobs", [LEASE])], set()),  # Its dead letters may be in any queue.
    ]
    failures = Failures()
    for how, (number, (requests, shared)) in itertools.product(("batch", "keyed", "atomic"), enumerate(cases)):
        with failures.of((how, f"cases[{number}]")):
            assert SharedKeySpace(runner).run(how, requests) == shared
    failures.check()


def test_a_put_that_uses_records_of_other_messages_shares_nothing(runner: asyncio.Runner) -> None:
    failures = Failures()
    for name in ("group", "idempotency_key", "key", "unique_key", "debounce_key"):
        with failures.of(name):
            options: dict[str, Any] = {name: "a", "debounce_seconds": 1.0 if name == "debounce_key" else None}
            new = NewMessage(**options)
            space = SharedKeySpace(runner)
            assert space.run("alone", [PutMessages("jobs", [NewMessage()])]) == {SHARED_JOBS}
            assert space.run("alone", [PutMessages("jobs", [NewMessage(), new])]) == set()
    failures.check()


def test_a_transaction_that_is_put_together_elsewhere_shares_nothing(runner: asyncio.Runner) -> None:
    space = SharedKeySpace(runner)

    def put_and_lease(tx: Transaction) -> int:
        queues.put(tx, JOBS, [NewMessage()])
        return len(queues.lease(tx, JOBS, owner="ada"))

    assert space.transact(put_and_lease) == 1
    assert space.last[1].shared == set()
