"""Aggregates over session logs match what was done."""

import os
import random
import shutil
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import fastness
from fastness.errors import LeaseHeld, TransactionConflict
from fastness.pipeline import jobs, measures
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import accept, aggregates, folds, ingest, report, rollup
from fastness.pipeline.lake import Lake, LakeTable, compaction, removal, retries
from fastness.pipeline.lifecycles import PresentMessage
from fastness.pipeline.measures import PlaneMeasurements
from fastness.pipeline.schemas import (
    ACTIVITY,
    MAIL,
    MESSAGES,
    QUEUE_EVENTS,
    ROLLUP_LEASES,
    ROLLUP_QUEUES,
    TABLES,
)
from fastness.pipeline.views import open_view
from fastness.testing.clock import ManualClock
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes
from tests.support.forked import start_python

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


class RolledUp(SimpleNamespace):
    """A plane, its lake, and the result of the rollup."""

    config: Config
    result: JobResult
    path: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = Lake(self.config.lake).table(TABLES[name]).rows().to_pylist()
        return rows


@pytest.fixture(scope="module")
def rolled_up(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> RolledUp:
    path = tmp_path_factory.mktemp("rollup")
    built = planes.build(path / "data", worlds=2, entries=200, messages=900, mails=200)
    contend_for_leases(path / "data")
    config = Config(data=built.url, lake=str(path / "lake"))
    ingest.run(spark, config)
    return RolledUp(config=config, result=rollup.run(spark, config, now=NOW), path=path / "data")


def contend_for_leases(path: Path) -> None:
    """Three owners contend for one lease, and one for another lease at another hour."""
    clock = ManualClock(planes.START_MS)
    with planes.opened(f"dir:{path}", clock=clock) as plane:
        plane.lease("deploy").acquire("ada", ttl_seconds=3_600)
        for owner in ("bob", "bob", "eve"):
            with pytest.raises(LeaseHeld):
                plane.lease("deploy").acquire(owner)
        clock.advance_ms(3_600_000)
        plane.lease("build").acquire("ada")
        with pytest.raises(LeaseHeld):
            plane.lease("build").acquire("bob")


@pytest.mark.always
def test_every_message_and_mail_has_a_row(rolled_up: RolledUp) -> None:
    assert rolled_up.result.ok
    assert rolled_up.result.notes == []
    assert rolled_up.result.rows["messages"] == len(rolled_up.rows("messages")) == 900
    assert rolled_up.result.rows["mail"] == len(rolled_up.rows("mail")) == 200


@pytest.mark.always
def test_message_outcomes_match_the_plane(rolled_up: RolledUp) -> None:
    with open_view(rolled_up.config) as view:
        there = {(row.origin or row.queue, row.id): row for row in view.messages("main")}
    for row in rolled_up.rows("messages"):
        found = there.pop((row["queue"], row["id"]), None)
        if found is None:
            assert row["outcome"] == "acked"
        else:
            state = "dead" if found.origin else "leased" if found.state == "leased" else "waiting"
            assert (row["outcome"], row["attempts"]) == (state, found.attempts)
            assert row["error"] == (found.last_error if found.origin else None)
            assert row["put_at"].timestamp() * 1_000 == found.created_ms
    assert not there


@pytest.mark.always
def test_queue_aggregates_match_the_messages(rolled_up: RolledUp) -> None:
    messages = rolled_up.rows("messages")
    for row in rolled_up.rows("rollup_queues"):
        own = [message for message in messages if message["queue"] == row["queue"]]
        outcomes = Counter(message["outcome"] for message in own)
        assert row["messages"] == len(own)
        assert {name: row[name] for name in outcomes} == outcomes
        assert row["retries"] == sum(max(message["attempts"] - 1, 0) for message in own)
        check_percentiles(row, "wait", [message["wait_ms"] for message in own])
        check_percentiles(row, "service", [message["service_ms"] for message in own])
    assert {message["queue"] for message in messages} <= {row["queue"] for row in rolled_up.rows("rollup_queues")}


@contextmanager
def server(url: str, folder: Path) -> Iterator[str]:
    """The URL of a server process with its own session logs, which is killed at the end."""
    command = ["-m", "fastness.cli", "serve", "--data", url, "--port", "0", "--activity", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with start_python(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2]
        finally:
            process.send_signal(signal.SIGKILL)


def put_and_ack(url: str, put: int, acked: int) -> None:
    with fastness.connect(url) as plane:
        queue = plane.queue("jobs")
        for _ in range(put // 50):
            queue.put_many(range(50))
        left = acked
        while left:
            messages = queue.receive_many(min(left, 50), wait_seconds=5)
            for message in messages:
                message.ack()
            left -= len(messages)


def figures(config: Config) -> dict[str, int]:
    (row,) = [row for row in Lake(config.lake).table(ROLLUP_QUEUES).rows().to_pylist() if row["queue"] == "jobs"]
    names = ("messages", "waiting", "leased", "acked", "unknown", "logged_put", "logged_acked")
    return {name: row[name] for name in names}


def test_figures_of_two_servers_on_postgresql_are_those_of_the_plane(
    spark: SparkSession, postgres_url: str, tmp_path: Path
) -> None:
    """Each node has its own logs: without them the counts are right, and the result says what is missing."""
    with server(postgres_url, tmp_path / "one") as one, server(postgres_url, tmp_path / "two") as two:
        for url in (one, two):
            put_and_ack(url, put=100, acked=50)
        exact = {"messages": 200, "waiting": 100, "leased": 0, "acked": 100, "unknown": 0}
        for logged, given in ((1, ["one"]), (2, ["one", "two"])):
            folders = tuple(str(tmp_path / name) for name in given)
            config = Config(data=postgres_url, lake=str(tmp_path / f"lake-{logged}"), activity=folders)
            assert ingest.run(None, config).ok
            result = rollup.run(spark, config, now=NOW)
            found = figures(config)
            assert {name: found[name] for name in exact} == exact
            assert (found["logged_put"], found["logged_acked"]) == (100 * logged, 50 * logged)
            assert result.ok == (logged == 2)
            assert [finding["unlogged"] for finding in result.findings] == [200 - 100 * logged] * (logged < 2)
            totals = report.run(None, config, now=NOW).rows
            assert (totals["acked"], totals["unlogged"]) == (100, 200 - 100 * logged)
            page = Path(config.lake, "reports", "latest.html").read_text()
            assert ("session logs are incomplete" in page) == (logged < 2)


def test_figures_after_a_killed_server_are_those_of_the_plane(spark: SparkSession, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with server(url, tmp_path / "data" / "activity") as address:
        put_and_ack(address, put=900, acked=900)  # What it has logged in the last moments is lost.
    config = Config(data=url, lake=str(tmp_path / "lake"))
    ingest.run(None, config)
    result = rollup.run(spark, config, now=NOW)
    found = figures(config)
    assert {name: found[name] for name in ("messages", "waiting", "leased", "acked", "unknown")} == {
        "messages": 900, "waiting": 0, "leased": 0, "acked": 900, "unknown": 0,
    }  # fmt: skip
    lost = 900 - min(found["logged_put"], found["logged_acked"])
    assert (result.ok, [finding["unlogged"] for finding in result.findings]) == (lost == 0, [lost] * (lost > 0))
    outcomes = Counter(row["outcome"] for row in Lake(config.lake).table(MESSAGES).rows(["outcome"]).to_pylist())
    assert set(outcomes) <= {"acked", "unknown"}
    assert outcomes["acked"] == found["logged_acked"]
    accept.run(None, config, lost=True)
    assert rollup.run(spark, config, now=NOW).ok
    with planes.opened(url) as plane:
        plane.queue("jobs").put(1)
    ingest.run(None, config)
    assert rollup.run(spark, config, now=NOW).ok  # The confirmed loss stays the same.


def test_durable_history_replaces_lost_session_logs(spark: SparkSession, tmp_path: Path) -> None:
    url, clock = f"dir:{tmp_path / 'data'}", ManualClock(planes.START_MS)
    with planes.opened(url, clock=clock) as plane:
        queue = plane.queue("jobs")
        queue.set_policy(QueuePolicy(history="durable", history_seconds=31_000_000))
        queue.put_many(range(50))
        clock.advance_ms(1_000)
        for n, message in enumerate(queue.receive_many(30)):
            clock.advance_ms(1)
            if n < 20:
                message.ack()
            elif n < 25:
                message.reject(error="boom")
    shutil.rmtree(tmp_path / "data" / "activity", ignore_errors=True)
    shutil.rmtree(tmp_path / "data" / "objects", ignore_errors=True)  # Rotated logs.
    config = Config(data=url, lake=str(tmp_path / "lake"))
    assert ingest.run(None, config).rows["queue_events"] == 50 + 30 + 20 + 5
    result = rollup.run(spark, config, now=NOW)
    assert (result.ok, result.notes) == (True, [])
    assert figures(config) == {
        "messages": 50, "waiting": 20, "leased": 5, "acked": 20, "unknown": 0, "logged_put": 50, "logged_acked": 20,
    }  # fmt: skip
    (row,) = [row for row in Lake(config.lake).table(ROLLUP_QUEUES).rows().to_pylist() if row["queue"] == "jobs"]
    assert (row["dead"], row["wait_p50_ms"]) == (5, 1_000.0)


def test_backlog_matches_the_plane(rolled_up: RolledUp) -> None:
    with open_view(rolled_up.config) as view:
        there = Counter(row.queue for row in view.messages("main"))
    assert {row["queue"]: row["backlog"] for row in rolled_up.rows("rollup_queues")} == there


@pytest.mark.always
def test_hourly_aggregates_match_the_messages(rolled_up: RolledUp) -> None:
    messages = rolled_up.rows("messages")

    def hour(time_: datetime | None) -> datetime | None:
        return None if time_ is None else time_.replace(minute=0, second=0, microsecond=0)

    rows = rolled_up.rows("rollup_queue_hours")
    assert len({(row["queue"], row["hour"]) for row in rows}) == len(rows) > 0
    for row in rows:
        own = [message for message in messages if message["queue"] == row["queue"]]
        ended = [message for message in own if hour(message["ended_at"]) == row["hour"]]
        started = [message for message in own if hour(message["first_leased_at"]) == row["hour"]]
        assert row["put"] == sum(hour(message["put_at"]) == row["hour"] for message in own)
        assert row["started"] == len(started)
        assert (row["acked"], row["dead"]) == tuple(
            sum(message["outcome"] == outcome for message in ended) for outcome in ("acked", "dead")
        )
        assert row["retries"] == sum(message["attempts"] - 1 for message in ended)
        check_percentiles(row, "wait", [message["wait_ms"] for message in started])
        check_percentiles(row, "service", [message["service_ms"] for message in ended])
    for count in ("put", "acked", "dead"):
        outcome = {"put": 900}.get(count) or sum(message["outcome"] == count for message in messages)
        assert sum(row[count] for row in rows) == outcome


def test_dead_letters_are_grouped_by_error(rolled_up: RolledUp) -> None:
    dead = [message for message in rolled_up.rows("messages") if message["outcome"] == "dead"]
    rows = rolled_up.rows("rollup_errors")
    assert sum(row["letters"] for row in rows) == len(dead) > 0
    assert {row["signature"] for row in rows} <= {
        "timeout after <n> s",
        "connection refused by <ip>",
        "KeyError: 'order'",
        "The lease of <hex> ended before it was settled",
    }
    refused = next(row for row in rows if row["signature"] == "connection refused by <ip>")
    theirs = [message for message in dead if message["queue"] == refused["queue"]]
    own = [message for message in theirs if message["error"].startswith("connection refused")]
    assert refused["letters"] == len(own)
    assert (refused["first_at"], refused["last_at"]) == (
        min(message["ended_at"] for message in own),
        max(message["ended_at"] for message in own),
    )
    assert (refused["example"], refused["example_id"] in {message["id"] for message in own}) == (own[0]["error"], True)


def test_mailboxes_have_waiting_count_and_oldest_time(rolled_up: RolledUp) -> None:
    mails = rolled_up.rows("mail")
    with open_view(rolled_up.config) as view:
        there = list(view.mails("main"))
    assert Counter(mail["outcome"] for mail in mails)["confirmed"] == 200 - len(there)
    for row in rolled_up.rows("rollup_mailboxes"):
        own = [mail for mail in mails if mail["recipient"] == row["recipient"]]
        waiting = [mail for mail in there if mail.recipient == row["recipient"]]
        assert (row["mails"], row["waiting"]) == (len(own), len(waiting))
        oldest = min((mail.sent_ms for mail in waiting), default=None)
        assert (None if row["oldest_at"] is None else row["oldest_at"].timestamp() * 1_000) == oldest
        check_percentiles(row, "wait", [mail["wait_ms"] for mail in own])


def test_mail_is_counted_by_sender_and_recipient(rolled_up: RolledUp) -> None:
    pairs = Counter((mail["sender"], mail["recipient"]) for mail in rolled_up.rows("mail"))
    assert {(row["sender"], row["recipient"]): row["mails"] for row in rolled_up.rows("rollup_talk")} == pairs


def test_contended_leases_are_counted_by_hour(rolled_up: RolledUp) -> None:
    rows = {row["key"]: row for row in rolled_up.rows("rollup_leases")}
    assert set(rows) == {"deploy", "build"}
    assert (rows["deploy"]["contended"], rows["deploy"]["refused"], rows["deploy"]["owners"]) == (3, 3, 2)
    assert rows["build"]["hour"] - rows["deploy"]["hour"] == timedelta(hours=1)
    assert (rows["deploy"]["waited_p99_ms"], rows["deploy"]["waited_max_ms"]) == (0.0, 0)


def test_storage_matches_the_plane_and_the_lake(rolled_up: RolledUp) -> None:
    rows = {(row["source"], row["name"]): row for row in rolled_up.rows("rollup_storage")}
    assert rows["lake", "messages"]["rows"] == 900
    with open_view(rolled_up.config) as view:
        worlds = list(view.worlds("main"))
    assert rows["plane", "worlds"]["rows"] == len(worlds)
    assert rows["plane", "records"]["rows"] == sum(world.head for world in worlds)
    assert rows["plane", "segments"]["bytes"] == sum(segment.size for world in worlds for segment in world.segments)
    size = sum(file.stat().st_size for file in Path(rolled_up.config.lake, "journal").glob("universe=*/*.parquet"))
    assert rows["lake", "journal"]["bytes"] == size


def test_later_runs_change_nothing_and_keep_sizes_of_other_days(spark: SparkSession, rolled_up: RolledUp) -> None:
    before = {name: sorted(map(str, rolled_up.rows(name))) for name in TABLES if name != "rollup_storage"}
    result = rollup.run(spark, rolled_up.config, now=NOW + timedelta(days=1))
    for name, rows in before.items():
        assert sorted(map(str, rolled_up.rows(name))) == rows, name
    assert {**result.rows, "rollup_storage": 0} == {**rolled_up.result.rows, "rollup_storage": 0}

    with planes.opened(rolled_up.config.data):  # A plane that is in use cannot be read.
        result = rollup.run(spark, rolled_up.config, now=NOW + timedelta(days=1))
    assert result.ok
    assert "could not be read" in result.notes[0]
    assert {row["backlog"] for row in rolled_up.rows("rollup_queues")} == {None}
    days = Counter((row["day"], row["source"], row["name"]) for row in rolled_up.rows("rollup_storage"))
    assert set(days.values()) == {1}
    assert {day for day, _, _ in days} == {NOW.date(), NOW.date() + timedelta(days=1)}


def test_empty_lake_has_empty_aggregates(spark: SparkSession, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}"):
        pass
    result = rollup.run(spark, Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake")), now=NOW)
    assert result.ok
    assert set(result.rows.values()) == {0}


def test_invalid_records_are_skipped(spark: SparkSession, tmp_path: Path) -> None:
    """Any client may log records of any kind."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.world("ada").create()
        good = {"event": "put", "queue": "jobs", "id": "x", "correlation_id": "x", "at_ms": 5}
        for kind in ("queues", "mail", "leases"):
            for record in ({}, {"event": 5}, {**good, "at_ms": "soon"}, {**good, "at_ms": 1 << 62}, {"id": [1]}):
                plane.activity.log("mine", record, kind=kind)
        plane.activity.log("mine", good, kind="queues")
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    ingest.run(spark, config)
    result = rollup.run(spark, config, now=NOW)
    assert (result.rows["messages"], result.rows["mail"], result.rows["rollup_leases"]) == (1, 0, 0)


def put(config: Config, queue: str, *, universe: str = "main") -> None:
    with planes.opened(config.data, clock=ManualClock(planes.START_MS), universe=universe) as plane:
        plane.queue(queue).put("x")


def versions(config: Config) -> dict[str, int]:
    tables = {name: Lake(config.lake).table(table) for name, table in TABLES.items()}
    return {name: table.delta().version() for name, table in tables.items() if table.exists}


def counts(config: Config) -> dict[tuple[str, str], tuple[int, int | None]]:
    rows = Lake(config.lake).table(TABLES["rollup_queues"]).rows().to_pylist()
    return {(row["universe"], row["queue"]): (row["messages"], row["backlog"]) for row in rows}


def test_tables_with_unchanged_inputs_are_not_rewritten(spark: SparkSession, tmp_path: Path) -> None:
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    put(config, "jobs", universe="other")
    ingest.run(spark, config)
    first = rollup.run(spark, config, now=NOW)
    before = versions(config)
    again = rollup.run(spark, config, now=NOW)
    assert {**again.rows, "rollup_storage": 0} == {**first.rows, "rollup_storage": 0}
    assert {name for name, version in versions(config).items() if version != before[name]} == {"rollup_storage"}

    others = {file.path for file in Lake(config.lake).table(TABLES["messages"]).entries() if file.universe == "other"}
    put(config, "jobs")
    ingest.run(spark, config)
    assert rollup.run(spark, config, now=NOW).rows["messages"] == 3
    assert counts(config) == {("main", "jobs"): (2, 2), ("other", "jobs"): (1, 1)}
    assert others <= {file.path for file in Lake(config.lake).table(TABLES["messages"]).entries()}


def test_run_for_one_universe_does_not_change_others(spark: SparkSession, tmp_path: Path) -> None:
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    put(config, "jobs", universe="other")
    ingest.run(spark, config)
    rollup.run(spark, config, now=NOW)
    put(config, "jobs")
    put(config, "jobs", universe="other")
    ingest.run(spark, config)
    only = Config(data=config.data, lake=config.lake, universes=("other",))
    assert rollup.run(spark, only, now=NOW).rows["messages"] == 2
    assert counts(config) == {("main", "jobs"): (1, 1), ("other", "jobs"): (2, 2)}


def test_second_of_two_concurrent_runs_starts_over(spark: SparkSession, tmp_path: Path) -> None:
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    ingest.run(spark, config)
    overtaken: list[JobResult] = []

    def overtake(name: str, done: int, total: int) -> None:
        """After a run has built its messages, and before its aggregates, another run sees more and completes."""
        if name == "rollup messages" and not overtaken:
            put(config, "jobs")
            ingest.run(spark, config)
            overtaken.append(rollup.run(spark, config, now=NOW))

    result = rollup.run(spark, config, now=NOW, progress=overtake)
    assert [other.rows["messages"] for other in overtaken] == [2]
    assert {**result.rows, "rollup_storage": 0} == {**overtaken[0].rows, "rollup_storage": 0}
    assert counts(config) == {("main", "jobs"): (2, 2)}
    before = versions(config)
    rollup.run(spark, config, now=NOW)
    assert {name for name, version in versions(config).items() if version != before[name]} == {"rollup_storage"}


def test_run_that_always_conflicts_raises(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LAKE_ATTEMPTS", 1)
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    ingest.run(spark, config)

    def overtake(name: str, done: int, total: int) -> None:
        if name == "rollup messages":
            put(config, "jobs")
            ingest.run(spark, config)
            rollup.run(spark, config, now=NOW)

    with pytest.raises(TransactionConflict, match="the roll-ups first, 1 times in a row; wait until they end"):
        rollup.run(spark, config, now=NOW, progress=overtake)


def check_percentiles(row: dict[str, Any], name: str, values: list[int | None]) -> None:
    known = [value for value in values if value is not None]
    for percent in (50, 90, 99):
        expected = None if not known else float(numpy.percentile(known, percent))
        assert row[f"{name}_p{percent}_ms"] == (expected if expected is None else pytest.approx(expected))
    if known:
        assert row[f"{name}_p50_ms"] == statistics.median(known)


def test_writes_between_the_jobs_of_a_run_do_not_show(spark: SparkSession, tmp_path: Path) -> None:
    """All jobs of a run read one view, so that one report is about one moment."""
    built = planes.build(tmp_path / "data", worlds=2, entries=100, messages=30, mails=10, entities=3, activity=5)
    config = Config(data=built.url, lake=str(tmp_path / "lake"))
    with open_view(config) as view:
        before = measures.measure(view)
        logs = {file.id for file in view.logs("main")}
    results = []
    for result in jobs.run_all(spark, config):
        results.append(result)
        planes.extend(tmp_path / "data", built.worlds, 7, seed=len(results))
        put(config, "orders", universe=f"later-{len(results)}")
        with planes.opened(built.url) as plane:
            plane.queue("orders").put(b"x" * 30_000)
            plane.mailbox("agent-1").send("agent-2", b"late")
    lake = Lake(config.lake)
    assert [(each.job, each.findings) for each in results] == [(name, []) for name in jobs.FULL_RUN]
    assert lake.table(TABLES["journal"]).count() == results[1].rows["records"] == built.entries
    assert {row["file"] for row in lake.table(TABLES["activity"]).rows(["file"]).to_pylist()} == logs
    backlogs = lake.table(TABLES["rollup_queues"]).rows().to_pylist()
    assert {(row["universe"], row["queue"], row["backlog"]) for row in backlogs} == {
        each[:3] for each in before.backlogs
    }
    sizes = lake.table(TABLES["rollup_storage"]).rows().to_pylist()
    plane_sizes = {(row["universe"], row["name"], row["rows"]) for row in sizes if row["source"] == "plane"}
    assert plane_sizes == {(size.universe, size.name, size.rows) for size in before.sizes}
    assert results[2].rows["blobs"] == next(size.rows for size in before.sizes if size.name == "blobs")
    assert jobs.run("ingest", spark, config).rows["journal"] == 7 * len(results) * len(built.worlds)  # All later ones.


class Logs:
    """A lake whose sources change at random: events in any order, duplicates, compactions and removals."""

    def __init__(self, path: Path, seed: int) -> None:
        self.lake = Lake(str(path))
        self.path = path
        self.random = random.Random(seed)
        self.plane: PlaneMeasurements | None = None
        self._records: list[tuple[str, dict[str, Any]]] = []
        self._lines = 0

    def add(self, count: int, *, ids: range = range(40)) -> None:
        """One or two new files of `activity`, and sometimes one of `queue_events`."""
        rows = []
        for _ in range(count):
            universe = self.random.choice(["main", "main", "other"])
            if not self._records or self.random.random() > 0.2:
                self._records.append(self._record(self.random.choice(ids)))
            kind, record = self.random.choice(self._records[-20:])
            self._lines += 1
            names = {"universe": universe, "kind": kind, "file": f"log-{self._lines % 3}", "n": self._lines}
            rows.append({**names, "record": msgspec.json.encode(record).decode()})
        self.lake.table(ACTIVITY).append_rows(pa.Table.from_pylist(rows, ACTIVITY.schema))
        if self.random.random() < 0.3:
            history = [self._history(self.random.choice(ids)) for _ in range(5)]
            self.lake.table(QUEUE_EVENTS).append_rows(pa.Table.from_pylist(history, QUEUE_EVENTS.schema))

    def _record(self, id: int) -> tuple[str, dict[str, Any]]:
        at_ms = self.random.randrange(10_000_000)
        kind = self.random.choice(["queues", "queues", "queues", "mail", "leases"])
        if kind == "mail":
            event = self.random.choice(["stored", "delivered", "confirmed", "expired", "rejected", "sung"])
            return kind, {"event": event, "to": f"to-{id % 3}", "sender": "ada", "id": str(id % 7), "at_ms": at_ms}
        if kind == "leases":
            event = self.random.choice(["granted", "refused", "gone"])
            names = {"key": f"key-{id % 3}", "owner": f"owner-{id % 5}", "waited_ms": id}
            return kind, {"event": event, "at_ms": at_ms, **names}
        event = self.random.choice(["put", "put", "leased", "leased", "acked", "nacked", "dead-lettered", "sung"])
        record: dict[str, Any] = {"event": event, "queue": f"queue-{id % 3}", "id": str(id), "at_ms": at_ms}
        record["correlation_id"] = "c"
        if event != "put":
            record["attempt"] = self.random.randint(1, 3)
        if event == "put" and self.random.random() < 0.5:
            record["correlation_id"] = f"c-{self.random.randrange(5)}"
        if event == "dead-lettered":
            record["error"] = self.random.choice([None, "timeout after 5 s", "timeout after 7 s", "no host"])
        return kind, record

    def _history(self, id: int) -> dict[str, Any]:
        at = datetime.fromtimestamp(self.random.randrange(10_000), UTC)
        event = self.random.choice(["put", "acked", "paused"])
        names = {"universe": "main", "queue": f"queue-{id % 3}", "id": str(id)}
        return {**names, "event": event, "changed_at": at, "attempt": int(event != "put")}

    def measure(self) -> None:
        """Another state of the plane, or none."""
        states = ("ready", "leased", "dead", "delayed")
        present = [
            PresentMessage("main", f"queue-{id % 3}", str(id), self.random.choice(states), 5, 2, 9_000, "boom", id > 35)
            for id in self.random.sample(range(45), 12)
        ]
        backlogs = [("main", f"queue-{n}", n, 10 * n, 5) for n in range(self.random.randrange(5))]
        boxes: list[tuple[str, str, int, int | None]] = [
            ("main", f"to-{n}", n, 7) for n in range(self.random.randrange(5))
        ]
        plane = PlaneMeasurements(backlogs, boxes, present, [], 5_000_000, ["main"])
        self.plane = self.random.choice([plane, plane, None])

    def compact(self) -> None:
        for table in (ACTIVITY, QUEUE_EVENTS, MESSAGES, MAIL):
            compaction.compact(None, self.lake.table(table), files_min=2)

    def compact_and_vacuum(self) -> None:
        """The files that a compaction has replaced are gone."""
        self.compact()
        for table in (ACTIVITY, QUEUE_EVENTS):
            compaction.vacuum(self.lake.table(table), keep_hours=0)

    def remove(self) -> None:
        name, low = f"log-{self.random.randrange(3)}", self.random.randrange(self._lines + 1)
        removal.remove(self.lake.table(ACTIVITY), "main", lambda file: low if file == name else None, {})

    def roll_up(self, spark: SparkSession | None = None) -> None:
        rollup.Rollup(spark, self.lake, measure=lambda: self.plane).build(NOW)

    def rebuilt(self, path: Path, spark: SparkSession | None = None) -> "Logs":
        """Another lake with the same sources, rolled up from the beginning."""
        other = Logs(path, 0)
        other.plane = self.plane
        for table in (ACTIVITY, QUEUE_EVENTS):
            if (self.path / table.name).exists():
                shutil.copytree(self.path / table.name, path / table.name)
        other.roll_up(spark)
        return other

    def rows(self) -> dict[str, list[str]]:
        names = [name for name in rollup_tables() if name != "rollup_storage"]
        return {name: sorted(map(str, self.lake.table(TABLES[name]).rows().to_pylist())) for name in names}


def rollup_tables() -> list[str]:
    return ["messages", "mail", *(name for name in TABLES if name.startswith("rollup_"))]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a few rows many files, which are split and merged."""
    monkeypatch.setattr(folds, "ROLLUP_FILE_ROWS", 15)
    monkeypatch.setattr(folds, "ROLLUP_SMALL_FILE_ROWS", 6)
    monkeypatch.setattr(folds, "ROLLUP_SMALL_FILES", 3)


def check_history_of_a_lake(path: Path, seed: int, steps: int) -> None:
    logs = Logs(path / "lake", seed)
    logs.add(30)
    changes = [
        lambda: logs.add(10),
        lambda: logs.add(3),
        logs.measure,
        logs.compact,
        logs.compact_and_vacuum,
        logs.remove,
    ]
    for step in range(steps):
        for change in logs.random.choices(changes, [6, 4, 3, 2, 1, 1], k=3):
            change()
        logs.roll_up()
        assert logs.rows() == logs.rebuilt(path / f"rebuilt-{step}").rows(), (seed, step)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.rotating) for n in (1, 2))])
def test_added_events_give_the_rows_of_a_rebuild(tmp_path: Path, small_files: None, seed: int) -> None:
    check_history_of_a_lake(tmp_path, seed, steps=4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 160))
