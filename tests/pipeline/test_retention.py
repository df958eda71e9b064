"""Rows that are removed by their age: they stay removed, nothing reports them as missing, and roll-ups keep them."""

import random
import re
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import fastness
from fastness.cli.main import root
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import audit, backfill, contents, forget, ingest, reset, rollup, vacuum
from fastness.pipeline.lake import Lake, compaction, retention
from fastness.pipeline.lake.changes import ChangeLog
from fastness.pipeline.schemas import (
    ACTIVITY,
    ENTITY_CHANGES,
    QUEUE_EVENTS,
    ROLLUP_LEASES,
    STATE_CHANGES,
    TABLES,
)
from fastness.testing.clock import ManualClock
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes

DAY_MS = 86_400_000
START = datetime(2026, 11, 1, tzinfo=UTC)
NOW = datetime.fromtimestamp(planes.START_MS // 1_000, UTC) + timedelta(days=30)
TIMES = {table.name for table in TABLES.values() if table.time is not None}
FOLDED = ("messages", "mail", *(name for name in TABLES if name.startswith("rollup_") and name != "rollup_storage"))


def rows(lake: Lake, table: str) -> list[str]:
    return sorted(map(str, lake.table(TABLES[table]).rows().to_pylist()))


def folded(lake: Lake) -> dict[str, list[str]]:
    return {name: rows(lake, name) for name in FOLDED}


# A plane with two lakes: one keeps everything, the other a day.


class Lakes:
    def __init__(self, path: Path) -> None:
        self.path = path / "data"
        self.clock = ManualClock(planes.START_MS)
        self.all = Config(data=f"dir:{self.path}", lake=str(path / "all"))
        self.short = Config(data=f"dir:{self.path}", lake=str(path / "short"))

    def build(self) -> None:
        planes.build(self.path, worlds=2, entries=40, messages=8, mails=6, entities=4, activity=5)
        with self.opened() as plane:
            plane.queue("audited").set_policy(QueuePolicy(history="durable", history_seconds=31_000_000))
            plane.queue("audited").put_many([1, 2])
            plane.state("doc").update({"n": 1})

    def opened(self) -> Any:
        return planes.opened(f"dir:{self.path}", universe="main", clock=self.clock)

    def run(self, job: Callable[..., JobResult], **options: Any) -> JobResult:
        """Run a job on both lakes, without findings; returns the result of the short one."""
        results = [job(None, config, **options) for config in (self.all, self.short)]
        assert [each.findings for each in results] == [[], []]
        assert all(each.ok for each in results)
        return results[1]

    def counts(self, config: Config) -> dict[str, int]:
        return {name: Lake(config.lake).table(TABLES[name]).count() for name in TABLES}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plane and its lakes; each test gets a copy."""
    path: Path = tmp_path_factory.mktemp("filled")
    lakes = Lakes(path)
    lakes.build()
    for job in (ingest.run, contents.run, rollup.run):
        lakes.run(job)
    return path


@pytest.fixture
def lakes(filled: Path, tmp_path: Path) -> Lakes:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return Lakes(tmp_path)


def vacuumed(config: Config, **retain: int) -> JobResult:
    seconds = {name: kept * DAY_MS / 1_000 for name, kept in retain.items()}
    return vacuum.run(None, config, retain=seconds, now=NOW)


RAW = ("activity", "queue_events", "entity_changes", "state_changes")


@pytest.mark.rotating
def test_removed_rows_stay_removed_and_no_job_reports_them(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lake = lakes.counts(lakes.short), Lake(lakes.short.lake)
    marks = {name: dict(lake.table(TABLES[name]).watermarks()) for name in RAW}
    assert all(before[name] for name in RAW)
    result = vacuumed(lakes.short, **dict.fromkeys(RAW, 1))
    assert {name: result.rows[f"{name} rows removed"] for name in RAW} == {name: before[name] for name in RAW}
    for name in RAW:
        table = lake.table(TABLES[name])
        assert marks[name].items() <= {**table.watermarks(), "rewrites": marks[name].get("rewrites")}.items()
        assert table.watermarks()["rewrites"] == marks[name].get("rewrites", 0) + 1  # One commit.

    after = {**before, **dict.fromkeys(RAW, 0)}
    for job, options in (
        (ingest.run, {}),
        (contents.run, {}),
        (rollup.run, {}),
        (audit.run, {}),
        (backfill.run, {"everything": True}),
        (rollup.run, {}),
    ):
        lakes.run(job, **options)
        found = lakes.counts(lakes.short)
        assert {name: found[name] for name in RAW} == {name: after[name] for name in RAW}, job.__module__
        assert found["quarantine"] == 0
        assert folded(Lake(lakes.short.lake)) == folded(Lake(lakes.all.lake)), job.__module__

    lakes.clock.advance_ms(40 * DAY_MS)
    with lakes.opened() as plane:
        plane.queue("audited").put(3)
        plane.queue("orders").put(4)
        plane.state("doc").update({"n": 2})
    new = {name: lakes.run(job).rows[name] for job, name in ((ingest.run, "activity"), (contents.run, "state_changes"))}
    assert new["state_changes"] == 1
    found = lakes.counts(lakes.short)
    assert found["activity"] == new["activity"] > 0
    assert (found["queue_events"], found["state_changes"]) == (1, 1)
    lakes.run(rollup.run)
    assert folded(Lake(lakes.short.lake)) == folded(Lake(lakes.all.lake))
    monkeypatch.setattr(fastness, "__version__", "0.0.0-next")  # All events are folded again.
    lakes.run(rollup.run)
    assert folded(Lake(lakes.short.lake)) == folded(Lake(lakes.all.lake))
    reset.run(None, lakes.short, queues=["audited"], allow_loss=True)
    lakes.run(ingest.run)
    lakes.run(rollup.run)
    assert lakes.counts(lakes.short)["queue_events"] == 1  # Its older events are not ingested again.
    assert folded(Lake(lakes.short.lake)) == folded(Lake(lakes.all.lake))


@pytest.mark.rotating
def test_killed_run_of_contents_adds_no_version_twice(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what it had added before in `states`, if the history has lost it."""
    vacuumed(lakes.short, state_changes=1)
    with lakes.opened() as plane:
        plane.state("other").update(1)

    class Killed(BaseException):
        pass

    def die(*args: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fastness.pipeline.lake.tables.LakeTable.overwrite", die)
        with pytest.raises(Killed):
            contents.run(None, lakes.short)
    contents.run(None, lakes.short)
    found = Lake(lakes.short.lake).table(STATE_CHANGES).rows().to_pylist()
    assert [(row["key"], row["version"], row["removed"]) for row in found] == [("other", 1, False)]


def test_events_stay_until_a_roll_up_has_read_them(tmp_path: Path) -> None:
    lakes = Lakes(tmp_path)
    lakes.build()
    ingest.run(None, lakes.short)
    before = lakes.counts(lakes.short)
    result = vacuumed(lakes.short, activity=1, queue_events=1, entity_changes=1)
    assert result.rows["activity rows removed"] == result.rows["queue_events rows removed"] == 0
    assert result.rows["entity_changes rows removed"] == before["entity_changes"]
    (note,) = (note for note in result.notes if note.startswith("activity: "))
    assert re.fullmatch(r"activity: \d+ files with older rows have events that no roll-up has read; they stay .*", note)
    rollup.run(None, lakes.short)
    with lakes.opened() as plane:
        plane.queue("audited").put(3)
    ingest.run(None, lakes.short)  # Its events stay, and those that were read go.
    assert compaction.compact(None, Lake(lakes.short.lake).table(QUEUE_EVENTS), files_min=3) == (0, 0)
    result = vacuumed(lakes.short, activity=1, queue_events=1)
    assert result.rows["activity rows removed"] == before["activity"]
    assert lakes.counts(lakes.short)["queue_events"] == 1
    rollup.run(None, lakes.short)
    assert vacuumed(lakes.short, queue_events=1).rows["queue_events rows removed"] == 1
    assert rollup.run(None, lakes.short).ok


def test_only_older_days_of_the_chosen_universes_are_removed(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    days = [START + timedelta(days=n, hours=n) for n in range(10)]
    changes = [
        {"universe": universe, "kind": "k", "id": "x", "version": n, "changed_at": at}
        for universe in ("main", "other")
        for n, at in enumerate([*days, None])
    ]
    table = lake.table(ENTITY_CHANGES)
    table.append_rows(pa.Table.from_pylist(changes, ENTITY_CHANGES.schema))
    config = Config(data="dir:nowhere", lake=lake.location.url, universes=("main",))
    result = vacuum.run(None, config, retain={"entity_changes": 5 * 86_400}, now=START + timedelta(days=9, hours=12))
    assert result.rows["entity_changes rows removed"] == 4
    assert result.notes == ["entity_changes: 4 rows from before 2026-11-05 were removed"]
    found = lake.table(ENTITY_CHANGES).rows().to_pylist()
    assert sorted(row["version"] for row in found if row["universe"] == "main") == [4, 5, 6, 7, 8, 9, 10]
    assert sum(row["universe"] == "other" for row in found) == 11
    again = vacuum.run(None, config, retain={"entity_changes": 5 * 86_400}, now=START + timedelta(days=9, hours=12))
    assert again.rows["entity_changes rows removed"] == 0
    assert lake.table(ENTITY_CHANGES).version == table.version + 1


def test_whole_days_of_session_logs_are_dropped_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(tmp_path / "lake", seed=1)
    for day in range(30):
        events.add(4, day)
    table = events.lake.table(ACTIVITY)
    with monkeypatch.context() as patch:
        patch.setattr("fastness.pipeline.lake.tables.LakeTable.rows_of", None)
        removed = retention.remove_older(table, START + timedelta(days=25))
    assert removed == retention.Removed(100, 0)
    assert {file.partitions["day"] for file in table.entries()} == {str(date(2026, 11, day)) for day in range(26, 31)}
    assert retention.retained_ms(table, "main") == round((START + timedelta(days=25)).timestamp() * 1_000)


# Roll-ups of removed events.


class Events:
    """A lake with random events of ten messages, mails and leases on each day."""

    def __init__(self, path: Path, seed: int) -> None:
        self.lake = Lake(str(path))
        self.random = random.Random(seed)
        self.lines = 0

    def add(self, count: int, day: int) -> None:
        lines = [self._line(day) for _ in range(count)]
        self.lake.table(ACTIVITY).append_rows(pa.Table.from_pylist(lines, ACTIVITY.schema))

    def _line(self, day: int) -> dict[str, Any]:
        at_ms = round(START.timestamp() * 1_000) + day * DAY_MS + self.random.randrange(DAY_MS - 1_000)
        kind, id = self.random.choice(["queues", "queues", "mail", "leases"]), self.random.randrange(10)
        records: dict[str, dict[str, Any]] = {
            "queues": {"event": self.random.choice(["put", "leased", "acked"]), "queue": "q", "correlation_id": "c"},
            "mail": {"event": self.random.choice(["stored", "delivered", "confirmed"]), "to": "bob", "sender": "ada"},
            "leases": {"event": self.random.choice(["granted", "refused"]), "key": "k", "owner": f"o{id}"},
        }
        record = {**records[kind], "id": str(id), "at_ms": at_ms, "attempt": 1, "waited_ms": id}
        at = datetime.fromtimestamp(at_ms // 1_000 + 1, UTC)
        self.lines += 1
        names = {"universe": "main", "session": "s", "kind": kind, "file": "log", "n": self.lines}
        return {**names, "logged_at": at, "day": at.date(), "record": msgspec.json.encode(record).decode()}

    def roll_up(self, spark: SparkSession | None = None) -> dict[str, list[str]]:
        rollup.Rollup(spark, self.lake).build(START)
        return folded(self.lake)

    def remove_before(self, day: int) -> None:
        """Remove events; a roll-up need not read the others again."""
        table = self.lake.table(ACTIVITY)
        version, count = table.version, table.count()
        assert retention.remove_older(table, START + timedelta(days=day)).rows == count - table.count() > 0
        log = ChangeLog(table)
        assert log.paths_with_new_rows(version, "main") == set()
        changes = log.since(version, "main")
        assert changes is not None
        assert (changes.new_files, changes.has_removals) == ([], False)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(3))
def test_roll_ups_keep_what_they_have_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As if nothing were removed, also when all events are folded again."""
    short, every = Events(tmp_path / "short", seed), Events(tmp_path / "all", seed)
    for day in range(6):
        for events in (short, every):
            events.add(25, day)
        assert short.roll_up() == every.roll_up(), day
        if day >= 2:
            short.remove_before(day - 1)
        if day % 2:
            monkeypatch.setattr(fastness, "__version__", f"0.0.0-{day}")
        assert short.roll_up() == every.roll_up(), day
    assert short.lake.table(ACTIVITY).count() == 50


def test_executors_keep_what_roll_ups_have_counted(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(tmp_path / "lake", 1)
    for day in range(4):
        events.add(25, day)
    before = events.roll_up()
    events.remove_before(3)
    monkeypatch.setattr(fastness, "__version__", "0.0.0-next")
    monkeypatch.setattr(rollup, "ROLLUP_BUCKET_EVENTS", 5)
    rebuilt: list[list[str]] = []
    too_large = rollup.Rollup._too_large

    def recorded(self: rollup.Rollup, new: Any) -> list[str]:
        rebuilt.append(too_large(self, new))
        return rebuilt[-1]

    monkeypatch.setattr(rollup.Rollup, "_too_large", recorded)
    assert events.roll_up(spark) == before
    assert rebuilt == [["main"]] * 3


@pytest.mark.rotating
def test_forgotten_owner_is_removed_from_kept_hours_of_leases(lakes: Lakes) -> None:
    lake = Lake(lakes.short.lake)
    events = Events(Path(lakes.short.lake), 1)
    events.add(60, 0)
    rollup.run(None, lakes.short)
    assert b"o3" in b"".join(row["waits"] for row in lake.table(ROLLUP_LEASES).rows().to_pylist())
    vacuumed(lakes.short, activity=1)
    forget.run(None, lakes.short, matches=["leases.owner=o3"], vacuum=True)
    rollup.run(None, lakes.short)
    left = lake.table(ROLLUP_LEASES).rows().to_pylist()
    assert left
    assert b"o3" not in b"".join(row["waits"] for row in left)


# The command.


@pytest.mark.parametrize(
    ("retain", "message"),
    [
        ("journal=90d", "The table journal keeps all rows (a world is restored from all of its records"),
        ("messages=90d", "The table messages keeps all rows (`rollup` compares it with the counters"),
        ("planes=90d", "The table planes keeps all rows (it has no history by time)"),
        ("nothing=90d", "There is no table 'nothing'"),
        ("activity=1h", "keep them for at least 1d"),
        ("activity", "use TABLE=AGE"),
        ("activity=soon", "use TABLE=AGE"),
    ],
)
@pytest.mark.usefixtures("spark")  # The command starts a session of its own otherwise, and leaves its signal handler.
def test_retention_that_cannot_be_is_refused(tmp_path: Path, retain: str, message: str) -> None:
    Lake(str(tmp_path)).table(ACTIVITY).delta()
    result = CliRunner().invoke(root, ["pipeline", "vacuum", "--lake", str(tmp_path), "--retain", retain])
    assert result.exit_code == 2
    assert message in result.output
    if "90d" in retain:
        assert result.output.count(", ".join(name for name in TABLES if name in TIMES)) == 1


def test_vacuum_command_removes_rows_and_reports_their_number(
    lakes: Lakes, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spark.range(1).count() == 1
    lake = Lake(lakes.short.lake)
    old = {"universe": "main", "kind": "k", "id": "x", "version": 1, "changed_at": START - timedelta(days=900)}
    lake.table(ENTITY_CHANGES).append_rows(pa.Table.from_pylist([old], ENTITY_CHANGES.schema))
    monkeypatch.setenv("FASTNESS_LAKE_RETAIN", "entity_changes=800d superseded=7d")
    result = CliRunner().invoke(root, ["pipeline", "vacuum", "--lake", lakes.short.lake])
    assert result.exit_code == 0, result.output
    assert "entity_changes rows removed 1" in result.output
    assert lake.table(ENTITY_CHANGES).count() == lakes.counts(lakes.all)["entity_changes"]
