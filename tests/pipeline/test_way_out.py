"""Ways out of a lake that is wrong, or has too much: reset, backfill, forget and redaction."""

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from fastness.cli.main import root
from fastness.errors import InvalidArgument, WouldLoseData
from fastness.limits import ENTITY_HISTORY_VERSIONS, HISTORY_OVERLAP_MS
from fastness.pipeline.config import Config
from fastness.pipeline.intake.quarantine import Quarantine
from fastness.pipeline.jobs import accept, audit, backfill, contents, forget, ingest, reset
from fastness.pipeline.lake import Lake, LakeTable, purging, removal, searching
from fastness.pipeline.lake.log_hashes import LogHashes
from fastness.pipeline.schemas import (
    ACTIVITY,
    ENTITY_CHANGES,
    JOURNAL,
    QUARANTINE,
    QUEUE_EVENTS,
    SEGMENTS,
    SUPERSEDED,
    TABLES,
    TOMBSTONES,
)
from fastness.pipeline.tombstones import MATCHES
from fastness.testing.clock import ManualClock
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes

FED = (JOURNAL, SEGMENTS, ENTITY_CHANGES, QUEUE_EVENTS, ACTIVITY)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane with every kind of source; each test gets a copy."""
    path: Path = tmp_path_factory.mktemp("way-out") / "data"
    planes.build(path, worlds=3, entries=120, segment=16, messages=6, mails=6, entities=4, activity=9)
    clock = ManualClock(planes.START_MS)
    with planes.opened(f"dir:{path}", universe="main", clock=clock) as plane:
        plane.queue("audited").set_policy(QueuePolicy(history="durable", history_seconds=31_000_000))
        plane.queue("audited").put_many([1, 2])
        clock.advance_ms(HISTORY_OVERLAP_MS * 2)
        plane.queue("audited").put(3)
    return path


@pytest.fixture(scope="module")
def ingested(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane with a lake, for tests that change neither."""
    path: Path = tmp_path_factory.mktemp("ingested") / "data"
    shutil.copytree(built, path)
    ingest.run(None, config(path))
    return path


@pytest.fixture
def plane(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "data")
    return tmp_path / "data"


def config(plane: Path, **options: Any) -> Config:
    return Config(data=f"dir:{plane}", lake=str(plane.parent / "lake"), **options)


def lake(plane: Path) -> Lake:
    return Lake(config(plane).lake)


def content(plane: Path) -> dict[str, list[str]]:
    """All rows that come from the plane, without the times at which they were checked."""
    return {
        table.name: sorted(
            repr({name: value for name, value in row.items() if name != "seen_at"})
            for row in lake(plane).table(table).rows().to_pylist()
        )
        for table in FED
    }


def killed(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


def kill_after(patch: pytest.MonkeyPatch, module: Any, name: str, calls: int) -> None:
    """Kill the run at the call after so many."""
    steps = iter([getattr(module, name)] * calls)

    def step(*given: Any, **named: Any) -> Any:
        return next(steps, killed)(*given, **named)

    patch.setattr(module, name, step)


def write_counter(plane: Path, *values: int) -> None:
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        for value in values:
            opened.entities.write("counter", "c", {"n": value})


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("sources", "tables"),
    [
        ({"worlds": ["world-0001"]}, {"journal", "segments"}),
        ({"kinds": ["order"]}, {"entity_changes"}),
        ({"queues": ["audited"]}, {"queue_events"}),
        ({"sessions": ["session-1"]}, {"activity"}),
        ({"everything": True}, {table.name for table in FED}),
    ],
)
def test_reset_drops_the_rows_of_a_source_and_ingest_reads_them_again(
    plane: Path, sources: dict[str, Any], tables: set[str]
) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    result = reset.run(None, config(plane), **sources)
    removed = {name.removesuffix(" removed") for name, count in result.rows.items() if count}
    assert (removed, result.findings) == (tables, [])
    after = content(plane)
    assert {name for name in before if before[name] != after[name]} == tables
    if "everything" in sources:
        assert not any(after.values())
    again = ingest.run(None, config(plane))
    assert again.ok
    assert {name for name, count in again.rows.items() if count} == tables
    assert content(plane) == before


