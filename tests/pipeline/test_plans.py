"""Planning and selection of the data source, without Spark."""

import os
import shutil
import time
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from fastness.backends.objects import open_objects
from fastness.errors import AnotherHistory, Corrupt, InvalidArgument, InvalidName, PathUnusable, Unreachable
from fastness.limits import SOURCE_STAGED_SECONDS
from fastness.pipeline import loading
from fastness.pipeline.source import options, plans, tables
from fastness.pipeline.source.offsets import HISTORY
from fastness.pipeline.source.options import parse_options
from fastness.pipeline.source.readers import StreamReader
from fastness.pipeline.source.selections import COLUMNS, OPTIONS
from fastness.pipeline.source.writers import BatchWriter, parse_load
from fastness.pipeline.views import open_view
from tests.pipeline import planes
from tests.support.forked import run_python
from tests.support.http_server import serving


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def plan_of(data: Path, **given: str) -> list[plans.Partition]:
    chosen = parse_options({"url": f"dir:{data}", **given})  # `given` may have another `url`.
    with open_view(chosen.config) as view:
        return plans.plan_partitions(view, chosen)


def read(data: Path, plan_partitions: list[plans.Partition], **given: str) -> list[dict[str, Any]]:
    chosen = parse_options({"url": f"dir:{data}", **given})
    return [
        row for partition in plan_partitions for batch in plans.read(partition, chosen) for row in batch.to_pylist()
    ]


def test_options_exclude_chunks_from_the_plan(data: Path) -> None:
    planes.copy(data, worlds=3, entries=300)
    given = {"worlds": "world-0001", "fromHeight": "70"}
    (partition,) = plan_of(data, **given)
    assert {chunk.world for chunk in partition.chunks} == {"world-0001"}
    assert partition.chunks[0].span == (70, 127)
    assert [row["height"] for row in read(data, [partition], **given)] == list(range(70, 301))
    assert plan_of(data, universe="other") == []
    assert plan_of(data, fromHeight="10000") == []
    assert plan_of(data, worlds="world-00") == []


