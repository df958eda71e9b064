"""Sums over what session logs tell equal sums over what was done."""

import runpy
import statistics
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from pyspark.sql import SparkSession

import holdfast
from holdfast.errors import LeaseHeld, TransactionConflict
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.jobs import ingest, rollup
from holdfast.pipeline.lake import Lake, attempts
from holdfast.pipeline.schemas import TABLES
from holdfast.pipeline.views import open_view
from holdfast.testing.clock import ManualClock

planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Summed(SimpleNamespace):
    """A plane, its lake, and what was told of summing it up."""

    config: Config
    told: JobResult
    path: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        return Lake(self.config.lake).table(TABLES[name]).rows().to_pylist()


@pytest.fixture(scope="module")
def summed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Summed:
    path = tmp_path_factory.mktemp("rollup")
    built = planes.build(path / "data", worlds=2, entries=200, messages=900, mails=200)
    contend(path / "data")
    config = Config(data=built.url, lake=str(path / "lake"))
    ingest.run(spark, config)
    return Summed(config=config, told=rollup.run(spark, config, now=NOW), path=path / "data")


def contend(path: Path) -> None:
    """Three who want one lease; and one who wants another one at another hour."""
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


def test_every_message_and_mail_has_a_row(summed: Summed) -> None:
    assert summed.told.ok
    assert summed.told.events == []
    assert summed.told.rows["messages"] == len(summed.rows("messages")) == 900
    assert summed.told.rows["mail"] == len(summed.rows("mail")) == 200


def test_messages_are_in_the_state_that_the_plane_says(summed: Summed) -> None:
    with open_view(summed.config) as view:
        there = {(row.origin or row.queue, row.id): row for row in view.messages("main")}
    for row in summed.rows("messages"):
        found = there.pop((row["queue"], row["id"]), None)
        if found is None:
            assert row["outcome"] == "acked"
        else:
            state = "dead" if found.origin else "leased" if found.state == "leased" else "waiting"
            assert (row["outcome"], row["attempts"]) == (state, found.attempts)
            assert row["error"] == (found.last_error if found.origin else None)
            assert row["put_at"].timestamp() * 1_000 == found.created_ms
    assert not there


def test_sums_of_queues_equal_sums_over_messages(summed: Summed) -> None:
    messages = summed.rows("messages")
    for row in summed.rows("rollup_queues"):
        own = [message for message in messages if message["queue"] == row["queue"]]
        outcomes = Counter(message["outcome"] for message in own)
        assert row["messages"] == len(own)
        assert {name: row[name] for name in outcomes} == outcomes
        assert row["retries"] == sum(max(message["attempts"] - 1, 0) for message in own)
        check_percentiles(row, "wait", [message["wait_ms"] for message in own])
        check_percentiles(row, "service", [message["service_ms"] for message in own])
    assert {message["queue"] for message in messages} <= {row["queue"] for row in summed.rows("rollup_queues")}


def test_a_backlog_is_what_the_plane_has(summed: Summed) -> None:
    with open_view(summed.config) as view:
        there = Counter(row.queue for row in view.messages("main"))
    assert {row["queue"]: row["backlog"] for row in summed.rows("rollup_queues")} == there


def test_sums_of_hours_equal_sums_over_messages(summed: Summed) -> None:
    messages = summed.rows("messages")

    def hour(moment: datetime | None) -> datetime | None:
        return None if moment is None else moment.replace(minute=0, second=0, microsecond=0)

    rows = summed.rows("rollup_queue_hours")
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


def test_dead_letters_are_grouped_by_what_they_died_of(summed: Summed) -> None:
    dead = [message for message in summed.rows("messages") if message["outcome"] == "dead"]
    rows = summed.rows("rollup_errors")
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


def test_mailboxes_say_how_much_waits_and_since_when(summed: Summed) -> None:
    mails = summed.rows("mail")
    with open_view(summed.config) as view:
        there = list(view.mails("main"))
    assert Counter(mail["outcome"] for mail in mails)["confirmed"] == 200 - len(there)
    for row in summed.rows("rollup_mailboxes"):
        own = [mail for mail in mails if mail["recipient"] == row["recipient"]]
        waiting = [mail for mail in there if mail.recipient == row["recipient"]]
        assert (row["mails"], row["waiting"]) == (len(own), len(waiting))
        oldest = min((mail.sent_ms for mail in waiting), default=None)
        assert (None if row["oldest_at"] is None else row["oldest_at"].timestamp() * 1_000) == oldest
        check_percentiles(row, "wait", [mail["wait_ms"] for mail in own])


def test_who_talks_to_whom_is_counted(summed: Summed) -> None:
    pairs = Counter((mail["sender"], mail["recipient"]) for mail in summed.rows("mail"))
    assert {(row["sender"], row["recipient"]): row["mails"] for row in summed.rows("rollup_talk")} == pairs


def test_leases_that_somebody_had_to_wait_for_are_counted_by_hour(summed: Summed) -> None:
    rows = {row["key"]: row for row in summed.rows("rollup_leases")}
    assert set(rows) == {"deploy", "build"}
    assert (rows["deploy"]["contended"], rows["deploy"]["refused"], rows["deploy"]["owners"]) == (3, 3, 2)
    assert rows["build"]["hour"] - rows["deploy"]["hour"] == timedelta(hours=1)
    assert (rows["deploy"]["waited_p99_ms"], rows["deploy"]["waited_max_ms"]) == (0.0, 0)