def test_reset_refuses_to_lose_rows_unless_that_is_allowed(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_counter(plane, 1, 2, 3)
    log = planes.leave_log(plane, lines=5)
    ingest.run(None, config(plane))
    log.unlink()
    monkeypatch.setattr("fastness.layers.entities.ENTITY_HISTORY_VERSIONS", 2)
    write_counter(plane, 4)
    first, last = planes.remove_segment(plane, "world-0002")
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        opened.world("world-0000").archive()
        opened.world("world-0000").delete()
        opened.queue("audited").set_policy(QueuePolicy())
    before = content(plane)
    for sources, said in (
        ({"worlds": ["world-0002"]}, rf"rows of world-0002 \(journal, {first} to {last}\)"),
        ({"worlds": ["world-0000"]}, r"rows of world-0000 \(journal, 0 to"),
        ({"kinds": ["counter"]}, r"1 rows of counter/c \(entity_changes, 2 to 2\)"),
        ({"sessions": ["crashed"]}, r"5 rows of .* \(activity, 0 to 4\)"),
        ({"queues": ["audited"]}, r"3 rows of audited \(queue_events"),
        ({"everything": True}, "more sources.*--allow-loss"),
    ):
        with pytest.raises(WouldLoseData, match=said):
            reset.run(None, config(plane), **sources)
    assert content(plane) == before
    with pytest.raises(InvalidArgument, match="--all"):
        reset.run(None, config(plane))
    result = reset.run(None, config(plane), worlds=["world-0002"], allow_loss=True)
    assert result.notes == [f"{last - first + 1} rows are lost, which was allowed: the plane no longer has them"]
    assert [(finding["world"], finding["height"], finding["end"]) for finding in result.findings] == [
        ("world-0002", first, last)
    ]


@pytest.mark.rotating
def test_killed_reset_is_continued_and_an_ingest_between_does_no_harm(
    plane: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    for step in range(6):
        with monkeypatch.context() as patch:
            kill_after(patch, removal, "remove_where", step)
            with pytest.raises(KeyboardInterrupt):
                reset.run(None, config(plane), everything=True)
        if step % 2:
            ingest.run(None, config(plane))
            assert content(plane) == before
    reset.run(None, config(plane), everything=True)
    assert not any(content(plane).values())
    ingest.run(None, config(plane))
    assert content(plane) == before


def run_at_once(plane: Path, *jobs: tuple[Any, dict[str, Any]]) -> None:
    """Run jobs at the same time. A directory has one process at a time, so each has a copy with the same identity."""
    failures: list[BaseException] = []

    def work(job: Any, copy: Path, options: dict[str, Any]) -> None:
        try:
            job.run(None, Config(data=f"dir:{copy}", lake=config(plane).lake), **options)
        except BaseException as error:
            failures.append(error)

    runs = []
    for n, (job, options) in enumerate(jobs):
        copy = plane.parent / f"copy-{n}"
        shutil.copytree(plane, copy)
        runs.append(threading.Thread(target=work, args=(job, copy, options)))
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert failures == []


def test_two_resets_and_an_ingest_at_once_leave_every_row_once(plane: Path) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    run_at_once(plane, (reset, {"everything": True}), (reset, {"worlds": ["world-0001"]}), (ingest, {}))
    ingest.run(None, config(plane))
    assert content(plane) == before


def test_reset_keeps_accepted_losses_accepted(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.entities.ENTITY_HISTORY_VERSIONS", 3)
    write_counter(plane, *range(8))
    ingest.run(None, config(plane))
    assert accept.run(None, config(plane), lost=True, kinds=["counter"]).rows["confirmed"] == 1
    result = CliRunner().invoke(
        root, ["pipeline", "reset", "--data", str(plane), "--lake", config(plane).lake, "--kind", "counter"]
    )
    assert result.exit_code == 0, result.output
    assert ingest.run(None, config(plane)).ok
    assert [row.accepted_at is not None for row in Quarantine(lake(plane)).rows()] == [True]
    assert lake(plane).table(QUARANTINE).count() == 1


def texts(plane: Path, *names: str) -> dict[str, int]:
    """Where the lake has these texts."""
    return searching.search(lake(plane).location, names).found


def test_forgotten_world_is_in_no_file_and_does_not_come_back(plane: Path, tmp_path: Path) -> None:
    for _ in range(3):  # Several commits, with statistics and watermarks that name the world.
        planes.extend(plane, ["world-0001", "world-0002"], 10)
        ingest.run(None, config(plane))
    audit.run(None, config(plane))
    superseded = {
        "universe": "main",
        "table_name": "journal",
        "source": "world-0001",
        "number": 3,
        "row": '{"world":"world-0001"}',
    }
    lake(plane).table(SUPERSEDED).append_rows(pa.Table.from_pylist([superseded], SUPERSEDED.schema))
    others = lake(plane).table(JOURNAL).count()
    gone = pc.sum(pc.equal(lake(plane).table(JOURNAL).rows().column("world"), "world-0001")).as_py()
    key = tmp_path / "key"
    key.write_text("secret\n")
    result = forget.run(None, config(plane, key_file=str(key)), worlds=["world-0001"], reason="contract ended")
    assert (result.ok, result.rows["journal removed"], result.rows["superseded removed"]) == (True, gone, 1)
    assert {path.split("/")[1] for path in texts(plane, "world-0001")} >= {"_watermarks", "_delta_log", "universe=main"}
    done = forget.run(None, config(plane, key_file=str(key)), worlds=["world-0001"], vacuum=True)
    assert (done.ok, done.findings) == (True, [])
    assert re.fullmatch(r"Searched [\d,]+ files with [\d,]+ bytes of the lake: 0 matches", done.notes[-1])
    assert texts(plane, "world-0001") == {}
    with pytest.raises(InvalidArgument, match="--key-file"):
        ingest.run(None, config(plane))
    assert ingest.run(None, config(plane, key_file=str(key))).rows["journal"] == 0
    assert audit.run(None, config(plane, key_file=str(key))).ok  # Also all hashes of the Delta logs.
    assert lake(plane).table(JOURNAL).count() == others - gone
    assert texts(plane, "world-0001") == {}
    (row,) = lake(plane).table(TOMBSTONES).rows().to_pylist()
    assert (row["target"], row["reason"], row["incarnation"]) == ("world", "contract ended", 1)
    assert msgspec.json.decode(row["removed_rows"])["journal"] == gone
    with planes.opened(f"dir:{plane}", universe="main") as opened:  # A new world of that name is another one.
        opened.world("world-0001").archive()
        opened.world("world-0001").delete()
        opened.world("world-0001").create()
        opened.world("world-0001").append([{"n": 1}], expected_head=0)
    assert ingest.run(None, config(plane, key_file=str(key))).rows["journal"] == 1


def test_forgetting_deleted_worlds_takes_only_those(plane: Path) -> None:
    ingest.run(None, config(plane))
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        opened.world("world-0002").archive()
        opened.world("world-0002").delete()
    result = forget.run(None, config(plane), deleted=True, vacuum=True)
    assert result.ok
    assert {*lake(plane).table(JOURNAL).rows().column("world").to_pylist()} == {"world-0000", "world-0001"}
    assert texts(plane, "world-0002") == {}
    assert reset.run(None, config(plane), worlds=["world-0002"]).notes == ["The lake has no rows of these sources"]


def mail_of(name: str, plane: Path) -> list[str]:
    """The records of session logs that name an agent."""
    records = lake(plane).table(ACTIVITY).rows().column("record").to_pylist()
    return [record for record in records if f'"{name}' in record]


def test_forgotten_person_and_queue_are_removed_from_all_tables(plane: Path, tmp_path: Path) -> None:
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        opened.mailbox("ada").send("bob", b"hello")
        opened.mailbox("bob").send("ada", b"hello")
        opened.entities.write("person", "ada", {"city": "Paris"})
        opened.state("ada").update({"n": 1})
        opened.lease("lock").acquire("ada", ttl_seconds=600.0)
    ingest.run(None, config(plane))
    contents.run(None, config(plane))
    rows = {name: lake(plane).table(TABLES[name]).count() for name in ("stored_mail", "receipts", "leases", "states")}
    assert all(rows.values())
    assert len(mail_of("ada", plane)) >= 2
    reports = Path(config(plane).lake, "reports")
    reports.mkdir()
    (reports / "latest.html").write_text("<p>ada</p>")
    person = [f"{column}=ada" for column in MATCHES]
    result = forget.run(None, config(plane), matches=person, queues=["orders", "orders.dlq", "audited"], vacuum=True)
    assert (result.ok, result.findings) == (True, [])
    assert texts(plane, "ada", "orders", "audited") == {}
    for job in (ingest, contents):
        job.run(None, config(plane))
    planes.extend(plane, ["world-0001"], 1)  # The plane rotates its logs: nothing of them is ingested again.
    ingest.run(None, config(plane))
    assert texts(plane, "ada", "orders", "audited") == {}
    assert mail_of("agent-", plane)
    assert lake(plane).table(TABLES["queue_counters"]).rows().column("queue").to_pylist() == ["emails"]
    again = reset.run(None, config(plane), everything=True)
    assert again.rows["activity removed"]
    ingest.run(None, config(plane))
    assert texts(plane, "ada", "orders", "audited") == {}


LISTINGS = {
    "--world": "fastness world list",
    "--kind": "these kinds: order",
    "--queue": "fastness queue list",
    "--session": "fastness activity files",
}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, option) for command in ("reset", "backfill", "forget") for option in LISTINGS),
        ("accept", "--world"),
        ("accept", "--kind"),
    ],
)
@pytest.mark.usefixtures("spark")  # `backfill` uses the session, or starts one.
def test_name_of_no_source_is_refused(ingested: Path, command: str, option: str) -> None:
    before = content(ingested)
    arguments = ["--data", str(ingested), "--lake", config(ingested).lake, option, "nope"]
    result = CliRunner().invoke(root, ["pipeline", command, *arguments])
    assert result.exit_code == 4, result.output
    assert f"has the {option[2:]} 'nope' in universe main" in result.output
    assert result.output.partition("\n")[0].endswith(LISTINGS[option])
    assert content(ingested) == before
    assert lake(ingested).table(TOMBSTONES).count() == 0


