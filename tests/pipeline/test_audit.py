"""The audit of a whole plane reports exactly the damage, with its world and height."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import fastness
from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import blobs, journal_records, journals, snapshots
from fastness.layers.blobs import Blob
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord
from fastness.layers.worlds import World
from fastness.pipeline import jobs, replays
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import audit, ingest
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import JOURNAL, UNREACHABLE, WORLD_STATE
from fastness.wire.canonical import canonical
from tests.pipeline import planes
from tests.support.http_server import serving


def config_of(tmp_path: Path, reducer: str | None = planes.CHAIN) -> Config:
    return Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"), reducer=reducer)


def states(config: Config) -> dict[str, dict[str, Any]]:
    return {row["world"]: row for row in Lake(config.lake).table(WORLD_STATE).rows().to_pylist()}


def found(result: Any) -> set[tuple[str, int, str]]:
    return {(each["world"], each["height"], each["reason"]) for each in result.findings}


def create_worlds(tx: Transaction, names: list[str], wrong: str | None) -> None:
    """Create worlds with eight records, a snapshot and a baseline; the state of the `wrong` one's baseline is wrong."""
    for name in names:
        world = World("main", name)
        snapshots.create_world(tx, world)
        history = [journal_records.entry(canonical({"world": name, "n": n})) for n in range(8)]
        journals.append(tx, world, history, expected_head=0)
        for height, promote in ((3, False), (6, True)):
            state = replays.replay(history[:height], replays.chain)
            data = canonical(b"wrong" if promote and name == wrong else state)
            digest = hashlib.sha256(data).digest()
            blobs.record(tx, "main", digest, Blob(len(data), data))
            record = SnapshotRecord(digest.hex(), height, 1, height, NO_MANIFEST)
            snapshots.commit(tx, world, record, promote=promote)


@pytest.mark.thorough
def test_audit_finds_one_wrong_baseline_among_a_thousand_worlds(spark: SparkSession, tmp_path: Path) -> None:
    names = [f"world-{n:04}" for n in range(1_000)]
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        for n in range(0, len(names), 100):
            plane.transact(create_worlds, names[n : n + 100], "world-0637", tier=fastness.Tier.IMPORTANT)
    config = config_of(tmp_path)
    result = audit.run(spark, config)
    assert not result.ok
    assert {(each["universe"], each["world"]) for each in result.findings} == {("main", "world-0637")}
    assert ("world-0637", 6, "contradicts") in found(result)
    counts = {"worlds": 1_000, "records": 11_000, "snapshots": 3_000, "world_state": 1_000}
    assert result.rows == {**counts, "blobs": 0, "lake_files": 0, "logs": 0}
    rows = states(config)
    assert {name for name, row in rows.items() if row["verdict"] != "ok"} == {"world-0637"}
    assert "contradicts at 6" in rows["world-0637"]["reason"]
    assert {row["height"] for row in rows.values()} == {11}  # Eight entries, and three snapshot records.
    assert rows["world-0000"]["digest"] == hashlib.sha256(rows["world-0000"]["state"]).hexdigest()


@pytest.mark.rotating
def test_audit_reports_every_kind_of_damage_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    planes.build(data, worlds=6, entries=200)
    config = config_of(tmp_path)
    ingest.run(spark, config)
    assert audit.run(spark, config).ok
    flipped, _ = planes.flip_byte(data, "world-0001")
    removed, _ = planes.remove_segment(data, "world-0002", 1)
    planes.remove_record(data, "world-0000", 20)
    height = planes.plant_baseline(data, "world-0003", {"planted": True})
    unknown = planes.append_unknown(data, "world-0004")
    result = audit.run(spark, config)
    assert not result.ok
    assert {
        ("world-0001", flipped, "checksum"),
        ("world-0002", removed, "missing"),
        ("world-0000", 20, "missing"),
        ("world-0003", height, "contradicts"),
        ("world-0004", unknown, "schema"),
    } <= found(result)
    assert {each["world"] for each in result.findings} == {f"world-{n:04}" for n in range(5)}
    verdicts = {name: row["verdict"] for name, row in states(config).items()}
    assert verdicts == {
        **dict.fromkeys(("world-0000", "world-0001", "world-0002", "world-0004"), "incomplete"),
        "world-0003": "contradicts",
        "world-0005": "ok",
        "empty": "ok",
    }


