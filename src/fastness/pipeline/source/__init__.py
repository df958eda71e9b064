"""The Spark data source `format("fastness")`.

spark.read.format("fastness").option("url", "http://127.0.0.1:9440").option("table", "journal").load()
spark.readStream.format("fastness").options(url="dir:./data", table="activity").load()
frame.write.format("fastness").options(url="http://…", table="queues", queue="jobs", load="2026-11-15", key="id")…

`docs/spark-source.md` documents the options. The source needs no registration: Spark finds `pyspark_fastness` by its
name.
"""

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from fastness.errors import InvalidArgument
from fastness.pipeline.source.options import READABLE_TABLES, check_table, parse_options
from fastness.pipeline.source.readers import BatchReader, StreamReader
from fastness.pipeline.source.tables import SCHEMAS
from fastness.pipeline.source.writers import BatchWriter, StreamWriter, parse_load

__all__ = ["FastnessSource"]


class FastnessSource(DataSource):
    """The journals, session logs, queues, mailboxes and entities of a plane."""

    @classmethod
    def name(cls) -> str:
        return "fastness"

    def schema(self) -> StructType:
        options = parse_options(self.options)
        check_table(options, READABLE_TABLES, operation="read")
        return from_arrow_schema(SCHEMAS[options.table])

    def reader(self, schema: StructType) -> DataSourceReader:
        del schema
        options = parse_options(self.options)
        check_table(
            options, READABLE_TABLES, operation="read"
        )  # With a user-given schema, Spark does not call `schema`.
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        del schema
        return StreamReader(parse_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        options = parse_options(self.options)
        check_append(overwrite)
        return BatchWriter(options, parse_load(options, schema.names))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        options = parse_options(self.options)
        check_append(overwrite)
        return StreamWriter(options, parse_load(options, schema.names))


def check_append(overwrite: bool) -> None:
    """Raise InvalidArgument if a write would have to remove existing data."""
    if overwrite:
        raise InvalidArgument('Overwriting is not supported; write with mode("append")')
