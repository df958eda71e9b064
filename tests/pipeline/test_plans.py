"""What the data source plans and filters, without Spark."""

import os
import runpy
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from holdfast.errors import Corrupt, InvalidArgument, InvalidName, PathUnusable, Unreachable
from holdfast.limits import SOURCE_STAGED_SECONDS
from holdfast.pipeline import loading
from holdfast.pipeline.source import options, plans, tables
from holdfast.pipeline.source.filters import COLUMNS, Conditions, split
from holdfast.pipeline.source.options import options_of
from holdfast.pipeline.source.readers import StreamReader
from holdfast.pipeline.source.writers import BatchWriter, load_of
from holdfast.pipeline.views import open_view

SERVING = Path(__file__).parents[1] / "end_to_end" / "serving.py"
serving = runpy.run_path(str(SERVING))["serving"]
planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))  # Test files cannot import.

ROWS = pa.RecordBatch.from_pydict(
    {
        "universe": ["main"] * 4,
        "world": ["a", "b", None, "ab"],
        "height": pa.array([1, 2, 3, 4], pa.int64()),
        "at": pa.array([0, 1_000, 2_000, None], pa.timestamp("ms", tz="UTC")),
    }
)


@pytest.mark.parametrize(
    ("filter", "heights"),
    [
        (EqualTo(("world",), "a"), [1]),
        (In(("world",), ("a", "b", None)), [1, 2]),
        (StringStartsWith(("world",), "a"), [1, 4]),
        (IsNotNull(("world",)), [1, 2, 4]),
        (LessThan(("height",), 2), [1]),
        (LessThanOrEqual(("height",), 2), [1, 2]),
        (GreaterThan(("height",), 2), [3, 4]),
        (GreaterThanOrEqual(("height",), 2), [2, 3, 4]),
    ],
)
def test_filters_that_are_kept_are_kept_to_the_letter(filter, heights):
    conditions, left = split("journal", [filter])
    assert left == []
    assert conditions.apply(ROWS)["height"].to_pylist() == heights


def test_moments_are_compared_as_moments_with_a_zone_or_without():
    for value in (datetime(1970, 1, 1, 0, 0, 1), datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)):  # noqa: DTZ001
        conditions, left = split("activity", [GreaterThan(("at",), value)])
        assert left == []
        assert conditions.apply(ROWS)["height"].to_pylist() == [3]


@pytest.mark.parametrize(
    ("filter", "heights"),
    [
        (LessThan, [1, 2]),
        (LessThanOrEqual, [1, 2]),
        (GreaterThan, [3]),
        (GreaterThanOrEqual, [3]),
        (EqualTo, []),
    ],
)
def test_moments_are_compared_with_microseconds_though_the_plane_knows_none(filter, heights):
    moment = datetime(1970, 1, 1, 0, 0, 1, 500, tzinfo=UTC)  # Half a millisecond behind the second row.
    conditions, _ = split("activity", [filter(("at",), moment)])
    assert conditions.apply(ROWS)["height"].to_pylist() == heights
    conditions, _ = split("activity", [In(("at",), (moment,))])
    assert conditions.apply(ROWS).num_rows == 0


def test_other_filters_are_left_to_spark():
    filters = [
        Not(EqualTo(("world",), "a")),
        IsNull(("world",)),
        StringContains(("world",), "a"),
        EqualTo(("payload",), "x"),
        EqualTo(("world", "nested"), "x"),
        EqualTo(("world",), None),
        In(("world",), (None,)),
    ]
    conditions, left = split("journal", filters)
    assert left == filters
    assert conditions == Conditions()


