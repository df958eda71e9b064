"""Tiered writes with crashes and power losses: each promise holds for what it was given for, and for no more."""

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

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import VersionConflict
from holdfast.handles import Plane
from holdfast.kv import Database, Transaction
from holdfast.layers import entities
from holdfast.layers.entities import EntityKey
from holdfast.plane.embedded import EmbeddedTransport
from holdfast.plane.services import Services
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import ChosenFault, Crash, FaultyDatabase
from holdfast.tiers import Tier

Name = tuple[str, str]  # A kind and an id.
Fields = dict[str, int]

# What seed 002 says of these fields, written down independently of the policy.
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
    """One version of an entity, as its history must tell it."""

    tier: Tier
    fields: Fields
    removed: frozenset[str]
    deleted: bool = False


class Known(NamedTuple):
    """All versions of an entity from the first on, and the fields that they leave."""

    fields: Fields | None
    changes: tuple[Change, ...] = ()

    @property
    def version(self) -> int:
        return len(self.changes)

    def then(self, fields: Fields | None, change: Change) -> "Known":
        return Known(fields, (*self.changes, change))


Model = dict[Name, Known]
NOBODY = Known(None)
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


def loose(kind: str, fields: Fields) -> Fields:
    return {field: value for field, value in fields.items() if tier_of(kind, field) is Tier.BEST_EFFORT}


def changed(model: Model, name: Name, fields: Fields, removed: frozenset[str], tier: Tier) -> Model:
    """The model once these fields were set and removed in a commit of that tier."""
    known = model.get(name, NOBODY)
    kept = {field: value for field, value in (known.fields or {}).items() if field not in removed}
    return model | {name: known.then({**kept, **fields}, Change(tier, fields, removed))}


