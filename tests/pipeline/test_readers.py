"""The lake is everybody's: DuckDB and polars read from it what Spark reads."""

from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import duckdb
import polars
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession, functions

from holdfast.pipeline import jobs
from holdfast.pipeline.config import Config
from holdfast.pipeline.lake import Lake
from holdfast.pipeline.schemas import ACTIVITY, JOURNAL, TABLES

planes = SimpleNamespace(**run_path(str(Path(__file__).with_name("planes.py"))))

# Rows of a world, with the sum of their heights: what is missing or doubled shows in one of them.
Answer = dict[tuple[str, str], tuple[int, int]]


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of two universes that was written in two runs, so that its tables have several files."""
    folder = tmp_path_factory.mktemp("readers")
    data, lake = folder / "data", folder / "lake"
    built = planes.build(data, worlds=4, entries=150, activity=40, messages=60)
    planes.build(data, worlds=2, entries=80, universe="other")
    config = Config(data=f"dir:{data}", lake=str(lake))
    jobs.run("ingest", spark, config)
    planes.extend(data, built.worlds, 20)
    jobs.run("ingest", spark, config)
    return lake


def by_spark(spark: SparkSession, lake: Path) -> Answer:
    rows = Lake(str(lake)).table(JOURNAL).read(spark).groupBy("universe", "world")
    found = rows.agg(functions.count("*").alias("rows"), functions.sum("height").alias("heights")).collect()
    return {(row["universe"], row["world"]): (row["rows"], row["heights"]) for row in found}


def by_duckdb(lake: Path) -> Answer:
    files = DeltaTable(str(lake / "journal")).file_uris()
    found = duckdb.execute(
        """
        SELECT universe, world, count(*), sum(height)::BIGINT
        FROM read_parquet(?, hive_partitioning = true) GROUP BY ALL
        """,
        [files],
    ).fetchall()
    return {(universe, world): (rows, heights) for universe, world, rows, heights in found}


def by_duckdb_over_arrow(lake: Path) -> Answer:
    journal = DeltaTable(str(lake / "journal")).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("journal", journal)
        found = connection.execute(
            "SELECT universe, world, count(*), sum(height)::BIGINT FROM journal GROUP BY ALL"
        ).fetchall()
    return {(universe, world): (rows, heights) for universe, world, rows, heights in found}


def by_polars(lake: Path) -> Answer:
    journal = polars.scan_delta(str(lake / "journal"))
    found = journal.group_by("universe", "world").agg(polars.len().alias("rows"), polars.col("height").sum()).collect()
    return {(row["universe"], row["world"]): (row["rows"], row["height"]) for row in found.to_dicts()}


@pytest.mark.parametrize("read", [by_duckdb, by_duckdb_over_arrow, by_polars])
def test_others_read_what_spark_reads(read: Callable[[Path], Answer], spark: SparkSession, lake: Path) -> None:
    expected = by_spark(spark, lake)
    assert {universe for universe, _ in expected} == {"main", "other"}
    assert all(heights == rows * (rows - 1) // 2 for rows, heights in expected.values())  # Each height, once.
    assert read(lake) == expected


def test_every_table_has_for_others_as_many_rows_as_for_us(lake: Path) -> None:
    written = {name: table for name in TABLES if (table := Lake(str(lake)).table(TABLES[name])).exists}
    assert {"journal", "segments", "activity"} <= set(written)
    for name, table in written.items():
        if table.count():
            assert polars.read_delta(str(lake / name)).height == table.count()
            (rows,) = duckdb.execute("SELECT count(*) FROM read_parquet(?)", [table.files()]).fetchone() or (None,)
            assert rows == table.count()


def test_columns_have_for_others_the_types_of_the_schema(lake: Path) -> None:
    found = polars.read_delta(str(lake / ACTIVITY.name))
    assert set(found.columns) == set(ACTIVITY.schema.names)
    assert found.schema["at"] == polars.Datetime("us", "UTC")  # Delta knows microseconds and nothing else.
    assert found["day"].dtype == polars.Date
    assert (found["at"].dt.date() == found["day"]).all()
