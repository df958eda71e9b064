"""Tables of the lake, and their commits.

A `LakeTable` is a snapshot of a table until it is refreshed. A commit may move watermarks, each from an expected value
to a new one. It fails as a whole, with nothing written, unless every watermark still has its expected value.

    table = lake.table(JOURNAL)
    table.watermark("journal/main/ada")                                          512
    table.append(files, {"journal/main/ada": Move(512, 1024)})                   fine
    table.append(files, {"journal/main/ada": Move(512, 1024)})                   TransactionConflict
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from fastness.errors import Backend, PathUnusable, SchemaMismatch, TransactionConflict
from fastness.limits import LAKE_ATTEMPTS, VIEW_OBJECTS_IN_FLIGHT
from fastness.pipeline.lake import files, frames, reading
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.lake.locations import Location, parse_location
from fastness.pipeline.lake.log_hashes import CHECKPOINT_INTERVAL, LogHashes
from fastness.pipeline.lake.retries import pause
from fastness.pipeline.lake.watermarks import FILES, REWRITES, Watermarks
from fastness.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RETENTION: Final = "fastness.retention"  # In the information of a commit that removes rows by their age.
_VERSION: Final = "fastness.schema"
_CONFIGURATION: Final = {
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    "delta.logRetentionDuration": "interval 7 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}


class Move(NamedTuple):
    """The expected value of a watermark, and its new one."""

    origin: int
    target: int


class LakeFile(msgspec.Struct, frozen=True):
    """A file of a table, with the minimum and maximum of its columns."""

    path: str
    size: int
    universe: str
    rows: int
    low: dict[str, Any]
    high: dict[str, Any]
    modified_ms: int = 0  # When it was written.
    nulls: dict[str, int] = {}  # The number of nulls by column, where it is known.
    partitions: dict[str, str | None] = {}  # The values of the partition columns other than the universe.

    def may_hold(self, **values: Any) -> bool:
        """Whether the file may contain a row with these values."""
        return all(name not in self.low or self.low[name] <= value <= self.high[name] for name, value in values.items())


class Lake:
    """A location with tables."""

    def __init__(self, url: str, storage: Mapping[str, str] | None = None) -> None:
        self.location = parse_location(url, dict(storage or {}))

    def table(self, table: Table) -> "LakeTable":
        """A snapshot of the table, which need not exist yet.

        Raises:
            SchemaMismatch: another version of Fastness wrote it.
        """
        return LakeTable(table, self.location.child(table.name))


class LakeTable:
    """A snapshot of a table."""

    def __init__(self, table: Table, location: Location) -> None:
        self.table = table
        self.location = location
        self._delta: DeltaTable | None = None
        self._watermarks = Watermarks(location)
        self.log_hashes = LogHashes(location)
        self.refresh()

    @property
    def exists(self) -> bool:
        return self._delta is not None

    @property
    def version(self) -> int:
        """The number of the last commit of this snapshot; -1 if the table does not exist."""
        return -1 if self._delta is None else int(self._delta.version())

    def refresh(self) -> None:
        """Move the snapshot to the latest commit."""
        with _translate_errors(self.location):
            if self._delta is not None:
                self._delta.update_incremental()
            else:
                try:
                    self._delta = DeltaTable(self.location.url, storage_options=self.location.storage)
                except TableNotFoundError:
                    return
        self._check_version(self._delta)

    def watermark(self, name: str) -> int:
        """The value of a watermark; 0 if it was never set."""
        return self.watermarks().get(name, 0)

    def watermarks(self) -> Mapping[str, int]:
        """All watermarks by name."""
        return self._watermarks.at(self._delta.version()) if self._delta is not None else {}

    def files(self) -> list[str]:
        """The paths or URLs of all files."""
        return [f"{self.location.url}/{file.path}" for file in self.entries()]

    def entries(self) -> list[LakeFile]:
        """All files, with their statistics."""
        if self._delta is None:
            return []
        rows = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
        return [_lake_file(row) for row in rows]

    def count(self) -> int:
        """The number of rows, from the commits' statistics."""
        return sum(file.rows for file in self.entries())

    def append(self, files: Sequence[AddedFile], moves: Mapping[str, Move] | None = None) -> None:
        """Commit written files, together with the moves of watermarks.

        Raises:
            TransactionConflict: a watermark has another value by now; nothing was committed. Refresh, and plan again.
        """
        self.replace([], files, moves)

    def append_rows(self, rows: pa.Table, moves: Mapping[str, Move] | None = None) -> None:
        """Write a few rows and commit them; without rows, only the watermarks."""
        self.append(files.write(self.table, self.location, files.sorted_batches(self.table, rows)), moves)

    def overwrite(
        self, source: Iterable[pa.RecordBatch] | Sequence[AddedFile], *, universes: Sequence[str] | None = None
    ) -> None:
        """Replace all rows, or those of `universes`, by batches or by written files.

        Raises:
            TransactionConflict: another run has overwritten or compacted the table; nothing was committed.
        """
        watermark, added = self.watermark(REWRITES), list[AddedFile]()
        writer = files.Writer(self.table, self.location, is_sorted=False)
        for item in source:
            if isinstance(item, AddedFile):
                added.append(item)
            else:
                writer.write(item.cast(self.table.schema))
        old = [file for file in self.entries() if universes is None or file.universe in universes]
        new = [*added, *writer.close()]
        if old or new:
            # Even with nothing to remove: the first two overwrites of a table conflict, too.
            self.replace(old, new, {REWRITES: Move(watermark, watermark + 1)})

    def replace(
        self,
        old: Sequence[LakeFile],
        new: Sequence[AddedFile],
        moves: Mapping[str, Move] | None = None,
        *,
        is_same_data: bool = False,
        is_retention: bool = False,
    ) -> None:
        """Replace old files by new ones in one commit.

        `is_same_data`: the rows are the same. `is_retention`: some were removed by their age, and the commit says so.

        Raises:
            PathUnusable: a new file is not in the lake, because an executor has written it elsewhere.
            TransactionConflict: a watermark has moved, or another run has replaced files; nothing was committed.
        """
        moves = dict(moves or {})
        if old:
            moves.setdefault(REWRITES, Move(self.watermark(REWRITES), self.watermark(REWRITES) + 1))
        if not (old or new or moves):
            return
        self._check_written(new)
        delta = self._ensure_created()
        self._check_origins(moves)
        actions = [*_add_actions(new, is_same_data=is_same_data), *_remove_actions(old, is_same_data=is_same_data)]
        for attempt in range(LAKE_ATTEMPTS):
            try:
                self._commit(delta, actions, self._transactions(moves), is_retention=is_retention)
            except TransactionConflict:
                if not moves.keys() - {REWRITES}:
                    raise
                # Any two commits that move watermarks conflict. Only those that move the same one are planned again.
                pause(attempt)
                self.refresh()
                self._check_origins(moves)
                if moves.keys() & self._watermarks.moved:
                    raise
            else:
                return
        raise TransactionConflict(
            f"Other runs committed the table {self.table.name} first, {LAKE_ATTEMPTS} times in a row; try again later"
        )

    def _check_origins(self, moves: Mapping[str, Move]) -> None:
        watermarks = self.watermarks()
        for name, move in moves.items():
            if watermarks.get(name, 0) != move.origin:
                raise TransactionConflict(
                    f"{name} of table {self.table.name} is at {watermarks.get(name, 0)}, not {move.origin}: another "
                    "run committed first; plan again"
                )

    def rewrite_watermarks(self, is_dropped: Callable[[str], bool]) -> None:
        """Commit all watermarks in a new file, without those that are dropped by name.

        Raises:
            TransactionConflict: another run has committed meanwhile; nothing was committed.
        """
        delta, rewrites = self._ensure_created(), self.watermark(REWRITES)
        transactions = {REWRITES: rewrites + 1}
        if fingerprint := self._watermarks.write_all_except(is_dropped):
            transactions[FILES] = fingerprint
        self._commit(delta, [], transactions)

    def newest_watermark_file(self) -> int:
        """The fingerprint of the file with the watermarks that this snapshot's last commits moved; 0 if there is none.

        Raises:
            DamagedDatabase: a commit is missing from the log.
        """
        return 0 if self._delta is None else self._watermarks.newest_file(self._delta.version())

    def _transactions(self, moves: Mapping[str, Move]) -> dict[str, int]:
        """The application transactions of a commit that moves watermarks. Writes the file that one of them names."""
        targets = {name: move.target for name, move in moves.items()}
        transactions = {name: targets.pop(name) for name in (REWRITES,) if name in targets}
        if targets:
            transactions[FILES] = self._watermarks.write(targets)
        return transactions

    def _commit(
        self,
        delta: DeltaTable,
        actions: list[AddAction | RemoveAction],
        transactions: Mapping[str, int],
        *,
        is_retention: bool = False,
    ) -> None:
        now_ms = time.time_ns() // 1_000_000
        before = delta.version()
        with _translate_errors(self.location):
            delta.create_write_transaction(
                actions,
                "append",
                self.table.schema,
                list(self.table.folders),
                commit_properties=CommitProperties(
                    custom_metadata={RETENTION: "true"} if is_retention else None,
                    app_transactions=[Transaction(name, value, now_ms) for name, value in transactions.items()],
                ),
            )
            delta.update_incremental()
        for version in range(before + 1, delta.version() + 1):
            self.location.sync(f"_delta_log/{version:020}.json")
        self.log_hashes.record(delta.version())

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        universe: str | None = None,
        **values: Any,
    ) -> Iterator[pa.Table]:
        """The rows, one file at a time, without Spark; files that cannot contain the `values` are skipped."""
        for file in self.entries():
            if universe in (None, file.universe) and file.may_hold(**values):
                yield self.rows_of(file, columns, where)

    def rows_of(
        self, file: LakeFile, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """The rows of one file."""
        return reading.rows(self.table, self.location, file.path, file.universe, columns=columns, where=where)

    def rows(self, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pa.Table:
        """All rows in memory: for small tables and tests."""
        nothing = self.table.schema.empty_table()
        return pa.concat_tables([nothing.select(columns or nothing.column_names), *self.scan(columns, where)])

    def read(self, spark: "SparkSession", *, universes: Sequence[str] | None = None) -> "DataFrame":
        """This snapshot of the table as a DataFrame; empty if the table does not exist."""
        chosen = [file for file in self.entries() if universes is None or file.universe in universes]
        paths = [(file.path, file.universe) for file in chosen]
        return frames.read(spark, self.table, self.location, paths)

    def write(self, frame: "DataFrame") -> list[AddedFile]:
        """Write the rows of a DataFrame on executors; `append` or `overwrite` then commits the files."""
        return frames.write(frame, self.table, self.location)

    def delta(self) -> DeltaTable:
        """The delta-rs table, created if it does not exist."""
        return self._ensure_created()

    def _check_written(self, new: Sequence[AddedFile]) -> None:
        """Raise PathUnusable unless every new file is in the lake: a commit of a missing file would lose its rows."""
        with ThreadPoolExecutor(VIEW_OBJECTS_IN_FLIGHT) as pool:
            sizes = list(pool.map(self.location.size, [file.path for file in new]))
        wrong = [(file, size) for file, size in zip(new, sizes, strict=True) if size != file.size]
        if wrong:
            file, size = wrong[0]
            found = "does not exist" if size is None else f"has {size:,} bytes, not {file.size:,}"
            raise PathUnusable(
                f"{len(wrong)} of {len(new)} new files of the table {self.table.name} are not in the lake: "
                f"{self.location.url}/{file.path} {found}. The executors wrote them elsewhere, and nothing was "
                "committed; use a lake that the driver and all executors share, such as s3://bucket/prefix or a "
                "network folder that is mounted at the same path everywhere"
            )

    def _ensure_created(self) -> DeltaTable:
        if self._delta is None:
            failure: Exception | None = None
            try:
                self._create()
            except (Backend, TransactionConflict, TableNotFoundError) as error:
                failure = error  # Another run may have created it.
            self.refresh()
            if self._delta is None:
                raise PathUnusable(
                    f"Cannot create a table at {self.location.url} ({failure}); make it writable, or use another folder"
                ) from failure
        return self._delta

    def _create(self) -> None:
        with _translate_errors(self.location):
            DeltaTable.create(
                self.location.url,
                self.table.schema,
                partition_by=list(self.table.folders),
                name=self.table.name,
                configuration={**_CONFIGURATION, _VERSION: str(self.table.version)},
                storage_options=self.location.storage,
                raise_if_key_not_exists=False,
            )

    def _check_version(self, delta: DeltaTable) -> None:
        version, known = int(delta.metadata().configuration.get(_VERSION, 0)), self.table.version
        if version != known:
            advice = (
                "upgrade Fastness"
                if version > known
                else "ingest into a new lake, or use the version of Fastness that wrote this one"
            )
            raise SchemaMismatch(
                f"The table {self.table.name} in {self.location.url} has version {version}, this Fastness supports "
                f"{known}; {advice}"
            )


def _add_actions(new: Sequence[AddedFile], *, is_same_data: bool) -> list[AddAction | RemoveAction]:
    now_ms = time.time_ns() // 1_000_000
    return [
        AddAction(
            file.path, file.size, {"universe": file.universe, **file.partitions}, now_ms, not is_same_data, file.stats
        )
        for file in new
    ]


def _remove_actions(old: Sequence[LakeFile], *, is_same_data: bool) -> list[AddAction | RemoveAction]:
    now_ms = time.time_ns() // 1_000_000
    return [
        RemoveAction(file.path, not is_same_data, now_ms, file.size, {"universe": file.universe, **file.partitions})
        for file in old
    ]


def _lake_file(row: dict[str, Any]) -> LakeFile:
    partition = _named(row, "partition.")
    known = {name: value for name, value in partition.items() if value is not None and name != "universe"}
    low = {name: value for name, value in _named(row, "min.").items() if value is not None} | known
    high = {name: value for name, value in _named(row, "max.").items() if value is not None} | known
    return LakeFile(
        row["path"],
        row["size_bytes"],
        partition.get("universe") or "",
        row["num_records"] or 0,
        low,
        high,
        row["modification_time"],
        {name: value for name, value in _named(row, "null_count.").items() if value is not None},
        {name: None if value is None else str(value) for name, value in partition.items() if name != "universe"},
    )


def _named(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


@contextmanager
def _translate_errors(location: Location) -> Iterator[None]:
    """Translate delta-rs errors into Fastness errors."""
    try:
        yield
    except CommitFailedError as error:
        raise TransactionConflict(f"Another run committed to {location.url} first; plan again ({error})") from error
    except (OSError, DeltaError) as error:
        if isinstance(error, TableNotFoundError):
            raise
        reason = next(iter(str(error).splitlines()), "")  # Without the backtrace of delta-rs.
        raise Backend(f"The lake at {location.url} failed: {reason}") from error
