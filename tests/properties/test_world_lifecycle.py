"""With any interleaving of operations and crashes, a world keeps its history, and a restore equals a replay.

The model also knows where a restore starts: at the newest snapshot that qualified, in the current incarnation.
"""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import BaselineRegressed, PromotionRefused, WorldNotFound
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.worlds import World
from fastness.kv import Database, Subspace, Transaction
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from fastness.wire.inboxes import DomainEvent, Effect
from fastness.wire.restores import Entry
from tests.support.depth import Depth


def fold(state: Any, entry: Entry) -> Any:
    """A reducer: all appended and drained values in order, and the number of records."""
    seen, count = state or ([], 0)
    if entry.kind == "entry":
        seen = [*seen, entry.value]
    elif entry.kind == "ingress":
        seen = [*seen, entry.value["schema"]]
    return seen, count + 1


class Lives(RuleBasedStateMachine):
    """One world: its expected history as a plain list, its snapshots, and the heights of pending effects."""

    make_database: Callable[[Path], Database]

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.database = type(self).make_database(Path(self.folder.name))
        self.objects = open_objects(f"dir:{self.folder.name}/objects")
        self.plane = Plane(EmbeddedTransport(Services(self.database, self.objects)))
        self.world = self.plane.world("w")
        self.number = 0
        self.incarnation = 0
        self.earlier: list[World] = []
        self.create()

    def create(self) -> None:
        self.incarnation += 1
        assert self.world.create().incarnation == self.incarnation
        self.history: list[str] = []
        self.waiting: list[str] = []
        self.baseline = 0
        self.snapshots = {0}
        self.pending: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.folder.cleanup()

    def fresh(self) -> str:
        self.number += 1
        return str(self.number)

    def crashing(self, fail_at: int) -> Any:
        """The same world through a plane that crashes at a fault point."""
        faults = ChosenFault(fail_at)
        transport = EmbeddedTransport(
            Services(FaultyDatabase(self.database, faults), faulty_objects(self.objects, faults))
        )
        return Plane(transport).world("w")

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        values = [self.fresh() for _ in range(count)]
        self.world.append(values, expected_head=self.world.head())
        self.history += values

    @rule(has_effect=st.booleans())
    def enqueue(self, has_effect: bool) -> None:
        schema = f"{self.fresh()}!" if has_effect else self.fresh()
        effects = (Effect("mail", schema.encode()),) if has_effect else ()
        self.world.inbox.put(DomainEvent(schema=schema, effects=effects))
        self.waiting.append(schema)

    @rule(limit=st.integers(1, 5))
    def drain(self, limit: int) -> None:
        heights = self.world.drain(limit=limit)
        assert len(heights) == min(limit, len(self.waiting))
        self.drained(self.world.head() - len(heights), len(heights))

    def drained(self, start: int, count: int) -> None:
        """The next `count` items are in the journal, from the height `start` on."""
        moved, self.waiting = self.waiting[:count], self.waiting[count:]
        self.history += moved
        self.pending |= {height for height, schema in enumerate(moved, start) if schema.endswith("!")}

    @rule()
    def take_effects(self) -> None:
        """An orchestrator executes the effects that are pending."""
        self.database.transact(Transaction.delete_range, *Subspace("u", "main", "effects", "pending").range("w"))
        self.pending = set()

    @rule(fail_at=st.integers(0, 3))
    def crash_while_draining(self, fail_at: int) -> None:
        before, head = self.world.inbox.cursor(), self.world.head()
        try:
            self.crashing(fail_at).drain(limit=2)
        except Crash:
            after = self.world.inbox.cursor()
            drained = (-1 if after is None else after) - (-1 if before is None else before)
        else:
            drained = min(2, len(self.waiting))
        self.drained(head, drained)

    def qualifies(self, height: int) -> bool:
        return height >= self.baseline and not any(pending < height for pending in self.pending)

    @rule(promote=st.sampled_from([None, True, False]))
    def snapshot(self, promote: bool | None) -> None:
        restored = self.world.restore(fold)
        height, qualifies = restored.height, self.qualifies(restored.height)
        if promote and not qualifies:
            with pytest.raises(PromotionRefused):
                self.world.snapshots.commit(restored.state, height=height, promote=promote)
            return
        stored = self.world.snapshots.commit(restored.state, height=height, promote=promote)
        self.snapshots.add(height)
        if qualifies and promote is not False:
            self.baseline = height
        assert stored.is_baseline == (self.baseline == height)

    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        height = data.draw(st.sampled_from(sorted(self.snapshots)))
        if self.qualifies(height):
            assert self.world.snapshots.promote(height).is_baseline
            self.baseline = height
        else:
            with pytest.raises((PromotionRefused, BaselineRegressed)):
                self.world.snapshots.promote(height)

    @rule(fail_at=st.integers(0, 10))
    def crash_while_taking_a_snapshot(self, fail_at: int) -> None:
        restored = self.world.restore(fold)
        try:
            self.crashing(fail_at).snapshots.commit(restored.state, height=restored.height)
        except Crash:
            self.world.snapshots.commit(restored.state, height=restored.height)
        self.snapshots.add(restored.height)
        if self.qualifies(restored.height):
            self.baseline = restored.height

    @rule(fail_at=st.integers(0, 30))
    def delete_and_create(self, fail_at: int) -> None:
        self.world.archive()
        with suppress(Crash):
            self.crashing(fail_at).delete()
        assert self.world.delete().state == "deleted"
        assert self.plane.worlds() == []
        self.earlier.append(self.plane.world("w", incarnation=self.incarnation))
        self.world = self.plane.world("w")
        self.create()

    @precondition(lambda self: self.earlier)
    @rule(data=st.data())
    def use_an_earlier_incarnation(self, data: st.DataObject) -> None:
        world = data.draw(st.sampled_from(self.earlier))
        head = self.world.head()
        for use in (
            world.read,
            world.drain,
            world.delete,
            lambda: world.append(["late"], expected_head=head),
            lambda: world.restore(fold),
            lambda: world.compact(entries=1, margin=0),
        ):
            with pytest.raises(WorldNotFound):
                use()
        assert self.world.head() == head

    @rule(entries=st.integers(1, 6), margin=st.integers(0, 3))
    def compact(self, entries: int, margin: int) -> None:
        self.world.compact(entries=entries, margin=margin)

    @rule(fail_at=st.integers(0, 30), entries=st.integers(1, 6))
    def crash_while_compacting(self, fail_at: int, entries: int) -> None:
        with suppress(Crash):
            self.crashing(fail_at).compact(entries=entries, margin=0)

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def history_is_whole_and_a_restore_equals_a_replay(self) -> None:
        records = self.world.read(limit=10_000)
        assert [record.height for record in records] == list(range(self.world.head()))
        restored, replayed = self.world.restore(fold), self.world.replay(fold)
        assert restored.height == replayed.height
        assert (restored.baseline_height, restored.folded) == (self.baseline, restored.height - self.baseline)
        assert list(restored.state or ([], 0)) == list(replayed.state or ([], 0))
        assert (replayed.state or ([], 0))[0] == self.history

    @rule()
    def verify(self) -> None:
        assert self.world.verify(fold).agrees


def run_machine(make_database: Callable[[Path], Database], examples: int) -> None:
    machine = type("Machine", (Lives,), {"make_database": staticmethod(make_database)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


def test_a_world_in_memory_survives_crashes(depth: Depth) -> None:
    run_machine(lambda folder: MemoryDatabase(), round(60 * depth.examples))


def test_a_world_on_rocksdb_survives_crashes(depth: Depth) -> None:
    run_machine(lambda folder: RocksDatabase(folder / "kv"), round(15 * depth.stored_examples))


@pytest.mark.nightly
def test_many_worlds_survive_crashes() -> None:
    run_machine(lambda folder: MemoryDatabase(), 2_000)
    run_machine(lambda folder: RocksDatabase(folder / "kv"), 300)
