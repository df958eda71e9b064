"""`rollup`: the outcome of every message and mail, and aggregates over them.

    activity ──► messages, mail ──► rollup_queues, rollup_queue_hours, rollup_errors, rollup_mailboxes, rollup_talk
        └──────────────────────────► rollup_leases              plane, lake ──► rollup_storage

A table is rebuilt from its source one universe at a time, so a run that was killed, or ran twice, leaves nothing wrong.
The commit stores a digest of its inputs (the watermark `made/<universe>`); a universe whose inputs have not changed is
skipped. Only rollup_storage accumulates: a run replaces the rows of its own day.

If two runs build a table at the same time, the second to commit starts over. A run reads its target tables before their
sources, so newer data is never replaced by older.
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
from holdfast.errors import AnotherHistory, HoldfastError
from holdfast.limits import FINDINGS_MAX, ROLLUP_BUCKET_EVENTS
from holdfast.pipeline import completeness, events, lifecycles, measures, ownership, tasks
from holdfast.pipeline.completeness import Gap
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.jobs import aggregates
from holdfast.pipeline.lake import AddedFile, Lake, LakeFile, LakeTable, Move, retries
from holdfast.pipeline.lake import files as lake_files
from holdfast.pipeline.measures import PlaneMeasurements
from holdfast.pipeline.progress import ProgressCallback
from holdfast.pipeline.schemas import (
    ACTIVITY,
    MAIL,
    MESSAGES,
    QUEUE_EVENTS,
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
from holdfast.pipeline.views import View, shared_view
from holdfast.runtime.activity.events import LOG_KIND, MAIL_KIND

# Ordered so that a table comes before its sources.
_TABLES: Final = (*reversed(ROLLUPS), MAIL, MESSAGES)
_PAYLOAD_SCHEMA: Final = pa.schema([("bucket", pa.int32()), ("payload", pa.binary())])
_DIGEST_DIGITS: Final = 15  # Hexadecimal digits of a hash: a watermark is a 63-bit number.


def run(
    spark: SparkSession,
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    view: View | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Bring `messages`, `mail` and all aggregates up to date with the lake and the plane.

    If the plane cannot be read, its measurements are left out, with a note. `ok` means that the session logs have the
    events of all messages that the plane has counted.

    Raises:
        TransactionConflict: other runs committed first, too often.
    """
    started = time.monotonic()
    at = now or datetime.now(UTC)
    rollup = retries.retry_until_committed("the roll-ups", lambda: _Rollup(spark, config, progress, view).build(at))
    gaps = completeness.gaps(Lake(config.lake, config.storage), config.universes)
    return JobResult(
        job="rollup",
        ok=not gaps,
        rows=rollup.rows,
        seconds=time.monotonic() - started,
        findings=[_finding(gap) for gap in gaps[:FINDINGS_MAX]],
        notes=[*rollup.notes, *_notes(gaps)],
    )


def _notes(gaps: Sequence[Gap]) -> Iterator[str]:
    if gaps:
        yield (
            f"The session logs of {len(gaps)} queues are incomplete: {sum(gap.unlogged for gap in gaps):,} messages "
            "have missing events. Counts come from the plane; latencies and hours lack these messages. Give the logs "
            "of all nodes (--activity, --objects), or confirm the loss with `holdfast pipeline accept --lost`"
        )


def _finding(gap: Gap) -> dict[str, Any]:
    return {**msgspec.structs.asdict(gap), "reason": "incomplete logs", "unlogged": gap.unlogged}


_Measurements: TypeAlias = Sequence[tuple[Any, ...]]  # Measurements of the plane; the first value is the universe.


class _Input(NamedTuple):
    """The input of a table for some universes."""

    rows: DataFrame
    rows_max: int  # An upper bound of their number.
    measurements: _Measurements | None
    target: LakeTable
    history: DataFrame | None = None  # Of `queue_events`.


class _Step(NamedTuple):
    """How a table is built from another one."""

    table: Table
    source: Table
    build: Callable[[_Input], list[AddedFile]]
    measurements: _Measurements | None = None  # Measurements it also needs; None: the plane could not be read.
    history: Table | None = None  # A second source.