def test_source_that_only_the_lake_has_is_known(plane: Path) -> None:
    ingest.run(None, config(plane))
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        opened.world("world-0001").archive()
        opened.world("world-0001").delete()
    assert backfill.run(None, config(plane), worlds=["world-0001"]).ok
    assert accept.run(None, config(plane), worlds=["world-0001"]).ok
    assert forget.run(None, config(plane), worlds=["world-0001"], vacuum=True).ok
    assert forget.run(None, config(plane), worlds=["world-0001"], vacuum=True).ok  # Its tombstone is known.


def test_a_name_in_other_rows_is_found_after_forgetting(plane: Path) -> None:
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        opened.world("notes").create()
        opened.world("notes").append([{"text": "met ada."}], expected_head=0)
        opened.entities.write("person", "ada", {"n": 1})
    ingest.run(None, config(plane))
    arguments = ["--data", str(plane), "--lake", config(plane).lake, "--match", "entity_changes.id=ada", "--vacuum"]
    result = CliRunner().invoke(root, ["pipeline", "forget", *arguments, "--json"])
    assert result.exit_code == 10, result.output
    assert [found["table"] for found in msgspec.json.decode(result.stdout)["findings"]] == ["journal"]
    with pytest.raises(InvalidArgument, match="one of: mail"):
        forget.run(None, config(plane), matches=["journal.payload=ada"])
    with pytest.raises(InvalidArgument, match="Nothing to forget"):
        forget.run(None, config(plane))


