"""Live aggregates by minute: each log line counts once, whatever happens between."""

import random
import threading
import uuid
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from fastness.errors import AnotherHistory, Corrupt, FastnessError, Unreachable
from fastness.pipeline import live_minutes
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import forget, ingest, live
from fastness.pipeline.lake import Lake
from fastness.pipeline.live_minutes import Added, LiveMinutes
from fastness.pipeline.schemas import ACTIVITY, LIVE_QUEUE_MINUTES
from fastness.pipeline.tombstones import Hidden
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header
from fastness.testing.clock import ManualClock
from tests.pipeline import planes

LATE_SECONDS = 600.0
MINUTE = timedelta(minutes=1)
KINDS = ("put", "leased", "acked", "nacked", "deferred", "expired", "dead-lettered", "redriven", "outlived", "purged")


def add_messages(path: Path, *, after_seconds: float, count: int, seed: int) -> None:
    clock = ManualClock(planes.START_MS + round(after_seconds * 1_000))
    with planes.opened(f"dir:{path}", clock=clock) as plane:
        planes.fill_queues(plane, clock, count, random.Random(seed))


def leave_events(path: Path, records: list[bytes], *, logged_ms: int) -> None:
    """Write queue events as a killed process of another node leaves them."""
    header = Header("main", "other", "queues", logged_ms, str(uuid.uuid4()))
    lines = (log_format.line(n, logged_ms, record) for n, record in enumerate(records))
    file = path / "activity" / "main" / log_format.file_name(header)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(log_format.header_line(header) + b"".join(lines))


def event(name: str, at_ms: int, **fields: Any) -> bytes:
    return msgspec.json.encode(
        {"event": name, "queue": "orders", "id": "m-1", "correlation_id": "c", "at_ms": at_ms, **fields}
    )


