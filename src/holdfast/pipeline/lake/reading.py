"""Reads the lake's files as Arrow tables and batches. No Spark here."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.limits import ROWS_BATCH
from holdfast.pipeline.lake.locations import Location
from holdfast.pipeline.schemas import Table


def rows(
    table: Table,
    location: Location,
    path: str,
    universe: str,
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
) -> pa.Table:
    """The rows of one file; columns that an older file lacks are null, and renamed ones have their new names."""
    schema = _schema(table, columns)
    source = pa.BufferReader(location.read(path))
    present = set(pq.read_schema(source).names)
    source.seek(0)
    if not present.isdisjoint(table.renamed.values()):
        old = _with_new_names(table, pq.read_table(source))
        return _complete(old if where is None else old.filter(where), schema, universe)
    found = pq.read_table(source, columns=[name for name in schema.names if name in present], filters=where)
    return _complete(found, schema, universe)


def batches_of(
    table: Table, location: Location, path: str, universe: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one file, in batches of bounded size."""
    schema = _schema(table, columns)
    file = pq.ParquetFile(pa.BufferReader(location.read(path)))
    wanted = {*schema.names, *(table.renamed[name] for name in schema.names if name in table.renamed)}
    present = [name for name in file.schema_arrow.names if name in wanted]
    for batch in file.iter_batches(batch_size=ROWS_BATCH, columns=present):
        yield from _complete(_with_new_names(table, pa.Table.from_batches([batch])), schema, universe).to_batches()


def _with_new_names(table: Table, found: pa.Table) -> pa.Table:
    new_names = {old: new for new, old in table.renamed.items()}
    return found.rename_columns([new_names.get(name, name) for name in found.column_names])


def _schema(table: Table, columns: Sequence[str] | None) -> pa.Schema:
    return table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])


def _complete(found: pa.Table, schema: pa.Schema, universe: str) -> pa.Table:
    columns = []
    for field in schema:
        if field.name in found.column_names:
            columns.append(found.column(field.name))
        else:
            value = universe if field.name == "universe" else None
            columns.append(pa.chunked_array([pa.repeat(pa.scalar(value, field.type), found.num_rows)]))
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)
