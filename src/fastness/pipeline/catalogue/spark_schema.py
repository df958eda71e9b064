"""The tables of a lake in Spark's catalogue, and views over them.

The catalogue is the one of the session: in memory, Hive, Glue or Unity, as Spark is configured. Its tables are
external: they name the location of the lake, and dropping one deletes no data.
"""

from typing import TYPE_CHECKING, Final

from fastness.errors import InvalidArgument, TransactionConflict, Unsupported
from fastness.names import checked_name
from fastness.pipeline.catalogue.views import VIEWS
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEMES: Final = {"s3": "s3a"}  # As Hadoop names them.


def publish(spark: "SparkSession", lake: Lake, schema: str, *, provider: str = "delta") -> list[str]:
    """Create the schema, its tables and views where they are missing; returns their names.

    Tables of the lake that do not exist yet are left out, and so are the views over them. `provider` is the data source
    that reads a table.

    Raises:
        InvalidArgument: the name of the schema cannot be used.
        TransactionConflict: a table of that name has another location.
        Unsupported: Spark runs without Delta Lake.
    """
    if "`" in schema or not all(part.isidentifier() for part in schema.split(".")):
        raise InvalidArgument(f"{schema!r} cannot be a schema; use letters, digits and _, as in catalogue.schema")
    existing = [table for table in TABLES.values() if lake.table(table).exists]
    missing = {*TABLES} - {table.name for table in existing}
    spark.sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    for table in existing:
        location = table_location(lake, table.name)
        statement = f"CREATE TABLE IF NOT EXISTS {schema}.{table.name} USING {provider} LOCATION '{location}'"
        try:
            spark.sql(statement)
        except Exception as error:  # py4j, gRPC and PySpark have unrelated exception types.
            if "DATA_SOURCE_NOT_FOUND" in str(error):
                raise Unsupported(
                    "This Spark has no Delta Lake; add the package io.delta:delta-spark of its version to "
                    "spark.jars.packages, and set spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
                    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
                ) from error
            raise
        _check_location(spark, f"{schema}.{table.name}", location)
    created = [view for view in VIEWS if not any(f"{{{name}}}" in view.query for name in missing)]
    for view in created:
        spark.sql(f"CREATE OR REPLACE VIEW {schema}.{view.name} AS {view.sql(f'{schema}.')}")
    return [*(table.name for table in existing), *(view.name for view in created)]


def temporary_views(spark: "SparkSession", lake: Lake) -> None:
    """Register every table and view for this session only. It needs no Delta Lake: Fastness reads the log itself."""
    for table in TABLES.values():
        lake.table(table).read(spark).createOrReplaceTempView(table.name)
    for view in VIEWS:
        spark.sql(view.sql()).createOrReplaceTempView(view.name)


def table_location(lake: Lake, name: str) -> str:
    """The URL of a table for Spark."""
    checked_name("table", name)
    url = lake.location.url
    if "'" in url or "\\" in url:
        raise InvalidArgument(f"Spark cannot name a lake whose path has a quotation mark or a backslash: {url}")
    if lake.location.is_local:
        return f"file:{url}/{name}"
    scheme, _, rest = url.partition("://")
    return f"{_SCHEMES.get(scheme, scheme)}://{rest}/{name}"


def _check_location(spark: "SparkSession", table: str, location: str) -> None:
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    found = next((str(row["data_type"]) for row in rows if row["col_name"] == "Location"), location)
    if found.replace("file:///", "file:/").rstrip("/") != location.replace("file:///", "file:/"):
        raise TransactionConflict(
            f"The table {table} exists with the location {found}; to replace it, run in Spark: DROP TABLE {table}"
        )