class _Rollup:
    """One attempt: a snapshot of the lake and the plane, and the tables built from it."""

    def __init__(
        self, spark: SparkSession, config: Config, progress: ProgressCallback | None, view: View | None
    ) -> None:
        self.notes: list[str] = []
        self._spark = spark
        self._progress = progress
        self._lake = Lake(config.lake, config.storage)
        self._universes = config.universes or None
        self._tables = {table.name: self._lake.table(table) for table in _TABLES}
        self._plane = self._measure_plane(config, view)
        self._tables[ACTIVITY.name] = self._lake.table(ACTIVITY)
        self._tables[QUEUE_EVENTS.name] = self._lake.table(QUEUE_EVENTS)
        self._done = 0

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows by table."""
        return {table.name: sum(file.rows for file in self._entries(table)) for table in reversed(_TABLES)}

    def build(self, now: datetime) -> "_Rollup":
        """Build every table that is out of date.

        Raises:
            TransactionConflict: another run committed one of the tables first.
        """
        plane = self._plane
        present, backlogs, boxes = (None,) * 3 if plane is None else (plane.messages, plane.backlogs, plane.mailboxes)
        measured = None if plane is None else lifecycles.Measured(plane.at_ms, frozenset(plane.counted))
        self._build_all(
            _Step(MESSAGES, ACTIVITY, partial(_build_messages, measured=measured), present, QUEUE_EVENTS),
            _Step(MAIL, ACTIVITY, _build_mail),
            _Step(ROLLUP_LEASES, ACTIVITY, _aggregate(lambda inputs: aggregates.lease_contention(inputs.rows))),
        )
        self._build_all(
            _Step(
                ROLLUP_QUEUES,
                MESSAGES,
                _aggregate(lambda inputs: aggregates.queues(inputs.rows, inputs.measurements)),
                backlogs,
            ),
            _Step(ROLLUP_QUEUE_HOURS, MESSAGES, _aggregate(lambda inputs: aggregates.queue_hours(inputs.rows))),
            _Step(ROLLUP_ERRORS, MESSAGES, _aggregate(lambda inputs: aggregates.errors(inputs.rows))),
            _Step(
                ROLLUP_MAILBOXES,
                MAIL,
                _aggregate(lambda inputs: aggregates.mailboxes(inputs.rows, inputs.measurements)),
                boxes,
            ),
            _Step(ROLLUP_TALK, MAIL, _aggregate(lambda inputs: aggregates.talk(inputs.rows))),
        )
        self._write_storage(now)
        return self

    def _build_all(self, *steps: _Step) -> None:
        """Build independent tables concurrently: most of Spark's work for a small table runs on one core."""
        with ThreadPoolExecutor(len(steps), "holdfast-rollup") as pool:
            for built in [pool.submit(self._build, step) for step in steps]:
                self._report_progress(built.result())

    def _build(self, step: _Step) -> Table:
        target, source = self._tables[step.table.name], self._tables[step.source.name]
        moves = self._stale_universes(step)
        if moves:
            stale = sorted(moves)
            inputs = _Input(
                source.read(self._spark, universes=stale),
                sum(file.rows for file in source.entries() if file.universe in stale),
                None if step.measurements is None else [row for row in step.measurements if row[0] in moves],
                target,
                None if step.history is None else self._tables[step.history.name].read(self._spark, universes=stale),
            )
            old = [file for file in target.entries() if file.universe in moves]
            target.replace(old, step.build(inputs), {_watermark(universe): move for universe, move in moves.items()})
        return step.table

    def _stale_universes(self, step: _Step) -> dict[str, Move]:
        """The universes whose inputs have changed, with the move of their watermark."""
        paths: dict[str, list[str]] = {file.universe: [] for file in self._entries(step.table)}
        for source in filter(None, (step.source, step.history)):
            for file in self._entries(source):
                paths.setdefault(file.universe, []).append(file.path)
        by_universe: dict[str, list[tuple[Any, ...]]] = {}
        for row in step.measurements or ():
            by_universe.setdefault(row[0], []).append(row)
        watermarks = self._tables[step.table.name].watermarks()
        moves = {}
        for universe in {*paths, *by_universe}:
            measurements = None if step.measurements is None else by_universe.get(universe, [])
            digest = _digest(step.table, sorted(paths.get(universe, [])), measurements)
            if watermarks.get(_watermark(universe)) != digest:
                moves[universe] = Move(watermarks.get(_watermark(universe), 0), digest)
        return moves

    def _write_storage(self, now: datetime) -> None:
        """Replace today's sizes in `rollup_storage`."""
        table = self._tables[ROLLUP_STORAGE.name]
        sizes = measures.lake_sizes(self._lake, self._universes)
        if self._plane is not None:
            sizes += self._plane.sizes
        is_kept = pc.field("day") != now.date()
        if self._universes is not None:
            is_kept |= ~pc.field("universe").isin(self._universes)
        rows = pa.concat_tables([table.rows().filter(is_kept), measures.storage_rows(sizes, now)])
        table.overwrite(
            lake_files.write(ROLLUP_STORAGE, table.location, lake_files.sorted_batches(ROLLUP_STORAGE, rows))
        )
        self._report_progress(ROLLUP_STORAGE)

    def _entries(self, table: Table) -> list[LakeFile]:
        found = self._tables[table.name].entries()
        return [file for file in found if self._universes is None or file.universe in self._universes]

    def _measure_plane(self, config: Config, view: View | None) -> PlaneMeasurements | None:
        try:
            with shared_view(config, view) as used:
                return self._measure(used)
        except AnotherHistory:
            raise
        except HoldfastError as error:
            self.notes.append(f"The plane could not be read, so backlogs and sizes are missing: {error}")
            return None

    def _measure(self, view: View) -> PlaneMeasurements:
        ownership.check(self._lake, view)
        return measures.measure(view)

    def _report_progress(self, table: Table) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(f"rollup {table.name}", self._done, len(_TABLES))