@pytest.mark.parametrize("table", options.READABLE_TABLES)
def test_options_select_exactly_the_wanted_rows(data: Path, table: str) -> None:
    """Each option alone and all of them together, compared with the same selection of all rows in Python."""
    planes.copy(data, worlds=3, entries=150, messages=40, mails=80, entities=8, activity=20)
    planes.leave_log(data, 5)
    everything = read(data, plan_of(data, table=table), table=table)
    given = {}
    for option, column in COLUMNS[table].items():
        values = sorted({row[column] for row in everything})
        middle = values[(len(values) - 1) // 2]
        if option in ("worlds", "kinds"):
            wanted = {values[0], middle}
            given[option] = (" , ".join(wanted), lambda row, column=column, wanted=wanted: row[column] in wanted)
        elif option == "fromHeight":
            given[option] = (str(middle), lambda row, column=column, middle=middle: row[column] >= middle)
        else:  # Half a millisecond later: the row itself is excluded.
            later = middle + timedelta(microseconds=500)
            local = later.astimezone(timezone(timedelta(hours=5))).isoformat()
            given[option] = (local, lambda row, column=column, later=later: row[column] >= later)
    for names in ([*given], *([name] for name in given)):
        options_given = {name: given[name][0] for name in names} | {"table": table}
        found = read(data, plan_of(data, **options_given), **options_given)
        expected = [row for row in everything if all(given[name][1](row) for name in names)]
        assert sorted(map(repr, found)) == sorted(map(repr, expected))
        assert found or len(names) > 1


def test_options_select_rows_of_a_stream(data: Path) -> None:
    planes.copy(data, worlds=3, entries=60)
    given = {"worlds": "world-0001", "fromHeight": "50", "kinds": "entry,baseline"}
    reader = StreamReader(parse_options({"url": f"dir:{data}", **given}))
    end = reader.latestOffset({}, ReadAllAvailable())
    rows = [row for part in reader.partitions({}, end) for batch in reader.read(part) for row in batch.to_pylist()]
    expected = read(data, plan_of(data, **given), **given)
    assert {(row["world"], row["height"]) for row in rows} == {(row["world"], row["height"]) for row in expected}
    assert len(rows) == len(expected) > 0


def test_partitions_have_about_the_configured_number_of_rows(data: Path) -> None:
    built = planes.copy(data, worlds=4, entries=300)
    plan_partitions = plan_of(data, rowsPerPartition="200")
    assert len(plan_partitions) >= 4
    for partition in plan_partitions:
        assert isinstance(partition, plans.JournalPartition)
        assert sum(chunk.rows for chunk in partition.chunks) <= 200 + 301
    rows = read(data, plan_partitions)
    assert len(rows) == len({(row["world"], row["height"]) for row in rows}) == built.entries
    assert len(plan_of(data)) == 1


def test_damage_fails_a_read_unless_it_is_skipped(data: Path) -> None:
    built = planes.copy(data, worlds=2, entries=300)
    start, end = planes.flip_byte(data, "world-0001", 1)
    plan_partitions = plan_of(data)
    with pytest.raises(Corrupt, match=rf"world-0001 of main, heights {start} to {end}.*checksum"):
        read(data, plan_partitions)
    assert len(read(data, plan_partitions, damage="skip")) == built.entries - 64


def test_malformed_line_fails_a_read_and_a_torn_one_does_not(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    planes.leave_log(data, 5, torn=True)
    assert len(read(data, plan_of(data, table="activity"), table="activity")) == 4
    planes.leave_log(data, 5, garbled=2, session="other")
    plan_partitions = plan_of(data, table="activity")
    with pytest.raises(Corrupt, match="lines 2 to 2"):
        read(data, plan_partitions, table="activity")
    assert len(read(data, plan_partitions, table="activity", damage="skip")) == 4 + 4


def test_missing_session_log_of_a_server_can_be_skipped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    planes.copy(data, worlds=1, entries=10, activity=30)
    lost = sorted(data.glob("objects/activity/main/*/*_metrics_*"))[0]
    lines = lost.read_bytes().count(b"\n") - 1
    lost.unlink()
    with serving(f"dir:{data}") as server:
        given = {"url": server.url, "table": "activity"}
        plan_partitions = plan_of(data, **given)
        with pytest.raises(Corrupt, match="restore it from a backup"):
            read(data, plan_partitions, **given)
        rows = read(data, plan_partitions, damage="skip", **given)
    assert sum(row["kind"] == "metrics" for row in rows) == 30 - lines


def test_batches_of_rows_are_bounded_by_their_bytes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planes.opened(f"dir:{data}") as plane:
        for n in range(40):
            plane.mailbox("ada").send("bob", b"x" * 1_000 + b"%d" % n)
    monkeypatch.setattr(tables, "ROWS_BATCH_BYTES", 10_000)
    with open_view(parse_options({"url": f"dir:{data}"}).config) as view:
        batches = list(tables.batches(view, "mail", "main"))
    assert sum(batch.num_rows for batch in batches) == 40
    assert max(batch.num_rows for batch in batches) <= 10


def test_rows_between_two_offsets_stay_the_same(data: Path) -> None:
    planes.copy(data, worlds=2, entries=300, activity=10)
    chosen = parse_options({"url": f"dir:{data}"})
    with open_view(chosen.config) as view:
        first = plans.heads(view)
    planes.extend(data, ["world-0000", "world-0001"], 300)
    with open_view(chosen.config) as view:
        second = plans.heads(view)
        expected = plans.partitions_between(view, chosen, first, second)
    planes.extend(data, ["world-0001"], 100, seed=9)
    with planes.opened(f"dir:{data}") as plane:
        world = plane.world("world-0001")
        manifest = world.snapshots.baseline().manifest_hash
        world.snapshots.commit({}, height=650, promote=True, receipt_horizon_height=650, manifest_hash=manifest)
        planes.cut(plane, open_objects(f"dir:{data / 'objects'}"), "world-0001", segment=64, margin=8)
    with open_view(chosen.config) as view:
        again = plans.partitions_between(view, chosen, first, second)
    rows = sorted((row["world"], row["height"], row["hash"]) for row in read(data, expected))
    assert len(rows) == 600
    assert sorted((row["world"], row["height"], row["hash"]) for row in read(data, again)) == rows
    assert sum(plans.limit_offset(first, second, 100).values()) == sum(first.values()) + 100
    assert plans.limit_offset(first, second, 10_000) == second


def test_stream_fails_if_the_plane_was_restored_from_an_older_backup(data: Path) -> None:
    planes.copy(data, worlds=2, entries=50)
    reader = StreamReader(parse_options({"url": f"dir:{data}"}))
    now = reader.latestOffset({}, ReadAllAvailable())
    before = {**now, "main/world-0001": now["main/world-0001"] + 5, "main/gone": 7}
    with pytest.raises(Corrupt, match=r"main/world-0001.*older backup"):
        reader.latestOffset(before, ReadAllAvailable())
    skipping = StreamReader(parse_options({"url": f"dir:{data}", "damage": "skip"}))
    assert skipping.latestOffset(before, ReadAllAvailable()) == before
    with planes.opened(f"dir:{data}") as plane:
        plane.world("world-0001").archive()
        plane.world("world-0001").delete()
    assert reader.latestOffset(now, ReadAllAvailable()) == now  # Offsets of deleted worlds stay.


def test_stream_of_another_history_fails_even_if_the_plane_is_ahead(data: Path) -> None:
    planes.copy(data, worlds=3, entries=20)
    backup = Path(shutil.copytree(data, data.parent / "backup"))
    reader = StreamReader(parse_options({"url": f"dir:{data}"}))
    earlier = reader.latestOffset({}, ReadAllAvailable())
    planes.extend(data, ["world-0001"], 5)
    known = reader.latestOffset(earlier, ReadAllAvailable())
    assert known["$history"]["tips"].keys() == {f"main/world-000{n}" for n in range(3)}
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    planes.extend(data, ["world-0001"], 50, seed=7)  # A copied directory keeps its lineage; its records differ.
    again = StreamReader(parse_options({"url": f"dir:{data}"}))
    with pytest.raises(AnotherHistory, match="main/world-0001 is not the one that it has read"):
        again.latestOffset(known, ReadAllAvailable())
    with pytest.raises(AnotherHistory, match="main/world-0001"):
        again.partitions(earlier, known)
    assert again.latestOffset(earlier, ReadAllAvailable())["main/world-0001"] > known["main/world-0001"]
    with planes.opened(f"dir:{data}") as plane:
        plane.mark_restored()
    for offset in (known, earlier):
        with pytest.raises(AnotherHistory, match="lineage"):
            again.latestOffset(offset, ReadAllAvailable())
    skipping = StreamReader(parse_options({"url": f"dir:{data}", "damage": "skip"}))
    assert skipping.latestOffset(known, ReadAllAvailable())["$history"]["lineage"] != known["$history"]["lineage"]


def test_stream_of_a_world_that_was_created_again_fails(data: Path) -> None:
    with planes.opened(f"dir:{data}") as plane:
        plane.world("ada").create()
        plane.world("ada").append([{"n": 1}, {"n": 2}], expected_head=0)
    reader = StreamReader(parse_options({"url": f"dir:{data}"}))
    known = reader.latestOffset({}, ReadAllAvailable())
    with planes.opened(f"dir:{data}") as plane:
        plane.world("ada").archive()
        plane.world("ada").delete()
        plane.world("ada").create()
        plane.world("ada").append([{"n": 3}, {"n": 4}, {"n": 5}], expected_head=0)
    with pytest.raises(AnotherHistory, match="created again"):
        reader.latestOffset(known, ReadAllAvailable())


OF = {HISTORY: {"plane": "x", "lineage": "y"}}
DAMAGED = [
    {"main/ada": 7},
    {"$history": 7},
    {"$history": {"plane": "x"}},
    {"$history": {"plane": "x", "lineage": "y", "tips": {"main/ada": 7}}},
    None,
    7,
    "main/ada",
    [],
    ["main/ada", 7],
    {**OF, "main/ada": "7"},
    {**OF, "main/ada": None},
    {**OF, "main/ada": 7.5},
    {**OF, "main/ada": True},
    {**OF, "main/ada": -1},
    {**OF, "main/ada": 1 << 63},
    {**OF, "main/ada": {"height": 7}},
    {**OF, "ada": 7},
    {**OF, "/ada": 7},
    {**OF, "main/": 7},
    {**OF, "": 7},
    {**OF, "main/x" + "x" * 10_000: 7},
    {**OF, "main/a da": 7},
    {**OF, "main/ada/7": 7},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_invalid_journal_offset_is_rejected(data: Path, damaged: Any) -> None:
    planes.copy(data, worlds=1, entries=10)
    reader = StreamReader(parse_options({"url": f"dir:{data}"}))
    good = reader.latestOffset({}, ReadAllAvailable())
    for request in (
        lambda: reader.latestOffset(damaged, ReadAllAvailable()),
        lambda: reader.latestOffset(damaged, ReadMaxRows(5)),
        lambda: reader.partitions(damaged, good),
        lambda: reader.partitions(good, damaged),
        lambda: reader.partitions(damaged, damaged),
    ):
        with pytest.raises(Corrupt, match=r"checkpoint of the stream.*new checkpointLocation") as caught:
            request()
        assert caught.value.code == "corrupt"
        assert len(str(caught.value)) < 1_000


def test_invalid_session_log_offset_is_rejected(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10, activity=10)
    logs = StreamReader(parse_options({"url": f"dir:{data}", "table": "activity"}))
    log_ends = logs.latestOffset({}, ReadAllAvailable())
    assert logs.partitions({}, log_ends)
    for damaged in (dict.fromkeys(log_ends, -1), {key.removeprefix("main"): 1 for key in log_ends}, list(log_ends)):
        with pytest.raises(Corrupt, match="checkpoint of the stream"):
            logs.latestOffset(damaged, ReadAllAvailable())  # type: ignore[arg-type]


def test_batch_that_ends_before_its_start_is_rejected(data: Path) -> None:
    planes.copy(data, worlds=2, entries=10)
    reader = StreamReader(parse_options({"url": f"dir:{data}"}))
    good = reader.latestOffset({}, ReadAllAvailable())
    with pytest.raises(Corrupt, match=r"main/world-0001.*ends without it"):
        reader.partitions(good, {key: place for key, place in good.items() if key != "main/world-0001"})
    with pytest.raises(Corrupt, match=r"main/world-0001.*ends earlier, at 3"):
        reader.partitions(good, {**good, "main/world-0001": 3})


@pytest.mark.parametrize("table", ["journal", "activity"])
def test_latest_stream_loses_nothing_if_its_first_batch_is_repeated(data: Path, table: str) -> None:
    planes.copy(data, worlds=2, entries=10)
    chosen = parse_options({"url": f"dir:{data}", "table": table, "startingOffsets": "latest"})
    lost = StreamReader(chosen)
    before = lost.initialOffset()
    _add(data, "first")
    assert lost.initialOffset() == before  # Spark asks for it twice.
    written = lost.latestOffset(before, ReadAllAvailable())
    _add(data, "second")

    # The query ends here. Spark restarts with the end of the batch, and asks for its start again.
    again = StreamReader(chosen)
    assert _rows(again, again.initialOffset(), written) == 0
    latest = again.latestOffset(written, ReadAllAvailable())
    assert latest != written
    assert _rows(again, written, latest) == _rows(lost, before, latest) > 0
    with open_view(chosen.config) as view:
        positions = {key: position for key, position in latest.items() if key != HISTORY}
        assert positions == (plans.heads(view) if table == "journal" else plans.log_ends(view))


def _add(data: Path, session: str) -> None:
    planes.extend(data, ["world-0000", "world-0001"], 5)
    planes.leave_log(data, 5, session=session)


def _rows(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> int:
    return sum(batch.num_rows for part in reader.partitions(start, end) for batch in reader.read(part))


@pytest.mark.parametrize("table", ["journal", "activity", "queues"])
def test_missing_staged_object_is_not_damage(data: Path, table: str) -> None:
    planes.copy(data, worlds=1, entries=10, messages=5)
    planes.leave_log(data, 3)
    plan_partitions = plan_of(data, table=table)
    shutil.rmtree(data / ".staged")
    with pytest.raises(Unreachable, match="all executors can reach"):
        read(data, plan_partitions, table=table)


def test_selection_of_a_write_is_rejected() -> None:
    chosen = parse_options({"url": "dir:x", "table": "queues", "queue": "jobs", "load": "a", "since": "2026-11-15"})
    with pytest.raises(InvalidArgument, match="since are for reads only"):
        parse_load(chosen, ["key", "payload"])


def test_missing_staged_rows_fail_the_write(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    chosen = parse_options({"url": f"dir:{data}", "table": "queues", "queue": "jobs", "load": "monday"})
    writer = BatchWriter(chosen, parse_load(chosen, ["key", "payload"]))
    left = data / ".staged" / "load" / "left.arrow"
    left.parent.mkdir(parents=True)
    left.touch()
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    os.utime(left, (old, old))
    rows = pa.RecordBatch.from_pylist([{"key": "1", "payload": "{}"}])
    wrote = writer.write(iter([rows]))
    writer.commit([wrote, None])
    assert not left.exists()  # A failed task left it.
    with pytest.raises(Unreachable, match="all executors can reach"):
        writer.commit([wrote])
    with planes.opened(f"dir:{data}") as plane:
        assert plane.queue("jobs").stats().put_total == 1


def test_map_becomes_a_json_object_in_a_payload(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    chosen = parse_options({"url": f"dir:{data}", "table": "queues", "queue": "jobs", "load": "monday"})
    writer = BatchWriter(chosen, parse_load(chosen, ["key", "payload", "attributes"]))
    strings = pa.map_(pa.string(), pa.string())
    types = [("key", pa.string()), ("payload", pa.struct([("inner", strings)])), ("attributes", strings)]
    row = {"key": "1", "payload": {"inner": [("a", "b")]}, "attributes": [("c", "d")]}
    writer.commit([writer.write(iter([pa.RecordBatch.from_pylist([row], pa.schema(types))]))])
    with planes.opened(f"dir:{data}") as plane:
        (message,) = plane.queue("jobs").peek(10)
    assert (message.payload, message.attributes) == (b'{"inner":{"a":"b"}}', {"c": "d"})


def test_session_log_end_is_after_its_last_complete_line(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    file = planes.leave_log(data, 5, torn=True)
    chosen = parse_options({"url": f"dir:{data}", "table": "activity"})
    with open_view(chosen.config) as view:
        (end,) = plans.log_ends(view).values()
        assert end == file.read_bytes().rfind(b"\n") + 1
        plan_partitions = plans.partitions_between(view, chosen, {}, plans.log_ends(view))
        assert len(read(data, plan_partitions, table="activity")) == 4
        assert plans.partitions_between(view, chosen, plans.log_ends(view), plans.log_ends(view)) == []


def test_old_staged_files_are_deleted(data: Path) -> None:
    planes.copy(data, worlds=2, entries=100)
    plan_of(data)
    staged = [path for path in (data / ".staged").rglob("*") if path.is_file()]
    assert staged
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    os.utime(staged[0], (old, old))
    plan_of(data, universe="other")
    assert not staged[0].exists()
    assert staged[1].exists()


def test_foreign_files_beside_the_staging_folder_are_kept(data: Path) -> None:
    built = planes.copy(data, worlds=2, entries=300)
    segments = planes.segment_files(data, "world-0001")
    old = time.time() - SOURCE_STAGED_SECONDS - 60
    for file in segments:
        os.utime(file, (old, old))
    given = {"staging": f"dir:{data / 'objects'}"}
    plan_partitions = plan_of(data, **given)
    assert all(file.exists() for file in segments)
    assert len(read(data, plan_partitions, **given)) == built.entries


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "url"),
        ({"url": "dir:x", "table": "nonsense"}, "table"),
        ({"url": "dir:x", "colour": "red"}, "colour"),
        ({"url": "dir:x", "damage": "heal"}, "damage"),
        ({"url": "dir:x", "rowsPerPartition": "0"}, "rowsPerPartition"),
        ({"url": "dir:x", "maxRowsPerBatch": "many"}, "maxRowsPerBatch"),
        ({"url": "dir:x", "startingOffsets": "never"}, "startingOffsets"),
        ({"url": "dir:x", "universe": "../x"}, "universe"),
        ({"url": "dir:x", "worlds": ""}, "worlds.*separated by commas"),
        ({"url": "dir:x", "worlds": "a,,b"}, "worlds.*separated by commas"),
        ({"url": "dir:x", "worlds": "a b"}, "world name"),
        ({"url": "dir:x", "kinds": "entries"}, "kinds of journal records are entry"),
        ({"url": "dir:x", "fromHeight": "-1"}, "fromHeight.*from 0 on"),
        ({"url": "dir:x", "fromHeight": "9223372036854775808"}, "fromHeight.*from 0 on"),
        ({"url": "dir:x", "fromHeight": "\u0663"}, "fromHeight.*from 0 on"),
        ({"url": "dir:x", "table": "activity", "since": "yesterday"}, "since.*2026-11-15"),
        ({"url": "dir:x", "since": "2026-11-15"}, "since does not apply to the table journal.*worlds"),
        ({"url": "dir:x", "table": "queues", "worlds": "a"}, "worlds does not apply to the table queues.*since"),
        ({"url": "dir:x", "table": "inboxes", "kinds": "a"}, "kinds does not apply"),
    ],
)
def test_invalid_options_are_rejected(given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNESS_URL", raising=False)
    with pytest.raises((InvalidArgument, InvalidName), match=said):
        parse_options(given)


def test_universe_option_keeps_its_case() -> None:
    assert parse_options({"url": "dir:x", "universe": "Main"}).config.universes == ("Main",)


def test_unwritable_staging_location_is_reported(data: Path, tmp_path: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    (tmp_path / "file").touch()
    with pytest.raises(PathUnusable, match="file"):
        plan_of(data, staging=f"dir:{tmp_path / 'file'}")


def test_documentation_names_every_option_and_column() -> None:
    document = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text()
    rows = [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        for line in document.splitlines()
        if line.startswith("| `")
    ]
    documented = {
        name for row in rows for name in row[0].lower().split(", ") if row[1] in ("all", "reads", "writes", "streams")
    }
    assert documented == {"storage.name", *map(str.lower, options.OPTION_NAMES)}
    selected = {row[0]: dict(zip(OPTIONS, row[1:], strict=True)) for row in rows if len(row) == 5}
    assert {
        table: {option: column for option, column in found.items() if column} for table, found in selected.items()
    } == COLUMNS
    written = {
        row[0]: (tuple(row[1].split(", ")), tuple(row[2].split(", ")))
        for row in rows
        if len(row) == 3 and row[1] not in ("all", "reads", "writes", "streams")
    }
    assert written == loading.COLUMNS


@pytest.mark.parametrize("missing", ["orjson", "pyarrow"])
def test_spark_finds_other_sources_without_the_spark_extra(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import pyspark_fastness; assert not hasattr(pyspark_fastness, 'DefaultSource')"
    )
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr
