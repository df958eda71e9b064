"""Tables of the lake: atomic commits, watermarks, compaction and vacuum."""

import inspect
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
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

from fastness.errors import DamagedDatabase, InvalidUrl, PathUnusable, SchemaMismatch, TransactionConflict, Unreachable
from fastness.pipeline import tasks
from fastness.pipeline.config import Config
from fastness.pipeline.jobs import vacuum
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import (
    Lake,
    LakeTable,
    Move,
    compaction,
    files,
    fingerprints,
    removal,
    staging,
    watermark_files,
)
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, TABLES
from tests.support.forked import start_python
from tests.support.waiting import exit_code


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


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.rotating)])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    if request.param == "folder":
        return Lake(str(tmp_path / "lake"))
    return Lake(f"s3://lake/{tmp_path.name}", request.getfixturevalue("s3"))


# Commits that race are decided by the store, so each run tests them on both.
on_both_stores = pytest.mark.parametrize("lake", ["folder", "s3"], indirect=True)


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


@on_both_stores
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


@on_both_stores
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
    assert len(found.watermarks()) == 61
    transactions = pq.read_table(checkpoint, columns=["txn"]).column("txn").drop_null().to_pylist()
    assert [each["appId"] for each in transactions] == ["watermarks"]


def watermark_chain(table: LakeTable) -> list[watermark_files.WatermarkFile]:
    """The files with the watermarks of a table, the newest first."""
    return list(watermark_files.chain(table.location, table.newest_watermark_file()))


