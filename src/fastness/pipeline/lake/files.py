"""Writes Parquet files of a table: one for each partition, sorted, with the statistics that a commit needs.

Partition columns are not in the files, only in their paths and commits. Timestamps are microseconds, as Delta requires.
A file has the SHA-256 of its bytes in its name, which is in the commit, and a checksum in every page.
"""

import hashlib
import io
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastness.limits import LAKE_ROW_GROUP_BYTES, LAKE_ROW_GROUP_ROWS, LAKE_WRITER_BYTES, LAKE_WRITERS_MAX
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import Table

_UNIVERSE: Final = "universe"
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"  # As Spark, polars and DuckDB name the folder of nulls.
_FOLDER_CHARACTERS: Final = 200  # A folder name has at most 255 bytes; the Delta log has the universe itself.
_NO_DICTIONARY: Final = frozenset(
    {"raw", "hash", "payload", "record", "state", "fields", "digest", "id"}
)  # High cardinality.


def hash_in_name(path: str) -> str:
    """The SHA-256 in the name of a file; the name of one that other software has written."""
    return path.rpartition("-")[2].removesuffix(".parquet")


def partitions_in(path: str) -> dict[str, str | None]:
    """The values of a file's partition columns in its path, except for the universe, whose folder may be shortened."""
    folders = (folder.partition("=") for folder in path.split("/")[1:-1])
    return {name: None if value == _NULL else value for name, _, value in folders}


class AddedFile(msgspec.Struct, frozen=True):
    """A written file that is not committed yet."""

    path: str  # Below the table's folder.
    size: int
    universe: str
    rows: int
    stats: str  # JSON, in Delta's format.
    partitions: dict[str, str | None] = {}  # The values of the partition columns other than the universe.