def test_audit_finds_missing_duplicate_and_changed_rows_of_the_lake(tmp_path: Path) -> None:
    planes.build(tmp_path / "data", worlds=3, entries=100)
    config = config_of(tmp_path, None)
    ingest.run(None, config)
    journal = Lake(config.lake).table(JOURNAL)
    rows = journal.rows().to_pylist()

    def at(world: str, height: int) -> int:
        return next(n for n, row in enumerate(rows) if (row["world"], row["height"]) == (world, height))

    del rows[at("world-0000", 40)]
    rows.append(rows[at("world-0001", 40)])
    swapped = at("world-0002", 40), at("world-0002", 41)
    for n, height in zip(swapped, (41, 40), strict=True):
        rows[n] = {**rows[n], "height": height}
    journal.overwrite(pa.Table.from_pylist(rows, JOURNAL.schema).to_batches())
    result = audit.run(None, config)
    assert found(result) == {(f"world-{n:04}", 0, "lake") for n in range(3)}
    assert {row["verdict"] for name, row in states(config).items() if name != "empty"} == {"contradicts"}


def test_audit_accepts_a_lake_behind_the_plane_and_rejects_one_ahead(tmp_path: Path) -> None:
    """Behind is fine: the next ingest adds the rest. Ahead means that the plane lost records."""
    planes.build(tmp_path / "data", worlds=2, entries=60)
    config = config_of(tmp_path)
    ingest.run(None, config)
    planes.extend(tmp_path / "data", ["world-0000", "world-0001"], 20)
    assert audit.run(None, config).ok

    def cut_off(tx: Transaction) -> int:
        world = World("main", "world-0000")
        head = journals.head(tx, world) - 30
        tx.put(journals.head_key(world), head.to_bytes(8, "big"))
        return head

    with planes.opened(config.data) as plane:
        head = plane.transact(cut_off)
    result = audit.run(None, config)
    assert ("world-0000", head, "lake") in found(result)
    assert {each["world"] for each in result.findings} == {"world-0000"}


def test_audit_reads_only_the_selected_universes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    planes.build(data, worlds=1, entries=50)
    planes.build(data, worlds=1, entries=50, universe="other")
    planes.plant_baseline(data, "world-0000", b"wrong", universe="other")
    config = config_of(tmp_path)
    both = audit.run(None, config)
    assert {each["universe"] for each in both.findings} == {"other"}
    result = audit.run(None, msgspec.structs.replace(config, universes=("main",)))
    assert result.ok
    assert result.rows["worlds"] == 2
    universes = Lake(config.lake).table(WORLD_STATE).rows().column("universe").to_pylist()
    assert sorted(universes) == ["main", "main", "other", "other"]


def test_audit_rejects_an_unknown_reducer_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Cannot load the reducer"):
        audit.run(None, config_of(tmp_path, "nowhere:nothing"))


def test_audit_of_a_plane_without_worlds_has_no_findings(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}"):
        pass
    result = audit.run(None, config_of(tmp_path, None))
    assert result.ok
    assert result.rows["worlds"] == 0


def test_audit_reads_a_plane_through_a_running_server(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors cannot reach its object store, so objects are staged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    planes.build(data, worlds=3, entries=200)
    with planes.opened(f"dir:{data}") as plane:
        world = plane.world("large")
        world.create()
        world.append([1], expected_head=0)
        world.snapshots.commit("x" * 20_000, height=1)
        lost = plane.blobs.put(b"not referred to".ljust(20_000))
    height = planes.plant_baseline(data, "world-0002", {"planted": True})
    flipped, _ = planes.flip_byte(data, "world-0001")
    with serving(f"dir:{data}") as server:
        config = Config(data=server.url, lake=str(tmp_path / "lake"), reducer=planes.CHAIN)
        result = {name: jobs.run(name, spark, config) for name in ("audit", "reachability", "report")}
    assert {("world-0002", height, "contradicts"), ("world-0001", flipped, "checksum")} <= found(result["audit"])
    assert ("large", 1, "contradicts") in found(result["audit"])
    assert {each["world"] for each in result["audit"].findings} == {"large", "world-0001", "world-0002"}
    assert result["reachability"].rows["unreachable"] == 1
    (row,) = Lake(config.lake).table(UNREACHABLE).rows().to_pylist()
    assert (row["hash"], row["modified_at"]) == (lost, None)  # A server does not report times.
    assert "3 of 5 worlds have findings" in (tmp_path / "lake" / "reports" / "latest.html").read_text()


def test_concurrent_audits_leave_one_row_per_world(tmp_path: Path) -> None:
    planes.build(tmp_path / "data", worlds=3, entries=20)
    config = config_of(tmp_path)
    for _ in range(2):  # First without the table, then with its rows.
        others: list[JobResult] = []

        def overtake(what: str, done: int, total: int, others: list[JobResult] = others) -> None:
            if not others:
                others.append(audit.run(None, config))

        result = audit.run(None, config, progress=overtake)
        assert others[0].ok
        assert others[0].rows == result.rows
        worlds = Lake(config.lake).table(WORLD_STATE).rows().column("world").to_pylist()
        assert sorted(worlds) == sorted(states(config))
        assert len(worlds) == result.rows["worlds"]
