"""SIGKILL during puts, receives and acks: no acknowledged put and no acknowledged ack is lost."""

import random
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane
from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import DiskFull
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.dispatcher import Dispatcher
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, FaultyDatabase
from fastness.testing.histories import Outcome
from fastness.testing.histories.queues import check_queue
from fastness.tiers import Tier
from fastness.wire.queues import MessageLease, NewMessage
from tests.faults import queue_child
from tests.support.depth import Depth
from tests.support.forked import start_python

CHILD = Path(__file__).parent / "queue_child.py"
PUTS = 250  # Per producer, of which there are four.
JOBS = QueueKey("main", "jobs")


def kill_after(folder: Path, run: int, lines: int) -> list[bytes]:
    """Run the child, kill it after that many lines of output, and return its output."""
    arguments: list[str | Path] = [CHILD, f"dir:{folder}", f"run{run}", "4", str(PUTS), "3", "0.5"]
    with start_python(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    return [line for line in said if line.endswith(b"\n")]


def check_counts(plane: Plane) -> tuple[set[str], set[str]]:
    """The ids in the queue and its dead letter queue; checks that a full scan agrees with the counters."""
    stats = plane.queue("jobs").stats()
    found, buried = plane.transact(queue_child.content), plane.transact(queue_child.content, "jobs.dlq")
    assert (stats.ready, stats.blocked) == (len(found["ready"]), len(found["blocked"]))
    assert (stats.delayed, stats.leased) == (len(found["delayed"]), len(found["leased"]))
    assert stats.dead == sum(map(len, buried.values()))
    left = [id for place in found.values() for id in place]
    assert len(set(left)) == len(left)
    assert stats.put_total == stats.acked_total + stats.dead_total + len(left)
    assert stats.dead_total == stats.dead
    return set(left), {id for place in buried.values() for id in place}


def test_a_killed_process_loses_no_acknowledged_put_or_ack(tmp_path: Path, depth: Depth) -> None:
    """Commits are synced before they are acknowledged, and the expired lease of a killed consumer is a failure."""
    kills = max(1, depth.kills // 3)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    said: list[bytes] = []
    for run in range(kills):
        said += kill_after(tmp_path, run, chance.randrange(1, 4_000))
    history = queue_child.history_of(said)
    with fastness.open(f"dir:{tmp_path}") as plane:
        settle(plane)
        left, dead = check_counts(plane)
        check_queue(history, "jobs", left=left, dead=dead)
        assert_counted(plane, history.operations)
        delivered = empty(plane)
        assert delivered == left, "what was left is delivered, and nothing else"
        stats = plane.queue("jobs").stats()
        assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == (0, 0, 0, 0)
        check_counts(plane)
    errors = queue_child.errors_of(said)
    assert set(errors) <= {"queue_message_lease_mismatch"}, errors
    acks = sum(each.kind == "ack" and each.outcome is Outcome.OK for each in history.operations)
    puts = sum(each.kind == "put" and each.outcome is Outcome.OK for each in history.operations)
    print(f"{kills} kills, {puts} puts and {acks} acks acknowledged, {len(left)} left, {len(dead)} dead; {errors}")
    assert puts >= kills


def settle(plane: Plane) -> None:
    """Wait until the sweeper has processed the leases of the killed consumers; then the queue is stable."""
    for _ in range(6_000):
        found = plane.transact(queue_child.content)
        if not found["delayed"] and not found["leased"]:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the leases of killed consumers never ended")


def assert_counted(plane: Plane, operations: Any) -> None:
    """Check the queue's totals: all acknowledged operations, and possibly those without a response."""
    stats = plane.queue("jobs").stats()
    for kind, total in (("put", stats.put_total), ("ack", stats.acked_total)):
        certain = sum(each.kind == kind and each.outcome is Outcome.OK for each in operations)
        possible = sum(each.kind == kind and each.outcome is not Outcome.FAILED for each in operations)
        assert certain <= total <= possible, kind


def empty(plane: Plane) -> set[str]:
    """Receive and acknowledge everything, including messages of killed consumers; returns the ids."""
    jobs, seen = plane.queue("jobs"), set[str]()
    while True:
        messages = jobs.receive_many(256, visibility_seconds=600, wait_seconds=0, extend_for_seconds=0)
        if not messages and not any(plane.transact(queue_child.content).values()):
            return seen
        if not messages:
            messages = jobs.receive_many(1, visibility_seconds=600, wait_seconds=60, extend_for_seconds=0)
            assert messages, "something is there and is not delivered"
        for message in messages:
            assert message.id not in seen
            seen.add(message.id)
            message.ack()


class Interrupted(FaultyDatabase):
    """A commit fails, and before its caller gets the error another consumer uses the same queue."""

    def __init__(self) -> None:
        super().__init__(MemoryDatabase(clock=ManualClock()))
        self.meanwhile: Callable[[], object] = int

    def transact(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().transact(work, *args, **kwargs)
        except DiskFull:
            meanwhile, self.meanwhile = self.meanwhile, int
            meanwhile()
            raise


def deliver(dispatcher: Dispatcher) -> list[bytes | None]:
    leased = dispatcher.receive(JOBS, wait_ms=0, tier=Tier.CRITICAL, owner="ada", limit=1)
    return [message.payload for message in leased.messages]


def fail_a_delivery(*, meanwhile: bool) -> list[bytes | None]:
    """The messages that are delivered of four, if the commit of the second delivery fails."""
    database = Interrupted()
    dispatcher = Dispatcher(database, ManualClock(), ConsumerOptions())
    database.transact(queues.put, JOBS, [NewMessage(b"%d" % number) for number in range(4)])
    payloads = deliver(dispatcher)
    if meanwhile:
        database.meanwhile = lambda: payloads.extend(deliver(dispatcher))
    database.faults = ChosenFault(1, lambda: DiskFull("injected"))  # The function ran, but nothing is written.
    with pytest.raises(DiskFull):
        deliver(dispatcher)
    while found := deliver(dispatcher):
        payloads += found
    return sorted(payloads)  # type: ignore[type-var]


def test_a_failed_delivery_commit_loses_no_message() -> None:
    assert fail_a_delivery(meanwhile=False) == [b"0", b"1", b"2", b"3"]


def test_a_failed_delivery_commit_hides_no_message_from_other_consumers() -> None:
    """Between a failed commit and its error, another thread may use the prefetched messages.

    It must not take the next key and move the front past a message that is not leased.
    """
    assert fail_a_delivery(meanwhile=True) == [b"0", b"1", b"2", b"3"]


def test_a_message_put_after_a_clock_rollback_and_restart_is_delivered(tmp_path: Path) -> None:
    """Ids contain the time. A message below the front would never be found."""
    clock = ManualClock()
    with RocksDatabase(tmp_path, clock=clock) as database:
        database.transact(queues.put, JOBS, [NewMessage(b"before")])
        first = database.transact(queues.lease, JOBS, owner="ada")[0]
        proof = MessageLease(queues.format_id(first.id), first.lease_id, first.fence)
        database.transact(queues.ack, JOBS, proof)
    clock.jump_to_ms(clock.now_ms() - 1_000)
    with RocksDatabase(tmp_path, clock=clock) as database:
        database.transact(queues.put, JOBS, [NewMessage(b"after")])
        assert database.read(queues.stats, JOBS).ready == 1
        assert [message.payload for message in database.transact(queues.lease, JOBS, owner="ada")] == [b"after"]


def test_a_group_keeps_its_order_after_a_clock_rollback_and_restart(tmp_path: Path) -> None:
    """The order of a group is the order of its puts, even if the clock was set back."""
    clock = ManualClock()
    with RocksDatabase(tmp_path, clock=clock) as database:
        for payload in (b"1", b"2"):
            database.transact(queues.put, JOBS, [NewMessage(payload, group="g")])
    clock.jump_to_ms(clock.now_ms() - 1_000)
    order = []
    with RocksDatabase(tmp_path, clock=clock) as database:
        database.transact(queues.put, JOBS, [NewMessage(b"3", group="g")])
        while found := database.transact(queues.lease, JOBS, owner="ada"):
            order.append(found[0].payload)
            proof = MessageLease(queues.format_id(found[0].id), found[0].lease_id, found[0].fence)
            database.transact(queues.ack, JOBS, proof)
            clock.advance_ms(2_000)
    assert order == [b"1", b"2", b"3"]
