"""Ingest copies every row of the plane into the lake exactly once, in any number of runs and batches."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import cbor2
import pytest
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession

import fastness
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import SchemaMismatch, Unreachable
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import ingest_run, plans, task_payloads
from fastness.pipeline.jobs import ingest, reset
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake, compaction
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, SEGMENTS, TABLES
from fastness.pipeline.views import View, WorldView, manifests, open_view, shared_view
from fastness.runtime.activity import format as log_format
from fastness.testing.clock import ManualClock
from tests.pipeline import planes
from tests.support.http_server import serving


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    planes.copy(path, worlds=4, entries=200, messages=40, mails=20, entities=10, activity=20)
    return path


def config(plane: Path, **options: Any) -> Config:
    return Config(data=f"dir:{plane}", lake=str(plane.parent / "lake"), **options)


def journal(lake: Lake) -> dict[str, list[bytes]]:
    """The records of every world in the lake; fails if a height is duplicated or missing."""
    found: dict[str, list[bytes]] = {}
    order = [("universe", "ascending"), ("world", "ascending"), ("height", "ascending")]
    for row in lake.table(JOURNAL).rows(["universe", "world", "height", "raw"]).sort_by(order).to_pylist():
        records = found.setdefault(row["world"], [])
        assert row["height"] == len(records), row
        records.append(row["raw"])
    return found


def truth(plane: Path) -> dict[str, list[bytes]]:
    """The plane's records, read from a copy: opening a plane changes it, because mail expires and sessions begin."""
    copy = plane.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(plane, copy)
    return {world: records for world, records in planes.truth(copy).items() if records}


def opened(plane: Path, universe: str = "main") -> Any:
    return planes.opened(f"dir:{plane}", universe=universe, clock=ManualClock(planes.START_MS))


def assert_complete(plane: Path) -> None:
    """Check that the lake has every row of the plane exactly once."""
    lake = Lake(config(plane).lake)
    assert planes.digest(journal(lake)) == planes.digest(truth(plane))
    with open_view(config(plane)) as view:
        lines = [
            (file.id, line.n, bytes(line.record).decode())
            for file in view.logs("main")
            for _, line in log_format.lines(view.log_body(file))
            if line is not None
        ]
        changes = [(row.kind, row.id, row.version, row.at_ms) for row in view.entity_changes("main")]
        segments = [
            (world.name, segment.start, segment.end) for world in view.worlds("main") for segment in world.segments
        ]
    logged = lake.table(ACTIVITY).rows(["file", "n", "record"]).to_pylist()
    assert Counter((row["file"], row["n"], row["record"]) for row in logged) == Counter(lines)
    changed = lake.table(ENTITY_CHANGES).rows(["kind", "id", "version", "changed_at"]).to_pylist()
    assert Counter(
        (row["kind"], row["id"], row["version"], int(row["changed_at"].timestamp() * 1_000)) for row in changed
    ) == Counter(changes)
    judged = lake.table(SEGMENTS).rows(["world", "start", "last"]).to_pylist()
    assert Counter((row["world"], row["start"], row["last"]) for row in judged) == Counter(segments)


def row_counts(result: JobResult) -> dict[str, int]:
    return {name: rows for name, rows in result.rows.items() if rows}


def test_ingest_stores_every_row_once(plane: Path) -> None:
    first = ingest.run(None, config(plane))
    assert first.ok
    assert first.rows["journal"] == sum(map(len, truth(plane).values()))
    assert_complete(plane)
    again = ingest.run(None, config(plane))
    assert row_counts(again) == {}
    assert_complete(plane)


def test_rows_match_their_records(plane: Path) -> None:
    ingest.run(None, config(plane))
    rows = Lake(config(plane).lake).table(JOURNAL).rows()
    for row in rows.to_pylist():
        kind, value = cbor2.loads(row["raw"])
        assert row["kind"] == ("entry", "ingress", "snapshot", "baseline", "manifest")[kind]
        if isinstance(value, dict) and "n" in value:
            assert json.loads(row["payload"])["n"] == value["n"]
    hot = rows.filter(rows.column("segment").is_null())
    assert 0 < hot.num_rows < rows.num_rows


def test_second_ingest_adds_only_new_rows(plane: Path) -> None:
    ingest.run(None, config(plane))
    planes.extend(plane, ["world-0000", "world-0003"], 50)
    assert row_counts(ingest.run(None, config(plane))) == {"journal": 100}
    assert_complete(plane)


def test_new_segments_are_checked_without_duplicating_rows(plane: Path) -> None:
    ingest.run(None, config(plane))
    with opened(plane, "main") as plane_open:
        store = open_objects(f"dir:{plane / 'objects'}")
        assert planes.cut(plane_open, store, "world-0000", segment=32, margin=8) > 0
    result = ingest.run(None, config(plane))
    assert set(row_counts(result)) == {"segments"}
    assert_complete(plane)


