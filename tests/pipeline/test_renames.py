"""A lake that version 1 of its tables wrote, with the old names of columns, is read and brought up to date."""

import runpy
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import formats
from fastness.layers import queues
from fastness.pipeline import jobs
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import ingest
from fastness.pipeline.lake import Lake, LakeTable, sql_views
from fastness.pipeline.lake.watermarks import REWRITES
from fastness.pipeline.schemas import TABLES

planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))
GOLDEN = Path(__file__).parents[1] / "golden" / "lake-version-1.tar.xz"  # A plane and its lake.
RENAMED = [table for table in TABLES.values() if table.renamed]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    with RocksDatabase(tmp_path / "data" / "kv") as database:
        assert database.read(queues.names, "main", after="", limit=1) == [], (
            "without queues, format 1 is the same as format 2"
        )
        database.transact(formats.record)
    settings = tmp_path / "data" / "fastness.json"
    settings.write_text(settings.read_text().replace('"format":1', f'"format":{formats.FORMAT}'))
    return Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))


def stored_names(config: Config, name: str) -> set[str]:
    return {field.name for field in DeltaTable(f"{config.lake}/{name}").schema().fields}


def old_rows(config: Config) -> dict[str, list[str]]:
    """The rows of the old tables, read without Fastness, with their new names."""
    found = {}
    for table in RENAMED:
        new = {old: name for name, old in table.renamed.items()}
        added = dict.fromkeys(table.schema.names)  # Columns that later versions have added are null.
        rows = DeltaTable(f"{config.lake}/{table.name}").to_pyarrow_table().to_pylist()
        named = [added | {new.get(name, name): value for name, value in row.items()} for row in rows]
        found[table.name] = sorted(str(sorted(row.items())) for row in named)
    return found


def rows(config: Config) -> dict[str, list[str]]:
    lake = Lake(config.lake)
    return {
        table.name: sorted(str(sorted(row.items())) for row in lake.table(table).rows().to_pylist())
        for table in RENAMED
    }


def by_name(config: Config) -> JobResult:
    return jobs.run("ingest", None, config)


def directly(config: Config) -> JobResult:
    return ingest.run(None, config)


@pytest.mark.parametrize("run", [by_name, directly])
def test_old_lake_is_read_and_then_rewritten(config: Config, run: Callable[[Config], JobResult]) -> None:
    before = old_rows(config)
    assert all(before.values())
    lake = Lake(config.lake)
    watermarks = {table.name: dict(lake.table(table).watermarks()) for table in RENAMED}
    assert all(lake.table(table).has_old_names for table in RENAMED)
    assert rows(config) == before
    assert lake.table(TABLES["activity"]).rows(["logged_at"], pc.field("n") == 0).num_rows == 4
    (gap,) = lake.table(TABLES["quarantine"]).rows(where=pc.field("table_name") == "journal").to_pylist()
    assert (gap["start"], gap["last"]) == (0, 31)

    first = run(config)
    assert (first.rows["journal"], first.rows["activity"], first.rows["quarantine"]) == (0, 0, 2)
    planes.extend(Path(config.data.removeprefix("dir:")), ["world-0001"], 5)
    planes.leave_log(Path(config.data.removeprefix("dir:")), 3, session="later")
    second = run(config)
    assert (second.rows["journal"], second.rows["activity"]) == (5, 3)
    written = RENAMED if run is by_name else [TABLES["activity"]]
    for table in written:
        assert stored_names(config, table.name) == set(table.schema.names)
        found = lake.table(table)
        assert not found.has_old_names
        kept = {name: value for name, value in watermarks[table.name].items() if name != REWRITES}
        assert kept.items() <= found.watermarks().items()
    after = rows(config)
    assert {name: set(before[name]) - set(after[name]) for name in before} == {name: set() for name in before}
    assert len(after["activity"]) == len(before["activity"]) + 3


def test_rename_that_was_killed_is_completed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*args: Any, **options: Any) -> None:
        raise Killed

    before = rows(config)
    for at in ("_commit", "_upgrade"):  # Before the commit of the new files, and before the new version.
        with monkeypatch.context() as patch:
            patch.setattr(LakeTable, at, die)
            with pytest.raises(Killed):
                by_name(config)
        assert rows(config) == before
    by_name(config)
    assert rows(config) == before
    for table in RENAMED:
        delta = DeltaTable(f"{config.lake}/{table.name}")
        assert delta.metadata().configuration["fastness.schema"] == str(table.version)
        assert stored_names(config, table.name) == set(table.schema.names)


def test_spark_reads_old_names_and_has_views_of_them(spark: SparkSession, config: Config) -> None:
    lake = Lake(config.lake)
    counts = {name: lake.table(table).count() for name, table in TABLES.items()}
    for is_renamed in (False, True):
        if is_renamed:
            by_name(config)
        created = sql_views.create(spark, lake)
        assert set(created) == {*TABLES, *(f"{table.name}_v1" for table in RENAMED)}
        union = " union all ".join(f"select '{name}' as name, count(*) as rows from {name}" for name in created)
        found = {row["name"]: row["rows"] for row in spark.sql(union).collect()}
        assert {name: found[name] for name in TABLES} == counts
        assert {name: found[f"{name}_v1"] for name in (table.name for table in RENAMED)} == {
            table.name: counts[table.name] for table in RENAMED
        }
        query = "select a.logged_at = b.at as same from activity a join activity_v1 b using (file, n)"
        assert [row["same"] for row in spark.sql(query).collect()] == [True] * counts["activity"]
        (row,) = spark.sql("select start, `end`, `table` from quarantine_v1 where `table` = 'journal'").collect()
        assert tuple(row) == (0, 31, "journal")