def test_a_commit_writes_the_watermarks_that_it_moves(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    every = {f"journal/main/world-{n:04}": Move(0, fingerprints.of_bytes(b"%d" % n)) for n in range(2_000)}
    table.append([], every)
    expected, lengths = {name: move.target for name, move in every.items()}, list[int]()
    for n in range(40):
        name = f"journal/main/world-{n:04}"
        table.append([], {name: Move(expected[name], 0), "journal/main/new": Move(n, n + 1)})
        expected |= {name: 0, "journal/main/new": n + 1}
        newest, *_ = chain = watermark_chain(table)
        assert newest.is_base or newest.values == {name: 0, "journal/main/new": n + 1}
        lengths.append(len(chain))
    assert lengths == [*range(2, 17), *range(1, 17), *range(1, 10)]
    assert watermark_chain(table)[-1].values.keys() == {name for name, value in expected.items() if value} | {
        f"journal/main/world-{n:04}" for n in range(32, 40)
    }
    assert Lake(str(tmp_path)).table(JOURNAL).watermarks() == table.watermarks()
    assert {name: value for name, value in table.watermarks().items() if value} == {
        name: value for name, value in expected.items() if value
    }
    table.append([], {name: Move(value, value + 1) for name, value in expected.items()})
    assert len(watermark_chain(table)) == 1  # Larger than all that were there.


_WRITER = """
import sys
from fastness.errors import TransactionConflict
from fastness.pipeline.lake import Lake, Move
from fastness.pipeline.schemas import JOURNAL

table, own = Lake(sys.argv[1]).table(JOURNAL), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for n in range(12):
    table.append_rows(entries("main", own, range(n, n + 1)), {f"journal/main/{own}": Move(n, n + 1)})
    while True:  # Both writers add to this world.
        height = table.watermark("journal/main/shared")
        try:
            table.append_rows(
                entries("main", "shared", range(height, height + 1)),
                {"journal/main/shared": Move(height, height + 1)},
            )
            break
        except TransactionConflict:
            table.refresh()
"""


def test_two_processes_that_commit_at_once_lose_no_move_and_repeat_no_row(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.table(JOURNAL).append([], {"journal/main/ada": Move(0, 0)})
    code = f"import pyarrow as pa\n{inspect.getsource(entries)}\n{_WRITER}"  # Without the other imports of this file.
    command = ["-c", code, str(tmp_path / "lake")]
    writers = [
        start_python([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("ada", "bob")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [exit_code(writer) for writer in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    found = lake.table(JOURNAL)
    expected = {"ada": 12, "bob": 12, "shared": 24}
    assert {world: heights(found, world) for world in expected} == {
        world: list(range(count)) for world, count in expected.items()
    }
    assert found.watermarks() == {f"journal/main/{world}": count for world, count in expected.items()}


def test_lost_race_is_retried_only_for_other_watermarks(lake: Lake) -> None:
    first, second = lake.table(JOURNAL), lake.table(JOURNAL)
    others = {str(n): fingerprints.of_bytes(b"%d" % n) for n in range(500)}  # So a base is larger than later files.
    first.append([], {name: Move(0, value) for name, value in {**others, "a": 1, "b": 1}.items()})
    second.refresh()
    first.append([], {"a": Move(1, 2)})
    first.append([], {"a": Move(2, 1)})  # It has its old value again, but it has moved.
    with pytest.raises(TransactionConflict):
        second.append([], {"a": Move(1, 7)})
    for n in range(1, 5):
        first.append([], {"a": Move(n, n + 1)})
    second.append([], {"b": Move(1, 2)})
    assert lake.table(JOURNAL).watermarks() == second.watermarks() == {**others, "a": 5, "b": 2}


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_damaged_watermarks_are_a_typed_error(tmp_path: Path, damage: str) -> None:
    lake = Lake(str(tmp_path))
    table = lake.table(JOURNAL)
    table.append([], {f"w{n}": Move(0, 1) for n in range(50)})
    table.append([], {"w0": Move(1, 2)})
    base = tmp_path / "journal" / watermark_files.path_of(watermark_chain(table)[-1].fingerprint)
    data = base.read_bytes()
    if damage == "missing":
        base.unlink()
    else:
        base.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    with pytest.raises(DamagedDatabase, match=rf"_watermarks/{base.name}.*restore the lake, or delete it"):
        lake.table(JOURNAL).watermarks()
    with pytest.raises(DamagedDatabase):
        lake.table(JOURNAL).append([], {"w1": Move(1, 2)})


def test_vacuum_keeps_the_watermarks_of_recent_versions(tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    folder, log = tmp_path / "journal" / "_watermarks", tmp_path / "journal" / "_delta_log"

    def commit(hours: int, moves: dict[str, Move]) -> str:
        """Commit, as if so many hours ago; returns the name of the new file."""
        before = set(folder.iterdir()) if folder.exists() else set()
        table.append([], moves)
        (new,) = set(folder.iterdir()) - before
        at = time.time() - hours * 3_600
        for path in (new, log / f"{table.version:020}.json"):
            os.utime(path, (at, at))
        return new.name

    many = {f"w{n}": Move(0, 1) for n in range(500)}
    old_base = commit(300, many)
    replaced = commit(250, {name: Move(1, 2) for name in many})
    increment = commit(200, {"w0": Move(2, 3)})
    orphans = [f"{n:015x}.parquet" for n in (1, 2)]
    for orphan, hours in zip(orphans, (200, 1), strict=True):
        (folder / orphan).write_bytes(b"left by a lost race")
        os.utime(folder / orphan, (time.time() - hours * 3_600,) * 2)
    current = commit(1, {name: Move(3 if name == "w0" else 2, 4) for name in many})
    assert len(watermark_chain(table)) == 1
    DeltaTable(str(tmp_path / "journal")).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(list(folder.iterdir())) == 6
    assert {Path(path).name for path in compaction.vacuum(table, keep_hours=168)} == {old_base, orphans[0]}
    assert {path.name for path in folder.iterdir()} == {replaced, increment, orphans[1], current}
    assert len(list(watermark_files.chain(table.location, int(increment.partition(".")[0], 16)))) == 2
    compaction.vacuum(table, keep_hours=0)
    assert {path.name for path in folder.iterdir()} == {current}
    assert set(Lake(str(tmp_path)).table(JOURNAL).watermarks().values()) == {4}


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


@on_both_stores
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


@pytest.mark.parametrize(
    ("version", "advice"),
    [(JOURNAL.version + 1, "upgrade Fastness"), (JOURNAL.version - 1, "ingest into a new lake, or use the version of")],
    ids=["newer", "older"],
)
def test_table_of_another_version_is_refused(lake: Lake, version: int, advice: str) -> None:
    other = msgspec.structs.replace(JOURNAL, version=version)
    lake.table(other).append_rows(entries("main", "ada", range(1)))
    with pytest.raises(
        SchemaMismatch, match=f"has version {version}, this Fastness supports {JOURNAL.version}; {advice}"
    ):
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


# Partitions by day.


FIRST_DAY = date(2026, 11, 1)


def lines(days: int, kinds: tuple[str, ...] = ("queues", "mail"), universe: str = "main") -> pa.Table:
    """Two lines of each kind for each day, sorted as in files; the last line has no time."""
    start = datetime.combine(FIRST_DAY, datetime.min.time(), UTC)
    times: list[datetime | None] = [start + timedelta(days=day, hours=n) for day in range(days) for n in (0, 23)]
    rows = [
        {
            "universe": universe,
            "session": "s",
            "kind": kind,
            "file": f"{kind}-1",
            "n": n,
            "logged_at": at,
            "day": at and at.date(),
            "record": "{}",
            "redacted": False,
        }
        for kind in sorted(kinds)
        for n, at in enumerate([*times, *([None] if kind == max(kinds) else [])])
    ]
    return pa.Table.from_pylist(rows, ACTIVITY.schema)


def by_key(rows: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.sort_by([("kind", "ascending"), ("n", "ascending")]).to_pylist()
    return found


def test_session_logs_have_a_file_for_each_day(lake: Lake) -> None:
    table = lake.table(ACTIVITY)
    for _ in range(2):
        table.append_rows(lines(30))
    days = [FIRST_DAY + timedelta(days=n) for n in range(30)]
    found = lake.table(ACTIVITY)
    assert len(found.entries()) == 2 * 31  # The last folder is that of lines without a time.
    assert {file.partitions["day"] for file in found.entries()} == {*map(str, days), None}
    for file in found.entries():
        assert file.path.startswith(f"universe=main/day={file.partitions['day'] or '__HIVE'}")
    assert by_key(found.rows()) == by_key(pa.concat_tables([lines(30)] * 2))
    some = [file for file in found.entries() if file.may_hold(day=days[3])]
    assert sorted(str(file.partitions["day"]) for file in some) == ["2026-11-04", "2026-11-04", "None", "None"]
    assert compaction.compact(None, found, files_min=2) == (62, 31)
    assert removal.remove_where(found, lambda rows: pc.equal(rows.column("day"), days[3]).fill_null(False)) == 8
    again = lake.table(ACTIVITY)
    assert len(again.entries()) == 30
    assert again.count() == 2 * (30 * 4 + 1) - 8
    assert days[3] not in again.rows(["day"]).column("day").to_pylist()


def test_writer_bounds_its_open_files_and_buffered_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.pipeline.lake.files.LAKE_WRITERS_MAX", 4)
    monkeypatch.setattr("fastness.pipeline.lake.files.LAKE_WRITER_BYTES", 1_000)
    table = Lake(str(tmp_path)).table(ACTIVITY)
    writer, opened, buffered = files.Writer(ACTIVITY, table.location), 0, 0
    for batch in files.sorted_batches(ACTIVITY, lines(30)):
        for n in range(batch.num_rows):
            writer.write(batch.slice(n, 1))
            opened = max(opened, len(writer._open))
            buffered = max(buffered, sum(file.buffered_bytes for file in writer._open.values()))
    table.append(writer.close())
    assert opened == 4
    assert buffered <= 1_000
    assert table.count() == 121
    assert len(table.entries()) == 2 * 30 + 1


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


@pytest.mark.always
def test_error_on_an_executor_is_raised_on_the_driver(spark: SparkSession) -> None:
    def work(task: bytes) -> bytes:  # A function of the module would make the executor import this file.
        raise Unreachable(f"{task.decode()} does not answer")

    with pytest.raises(Unreachable, match=r"^the store does not answer$"):
        list(tasks.execute(spark, work, [b"the store"]))


def test_compaction_on_executors(spark: SparkSession, tmp_path: Path) -> None:
    table = Lake(str(tmp_path)).table(JOURNAL)
    for n in range(4):
        table.append_rows(entries("main", "ada", range(n, n + 1)))
    assert compaction.compact(spark, table) == (4, 1)
    assert heights(table, "ada") == [0, 1, 2, 3]


@pytest.mark.always
def test_every_table_can_be_created_and_read(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    for table in TABLES.values():
        found = lake.table(table)
        found.append_rows(table.schema.empty_table(), {"a": Move(0, 1)})
        assert lake.table(table).rows().schema == table.schema
        assert found.read(spark).schema.names == table.schema.names