def test_storage_is_what_the_plane_and_the_lake_have(summed: Summed) -> None:
    rows = {(row["source"], row["name"]): row for row in summed.rows("rollup_storage")}
    assert rows["lake", "messages"]["rows"] == 900
    with open_view(summed.config) as view:
        worlds = list(view.worlds("main"))
    assert rows["plane", "worlds"]["rows"] == len(worlds)
    assert rows["plane", "records"]["rows"] == sum(world.head for world in worlds)
    assert rows["plane", "segments"]["bytes"] == sum(segment.size for world in worlds for segment in world.segments)
    size = sum(file.stat().st_size for file in Path(summed.config.lake, "journal").rglob("*.parquet"))
    assert rows["lake", "journal"]["bytes"] == size


def test_later_runs_change_no_sum_and_keep_the_sizes_of_other_days(spark: SparkSession, summed: Summed) -> None:
    before = {name: sorted(map(str, summed.rows(name))) for name in TABLES if name != "rollup_storage"}
    told = rollup.run(spark, summed.config, now=NOW + timedelta(days=1))
    for name, rows in before.items():
        assert sorted(map(str, summed.rows(name))) == rows, name
    assert {**told.rows, "rollup_storage": 0} == {**summed.told.rows, "rollup_storage": 0}

    with planes.opened(summed.config.data):  # Nobody else can look at a plane that is in use.
        told = rollup.run(spark, summed.config, now=NOW + timedelta(days=1))
    assert told.ok
    assert "could not be looked at" in told.events[0]
    assert {row["backlog"] for row in summed.rows("rollup_queues")} == {None}
    days = Counter((row["day"], row["source"], row["name"]) for row in summed.rows("rollup_storage"))
    assert set(days.values()) == {1}
    assert {day for day, _, _ in days} == {NOW.date(), NOW.date() + timedelta(days=1)}


def test_an_empty_lake_has_empty_sums(spark: SparkSession, tmp_path: Path) -> None:
    with holdfast.open(f"dir:{tmp_path / 'data'}"):
        pass
    told = rollup.run(spark, Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake")), now=NOW)
    assert told.ok
    assert set(told.rows.values()) == {0}


def test_records_that_make_no_sense_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    """Anybody may log records of any kind."""
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.world("ada").create()
        good = {"event": "put", "queue": "jobs", "id": "x", "correlation_id": "x", "at_ms": 5}
        for kind in ("queues", "mail", "leases"):
            for record in ({}, {"event": 5}, {**good, "at_ms": "soon"}, {**good, "at_ms": 1 << 62}, {"id": [1]}):
                plane.activity.log("mine", record, kind=kind)
        plane.activity.log("mine", good, kind="queues")
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    ingest.run(spark, config)
    told = rollup.run(spark, config, now=NOW)
    assert (told.rows["messages"], told.rows["mail"], told.rows["rollup_leases"]) == (1, 0, 0)


def put(config: Config, queue: str, *, universe: str = "main") -> None:
    with planes.opened(config.data, clock=ManualClock(planes.START_MS), universe=universe) as plane:
        plane.queue(queue).put("x")


def versions(config: Config) -> dict[str, int]:
    tables = {name: Lake(config.lake).table(table) for name, table in TABLES.items()}
    return {name: table.delta().version() for name, table in tables.items() if table.exists}


def counts(config: Config) -> dict[tuple[str, str], tuple[int, int | None]]:
    rows = Lake(config.lake).table(TABLES["rollup_queues"]).rows().to_pylist()
    return {(row["universe"], row["queue"]): (row["messages"], row["backlog"]) for row in rows}


def test_what_would_be_made_of_the_same_is_left_as_it_is(spark: SparkSession, tmp_path: Path) -> None:
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


def test_a_run_for_one_universe_leaves_the_others_alone(spark: SparkSession, tmp_path: Path) -> None:
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


def test_of_two_runs_at_the_same_time_the_second_looks_again(spark: SparkSession, tmp_path: Path) -> None:
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    ingest.run(spark, config)
    overtaken: list[JobResult] = []

    def overtake(what: str, done: int, total: int) -> None:
        """When a run has made its messages, and no sums yet, another one begins later, sees more, and ends."""
        if what == "rollup messages" and not overtaken:
            put(config, "jobs")
            ingest.run(spark, config)
            overtaken.append(rollup.run(spark, config, now=NOW))

    told = rollup.run(spark, config, now=NOW, progress=overtake)
    assert [other.rows["messages"] for other in overtaken] == [2]
    assert {**told.rows, "rollup_storage": 0} == {**overtaken[0].rows, "rollup_storage": 0}
    assert counts(config) == {("main", "jobs"): (2, 2)}
    before = versions(config)
    rollup.run(spark, config, now=NOW)
    assert {name for name, version in versions(config).items() if version != before[name]} == {"rollup_storage"}


def test_a_run_that_is_always_overtaken_says_so(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LAKE_ATTEMPTS", 1)
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))
    put(config, "jobs")
    ingest.run(spark, config)

    def overtake(what: str, done: int, total: int) -> None:
        if what == "rollup messages":
            put(config, "jobs")
            ingest.run(spark, config)
            rollup.run(spark, config, now=NOW)

    with pytest.raises(TransactionConflict, match="the roll-ups 1 times in a row; wait until they have ended"):
        rollup.run(spark, config, now=NOW, progress=overtake)


def check_percentiles(row: dict[str, Any], what: str, values: list[int | None]) -> None:
    known = [value for value in values if value is not None]
    for percent in (50, 90, 99):
        expected = None if not known else float(numpy.percentile(known, percent))
        assert row[f"{what}_p{percent}_ms"] == (expected if expected is None else pytest.approx(expected))
    if known:
        assert row[f"{what}_p50_ms"] == statistics.median(known)