@pytest.mark.parametrize("task_bytes", [pytest.param(1, marks=pytest.mark.thorough), 3_000])
def test_large_ingest_takes_several_commits(plane: Path, monkeypatch: pytest.MonkeyPatch, task_bytes: int) -> None:
    monkeypatch.setattr(ingest_run, "INGEST_TASK_BYTES", task_bytes)
    monkeypatch.setattr(plans, "INGEST_WORLD_ROWS", 50)
    monkeypatch.setattr(plans, "INGEST_CHUNK_BYTES", 1_000)
    monkeypatch.setattr(ingest_run, "pause", pytest.fail)  # A run does not conflict with itself.
    ingest.run(None, config(plane))
    assert len(Lake(config(plane).lake).table(JOURNAL).files()) > 4
    assert_complete(plane)
    planes.extend(plane, ["world-0000"], 120)
    ingest.run(None, config(plane))
    assert_complete(plane)


def test_ingest_reads_only_the_selected_universes(plane: Path) -> None:
    with opened(plane, "other") as plane_open:
        plane_open.world("elsewhere").create()
        plane_open.world("elsewhere").append([{"n": 1}], expected_head=0)
    ingest.run(None, config(plane, universes=("other",)))
    assert journal(Lake(config(plane).lake)).keys() == {"elsewhere"}
    ingest.run(None, config(plane))
    universes = {file.universe for file in Lake(config(plane).lake).table(JOURNAL).entries()}
    assert universes == {"main", "other"}


def test_task_writes_one_file_per_universe(plane: Path) -> None:
    for universe in ("u1", "u2"):
        with opened(plane, universe) as plane_open:
            for n in range(5):
                plane_open.world(f"w{n}").create()
                plane_open.world(f"w{n}").append([{"n": 1}], expected_head=0)
    ingest.run(None, config(plane))
    files = Lake(config(plane).lake).table(JOURNAL).entries()
    assert Counter(file.universe for file in files) == {"main": 1, "u1": 1, "u2": 1}


