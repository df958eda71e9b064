"""Tables of the lake: atomic commits, watermarks, compaction and vacuum."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession

from holdfast.errors import InvalidUrl, PathUnusable, SchemaMismatch, TransactionConflict, Unreachable
from holdfast.pipeline import tasks
from holdfast.pipeline.config import Config
from holdfast.pipeline.jobs import vacuum
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake import Lake, LakeTable, Move, compaction, files, staging
from holdfast.pipeline.schemas import ENTITY_CHANGES, JOURNAL, TABLES, Table


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="lake")
    yield {"aws_endpoint": endpoint, "aws_region": "us-east-1", "aws_allow_http": "true", **keys}
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    if request.param == "folder":
        return Lake(str(tmp_path / "lake"))
    return Lake(f"s3://lake/{tmp_path.name}", request.getfixturevalue("s3"))


def entries(universe: str, world: str, heights: range) -> pa.Table:
    count = len(heights)
    return pa.table(
        {
            "universe": [universe] * count,
            "world": [world] * count,
            "height": list(heights),
            "kind": ["entry"] * count,
            "payload": [str(height) for height in heights],
            "raw": [height.to_bytes(8, "big") for height in heights],
            "hash": [f"{height:064x}" for height in heights],
            "segment": pa.nulls(count, pa.string()),
            "redacted": pa.nulls(count, pa.bool_()),
        },
        JOURNAL.schema,
    )


def heights(table: LakeTable, world: str) -> list[int]:
    found: list[int] = table.rows(["height"], pc.field("world") == world).column("height").to_pylist()
    return sorted(found)


def test_missing_table_is_empty(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    assert not table.exists
    assert table.files() == []
    assert table.rows().schema == JOURNAL.schema
    assert table.watermark("journal/main/ada") == 0
    assert table.count() == 0


def test_rows_and_watermarks_are_committed_together(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    table.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    again = lake.table(JOURNAL)
    assert heights(again, "ada") == [0, 1, 2, 3, 4]
    assert again.watermark("journal/main/ada") == 5
    assert again.count() == 5


@pytest.mark.parametrize("loss", ["all", "one", "truncated"])
def test_files_that_are_not_in_the_lake_are_not_committed(lake: Lake, loss: str) -> None:
    table = lake.table(JOURNAL)
    table.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    rows = pa.concat_tables([entries("main", "ada", range(5, 9)), entries("other", "bob", range(3))])
    added = files.write(JOURNAL, table.location, files.sorted_batches(JOURNAL, rows))
    assert len(added) == 2
    store = Stores(table.location.storage)(table.location.store_url)
    for file in added[: 2 if loss == "all" else 1]:
        data = store.get(file.path)
        store.delete(file.path)
        if loss == "truncated":
            store.put(file.path, data[:-1])
    with pytest.raises(PathUnusable, match="driver and all executors share") as caught:
        table.append(added, {"journal/main/ada": Move(5, 9)})
    assert f"{2 if loss == 'all' else 1} of 2 new files" in str(caught.value)
    again = lake.table(JOURNAL)
    assert (again.count(), again.watermark("journal/main/ada")) == (5, 5)
    assert heights(again, "ada") == list(range(5))


def test_commit_from_an_outdated_watermark_writes_nothing(lake: Lake) -> None:
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    first.append_rows(entries("main", "bob", range(1)), {"journal/main/bob": Move(0, 1)})
    second.refresh()
    first.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    with pytest.raises(TransactionConflict):  # Not refreshed: delta-rs detects the conflict.
        second.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    second.refresh()
    with pytest.raises(TransactionConflict, match="at 5, not 0"):  # Refreshed, with an outdated plan.
        second.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    assert lake.table(JOURNAL).count() == 6
    second.append_rows(entries("main", "ada", range(5, 7)), {"journal/main/ada": Move(5, 7)})
    assert heights(lake.table(JOURNAL), "ada") == list(range(7))


def test_commits_of_different_watermarks_do_not_conflict(lake: Lake) -> None:
    lake.table(JOURNAL).append_rows(entries("main", "zoe", range(1)))
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    first.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    second.append_rows(entries("main", "bob", range(5)), {"journal/main/bob": Move(0, 5)})
    assert lake.table(JOURNAL).count() == 11


def test_concurrent_creation_makes_one_table(lake: Lake) -> None:
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    first.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    with pytest.raises(TransactionConflict):
        second.append_rows(entries("main", "ada", range(5)), {"journal/main/ada": Move(0, 5)})
    assert lake.table(JOURNAL).count() == 5


def test_watermarks_survive_checkpoints_and_log_cleanup(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    table = lake.table(JOURNAL)
    for n in range(60):  # A checkpoint is written after 50.
        table.append([], {"journal/main/ada": Move(n, n + 1), f"journal/main/w{n}": Move(0, 7)})
    log = tmp_path / "journal" / "_delta_log"
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    for commit in log.glob("*.json"):
        if commit.stem < checkpoint.name[:20]:
            commit.unlink()
    found = lake.table(JOURNAL)
    assert found.watermark("journal/main/ada") == 60
    delta = DeltaTable(str(tmp_path / "journal"))
    assert {name: delta.transaction_version(name) for name in found.watermarks()} == found.watermarks()
    assert len(found.watermarks()) == 61


def test_watermarks_are_read_incrementally(lake: Lake) -> None:
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    first.append([], {"a": Move(0, 1)})
    second.refresh()
    assert second.watermarks() == {"a": 1}
    first.append([], {"a": Move(1, 2), "b": Move(0, 1)})
    assert second.watermarks() == {"a": 1}
    second.refresh()
    assert second.watermarks() == {"a": 2, "b": 1}


def test_scan_skips_files_by_statistics(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    table.append_rows(entries("main", "ada", range(10)))
    table.append_rows(entries("main", "ada", range(10, 20)))
    table.append_rows(entries("other", "ada", range(10)))
    assert sum(rows.num_rows for rows in table.scan(["height"], universe="main")) == 20
    (found,) = table.scan(["height"], pc.field("height") == 12, universe="main", world="ada", height=12)
    assert found.column("height").to_pylist() == [12]
    assert not list(table.scan(world="zoe"))


def test_overwrite_replaces_all_or_the_given_universes(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    table.overwrite(entries("main", "ada", range(5)).to_batches())
    table.overwrite([*entries("main", "ada", range(3)).to_batches(), *entries("b", "bob", range(2)).to_batches()])
    assert table.count() == 5
    table.overwrite(entries("b", "bob", range(9)).to_batches(), universes=["b"])
    assert sorted((file.universe, file.rows) for file in lake.table(JOURNAL).entries()) == [("b", 9), ("main", 3)]
    table.overwrite([])
    assert lake.table(JOURNAL).count() == 0


def test_concurrent_overwrites_of_an_empty_table_conflict(lake: Lake) -> None:
    """Without a conflict, the rows of both would be kept: there is no file that both remove."""
    for rows in (range(6), range(9)):
        first, second = lake.table(JOURNAL), lake.table(JOURNAL)
        first.overwrite(entries("main", "ada", rows).to_batches())
        with pytest.raises(TransactionConflict):
            second.overwrite(entries("main", "ada", range(7)).to_batches())
        assert lake.table(JOURNAL).count() == len(rows)
        lake.table(JOURNAL).overwrite([])


def test_concurrent_overwrites_conflict(lake: Lake) -> None:
    lake.table(JOURNAL).append_rows(entries("main", "ada", range(5)))
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    first.overwrite(entries("main", "ada", range(6)).to_batches())
    with pytest.raises(TransactionConflict):
        second.overwrite(entries("main", "ada", range(7)).to_batches())
    assert lake.table(JOURNAL).count() == 6


def test_compaction_merges_small_files_and_sorts_them(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    for n in range(5):
        table.append_rows(entries("main", "bob", range(n, n + 1)), {"journal/main/bob": Move(n, n + 1)})
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    table.append_rows(entries("few", "zoe", range(3)))
    before = table.rows().sort_by([("universe", "ascending"), ("world", "ascending"), ("height", "ascending")])
    assert compaction.compact(None, table) == (10, 1)
    found = lake.table(JOURNAL)
    assert len(found.files()) == 2
    (main,) = [file for file in found.entries() if file.universe == "main"]
    assert found.rows_of(main) == before.filter(pc.field("universe") == "main")
    assert found.rows().num_rows == before.num_rows
    assert found.watermark("journal/main/bob") == 5
    assert compaction.compact(None, found) == (0, 0)


def test_second_of_two_concurrent_compactions_does_nothing(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    for n in range(5):
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    first, second, third = lake.table(JOURNAL), lake.table(JOURNAL), lake.table(JOURNAL)
    third.append_rows(entries("main", "ada", range(5, 6)))
    assert compaction.compact(None, first) == (5, 1)
    assert compaction.compact(None, second) == (0, 0)
    assert heights(lake.table(JOURNAL), "ada") == list(range(6))


def test_append_planned_before_a_compaction_succeeds(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    for n in range(5):
        table.append_rows(entries("main", "ada", range(n, n + 1)), {"journal/main/ada": Move(n, n + 1)})
    slow = lake.table(JOURNAL)
    assert compaction.compact(None, table) == (5, 1)
    slow.append_rows(entries("main", "ada", range(5, 6)), {"journal/main/ada": Move(5, 6)})
    assert heights(lake.table(JOURNAL), "ada") == list(range(6))


def test_vacuum_deletes_old_orphans_and_replaced_files(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    table = lake.table(JOURNAL)
    for n in range(4):
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    replaced = table.files()
    compaction.compact(None, table)
    rows = entries("main", "bob", range(3))
    (young,) = files.write(JOURNAL, table.location, rows.to_batches())
    (orphan,) = files.write(JOURNAL, table.location, rows.to_batches())
    two_hours_ago = time.time() - 7_200
    os.utime(tmp_path / "journal" / orphan.path, (two_hours_ago, two_hours_ago))
    assert compaction.vacuum(table, keep_hours=1) == [orphan.path]
    assert (tmp_path / "journal" / young.path).exists()
    assert all(Path(path).exists() for path in replaced)
    table.append([young])  # Its writer was only slow.
    compaction.vacuum(table, keep_hours=0)
    assert not any(Path(path).exists() for path in replaced)
    assert heights(lake.table(JOURNAL), "ada") == [0, 1, 2, 3]
    assert heights(lake.table(JOURNAL), "bob") == [0, 1, 2]


def test_vacuum_job_compacts_cleans_and_deletes_stale_staging(lake: Lake) -> None:
    table = lake.table(JOURNAL)
    for n in range(4):
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    with staging.temporary_folder(lake.location) as mine:
        stores = Stores(lake.location.storage)
        stores.staging(mine.store_url).put("hot/a.log", b"a")
        stale = lake.location.child("_staging/20200101T000000-0123456789ab")
        stores.staging(stale.store_url).put("hot/b.log", b"b")
        result = vacuum.run(None, Config(data="dir:nowhere", lake=lake.location.url, storage=lake.location.storage))
        assert result.notes == [
            "journal: 4 small files became 1",
            "1 stale staging folders were removed",
        ]
        assert stores(mine.store_url).get("hot/a.log") == b"a"
        assert stores(stale.store_url).list() == []
    assert stores(mine.store_url).list() == []


def test_table_of_a_newer_version_is_rejected(lake: Lake) -> None:
    newer = msgspec.structs.replace(JOURNAL, version=3)
    lake.table(newer).append_rows(entries("main", "ada", range(1)))
    with pytest.raises(SchemaMismatch, match="has version 3, this Holdfast supports 2; upgrade"):
        lake.table(JOURNAL)


def test_next_commit_adds_new_columns_to_an_older_table(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))  # delta-rs alters tables while it holds the GIL, which moto needs to respond.
    lake.table(JOURNAL).append_rows(entries("main", "ada", range(2)), {"journal/main/ada": Move(0, 2)})
    newer = Table("journal", JOURNAL.version + 1, JOURNAL.schema.append(pa.field("note", pa.string())), JOURNAL.order)
    table = lake.table(newer)
    assert table.rows().column("note").to_pylist() == [None, None]
    rows = entries("main", "ada", range(2, 3)).append_column("note", pa.array(["new"]))
    table.append_rows(rows, {"journal/main/ada": Move(2, 3)})
    found = lake.table(newer)
    assert sorted(found.rows().column("note").to_pylist(), key=str) == [None, None, "new"]
    assert found.watermark("journal/main/ada") == 3
    with pytest.raises(SchemaMismatch):
        lake.table(JOURNAL)


def test_files_are_sorted_with_statistics_and_without_partition_columns(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    rows = pa.concat_tables([entries("main", "bob", range(70_000)), entries("main", "ada", range(10))])
    table.append_rows(rows)
    (path,) = table.files()
    file = pq.ParquetFile(path)
    assert "universe" not in file.schema_arrow.names
    assert file.metadata.num_row_groups == 2
    first = file.metadata.row_group(0)
    assert (first.column(0).statistics.min, first.column(0).statistics.max) == ("ada", "bob")
    assert first.column(0).compression == "ZSTD"
    assert first.num_rows <= 65_536
    (entry,) = table.entries()
    assert (entry.low, entry.high) == ({"world": "ada", "height": 0}, {"world": "bob", "height": 69_999})


def test_each_universe_gets_its_own_file(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    mixed = pa.concat_tables([entries(f"u{n % 50:02}", "ada", range(n, n + 1)) for n in range(100)])
    written = files.write(JOURNAL, table.location, mixed.to_batches(max_chunksize=7), is_sorted=False)
    table.append(written)
    assert {file.universe for file in table.entries()} == {f"u{n:02}" for n in range(50)}
    assert heights(table, "ada") == list(range(100))


def test_times_and_lists_round_trip(lake: Lake) -> None:
    table = lake.table(ENTITY_CHANGES)
    row: dict[str, Any] = {
        "universe": "main",
        "kind": "agent",
        "id": "7",
        "version": 1,
        "changed_at": 1_763_181_735_123,
        "durability": "critical",
        "fields": "{}",
        "removed": ["a", "b"],
        "deleted": False,
        "redacted": False,
    }
    columns = {name: pa.array([value]).cast(ENTITY_CHANGES.schema.field(name).type) for name, value in row.items()}
    rows = pa.table(columns, ENTITY_CHANGES.schema)
    table.append_rows(rows)
    assert lake.table(ENTITY_CHANGES).rows() == rows


@pytest.mark.parametrize("url", ["", "ftp://somewhere", "http://host/lake"])
def test_invalid_lake_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidUrl):
        Lake(url)


def test_error_for_an_unwritable_lake_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file")
    with pytest.raises(PathUnusable, match=r"lake/journal"):
        Lake(str(tmp_path / "lake")).table(JOURNAL).append([], {"a": Move(0, 1)})


def test_tasks_are_balanced_by_their_size() -> None:
    groups = tasks.balanced([5, 1, 1, 1, 1, 1], 2)
    assert groups == [[0], [1, 2, 3, 4, 5]]
    assert tasks.balanced([], 4) == []
    assert sorted(n for group in tasks.balanced(list(range(100)), 7) for n in group) == list(range(100))


def test_spark_reads_committed_rows_and_writes_files(spark: SparkSession, lake: Lake) -> None:
    table = lake.table(JOURNAL)
    assert table.read(spark).collect() == []
    assert table.read(spark).schema.names == JOURNAL.schema.names
    table.append_rows(pa.concat_tables([entries("main", "ada", range(5)), entries("007", "bob", range(2))]))
    files.write(JOURNAL, table.location, entries("main", "orphan", range(9)).to_batches())
    found = table.read(spark)
    assert {(row.universe, row.world, row.height) for row in found.collect()} == {
        *(("main", "ada", n) for n in range(5)),
        ("007", "bob", 0),
        ("007", "bob", 1),
    }
    assert table.read(spark, universes=["007"]).count() == 2
    copied = Lake(f"{lake.location.url}-copy", lake.location.storage).table(JOURNAL)
    copied.overwrite(copied.write(found.coalesce(1)))
    keys = [("universe", "ascending"), ("world", "ascending"), ("height", "ascending")]
    assert copied.rows().sort_by(keys) == table.rows().sort_by(keys)


def _raise_unreachable(task: bytes) -> bytes:
    raise Unreachable(f"{task.decode()} does not answer")


def test_error_on_an_executor_is_raised_on_the_driver(spark: SparkSession) -> None:
    with pytest.raises(Unreachable, match=r"^the store does not answer$"):
        list(tasks.execute(spark, _raise_unreachable, [b"the store"]))


def test_compaction_on_executors(spark: SparkSession, tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    for n in range(4):
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    assert compaction.compact(spark, table) == (4, 1)
    assert heights(table, "ada") == [0, 1, 2, 3]


def test_every_table_can_be_created_and_read(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    for table in TABLES.values():
        found = lake.table(table)
        found.append_rows(table.schema.empty_table(), {"a": Move(0, 1)})
        assert lake.table(table).rows().schema == table.schema
        assert found.read(spark).schema.names == table.schema.names