def test_added_events_give_the_rows_of_a_rebuild_for_many_histories(
    tmp_path: Path, small_files: None, seed: int
) -> None:
    check_history_of_a_lake(tmp_path, seed, steps=10)


def test_executors_build_the_same_rows_as_one_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path / "lake", 5)
    for _ in range(3):
        logs.add(100)
    logs.measure()
    logs.roll_up()
    monkeypatch.setattr(rollup, "ROLLUP_BUCKET_EVENTS", 100)
    monkeypatch.setattr(aggregates, "ROLLUP_INLINE_ROWS", 0)
    assert logs.rebuilt(tmp_path / "with-spark", spark).rows() == logs.rows()


def test_run_reads_only_new_files_and_rewrites_only_changed_ones(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "lake", 1)
    logs.add(300)
    logs.roll_up()
    before = {table.name: logs.lake.table(table).entries() for table in (MESSAGES, MAIL, ROLLUP_LEASES)}
    for file in logs.lake.table(ACTIVITY).entries():
        Path(logs.path, "activity", file.path).unlink()
    logs.add(100, ids=range(1_000, 1_100))
    logs.roll_up()
    messages = logs.lake.table(MESSAGES)
    assert {row["id"] for row in messages.rows().to_pylist()} > {"1001"}
    settled = {file.path for file in before["messages"] if messages.rows_of(file, ["settled"]).column(0)[0].as_py()}
    assert len(settled) == 2  # One for each universe.
    assert settled < {file.path for file in messages.entries()}


