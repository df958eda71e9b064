"""`rollup`: the outcome of every message and mail, and aggregates over them.

    activity, queue_events ──► messages, mail ──► rollup_queues, rollup_queue_hours, rollup_errors,
        │                                         rollup_mailboxes, rollup_talk
        └──► rollup_leases                        plane, lake ──► rollup_storage

`messages`, `mail` and `rollup_leases` are folds of events. A run adds the events of the files that are new since the
last one, in this process (`folds.py`). It folds all events of a universe again, on executors if they are many, when
rows were removed from a source, when the log of a source no longer reaches back to the last run, or after an upgrade.
Events that were removed from a source by their age stay in the rows that have them (`retention.py`).

A commit of a fold moves these watermarks of each universe:

    made/<universe>               a digest of all inputs; nothing is done while it stays the same
    sources/<universe>            a digest of the source files whose events are in the rows, and of the version
    folded/<source>/<universe>    the version of the source, plus one, that had these files

Aggregates are computed from all rows of a universe when `made/<universe>` changes. So a run that was killed, or ran
twice, leaves nothing wrong. Only rollup_storage accumulates: a run replaces the rows of its own day.

If two runs build a table at the same time, the second to commit starts over. A run reads its target tables before their
sources, so newer data is never replaced by older.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

import fastness
from fastness.errors import AnotherHistory, FastnessError, ObjectNotFound
from fastness.limits import FINDINGS_MAX, ROLLUP_BUCKET_EVENTS, ROLLUP_NEW_EVENTS, ROLLUP_NEW_SHARE
from fastness.pipeline import completeness, events, lifecycles, measures, ownership, tasks
from fastness.pipeline.completeness import Gap
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import aggregates, folds
from fastness.pipeline.jobs.folds import FOLDED_FROM, Fold, LeaseFold, MailFold, MessageFold, folded_watermark
from fastness.pipeline.lake import AddedFile, Lake, LakeFile, LakeTable, Move, fingerprints, reading, retention, retries
from fastness.pipeline.lake import files as lake_files
from fastness.pipeline.lake.changes import ChangeLog, NewFile
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.measures import PlaneMeasurements
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import (
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
from fastness.pipeline.views import View, shared_view
from fastness.runtime.activity.events import LEASE_KIND, LOG_KIND, MAIL_KIND

# Ordered so that a table comes before its sources.
_TABLES: Final = (*reversed(ROLLUPS), MAIL, MESSAGES)
_SOURCES: Final = (ACTIVITY, QUEUE_EVENTS)
_PAYLOAD_SCHEMA: Final = pa.schema([("bucket", pa.int32()), ("payload", pa.binary())])


def run(
    spark: SparkSession | None,
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    view: View | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Bring `messages`, `mail` and all aggregates up to date with the lake and the plane.

    If the plane cannot be read, its measurements are left out, with a note. `ok` means that the session logs have the
    events of all messages that the plane has counted. Without Spark, all work is done in this process.

    Raises:
        TransactionConflict: other runs committed first, too often.
    """
    started = time.monotonic()
    at = now or datetime.now(UTC)
    lake, notes = Lake(config.lake, config.storage), list[str]()

    def attempt() -> Rollup:
        notes.clear()
        measure = partial(_measure_plane, lake, config, view, notes)
        return Rollup(spark, lake, config.universes or None, progress, measure).build(at)

    rollup = retries.retry_until_committed("the roll-ups", attempt)
    gaps = completeness.gaps(lake, config.universes)
    return JobResult(
        job="rollup",
        ok=not gaps,
        rows=rollup.rows,
        seconds=time.monotonic() - started,
        findings=[_finding(gap) for gap in gaps[:FINDINGS_MAX]],
        notes=[*notes, *_notes(gaps)],
    )


def _notes(gaps: Sequence[Gap]) -> Iterator[str]:
    if gaps:
        yield (
            f"The session logs of {len(gaps)} queues are incomplete: {sum(gap.unlogged for gap in gaps):,} messages "
            "have missing events. Counts come from the plane; latencies and hours lack these messages. Give the logs "
            "of all nodes (--activity, --objects), or confirm the loss with `fastness pipeline accept --lost`"
        )


def _finding(gap: Gap) -> dict[str, Any]:
    return {**msgspec.structs.asdict(gap), "reason": "incomplete logs", "unlogged": gap.unlogged}


def _measure_plane(lake: Lake, config: Config, view: View | None, notes: list[str]) -> PlaneMeasurements | None:
    try:
        with shared_view(config, view) as used:
            ownership.check(lake, used)
            return measures.measure(used)
    except AnotherHistory:
        raise
    except FastnessError as error:
        notes.append(f"The plane could not be read, so backlogs and sizes are missing: {error}")
        return None


