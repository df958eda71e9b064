"""DuckDB and polars read the same rows from the lake as Spark."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import polars
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession, functions

from fastness.pipeline import jobs
from fastness.pipeline.config import Config
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import ACTIVITY, JOURNAL, TABLES
from tests.pipeline import planes

# The number of rows of a world and the sum of their heights, which show missing and duplicate rows.
Summary = dict[tuple[str, str], tuple[int, int]]


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of two universes, written in two runs, so that its tables have several files."""
    folder = tmp_path_factory.mktemp("readers")
    data, lake = folder / "data", folder / "lake"
    built = planes.build(data, worlds=4, entries=150, activity=40, messages=60)
    planes.build(data, worlds=2, entries=80, universe="other")
    config = Config(data=f"dir:{data}", lake=str(lake))
    jobs.run("ingest", spark, config)
    planes.extend(data, built.worlds, 20)
    jobs.run("ingest", spark, config)
    return lake


@pytest.fixture(scope="module")
def by_spark(spark: SparkSession, lake: Path) -> Summary:
    rows = Lake(str(lake)).table(JOURNAL).read(spark).groupBy("universe", "world")
    found = rows.agg(functions.count("*").alias("rows"), functions.sum("height").alias("heights")).collect()
    return {(row["universe"], row["world"]): (row["rows"], row["heights"]) for row in found}


def by_duckdb(lake: Path) -> Summary:
    files = DeltaTable(str(lake / "journal")).file_uris()
    found = duckdb.execute(
        """
        SELECT universe, world, count(*), sum(height)::BIGINT
        FROM read_parquet(?, hive_partitioning = true) GROUP BY ALL
        """,
        [files],
    ).fetchall()
    return {(universe, world): (rows, heights) for universe, world, rows, heights in found}


def by_duckdb_over_arrow(lake: Path) -> Summary:
    journal = DeltaTable(str(lake / "journal")).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("journal", journal)
        found = connection.execute(
            "SELECT universe, world, count(*), sum(height)::BIGINT FROM journal GROUP BY ALL"
        ).fetchall()
    return {(universe, world): (rows, heights) for universe, world, rows, heights in found}


def by_polars(lake: Path) -> Summary:
    journal = polars.scan_delta(str(lake / "journal"))
    found = journal.group_by("universe", "world").agg(polars.len().alias("rows"), polars.col("height").sum()).collect()
    return {(row["universe"], row["world"]): (row["rows"], row["height"]) for row in found.to_dicts()}


@pytest.mark.parametrize("read", [by_duckdb, by_duckdb_over_arrow, by_polars])
def test_duckdb_and_polars_read_the_same_rows_as_spark(
    read: Callable[[Path], Summary], by_spark: Summary, lake: Path
) -> None:
    assert {universe for universe, _ in by_spark} == {"main", "other"}
    assert all(heights == rows * (rows - 1) // 2 for rows, heights in by_spark.values())  # Each height, once.
    assert read(lake) == by_spark


def test_every_table_has_the_same_row_count_in_other_readers(lake: Path) -> None:
    written = {name: table for name in TABLES if (table := Lake(str(lake)).table(TABLES[name])).exists}
    assert {"journal", "segments", "activity"} <= set(written)
    for name, table in written.items():
        if table.count():
            assert polars.read_delta(str(lake / name)).height == table.count()
            (rows,) = duckdb.execute("SELECT count(*) FROM read_parquet(?)", [table.files()]).fetchone() or (None,)
            assert rows == table.count()


def test_columns_have_the_schema_types_in_other_readers(lake: Path) -> None:
    found = polars.read_delta(str(lake / ACTIVITY.name))
    assert set(found.columns) == set(ACTIVITY.schema.names)
    assert found.schema["logged_at"] == polars.Datetime("us", "UTC")  # Delta has microsecond timestamps only.
    assert found["day"].dtype == polars.Date
    assert (found["logged_at"].dt.date() == found["day"]).all()
