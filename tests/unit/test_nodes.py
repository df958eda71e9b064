"""The nodes of a plane: their records, the maintenance lease, and which of them does the periodic work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.errors import Unreachable
from fastness.kv import Database, Transaction
from fastness.layers import mailboxes, maintenance, nodes
from fastness.layers.mailboxes import Address
from fastness.layers.maintenance import MaintenanceLease
from fastness.limits import (
    DUTY_CHECK_SECONDS,
    MAINTENANCE_LEASE_SECONDS,
    NODE_FORGOTTEN_SECONDS,
    NODE_GONE_SECONDS,
    NODE_HEARTBEAT_SECONDS,
    NODE_RETRY_SECONDS,
)
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.duty import Duty, LeasedDuty
from fastness.runtime.maintenance.compaction_loop import world_compaction
from fastness.runtime.maintenance.heartbeat import Heartbeat, NodeDescription
from fastness.runtime.maintenance.mail_sweeper import MailSweeper
from fastness.runtime.maintenance.space_loop import SpaceLoop
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.testing.clock import ManualClock
from fastness.wire.mail import NewMail
from fastness.wire.nodes import NodeLoad, NodeStatus
from tests.support.background import DrivenRunner

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.
BOB = Address("main", "bob")
LEASE_MS = round(MAINTENANCE_LEASE_SECONDS * 1_000)
LOAD = NodeLoad(1.5, 2, 3, 0.25)
A = NodeStatus("a", "server", "1.0", 1, 2, "host", 7, "http://127.0.0.1:9440", 5, 0, False, False, LOAD)
B = msgspec.structs.replace(A, id="b")


def list_nodes(database: Database) -> dict[str, NodeStatus]:
    return {node.id: node for node in database.read(nodes.list_nodes)}


def test_a_record_has_the_time_of_its_last_renewal(database: Database, clock: ManualClock) -> None:
    database.transact(nodes.renew, A)
    clock.advance_ms(5_000)
    database.transact(nodes.renew, A)
    database.transact(nodes.renew, B)
    found = list_nodes(database)
    assert {id: node.seen_ms for id, node in found.items()} == {"a": clock.now_ms(), "b": clock.now_ms()}
    assert found["a"] == msgspec.structs.replace(A, seen_ms=clock.now_ms(), alive=True)
    database.transact(nodes.leave, "a")
    assert [*list_nodes(database)] == ["b"]


def test_a_node_without_renewals_is_gone_and_later_forgotten(database: Database, clock: ManualClock) -> None:
    database.transact(nodes.renew, A)
    clock.advance_ms(round(NODE_GONE_SECONDS * 1_000) - 1)
    assert list_nodes(database)["a"].alive
    clock.advance_ms(1)
    assert not list_nodes(database)["a"].alive
    assert nodes.forgettable(database.read(nodes.list_nodes), clock.now_ms()) == []
    clock.advance_ms(round((NODE_FORGOTTEN_SECONDS - NODE_GONE_SECONDS) * 1_000))
    assert nodes.forgettable(database.read(nodes.list_nodes), clock.now_ms()) == ["a"]
    database.transact(nodes.renew, B)
    database.transact(nodes.forget, ["a", "b"])  # `b` has been renewed since.
    assert [*list_nodes(database)] == ["b"]


def take(database: Database, node: str) -> MaintenanceLease:
    return database.transact(maintenance.take, node, ttl_ms=LEASE_MS)


def test_one_node_holds_the_lease_until_it_expires(database: Database, clock: ManualClock) -> None:
    assert take(database, "a") == MaintenanceLease("a", 1, clock.now_ms() + LEASE_MS)
    clock.advance_ms(LEASE_MS - 1)
    assert take(database, "b").holder == "a"
    clock.advance_ms(1)
    assert take(database, "b") == MaintenanceLease("b", 2, clock.now_ms() + LEASE_MS)
    assert take(database, "a").holder == "b"


def test_a_renewal_keeps_the_fence_and_a_return_does_not(database: Database, clock: ManualClock) -> None:
    assert take(database, "a").fence == 1
    clock.advance_ms(LEASE_MS - 1)
    assert take(database, "a") == MaintenanceLease("a", 1, clock.now_ms() + LEASE_MS)
    clock.advance_ms(LEASE_MS)
    assert take(database, "a").fence == 2


def test_only_the_holder_releases_the_lease(database: Database) -> None:
    take(database, "a")
    database.transact(maintenance.release, "b")
    assert take(database, "b").holder == "a"
    database.transact(maintenance.release, "a")
    assert database.read(maintenance.load) == MaintenanceLease(fence=1)
    assert (take(database, "b").holder, take(database, "b").fence) == ("b", 2)


def test_a_clock_that_is_set_back_does_not_prolong_the_lease(database: Database, clock: ManualClock) -> None:
    take(database, "a")
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    assert take(database, "b").holder == "b"


class Nodes:
    """Nodes with their own connections to one PostgreSQL, whose heartbeats the test makes itself, at a moved time."""

    def __init__(self, url: str, clock: ManualClock, stack: ExitStack) -> None:
        self._url, self._clock, self._stack = url, clock, stack
        self.beats: dict[str, Heartbeat] = {}
        self.duties: dict[str, Duty] = {}

    def add(self, name: str) -> Heartbeat:
        database = self._stack.enter_context(PostgresDatabase(self._url, clock=self._clock))
        duty = LeasedDuty(self._clock)
        beat = Heartbeat(database, NodeDescription(name), duty, clock=self._clock)
        self.beats[name], self.duties[name] = beat, duty
        return beat

    def on_duty(self) -> list[str]:
        return [name for name, duty in self.duties.items() if duty.is_ours()]


@pytest.fixture
def cluster(postgres_url: str, clock: ManualClock) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(postgres_url, clock, stack)


def test_one_of_two_nodes_has_the_duty(cluster: Nodes) -> None:
    first, second = cluster.add("a"), cluster.add("b")
    assert cluster.on_duty() == []
    first.beat()
    second.beat()
    assert cluster.on_duty() == ["a"]
    assert (first.alive, second.alive) == (1, 2)


def test_another_node_takes_over_when_the_lease_expires(cluster: Nodes, clock: ManualClock) -> None:
    first, second = cluster.add("a"), cluster.add("b")
    first.beat()
    clock.advance_ms(LEASE_MS - 1_000)
    assert cluster.on_duty() == ["a"]
    assert second.beat() == pytest.approx(1.0)  # It beats again when the lease has expired, and not a second later.
    clock.advance_ms(1_000)
    assert cluster.on_duty() == []  # The first node knows by its own clock that its lease has ended.
    assert second.beat() == NODE_HEARTBEAT_SECONDS
    first.beat()
    assert cluster.on_duty() == ["b"]


def test_a_renewed_lease_stays_where_it_is(cluster: Nodes, clock: ManualClock) -> None:
    first, second = cluster.add("a"), cluster.add("b")
    for _ in range(5):
        first.beat()
        second.beat()
        assert cluster.on_duty() == ["a"]
        clock.advance_ms(round(NODE_HEARTBEAT_SECONDS * 1_000))


def test_a_node_that_stops_leaves_no_record_and_no_lease(cluster: Nodes, postgres_url: str, clock: ManualClock) -> None:
    first, second = cluster.add("a"), cluster.add("b")
    first.beat()
    second.beat()
    first.leave()
    assert cluster.on_duty() == []
    second.beat()
    assert cluster.on_duty() == ["b"]
    with PostgresDatabase(postgres_url, clock=clock) as database:
        assert [*list_nodes(database)] == ["b"]


def test_the_node_on_duty_forgets_nodes_that_are_long_gone(cluster: Nodes, clock: ManualClock) -> None:
    first, second = cluster.add("a"), cluster.add("b")
    first.beat()
    second.beat()
    clock.advance_ms(round(NODE_FORGOTTEN_SECONDS * 1_000))
    second.beat()
    assert (second.alive, cluster.on_duty()) == (1, ["b"])
    first.beat()  # It was only paused, and is back.
    assert first.alive == 2


class Refusing(MemoryDatabase):
    """A database whose transactions can be made to fail."""

    error: Exception | None = None

    def transact(self, work: Callable[..., object], /, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        if self.error is not None:
            raise self.error
        return super().transact(work, *args, **kwargs)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    passed = threading.Event()
    for _ in range(round(DEADLINE_SECONDS * 100)):
        if condition():
            return
        passed.wait(0.01)
    raise AssertionError("the condition did not become true")


@contextmanager
def beating(database: Database, name: str, *, first_seconds: float = 0.0) -> Iterator[Duty]:
    """A node whose heartbeat runs by itself, and its duty."""
    duty, runner = LeasedDuty(), BackgroundRunner()
    beat = Heartbeat(database, NodeDescription(name), duty, first_seconds=first_seconds)
    runner.add(beat.job)
    try:
        yield duty
    finally:
        runner.stop()
        beat.leave()


def test_a_release_wakes_the_other_node_at_once() -> None:
    """Both heartbeats run by themselves; the second one would wait for 5 s without the watch."""
    with MemoryDatabase() as database:
        with ExitStack() as second:
            with beating(database, "a") as one:
                until(one.is_ours)
                other = second.enter_context(beating(database, "b"))
                until(lambda: len(list_nodes(database)) == 2)
                assert not other.is_ours()
            until(other.is_ours)
        assert list_nodes(database) == {}


def test_a_heartbeat_survives_a_key_space_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    with Refusing() as database:
        database.error = Unreachable("away")
        with beating(database, "a") as duty:
            until(lambda: "the heartbeat of this node failed" in caplog.text)
            assert not duty.is_ours()
            database.error = None
            until(duty.is_ours)
            database.error = Unreachable("away")
        assert not duty.is_ours()
    assert "could not be deleted" in caplog.text


def test_a_heartbeat_is_retried_every_second(clock: ManualClock) -> None:
    """The lease of this node would expire during longer pauses."""
    with Refusing(clock=clock) as database:
        database.error = Unreachable("away")
        runner, beat = DrivenRunner(), Heartbeat(database, NodeDescription("a"), LeasedDuty(clock), clock=clock)
        pauses = [runner.start(beat.job), *(runner.advance(NODE_RETRY_SECONDS, beat.job) for _ in range(5))]
        assert pauses == [NODE_RETRY_SECONDS] * 6
        database.error = None
        assert runner.advance(NODE_RETRY_SECONDS, beat.job) == NODE_HEARTBEAT_SECONDS
        runner.stop()


def test_a_process_that_ends_at_once_leaves_no_trace() -> None:
    with MemoryDatabase() as database:
        with beating(database, "a", first_seconds=threading.TIMEOUT_MAX):
            pass
        assert database.read(lambda tx: tx.scan(b"", b"\xff", limit=1)) == []


def test_an_embedded_plane_has_one_node_and_stores_nothing(tmp_path: Path) -> None:
    def records(tx: Transaction) -> int:
        return len(tx.scan(*nodes.SUBSPACE.range(), limit=1)) + len(tx.scan(*maintenance.SUBSPACE.range(), limit=1))

    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        (node,) = plane.nodes().nodes
        assert (node.kind, node.alive, node.maintenance, node.address) == ("embedded", True, True, "")
        assert plane.transact(records) == 0


def test_planes_on_one_postgresql_see_each_other(postgres_url: str) -> None:
    with fastness.open(postgres_url) as one, fastness.open(postgres_url) as other:
        until(lambda: len(one.nodes().nodes) == 2)
        found = other.nodes()
        assert [node.kind for node in found.nodes] == ["embedded", "embedded"]
        assert [node.alive for node in found.nodes] == [True, True]
        assert sorted(node.maintenance for node in found.nodes) == [False, True]
        assert found.data_format == one.status().data_format


class SwitchedDuty(Duty):
    """A duty that the test gives and takes."""

    ours = False

    def is_ours(self) -> bool:
        return self.ours


class Unused:
    """A store of worlds, for a key space without any."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed")


def test_periodic_work_is_done_on_duty_only() -> None:
    clock, duty = ManualClock(), SwitchedDuty()
    with MemoryDatabase(clock=clock) as database:
        database.transact(mailboxes.send, Address("main", "ada"), BOB, NewMail("old"))
        clock.advance_ms(365 * 86_400_000)
        for job in (
            world_compaction(database, Unused(), 1.0),
            SpaceLoop(database, None, SpaceOptions(), 1.0, worlds=Unused()).job,
            MailSweeper(database, shared=True).job,
        ):
            duty.ours = False
            runner = DrivenRunner(duty=duty)
            runner.start(job)
            assert runner.advance(10, job) == DUTY_CHECK_SECONDS
            assert job.steps is None, "it has not begun"
            duty.ours = True
            runner.advance(10, job)
            assert job.passes == 1
        assert database.read(mailboxes.summary, BOB).box.count == 0
