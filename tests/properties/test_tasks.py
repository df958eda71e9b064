"""Random chains and groups of tasks under faults: the last step runs with the result of a plain evaluation, once."""

from typing import Any
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

import fastness
from fastness import Plane, TaskApp, group
from fastness.errors import CommitUnknown, FastnessError, QueueBusy
from fastness.handles.sync import task_runs
from fastness.handles.sync.messages import Message
from fastness.tasks.chains import Chainable
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic

NOTHING = object()
VISIBILITY_SECONDS = 10
FAULTS = ("none", "lost answer", "busy", "late", "repeated", "crash")

# A call is a number; a list is a chain of nodes; a tuple is a group of nodes.
NODES: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 9),
    lambda nodes: st.lists(nodes, min_size=1, max_size=3) | st.lists(nodes, min_size=1, max_size=3).map(tuple),
    max_leaves=8,
)


def checksum(*args: Any) -> int:
    """What the task `mark` returns."""
    return crc32(repr(args).encode())


def expected(node: Any, value: Any = NOTHING) -> Any:
    """The result of a node after a step with this result."""
    if isinstance(node, int):
        return checksum(node) if value is NOTHING else checksum(value, node)
    if isinstance(node, tuple):
        return [expected(each, value) for each in node]
    for each in node:
        value = expected(each, value)
    return value


class Fleet:
    """The tasks, and a consumer whose commits fail as a test says."""

    def __init__(self, plane: Plane, clock: ManualClock) -> None:
        self.plane, self.clock = plane, clock
        self.app = TaskApp(plane)
        self.results: list[Any] = []
        self.fault = "none"
        options: Any = {"max_attempts": 1_000, "visibility_seconds": VISIBILITY_SECONDS, "retry_delay_seconds": 0.001}
        self.mark = self.app.task(name="mark", **options)(checksum)
        self.last = self.app.task(name="last", queue="last", **options)(self.results.append)
        self.call, plane._transport.call = plane._transport.call, self._call  # type: ignore[method-assign]

    def step(self, node: Any) -> Chainable:
        if isinstance(node, int):
            return self.mark.s(node)
        if isinstance(node, tuple):
            return group(*map(self.step, node))
        first, *rest = map(self.step, node)
        for each in rest:
            first = first.then(each)
        return first

    def handle(self, message: Message, fault: str) -> None:
        """Run a message, with a fault in its commit, before it or after it."""
        if fault == "crash":  # Its lease expires.
            self.clock.advance_ms(VISIBILITY_SECONDS * 1_000)
            return
        self.fault = fault
        try:
            self._run(message)
            if fault == "repeated":
                message.settled = False
                self._run(message)
        finally:
            self.fault = "none"

    def _run(self, message: Message) -> None:
        try:
            task_runs.run_message(self.plane, message, self.app._registry.find)
            if not message.settled:
                message.ack()
        except FastnessError:
            if not message.settled and not message.lost:
                message.nack(intent="defer")

    def _call(self, request: Any) -> Any:
        fault, is_commit = self.fault, isinstance(request, CommitAtomic)
        if not is_commit or fault in ("none", "repeated"):
            return self.call(request)
        self.fault = "none"
        if fault == "busy":
            raise QueueBusy("try again")
        if fault == "late":
            self.clock.advance_ms(VISIBILITY_SECONDS * 1_000)
            return self.call(request)
        self.call(request)
        raise CommitUnknown("the answer was lost")


@settings(max_examples=40)
@given(node=NODES, data=st.data())
def test_what_follows_runs_once_with_the_result_of_a_plain_evaluation(node: Any, data: st.DataObject) -> None:
    clock = ManualClock()
    with fastness.open("memory:", clock=clock) as plane:
        fleet = Fleet(plane, clock)
        chain = fleet.step(node).then(fleet.last.s())
        chain.send()
        faults_left, steps = 12, 0
        while plane.queue("last").stats().put_total == 0:
            steps += 1
            assert steps < 500
            messages = plane.queue("tasks").receive_many(3, extend_for_seconds=0)
            for message in data.draw(st.permutations(messages)) if messages else ():
                fault = data.draw(st.sampled_from(FAULTS)) if faults_left else "none"
                faults_left -= fault != "none"
                fleet.handle(message, fault)
            clock.advance_ms(2_000)
        for _ in range(15):  # What was delivered again must not start anything.
            for message in plane.queue("tasks").receive_many(10, extend_for_seconds=0):
                fleet.handle(message, "none")
            clock.advance_ms(2_000)
        fleet.app.run_ready()
        assert fleet.results == [expected(node)]
        assert plane.queue("last").stats().put_total == 1
        assert not [key for key, _ in plane.pairs.scan(b"", b"\xff") if b"tasks/groups/" in key]
