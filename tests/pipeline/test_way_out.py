"""Ways out of a lake that is wrong, or has too much: reset, backfill, forget, retention and redaction."""

import runpy
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.cli.main import root
from holdfast.errors import InvalidArgument, WouldLoseData
from holdfast.pipeline.config import Config
from holdfast.pipeline.intake.quarantine import Quarantine
from holdfast.pipeline.jobs import accept, ingest, reset
from holdfast.pipeline.lake import Lake, removal
from holdfast.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUARANTINE, QUEUE_EVENTS, SEGMENTS
from holdfast.wire.queues import QueuePolicy

planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))
FED = (JOURNAL, SEGMENTS, ENTITY_CHANGES, QUEUE_EVENTS, ACTIVITY)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane with every kind of source; each test gets a copy."""
    path: Path = tmp_path_factory.mktemp("way-out") / "data"
    planes.build(path, worlds=3, entries=120, segment=16, messages=6, mails=6, entities=4, activity=9)
    with planes.opened(f"dir:{path}", universe="main", clock=planes.ManualClock(planes.START_MS)) as plane:
        plane.queue("audited").set_policy(QueuePolicy(history="durable", history_seconds=31_000_000))
        plane.queue("audited").put_many([1, 2])
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
    with planes.opened(f"dir:{plane}", universe="main", clock=planes.ManualClock(planes.START_MS)) as opened:
        for value in values:
            opened.entities.write("counter", "c", {"n": value})


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
    monkeypatch.setattr("holdfast.layers.entities.ENTITY_HISTORY_VERSIONS", 2)
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
        ({"queues": ["audited"]}, r"2 rows of audited \(queue_events"),
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


def test_two_resets_and_an_ingest_at_once_leave_every_row_once(plane: Path) -> None:
    ingest.run(None, config(plane))
    before = content(plane)
    # A directory has one process at a time; the copies have the same identity.
    copies = [plane.parent / f"copy-{n}" for n in range(3)]
    for copy in copies:
        shutil.copytree(plane, copy)
    failures: list[BaseException] = []

    def work(job: Any, copy: Path, **options: Any) -> None:
        try:
            job.run(None, Config(data=f"dir:{copy}", lake=config(plane).lake), **options)
        except BaseException as error:
            failures.append(error)

    runs = [
        threading.Thread(target=work, args=(reset, copies[0]), kwargs={"everything": True}),
        threading.Thread(target=work, args=(reset, copies[1]), kwargs={"worlds": ["world-0001"]}),
        threading.Thread(target=work, args=(ingest, copies[2])),
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert failures == []
    ingest.run(None, config(plane))
    assert content(plane) == before


def test_reset_keeps_accepted_losses_accepted(plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.layers.entities.ENTITY_HISTORY_VERSIONS", 3)
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
