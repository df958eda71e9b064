"""Ingest under faults (kills, conflicts, damage): every row is stored once, or is in the quarantine."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import fastness
from fastness.backends.objects import open_objects
from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.clock import SystemClock
from fastness.errors import AnotherHistory, InvalidArgument, PathUnusable, Unreachable
from fastness.layers import journals
from fastness.layers.worlds import World
from fastness.pipeline import ownership, tasks
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import ingest_run, plans
from fastness.pipeline.intake.quarantine import Quarantine, Quarantined, Scope
from fastness.pipeline.jobs import accept, ingest
from fastness.pipeline.lake import Lake, LakeTable, removal
from fastness.pipeline.schemas import (
    ACTIVITY,
    ENTITY_CHANGES,
    JOURNAL,
    PLANES,
    QUARANTINE,
    QUEUE_EVENTS,
    SEGMENTS,
    SUPERSEDED,
    TABLES,
)
from fastness.pipeline.views import open_view
from fastness.runtime.activity import format as log_format
from fastness.testing.clock import ManualClock
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes
from tests.support.forked import run_python, start_python
from tests.support.waiting import POLLS_MAX_SPARK, eventually, exit_code

WORLDS = 4
ENTRIES = 200


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged plane; each test gets a copy."""
    path: Path = tmp_path_factory.mktemp("sound") / "data"
    planes.build(path, worlds=WORLDS, entries=ENTRIES, messages=20, mails=10, entities=5, activity=10)
    return path


