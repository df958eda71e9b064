"""Tiered writes with crashes and power losses: each tier keeps exactly its durability."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import VersionConflict
from fastness.handles.sync.plane import Plane
from fastness.kv import Database, Transaction
from fastness.layers import entities
from fastness.layers.entities import EntityKey
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.tiers import Tier
from tests.support.depth import Depth

Name = tuple[str, str]  # A kind and an id.
Fields = dict[str, int]

# The expected tiers of these fields, independent of the policy under test.
CRITICAL = {("task", "status"), ("task", "id"), ("edge", "type")}
BEST_EFFORT = {("task", "debug_trace"), ("task", "metrics"), ("edge", "ml_score")}
FIELDS = {
    "task": ("status", "id", "priority", "note", "debug_trace", "metrics"),
    "edge": ("type", "weight", "ml_score"),
}
NAMES = (("task", "1"), ("task", "2"), ("edge", "1"))
COMMIT, ANSWER = 1, 2  # transact: begin, transact: commit, transact: answer

names = st.sampled_from(NAMES)
changes = names.flatmap(
    lambda name: st.tuples(
        st.just(name), st.dictionaries(st.sampled_from(FIELDS[name[0]]), st.integers(0, 99), min_size=1, max_size=4)
    )
)


class Change(NamedTuple):
    """One version of an entity, as its history must show it."""

    tier: Tier
    fields: Fields
    removed: frozenset[str]
    deleted: bool = False


class ModelEntity(NamedTuple):
    """All versions of an entity, and the resulting fields."""

    fields: Fields | None
    changes: tuple[Change, ...] = ()

    @property
    def version(self) -> int:
        return len(self.changes)

    def then(self, fields: Fields | None, change: Change) -> "ModelEntity":
        return ModelEntity(fields, (*self.changes, change))


Model = dict[Name, ModelEntity]
ABSENT = ModelEntity(None)
NOTHING: frozenset[str] = frozenset()


def tier_of(kind: str, field: str) -> Tier:
    if (kind, field) in CRITICAL:
        return Tier.CRITICAL
    return Tier.BEST_EFFORT if (kind, field) in BEST_EFFORT else Tier.IMPORTANT


def strongest_of(tiers: Iterable[Tier]) -> Tier:
    given = set(tiers)
    return next(tier for tier in (Tier.CRITICAL, Tier.IMPORTANT, Tier.BEST_EFFORT) if tier in given)


def strongest(kind: str, fields: Fields) -> Tier:
    return strongest_of(tier_of(kind, field) for field in fields)


def durable(kind: str, fields: Fields) -> Fields:
    return {field: value for field, value in fields.items() if tier_of(kind, field) is not Tier.BEST_EFFORT}


def best_effort(kind: str, fields: Fields) -> Fields:
    return {field: value for field, value in fields.items() if tier_of(kind, field) is Tier.BEST_EFFORT}


def changed(model: Model, name: Name, fields: Fields, removed: frozenset[str], tier: Tier) -> Model:
    """The model after a commit of this tier sets and removes fields."""
    known = model.get(name, ABSENT)
    kept = {field: value for field, value in (known.fields or {}).items() if field not in removed}
    return model | {name: known.then({**kept, **fields}, Change(tier, fields, removed))}


class Entities(RuleBasedStateMachine):
    """A plane with power losses, and the states that it may lose.

    `safe` is the durable state; `unsafe` are the states of later IMPORTANT commits, in order.
    """

    make_database: Callable[[Path, ManualClock], Database]

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.database = FaultyDatabase(type(self).make_database(Path(self.folder.name), self.clock))
        self.safe: Model = {}
        self.unsafe: list[Model] = []
        self.logged: list[dict[str, Any]] = []  # Records in earlier log files.
        self.unsaved: list[dict[str, Any]] = []  # Records in the current log file.
        self.deletions: list[tuple[int, Name]] = []  # The number of records before each deletion.
        self.start()

    def start(self) -> None:
        self.clock.advance_ms(1_000)  # Log files are ordered by the second of their creation.
        self.services = Services(self.database, clock=self.clock, logs=Path(self.folder.name) / "activity")
        self.plane = Plane(EmbeddedTransport(self.services))
        self.entities = self.plane.entities

    def teardown(self) -> None:
        if hasattr(self, "plane"):
            self.plane.close()
            self.folder.cleanup()

    # The model.

    @property
    def now(self) -> Model:
        return self.unsafe[-1] if self.unsafe else self.safe

    def known(self, name: Name) -> ModelEntity:
        return self.now.get(name, ABSENT)

    def add_commit(self, model: Model, tier: Tier) -> None:
        """An IMPORTANT commit may be lost; a CRITICAL one makes everything before it durable."""
        self.unsafe.append(model)
        if tier is Tier.CRITICAL:
            self.make_durable()

    def make_durable(self) -> None:
        """Everything that a CRITICAL response reveals, even a refusal, is durable."""
        self.safe, self.unsafe = self.now, []

    def log(self, name: Name, fields: Fields) -> None:
        if read_log := best_effort(name[0], fields):
            self.unsaved.append({"kind": name[0], "id": name[1], "fields": read_log})

    def newest(self, name: Name) -> Fields:
        """The BEST_EFFORT values that a read can show: the newest ones since the entity was deleted."""
        since = max((at for at, deleted in self.deletions if deleted == name), default=0)
        values: Fields = {}
        for record in (self.logged + self.unsaved)[since:]:
            if (record["kind"], record["id"]) == name:
                values |= record["fields"]
                values = {field: value for field, value in values.items() if field not in record.get("removed", ())}
        return values

    def all_fields(self, name: Name) -> Fields | None:
        """The fields of an entity with its BEST_EFFORT values; None if it has neither."""
        newest = self.newest(name)
        return None if self.known(name).fields is None and not newest else {**(self.known(name).fields or {}), **newest}

    # Writes.

    @rule(change=changes)
    def fields_are_written(self, change: tuple[Name, Fields]) -> None:
        """Each field has its tier; the response has the strongest of them."""
        name, fields = change
        tier, lasting = strongest(name[0], fields), durable(name[0], fields)
        written = self.entities.write(*name, fields, session="s")
        if lasting:
            self.add_commit(changed(self.now, name, lasting, NOTHING, tier), tier)
        assert written.durability == tier
        assert written.versions == [self.known(name).version if lasting else None]
        self.log(name, fields)

    @rule(change=changes, point=st.sampled_from((0, COMMIT, ANSWER)))
    def a_write_crashes(self, change: tuple[Name, Fields], point: int) -> None:
        """The commit is atomic, and its BEST_EFFORT fields are not logged before it."""
        name, fields = change
        tier, lasting = strongest(name[0], fields), durable(name[0], fields)
        if not lasting:
            return
        self.database.faults = ChosenFault(point)
        with pytest.raises(Crash):
            self.entities.write(*name, fields, session="s")
        self.database.faults = ChosenFault()
        if point == ANSWER:
            self.add_commit(changed(self.now, name, lasting, NOTHING, tier), tier)

    @rule(
        some=st.lists(changes, min_size=1, max_size=3),
        seen=st.lists(names, max_size=2, unique=True),
        others=st.booleans(),
    )
    def a_transaction_commits_as_one(self, some: list[tuple[Name, Fields]], seen: list[Name], others: bool) -> None:
        """At the strongest tier of its fields, or not at all if an entity it read has changed."""
        transaction = self.entities.transaction(session="s")
        for name in seen:
            found = transaction.get(*name)  # At IMPORTANT, so it makes nothing durable.
            assert (None if found is None else found.fields) == self.known(name).fields
        writes: dict[Name, Fields] = {}
        for name, fields in some:
            for field, value in fields.items():
                transaction.write(*name, field, value)
                writes.setdefault(name, {})[field] = value
        tier = strongest_of(tier_of(name[0], field) for name, fields in writes.items() for field in fields)
        if seen and others:
            name = seen[-1]
            field = "weight" if name[0] == "edge" else "priority"
            self.entities.write(*name, {field: 1_000})
            self.add_commit(changed(self.now, name, {field: 1_000}, NOTHING, Tier.IMPORTANT), Tier.IMPORTANT)
            with pytest.raises(VersionConflict) as refused:
                transaction.commit()
            assert refused.value.actual == refused.value.expected + 1 == self.known(name).version
            if tier is Tier.CRITICAL:
                self.make_durable()
            return
        written = transaction.commit()
        assert written is not None
        model = self.now
        for name, fields in writes.items():
            if lasting := durable(name[0], fields):
                model = changed(model, name, lasting, NOTHING, tier)
            self.log(name, fields)
        if model is not self.now:
            self.add_commit(model, tier)
        read_log = [self.known(name).version if durable(name[0], fields) else None for name, fields in writes.items()]
        assert (written.durability, written.versions) == (tier, read_log)

    @rule(name=names, data=st.data())
    def fields_are_removed(self, name: Name, data: st.DataObject) -> None:
        """By name, existing or not; the removal of a BEST_EFFORT field is logged."""
        removed = data.draw(st.sets(st.sampled_from(FIELDS[name[0]]), min_size=1, max_size=2))
        with self.entities.transaction(session="s") as transaction:
            for field in sorted(removed):
                transaction.remove(*name, field)
        if logged := [field for field in sorted(removed) if tier_of(name[0], field) is Tier.BEST_EFFORT]:
            self.unsaved.append({"kind": name[0], "id": name[1], "fields": {}, "removed": logged})
        tier = strongest_of(tier_of(name[0], field) for field in removed)
        if tier is not Tier.BEST_EFFORT:
            gone = frozenset(field for field in removed if tier_of(name[0], field) is not Tier.BEST_EFFORT)
            self.add_commit(changed(self.now, name, {}, gone, tier), tier)

    @rule(change=changes, away=st.sampled_from((0, 0, 0, -1, 1, 7)))
    def an_entity_is_put_if_it_has_a_version(self, change: tuple[Name, Fields], away: int) -> None:
        """Replaces all durable fields; dropping a CRITICAL field is a CRITICAL write."""
        name, fields = change
        known, lasting = self.known(name), durable(name[0], fields)
        lost = frozenset(known.fields or ()) - lasting.keys()
        tiers = {tier_of(name[0], field) for field in fields} | {Tier.IMPORTANT}
        if away:
            with pytest.raises(VersionConflict) as refused:
                self.entities.put_if_version(*name, fields, expected_version=known.version + away, session="s")
            assert (refused.value.expected, refused.value.actual) == (known.version + away, known.version)
            if Tier.CRITICAL in tiers:
                self.make_durable()
            return
        tier = strongest_of(tiers | {tier_of(name[0], field) for field in lost})
        written = self.entities.put_if_version(*name, fields, expected_version=known.version, session="s")
        model = self.now | {name: known.then(lasting, Change(tier, lasting, lost))}
        self.add_commit(model, tier)
        assert (written.durability, written.versions) == (tier, [known.version + 1])
        self.log(name, fields)

    @rule(name=names, away=st.none() | st.sampled_from((0, 0, 1)))
    def an_entity_is_deleted(self, name: Name, away: int | None) -> None:
        """A deletion is CRITICAL."""
        known = self.known(name)
        if away:
            with pytest.raises(VersionConflict):
                self.entities.delete(*name, expected_version=known.version + away)
        else:
            expected = None if away is None else known.version
            assert self.entities.delete(*name, expected_version=expected) == (known.fields is not None)
            if known.fields is not None:
                change = Change(Tier.CRITICAL, {}, frozenset(known.fields), deleted=True)
                self.unsafe.append(self.now | {name: known.then(None, change)})
                self.deletions.append((len(self.logged) + len(self.unsaved), name))
        self.make_durable()

    # Reads.

    @rule(name=names)
    def an_entity_is_read(self, name: Name) -> None:
        found = self.entities.get(*name)
        assert (None if found is None else found.fields) == self.known(name).fields
        self.make_durable()

    @rule(name=names)
    def an_entity_is_read_with_best_effort_values(self, name: Name) -> None:
        found = self.entities.get(*name, best_effort=True)
        assert (None if found is None else found.fields) == self.all_fields(name)
        assert found is None or (found.version, found.best_effort.keys()) == (
            self.known(name).version,
            self.newest(name).keys(),
        )
        self.make_durable()

    @rule(limit=st.integers(1, 3), after=st.sampled_from(("", "1")))
    def tasks_are_scanned_with_best_effort_values(self, limit: int, after: str) -> None:
        found = self.entities.scan("task", after=after, limit=limit, best_effort=True)
        existing = [(name, self.all_fields(name)) for name in NAMES if name[0] == "task" and name[1] > after]
        assert [((each.kind, each.id), each.fields) for each in found] == [
            each for each in existing if each[1] is not None
        ][:limit]
        self.make_durable()

    @rule(name=names, limit=st.integers(1, 5), after=st.integers(-1, 6))
    def a_history_is_read(self, name: Name, limit: int, after: int) -> None:
        found = self.entities.history(*name, after=after, limit=limit)
        begin = max(after, 0)
        read_log = [
            (each.version, Change(each.durability, each.fields, frozenset(each.removed), each.deleted))
            for each in found
        ]
        assert read_log == list(enumerate(self.known(name).changes, 1))[begin : begin + limit]
        self.make_durable()

    @rule(limit=st.integers(1, 3), after=st.sampled_from(("", "1")))
    def tasks_are_scanned(self, limit: int, after: str) -> None:
        found = self.entities.scan("task", after=after, limit=limit)
        existing = [
            name for name in NAMES if name[0] == "task" and name[1] > after and self.known(name).fields is not None
        ]
        assert [(each.kind, each.id) for each in found] == existing[:limit]
        assert [each.fields for each in found] == [self.known(name).fields for name in existing[:limit]]
        self.make_durable()

    # Process crashes and power losses.

    @rule()
    def the_power_fails(self) -> None:
        """The latest IMPORTANT commits may be lost, but none that a CRITICAL response revealed."""
        self.database.power_loss()
        left = self.database.read(stored, tier=Tier.IMPORTANT)
        assert left in [self.safe, *self.unsafe]
        self.safe, self.unsafe = left, []

    @rule(torn=st.integers(0, 300))
    def the_process_restarts(self, torn: int) -> None:
        """The last bytes of the session log are torn off; every complete line is still read."""
        self.services.log().close()
        files = sorted((Path(self.folder.name) / "activity").glob("*/*.jsonl"))
        if torn and self.unsaved:
            with files[-1].open("r+b") as file:
                size = file.seek(0, 2)
                file.truncate(max(0, size - torn))
        self.start()
        found = self.read_log()
        before, after = found[: len(self.logged)], found[len(self.logged) :]
        assert before == self.logged
        assert after == self.unsaved[: len(after)]
        if not torn:
            assert after == self.unsaved
        self.logged, self.unsaved = found, []
        self.deletions = [(min(at, len(found)), name) for at, name in self.deletions]

    def read_log(self) -> list[dict[str, Any]]:
        records = self.plane.activity.read(session="s", kind="entities", limit=10_000).records
        return [msgspec.json.decode(each.record) for each in records]

    # Invariants.

    @invariant()
    def entities_equal_the_model(self) -> None:
        """Versions grow by one, and the history leads to the current fields."""
        if hasattr(self, "plane"):
            assert self.database.read(stored, tier=Tier.IMPORTANT) == self.now

    @invariant()
    def the_log_is_read_in_order(self) -> None:
        if hasattr(self, "plane"):
            self.clock.advance_ms(1)  # Whether a deletion or a BEST_EFFORT value came first is decided by their times.
            assert self.read_log() == self.logged + self.unsaved


def stored(tx: Transaction) -> Model:
    """All entities with their histories, each folded and compared with the current fields."""
    model: Model = {}
    for kind, id in NAMES:
        key = EntityKey("main", kind, id)
        entity = entities.get(tx, key)
        if not entity.version:
            continue
        history = entities.history(tx, key, after=0, limit=1_000)
        assert [each.version for each in history] == list(range(1, entity.version + 1))
        fields: dict[str, Any] = {}
        steps = []
        for each in history:
            read_log = {field: cbor2.loads(value) for field, value in each.fields.items()}
            fields = {field: value for field, value in fields.items() if field not in each.removed} | read_log
            steps.append(Change(each.durability, read_log, frozenset(each.removed), each.deleted))
        assert fields == {field: cbor2.loads(value) for field, value in entity.fields.items()}
        model[kind, id] = ModelEntity(None if entity.deleted else fields, tuple(steps))
    return model


def run_machine(make_database: Callable[[Path, ManualClock], Database], examples: int) -> None:
    machine = type("Machine", (Entities,), {"make_database": staticmethod(make_database)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))


def test_entities_in_memory_match_the_model(depth: Depth) -> None:
    run_machine(lambda folder, clock: MemoryDatabase(clock=clock), round(50 * depth.examples))


def test_entities_on_rocksdb_match_the_model(depth: Depth) -> None:
    run_machine(lambda folder, clock: RocksDatabase(folder / "kv", clock=clock), round(15 * depth.stored_examples))


@pytest.mark.nightly
def test_many_entities_match_the_model() -> None:
    run_machine(lambda folder, clock: MemoryDatabase(clock=clock), 2_000)
    run_machine(lambda folder, clock: RocksDatabase(folder / "kv", clock=clock), 300)