def test_rows_of_another_program_version_are_folded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Logs(tmp_path / "lake", 2)
    logs.add(50)
    with monkeypatch.context() as patched:
        patched.setattr(fastness, "__version__", "0.0.1")
        logs.roll_up()
        messages = logs.lake.table(MESSAGES)
        messages.overwrite(messages.rows().slice(0, 1).to_batches())  # Its rows differ.
    logs.roll_up()
    assert logs.rows() == logs.rebuilt(tmp_path / "rebuilt").rows()


def test_run_killed_at_any_commit_leaves_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Logs(tmp_path / "lake", 8)
    logs.add(60)
    logs.measure()
    logs.roll_up()
    commit, killed = LakeTable._commit, 0
    for kill_at in range(9):
        logs.add(4)
        left = iter([True] * kill_at + [False])

        def commit_or_die(table: LakeTable, *given: Any, left: Iterator[bool] = left, **options: Any) -> None:
            if not next(left, True):
                raise KeyboardInterrupt
            commit(table, *given, **options)

        with monkeypatch.context() as patched:
            patched.setattr(LakeTable, "_commit", commit_or_die)
            try:
                logs.roll_up()
            except KeyboardInterrupt:
                killed += 1
    assert killed >= 8  # Each table has a commit.
    logs.roll_up()
    assert logs.rows() == logs.rebuilt(tmp_path / "rebuilt").rows()


@pytest.mark.rotating
@pytest.mark.parametrize("meanwhile", ["a roll-up", "a compaction"])
def test_run_that_was_overtaken_adds_no_event_twice(tmp_path: Path, meanwhile: str) -> None:
    logs = Logs(tmp_path / "lake", 9)
    logs.add(60)
    logs.roll_up()
    logs.add(20)
    overtaken = rollup.Rollup(None, logs.lake)
    if meanwhile == "a roll-up":
        logs.add(20)
        logs.roll_up()
    else:
        logs.compact()
    with pytest.raises(TransactionConflict):
        overtaken.build(NOW)
    logs.roll_up()
    assert logs.rows() == logs.rebuilt(tmp_path / "rebuilt").rows()