def test_heights_have_bounds():
    conditions, _ = split("journal", [GreaterThan(("height",), 5), In(("height",), (3, 9)), LessThan(("height",), 9)])
    assert conditions.bounds("height") == (6, 8)
    assert Conditions().bounds("height") == (None, None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def planned(data: Path, filters: tuple[object, ...] = (), **given: str) -> list[plans.Share]:
    chosen = options_of({"url": f"dir:{data}", **given})  # Or another `url`.
    conditions, _ = split(chosen.table, filters)
    with open_view(chosen.config) as view:
        return plans.shares(view, chosen, conditions)


def read(data: Path, shares: list[plans.Share], filters: tuple[object, ...] = (), **given: str) -> list[dict]:
    chosen = options_of({"url": f"dir:{data}", **given})
    conditions, _ = split(chosen.table, filters)
    return [row for share in shares for batch in plans.read(share, chosen, conditions) for row in batch.to_pylist()]


def test_a_filter_spares_the_pieces_that_it_does_not_want(data):
    planes.build(data, worlds=3, entries=300)
    filters = (EqualTo(("world",), "world-0001"), GreaterThanOrEqual(("height",), 70), LessThan(("height",), 100))
    (share,) = planned(data, filters)
    assert [(piece.world, piece.start, piece.end, piece.span) for piece in share.pieces] == [
        ("world-0001", 64, 127, (70, 99))
    ]
    rows = read(data, [share], filters)
    assert [row["height"] for row in rows] == list(range(70, 100))
    assert planned(data, (EqualTo(("universe",), "other"),)) == []
    assert planned(data, (EqualTo(("height",), 10_000),)) == []


def test_partitions_hold_about_as_many_rows_as_they_should(data):
    built = planes.build(data, worlds=4, entries=300)
    shares = planned(data, rowsPerPartition="200")
    assert len(shares) >= 4
    assert all(sum(piece.rows for piece in share.pieces) <= 200 + 301 for share in shares)
    rows = read(data, shares)
    assert len(rows) == len({(row["world"], row["height"]) for row in rows}) == built.entries
    assert len(planned(data)) == 1


def test_damage_fails_a_read_unless_it_is_to_be_passed_over(data):
    built = planes.build(data, worlds=2, entries=300)
    start, end = planes.flip_byte(data, "world-0001", 1)
    shares = planned(data)
    with pytest.raises(Corrupt, match=rf"world-0001 of main, heights {start} to {end}.*checksum"):
        read(data, shares)
    assert len(read(data, shares, damage="skip")) == built.entries - 64


def test_a_damaged_line_fails_a_read_and_a_torn_one_does_not(data):
    planes.build(data, worlds=1, entries=10)
    planes.leave_log(data, 5, torn=True)
    assert len(read(data, planned(data, table="activity"), table="activity")) == 4
    planes.leave_log(data, 5, garbled=2, session="other")
    shares = planned(data, table="activity")
    with pytest.raises(Corrupt, match="lines 2 to 2"):
        read(data, shares, table="activity")
    assert len(read(data, shares, table="activity", damage="skip")) == 4 + 4


def test_a_session_log_that_a_server_lost_is_passed_over_like_any_damage(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    planes.build(data, worlds=1, entries=10, activity=30)
    lost = sorted(data.glob("objects/activity/main/*/*_metrics_*"))[0]
    lines = lost.read_bytes().count(b"\n") - 1
    lost.unlink()
    with serving(f"dir:{data}") as server:
        given = {"url": server.url, "table": "activity"}
        shares = planned(data, **given)
        with pytest.raises(Corrupt, match="restore it from a backup"):
            read(data, shares, **given)
        rows = read(data, shares, damage="skip", **given)
    assert sum(row["kind"] == "metrics" for row in rows) == 30 - lines


def test_batches_of_rows_are_bounded_by_their_bytes(data, monkeypatch):
    with planes.opened(f"dir:{data}") as plane:
        for n in range(40):
            plane.mailbox("ada").send("bob", b"x" * 1_000 + b"%d" % n)
    monkeypatch.setattr(tables, "ROWS_BATCH_BYTES", 10_000)
    with open_view(options_of({"url": f"dir:{data}"}).config) as view:
        batches = list(tables.batches(view, "mail", "main"))
    assert sum(batch.num_rows for batch in batches) == 40
    assert max(batch.num_rows for batch in batches) <= 10


def test_what_came_between_two_offsets_stays_the_same(data):
    planes.build(data, worlds=2, entries=300, activity=10)
    chosen = options_of({"url": f"dir:{data}"})
    with open_view(chosen.config) as view:
        first = plans.heads(view)
    planes.extend(data, ["world-0000", "world-0001"], 300)
    with open_view(chosen.config) as view:
        second = plans.heads(view)
        expected = plans.between(view, chosen, first, second)
    planes.extend(data, ["world-0001"], 100, seed=9)
    with planes.opened(f"dir:{data}") as plane:
        world = plane.world("world-0001")
        manifest = world.snapshots.baseline().manifest_hash
        world.snapshots.commit({}, height=650, promote=True, receipt_horizon_height=650, manifest_hash=manifest)
        planes.cut(plane, planes.open_objects(f"dir:{data / 'objects'}"), "world-0001", segment=64, margin=8)
    with open_view(chosen.config) as view:
        again = plans.between(view, chosen, first, second)
    rows = sorted((row["world"], row["height"], row["hash"]) for row in read(data, expected))
    assert len(rows) == 600
    assert sorted((row["world"], row["height"], row["hash"]) for row in read(data, again)) == rows
    assert sum(plans.limited(first, second, 100).values()) == sum(first.values()) + 100
    assert plans.limited(first, second, 10_000) == second


def test_a_stream_does_not_pass_over_a_plane_that_went_back(data):
    planes.build(data, worlds=2, entries=50)
    reader = StreamReader(options_of({"url": f"dir:{data}"}))
    now = reader.latestOffset({}, ReadAllAvailable())
    before = {**now, "main/world-0001": now["main/world-0001"] + 5, "main/gone": 7}
    with pytest.raises(Corrupt, match=r"main/world-0001.*older backup"):
        reader.latestOffset(before, ReadAllAvailable())
    skipping = StreamReader(options_of({"url": f"dir:{data}", "damage": "skip"}))
    assert skipping.latestOffset(before, ReadAllAvailable()) == before
    with planes.opened(f"dir:{data}") as plane:
        plane.world("world-0001").archive()
        plane.world("world-0001").delete()
    assert reader.latestOffset(now, ReadAllAvailable()) == now  # What was deleted stays where it was.


DAMAGED = [
    None,
    7,
    "main/ada",
    [],
    ["main/ada", 7],
    {"main/ada": "7"},
    {"main/ada": None},
    {"main/ada": 7.5},
    {"main/ada": True},
    {"main/ada": -1},
    {"main/ada": 1 << 63},
    {"main/ada": {"height": 7}},
    {"ada": 7},
    {"/ada": 7},
    {"main/": 7},
    {"": 7},
    {"main/x" + "x" * 10_000: 7},
    {"main/Ada": 7},
    {"main/ada/7": 7},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_an_offset_that_was_edited_by_hand_is_told_of(data, damaged):
    planes.build(data, worlds=1, entries=10)
    reader = StreamReader(options_of({"url": f"dir:{data}"}))
    good = reader.latestOffset({}, ReadAllAvailable())
    for ask in (
        lambda: reader.latestOffset(damaged, ReadAllAvailable()),
        lambda: reader.latestOffset(damaged, ReadMaxRows(5)),
        lambda: reader.partitions(damaged, good),
        lambda: reader.partitions(good, damaged),
        lambda: reader.partitions(damaged, damaged),
    ):
        with pytest.raises(Corrupt, match=r"checkpoint of the stream.*new checkpointLocation") as caught:
            ask()
        assert caught.value.code == "corrupt"
        assert len(str(caught.value)) < 1_000


def test_an_offset_of_session_logs_that_was_edited_by_hand_is_told_of(data):
    planes.build(data, worlds=1, entries=10, activity=10)
    logs = StreamReader(options_of({"url": f"dir:{data}", "table": "activity"}))
    ends = logs.latestOffset({}, ReadAllAvailable())
    assert logs.partitions({}, ends)
    for damaged in (dict.fromkeys(ends, -1), {key.removeprefix("main"): 1 for key in ends}, list(ends)):
        with pytest.raises(Corrupt, match="checkpoint of the stream"):
            logs.latestOffset(damaged, ReadAllAvailable())


def test_a_batch_that_ends_before_its_start_is_told_of(data):
    planes.build(data, worlds=2, entries=10)
    reader = StreamReader(options_of({"url": f"dir:{data}"}))
    good = reader.latestOffset({}, ReadAllAvailable())
    with pytest.raises(Corrupt, match=r"main/world-0001.*ends without it"):
        reader.partitions(good, {key: place for key, place in good.items() if key != "main/world-0001"})
    with pytest.raises(Corrupt, match=r"main/world-0001.*ends before, at 3"):
        reader.partitions(good, {**good, "main/world-0001": 3})


@pytest.mark.parametrize("table", ["journal", "activity"])
def test_a_stream_of_what_is_new_loses_nothing_if_its_first_batch_is_run_again(data, table):
    planes.build(data, worlds=2, entries=10)
    chosen = options_of({"url": f"dir:{data}", "table": table, "startingOffsets": "latest"})
    lost = StreamReader(chosen)
    before = lost.initialOffset()
    _add(data, "first")
    assert lost.initialOffset() == before  # Spark asks twice for it.
    written = lost.latestOffset(before, ReadAllAvailable())
    _add(data, "second")

    # It ends here. Spark begins again with the end of the batch, and asks another time where it starts.
    again = StreamReader(chosen)
    assert _rows(again, again.initialOffset(), written) == 0
    onward = again.latestOffset(written, ReadAllAvailable())
    assert onward != written
    assert _rows(again, written, onward) == _rows(lost, before, onward) > 0
    with open_view(chosen.config) as view:
        assert onward == (plans.heads(view) if table == "journal" else plans.ends(view))


def _add(data, session):
    planes.extend(data, ["world-0000", "world-0001"], 5)
    planes.leave_log(data, 5, session=session)


def _rows(reader, start, end):
    return sum(batch.num_rows for part in reader.partitions(start, end) for batch in reader.read(part))


@pytest.mark.parametrize("table", ["journal", "activity", "queues"])
def test_what_was_staged_elsewhere_is_no_damage(data, table):
    planes.build(data, worlds=1, entries=10, messages=5)
    planes.leave_log(data, 3)
    shares = planned(data, table=table)
    shutil.rmtree(data / ".staged")
    with pytest.raises(Unreachable, match="all executors reach"):
        read(data, shares, table=table)


def test_rows_that_were_staged_elsewhere_are_not_taken_for_written(data):
    planes.build(data, worlds=1, entries=10)
    chosen = options_of({"url": f"dir:{data}", "table": "queues", "queue": "jobs", "load": "monday"})
    writer = BatchWriter(chosen, load_of(chosen, ["key", "payload"]))
    left = data / ".staged" / "load" / "left.arrow"
    left.parent.mkdir(parents=True)
    left.touch()
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    os.utime(left, (old, old))
    rows = pa.RecordBatch.from_pylist([{"key": "1", "payload": "{}"}])
    wrote = writer.write(iter([rows]))
    writer.commit([wrote, None])
    assert not left.exists()  # A task that failed has left it.
    with pytest.raises(Unreachable, match="all executors reach"):
        writer.commit([wrote])
    with planes.opened(f"dir:{data}") as plane:
        assert plane.queue("jobs").stats().put_total == 1


def test_maps_are_objects_in_a_payload(data):
    planes.build(data, worlds=1, entries=10)
    chosen = options_of({"url": f"dir:{data}", "table": "queues", "queue": "jobs", "load": "monday"})
    writer = BatchWriter(chosen, load_of(chosen, ["key", "payload", "attributes"]))
    strings = pa.map_(pa.string(), pa.string())
    types = [("key", pa.string()), ("payload", pa.struct([("inner", strings)])), ("attributes", strings)]
    row = {"key": "1", "payload": {"inner": [("a", "b")]}, "attributes": [("c", "d")]}
    writer.commit([writer.write(iter([pa.RecordBatch.from_pylist([row], pa.schema(types))]))])
    with planes.opened(f"dir:{data}") as plane:
        (message,) = plane.queue("jobs").peek(10)
    assert (message.payload, message.attributes) == (b'{"inner":{"a":"b"}}', {"c": "d"})


def test_session_logs_end_behind_their_last_whole_line(data):
    planes.build(data, worlds=1, entries=10)
    file = planes.leave_log(data, 5, torn=True)
    chosen = options_of({"url": f"dir:{data}", "table": "activity"})
    with open_view(chosen.config) as view:
        (end,) = plans.ends(view).values()
        assert end == file.read_bytes().rfind(b"\n") + 1
        shares = plans.between(view, chosen, {}, plans.ends(view))
        assert len(read(data, shares, table="activity")) == 4
        assert plans.between(view, chosen, plans.ends(view), plans.ends(view)) == []


def test_what_was_staged_goes_when_nobody_can_be_reading_it(data):
    planes.build(data, worlds=2, entries=100)
    planned(data)
    staged = [path for path in (data / ".staged").rglob("*") if path.is_file()]
    assert staged
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    os.utime(staged[0], (old, old))
    planned(data, (EqualTo(("universe",), "other"),))
    assert not staged[0].exists()
    assert staged[1].exists()


def test_what_others_keep_where_something_is_staged_stays(data):
    built = planes.build(data, worlds=2, entries=300)
    segments = planes.segment_files(data, "world-0001")
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    for file in segments:
        os.utime(file, (old, old))
    given = {"staging": f"dir:{data / 'objects'}"}
    shares = planned(data, **given)
    assert all(file.exists() for file in segments)
    assert len(read(data, shares, **given)) == built.entries


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "url"),
        ({"url": "dir:x", "table": "nonsense"}, "table"),
        ({"url": "dir:x", "colour": "red"}, "colour"),
        ({"url": "dir:x", "damage": "heal"}, "damage"),
        ({"url": "dir:x", "rowsPerPartition": "0"}, "rowsperpartition"),
        ({"url": "dir:x", "maxRowsPerBatch": "many"}, "maxrowsperbatch"),
        ({"url": "dir:x", "startingOffsets": "never"}, "startingoffsets"),
        ({"url": "dir:x", "universe": "../x"}, "universe"),
    ],
)
def test_options_that_say_nothing_are_refused(given, said, monkeypatch):
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    with pytest.raises((InvalidArgument, InvalidName), match=said):
        options_of(given)