def test_digits_of_a_hash_are_no_name(tmp_path: Path) -> None:
    """`cada` is also the CBOR of `ada`."""
    (tmp_path / "hashes.json").write_text('{"sha256":"00cada00"}')
    (tmp_path / "records.cbor").write_bytes(b"\xff" + cbor2.dumps("ada"))
    assert searching.search(Lake(str(tmp_path)).location, ["ada"]).found == {"records.cbor": 1}


@pytest.mark.rotating
@pytest.mark.parametrize("step", [0, 9, 18, 27])
def test_killed_forgetting_is_continued(plane: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    ingest.run(None, config(plane))
    with monkeypatch.context() as patch:
        if step < 27:
            kill_after(patch, removal, "remove_where", step // 9)
        else:
            kill_after(patch, LogHashes, "record_checkpoint", 1)
        with pytest.raises(KeyboardInterrupt):
            forget.run(None, config(plane), worlds=["world-0001"], queues=["audited"], vacuum=True)
    ingest.run(None, config(plane))  # It does not bring back what was removed.
    assert forget.run(None, config(plane), worlds=["world-0001"], queues=["audited"], vacuum=True).ok
    assert texts(plane, "world-0001", "audited") == {}
    assert audit.run(None, config(plane)).ok


def test_two_runs_that_forget_at_once_both_do(plane: Path) -> None:
    ingest.run(None, config(plane))
    run_at_once(plane, (forget, {"worlds": ["world-0001"]}), (forget, {"worlds": ["world-0001", "world-0002"]}))
    assert {*lake(plane).table(JOURNAL).rows().column("world").to_pylist()} == {"world-0000"}
    assert lake(plane).table(TOMBSTONES).count() == 2
    ingest.run(None, config(plane))
    assert {*lake(plane).table(JOURNAL).rows().column("world").to_pylist()} == {"world-0000"}


def drop_some(plane: Path) -> int:
    """Remove every third row of the tables, as a fault of the lake would: the watermarks stay."""
    return sum(
        removal.remove_where(
            lake(plane).table(table), lambda rows: pa.array([n % 3 == 1 for n in range(rows.num_rows)], pa.bool_())
        )
        for table in FED
        if table is not SEGMENTS
    )


@pytest.mark.rotating
def test_backfill_adds_exactly_the_missing_rows(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    dropped = drop_some(plane)
    assert sum(ingest.run(None, config(plane)).rows.values()) == 0
    for step in range(3):  # Killed after some of the commits.
        with monkeypatch.context() as patch:
            kill_after(patch, LakeTable, "append", step)
            with pytest.raises(KeyboardInterrupt):
                backfill.run(None, config(plane), everything=True)
    result = backfill.run(None, config(plane), everything=True)
    assert (result.ok, result.findings) == (True, [])
    assert dropped > 50
    assert content(plane) == before
    assert backfill.run(None, config(plane), everything=True).notes == [
        "0 rows were missing below the watermarks, and were added"
    ]
    drop_some(plane)
    backfill.run(None, config(plane), worlds=["world-0001"])
    after = content(plane)
    assert {"journal", "entity_changes", "activity"} <= {table for table in before if after[table] != before[table]}
    assert [[row for row in rows["journal"] if "world-0001" in row] for rows in (before, after)] == [
        [row for row in before["journal"] if "world-0001" in row]
    ] * 2
    run_at_once(plane, (backfill, {"everything": True}), (backfill, {"everything": True}), (ingest, {}))
    assert content(plane) == before


def test_backfill_reads_what_has_appeared_later(plane: Path, tmp_path: Path) -> None:
    log = planes.leave_log(plane, lines=5)
    restored = tmp_path / "restored" / "main" / log.name
    restored.parent.mkdir(parents=True)
    shutil.move(log, restored)
    segment = planes.segment_files(plane, "world-0002")[1]
    body = segment.read_bytes()
    first, last = planes.remove_segment(plane, "world-0002", 1)
    assert not ingest.run(None, config(plane)).ok
    assert not backfill.run(None, config(plane), everything=True).ok
    segment.write_bytes(body)
    both = (str(plane / "activity"), str(tmp_path / "restored"))
    result = backfill.run(None, config(plane, activity=both), everything=True)
    assert (result.ok, result.rows["journal"], result.rows["activity"]) == (True, last - first + 1, 5)
    assert Quarantine(lake(plane)).rows() == []


def test_backfill_reports_rows_that_differ_and_leaves_them(plane: Path) -> None:
    ingest.run(None, config(plane))
    table = lake(plane).table(JOURNAL)
    rows = table.rows(where=pc.field("world") == "world-0000")
    removal.remove_where(table, lambda rows: pc.equal(rows.column("world"), "world-0000").combine_chunks())
    hashes = ["0" * 64 if height == 7 else hash for height, hash in enumerate(rows.column("hash").to_pylist())]
    changed = rows.set_column(rows.column_names.index("hash"), "hash", pa.array(hashes)).filter(
        pc.not_equal(rows.column("height"), 3)
    )
    lake(plane).table(JOURNAL).append_rows(changed)
    before = content(plane)
    result = backfill.run(None, config(plane), everything=True)
    assert [(found["world"], found["height"], found["reason"]) for found in result.findings] == [
        ("world-0000", 7, "differs")
    ]
    assert content(plane) == before
    reset.run(None, config(plane), worlds=["world-0000"], allow_loss=True)
    ingest.run(None, config(plane))
    assert backfill.run(None, config(plane), everything=True).ok


@pytest.mark.rotating
@pytest.mark.parametrize("kept", [10, pytest.param(ENTITY_HISTORY_VERSIONS, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("job", ["accept", "backfill"])
def test_entity_with_more_versions_than_the_plane_keeps_ends_with_exit_code_0(
    plane: Path, job: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.layers.entities.ENTITY_HISTORY_VERSIONS", kept)
    write_counter(plane, *range(kept + kept // 2))

    def command(*words: str) -> int:
        return (
            CliRunner().invoke(root, ["pipeline", *words, "--data", str(plane), "--lake", config(plane).lake]).exit_code
        )

    assert not ingest.run(None, config(plane)).ok
    assert command("status") == 10
    run = {"accept": accept.run, "backfill": backfill.run}[job]
    assert run(None, config(plane), kinds=["counter"], lost=True).ok
    assert ingest.run(None, config(plane)).ok
    assert command("status") == 0
    assert [(row.start, row.end) for row in Quarantine(lake(plane)).rows()] == [(1, kept // 2)]


RULES = """
[[redact]]
table = "journal"
source = "people*"
path = "$.user.email"

[[redact]]
table = "journal"
source = "people*"
path = "/friends/0/name"
method = "hmac"

[[redact]]
table = "entity_changes"
source = "person"
path = "$.email"
method = "hmac"

[[redact]]
table = "activity"
source = "chat"
path = "$.lines[*].text"
"""


@pytest.mark.rotating
def test_redacted_fields_are_in_no_file_and_the_audit_is_content(plane: Path, tmp_path: Path) -> None:
    secret = "ada@example.com"
    with planes.opened(f"dir:{plane}", universe="main", clock=ManualClock(planes.START_MS)) as opened:
        for world in ("people", "other"):
            opened.world(world).create()
            entries: list[Any] = [{"user": {"email": "x" if world == "other" else secret}}, {"n": 1}, 7]
            opened.world(world).append([*entries, {"friends": [{"name": "grace-hopper"}]}], expected_head=0)
        for n in range(3):
            opened.entities.write("person", "p", {"email": secret, "n": n})
        opened.activity.log("s", {"lines": [{"text": secret}, {"text": "grace-hopper"}]}, kind="chat")
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "key").write_text("secret")
    redacting = config(plane, redact_file=str(tmp_path / "rules.toml"), key_file=str(tmp_path / "key"))
    ingest.run(None, config(plane))
    assert texts(plane, secret)
    reset.run(None, config(plane), everything=True)
    with pytest.raises(InvalidArgument, match="--key-file"):
        ingest.run(None, msgspec.structs.replace(redacting, key_file=None))
    assert ingest.run(None, redacting).ok
    for table in TABLES.values():
        purging.purge(lake(plane).table(table), lambda _: False)
    assert texts(plane, secret) == {}
    found = searching.search(lake(plane).location, ["grace-hopper"]).found
    assert [path.partition("/")[0] for path in found] == ["journal"]  # Of the world without rules.
    rows = {
        (row["world"], row["height"]): row
        for row in lake(plane).table(JOURNAL).rows(where=pc.field("world").isin(["people", "other"])).to_pylist()
    }
    assert [rows["people", n]["redacted"] for n in range(4)] == [True, False, False, True]
    assert [rows["other", n]["redacted"] for n in range(4)] == [False] * 4
    assert rows["people", 0]["payload"] == '{"user":{"email":"[redacted]"}}'
    assert cbor2.loads(rows["people", 0]["raw"])[1] == {"user": {"email": "[redacted]"}}
    assert re.fullmatch(r'\{"friends":\[\{"name":"hmac:[0-9a-f]{32}"\}\]\}', rows["people", 3]["payload"])
    assert rows["people", 1]["hash"] == rows["other", 1]["hash"]
    changes = lake(plane).table(ENTITY_CHANGES).rows(where=pc.field("kind") == "person").to_pylist()
    assert len({msgspec.json.decode(row["fields"])["email"] for row in changes}) == 1  # Equal values stay equal.
    logged = lake(plane).table(ACTIVITY).rows(where=pc.field("kind") == "chat").to_pylist()
    assert [row["record"] for row in logged] == ['{"lines":[{"text":"[redacted]"},{"text":"[redacted]"}]}']
    assert audit.run(None, redacting).ok
    with pytest.raises(InvalidArgument, match="--redact FILE"):
        ingest.run(None, config(plane))
    drop_some(plane)
    result = backfill.run(None, redacting, everything=True)
    assert (result.ok, texts(plane, secret)) == (True, {})
    reset.run(None, redacting, everything=True)  # Redacted rows are no losses.
    (tmp_path / "rules.toml").write_text("")
    ingest.run(None, redacting)
    assert texts(plane, secret)


CONTENT_RULES = """
[[redact]]
table = "queued_messages"
source = "people"
path = "$.email"
method = "hmac"

[[redact]]
table = "stored_mail"
path = "$.email"

[[redact]]
table = "states"
source = "person/*"
path = "$.email"
"""


def test_contents_are_redacted(plane: Path, tmp_path: Path) -> None:
    secret = "ada@example.com"
    with planes.opened(f"dir:{plane}", universe="main") as opened:
        people = opened.queue("people")
        people.put({"email": secret, "n": 1})
        people.put(f"no JSON, {secret}".encode())
        people.put({"email": secret, "n": 2}, max_attempts=1)
        for message in people.receive_many(3):
            if message.payload.endswith(b"2}"):
                message.reject("bad")
        opened.mailbox("grace").send("linus", {"email": secret})
        opened.state("person/1").update({"email": secret, "n": 1})
        opened.state("other/1").update({"email": "x"})
    (tmp_path / "rules.toml").write_text(CONTENT_RULES)
    (tmp_path / "key").write_text("secret")
    redacting = config(plane, redact_file=str(tmp_path / "rules.toml"), key_file=str(tmp_path / "key"))
    contents.run(None, redacting, payloads=True)
    assert texts(plane, secret) == {}
    rows = lake(plane).table(TABLES["queued_messages"]).rows(where=pc.field("queue").isin(["people", "people.dlq"]))
    payloads = [row["payload"] for row in rows.to_pylist()]
    emails = {msgspec.json.decode(text)["email"] for text in payloads if text != "[redacted]"}
    assert len(payloads) == 3
    assert len(emails) == 1  # The dead letter has the same HMAC.
    assert emails.pop().startswith("hmac:")
    states = {row["key"]: row["value"] for row in lake(plane).table(TABLES["states"]).rows().to_pylist()}
    assert states == {"person/1": '{"n":1,"email":"[redacted]"}', "other/1": '{"email":"x"}'}
    with pytest.raises(InvalidArgument, match="--redact FILE"):
        contents.run(None, config(plane), payloads=True)


def test_audit_finds_damage_of_rows_that_are_not_redacted(plane: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "key").write_text("secret")
    redacting = config(plane, redact_file=str(tmp_path / "rules.toml"), key_file=str(tmp_path / "key"))
    ingest.run(None, redacting)
    table = lake(plane).table(JOURNAL)
    rows = table.rows(where=pc.field("world") == "world-0000")
    removal.remove_where(table, lambda rows: pc.equal(rows.column("world"), "world-0000").combine_chunks())
    raws = [b"?" if n == 5 else raw for n, raw in enumerate(rows.column("raw").to_pylist())]
    changed = rows.set_column(rows.column_names.index("raw"), "raw", pa.array(raws, pa.binary()))
    lake(plane).table(JOURNAL).append_rows(changed)
    assert [finding["detail"] for finding in audit.run(None, redacting).findings][:1] == [
        "1 rows of the lake do not match their hash"
    ]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ('[[redact]]\ntable = "journal"\npath = "email"', "path 'email' is invalid"),
        ('[[redact]]\ntable = "mail"\npath = "$.email"', "Invalid enum value 'mail'"),
        ("[[redact]", "are invalid"),
    ],
)
def test_invalid_rules_are_refused(plane: Path, tmp_path: Path, rules: str, said: str) -> None:
    (tmp_path / "rules.toml").write_text(rules)
    with pytest.raises(InvalidArgument, match=said):
        ingest.run(None, config(plane, redact_file=str(tmp_path / "rules.toml")))
