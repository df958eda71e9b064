"""Reads tables of the lake as DataFrames, and writes DataFrames as files of a table.

Spark reads local files itself. It needs extra jars for s3://, so executors read object stores through obstore.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from fastness.pipeline.lake import reading
from fastness.pipeline.lake.files import AddedFile, Writer
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read(spark: "SparkSession", table: Table, location: Location, files: Sequence[tuple[str, str]]) -> "DataFrame":
    """A DataFrame of the rows of these (path, universe) files."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = spark_schema(table)
    if not files:
        return spark.createDataFrame(table.schema.empty_table(), schema)
    if location.is_local:
        paths = [f"{location.url}/{path}" for path, _ in files]
        return spark.read.option("basePath", location.url).schema(schema).parquet(*paths)

    shown = to_arrow_schema(schema, timezone="UTC")  # Spark has microsecond timestamps only.

    def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for path, universe in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                for found in reading.batches_of(table, location, path, universe):
                    yield found.cast(shown)

    names = spark.createDataFrame(pa.table([*zip(*files, strict=True)], ["path", "universe"]))
    return names.repartition(len(files)).mapInArrow(each, schema)


def write(frame: "DataFrame", table: Table, location: Location) -> list[AddedFile]:
    """Write the rows of a DataFrame into new files of a table, on executors, without committing them.

    The DataFrame has the table's columns. Each partition writes one file per universe, so use few partitions.
    """

    def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = Writer(table, location, is_sorted=False)
        for batch in batches:
            writer.write(batch.cast(table.schema))
        yield pa.RecordBatch.from_pydict({"files": [msgspec.msgpack.encode(writer.close())]})

    found = frame.select(*table.schema.names).mapInArrow(each, "files binary").collect()
    return [file for row in found for file in msgspec.msgpack.decode(bytes(row["files"]), type=list[AddedFile])]


def spark_schema(table: Table) -> "StructType":
    """The columns as a Spark schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(table.schema)