class Entities(RuleBasedStateMachine):
    """A plane that loses its power, and what it may have lost by that.

    `safe` is what an acknowledgement or an answer promised for ever; `unsafe` are the states that IMPORTANT commits
    made of it since, in order.
    """

    make_database: Callable[[Path, ManualClock], Database]

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.database = FaultyDatabase(type(self).make_database(Path(self.folder.name), self.clock))
        self.safe: Model = {}
        self.unsafe: list[Model] = []
        self.logged: list[dict[str, Any]] = []  # What earlier files hold.
        self.fresh: list[dict[str, Any]] = []  # What goes to the file of this life.
        self.start()

    def start(self) -> None:
        self.clock.advance_ms(1_000)  # Files are in the order of the seconds in which they begin.
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

    def known(self, name: Name) -> Known:
        return self.now.get(name, NOBODY)

    def committed(self, model: Model, tier: Tier) -> None:
        """An IMPORTANT commit may be taken back; a CRITICAL one makes good everything before it."""
        self.unsafe.append(model)
        if tier is Tier.CRITICAL:
            self.covered()

    def covered(self) -> None:
        """What somebody was told at CRITICAL, be it by a refusal, is there for ever."""
        self.safe, self.unsafe = self.now, []

    def log(self, name: Name, fields: Fields) -> None:
        if told := loose(name[0], fields):
            self.fresh.append({"kind": name[0], "id": name[1], "fields": told})

    # Writes.

    @rule(change=changes)
    def fields_are_written(self, change: tuple[Name, Fields]) -> None:
        """Each by its tier; the answer carries the strongest of them."""
        name, fields = change
        tier, lasting = strongest(name[0], fields), durable(name[0], fields)
        written = self.entities.write(*name, fields, session="s")
        if lasting:
            self.committed(changed(self.now, name, lasting, NOTHING, tier), tier)
        assert written.durability == tier
        assert written.versions == [self.known(name).version if lasting else None]
        self.log(name, fields)

    @rule(change=changes, point=st.sampled_from((0, COMMIT, ANSWER)))
    def a_write_dies(self, change: tuple[Name, Fields], point: int) -> None:
        """Its commit is there as a whole or not at all, and its BEST_EFFORT fields are not logged before that."""
        name, fields = change
        tier, lasting = strongest(name[0], fields), durable(name[0], fields)
        if not lasting:
            return
        self.database.faults = ChosenFault(point)
        with pytest.raises(Crash):
            self.entities.write(*name, fields, session="s")
        self.database.faults = ChosenFault()
        if point == ANSWER:
            self.committed(changed(self.now, name, lasting, NOTHING, tier), tier)

    @rule(
        some=st.lists(changes, min_size=1, max_size=3),
        seen=st.lists(names, max_size=2, unique=True),
        others=st.booleans(),
    )
    def a_transaction_commits_as_one(self, some: list[tuple[Name, Fields]], seen: list[Name], others: bool) -> None:
        """At the strongest promise of all its fields, or not at all if what it read was changed by others."""
        transaction = self.entities.transaction(session="s")
        for name in seen:
            found = transaction.get(*name)  # At IMPORTANT, so it makes nothing good.
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
            self.committed(changed(self.now, name, {field: 1_000}, NOTHING, Tier.IMPORTANT), Tier.IMPORTANT)
            with pytest.raises(VersionConflict) as refused:
                transaction.commit()
            assert refused.value.actual == refused.value.expected + 1 == self.known(name).version
            if tier is Tier.CRITICAL:
                self.covered()
            return
        written = transaction.commit()
        assert written is not None
        model = self.now
        for name, fields in writes.items():
            if lasting := durable(name[0], fields):
                model = changed(model, name, lasting, NOTHING, tier)
            self.log(name, fields)
        if model is not self.now:
            self.committed(model, tier)
        told = [self.known(name).version if durable(name[0], fields) else None for name, fields in writes.items()]
        assert (written.durability, written.versions) == (tier, told)

    @rule(name=names, data=st.data())
    def fields_are_removed(self, name: Name, data: st.DataObject) -> None:
        """By name, whether they are there or not; a BEST_EFFORT one is nowhere and nothing happens."""
        removed = data.draw(st.sets(st.sampled_from(FIELDS[name[0]]), min_size=1, max_size=2))
        with self.entities.transaction() as transaction:
            for field in sorted(removed):
                transaction.remove(*name, field)
        tier = strongest_of(tier_of(name[0], field) for field in removed)
        if tier is not Tier.BEST_EFFORT:
            gone = frozenset(field for field in removed if tier_of(name[0], field) is not Tier.BEST_EFFORT)
            self.committed(changed(self.now, name, {}, gone, tier), tier)

    @rule(change=changes, away=st.sampled_from((0, 0, 0, -1, 1, 7)))
    def an_entity_is_put_if_it_has_a_version(self, change: tuple[Name, Fields], away: int) -> None:
        """All durable fields are replaced; one that drops a CRITICAL field is CRITICAL itself."""
        name, fields = change
        known, lasting = self.known(name), durable(name[0], fields)
        lost = frozenset(known.fields or ()) - lasting.keys()
        tiers = {tier_of(name[0], field) for field in fields} | {Tier.IMPORTANT}
        if away:
            with pytest.raises(VersionConflict) as refused:
                self.entities.put_if_version(*name, fields, expected_version=known.version + away, session="s")
            assert (refused.value.expected, refused.value.actual) == (known.version + away, known.version)
            if Tier.CRITICAL in tiers:
                self.covered()
            return
        tier = strongest_of(tiers | {tier_of(name[0], field) for field in lost})
        written = self.entities.put_if_version(*name, fields, expected_version=known.version, session="s")
        model = self.now | {name: known.then(lasting, Change(tier, lasting, lost))}
        self.committed(model, tier)
        assert (written.durability, written.versions) == (tier, [known.version + 1])
        self.log(name, fields)

    @rule(name=names, away=st.none() | st.sampled_from((0, 0, 1)))
    def an_entity_is_deleted(self, name: Name, away: int | None) -> None:
        """At CRITICAL, with everything that this tells."""
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
        self.covered()

    # Reads.

    @rule(name=names)
    def somebody_looks_at_an_entity(self, name: Name) -> None:
        found = self.entities.get(*name)
        assert (None if found is None else found.fields) == self.known(name).fields
        self.covered()

    @rule(name=names, limit=st.integers(1, 5), after=st.integers(-1, 6))
    def somebody_reads_a_history(self, name: Name, limit: int, after: int) -> None:
        found = self.entities.history(*name, after=after, limit=limit)
        begin = max(after, 0)
        told = [
            (each.version, Change(each.durability, each.fields, frozenset(each.removed), each.deleted))
            for each in found
        ]
        assert told == list(enumerate(self.known(name).changes, 1))[begin : begin + limit]
        self.covered()

    @rule(limit=st.integers(1, 3), after=st.sampled_from(("", "1")))
    def somebody_scans_the_tasks(self, limit: int, after: str) -> None:
        found = self.entities.scan("task", after=after, limit=limit)
        living = [
            name for name in NAMES if name[0] == "task" and name[1] > after and self.known(name).fields is not None
        ]
        assert [(each.kind, each.id) for each in found] == living[:limit]
        assert [each.fields for each in found] == [self.known(name).fields for name in living[:limit]]
        self.covered()

    # The end of a process, and of the power.

    @rule()
    def the_power_fails(self) -> None:
        """IMPORTANT commits may be gone, the last ones first, and never one that a CRITICAL answer told of."""
        self.database.power_loss()
        left = self.database.read(stored, tier=Tier.IMPORTANT)
        assert left in [self.safe, *self.unsafe]
        self.safe, self.unsafe = left, []

    @rule(torn=st.integers(0, 300))
    def the_process_starts_again(self, torn: int) -> None:
        """And finds the last bytes of the session log torn off: every whole line is read all the same."""
        self.services.log().close()
        files = sorted((Path(self.folder.name) / "activity").glob("*/*.jsonl"))
        if torn and self.fresh:
            with files[-1].open("r+b") as file:
                size = file.seek(0, 2)
                file.truncate(max(0, size - torn))
        self.start()
        found = self.told()
        before, after = found[: len(self.logged)], found[len(self.logged) :]
        assert before == self.logged
        assert after == self.fresh[: len(after)]
        if not torn:
            assert after == self.fresh
        self.logged, self.fresh = found, []

    def told(self) -> list[dict[str, Any]]:
        records = self.plane.activity.read(session="s", kind="entities", limit=10_000).records
        return [msgspec.json.decode(each.record) for each in records]

    # What holds at any time.

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        """Versions grow by one, and the history leads to the fields that are there."""
        if hasattr(self, "plane"):
            assert self.database.read(stored, tier=Tier.IMPORTANT) == self.now

    @invariant()
    def what_was_logged_is_read_in_order(self) -> None:
        if hasattr(self, "plane"):
            assert self.told() == self.logged + self.fresh


def stored(tx: Transaction) -> Model:
    """All entities with their histories, each folded and compared with the fields that are there."""
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
            told = {field: cbor2.loads(value) for field, value in each.fields.items()}
            fields = {field: value for field, value in fields.items() if field not in each.removed} | told
            steps.append(Change(each.durability, told, frozenset(each.removed), each.deleted))
        assert fields == {field: cbor2.loads(value) for field, value in entity.fields.items()}
        model[kind, id] = Known(None if entity.deleted else fields, tuple(steps))
    return model


def live(make_database: Callable[[Path, ManualClock], Database], examples: int) -> None:
    machine = type("Machine", (Entities,), {"make_database": staticmethod(make_database)})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))


def test_entities_in_memory_keep_every_promise() -> None:
    live(lambda folder, clock: MemoryDatabase(clock=clock), 50)


def test_entities_on_rocksdb_keep_every_promise() -> None:
    live(lambda folder, clock: RocksDatabase(folder / "kv", clock=clock), 15)


@pytest.mark.nightly
def test_many_entities_keep_every_promise() -> None:
    live(lambda folder, clock: MemoryDatabase(clock=clock), 2_000)
    live(lambda folder, clock: RocksDatabase(folder / "kv", clock=clock), 300)