class Recomputed:
    """The table as it must be, from the lines that `ingest` copies. It knows waits from the put events."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._seen: set[tuple[str, int]] = set()
        self._late: Counter[tuple[str, datetime]] = Counter()
        self._newest = datetime.fromtimestamp(0, UTC)

    def rows(self) -> dict[tuple[str, datetime], dict[str, Any]]:
        ingest.run(None, self._config)
        rows = Lake(self._config.lake).table(ACTIVITY).rows().to_pylist()
        lines = [row for row in rows if row["kind"] == "queues" and '"id"' in row["record"]]
        closed = self._newest - timedelta(seconds=LATE_SECONDS)
        self._newest = max(row["logged_at"] for row in lines)
        found: defaultdict[tuple[str, datetime], Counter[str]] = defaultdict(Counter)
        waits: defaultdict[tuple[str, datetime], list[int]] = defaultdict(list)
        put_ms: dict[str, int] = {}
        for row in lines:
            record = msgspec.json.decode(row["record"])
            if record["event"] == "put":
                put_ms[record["id"]] = record["at_ms"]
        for row in lines:
            record = msgspec.json.decode(row["record"])
            if record["event"] not in KINDS:
                continue
            minute = datetime.fromtimestamp(record["at_ms"] // 60_000 * 60, UTC)
            key = record["queue"], minute
            found[key][record["event"].replace("-", "_")] += 1
            if record["event"] == "leased":
                found[key]["retries"] += record["attempt"] > 1
                if record["attempt"] == 1 and record["id"] in put_ms:
                    waits[key].append(record["at_ms"] - put_ms[record["id"]])
            line = row["file"], row["n"]
            if line not in self._seen:
                self._seen.add(line)
                self._late[key] += minute + MINUTE <= closed
        closed = self._newest - timedelta(seconds=LATE_SECONDS)
        return {
            key: {
                **{kind.replace("-", "_"): counts[kind.replace("-", "_")] for kind in KINDS},
                "retries": counts["retries"],
                "waits": len(waits[key]),
                "wait_sum_ms": sum(waits[key]),
                "wait_max_ms": max(waits[key], default=None),
                "late": self._late[key],
                "final": key[1] + MINUTE <= closed,
            }
            for key, counts in found.items()
        }


def written(config: Config) -> dict[tuple[str, datetime], dict[str, Any]]:
    rows = Lake(config.lake).table(LIVE_QUEUE_MINUTES).rows().to_pylist()
    found = {(row.pop("queue"), row.pop("minute")): row for row in rows}
    assert len(found) == len(rows)
    assert {row.pop("universe") for row in rows} == {"main"}
    return found


@pytest.mark.rotating
def test_live_aggregates_equal_the_log_lines_after_every_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    planes.build(data, worlds=1, entries=20, messages=600)
    config = Config(data=f"dir:{data}", lake=str(tmp_path / "lake"))
    expected = Recomputed(config)
    first = live.run(spark, config, late_seconds=LATE_SECONDS)
    assert first.rows["live_queue_minutes"] == len(written(config)) > 1
    assert written(config) == expected.rows()
    assert sum(row["waits"] for row in written(config).values()) > 400
    assert sum(row["wait_sum_ms"] for row in written(config).values()) > 0

    # Killed between the commit to the lake and Spark's own.
    add_messages(data, after_seconds=3_000, count=50, seed=5)
    add = LiveMinutes.add

    def add_and_die(self: LiveMinutes, *arguments: Any) -> Added | None:
        add(self, *arguments)
        raise RuntimeError("the power fails")

    with monkeypatch.context() as patch, pytest.raises(Exception, match="the power fails"):
        patch.setattr(LiveMinutes, "add", add_and_die)
        live.run(spark, config, late_seconds=LATE_SECONDS)
    rows = expected.rows()
    assert written(config) == rows
    again = live.run(spark, config, late_seconds=LATE_SECONDS)
    assert (again.rows, written(config)) == ({"live_queue_minutes": 0}, rows)

    # A node whose log arrives late, with a line twice and lines that are no events.
    at_ms = planes.START_MS + 61_000
    late = [event("nacked", at_ms, attempt=1)] * 2 + [event("dreamt", at_ms), b'{"event":"put"}']
    leave_events(data, late, logged_ms=planes.START_MS + 62_000)
    before = written(config).get(("orders", datetime.fromtimestamp(at_ms // 60_000 * 60, UTC)), {"nacked": 0})
    outcomes: list[JobResult | FastnessError] = []
    stop = threading.Event()
    failures = iter([Unreachable("The lake is being restarted")])

    def add_after_a_failure(self: LiveMinutes, *arguments: Any) -> Added | None:
        for failure in failures:
            raise failure
        return add(self, *arguments)

    def round_ended(outcome: JobResult | FastnessError) -> None:
        outcomes.append(outcome)
        if isinstance(outcome, JobResult) and outcome.notes:
            stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(LiveMinutes, "add", add_after_a_failure)
        options: dict[str, Any] = {"late_seconds": LATE_SECONDS, "every_seconds": 0.2, "stop": stop}
        result = live.run(spark, config, follow=True, round_ended=round_ended, **options)
    assert result.notes == [
        "2 of 2 events were read after their minute was final. They are counted, and in the column late"
    ]
    assert any(isinstance(outcome, Unreachable) for outcome in outcomes)
    assert written(config) == expected.rows()
    after = written(config)["orders", datetime.fromtimestamp(at_ms // 60_000 * 60, UTC)]
    assert (after["nacked"] - before["nacked"], after["late"], after["final"]) == (2, 2, True)

    # A checkpoint that was lost is reported; a rebuild gives the same counts.
    (checkpoint,) = (tmp_path / "lake" / "_live").glob("*/0")
    checkpoint.rename(tmp_path / "lost")
    with pytest.raises(Corrupt, match="--rebuild"):
        live.run(spark, config)
    counts = {key: {**row, "late": 0} for key, row in written(config).items()}
    live.run(spark, config, late_seconds=LATE_SECONDS, rebuild=True)
    assert written(config) == counts


def test_forgotten_queue_does_not_come_back_by_new_events_or_by_a_rebuild(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    planes.build(data, worlds=1, entries=20, messages=600)
    config = Config(data=f"dir:{data}", lake=str(tmp_path / "lake"))
    live.run(spark, config)
    before = {queue for queue, _ in written(config)}
    forget.run(None, config, queues=["orders"])
    add_messages(data, after_seconds=4_000, count=10, seed=6)
    for rebuild in (False, True):
        live.run(spark, config, rebuild=rebuild)
        assert {queue for queue, _ in written(config)} == before - {"orders"} != before


@pytest.fixture
def minutes(tmp_path: Path) -> LiveMinutes:
    return LiveMinutes(Lake(str(tmp_path / "lake")), "live/x/0", late_ms=600_000)


def aggregates(*events: tuple[str, str, int], kind: str = "put") -> pa.Table:
    """Aggregates of puts, or of another kind of event: universe, queue and time."""
    rows = [
        {"universe": universe, "session": "s", "record": event(kind, at_ms, queue=queue).decode(), "logged_at": at_ms}
        for universe, queue, at_ms in events
    ]
    texts = [(name, pa.string()) for name in ("universe", "session", "record")]
    schema = pa.schema([*texts, ("logged_at", pa.timestamp("ms", "UTC"))])
    return pa.Table.from_batches([live_minutes.aggregate([pa.RecordBatch.from_pylist(rows, schema)], Hidden())])


def test_cancelled_messages_count_as_purged(minutes: LiveMinutes) -> None:
    rows = aggregates(("main", "jobs", 0), ("main", "jobs", 1), kind="cancelled")
    assert minutes.add(0, (None, 1), rows, {"main"}) == Added(1, 2, 0)
    [row] = minutes._table().rows().to_pylist()
    assert (row["purged"], row["put"]) == (2, 0)


def test_days_are_written_to_their_own_files_and_open_minutes_become_final(minutes: LiveMinutes) -> None:
    day, table = 86_400_000, minutes._table()
    for batch, at_ms in enumerate((0, 30_000, day, 2 * day, day + 1, 5 * day)):
        offsets = (batch - 1 if batch else None, batch)
        digests = (None if offsets[0] is None else offsets[0] + 1, batch + 1)
        minutes.add(batch, digests, aggregates(("main", "jobs", at_ms), ("lab", "jobs", at_ms)), {"main", "lab"})
    table.refresh()
    rows = sorted(table.rows(["universe", "minute", "put", "late", "final"]).to_pylist(), key=lambda row: row["minute"])
    assert [(row["put"], row["late"], row["final"]) for row in rows if row["universe"] == "lab"] == [
        (2, 0, True),
        (2, 1, True),
        (1, 0, True),
        (1, 0, False),
    ]
    assert len(table.entries()) == 8


def test_a_batch_that_does_not_follow_the_last_one_is_refused(minutes: LiveMinutes) -> None:
    rows = aggregates(("main", "jobs", 0))
    with pytest.raises(Corrupt, match="does not continue"):
        minutes.add(3, (8, 9), rows, {"main"})
    assert minutes.add(0, (None, 1), rows, {"main"}) == Added(1, 1, 0)
    assert minutes.add(0, (None, 1), rows, {"main"}) is None
    for batch, digests in ((0, (None, 2)), (1, (2, 3)), (2, (1, 3))):
        with pytest.raises(Corrupt, match="does not continue"):
            minutes.add(batch, digests, rows, {"main"})
    assert minutes.add(1, (1, 2), rows, {"main"}) == Added(1, 1, 0)
    assert minutes._table().rows()["put"].to_pylist() == [2]


def test_a_plane_of_another_lineage_is_refused_until_the_lake_follows_it(tmp_path: Path) -> None:
    for name in ("data", "other"):
        planes.build(tmp_path / name, worlds=1, entries=10)
    lake = str(tmp_path / "lake")
    spark: Any = SimpleNamespace()
    live._LiveQuery(spark, Config(data=f"dir:{tmp_path / 'data'}", lake=lake), 0.0, None, rebuild=False)
    with pytest.raises(AnotherHistory):
        live._LiveQuery(spark, Config(data=f"dir:{tmp_path / 'other'}", lake=lake), 0.0, None, rebuild=False)
