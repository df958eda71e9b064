"""Reads the lake's files as Arrow tables and batches. No Spark here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastness.errors import DamagedDatabase
from fastness.limits import ROWS_BATCH
from fastness.pipeline.lake import files
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import Table


def rows(
    table: Table,
    location: Location,
    path: str,
    universe: str,
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
) -> pa.Table:
    """The rows of one file.

    `where` is about columns of the file, not about partition columns.
    """
    values = _partition(path, universe)
    schema = _schema(table, columns)
    source = pa.BufferReader(location.read(path))
    with _damage_reported(location, path):
        names = [name for name in schema.names if name not in table.folders]
        found = pq.read_table(source, columns=names, filters=where, page_checksum_verification=True)
        return _complete(found, schema, values)


def batches_of(
    table: Table, location: Location, path: str, universe: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one file, in batches of bounded size."""
    schema = _schema(table, columns)
    source = pa.BufferReader(location.read(path))
    with _damage_reported(location, path):
        file = pq.ParquetFile(source, page_checksum_verification=True)
    values = _partition(path, universe)
    names = [name for name in schema.names if name not in table.folders]
    batches = file.iter_batches(batch_size=ROWS_BATCH, columns=names)
    while True:
        with _damage_reported(location, path):
            batch = next(batches, None)
        if batch is None:
            return
        yield from _complete(pa.Table.from_batches([batch]), schema, values).to_batches()


@contextmanager
def _damage_reported(location: Location, path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:  # Damaged bytes may raise any of Arrow's errors.
        raise DamagedDatabase(
            f"The file {location.url}/{path} of the lake is damaged ({str(error).partition(chr(10))[0]}); "
            "to see what is affected, run: fastness pipeline audit"
        ) from error


def _schema(table: Table, columns: Sequence[str] | None) -> pa.Schema:
    return table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])


def _partition(path: str, universe: str) -> dict[str, str | None]:
    return {**files.partitions_in(path), "universe": universe}


def _complete(found: pa.Table, schema: pa.Schema, values: Mapping[str, str | None]) -> pa.Table:
    """The columns of a schema; those that are not in the file have the value of its partition."""
    columns = []
    for field in schema:
        if field.name in found.column_names:
            columns.append(found.column(field.name))
        else:
            value = pa.scalar(values[field.name], pa.string()).cast(field.type)
            columns.append(pa.chunked_array([pa.repeat(value, found.num_rows)]))
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)
