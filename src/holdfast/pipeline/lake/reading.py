"""Rows of the lake's files as Arrow tables and batches. No Spark in it."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.limits import ROWS_BATCH
from holdfast.pipeline.lake.places import Place
from holdfast.pipeline.schemas import Table


def rows(
    table: Table,
    place: Place,
    path: str,
    universe: str,
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
) -> pa.Table:
    """Rows of one file; a column that the file is too old to have is null."""
    schema = table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])
    source = pa.BufferReader(place.read(path))
    there = set(pq.read_schema(source).names)
    source.seek(0)
    found = pq.read_table(source, columns=[name for name in schema.names if name in there], filters=where)
    return _completed(found, schema, universe)


def batches_of(table: Table, place: Place, path: str, universe: str) -> Iterator[pa.RecordBatch]:
    """The rows of one file, a bounded number at a time."""
    file = pq.ParquetFile(pa.BufferReader(place.read(path)))
    for batch in file.iter_batches(batch_size=ROWS_BATCH):
        yield from _completed(pa.Table.from_batches([batch]), table.schema, universe).to_batches()


def _completed(found: pa.Table, schema: pa.Schema, universe: str) -> pa.Table:
    columns = []
    for field in schema:
        if field.name in found.column_names:
            columns.append(found.column(field.name))
        else:
            value = universe if field.name == "universe" else None
            columns.append(pa.chunked_array([pa.repeat(pa.scalar(value, field.type), found.num_rows)]))
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)