def test_growing_session_log_is_ingested_incrementally(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    with file.open("ab") as stream:
        for n in range(5, 9):
            stream.write(log_format.line(n, planes.START_MS + n, b'{"step":%d}' % n))
    result = ingest.run(None, config(plane))
    assert row_counts(result) == {"activity": 4}
    assert_complete(plane)


def test_rotated_session_log_is_not_ingested_twice(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    with opened(plane, "main") as plane_open:
        plane_open.activity.log("session-9", {"step": 1}, kind="metrics")
    assert not file.exists()
    result = ingest.run(None, config(plane))
    assert row_counts(result) == {"activity": 1}
    assert_complete(plane)


@pytest.fixture
def read_entries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the manifest entries that are read, each time as if by a new process."""
    found: list[str] = []

    def read(store: ObjectStore, path: str) -> bytes:
        if path.startswith(manifests.FOLDER):
            found.append(path)
        return get(store, path)

    get = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", read)
    monkeypatch.setattr(manifests, "MANIFESTS_CACHED_MAX", 0)
    return found


def test_nothing_new_reads_no_world_and_no_manifest(
    plane: Path, read_entries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = View.world
    ingest.run(None, config(plane))
    assert read_entries
    read_entries.clear()
    worlds: list[str] = []

    def noted(view: View, universe: str, name: str) -> WorldView | None:
        worlds.append(name)
        return world(view, universe, name)

    monkeypatch.setattr(View, "world", noted)
    versions = {table.name: Lake(config(plane).lake).table(table).version for table in (JOURNAL, SEGMENTS, ACTIVITY)}
    assert row_counts(ingest.run(None, config(plane))) == {}
    assert (worlds, read_entries) == ([], [])
    with open_view(config(plane)) as view:
        view.pin()
        assert read_entries == []
        assert len(list(view.logs("main"))) == len(set(read_entries)) > 0
    read_entries.clear()
    assert versions == {name: Lake(config(plane).lake).table(TABLES[name]).version for name in versions}
    planes.extend(plane, ["world-0002"], 3)
    with opened(plane) as plane_open:
        plane_open.activity.log("session-9", {"step": 1}, kind="metrics")
    assert row_counts(ingest.run(None, config(plane)))["journal"] == 3
    assert worlds == ["world-0002"]
    assert {path.rpartition("_metrics_")[0].rpartition("_")[2] for path in read_entries if "_metrics_" in path} == {
        "session-9"
    }
    assert_complete(plane)


def test_logs_that_were_rotated_after_their_ingest_are_read_once_more(
    plane: Path, read_entries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.pipeline.intake.log_ingest.INGEST_WHOLE_LOGS_MIN", 1)
    planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    with opened(plane):
        pass
    read_entries.clear()
    assert row_counts(ingest.run(None, config(plane))) == {}
    assert len([path for path in read_entries if "_crashed_metrics_" in path]) == 1
    read_entries.clear()
    assert row_counts(ingest.run(None, config(plane))) == {}
    assert read_entries == []
    assert_complete(plane)


@pytest.mark.parametrize("everything", [True, False])
def test_reset_logs_are_ingested_again(plane: Path, read_entries: list[str], everything: bool) -> None:
    before = row_counts(ingest.run(None, config(plane)))["activity"]
    chosen: dict[str, Any] = {"everything": True} if everything else {"sessions": ["session-1"]}
    removed = reset.run(None, config(plane), **chosen).rows["activity removed"]
    assert (removed == before, removed > 0) == (everything, True)
    assert row_counts(ingest.run(None, config(plane)))["activity"] == removed
    assert_complete(plane)
    read_entries.clear()
    assert row_counts(ingest.run(None, config(plane))) == {}
    assert read_entries == []


def test_compaction_between_runs_changes_no_row(plane: Path) -> None:
    for _ in range(5):
        planes.extend(plane, ["world-0000"], 10)
        ingest.run(None, config(plane))
    table = Lake(config(plane).lake).table(JOURNAL)
    assert compaction.compact(None, table)[0] == 5
    compaction.vacuum(table, keep_hours=0)
    assert_complete(plane)
    planes.extend(plane, ["world-0000"], 10)
    assert row_counts(ingest.run(None, config(plane))) == {"journal": 10}
    assert_complete(plane)


def test_staged_records_are_deleted_after_a_run(plane: Path) -> None:
    ingest.run(None, config(plane))
    staging = Path(config(plane).lake) / "_staging"
    assert not [path for path in staging.rglob("*") if path.is_file()]
    shutil.rmtree(staging, ignore_errors=True)  # Not needed between runs.
    planes.extend(plane, ["world-0000"], 10)
    ingest.run(None, config(plane))
    assert_complete(plane)


def test_lake_of_a_newer_version_is_rejected_unchanged(plane: Path) -> None:
    ingest.run(None, config(plane))
    delta = Lake(config(plane).lake).table(JOURNAL).delta()
    delta.alter.set_table_properties({"fastness.schema": "99"}, raise_if_not_exists=False)
    planes.extend(plane, ["world-0000"], 10)
    with pytest.raises(SchemaMismatch, match="upgrade Fastness"):
        ingest.run(None, config(plane))


def test_follow_ingests_new_data_until_stopped(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    rounds = iter(range(100))

    def open_later(given: Config, view: View | None) -> Any:
        match next(rounds):
            case 1:
                planes.extend(plane, ["world-0000"], 10)
            case 2:
                raise Unreachable("The server is being restarted")
            case 3:
                planes.extend(plane, ["world-0001"], 10)
                stop.set()
        return shared_view(given, view)

    monkeypatch.setattr(ingest, "shared_view", open_later)
    result = ingest.run(None, config(plane), follow=True, every_seconds=0.0, stop=stop)
    assert result.rows["journal"] == sum(map(len, truth(plane).values()))
    assert_complete(plane)


def test_follow_ends_cleanly_when_interrupted(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter(range(100))

    def open_later(given: Config, view: View | None) -> Any:
        if next(rounds) == 2:
            raise KeyboardInterrupt
        return shared_view(given, view)

    monkeypatch.setattr(ingest, "shared_view", open_later)
    result = ingest.run(None, config(plane), follow=True, every_seconds=0.0)
    assert result.rows["journal"] == sum(map(len, truth(plane).values()))


def test_follow_compacts_small_files(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "INGEST_REPAIR_SECONDS", 0.0)
    monkeypatch.setattr(ingest, "INGEST_COMPACT_FILES", 3)
    stop = threading.Event()
    rounds = iter(range(5))

    def open_later(given: Config, view: View | None) -> Any:
        planes.extend(plane, ["world-0000"], 10)
        if next(rounds) == 4:
            stop.set()
        return shared_view(given, view)

    monkeypatch.setattr(ingest, "shared_view", open_later)
    ingest.run(None, config(plane), follow=True, every_seconds=0.0, stop=stop)
    assert len(Lake(config(plane).lake).table(JOURNAL).files()) < 3
    assert_complete(plane)


def test_lake_with_a_deleted_checkpoint_still_works(plane: Path) -> None:
    ingest.run(None, config(plane))
    Lake(config(plane).lake).table(JOURNAL).delta().create_checkpoint()
    planes.extend(plane, ["world-0000"], 10)
    assert row_counts(ingest.run(None, config(plane))) == {"journal": 10}
    log = Path(config(plane).lake) / "journal" / "_delta_log"
    for path in (*log.glob("*.checkpoint.parquet"), log / "_last_checkpoint"):
        path.unlink()
    planes.extend(plane, ["world-0000"], 10)
    assert row_counts(ingest.run(None, config(plane))) == {"journal": 10}
    assert_complete(plane)


def test_ingest_through_a_server_adds_no_duplicates(
    plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ingest.run(None, config(plane))
    with serving(f"dir:{plane}") as server:
        online = Config(data=server.url, lake=config(plane).lake)
        with fastness.connect(server.url) as remote:
            world = remote.world("world-0000")
            world.append([{"n": n} for n in range(20)], expected_head=world.head())
        assert ingest.run(None, online).rows["journal"] == 20
        assert ingest.run(None, online).rows["journal"] == 0
    assert ingest.run(None, config(plane)).rows["journal"] == 0
    assert_complete(plane)


def test_ingest_reads_postgres_during_writes(postgres_url: str, tmp_path: Path) -> None:
    objects = f"dir:{tmp_path / 'objects'}"
    built = planes.build(tmp_path / "unused", worlds=2, entries=200, entities=3, url=postgres_url, objects=objects)
    given = Config(data=postgres_url, lake=str(tmp_path / "lake"), objects=objects)
    stop = threading.Event()

    def write() -> None:
        with planes.opened(postgres_url, universe="main", objects=objects) as plane_open:
            world = plane_open.world("world-0000")
            for n in range(20):
                world.append([{"n": n}], expected_head=world.head())
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    taken = ingest.run(None, given, follow=True, every_seconds=0.0, stop=stop).rows["journal"]
    writer.join()
    taken += ingest.run(None, given).rows["journal"]
    found = journal(Lake(given.lake))
    assert taken == sum(map(len, found.values())) == built.entries + 20


@pytest.mark.rotating
@pytest.mark.parametrize(
    "payload_bytes",
    [
        pytest.param(0, id="staged"),
        pytest.param(2_500, id="mixed"),
        pytest.param(65_536, id="inline"),
    ],
)
def test_ingest_into_an_object_store(plane: Path, monkeypatch: pytest.MonkeyPatch, payload_bytes: int) -> None:
    monkeypatch.setattr(task_payloads, "INGEST_CARRIED_BYTES_MAX", payload_bytes)
    staging = Stores.staging
    staged: list[str] = []

    def noted(self: Stores, url: str) -> ObjectStore:
        staged.append(url)
        return staging(self, url)

    monkeypatch.setattr(Stores, "staging", noted)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        endpoint = f"http://{host}:{port}"
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="lake")
        storage = {"aws_endpoint": endpoint, "aws_region": "us-east-1", "aws_allow_http": "true", **keys}
        remote = Config(data=f"dir:{plane}", lake=f"s3://lake/history-{payload_bytes}", storage=storage)
        start, end = planes.flip_byte(plane, "world-0002", 1)
        result = ingest.run(None, remote)
        assert [(each["world"], each["height"], each["end"]) for each in result.findings] == [
            ("world-0002", start, end)
        ]
        planes.flip_byte(plane, "world-0002", 1)  # Flip it back.
        assert ingest.run(None, remote).rows["journal"] == end + 1 - start
        planes.extend(plane, ["world-0000", "world-0001"], 10)
        assert ingest.run(None, remote).rows["journal"] == 20
        assert planes.digest(journal(Lake(remote.lake, storage))) == planes.digest(truth(plane))
        is_used = any(url.startswith("s3://") and url.rpartition("/")[2].isdigit() for url in staged)
        assert is_used == (payload_bytes < 65_536)
    finally:
        server.stop()


def test_progress_is_reported(plane: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    ingest.run(None, config(plane), progress=lambda *result: reports.append(result))
    assert {what for what, _, _ in reports} == {"journal rows", "segments rows", "activity rows", "entity_changes rows"}


@pytest.mark.always
def test_ingest_on_executors_gives_the_same_rows(
    spark: SparkSession, plane: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_run, "INGEST_TASK_BYTES", 6_000)
    monkeypatch.setattr(plans, "INGEST_WORLD_ROWS", 120)
    monkeypatch.setattr(ingest_run, "pause", pytest.fail)  # Prefetched plans do not cause conflicts.
    result = ingest.run(spark, config(plane))
    assert result.ok
    assert_complete(plane)
    planes.extend(plane, ["world-0002"], 10)
    assert row_counts(ingest.run(spark, config(plane))) == {"journal": 10}
    assert_complete(plane)
    frame = Lake(config(plane).lake).table(JOURNAL).read(spark)
    assert frame.select("universe", "world", "height").distinct().count() == frame.count()