def _aggregate(aggregate: Callable[[_Input], DataFrame]) -> Callable[[_Input], list[AddedFile]]:
    return lambda inputs: inputs.target.write(aggregate(inputs).coalesce(1))


def _build_messages(inputs: _Input, *, measured: lifecycles.Measured | None) -> list[AddedFile]:
    buckets = _buckets(inputs)
    bucketed = _bucket_events(inputs, LOG_KIND, partial(events.bucket_messages, buckets=buckets))
    if inputs.history is not None:
        bucketed = bucketed.union(_bucket_history(inputs.history, buckets))
    if inputs.measurements:
        found = (lifecycles.PresentMessage(*row) for row in inputs.measurements)
        present = pa.Table.from_batches([_payload_batch(events.bucket_present(found, buckets))])
        bucketed = bucketed.union(inputs.rows.sparkSession.createDataFrame(present))
    fold = partial(lifecycles.message_rows, measured=measured)
    return _fold_buckets(inputs, bucketed, buckets, lambda payloads: map(fold, events.group_messages(payloads)))


def _bucket_history(rows: DataFrame, buckets: int) -> DataFrame:
    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_payload_batch(events.bucket_history(batch, buckets)) for batch in batches)

    known = rows.where(sf.col("event").isin(*lifecycles.MESSAGE_EVENTS))
    return known.mapInArrow(process_batches, "bucket int, payload binary")


def _build_mail(inputs: _Input) -> list[AddedFile]:
    buckets = _buckets(inputs)
    bucketed = _bucket_events(inputs, MAIL_KIND, partial(events.bucket_mails, buckets=buckets))
    return _fold_buckets(
        inputs, bucketed, buckets, lambda payloads: map(lifecycles.mail_rows, events.group_mails(payloads))
    )


def _buckets(inputs: _Input) -> int:
    """A number of buckets that keeps each of them small and all cores equally busy."""
    cores = tasks.parallelism(inputs.rows.sparkSession)
    return cores * max(1, -(-inputs.rows_max // (ROLLUP_BUCKET_EVENTS * cores)))


def _bucket_events(inputs: _Input, kind: str, bucket_batch: Callable[[pa.RecordBatch], events.Buckets]) -> DataFrame:
    """The events of this kind as few large rows: a row costs Spark more than an event does."""

    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_payload_batch(bucket_batch(batch)) for batch in batches)

    return (
        inputs.rows.where(sf.col("kind") == kind)
        .select("universe", "record")
        .mapInArrow(process_batches, "bucket int, payload binary")
    )


def _payload_batch(payloads: events.Buckets) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"bucket": bucket, "payload": payload} for bucket, payload in payloads], _PAYLOAD_SCHEMA
    )


def _fold_buckets(
    inputs: _Input, bucketed: DataFrame, buckets: int, fold: Callable[[Iterator[bytes]], Iterator[pa.RecordBatch]]
) -> list[AddedFile]:
    """Fold the events of each bucket into rows on executors, and write them."""
    table, location = inputs.target.table, inputs.target.location

    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        payloads = (payload for batch in batches for payload in batch.column("payload").to_pylist())
        written = lake_files.write(table, location, fold(payloads), is_sorted=False)
        yield pa.RecordBatch.from_pydict({"files": [msgspec.msgpack.encode(written)]})

    results = bucketed.repartitionById(buckets, "bucket").mapInArrow(process_batches, "files binary").collect()
    decode = msgspec.msgpack.Decoder(list[AddedFile]).decode
    return [file for row in results for file in decode(bytes(row["files"]))]


def _digest(table: Table, paths: list[str], measurements: list[tuple[Any, ...]] | None) -> int:
    """A digest of a table's inputs: its version, source files (which never change) and measurements."""
    encoded = msgspec.msgpack.encode([holdfast.__version__, table.version, paths, measurements])
    return int(hashlib.sha256(encoded).hexdigest()[:_DIGEST_DIGITS], 16)


def _watermark(universe: str) -> str:
    return f"made/{universe}"