class Writer:
    """Writes rows of a table into new files; `close` returns them.

    Rows must be sorted by the table's order; with `is_sorted=False`, each row group is sorted when it is written.
    """

    def __init__(self, table: Table, location: Location, *, is_sorted: bool = True) -> None:
        self._table = table
        self._location = location
        self._is_sorted = is_sorted
        self._open: dict[tuple[Any, ...], _File] = {}
        self._done: list[AddedFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows of one or more partitions."""
        for values, rows in _by_partition(batch, self._table.folders):
            file = self._open.pop(values, None) or self._new(values)
            self._open[values] = file  # Keeps the most recently used one last.
            file.add(rows)
            if sum(each.buffered_bytes for each in self._open.values()) > LAKE_WRITER_BYTES:
                max(self._open.values(), key=lambda each: each.buffered_bytes).write_row_group()

    def close(self) -> list[AddedFile]:
        """Close all files. They are durable, and become part of the table when they are committed."""
        while self._open:
            self._finish(next(iter(self._open)))
        return self._done

    def _new(self, values: tuple[Any, ...]) -> "_File":
        if len(self._open) >= LAKE_WRITERS_MAX:
            self._finish(next(iter(self._open)))
        partition = dict(zip(self._table.folders, values, strict=True))
        return _File(self._table, self._location, partition, is_sorted=self._is_sorted)

    def _finish(self, values: tuple[Any, ...]) -> None:
        self._done.append(self._open.pop(values).close())


def write(
    table: Table, location: Location, batches: Iterable[pa.RecordBatch], *, is_sorted: bool = True
) -> list[AddedFile]:
    """Write rows into new files of a table, without committing them."""
    writer = Writer(table, location, is_sorted=is_sorted)
    for batch in batches:
        writer.write(batch)
    return writer.close()


def sorted_batches(table: Table, rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows of a small table, sorted as in its files."""
    keys = [(name, "ascending") for name in (_UNIVERSE, *table.order)]
    yield from rows.cast(table.schema).sort_by(keys).to_batches(max_chunksize=LAKE_ROW_GROUP_ROWS)


def stored_schema(table: Table) -> pa.Schema:
    """The schema of the files."""
    return pa.schema(
        [(field.name, _stored_type(field.type)) for field in table.schema if field.name not in table.folders]
    )


def _stored_type(type: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", tz=type.tz) if pa.types.is_timestamp(type) else type


def _by_partition(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The values of the partition columns, and the rows that have them."""
    if not columns:
        yield (), batch
        return
    column = batch.column(columns[0])
    found = column.unique()
    for value in found:
        mask = pc.equal(column, value) if value.is_valid else pc.is_null(column)
        for values, rows in _by_partition(batch if len(found) == 1 else batch.filter(mask), columns[1:]):
            yield (value.as_py(), *values), rows


class _File:
    """A file being written, with one row group buffered in memory."""

    def __init__(self, table: Table, location: Location, partition: Mapping[str, Any], *, is_sorted: bool) -> None:
        self._table = table
        self._location = location
        self._partition = {name: None if value is None else str(value) for name, value in partition.items()}
        self._is_sorted = is_sorted
        self._schema = stored_schema(table)
        folders = (f"{name}={(value or _NULL)[:_FOLDER_CHARACTERS]}" for name, value in self._partition.items())
        self._stem = "/".join([*folders, uuid.uuid4().hex])
        self._stats = _Stats(table, self._schema)
        self._buffered: list[pa.RecordBatch] = []
        self._rows = self.buffered_bytes = 0
        self._sink = self._new_sink()
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            use_dictionary=[name for name in self._schema.names if name not in _NO_DICTIONARY],
            write_statistics=self._stats.columns,
            write_page_checksum=True,
            sorting_columns=pq.SortingColumn.from_ordering(self._schema, [(name, "ascending") for name in table.order]),
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self._buffered.append(batch.select(self._schema.names))
        self._rows += batch.num_rows
        self.buffered_bytes += batch.nbytes
        if self._rows >= LAKE_ROW_GROUP_ROWS or self.buffered_bytes >= LAKE_ROW_GROUP_BYTES:
            self.write_row_group()

    def close(self) -> AddedFile:
        self.write_row_group()
        self._writer.close()
        if isinstance(self._sink, io.BytesIO):
            data = self._sink.getvalue()
            size, path = len(data), f"{self._stem}-{hashlib.sha256(data).hexdigest()}.parquet"
            Stores(self._location.storage)(self._location.url).put(path, data)
        else:
            with self._sink.open("rb") as file:
                path = f"{self._stem}-{hashlib.file_digest(file, 'sha256').hexdigest()}.parquet"
            size = self._sink.stat().st_size
            self._sink.rename(Path(self._location.url, path))
            self._location.sync(path)
        others = {name: value for name, value in self._partition.items() if name != _UNIVERSE}
        return AddedFile(
            path, size, self._partition[_UNIVERSE] or "", self._stats.rows, self._stats.json(), partitions=others
        )

    def _new_sink(self) -> io.BytesIO | Path:
        if not self._location.is_local:
            return io.BytesIO()
        target = Path(self._location.url, f"{self._stem}.parquet")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def write_row_group(self) -> None:
        """Write the buffered rows."""
        if not self._buffered:
            return
        rows = pa.Table.from_batches(self._buffered).cast(self._schema)
        if not self._is_sorted:
            rows = rows.sort_by([(name, "ascending") for name in self._table.order])
        self._stats.add(rows)
        self._writer.write_table(rows, row_group_size=LAKE_ROW_GROUP_ROWS)
        self._buffered, self._rows, self.buffered_bytes = [], 0, 0


class _Stats:
    """Statistics of a file, which let readers skip it."""

    def __init__(self, table: Table, schema: pa.Schema) -> None:
        times = [field.name for field in schema if pa.types.is_temporal(field.type)]
        self.columns = [*table.order, *(name for name in times if name not in table.order)]
        self.rows = 0
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._nulls = dict.fromkeys(self.columns, 0)

    def add(self, rows: pa.Table) -> None:
        self.rows += rows.num_rows
        for name in self.columns:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            found = pc.min_max(column).as_py()
            if found["min"] is not None:
                self._low[name] = min(self._low.get(name, found["min"]), found["min"])
                self._high[name] = max(self._high.get(name, found["max"]), found["max"])

    def json(self) -> str:
        statistics = {
            "numRecords": self.rows,
            "minValues": {name: _json_value(value) for name, value in self._low.items()},
            "maxValues": {name: _json_value(value) for name, value in self._high.items()},
            "nullCount": self._nulls,
        }
        return msgspec.json.encode(statistics).decode()


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.") + f"{value.microsecond // 1_000:03}Z"
    return value.isoformat() if isinstance(value, date) else value