_Measurements: TypeAlias = Sequence[tuple[Any, ...]]  # Measurements of the plane; the first value is the universe.


class _Fold(NamedTuple):
    """How a table is folded from events."""

    table: Table
    kind: str  # Of the records in `activity`.
    start: Callable[[str, _Measurements], Fold]  # For a universe and its measurements.
    rebuild: Callable[["Rollup", Sequence[str]], list[AddedFile]]  # From all events of these universes, with Spark.
    sources: tuple[Table, ...] = (ACTIVITY,)
    measurements: _Measurements | None = ()  # None: the plane could not be read.


class _Aggregate(NamedTuple):
    """How a table is aggregated from another one."""

    table: Table
    source: Table
    measurements: _Measurements | None = ()

    @property
    def sources(self) -> tuple[Table, ...]:
        return (self.source,)


_Step: TypeAlias = _Fold | _Aggregate
_S = TypeVar("_S", _Fold, _Aggregate)


class _New(NamedTuple):
    """The files whose events a universe lacks, by source."""

    files: dict[str, list[NewFile]]
    is_complete: bool  # All of them: the rows there are do not count.

    @property
    def rows(self) -> int:
        return sum(file.rows for found in self.files.values() for file in found)


class Rollup:
    """One attempt: a snapshot of the lake and the plane, and the tables built from it."""

    def __init__(
        self,
        spark: SparkSession | None,
        lake: Lake,
        universes: Sequence[str] | None = None,
        progress: ProgressCallback | None = None,
        measure: Callable[[], PlaneMeasurements | None] = lambda: None,
    ) -> None:
        self._spark = spark
        self._progress = progress
        self._lake = lake
        self._universes = universes
        self._tables = {table.name: self._lake.table(table) for table in _TABLES}
        self._plane = measure()
        self._tables |= {table.name: self._lake.table(table) for table in _SOURCES}
        self._changes = {table.name: ChangeLog(self._tables[table.name]) for table in _SOURCES}
        self._source_files = {table.name: self._by_universe(table) for table in _SOURCES}
        self._done = 0

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows by table."""
        return {table.name: sum(file.rows for file in self._entries(table)) for table in reversed(_TABLES)}

    def build(self, now: datetime) -> "Rollup":
        """Build every table that is out of date.

        Raises:
            TransactionConflict: another run committed one of the tables first.
        """
        plane = self._plane
        present, backlogs, boxes = (None,) * 3 if plane is None else (plane.messages, plane.backlogs, plane.mailboxes)
        measured = None if plane is None else lifecycles.Measured(plane.at_ms, frozenset(plane.counted))
        start_messages = partial(_start_messages, measured=measured)
        rebuild_messages = partial(_rebuild_messages, measured=measured)
        self._build_all(
            self._fold,
            _Fold(MESSAGES, LOG_KIND, start_messages, rebuild_messages, (ACTIVITY, QUEUE_EVENTS), present),
            _Fold(MAIL, MAIL_KIND, lambda universe, _: MailFold(universe), _rebuild_mail),
            _Fold(ROLLUP_LEASES, LEASE_KIND, lambda universe, _: LeaseFold(universe), _rebuild_leases),
        )
        self._build_all(
            self._aggregate,
            _Aggregate(ROLLUP_QUEUES, MESSAGES, backlogs),
            _Aggregate(ROLLUP_QUEUE_HOURS, MESSAGES),
            _Aggregate(ROLLUP_ERRORS, MESSAGES),
            _Aggregate(ROLLUP_MAILBOXES, MAIL, boxes),
            _Aggregate(ROLLUP_TALK, MAIL),
        )
        self._write_storage(now)
        return self

    def source(self, table: Table) -> LakeTable:
        """The snapshot of a source."""
        return self._tables[table.name]

    def kept_before_ms(self, table: Table, universe: str) -> int:
        """The time before which events of a table are in its rows only, because its sources have removed them."""
        sources = (self._tables[name] for name, tables in FOLDED_FROM.items() if table in tables)
        return max(retention.retained_ms(source, universe) for source in sources)

    def present(self, universes: Sequence[str]) -> list[lifecycles.PresentMessage]:
        """The messages of the plane in some universes."""
        return [] if self._plane is None else [each for each in self._plane.messages if each.universe in universes]

    @property
    def spark(self) -> SparkSession:
        assert self._spark is not None
        return self._spark

    def _build_all(self, build: Callable[[_S], Table], *steps: _S) -> None:
        """Build independent tables concurrently: most of the work for a small table is waiting for disks."""
        with ThreadPoolExecutor(len(steps), "fastness-rollup") as pool:
            for built in [pool.submit(build, step) for step in steps]:
                self._report_progress(built.result())

    def _aggregate(self, step: _Aggregate) -> Table:
        target, source = self._tables[step.table.name], self._tables[step.source.name]
        moves = self._stale_universes(step)
        if moves:
            entries, found = self._by_universe(step.source), _by_universe(step.measurements)
            batches = [
                aggregates.rows(
                    self._spark,
                    step.table,
                    source,
                    entries.get(universe, []),
                    universe=universe,
                    measurements=None if step.measurements is None else found.get(universe, []),
                )
                for universe in sorted(moves)
            ]
            rows = lake_files.sorted_batches(step.table, pa.concat_tables(batches))
            old = [file for file in target.entries() if file.universe in moves]
            target.replace(old, lake_files.write(step.table, target.location, rows), _watermark_moves(moves))
        return step.table

    def _fold(self, step: _Fold) -> Table:
        target = self._tables[step.table.name]
        stale = self._stale_universes(step)
        if not stale:
            return step.table
        new = {universe: self._new_files(step, universe) for universe in sorted(stale)}
        rebuilt = self._too_large(new) if self._spark is not None else []
        entries, measurements = self._by_universe(step.table), _by_universe(step.measurements)
        old = [file for universe in rebuilt for file in entries.get(universe, [])]
        added = step.rebuild(self, rebuilt) if rebuilt else []
        for universe in (each for each in new if each not in rebuilt):
            fold = step.start(universe, measurements.get(universe, []))
            own = entries.get(universe, [])
            if not self._add_events(step, fold, universe, new[universe]):
                new[universe] = self._all_files(step, universe)
                fold = step.start(universe, measurements.get(universe, []))
                self._add_events(step, fold, universe, new[universe])
            if new[universe].is_complete:
                for file in own if (before_ms := self.kept_before_ms(step.table, universe)) else ():
                    fold.keep(target.rows_of(file), before_ms)
                old += own
                own = []
            replaced = folds.replacement(fold, target, own)
            old += replaced.old
            added += replaced.new
        target.replace(old, added, {**_watermark_moves(stale), **self._source_moves(step, sorted(stale))})
        return step.table

    def _add_events(self, step: _Fold, fold: Fold, universe: str, new: _New) -> bool:
        """Add the events of files. False: a file is gone, which was compacted and vacuumed since the last run."""
        try:
            for name, found in new.files.items():
                for file in found:
                    _add_file(fold, self._tables[name], file.path, universe, step.kind)
        except ObjectNotFound:
            if new.is_complete:
                raise
            return False
        return True

    def _new_files(self, step: _Fold, universe: str) -> _New:
        """The files that were added since the last run, or all of them if the rows cannot be continued."""
        watermarks = self._tables[step.table.name].watermarks()
        paths: list[str] = []
        files: dict[str, list[NewFile]] = {}
        for source in step.sources:
            version = watermarks.get(folded_watermark(source.name, universe), 0) - 1
            changes = self._changes[source.name].since(version, universe)
            if changes is None or changes.has_removals:
                return self._all_files(step, universe)
            paths += changes.old_paths
            files[source.name] = changes.new_files
        if watermarks.get(f"sources/{universe}") != _digest(paths):
            return self._all_files(step, universe)
        return _New(files, is_complete=False)

    def _all_files(self, step: _Fold, universe: str) -> _New:
        files = {
            source.name: [NewFile(file.path, file.rows) for file in self._source_files[source.name].get(universe, [])]
            for source in step.sources
        }
        return _New(files, is_complete=True)

    def _too_large(self, new: dict[str, _New]) -> list[str]:
        """The universes that executors fold again: too many events for this process, or for adding them."""
        if sum(each.rows for each in new.values()) <= ROLLUP_BUCKET_EVENTS:
            return []
        complete = [universe for universe, each in new.items() if each.is_complete]
        added = sum(each.rows for each in new.values() if not each.is_complete)
        total = sum(file.rows for source in _SOURCES for file in self._entries(source) if file.universe in new)
        if added > ROLLUP_BUCKET_EVENTS and added > min(ROLLUP_NEW_EVENTS, total * ROLLUP_NEW_SHARE):
            return list(new)
        return complete

    def _source_moves(self, step: _Fold, universes: Sequence[str]) -> dict[str, Move]:
        """The moves of the watermarks that name the folded files."""
        watermarks = self._tables[step.table.name].watermarks()
        values: dict[str, int] = {}
        for universe in universes:
            paths: list[str] = []
            for source in step.sources:
                paths += sorted(file.path for file in self._source_files[source.name].get(universe, []))
                values[folded_watermark(source.name, universe)] = self._tables[source.name].version + 1
            values[f"sources/{universe}"] = _digest(paths)
        return {name: Move(watermarks.get(name, 0), value) for name, value in values.items()}

    def _stale_universes(self, step: _Step) -> dict[str, Move]:
        """The universes whose inputs have changed, with the move of their watermark."""
        paths: dict[str, list[str]] = {universe: [] for universe in self._by_universe(step.table)}
        for source in step.sources:
            for file in self._entries(source):
                paths.setdefault(file.universe, []).append(file.path)
        by_universe = _by_universe(step.measurements)
        watermarks = self._tables[step.table.name].watermarks()
        moves = {}
        for universe in {*paths, *by_universe}:
            measurements = None if step.measurements is None else by_universe.get(universe, [])
            digest = _digest(sorted(paths.get(universe, [])), measurements)
            if watermarks.get(_watermark(universe)) != digest:
                moves[universe] = Move(watermarks.get(_watermark(universe), 0), digest)
        return moves

    def _by_universe(self, table: Table) -> dict[str, list[LakeFile]]:
        found: dict[str, list[LakeFile]] = {}
        for file in self._entries(table):
            found.setdefault(file.universe, []).append(file)
        return found

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

    def _report_progress(self, table: Table) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(f"rollup {table.name}", self._done, len(_TABLES))


def _start_messages(universe: str, found: _Measurements, measured: lifecycles.Measured | None) -> MessageFold:
    return MessageFold(universe, (lifecycles.PresentMessage(*row) for row in found), measured)


def _add_file(fold: Fold, source: LakeTable, path: str, universe: str, kind: str) -> None:
    if source.table is QUEUE_EVENTS:
        assert isinstance(fold, MessageFold)
        for batch in reading.rows(source.table, source.location, path, universe).to_batches():
            fold.add_history(batch)
    else:
        for batch in _records(source.location, path, universe, kind):
            fold.add_records(batch)


def _records(location: Location, path: str, universe: str, kind: str) -> Iterator[pa.RecordBatch]:
    """The (universe, record) of one kind in a file of `activity`."""
    where = pc.field("kind") == kind
    found = reading.rows(ACTIVITY, location, path, universe, columns=["universe", "kind", "record"], where=where)
    yield from found.to_batches()


# With Spark: all events of some universes.


def _rebuild_messages(
    rollup: Rollup, universes: Sequence[str], *, measured: lifecycles.Measured | None
) -> list[AddedFile]:
    buckets = _buckets(rollup, universes)
    bucketed = _bucket_events(rollup, universes, LOG_KIND, partial(events.bucket_messages, buckets=buckets))
    history = rollup.source(QUEUE_EVENTS).read(rollup.spark, universes=universes)
    bucketed = bucketed.union(_bucket_history(history, buckets))
    bucketed = _with_kept(rollup, MESSAGES, universes, bucketed, partial(events.bucket_known_messages, buckets=buckets))
    if found := rollup.present(universes):
        present = pa.Table.from_batches([_payload_batch(events.bucket_present(found, buckets))])
        bucketed = bucketed.union(rollup.spark.createDataFrame(present))
    fold = partial(lifecycles.message_rows, measured=measured)
    target = rollup.source(MESSAGES)
    return _fold_buckets(target, bucketed, buckets, lambda payloads: map(fold, events.group_messages(payloads)))


def _bucket_history(rows: DataFrame, buckets: int) -> DataFrame:
    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_payload_batch(events.bucket_history(batch, buckets)) for batch in batches)

    known = rows.where(sf.col("event").isin(*lifecycles.MESSAGE_EVENTS))
    return known.mapInArrow(process_batches, "bucket int, payload binary")


def _rebuild_mail(rollup: Rollup, universes: Sequence[str]) -> list[AddedFile]:
    buckets = _buckets(rollup, universes)
    bucketed = _bucket_events(rollup, universes, MAIL_KIND, partial(events.bucket_mails, buckets=buckets))
    bucketed = _with_kept(rollup, MAIL, universes, bucketed, partial(events.bucket_known_mails, buckets=buckets))
    return _fold_buckets(
        rollup.source(MAIL),
        bucketed,
        buckets,
        lambda payloads: map(lifecycles.mail_rows, events.group_mails(payloads)),
    )


def _with_kept(
    rollup: Rollup,
    table: Table,
    universes: Sequence[str],
    bucketed: DataFrame,
    bucket_rows: Callable[..., events.Buckets],
) -> DataFrame:
    """The events, and those that only the rows of the table have."""
    before_ms = {universe: rollup.kept_before_ms(table, universe) for universe in universes}
    if not any(before_ms.values()):
        return bucketed

    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_payload_batch(bucket_rows(batch, before_ms=before_ms)) for batch in batches)

    rows = rollup.source(table).read(rollup.spark, universes=universes)
    return bucketed.union(rows.mapInArrow(process_batches, "bucket int, payload binary"))


class _LeaseTask(msgspec.Struct, frozen=True):
    location: Location
    universe: str
    path: str


def _rebuild_leases(rollup: Rollup, universes: Sequence[str]) -> list[AddedFile]:
    source, target = rollup.source(ACTIVITY), rollup.source(ROLLUP_LEASES)
    own = [file for file in source.entries() if file.universe in universes and file.may_hold(kind=LEASE_KIND)]
    work = [msgspec.msgpack.encode(_LeaseTask(source.location, file.universe, file.path)) for file in own]
    found = {universe: LeaseFold(universe) for universe in universes}
    for answer in tasks.execute(rollup.spark, _sum_leases, work):
        universe, waits = msgspec.msgpack.decode(answer, type=tuple[str, bytes])
        found[universe].add_encoded(waits)
    for file in (file for file in target.entries() if file.universe in universes):
        found[file.universe].keep(target.rows_of(file), rollup.kept_before_ms(ROLLUP_LEASES, file.universe))
    return [file for fold in found.values() for file in folds.replacement(fold, target, []).new]


def _sum_leases(task: bytes) -> bytes:
    """The lease events of one file; runs on an executor."""
    given = msgspec.msgpack.decode(task, type=_LeaseTask)
    fold = LeaseFold(given.universe)
    for batch in _records(given.location, given.path, given.universe, LEASE_KIND):
        fold.add_records(batch)
    return msgspec.msgpack.encode((given.universe, fold.encode()))


def _buckets(rollup: Rollup, universes: Sequence[str]) -> int:
    """A number of buckets that keeps each of them small and all cores equally busy."""
    cores = tasks.parallelism(rollup.spark)
    rows_max = sum(file.rows for file in rollup.source(ACTIVITY).entries() if file.universe in universes)
    return cores * max(1, -(-rows_max // (ROLLUP_BUCKET_EVENTS * cores)))


def _bucket_events(
    rollup: Rollup, universes: Sequence[str], kind: str, bucket_batch: Callable[[pa.RecordBatch], events.Buckets]
) -> DataFrame:
    """The events of this kind as few large rows: a row costs Spark more than an event does."""

    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (_payload_batch(bucket_batch(batch)) for batch in batches)

    return (
        rollup.source(ACTIVITY)
        .read(rollup.spark, universes=universes)
        .where(sf.col("kind") == kind)
        .select("universe", "record")
        .mapInArrow(process_batches, "bucket int, payload binary")
    )


def _payload_batch(payloads: events.Buckets) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"bucket": bucket, "payload": payload} for bucket, payload in payloads], _PAYLOAD_SCHEMA
    )


def _fold_buckets(
    target: LakeTable, bucketed: DataFrame, buckets: int, fold: Callable[[Iterator[bytes]], Iterator[pa.RecordBatch]]
) -> list[AddedFile]:
    """Fold the events of each bucket into rows on executors, and write them."""
    table, location = target.table, target.location

    def process_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        payloads = (payload for batch in batches for payload in batch.column("payload").to_pylist())
        rows = pa.Table.from_batches(fold(payloads), table.schema)
        written = folds.write(table, location, rows)
        yield pa.RecordBatch.from_pydict({"files": [msgspec.msgpack.encode(written)]})

    results = bucketed.repartitionById(buckets, "bucket").mapInArrow(process_batches, "files binary").collect()
    decode = msgspec.msgpack.Decoder(list[AddedFile]).decode
    return [file for row in results for file in decode(bytes(row["files"]))]


def _by_universe(measurements: _Measurements | None) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in measurements or ():
        found.setdefault(row[0], []).append(row)
    return found


def _digest(paths: list[str], measurements: list[tuple[Any, ...]] | None = None) -> int:
    """A digest of a table's inputs: the version of Fastness, source files (which never change) and measurements."""
    return fingerprints.of_bytes(msgspec.msgpack.encode([fastness.__version__, paths, measurements]))


def _watermark_moves(moves: dict[str, Move]) -> dict[str, Move]:
    return {_watermark(universe): move for universe, move in moves.items()}


def _watermark(universe: str) -> str:
    return f"made/{universe}"
