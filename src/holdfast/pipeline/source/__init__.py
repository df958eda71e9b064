"""The Spark data source `format("holdfast")`.

spark.read.format("holdfast").option("url", "http://127.0.0.1:9440").option("table", "journal").load()
spark.readStream.format("holdfast").options(url="dir:./data", table="activity").load()
frame.write.format("holdfast").options(url="http://…", table="queues", queue="jobs", load="2026-11-15", key="id")…

What an option means is said in `docs/spark-source.md`. Whoever has Holdfast installed need not register anything:
`pyspark_holdfast` is found by its name.
"""

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgument
from holdfast.pipeline.source.options import READ, check_table, options_of
from holdfast.pipeline.source.readers import BatchReader, StreamReader
from holdfast.pipeline.source.tables import SCHEMAS
from holdfast.pipeline.source.writers import BatchWriter, StreamWriter, load_of

__all__ = ["HoldfastSource"]


class HoldfastSource(DataSource):
    """The journals, session logs, queues, mailboxes and entities of a plane."""

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    def schema(self) -> StructType:
        options = options_of(self.options)
        check_table(options, READ, what_for="read")
        return from_arrow_schema(SCHEMAS[options.table])

    def reader(self, schema: StructType) -> DataSourceReader:
        del schema
        options = options_of(self.options)
        check_table(options, READ, what_for="read")  # Whoever gives a schema has not asked for ours.
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        del schema
        return StreamReader(options_of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        options = options_of(self.options)
        check_append(overwrite)
        return BatchWriter(options, load_of(options, schema.names))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        options = options_of(self.options)
        check_append(overwrite)
        return StreamWriter(options, load_of(options, schema.names))


def check_append(overwrite: bool) -> None:
    """Raise InvalidArgument if a write would have to remove what is there."""
    if overwrite:
        raise InvalidArgument('Messages are added to those that are there; write with mode("append")')
