"""Random transactions on every backend behave like a plain dictionary."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Database, Pair, Transaction
from fastness.tiers import Tier

Model = dict[bytes, bytes]

EVERYTHING = (b"", b"\xff" * 3)
KEYS = (b"\x00", b"a", b"a\x00", b"a\x00\x00", b"ab", b"a\xff", b"b", b"\xff", b"\xff\xff")
RUNS_MAX = 40  # A backend may run a function again after a conflict, but not forever.


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
writes = puts | puts | puts | deletes | deletes | cleared  # Clearing is rare, so that scans find something.
limits = st.integers(1, 4) | st.just(100)
scans = st.builds(lambda bounds, *how: Scan(*bounds, *how), ranges, limits, st.booleans())
reads = st.builds(Get, keys) | scans
works = st.lists(writes | reads | scans | scans, max_size=16)
tiers = st.sampled_from((Tier.IMPORTANT, Tier.CRITICAL))


class DeliberateError(Exception):
    """Ends a transaction, which must then write nothing."""


def run_steps(tx: Transaction, steps: Steps, model: Model, *, fails: bool = False) -> None:
    """Run the steps in the transaction and on a copy of the model, and compare the results."""
    own = dict(model)
    for step in steps:
        assert step.on(tx) == step.on_model(own)
    if fails:
        raise DeliberateError


def apply_steps(steps: Steps, model: Model) -> Model:
    """The model after the steps."""
    own = dict(model)
    for step in steps:
        step.on_model(own)
    return own


class Transactions(RuleBasedStateMachine):
    """A database and a dictionary. Every rule is a transaction, a snapshot, or a group of transactions."""

    openers: Iterator[Callable[[], Database]]  # Each example uses one to open its database.
    is_persistent: bool  # Whether a reopened database keeps its data.

    def __init__(self) -> None:
        super().__init__()
        self.open = next(self.openers)
        self.database = self.open()
        self.database.transact(lambda tx: tx.delete_range(*EVERYTHING))
        self.other_thread = ThreadPoolExecutor(1)
        self.model: Model = {}

    def commit(self, steps: Steps, tier: Tier) -> None:
        self.database.transact(run_steps, steps, self.model, tier=tier)
        self.model = apply_steps(steps, self.model)

    @rule(value=st.binary(max_size=2), tier=tiers)
    def put_every_key(self, value: bytes, tier: Tier) -> None:
        self.commit([Put(key, value) for key in KEYS], tier)

    @rule(steps=works, tier=tiers)
    def a_transaction_commits(self, steps: Steps, tier: Tier) -> None:
        self.commit(steps, tier)

    @rule(steps=works, tier=tiers)
    def a_transaction_fails(self, steps: Steps, tier: Tier) -> None:
        with pytest.raises(DeliberateError):
            self.database.transact(run_steps, steps, self.model, fails=True, tier=tier)

    @rule(steps=st.lists(reads, max_size=8), tier=tiers)
    def a_snapshot_is_read(self, steps: Steps, tier: Tier) -> None:
        self.database.read(run_steps, steps, self.model, tier=tier)

    @rule(
        before=st.lists(reads, max_size=3),
        change=st.lists(writes, max_size=4),
        moved=keys,
        later=st.lists(reads, max_size=5),
        tier=tiers,
    )
    def a_commit_happens_during_a_snapshot(
        self, before: Steps, change: Steps, moved: bytes, later: Steps, tier: Tier
    ) -> None:
        """A commit happens during each run of the reader, so on RocksDB the second run reads pinned pairs."""
        runs = count(1)

        def work(tx: Transaction) -> None:
            run = next(runs)
            assert run <= RUNS_MAX
            model = self.model
            tx.get(b"a")  # A snapshot may be taken as late as the first read.
            run_steps(tx, before, model)
            self.other_thread.submit(self.commit, [*change, Put(moved, b"run %d" % run)], tier).result()
            run_steps(tx, [*later, *before, Get(moved), *FULL_SCANS], model)

        self.database.read(work, tier=tier)

    @rule(group=st.lists(st.tuples(works, st.booleans()), min_size=2, max_size=4))
    def a_loop_tick_commits_in_order(self, group: list[tuple[Steps, bool]]) -> None:
        """On PostgreSQL these share one database transaction, each on top of the previous ones."""
        models = [self.model]
        for steps, fails in group:
            models.append(models[-1] if fails else apply_steps(steps, models[-1]))

        async def run_all() -> list[Any]:
            calls = [
                self.database.transact_async(run_steps, steps, model, fails=fails)
                for (steps, fails), model in zip(group, models, strict=False)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run(run_all())
        assert [type(outcome) for outcome in outcomes] == [
            DeliberateError if fails else type(None) for _, fails in group
        ]
        self.model = models[-1]

    @precondition(lambda self: self.is_persistent)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()

    @invariant()
    def full_scans_equal_the_model(self) -> None:
        self.database.read(run_steps, FULL_SCANS, self.model)
        self.database.transact(run_steps, FULL_SCANS, self.model)

    def teardown(self) -> None:
        self.other_thread.shutdown()
        self.database.close()


@pytest.mark.examples(60)
def test_memory_matches_a_dictionary(run_machine: Callable[..., None]) -> None:
    run_machine(Transactions, steps=30, openers=repeat(MemoryDatabase), is_persistent=False)


@pytest.mark.examples(20)
def test_rocksdb_matches_a_dictionary(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Transactions, steps=30, openers=fresh, is_persistent=True)


@pytest.mark.examples(10)
def test_postgres_matches_a_dictionary(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Transactions, steps=30, openers=repeat(open_postgres), is_persistent=True)