@pytest.fixture
def plane(undamaged: Path, tmp_path: Path) -> Path:
    shutil.copytree(undamaged, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every ingest take several commits."""
    monkeypatch.setattr(ingest_run, "INGEST_TASK_BYTES", 8_000)
    monkeypatch.setattr(plans, "INGEST_WORLD_ROWS", 120)


def config(plane: Path) -> Config:
    return Config(data=f"dir:{plane}", lake=str(plane.parent / "lake"))


def lake(plane: Path) -> Lake:
    return Lake(config(plane).lake)


def heights(plane: Path) -> Counter[tuple[str, int]]:
    rows = lake(plane).table(JOURNAL).rows(["world", "height"]).to_pylist()
    return Counter((row["world"], row["height"]) for row in rows)


def expected(plane: Path) -> Counter[tuple[str, int]]:
    with open_view(config(plane)) as view:
        return Counter((world.name, height) for world in view.worlds("main") for height in range(world.head))


def content(plane: Path) -> dict[str, Any]:
    """All rows of the lake that depend only on the plane, sorted."""
    found = {
        table.name: sorted(map(repr, lake(plane).table(table).rows(columns).to_pylist()))
        for table, columns in (
            (JOURNAL, ["universe", "world", "height", "kind", "payload", "hash"]),
            (SEGMENTS, ["universe", "world", "start", "last", "verdict"]),
            (ACTIVITY, ["universe", "file", "n", "record"]),
            (ENTITY_CHANGES, ["universe", "kind", "id", "version", "fields"]),
            (QUARANTINE, ["universe", "table_name", "source", "start", "last", "reason"]),
        )
    }
    assert all(len(rows) == len(set(rows)) for rows in found.values())
    return found


@pytest.fixture
def expected_content(plane: Path) -> Callable[[], dict[str, Any]]:
    """The content of the lake after an undisturbed ingest of a copy of the plane."""

    def ingest_copy() -> dict[str, Any]:
        copy = plane.parent / "undisturbed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(plane, copy / "data")
        ingest.run(None, config(copy / "data"))
        return content(copy / "data")

    return ingest_copy


def quarantined(plane: Path, reason: str | None = None) -> list[tuple[str, str, int, int, str]]:
    rows = lake(plane).table(QUARANTINE).rows().to_pylist()
    return sorted(
        (row["table_name"], row["source"], row["start"], row["last"], row["reason"])
        for row in rows
        if reason in (None, row["reason"])
    )


class Killed(BaseException):
    """Simulates a kill: nothing handles it."""


def at_commit(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], object], *, after: bool) -> list[int]:
    """Call `act` before or after the n-th commit to any table; the returned list counts the commits."""
    count: list[int] = []
    replace = LakeTable.replace

    def counted(self: LakeTable, *args: Any, **options: Any) -> None:
        count.append(1)
        is_it = len(count) == at
        if is_it and not after:
            act()
        replace(self, *args, **options)
        if is_it and after:
            act()

    monkeypatch.setattr(LakeTable, "replace", counted)
    return count


@pytest.mark.parametrize("at", [1, 3])
def test_files_that_executors_wrote_to_their_own_folder_are_not_committed(
    plane: Path, expected_content: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The folder of the lake is not shared: what executors write there is on another disk."""

    def move_away() -> None:
        committed = {path for table in TABLES.values() for path in lake(plane).table(table).files()}
        for file in Path(config(plane).lake).glob("*/universe=*/*.parquet"):
            if str(file) not in committed:
                file.rename(plane.parent / file.name)

    with monkeypatch.context() as patch:
        at_commit(patch, at, move_away, after=False)
        with pytest.raises(PathUnusable, match="driver and all executors share"):
            ingest.run(None, config(plane))
    assert all(Path(file).exists() for table in TABLES.values() for file in lake(plane).table(table).files())
    ingest.run(None, config(plane))
    assert content(plane) == expected_content()


def damage(plane: Path) -> None:
    planes.remove_segment(plane, "world-0001", 0)
    planes.flip_byte(plane, "world-0002", 1)
    planes.leave_log(plane, lines=6, garbled=2, torn=True)


def kill() -> None:
    raise Killed


@pytest.mark.parametrize(
    "after", [pytest.param(False, id="before"), pytest.param(True, id="after", marks=pytest.mark.thorough)]
)
def test_run_killed_at_any_commit_is_completed_by_the_next(
    plane: Path, expected_content: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    damage(plane)
    right = expected_content()
    for at in range(1, 1_000):
        shutil.rmtree(plane.parent / "lake", ignore_errors=True)
        with monkeypatch.context() as patch:
            count = at_commit(patch, at, kill, after=after)
            try:
                ingest.run(None, config(plane))
            except Killed:
                pass
            else:
                assert len(count) < at
                break
        ingest.run(None, config(plane))
        assert content(plane) == right, f"killed at commit {at}"
    assert at > 8


@pytest.mark.rotating
def test_run_overtaken_at_any_commit_adds_no_duplicates(
    plane: Path, expected_content: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(plane)
    right = expected_content()
    for at in range(1, 1_000):
        shutil.rmtree(plane.parent / "lake", ignore_errors=True)
        with open_view(config(plane)) as mine, open_view(config(plane)) as theirs, monkeypatch.context() as patch:
            count = at_commit(patch, at, partial(ingest.ingest_view, None, config(plane), theirs), after=False)
            ingest.ingest_view(None, config(plane), mine)
            if len(count) < at:
                break
        assert content(plane) == right, f"overtaken at commit {at}"
    assert at > 8


@pytest.mark.rotating
def test_quarantine_has_the_damage_of_the_run_that_committed(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run reports a missing segment; another finds it and is killed at any point; the first continues."""
    for at in range(1, 1_000):
        shutil.rmtree(plane.parent / "lake", ignore_errors=True)
        was_killed = overtaken_by_undamaged_run(plane, at, monkeypatch)
        assert_accounted_for(plane)
        ingest.run(None, config(plane))
        assert heights(plane) == expected(plane), f"the other was killed at commit {at}"
        assert quarantined(plane) == []
        if not was_killed:
            break
    assert at > 3


def overtaken_by_undamaged_run(plane: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether the other run was killed."""
    file = planes.segment_files(plane, "world-0001")[0]
    hidden = file.with_suffix(".hidden")
    add = Quarantine.add
    outcome: list[bool] = []

    def add_then_be_overtaken(self: Quarantine, found: Any) -> None:
        add(self, found)
        if found and not outcome:
            outcome.append(False)
            hidden.rename(file)
            with monkeypatch.context() as inner:
                at_commit(inner, at, kill, after=True)
                try:
                    ingest.ingest_view(None, config(plane), theirs)
                except Killed:
                    outcome[0] = True
            file.rename(hidden)

    with open_view(config(plane)) as mine, open_view(config(plane)) as theirs, monkeypatch.context() as patch:
        file.rename(hidden)
        patch.setattr(Quarantine, "add", add_then_be_overtaken)
        ingest.ingest_view(None, config(plane), mine)
        hidden.rename(file)
    return outcome[0]


def assert_accounted_for(plane: Path) -> None:
    """Check that every height of the plane is in the lake once, or in the quarantine."""
    found = heights(plane)
    assert set(found.values()) == {1}
    result = {
        (source, height)
        for table, source, start, end, _ in quarantined(plane)
        if table == JOURNAL.name
        for height in range(start, end + 1)
    }
    assert set(expected(plane)) - set(found) <= result


def test_concurrent_processes_ingest_every_row_once(
    plane: Path, expected_content: Callable[[], dict[str, Any]]
) -> None:
    damage(plane)
    right = expected_content()
    code = (
        "import sys; from fastness.pipeline.config import Config; from fastness.pipeline.jobs import ingest;"
        "from fastness.pipeline.intake import ingest_run, plans; from fastness.pipeline.views import open_view;"
        "ingest_run.INGEST_TASK_BYTES = 4_000; plans.INGEST_WORLD_ROWS = 60;"
        "config = Config(data=sys.argv[1], lake=sys.argv[2]);"
        "view = open_view(config); print('ready', flush=True); sys.stdin.readline();"
        "print(ingest.ingest_view(None, config, view).rows); view.close()"
    )
    children = []
    for _ in range(2):
        child = start_python(
            ["-c", code, config(plane).data, config(plane).lake],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"  # Processes open the directory one after the other.
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        child.communicate()
        assert child.returncode == 0
    assert content(plane) == right


@pytest.mark.parametrize("times", [2, 100])
def test_deleted_staging_folder_is_not_damage(
    plane: Path, expected_content: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    planes.leave_log(plane, lines=5)
    right = expected_content()
    execute = tasks.execute
    deleted: list[int] = []

    def late(spark: Any, work: Any, given: Any) -> Iterator[bytes]:
        if len(deleted) < times:
            deleted.append(1)
            shutil.rmtree(plane.parent / "lake" / "_staging", ignore_errors=True)
        return execute(spark, work, given)

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "execute", late)
        if times == 2:
            assert ingest.run(None, config(plane)).ok
        else:
            with pytest.raises(Unreachable, match="is missing; use a staging location"):
                ingest.run(None, config(plane))
    ingest.run(None, config(plane))
    assert content(plane) == right


def repair_result(plane: Path) -> JobResult:
    result = ingest.run(None, config(plane))
    assert result.ok, result.findings
    assert heights(plane) == expected(plane)
    assert quarantined(plane) == []
    assert set(lake(plane).table(SEGMENTS).rows(["verdict"]).column("verdict").to_pylist()) == {"ok"}
    return result


def segment_verdicts(plane: Path) -> Counter[str]:
    return Counter(lake(plane).table(SEGMENTS).rows(["verdict"]).column("verdict").to_pylist())


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_damaged_segment_is_quarantined_and_repaired_later(plane: Path, fault: str) -> None:
    kept = plane.parent / "kept"
    shutil.copytree(plane / "objects", kept)
    whole = expected(plane)
    start, end = (planes.flip_byte if fault == "flipped" else planes.remove_segment)(plane, "world-0002", 1)
    reason = "checksum" if fault == "flipped" else "missing"
    result = ingest.run(None, config(plane))
    assert not result.ok
    assert [(each["world"], each["height"], each["reason"]) for each in result.findings] == [
        ("world-0002", start, reason)
    ]
    assert quarantined(plane) == [("journal", "world-0002", start, end, reason)]
    lost = {("world-0002", height) for height in range(start, end + 1)}
    assert set(whole) - set(heights(plane)) == lost
    assert segment_verdicts(plane)[reason] == 1
    again = ingest.run(None, config(plane))  # Still damaged, and reported once.
    assert (again.rows["journal"], again.ok) == (0, False)
    assert quarantined(plane) == [("journal", "world-0002", start, end, reason)]
    planes.extend(plane, ["world-0002"], 10)
    ingest.run(None, config(plane))
    shutil.copytree(kept, plane / "objects", dirs_exist_ok=True)
    assert repair_result(plane).rows["journal"] == end + 1 - start


def test_segment_damaged_after_ingest_has_a_bad_verdict_and_no_gap(plane: Path) -> None:
    ingest.run(None, config(plane))
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        store = open_objects(f"dir:{plane / 'objects'}")
        assert planes.cut(opened, store, "world-0000", segment=32, margin=8) > 1
    file = planes.segment_files(plane, "world-0000")[0]
    kept = file.read_bytes()
    planes.flip_byte(plane, "world-0000", 0)
    result = ingest.run(None, config(plane))
    assert result.rows["segments"] > 1
    assert segment_verdicts(plane)["checksum"] == 1
    assert heights(plane) == expected(plane)
    assert quarantined(plane) == []
    file.write_bytes(kept)
    repair_result(plane)


@pytest.mark.rotating
def test_run_killed_during_repair_adds_no_duplicates(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = plane.parent / "kept"
    shutil.copytree(plane / "objects", kept)
    file = planes.leave_log(plane, lines=6, garbled=2)
    planes.remove_segment(plane, "world-0001")
    planes.remove_segment(plane, "world-0001")
    ingest.run(None, config(plane))
    before = plane.parent / "before"
    shutil.copytree(plane.parent / "lake", before)
    shutil.copytree(kept, plane / "objects", dirs_exist_ok=True)
    file.write_bytes(file.read_bytes().replace(b'{"n"#2,', b'{"n":2,').replace(b"#", b":"))
    writer = file_id(plane, file)
    for at in range(1, 100):
        shutil.rmtree(plane.parent / "lake")
        shutil.copytree(before, plane.parent / "lake")
        with monkeypatch.context() as patch:
            count = at_commit(patch, at, kill, after=at % 2 == 0)
            try:
                ingest.run(None, config(plane))
            except Killed:
                pass
            else:
                assert len(count) < at
                break
        repair_result(plane)
        lines = lake(plane).table(ACTIVITY).rows(["file", "n"]).to_pylist()
        assert len(lines) == len({(line["file"], line["n"]) for line in lines})
        assert Counter(line["n"] for line in lines if line["file"].endswith(writer))[2] == 1
    assert at > 4


def test_overlapping_gaps_are_repaired_once(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that see different damage both report it, and one may do so after the other's commit."""
    kept = plane.parent / "kept"
    shutil.copytree(plane / "objects", kept)
    start, _ = planes.remove_segment(plane, "world-0002", 1)
    ingest.run(None, config(plane))
    inner = [Quarantined("main", "journal", "world-0002", n, n + 2, "schema", "") for n in (start + 1, start + 2)]
    Quarantine(lake(plane)).add(inner)
    shutil.copytree(kept, plane / "objects", dirs_exist_ok=True)

    def overtake() -> None:
        """Another run sees only the late row, and repairs it."""
        Quarantine(lake(plane)).resolve([Scope("main", "journal", "world-0002", start, start, clears_rewound=False)])
        ingest.run(None, config(plane))

    with monkeypatch.context() as patch:
        at_commit(patch, 1, overtake, after=False)
        ingest.run(None, config(plane))
    rows = heights(plane)
    assert set(rows.values()) == {1}
    assert {rows["world-0002", height] for height in range(start + 1, start + 5)} == {1}


def file_id(plane: Path, file: Path) -> str:
    with open_view(config(plane)) as view:
        (writer,) = [found.writer for found in view.logs("main") if found.name == file.stem]
    return writer


def test_missing_record_is_a_gap_of_one(plane: Path) -> None:
    planes.remove_record(plane, "world-0000", 7)
    ingest.run(None, config(plane))
    assert quarantined(plane) == [("journal", "world-0000", 7, 7, "missing")]
    assert set(expected(plane)) - set(heights(plane)) == {("world-0000", 7)}


def test_partly_repaired_gap_shrinks(plane: Path) -> None:
    def read(tx: Any) -> list[bytes]:
        return [record for _, record in journals.read_hot(tx, world, 5, 5)]

    def put(tx: Any) -> None:
        journals.write(tx, world, records[2:3], 7)
        journals.write(tx, world, [], head)

    world = World("main", "world-0000")
    head = max(height for name, height in expected(plane) if name == "world-0000") + 1
    records = planes._work(plane, "main", read)
    for height in range(5, 10):
        planes.remove_record(plane, "world-0000", height)
    ingest.run(None, config(plane))
    assert quarantined(plane) == [("journal", "world-0000", 5, 9, "missing")]
    planes._work(plane, "main", put)
    assert ingest.run(None, config(plane)).rows["journal"] == 1
    assert quarantined(plane) == [
        ("journal", "world-0000", 5, 6, "missing"),
        ("journal", "world-0000", 8, 9, "missing"),
    ]
    assert set(expected(plane)) - set(heights(plane)) == {("world-0000", height) for height in (5, 6, 8, 9)}
    assert ingest.run(None, config(plane)).rows["journal"] == 0


def test_world_that_lost_all_records_is_quarantined_and_an_empty_one_is_not(plane: Path) -> None:
    for height in range(5):
        planes.remove_record(plane, "world-0000", height)
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        opened.world("hollow").create()
        opened.world("hollow").append([{"n": n} for n in range(3)], expected_head=0)
    for height in range(3):
        planes.remove_record(plane, "hollow", height)
    ingest.run(None, config(plane))
    assert quarantined(plane) == [
        ("journal", "hollow", 0, 2, "missing"),
        ("journal", "world-0000", 0, 4, "missing"),
    ]


def test_record_of_an_unknown_kind_is_quarantined(plane: Path) -> None:
    height = planes.append_unknown(plane, "world-0003")
    planes.extend(plane, ["world-0003"], 5)
    ingest.run(None, config(plane))
    assert quarantined(plane) == [("journal", "world-0003", height, height, "schema")]
    assert set(expected(plane)) - set(heights(plane)) == {("world-0003", height)}
    assert set(segment_verdicts(plane)) == {"ok"}


def test_torn_line_is_quarantined_until_it_is_complete(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5, torn=True)
    ingest.run(None, config(plane))
    ((_, source, start, end, reason),) = quarantined(plane)
    assert (start, end, reason) == (4, 4, "torn")
    assert source.endswith(file_id(plane, file))
    ingest.run(None, config(plane))
    assert len(quarantined(plane)) == 1
    line = log_format.line(4, planes.START_MS + 4, b'{"step":4}')
    file.write_bytes(file.read_bytes().rpartition(b"\n")[0] + b"\n" + line)
    assert ingest.run(None, config(plane)).rows["activity"] == 1
    assert quarantined(plane) == []


def test_torn_line_cut_off_by_rotation_leaves_the_quarantine(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5, torn=True)
    ingest.run(None, config(plane))
    assert len(quarantined(plane)) == 1
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        opened.activity.log("another", {"step": 1}, kind="metrics")
    assert not file.exists()
    assert ingest.run(None, config(plane)).rows["activity"] == 1
    assert quarantined(plane) == []


def test_malformed_line_is_a_gap_that_can_be_repaired(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5, garbled=2)
    ingest.run(None, config(plane))
    assert [row[2:] for row in quarantined(plane)] == [(2, 2, "malformed")]
    file.write_bytes(file.read_bytes().replace(b"#", b":"))
    assert ingest.run(None, config(plane)).rows["activity"] == 1
    assert quarantined(plane) == []
    assert ingest.run(None, config(plane)).rows["activity"] == 0


def test_session_log_without_a_header_is_quarantined(plane: Path) -> None:
    file = planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    whole = file.read_bytes()
    file.write_bytes(b"#" + whole[1:])
    assert ingest.run(None, config(plane)).rows["activity"] == 0
    assert quarantined(plane) == [("activity", file.stem, 0, 0, "malformed")]
    file.write_bytes(whole)
    assert ingest.run(None, config(plane)).rows["activity"] == 0
    assert quarantined(plane) == []


def backed_up(plane: Path) -> Path:
    return Path(shutil.copytree(plane, plane.parent / "backup"))


def restore(plane: Path, backup: Path) -> None:
    shutil.rmtree(plane)
    shutil.copytree(backup, plane)


def test_plane_restored_from_an_older_backup_is_reported_as_rewound(plane: Path) -> None:
    backup = backed_up(plane)
    before = expected(plane)["world-0001", 0] and max(h for world, h in expected(plane) if world == "world-0001") + 1
    planes.extend(plane, ["world-0001"], 30)
    later = Path(shutil.copytree(plane, plane.parent / "later"))
    ingest.run(None, config(plane))
    restore(plane, backup)
    result = ingest.run(None, config(plane))
    assert not result.ok
    assert quarantined(plane) == [("journal", "world-0001", before, before + 29, "rewound")]
    planes.extend(plane, ["world-0001"], 10, seed=7)  # It grows, and is still behind.
    ingest.run(None, config(plane))
    assert quarantined(plane) == [("journal", "world-0001", before + 10, before + 29, "rewound")]
    restore(plane, later)
    repair_result(plane)


def test_diverged_history_is_not_mixed_with_the_lake(plane: Path) -> None:
    backup = backed_up(plane)
    planes.extend(plane, ["world-0001"], 30)
    later = Path(shutil.copytree(plane, plane.parent / "later"))
    ingest.run(None, config(plane))
    rows = heights(plane)
    restore(plane, backup)
    planes.extend(plane, ["world-0001"], 50, seed=7)
    planes.extend(plane, ["world-0002"], 5)
    result = ingest.run(None, config(plane))
    assert result.rows["journal"] == 5  # Of the unchanged world.
    assert [row[1::3] for row in quarantined(plane)] == [("world-0001", "rewound")]
    assert {key: count for key, count in heights(plane).items() if key[0] == "world-0001"} == {
        key: count for key, count in rows.items() if key[0] == "world-0001"
    }
    assert ingest.run(None, config(plane)).rows["journal"] == 0
    restore(plane, later)
    planes.extend(plane, ["world-0002"], 5)
    repair_result(plane)


def test_entities_and_session_logs_behind_the_lake_are_reported(plane: Path) -> None:
    backup = backed_up(plane)
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        opened.entities.write("order", "o-0", {"total": 99})
        version = opened.entities.get("order", "o-0").version
    file = planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    whole = file.read_bytes()
    restore(plane, backup)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    for _ in range(2):
        assert ingest.run(None, config(plane)).rows["activity"] == 0
        assert [(table, start, end, reason) for table, _, start, end, reason in quarantined(plane)] == [
            ("activity", 3, 4, "rewound"),
            ("entity_changes", version, version, "rewound"),
        ]
    file.write_bytes(whole)
    assert [row[0] for row in quarantined(plane)] == ["activity", "entity_changes"]
    assert ingest.run(None, config(plane)).rows["activity"] == 0
    assert [row[0] for row in quarantined(plane)] == ["entity_changes"]


def changes(plane: Path) -> list[tuple[str, int, str | None]]:
    rows = lake(plane).table(ENTITY_CHANGES).rows(["id", "version", "fields"]).to_pylist()
    return sorted((row["id"], row["version"], row["fields"]) for row in rows)


def write_counter(plane: Path, *values: int, at_ms: int = planes.START_MS) -> None:
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(at_ms)) as opened:
        for value in values:
            opened.entities.write("counter", "c", {"n": value})


def test_entity_that_diverged_is_held_and_never_mixed(plane: Path) -> None:
    write_counter(plane, *range(20))
    backup = backed_up(plane)
    write_counter(plane, *range(20, 45))
    ingest.run(None, config(plane))
    before = changes(plane)
    restore(plane, backup)
    write_counter(plane, *range(100, 140))  # The plane is ahead of the lake, with other versions from 21 on.
    for _ in range(2):
        assert not ingest.run(None, config(plane)).ok
        assert changes(plane) == before
        assert quarantined(plane) == [("entity_changes", "counter/c", 45, 60, "rewound")]
    accept.run(None, config(plane), kinds=["order"])
    assert changes(plane) == before
    result = accept.run(None, config(plane), kinds=["counter"])
    assert result.rows["entity_changes superseded"] == 25
    assert ingest.run(None, config(plane)).ok
    assert [row for row in changes(plane) if row[0] == "c"] == [
        ("c", n + 1, f'{{"n":{value}}}') for n, value in enumerate([*range(20), *range(100, 140)])
    ]
    moved = lake(plane).table(SUPERSEDED).rows().to_pylist()
    assert sorted(row["number"] for row in moved) == list(range(21, 46))


def restore_backup(plane: Path, tmp_path: Path) -> None:
    """Replace the plane by a restored backup, as the commands do."""
    shutil.rmtree(plane)
    assert CliRunner().invoke(root, ["restore", str(tmp_path / "backup"), str(plane)]).exit_code == 0


def test_restored_plane_is_refused_until_it_is_accepted_and_replaces_its_rows(plane: Path, tmp_path: Path) -> None:
    write_counter(plane, *range(20))
    assert CliRunner().invoke(root, ["--url", f"dir:{plane}", "backup", str(tmp_path / "backup")]).exit_code == 0
    planes.extend(plane, ["world-0001"], 30)
    write_counter(plane, *range(20, 45), at_ms=planes.START_MS + 2 * 86_400_000)
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        opened.world("later").create()
        opened.world("later").append([{"n": 1}], expected_head=0)
        opened.activity.log("session-later", {"n": 1}, kind="metrics")
    assert ingest.run(None, config(plane)).ok
    followed = lake(plane).table(PLANES).rows().to_pylist()
    restore_backup(plane, tmp_path)
    planes.extend(plane, ["world-0001"], 40, seed=7)
    planes.extend(plane, ["world-0002"], 5)
    write_counter(plane, *range(100, 140))
    before = content(plane)
    with pytest.raises(AnotherHistory, match="pipeline accept") as refused:
        ingest.run(None, config(plane))
    with pytest.raises(InvalidArgument, match="as a whole"):
        accept.run(None, config(plane), worlds=["world-0001"])
    assert content(plane) == before
    assert exit_codes.code_of(refused.value) == 5
    result = accept.run(None, config(plane))
    assert result.rows["journal superseded"] == 30 + 1  # Of the world that it knew, and of the new one.
    assert result.rows["entity_changes superseded"] == 25
    assert result.rows["activity superseded"] >= 1
    assert ingest.run(None, config(plane)).ok
    assert heights(plane) == expected(plane)
    shutil.move(plane.parent / "lake", plane.parent / "continued")
    continued = Config(data=f"dir:{plane}", lake=str(plane.parent / "continued"))
    ingest.run(None, config(plane))  # A new lake of the restored plane.
    for table, columns in ((JOURNAL, ["world", "height", "hash"]), (ENTITY_CHANGES, None), (ACTIVITY, None)):
        both = [
            sorted(map(repr, Lake(url).table(table).rows(columns).to_pylist()))
            for url in (continued.lake, config(plane).lake)
        ]
        assert both[0] == both[1], table.name
    rows = {row["lineage"]: row for row in Lake(continued.lake).table(PLANES).rows().to_pylist()}
    old, new = rows.pop(followed[0]["lineage"]), *rows.values()
    assert [row["until"] is None for row in (old, new)] == [False, True]
    assert (new["plane"], new["parent"], new["cause"]) == (old["plane"], old["lineage"], "restored")


@pytest.mark.parametrize("records", [3, 5, 9])
def test_world_that_was_created_again_is_held_until_it_is_accepted(tmp_path: Path, records: int) -> None:
    given = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))

    def create(name: str, count: int) -> None:
        with planes.opened(given.data) as plane:
            if name != "first":
                plane.world("ada").archive()
                plane.world("ada").delete()
            plane.world("ada").create()
            plane.world("ada").append([{name: n} for n in range(count)], expected_head=0)

    create("first", 5)
    assert ingest.run(None, given).ok
    create("second", records)
    for _ in range(2):
        (finding,) = ingest.run(None, given).findings
        assert (finding["world"], finding["reason"]) == ("ada", "rewound")
    accept.run(None, given, worlds=["ada"])
    for added in (records, 0):
        result = ingest.run(None, given)
        assert (result.ok, result.rows["journal"]) == (True, added)
    rows = Lake(given.lake).table(JOURNAL).rows(["height", "payload"]).sort_by("height").to_pylist()
    assert [row["payload"] for row in rows] == [f'{{"second":{n}}}' for n in range(records)]


def append_and_compact(world: fastness.World, name: str, count: int, *, segment: int) -> list[tuple[int, int]]:
    """The first and last records of the world's segments after it has so many entries more."""
    world.append([{name: n} for n in range(count)], expected_head=world.head())
    world.snapshots.commit({}, height=world.head())
    world.compact(entries=segment, margin=0)
    return [(each.start, each.end) for each in world.segments()]


def checked_segments(plane: Path) -> list[tuple[int, int]]:
    assert ingest.run(None, config(plane)).ok
    return sorted((row["start"], row["last"]) for row in lake(plane).table(SEGMENTS).rows().to_pylist())


@pytest.mark.parametrize("is_copied", [False, True])
def test_restored_plane_gets_a_check_of_each_of_its_segments(tmp_path: Path, is_copied: bool) -> None:
    data = tmp_path / "data"
    given = config(data)

    def grow(name: str, count: int, *, segment: int) -> list[tuple[int, int]]:
        with planes.opened(given.data) as opened:
            return append_and_compact(opened.world("ada"), name, count, segment=segment)

    with planes.opened(given.data) as opened:
        opened.world("ada").create()
    assert grow("shared", 5, segment=4) == [(0, 3)]
    if is_copied:
        backed_up(data)
    else:
        assert CliRunner().invoke(root, ["--url", given.data, "backup", str(tmp_path / "backup")]).exit_code == 0
    # The first lost record is inside of a segment.
    assert grow("lost", 6, segment=4) == checked_segments(data) == [(0, 3), (4, 7), (8, 11)]
    if is_copied:
        restore(data, tmp_path / "backup")
        assert not ingest.run(None, given).ok
    else:
        restore_backup(data, tmp_path)
    accept.run(None, given)
    # The plane has another segment before that record.
    assert grow("new", 5, segment=2) == checked_segments(data) == [(0, 3), (4, 5), (6, 7), (8, 9), (10, 11)]


@pytest.mark.parametrize("commits", range(1, 5))
def test_world_that_was_created_again_after_a_killed_ingest_gets_a_check_of_each_of_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    data = tmp_path / "data"
    given = config(data)

    def create(name: str, *, segment: int) -> list[tuple[int, int]]:
        with planes.opened(given.data) as opened:
            world = opened.world("ada")
            if name != "first":
                world.archive()
                world.delete()
            world.create()
            return append_and_compact(world, name, 10, segment=segment)

    assert create("first", segment=4) == [(0, 3), (4, 7)]
    steps = itertools.repeat(LakeTable.replace, commits)

    def step(*given: Any, **named: Any) -> None:
        next(steps, killed)(*given, **named)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(LakeTable, "replace", step)
        ingest.run(None, given)
    segments = create("second", segment=2)
    if not ingest.run(None, given).ok:
        accept.run(None, given)
    assert segments == checked_segments(data)


def test_killed_acceptance_is_continued(plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_counter(plane, *range(20))
    assert CliRunner().invoke(root, ["--url", f"dir:{plane}", "backup", str(tmp_path / "backup")]).exit_code == 0
    write_counter(plane, *range(20, 45), at_ms=planes.START_MS + 2 * 86_400_000)
    planes.extend(plane, ["world-0001"], 30)
    ingest.run(None, config(plane))
    restore_backup(plane, tmp_path)
    for step in ("remove", "rows_from"):  # Before the rows of a table are removed; and after all are.
        with monkeypatch.context() as patch:
            patch.setattr(removal, step, killed) if step == "remove" else patch.setattr(ownership, "follow", killed)
            with pytest.raises(KeyboardInterrupt):
                accept.run(None, config(plane))
        with pytest.raises(AnotherHistory):
            ingest.run(None, config(plane))
    accept.run(None, config(plane))
    assert ingest.run(None, config(plane)).ok
    assert heights(plane) == expected(plane)
    moved = Counter(
        (row["table_name"], row["source"], row["number"]) for row in lake(plane).table(SUPERSEDED).rows().to_pylist()
    )
    assert Counter(table for table, _, _ in moved) == {"journal": 30, "entity_changes": 25}
    assert set(moved.values()) == {1}


def killed(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_second_plane_is_refused_unless_its_universes_are_others(plane: Path, tmp_path: Path) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    planes.build(tmp_path / "second", worlds=1, entries=10)
    planes.build(tmp_path / "second", worlds=1, entries=10, universe="other")
    second = Config(data=f"dir:{tmp_path / 'second'}", lake=config(plane).lake)
    for job in (ingest, accept):
        with pytest.raises(AnotherHistory, match="another lake"):
            job.run(None, second)
    assert content(plane) == before
    assert ingest.run(None, msgspec.structs.replace(second, universes=("other",))).rows["journal"] > 10
    owners = {row["universe"]: row["plane"] for row in lake(plane).table(PLANES).rows().to_pylist()}
    assert owners.keys() == {"main", "other"}
    assert owners["main"] != owners["other"]


def test_lost_versions_can_be_accepted(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.entities.ENTITY_HISTORY_VERSIONS", 3)
    write_counter(plane, *range(8))
    assert not ingest.run(None, config(plane)).ok
    assert accept.run(None, config(plane)).rows["confirmed"] == 0
    assert not ingest.run(None, config(plane)).ok
    assert accept.run(None, config(plane), lost=True, kinds=["counter"]).rows["confirmed"] == 1
    result = ingest.run(None, config(plane))
    assert result.ok
    assert result.notes == ["1 ranges are lost, which was accepted"]
    write_counter(plane, *range(8))
    assert not ingest.run(None, config(plane)).ok  # Others are lost.


def test_durable_history_is_ingested_once_also_if_it_is_committed_late(plane: Path, tmp_path: Path) -> None:
    def change(at_ms: int, work: Callable[[Any], None]) -> None:
        with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(at_ms)) as opened:
            work(opened.queue("audited"))

    def events() -> list[tuple[str, int]]:
        rows = lake(plane).table(QUEUE_EVENTS).rows().to_pylist()
        assert {row["queue"] for row in rows} == {"audited"}
        return sorted((row["event"], round(row["changed_at"].timestamp() * 1_000) - planes.START_MS) for row in rows)

    start_ms = planes.START_MS
    # A year: the view's clock is the real one.
    change(start_ms, lambda queue: queue.set_policy(QueuePolicy(history="durable", history_seconds=31_000_000)))
    change(start_ms + 50_000, lambda queue: queue.put_many([1, 2]))
    assert ingest.run(None, config(plane)).rows["queue_events"] == 2
    change(start_ms + 40_000, lambda queue: queue.put(3))  # Committed after, with an earlier time.
    change(start_ms + 60_000, lambda queue: queue.receive().ack())
    assert ingest.run(None, config(plane)).rows["queue_events"] == 3
    assert ingest.run(None, config(plane)).rows["queue_events"] == 0
    assert events() == [("acked", 60_000), ("leased", 60_000), ("put", 40_000), ("put", 50_000), ("put", 50_000)]
    assert CliRunner().invoke(root, ["--url", f"dir:{plane}", "backup", str(tmp_path / "backup")]).exit_code == 0
    later_ms = SystemClock().now_ms()
    change(later_ms, lambda queue: queue.put(4))
    ingest.run(None, config(plane))
    assert len(events()) == 6
    restore_backup(plane, tmp_path)
    change(later_ms + 1, lambda queue: queue.put(5))
    assert accept.run(None, config(plane)).rows["queue_events superseded"] == 1
    ingest.run(None, config(plane))
    assert len(events()) == 6
    assert events()[-1][1] == later_ms + 1 - start_ms


def test_session_log_that_lost_its_only_line_is_rewound(plane: Path) -> None:
    file = planes.leave_log(plane, lines=1)
    ingest.run(None, config(plane))
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert ingest.run(None, config(plane)).rows["activity"] == 0
    assert [row[2:] for row in quarantined(plane)] == [(0, 0, "rewound")]
    file.write_bytes(whole)
    assert ingest.run(None, config(plane)).rows["activity"] == 0
    assert quarantined(plane) == []


def test_deleted_world_is_not_rewound(plane: Path) -> None:
    ingest.run(None, config(plane))
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        opened.world("world-0001").archive()
        opened.world("world-0001").delete()
    result = ingest.run(None, config(plane))
    assert result.ok
    assert heights(plane)["world-0001", 0] == 1


def test_dropped_entity_versions_are_quarantined(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.entities.ENTITY_HISTORY_VERSIONS", 3)
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        for n in range(8):
            opened.entities.write("job", "j-1", {"n": n})
    ingest.run(None, config(plane))
    assert quarantined(plane) == [("entity_changes", "job/j-1", 1, 5, "missing")]
    assert ingest.run(None, config(plane)).rows["entity_changes"] == 0


ENDS_ITSELF = """
import os, signal, sys
from fastness.pipeline.config import Config
from fastness.pipeline.intake import ingest_run, plans
from fastness.pipeline.jobs import ingest
from fastness.pipeline.lake import LakeTable
ingest_run.INGEST_TASK_BYTES, plans.INGEST_WORLD_ROWS = 8_000, 120
replace, left = LakeTable.replace, iter(range(int(sys.argv[3])))

def replace_or_end(self, *args, **options):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(self, *args, **options)

LakeTable.replace = replace_or_end
ingest.run(None, Config(data=sys.argv[1], lake=sys.argv[2]))
"""


@pytest.mark.rotating
def test_killed_processes_are_continued(plane: Path, expected_content: Callable[[], dict[str, Any]]) -> None:
    damage(plane)
    right = expected_content()
    for commits_made in (1, 3):
        done = run_python(["-c", ENDS_ITSELF, config(plane).data, config(plane).lake, str(commits_made)])
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert commits(plane) >= 1 + 3
    ingest.run(None, config(plane))
    assert content(plane) == right
    assert list(plane.glob(".view-*")) == []  # That of a killed process is deleted by the next.


CHILD = """
import sys
from fastness.pipeline import sessions
from fastness.pipeline.config import Config
from fastness.pipeline.intake import ingest_run, plans
from fastness.pipeline.jobs import ingest
ingest_run.INGEST_TASK_BYTES, plans.INGEST_WORLD_ROWS = 6_000, 60
spark = sessions.start(app="killed")
spark.range(1).count()
print("ready", flush=True)
sys.stdin.readline()
ingest.run(spark, Config(data=sys.argv[1], lake=sys.argv[2]))
print("done", flush=True)
"""


def commits(plane: Path) -> int:
    return len(list((plane.parent / "lake").glob("*/_delta_log/*.json")))


@contextlib.contextmanager
def ingest_processes(plane: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ingest processes, each with its own Spark, that wait for a line; starting them together saves time."""
    command = [sys.executable, "-c", CHILD, config(plane).data, config(plane).lake]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, start_new_session=True, **pipes) for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # With its JVM and workers, which would end later by themselves.
            child.communicate()


def kill_after(plane: Path, child: "subprocess.Popen[str]", count: int, seconds: float) -> bool:
    """Start one process, and kill it some time after `count` commits; returns whether it was still running."""
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    target = commits(plane) + count
    child.stdin.write("go\n")
    child.stdin.flush()
    eventually(
        lambda: commits(plane) >= target or child.poll() is not None, f"commit {target}", polls_max=POLLS_MAX_SPARK
    )
    time.sleep(seconds)
    is_under_way = child.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    exit_code(child)
    return is_under_way


def kill_and_finish(
    spark: SparkSession, plane: Path, expected_content: Callable[[], dict[str, Any]], kills: int, seed: int
) -> None:
    damage(plane)
    right = expected_content()
    dice = random.Random(seed)
    hits = 0
    with ingest_processes(plane, kills) as children:
        for n, child in enumerate(children):
            # The first one at the first commit, when most of the work remains on any machine.
            delay = (dice.randrange(6), dice.uniform(0.0, 0.5)) if n else (1, 0.0)
            hits += kill_after(plane, child, *delay)
            rows = heights(plane) if lake(plane).table(JOURNAL).exists else Counter()
            assert set(rows.values()) <= {1}
    assert hits > 0
    ingest.run(spark, config(plane))
    assert content(plane) == right, f"seed {seed}"


@pytest.mark.rotating  # It starts a Spark of its own; `test_killed_processes_are_continued` needs none.
def test_killed_ingest_is_completed_by_the_next(
    spark: SparkSession, plane: Path, expected_content: Callable[[], dict[str, Any]]
) -> None:
    kill_and_finish(spark, plane, expected_content, kills=1, seed=random.randrange(1 << 32))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_ingest_killed_twenty_times_stores_every_row_once(
    spark: SparkSession, plane: Path, expected_content: Callable[[], dict[str, Any]], seed: int
) -> None:
    kill_and_finish(spark, plane, expected_content, kills=4, seed=seed)
