"""`rollup`: what became of every message and mail, and sums over that: how fast, how often, how much, who with whom.

    activity ──► messages, mail ──► rollup_queues, rollup_queue_hours, rollup_errors, rollup_mailboxes, rollup_talk
        └──────────────────────────► rollup_leases              plane, lake ──► rollup_storage

A table is made anew, a universe at a time, from what lies below it, so a run that was killed, or ran twice, leaves
nothing wrong. The commit that puts it in place says what it was made of (the mark `made/<universe>`): what would be
made of the same is left as it is. Only rollup_storage remembers: a run replaces what was measured on its own day.

Of two runs at the same time, the one that comes second at a table looks at everything again. It looks at the tables
that it makes before it looks at what it makes them of, so nothing that is newer is ever replaced by what is older.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

import holdfast
from holdfast.errors import HoldfastError
from holdfast.limits import ROLLUP_BUCKET_EVENTS
from holdfast.pipeline import events, lifecycles, measures, tasks
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.jobs import aggregates
from holdfast.pipeline.lake import AddedFile, Lake, LakeFile, LakeTable, Move, attempts
from holdfast.pipeline.lake import files as lake_files
from holdfast.pipeline.measures import Measured
from holdfast.pipeline.progress import Tell
from holdfast.pipeline.schemas import (
    ACTIVITY,
    MAIL,
    MESSAGES,
    ROLLUP_ERRORS,
    ROLLUP_LEASES,
    ROLLUP_MAILBOXES,
    ROLLUP_QUEUE_HOURS,
    ROLLUP_QUEUES,
    ROLLUP_STORAGE,
    ROLLUP_TALK,
    ROLLUPS,
    Table,
)
from holdfast.pipeline.views import View, open_view
from holdfast.runtime.activity.events import LOG_KIND, MAIL_KIND

# Those above are made of those below.
_TABLES: Final = (*reversed(ROLLUPS), MAIL, MESSAGES)
_HAND: Final = pa.schema([("bucket", pa.int32()), ("hand", pa.binary())])
_MARK_DIGITS: Final = 15  # Of a hash in hexadecimal: a mark is a number of 63 bits.


def run(
    spark: SparkSession,
    config: Config,
    *,
    progress: Tell | None = None,
    view: View | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Bring `messages`, `mail` and all sums to what the lake and the plane have.

    A plane that cannot be looked at is left out, with a note.

    Raises:
        TransactionConflict: other runs were always faster.
    """
    begun = time.monotonic()
    at = now or datetime.now(UTC)
    work = attempts.until_committed("the roll-ups", lambda: _Work(spark, config, progress, view).finish(at))
    return JobResult(job="rollup", ok=True, rows=work.rows, seconds=time.monotonic() - begun, notes=work.notes)


_Rows: TypeAlias = Sequence[tuple[Any, ...]]  # What the plane knows; each begins with its universe.


class _Given(NamedTuple):
    """What a table is made of, for some universes."""

    rows: DataFrame
    rows_max: int  # How many they are at most.
    known: _Rows | None
    target: LakeTable


class _Step(NamedTuple):
    """How a table is made of another one."""

    table: Table
    source: Table
    make: Callable[[_Given], list[AddedFile]]
    known: _Rows | None = None  # What it needs of the plane besides, if that could be looked at.


