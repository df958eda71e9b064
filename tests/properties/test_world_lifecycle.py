"""With any interleaving of operations and crashes, a world keeps its history, and a restore equals a replay."""

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

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.objects import open_objects
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.handles.sync.plane import Plane
from holdfast.kv import Database
from holdfast.layers.snapshots import NO_MANIFEST
from holdfast.plane.embedded import EmbeddedTransport
from holdfast.plane.services import Services
from holdfast.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.restores import Entry


def fold(state: Any, entry: Entry) -> Any:
    """A reducer: all appended and drained values in order, and the number of records."""
    seen, count = state or ([], 0)
    if entry.kind == "entry":
        seen = [*seen, entry.value]
    elif entry.kind == "ingress":
        seen = [*seen, entry.value["schema"]]
    return seen, count + 1


class Lives(RuleBasedStateMachine):
    """One world, and its expected history as a plain list."""

    make_database: Callable[[Path], Database]

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.database = type(self).make_database(Path(self.folder.name))
        self.objects = open_objects(f"dir:{self.folder.name}/objects")
        self.plane = Plane(EmbeddedTransport(Services(self.database, self.objects)))
        self.world = self.plane.world("w")
        self.world.create()
        self.history: list[str] = []
        self.waiting: list[str] = []
        self.number = 0

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

    @rule()
    def enqueue(self) -> None:
        schema = self.fresh()
        self.world.inbox.put(DomainEvent(schema=schema))
        self.waiting.append(schema)

    @rule(limit=st.integers(1, 5))
    def drain(self, limit: int) -> None:
        heights = self.world.drain(limit=limit)
        self.history += self.waiting[: len(heights)]
        assert len(heights) == min(limit, len(self.waiting))
        del self.waiting[: len(heights)]

    @rule(fail_at=st.integers(0, 3))
    def crash_while_draining(self, fail_at: int) -> None:
        before = self.world.inbox.cursor()
        try:
            self.crashing(fail_at).drain(limit=2)
        except Crash:
            after = self.world.inbox.cursor()
            drained = 0 if after == before else after - (-1 if before is None else before)
        else:
            drained = min(2, len(self.waiting))
        self.history += self.waiting[:drained]
        del self.waiting[:drained]

    @rule(promote=st.booleans())
    def snapshot(self, promote: bool) -> None:
        restored = self.world.restore(fold)
        self.world.snapshots.commit(
            restored.state,
            height=restored.height,
            promote=promote,
            receipt_horizon_height=restored.height,
            manifest_hash=NO_MANIFEST,
        )

    @rule(fail_at=st.integers(0, 10))
    def crash_while_taking_a_snapshot(self, fail_at: int) -> None:
        restored = self.world.restore(fold)
        options = {"promote": True, "receipt_horizon_height": restored.height, "manifest_hash": NO_MANIFEST}
        try:
            self.crashing(fail_at).snapshots.commit(restored.state, height=restored.height, **options)
        except Crash:
            self.world.snapshots.commit(restored.state, height=restored.height, **options)

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
        assert list(restored.state or ([], 0)) == list(replayed.state or ([], 0))
        assert (replayed.state or ([], 0))[0] == self.history

    @rule()
    def verify(self) -> None:
        assert self.world.verify(fold).agrees


def run_machine(make_database: Callable[[Path], Database], examples: int) -> None:
    machine = type("Machine", (Lives,), {"make_database": staticmethod(make_database)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


def test_a_world_in_memory_survives_crashes() -> None:
    run_machine(lambda folder: MemoryDatabase(), 60)


def test_a_world_on_rocksdb_survives_crashes() -> None:
    run_machine(lambda folder: RocksDatabase(folder / "kv"), 15)


@pytest.mark.nightly
def test_many_worlds_survive_crashes() -> None:
    run_machine(lambda folder: MemoryDatabase(), 2_000)
    run_machine(lambda folder: RocksDatabase(folder / "kv"), 300)
