"""Timers fire into the inboxes of their worlds, once and in time. Time is moved, never slept."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import inboxes, snapshots, timers, worlds
from fastness.layers.worlds import World, WorldState
from fastness.limits import TIMER_LATE_SECONDS
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.duty import Duty
from fastness.runtime.maintenance import timer_loop
from fastness.runtime.maintenance.timer_loop import TimerFiring
from fastness.testing.clock import ManualClock
from fastness.wire.inboxes import DomainEvent, Effect, Timer, TimerFired
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.
ADA = World("main", "ada")
_OPTIONS = ConsumerOptions()
MS = 1_000_000


class AssignedDuty(Duty):
    """A duty that the test assigns."""

    def __init__(self, *, is_ours: bool) -> None:
        self.ours = is_ours

    def is_ours(self) -> bool:
        return self.ours


@contextmanager
def running(
    database: Database,
    clock: ManualClock | None,
    *,
    shared: bool = True,
    duty: Duty | None = None,
    options: ConsumerOptions = _OPTIONS,
) -> Iterator[TimerFiring]:
    runner = BackgroundRunner(clock=clock, duty=duty)
    firing = TimerFiring(database, options, shared=shared)
    runner.add(firing.job)
    try:
        yield firing
    finally:
        runner.stop()


def create(database: Database, *found: World) -> None:
    for world in found:
        database.transact(snapshots.create_world, world)


def set_timer(database: Database, name: str, at_ms: int, world: World = ADA, payload: bytes = b"") -> None:
    database.transact(timers.set, world, 0, Timer(at_ms * MS, name.encode(), payload))


def fired(database: Database, world: World = ADA) -> list[str]:
    items = database.read(inboxes.read, world, after=None, limit=1_000)
    return [item.timer_id for _, item in items if isinstance(item, TimerFired)]


def await_fired(database: Database, *names: str, world: World = ADA) -> None:
    with database.watch(worlds.subspace(world).prefix) as watch:
        while len(fired(database, world)) < len(names):
            assert watch.wait(DEADLINE_SECONDS)
    assert fired(database, world) == list(names)


# The loop.


def test_timers_fire_in_their_order_and_not_before_their_time(database: Database, clock: ManualClock) -> None:
    create(database, ADA)
    for name, delay_ms in (("late", 1_000), ("soon", 500), ("now", 0)):
        set_timer(database, name, clock.now_ms() + delay_ms)
    with running(database, clock):
        await_fired(database, "now")
        clock.advance_ms(499)
        set_timer(database, "then", clock.now_ms())
        await_fired(database, "now", "then")
        clock.advance_ms(1)
        await_fired(database, "now", "then", "soon")
        clock.advance_ms(500)
        await_fired(database, "now", "then", "soon", "late")


def test_a_sooner_timer_wakes_the_loop(database: Database, clock: ManualClock) -> None:
    create(database, ADA)
    set_timer(database, "in an hour", clock.now_ms() + 3_600_000)
    with running(database, clock):
        set_timer(database, "now", clock.now_ms())
        await_fired(database, "now")


def test_a_timer_that_is_set_again_is_replaced_and_a_cancelled_one_never_fires(
    database: Database, clock: ManualClock
) -> None:
    create(database, ADA)
    for name, delay_ms in (("moved", 100), ("cancelled", 100), ("last", 300), ("moved", 200)):
        set_timer(database, name, clock.now_ms() + delay_ms)
    assert database.transact(timers.cancel, ADA, b"cancelled")
    assert not database.transact(timers.cancel, ADA, b"cancelled")
    clock.advance_ms(1_000)
    with running(database, clock):
        await_fired(database, "moved", "last")
    assert database.read(timers.page, "main", "ada", after="", limit=10).timers == []


def test_the_loop_of_an_embedded_plane_runs_while_there_are_timers(clock: ManualClock) -> None:
    other = World("another universe", "ada")
    with MemoryDatabase(clock=clock) as database, running(database, clock, shared=False) as loop:
        create(database, ADA, other)
        for world in (ADA, other):
            eventually(lambda: not loop.job.is_running)
            set_timer(database, "soon", clock.now_ms() + 100, world)
            loop.note_set(world.universe)
            assert loop.job.is_running
            clock.advance_ms(100)
            await_fired(database, "soon", world=world)
        set_timer(database, "late", clock.now_ms() + 100)
        loop.note_set("main")
        new = World("a third universe", "ada")
        create(database, new)
        set_timer(database, "now", clock.now_ms(), new)
        loop.note_set(new.universe)  # The loop does not watch this universe yet.
        await_fired(database, "now", world=new)


def test_a_plane_fires_timers_by_the_clock_of_a_test(clock: ManualClock) -> None:
    with fastness.open("memory:", clock=clock) as plane:
        world = plane.world("ada")
        world.create()
        world.inbox.put(DomainEvent(schema="s", timers=(Timer((clock.now_ms() + 86_400_000) * MS, b"t", b"p"),)))
        world.drain()
        assert [each.timer_id for each in plane.timers.list("ada").timers] == ["t"]
        clock.advance_ms(86_400_000)
        eventually(lambda: len(world.inbox.read()) == 2)
        assert world.inbox.read()[1][1] == TimerFired(timer_id="t", payload=b"p")
        assert plane.timers.list().timers == []


def test_a_node_without_the_duty_fires_only_what_is_late(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_loop, "DUTY_CHECK_SECONDS", 0.01)
    create(database, ADA)
    duty = AssignedDuty(is_ours=False)
    set_timer(database, "late", clock.now_ms() - TIMER_LATE_SECONDS * 1_000)
    set_timer(database, "due", clock.now_ms() - 1)
    with running(database, clock, duty=duty):
        await_fired(database, "late")
        assert database.read(timers.next_due_ns, "main") == (clock.now_ms() - 1) * MS
        duty.ours = True
        await_fired(database, "late", "due")


def test_a_timer_that_cannot_be_fired_does_not_stop_the_others(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_loop, "TIMER_BATCH", 2)
    create(database, ADA)
    for name in ("a", "b", "c"):
        set_timer(database, name, clock.now_ms())
    damaged = Subspace("u", "main", "timers", "due").key((clock.now_ms() - 1) * MS, b"damaged", "ada")
    database.transact(Transaction.put, damaged, b"\xc1")
    with running(database, clock, duty=AssignedDuty(is_ours=True)):
        await_fired(database, "a", "b", "c")
    assert database.read(Transaction.get, damaged) == b"\xc1"


@pytest.mark.parametrize("state", [WorldState.PAUSED, WorldState.ARCHIVED])
def test_a_world_that_is_not_active_gets_its_timers(database: Database, clock: ManualClock, state: WorldState) -> None:
    create(database, ADA)
    set_timer(database, "t", clock.now_ms())
    database.transact(worlds.change_state, ADA, state)
    with running(database, clock):
        await_fired(database, "t")


def test_two_nodes_that_fire_the_same_timers_fire_each_once(postgres_url: str) -> None:
    names = [f"{number:03}" for number in range(200)]
    found = [World("main", f"world-{number}") for number in range(5)]
    with PostgresDatabase(postgres_url) as one, PostgresDatabase(postgres_url) as other:
        create(one, *found)

        def fill(tx: Transaction) -> None:
            for number, name in enumerate(names):
                timers.set(tx, found[number % 5], 0, Timer((tx.now_ms + number) * MS, name.encode()))

        one.transact(fill)
        with running(one, None), running(other, None):
            eventually(lambda: one.read(timers.next_due_ns, "main") is None)
        assert sorted(name for world in found for name in fired(one, world)) == names


def test_a_timer_of_another_node_fires_within_moments(postgres_url: str) -> None:
    """A notification wakes the node on duty: its next look would be seconds later."""
    with PostgresDatabase(postgres_url) as one, PostgresDatabase(postgres_url) as other:
        create(one, ADA)
        with running(one, None, options=ConsumerOptions(poll_seconds=3_600.0)):
            set_timer(other, "now", 1)
            await_fired(other, "now")
            set_timer(other, "now", 2)
            await_fired(other, "now", "now")


# Locks.


def test_a_deletion_waits_for_no_other_world(postgres_url: str) -> None:
    """A walk over the timers of all worlds would lock them."""
    bob = World("main", "bob")
    entered, leave = threading.Event(), threading.Event()

    def hold(tx: Transaction) -> None:
        worlds.describe(tx, bob)
        tx.put(worlds.subspace(bob).key("held"), b"")
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)

    with fastness.open(postgres_url) as plane, PostgresDatabase(postgres_url) as other:
        create(other, bob)
        set_timer(other, "t", 1 << 40, bob)
        world = plane.world("ada")
        world.create()
        world.inbox.put(DomainEvent(schema="s", effects=(Effect("mail", b"1"),), timers=(Timer(1 << 62, b"t"),)))
        world.drain()
        world.archive()
        holder = threading.Thread(target=other.transact, args=(hold,))
        holder.start()
        assert entered.wait(DEADLINE_SECONDS)
        world.delete()
        assert holder.is_alive()
        leave.set()
        holder.join()
        assert plane.effects.list().effects == []
        assert [each.world for each in plane.timers.list().timers] == ["bob"]
