"""Temporary Spark views of the lake's tables, for queries in SQL.

activity         the table
activity_v1      the same rows, with the column names of version 1
"""

from typing import TYPE_CHECKING

from fastness.pipeline.lake.tables import Lake
from fastness.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def create(spark: "SparkSession", lake: Lake) -> list[str]:
    """Create or replace the views; returns their names. They show the tables as they are now."""
    created = []
    for name, table in TABLES.items():
        frame = lake.table(table).read(spark)
        frame.createOrReplaceTempView(name)
        created.append(name)
        if table.renamed:
            frame.withColumnsRenamed(table.renamed).createOrReplaceTempView(f"{name}_v1")
            created.append(f"{name}_v1")
    return created
