"""Random histories of a world match a plain Python list, byte for byte, on every backend."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import CommitUnknown, HeadAdvanced, Unreachable
from fastness.kv import Database, Transaction
from fastness.layers import inboxes, journal_records, journals, worlds
from fastness.layers.worlds import World
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.tiers import Tier
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control, DomainEvent, EffectReceipt, InboundMessage, InboxItem, TimerFired

BATCH_BYTES_MAX = 262_144
DEFAULTS: dict[str, Any] = {
    "key": None,
    "headers": {},
    "payload": b"",
    "payload_blob": None,
    "effects": (),
    "timers": (),
    "error": None,
    "sender": None,
}
ANSWER = 2  # transact: begin, transact: commit, transact: answer

text = st.text(max_size=4)
payloads = st.binary(max_size=8) | st.sampled_from((1, 4_096)).map(bytes)
items = (
    st.builds(DomainEvent, schema=text, key=st.none() | st.binary(max_size=3), payload=payloads)
    | st.builds(
        EffectReceipt, intent_hash=st.binary(max_size=3), effect_kind=text, adapter_id=text, signature=st.just(b"s")
    )
    | st.builds(InboundMessage, inbox_name=text, headers=st.dictionaries(text, text, max_size=3), payload=payloads)
    | st.builds(TimerFired, timer_id=text, payload=payloads)
    | st.builds(Control, command=text)
)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | text | st.binary()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
batches = st.lists(values, min_size=1, max_size=4)
limits = st.integers(1, 4) | st.just(256)
tiers = st.sampled_from((Tier.IMPORTANT, Tier.CRITICAL))
points = st.integers(0, ANSWER)
errors = st.sampled_from((Crash, partial(CommitUnknown, "lost on purpose"), partial(Unreachable, "on purpose")))


class OnPurpose(Exception):
    """Aborts a transaction, which must write nothing."""


class Model(NamedTuple):
    """The model of a world: its inbox items, how many are drained, and its history."""

    items: tuple[InboxItem, ...] = ()
    drained: int = 0
    journal: tuple[bytes, ...] = ()

    def enqueue(self, item: InboxItem) -> "Model":
        return self._replace(items=(*self.items, item))

    def append(self, batch: list[Any]) -> "Model":
        return self._replace(journal=self.journal + tuple(cbor2.dumps([0, value], canonical=True) for value in batch))

    def drain(self, limit: int) -> "Model":
        batch: list[bytes] = []
        for sequence, item in list(enumerate(self.items))[self.drained :][:limit]:
            record = cbor2.dumps([1, {"seq": sequence, **fields(item)}], canonical=True)
            if sum(map(len, batch)) + len(record) > BATCH_BYTES_MAX:
                break
            batch.append(record)
        return self._replace(drained=self.drained + len(batch), journal=self.journal + tuple(batch))

    @property
    def cursor(self) -> int | None:
        return self.drained - 1 if self.drained else None


def fields(item: InboxItem) -> dict[str, Any]:
    """An item as a map of its type and fields, independent of the code under test."""
    fields_of_item = {name: getattr(item, name) for name in item.__struct_fields__}
    given = {name: value for name, value in fields_of_item.items() if name not in DEFAULTS or value != DEFAULTS[name]}
    return {"type": item.__struct_config__.tag, **given}


def encoded(batch: list[Any]) -> list[bytes]:
    return [journal_records.entry(canonical(value)) for value in batch]


class Worlds(RuleBasedStateMachine):
    """A world and its model; every rule is a transaction, a read, or a transaction with a fault."""

    openers: Iterator[Callable[[], Database]]  # Opens the database of one example.
    names: Iterator[int]  # Examples may share a database, so each has its own world.
    lasting: bool  # Whether data survives reopening the database.

    def __init__(self) -> None:
        super().__init__()
        self.open = next(self.openers)
        self.database = self.open()
        self.world = World("main", str(next(self.names)))
        self.database.transact(worlds.create, self.world)
        self.model = Model()

    @rule(item=items, tier=tiers)
    def an_item_is_enqueued(self, item: InboxItem, tier: Tier) -> None:
        assert self.database.transact(inboxes.enqueue, self.world, item, tier=tier) == len(self.model.items)
        self.model = self.model.enqueue(item)

    @rule(some=st.lists(items, min_size=2, max_size=6), large=st.integers(0, 70))
    def many_items_are_enqueued_in_one_commit(self, some: list[InboxItem], large: int) -> None:
        """Sometimes more than one batch holds."""
        some += [DomainEvent(schema="large", payload=bytes(4_096))] * (large if large > 60 else 0)
        self.database.transact(lambda tx: [inboxes.enqueue(tx, self.world, item) for item in some])
        for item in some:
            self.model = self.model.enqueue(item)

    @rule(limit=limits, tier=tiers)
    def items_are_drained(self, limit: int, tier: Tier) -> None:
        before, self.model = self.model, self.model.drain(limit)
        heights = self.database.transact(inboxes.drain, self.world, limit=limit, tier=tier)
        assert heights == list(range(len(before.journal), len(self.model.journal)))

    @rule(batch=batches, tier=tiers)
    def a_batch_is_appended(self, batch: list[Any], tier: Tier) -> None:
        head = len(self.model.journal)
        arguments = (self.world, encoded(batch))
        assert self.database.transact(journals.append, *arguments, expected_head=head, tier=tier) == head
        self.model = self.model.append(batch)

    @rule(batch=batches, away=st.integers(-3, 3).filter(bool))
    def a_batch_for_another_head_is_refused(self, batch: list[Any], away: int) -> None:
        head = len(self.model.journal)
        with pytest.raises(HeadAdvanced) as refused:
            self.database.transact(journals.append, self.world, encoded(batch), expected_head=head + away)
        assert (refused.value.expected, refused.value.actual) == (head + away, head)

    @rule(item=items, batch=batches, limit=limits, fails=st.booleans())
    def one_commit_does_everything(self, item: InboxItem, batch: list[Any], limit: int, fails: bool) -> None:
        """A drain sees items of its own transaction; if the transaction fails, nothing is written."""

        def work(tx: Transaction) -> None:
            inboxes.enqueue(tx, self.world, item)
            inboxes.drain(tx, self.world, limit=limit)
            journals.append(tx, self.world, encoded(batch), expected_head=journals.head(tx, self.world))
            if fails:
                raise OnPurpose

        if fails:
            with pytest.raises(OnPurpose):
                self.database.transact(work)
        else:
            self.database.transact(work)
            self.model = self.model.enqueue(item).drain(limit).append(batch)

    @rule(limit=limits, point=points, error=errors)
    def a_drain_fails(self, limit: int, point: int, error: Callable[[], BaseException]) -> None:
        """The caller reads the cursor, and drains again if it has not moved."""
        drained = self.model.drain(limit)
        self.fail(point, error, inboxes.drain, self.world, limit=limit)
        cursor = self.database.read(inboxes.cursor, self.world)
        assert cursor == (drained if point == ANSWER else self.model).cursor
        if cursor == self.model.cursor:
            self.database.transact(inboxes.drain, self.world, limit=limit)
        self.model = drained

    @rule(batch=batches, point=points, error=errors)
    def an_append_fails(self, batch: list[Any], point: int, error: Callable[[], BaseException]) -> None:
        """The caller reads the head first. A blind retry is refused, so it cannot append twice."""
        head = len(self.model.journal)
        self.fail(point, error, journals.append, self.world, encoded(batch), expected_head=head)
        again = partial(self.database.transact, journals.append, self.world, encoded(batch), expected_head=head)
        if self.database.read(journals.head, self.world) == head:
            assert point != ANSWER
            again()
        else:
            assert point == ANSWER
            with pytest.raises(HeadAdvanced):
                again()
        self.model = self.model.append(batch)

    @rule(item=items, point=points, error=errors)
    def an_enqueue_fails(self, item: InboxItem, point: int, error: Callable[[], BaseException]) -> None:
        self.fail(point, error, inboxes.enqueue, self.world, item)
        if point == ANSWER:
            self.model = self.model.enqueue(item)

    @rule(start=st.integers(0, 12), limit=limits)
    def a_part_of_the_journal_is_read(self, start: int, limit: int) -> None:
        expected = list(enumerate(self.model.journal))[start : start + limit]
        assert self.database.read(journals.read_hot, self.world, start, limit) == expected

    @rule(after=st.none() | st.integers(0, 12), limit=limits)
    def a_part_of_the_inbox_is_read(self, after: int | None, limit: int) -> None:
        begin = 0 if after is None else after + 1
        expected = list(enumerate(self.model.items))[begin : begin + limit]
        assert self.database.read(inboxes.read, self.world, after=after, limit=limit) == expected

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()

    @invariant()
    def the_world_equals_the_model(self) -> None:
        def check(tx: Transaction) -> Model:
            found = journals.read_hot(tx, self.world, 0, 10_000)
            assert [height for height, _ in found] == list(range(journals.head(tx, self.world)))
            came = inboxes.read(tx, self.world, after=None, limit=10_000)
            assert [sequence for sequence, _ in came] == list(range(inboxes.arrivals(tx, self.world)))
            cursor = inboxes.cursor(tx, self.world)
            journal = tuple(record for _, record in found)
            return Model(tuple(item for _, item in came), 0 if cursor is None else cursor + 1, journal)

        assert self.database.read(check) == self.model

    @invariant()
    def every_drained_item_is_in_the_journal_once_and_in_order(self) -> None:
        told_all = [cbor2.loads(record) for record in self.model.journal]
        ingress = [value for kind, value in told_all if kind == journal_records.Kind.INGRESS]
        assert [fields_of_item.pop("seq") for fields_of_item in ingress] == list(range(self.model.drained))
        assert (
            tuple(msgspec.convert(fields_of_item, InboxItem) for fields_of_item in ingress)
            == self.model.items[: self.model.drained]
        )

    def fail(self, point: int, error: Callable[[], BaseException], work: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((Crash, CommitUnknown, Unreachable)):
            FaultyDatabase(self.database, ChosenFault(point, error)).transact(work, *args, **kwargs)

    def teardown(self) -> None:
        self.database.close()


@pytest.mark.examples(60)
def test_a_world_in_memory_matches_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Worlds, steps=30, openers=repeat(MemoryDatabase), names=count(), lasting=False)


@pytest.mark.examples(15)
def test_a_world_on_rocksdb_matches_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Worlds, steps=30, openers=fresh, names=count(), lasting=True)


@pytest.mark.examples(8)
def test_a_world_on_postgres_matches_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Worlds, steps=30, openers=repeat(open_postgres), names=count(), lasting=True)