def test_a_universe_is_named_as_anywhere_else():
    assert options_of({"url": "dir:x", "universe": "Main"}).config.universes == ("main",)


def test_a_place_that_cannot_be_staged_in_is_told(data, tmp_path):
    planes.build(data, worlds=1, entries=10)
    (tmp_path / "file").touch()
    with pytest.raises(PathUnusable, match="file"):
        planned(data, staging=f"dir:{tmp_path / 'file'}")


def test_the_document_names_every_option_and_column():
    document = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text()
    rows = [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        for line in document.splitlines()
        if line.startswith("| `")
    ]
    told = {
        name for row in rows for name in row[0].lower().split(", ") if row[1] in ("all", "reads", "writes", "streams")
    }
    assert told == {"storage.name", *(name for name in options.KNOWN if name not in options.SPARKS_OWN)}
    filtered = {row[0]: tuple(row[1].split(", ")) for row in rows if len(row) == 2}
    assert filtered == COLUMNS
    written = {
        row[0]: (tuple(row[1].split(", ")), tuple(row[2].split(", ")))
        for row in rows
        if len(row) == 3 and row[1] not in ("all", "reads", "writes", "streams")
    }
    assert written == loading.COLUMNS


@pytest.mark.parametrize("missing", ["orjson", "pyarrow"])
def test_without_its_extras_holdfast_does_not_keep_spark_from_finding_other_sources(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import pyspark_holdfast; assert not hasattr(pyspark_holdfast, 'DefaultSource')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