class _Work:
    """One look at the lake and at the plane, and what is made of it."""

    def __init__(self, spark: SparkSession, config: Config, progress: Tell | None, view: View | None) -> None:
        self.notes: list[str] = []
        self._spark = spark
        self._progress = progress
        self._lake = Lake(config.lake, config.storage)
        self._universes = config.universes or None
        self._tables = {table.name: self._lake.table(table) for table in _TABLES}
        self._measured = self._look(config, view)
        self._tables[ACTIVITY.name] = self._lake.table(ACTIVITY)
        self._done = 0

    @property
    def rows(self) -> dict[str, int]:
        """How many rows the tables have."""
        return {table.name: sum(file.rows for file in self._entries(table)) for table in reversed(_TABLES)}

    def finish(self, now: datetime) -> "_Work":
        """Make everything that is not there yet.

        Raises:
            TransactionConflict: somebody else has made one of the tables meanwhile.
        """
        plane = self._measured
        errors, backlogs, boxes = (None,) * 3 if plane is None else (plane.errors, plane.backlogs, plane.mailboxes)
        self._make(
            _Step(MESSAGES, ACTIVITY, _fold_messages, errors),
            _Step(MAIL, ACTIVITY, _fold_mail),
            _Step(ROLLUP_LEASES, ACTIVITY, _sum(lambda given: aggregates.lease_contention(given.rows))),
        )
        self._make(
            _Step(ROLLUP_QUEUES, MESSAGES, _sum(lambda given: aggregates.queues(given.rows, given.known)), backlogs),
            _Step(ROLLUP_QUEUE_HOURS, MESSAGES, _sum(lambda given: aggregates.queue_hours(given.rows))),
            _Step(ROLLUP_ERRORS, MESSAGES, _sum(lambda given: aggregates.errors(given.rows))),
            _Step(ROLLUP_MAILBOXES, MAIL, _sum(lambda given: aggregates.mailboxes(given.rows, given.known)), boxes),
            _Step(ROLLUP_TALK, MAIL, _sum(lambda given: aggregates.talk(given.rows))),
        )
        self._keep_storage(now)
        return self

    def _make(self, *steps: _Step) -> None:
        """Make tables that do not depend on each other. Most of what Spark does for a small one, one core does."""
        with ThreadPoolExecutor(len(steps), "holdfast-rollup") as pool:
            for made in [pool.submit(self._make_one, step) for step in steps]:
                self._tell(made.result())

    def _make_one(self, step: _Step) -> Table:
        target, source = self._tables[step.table.name], self._tables[step.source.name]
        moves = self._moves(step)
        if moves:
            stale = sorted(moves)
            given = _Given(
                source.read(self._spark, universes=stale),
                sum(file.rows for file in source.entries() if file.universe in stale),
                None if step.known is None else [row for row in step.known if row[0] in moves],
                target,
            )
            old = [file for file in target.entries() if file.universe in moves]
            target.replace(old, step.make(given), {_mark(universe): move for universe, move in moves.items()})
        return step.table

    def _moves(self, step: _Step) -> dict[str, Move]:
        """The universes for which the table is not what it would be made of now, and what to note when it is."""
        paths: dict[str, list[str]] = {file.universe: [] for file in self._entries(step.table)}
        for file in self._entries(step.source):
            paths.setdefault(file.universe, []).append(file.path)
        known: dict[str, list[tuple[Any, ...]]] = {}
        for row in step.known or ():
            known.setdefault(row[0], []).append(row)
        marks = self._tables[step.table.name].marks()
        moves = {}
        for universe in {*paths, *known}:
            said = None if step.known is None else known.get(universe, [])
            made_of = _digest(step.table, sorted(paths.get(universe, [])), said)
            if marks.get(_mark(universe)) != made_of:
                moves[universe] = Move(marks.get(_mark(universe), 0), made_of)
        return moves

    def _keep_storage(self, now: datetime) -> None:
        """Put today's sizes beside those of other days."""
        table = self._tables[ROLLUP_STORAGE.name]
        sizes = measures.lake_sizes(self._lake, self._universes)
        if self._measured is not None:
            sizes += self._measured.sizes
        is_kept = pc.field("day") != now.date()
        if self._universes is not None:
            is_kept |= ~pc.field("universe").isin(self._universes)
        rows = pa.concat_tables([table.rows().filter(is_kept), measures.storage_rows(sizes, now)])
        table.overwrite(lake_files.write(ROLLUP_STORAGE, table.place, lake_files.in_order(ROLLUP_STORAGE, rows)))
        self._tell(ROLLUP_STORAGE)

    def _entries(self, table: Table) -> list[LakeFile]:
        found = self._tables[table.name].entries()
        return [file for file in found if self._universes is None or file.universe in self._universes]

    def _look(self, config: Config, view: View | None) -> Measured | None:
        try:
            if view is not None:
                return measures.measure(view)
            with open_view(config) as opened:
                return measures.measure(opened)
        except HoldfastError as error:
            self.notes.append(f"The plane could not be looked at, so backlogs and its sizes are missing: {error}")
            return None

    def _tell(self, table: Table) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(f"rollup {table.name}", self._done, len(_TABLES))


def _sum(sums_of: Callable[[_Given], DataFrame]) -> Callable[[_Given], list[AddedFile]]:
    return lambda given: given.target.write(sums_of(given).coalesce(1))


def _fold_messages(given: _Given) -> list[AddedFile]:
    buckets = _buckets(given)
    dealt = _dealt(given, LOG_KIND, partial(events.deal_messages, buckets=buckets))
    if given.known:
        errors = pa.Table.from_batches([_batch(events.deal_errors(given.known, buckets))])
        dealt = dealt.union(given.rows.sparkSession.createDataFrame(errors))
    return _folded(given, dealt, buckets, lambda hands: map(lifecycles.message_rows, events.gather_messages(hands)))


def _fold_mail(given: _Given) -> list[AddedFile]:
    buckets = _buckets(given)
    dealt = _dealt(given, MAIL_KIND, partial(events.deal_mails, buckets=buckets))
    return _folded(given, dealt, buckets, lambda hands: map(lifecycles.mail_rows, events.gather_mails(hands)))


def _buckets(given: _Given) -> int:
    """So many that each is small, and all cores end at the same time."""
    cores = tasks.parallelism(given.rows.sparkSession)
    return cores * max(1, -(-given.rows_max // (ROLLUP_BUCKET_EVENTS * cores)))


def _dealt(given: _Given, kind: str, deal: Callable[[pa.RecordBatch], events.Hands]) -> DataFrame:
    """What is told in records of this kind, as few large rows: a row that Spark handles costs more than an event."""

    def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_batch(deal(batch)) for batch in batches)

    return (
        given.rows.where(sf.col("kind") == kind)
        .select("universe", "record")
        .mapInArrow(each, "bucket int, hand binary")
    )


def _batch(hands: events.Hands) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"bucket": bucket, "hand": hand} for bucket, hand in hands], _HAND)


def _folded(
    given: _Given, dealt: DataFrame, buckets: int, fold: Callable[[Iterator[bytes]], Iterator[pa.RecordBatch]]
) -> list[AddedFile]:
    """Have executors fold what is in each bucket into rows, and write them."""
    table, place = given.target.table, given.target.place

    def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        hands = (hand for batch in batches for hand in batch.column("hand").to_pylist())
        written = lake_files.write(table, place, fold(hands), is_sorted=False)
        yield pa.RecordBatch.from_pydict({"files": [msgspec.msgpack.encode(written)]})

    answers = dealt.repartitionById(buckets, "bucket").mapInArrow(each, "files binary").collect()
    decode = msgspec.msgpack.Decoder(list[AddedFile]).decode
    return [file for row in answers for file in decode(bytes(row["files"]))]


def _digest(table: Table, paths: list[str], known: list[tuple[Any, ...]] | None) -> int:
    """A number for what a table is made of: its rules, files that never change, and what the plane knows."""
    told = msgspec.msgpack.encode([holdfast.__version__, table.version, paths, known])
    return int(hashlib.sha256(told).hexdigest()[:_MARK_DIGITS], 16)


def _mark(universe: str) -> str:
    return f"made/{universe}"
