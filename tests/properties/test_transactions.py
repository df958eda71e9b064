"""Random transactions on every backend do what a plain dictionary does."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.postgres import PostgresDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.kv import Database, Pair, Transaction
from holdfast.tiers import Tier

Model = dict[bytes, bytes]

EVERYTHING = (b"", b"\xff" * 3)
KEYS = (b"\x00", b"a", b"a\x00", b"a\x00\x00", b"ab", b"a\xff", b"b", b"\xff", b"\xff\xff")
RUNS_MAX = 40  # A backend may run a work again after a conflict, but not for ever.


class Put(NamedTuple):
    key: bytes
    value: bytes

    def on(self, tx: Transaction) -> None:
        tx.put(self.key, self.value)

    def on_model(self, model: Model) -> None:
        model[self.key] = self.value


class Delete(NamedTuple):
    key: bytes

    def on(self, tx: Transaction) -> None:
        tx.delete(self.key)

    def on_model(self, model: Model) -> None:
        model.pop(self.key, None)


class DeleteRange(NamedTuple):
    begin: bytes
    end: bytes

    def on(self, tx: Transaction) -> None:
        tx.delete_range(self.begin, self.end)

    def on_model(self, model: Model) -> None:
        for key in [key for key in model if self.begin <= key < self.end]:
            del model[key]


class Get(NamedTuple):
    key: bytes

    def on(self, tx: Transaction) -> bytes | None:
        return tx.get(self.key)

    def on_model(self, model: Model) -> bytes | None:
        return model.get(self.key)


class Scan(NamedTuple):
    begin: bytes
    end: bytes
    limit: int
    reverse: bool

    def on(self, tx: Transaction) -> list[Pair]:
        return tx.scan(self.begin, self.end, limit=self.limit, reverse=self.reverse)

    def on_model(self, model: Model) -> list[Pair]:
        found = sorted(pair for pair in model.items() if self.begin <= pair[0] < self.end)
        return (found[::-1] if self.reverse else found)[: self.limit]


Step = Put | Delete | DeleteRange | Get | Scan
Steps = list[Step]

FULL_SCANS: Steps = [Scan(*EVERYTHING, limit=100, reverse=reverse) for reverse in (False, True)]

keys = st.sampled_from(KEYS)
ranges = st.tuples(*[st.sampled_from((b"", *KEYS, EVERYTHING[1]))] * 2).map(sorted)
puts = st.builds(Put, keys, st.binary(max_size=2))
cleared = ranges.map(lambda bounds: DeleteRange(*bounds))
deletes = st.builds(Delete, keys)
writes = puts | puts | puts | deletes | deletes | cleared  # Clearing is rare, so that there is something to scan.
limits = st.integers(1, 4) | st.just(100)
scans = st.builds(lambda bounds, *how: Scan(*bounds, *how), ranges, limits, st.booleans())
reads = st.builds(Get, keys) | scans
works = st.lists(writes | reads | scans | scans, max_size=16)
tiers = st.sampled_from((Tier.IMPORTANT, Tier.CRITICAL))


class OnPurpose(Exception):
    """Ends a transaction that must leave nothing behind."""


def play(tx: Transaction, steps: Steps, model: Model, *, fails: bool = False) -> None:
    """Take the steps in the transaction and in a copy of the model, which is what is committed."""
    own = dict(model)
    for step in steps:
        assert step.on(tx) == step.on_model(own)
    if fails:
        raise OnPurpose


def after(steps: Steps, model: Model) -> Model:
    """What the steps make of the model."""
    own = dict(model)
    for step in steps:
        step.on_model(own)
    return own


class Transactions(RuleBasedStateMachine):
    """A database and a dictionary; every rule is a transaction, a snapshot, or a group of them."""

    openers: Iterator[Callable[[], Database]]  # Each example takes one; it opens that example's database.
    lasting: bool  # Whether a database that is opened again finds what was written.

    def __init__(self) -> None:
        super().__init__()
        self.open = next(self.openers)
        self.database = self.open()
        self.database.transact(lambda tx: tx.delete_range(*EVERYTHING))
        self.others = ThreadPoolExecutor(1)
        self.model: Model = {}

    def commit(self, steps: Steps, tier: Tier) -> None:
        self.database.transact(play, steps, self.model, tier=tier)
        self.model = after(steps, self.model)

    @rule(value=st.binary(max_size=2), tier=tiers)
    def every_key_is_put(self, value: bytes, tier: Tier) -> None:
        self.commit([Put(key, value) for key in KEYS], tier)

    @rule(steps=works, tier=tiers)
    def a_transaction_commits(self, steps: Steps, tier: Tier) -> None:
        self.commit(steps, tier)

    @rule(steps=works, tier=tiers)
    def a_transaction_fails(self, steps: Steps, tier: Tier) -> None:
        with pytest.raises(OnPurpose):
            self.database.transact(play, steps, self.model, fails=True, tier=tier)

    @rule(steps=st.lists(reads, max_size=8), tier=tiers)
    def a_snapshot_is_read(self, steps: Steps, tier: Tier) -> None:
        self.database.read(play, steps, self.model, tier=tier)

    @rule(
        before=st.lists(reads, max_size=3),
        change=st.lists(writes, max_size=4),
        moved=keys,
        later=st.lists(reads, max_size=5),
        tier=tiers,
    )
    def a_snapshot_is_overtaken(self, before: Steps, change: Steps, moved: bytes, later: Steps, tier: Tier) -> None:
        """Each run of the reader is overtaken by another change, so on RocksDB the second one reads pinned pairs."""
        runs = count(1)

        def work(tx: Transaction) -> None:
            run = next(runs)
            assert run <= RUNS_MAX
            model = self.model
            tx.get(b"a")  # A snapshot may be taken as late as by the first read.
            play(tx, before, model)
            self.others.submit(self.commit, [*change, Put(moved, b"run %d" % run)], tier).result()
            play(tx, [*later, *before, Get(moved), *FULL_SCANS], model)

        self.database.read(work, tier=tier)

    @rule(group=st.lists(st.tuples(works, st.booleans()), min_size=2, max_size=4))
    def a_turn_of_the_loop_commits_in_order(self, group: list[tuple[Steps, bool]]) -> None:
        """On PostgreSQL these share one database transaction, each on top of those before it."""
        models = [self.model]
        for steps, fails in group:
            models.append(models[-1] if fails else after(steps, models[-1]))

        async def everybody() -> list[Any]:
            calls = [
                self.database.transact_async(play, steps, model, fails=fails)
                for (steps, fails), model in zip(group, models, strict=False)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run(everybody())
        assert [type(outcome) for outcome in outcomes] == [OnPurpose if fails else type(None) for _, fails in group]
        self.model = models[-1]

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_opened_again(self) -> None:
        self.database.close()
        self.database = self.open()

    @invariant()
    def full_scans_equal_the_model(self) -> None:
        self.database.read(play, FULL_SCANS, self.model)
        self.database.transact(play, FULL_SCANS, self.model)

    def teardown(self) -> None:
        self.others.shutdown()
        self.database.close()


def run_machine(openers: Iterator[Callable[[], Database]], *, lasting: bool, examples: int) -> None:
    machine = type("Machine", (Transactions,), {"openers": openers, "lasting": lasting})
    bounds = settings(max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=bounds)


def often(examples: int) -> pytest.MarkDecorator:
    nightly = pytest.param(20 * examples, id="nightly", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("examples", [pytest.param(examples, id="suite"), nightly])


@often(100)
def test_memory_does_what_a_dictionary_does(examples: int) -> None:
    run_machine(repeat(MemoryDatabase), lasting=False, examples=examples)


@often(30)
def test_rocksdb_does_what_a_dictionary_does(examples: int, tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(fresh, lasting=True, examples=examples)


@often(15)
def test_postgres_does_what_a_dictionary_does(examples: int, postgres_url: str) -> None:
    run_machine(repeat(partial(PostgresDatabase, postgres_url)), lasting=True, examples=examples)
