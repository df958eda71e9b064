"""Tables of the lake, and their commits.

A `LakeTable` is one moment of a table until it is refreshed. A commit may move marks: for each it says from where to
where, and it fails as a whole, with nothing written, unless every one of them is still where the commit found it.

    table = lake.table(JOURNAL)
    table.mark("journal/main/ada")                                               512
    table.append(files, {"journal/main/ada": Move(512, 1024)})                   fine
    table.append(files, {"journal/main/ada": Move(512, 1024)})                   TransactionConflict
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Field, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from holdfast.errors import Backend, PathUnusable, SchemaMismatch, TransactionConflict
from holdfast.pipeline.lake import files, frames, reading
from holdfast.pipeline.lake.files import AddedFile
from holdfast.pipeline.lake.locations import Place, place
from holdfast.pipeline.lake.watermarks import Marks
from holdfast.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REWRITES: Final = "rewrites"  # delta-rs lets two commits remove one file, so every commit that removes moves this mark.
_VERSION: Final = "holdfast.schema"
_CONFIGURATION: Final = {
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 7 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}


class Move(NamedTuple):
    """Where a mark is, and where it goes."""

    origin: int
    target: int


class LakeFile(msgspec.Struct, frozen=True):
    """A file of a table, and between which values its columns are."""

    path: str
    size: int
    universe: str
    rows: int
    low: dict[str, Any]
    high: dict[str, Any]

    def may_hold(self, **values: Any) -> bool:
        """Whether a row with these values could be in it."""
        return all(name not in self.low or self.low[name] <= value <= self.high[name] for name, value in values.items())


class Lake:
    """A place with tables."""

    def __init__(self, url: str, storage: Mapping[str, str] | None = None) -> None:
        self.place = place(url, dict(storage or {}))

    def table(self, table: Table) -> "LakeTable":
        """The table as it is now, whether it was made yet or not.

        Raises:
            SchemaMismatch: a newer Holdfast has written it.
        """
        return LakeTable(table, self.place.below(table.name))


class LakeTable:
    """One moment of a table."""

    def __init__(self, table: Table, place: Place) -> None:
        self.table = table
        self.place = place
        self._delta: DeltaTable | None = None
        self._marks = Marks(place)
        self.refresh()

    @property
    def exists(self) -> bool:
        return self._delta is not None

    def refresh(self) -> None:
        """Look again: what others have committed is there, too."""
        with _translated(self.place):
            if self._delta is not None:
                self._delta.update_incremental()
            else:
                try:
                    self._delta = DeltaTable(self.place.url, storage_options=self.place.storage)
                except TableNotFoundError:
                    return
        self._check_version(self._delta)

    def mark(self, name: str) -> int:
        """How far somebody came; 0 if they never did anything."""
        return self.marks().get(name, 0)

    def marks(self) -> Mapping[str, int]:
        """How far everybody came."""
        return self._marks.at(self._delta.version()) if self._delta is not None else {}

    def files(self) -> list[str]:
        """The paths or URLs of all files."""
        return [f"{self.place.url}/{file.path}" for file in self.entries()]

    def entries(self) -> list[LakeFile]:
        """All files, with what is known of them."""
        if self._delta is None:
            return []
        rows = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
        return [_entry(row) for row in rows]

    def count(self) -> int:
        """How many rows there are, as their commits say."""
        return sum(file.rows for file in self.entries())

    def append(self, files: Sequence[AddedFile], moves: Mapping[str, Move] | None = None) -> None:
        """Commit files that were written, together with how far their writer came.

        Raises:
            TransactionConflict: somebody has moved one of the marks; nothing was committed. Refresh, and plan again.
        """
        self.replace([], files, moves)

    def append_rows(self, rows: pa.Table, moves: Mapping[str, Move] | None = None) -> None:
        """Write a few rows and commit them; without rows, only the marks."""
        self.append(files.write(self.table, self.place, files.in_order(self.table, rows)), moves)

    def overwrite(
        self, source: Iterable[pa.RecordBatch] | Sequence[AddedFile], *, universes: Sequence[str] | None = None
    ) -> None:
        """Put rows, or files that were written already, in the place of everything; or of what these universes have.

        Raises:
            TransactionConflict: somebody else has overwritten or compacted it meanwhile; nothing was committed.
        """
        mark, added = self.mark(REWRITES), list[AddedFile]()
        writer = files.Writer(self.table, self.place, is_sorted=False)
        for item in source:
            if isinstance(item, AddedFile):
                added.append(item)
            else:
                writer.write(item.cast(self.table.schema))
        old = [file for file in self.entries() if universes is None or file.universe in universes]
        new = [*added, *writer.close()]
        if old or new:
            # Even where there is nothing to remove: of two that come first, one comes second.
            self.replace(old, new, {REWRITES: Move(mark, mark + 1)})

    def replace(
        self,
        old: Sequence[LakeFile],
        new: Sequence[AddedFile],
        moves: Mapping[str, Move] | None = None,
        *,
        is_same_data: bool = False,
    ) -> None:
        """Put new files in the place of old ones, in one commit. `is_same_data`: the rows are the same.

        Raises:
            TransactionConflict: a mark has moved, or somebody else has replaced files; nothing was committed.
        """
        moves = dict(moves or {})
        if old:
            moves.setdefault(REWRITES, Move(self.mark(REWRITES), self.mark(REWRITES) + 1))
        if not (old or new or moves):
            return
        delta, marks = self._made(), self.marks()
        for name, move in moves.items():
            if marks.get(name, 0) != move.origin:
                raise TransactionConflict(
                    f"{name} of the table {self.table.name} is at {marks.get(name, 0)} and not at {move.origin} any "
                    "more: another run was faster; plan again"
                )
        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {"universe": file.universe}, now_ms, not is_same_data, file.stats)
            for file in new
        ]
        actions += [
            RemoveAction(file.path, not is_same_data, now_ms, file.size, {"universe": file.universe}) for file in old
        ]
        transactions = [Transaction(name, move.target, now_ms) for name, move in moves.items()]
        before = delta.version()
        with _translated(self.place):
            delta.create_write_transaction(
                actions,
                "append",
                self.table.schema,
                list(self.table.folders),
                commit_properties=CommitProperties(app_transactions=transactions),
            )
            delta.update_incremental()
        for version in range(before + 1, delta.version() + 1):
            self.place.sync(f"_delta_log/{version:020}.json")

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        universe: str | None = None,
        **values: Any,
    ) -> Iterator[pa.Table]:
        """Rows of one file after the other, without Spark; files that cannot hold the `values` are not read."""
        for file in self.entries():
            if universe in (None, file.universe) and file.may_hold(**values):
                yield self.rows_of(file, columns, where)

    def rows_of(
        self, file: LakeFile, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """The rows of one file."""
        return reading.rows(self.table, self.place, file.path, file.universe, columns=columns, where=where)

    def rows(self, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pa.Table:
        """All rows in memory: for small tables, and for tests."""
        nothing = self.table.schema.empty_table()
        return pa.concat_tables([nothing.select(columns or nothing.column_names), *self.scan(columns, where)])

    def read(self, spark: "SparkSession", *, universes: Sequence[str] | None = None) -> "DataFrame":
        """The table as it is at this moment, as a DataFrame; an empty one if it was never written."""
        chosen = [file for file in self.entries() if universes is None or file.universe in universes]
        return frames.read(spark, self.table, self.place, [(file.path, file.universe) for file in chosen])

    def write(self, frame: "DataFrame") -> list[AddedFile]:
        """Have executors write the rows of a DataFrame; `append` or `overwrite` then commits the files."""
        return frames.write(frame, self.table, self.place)

    def delta(self) -> DeltaTable:
        """The table of delta-rs, which is made if it was not there."""
        return self._made()

    def _made(self) -> DeltaTable:
        if self._delta is None:
            refused: Exception | None = None
            try:
                self._make()
            except (Backend, TransactionConflict, TableNotFoundError) as error:
                refused = error  # Somebody else may have made it.
            self.refresh()
            if self._delta is None:
                raise PathUnusable(
                    f"No lake can be made at {self.place.url} ({refused}); make it writable, or choose another place"
                ) from refused
        self._upgrade(self._delta)
        return self._delta

    def _make(self) -> None:
        with _translated(self.place):
            DeltaTable.create(
                self.place.url,
                self.table.schema,
                partition_by=list(self.table.folders),
                name=self.table.name,
                configuration={**_CONFIGURATION, _VERSION: str(self.table.version)},
                storage_options=self.place.storage,
                raise_if_key_not_exists=False,
            )

    def _check_version(self, delta: DeltaTable) -> None:
        version = _version(delta)
        if version > self.table.version:
            raise SchemaMismatch(
                f"The table {self.table.name} in {self.place.url} has version {version} and this Holdfast knows "
                f"{self.table.version}; upgrade Holdfast"
            )

    def _upgrade(self, delta: DeltaTable) -> None:
        """Add the columns that newer versions of the table have."""
        if _version(delta) == self.table.version:
            return
        there = {field.name for field in delta.schema().fields}
        wanted = DeltaSchema.from_arrow(self.table.schema).fields
        missing: list[Field] = [field for field in wanted if field.name not in there]
        with _translated(self.place):
            if missing:
                delta.alter.add_columns(missing)
            delta.alter.set_table_properties({_VERSION: str(self.table.version)}, raise_if_not_exists=False)
            delta.update_incremental()


def _version(delta: DeltaTable) -> int:
    return int(delta.metadata().configuration.get(_VERSION, "1"))


def _entry(row: dict[str, Any]) -> LakeFile:
    low = {name[4:]: value for name, value in row.items() if name.startswith("min.") and value is not None}
    high = {name[4:]: value for name, value in row.items() if name.startswith("max.") and value is not None}
    return LakeFile(
        row["path"], row["size_bytes"], row.get("partition.universe") or "", row["num_records"] or 0, low, high
    )


@contextmanager
def _translated(place: Place) -> Iterator[None]:
    """What delta-rs raises, in our words."""
    try:
        yield
    except CommitFailedError as error:
        raise TransactionConflict(f"Another commit to {place.url} was faster; plan again ({error})") from error
    except (OSError, DeltaError) as error:
        if isinstance(error, TableNotFoundError):
            raise
        raise Backend(f"The lake at {place.url} failed: {error}") from error
