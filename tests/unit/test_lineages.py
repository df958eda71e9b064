"""The identity of a plane: an id for ever, and another lineage with every restore."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

import fastness
from fastness import PlaneParent, PlaneStatus
from fastness.kv import Database
from fastness.layers import lineages
from fastness.limits import LINEAGE_PARENTS_MAX
from fastness.testing.clock import ManualClock

Cli = Callable[..., Result]


def status(url: str) -> PlaneStatus:
    with fastness.open(url) as plane:
        return plane.status()


def parsed(cli: Cli, *words: str) -> Any:
    return msgspec.json.decode(cli(*words, "--json").stdout)


@pytest.fixture(params=["dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "dir":
        return f"dir:{tmp_path / 'data'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


def test_an_identity_is_written_once_and_stays(url: str) -> None:
    first = status(url)
    assert first.cause == "created"
    assert len({first.plane, first.lineage, ""}) == 3
    assert first.parents == []
    assert status(url) == first
    with fastness.open("memory:") as one, fastness.open("memory:") as other:
        assert len({plane.status().plane for plane in (one, other)}) == 2


def test_every_restore_begins_another_lineage(database: Database, clock: ManualClock) -> None:
    created = database.transact(lineages.ensure)
    clock.advance_ms(5_000)
    first = database.transact(lineages.begin, "restored", until_ms=7)
    assert (first.plane, first.cause, first.since_ms) == (created.plane, "restored", clock.now_ms())
    second = database.transact(lineages.begin, "copied")
    assert second.parents == [PlaneParent(first.lineage, clock.now_ms()), PlaneParent(created.lineage, 7)]
    assert second.parent(created.lineage) == PlaneParent(created.lineage, 7)
    assert second.parent(second.lineage) is None
    last = [database.transact(lineages.begin, "restored") for _ in range(LINEAGE_PARENTS_MAX)][-1]
    assert len(last.parents) == LINEAGE_PARENTS_MAX
    assert len({parent.lineage for parent in last.parents}) == LINEAGE_PARENTS_MAX
    assert database.read(lineages.load) == last


def test_restore_salvage_and_migration_carry_the_identity(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "1")
    before = parsed(cli, "status")
    cli("backup", str(tmp_path / "backup"))
    summary = msgspec.json.decode((tmp_path / "backup" / "backup.json").read_bytes())
    restored = parsed(cli, "restore", str(tmp_path / "backup"), str(tmp_path / "restored"))
    found = status(f"dir:{tmp_path / 'restored'}")
    assert (found.plane, found.lineage) == (restored["plane"], restored["lineage"])
    assert (found.plane, found.cause) == (before["plane"], "restored")
    assert found.parents == [PlaneParent(before["lineage"], summary["checkpoint_ms"])]
    again = parsed(cli, "restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert again["lineage"] not in (restored["lineage"], before["lineage"])

    cli("doctor", "--salvage", str(tmp_path / "salvaged"))
    salvaged = status(f"dir:{tmp_path / 'salvaged'}")
    assert (salvaged.plane, salvaged.cause) == (before["plane"], "salvaged")
    assert salvaged.parents[0].lineage == before["lineage"]

    assert status(f"dir:{tmp_path / 'moved'}").cause == "created"  # An empty plane can be the target.
    cli("migrate", f"dir:{tmp_path / 'data'}", f"dir:{tmp_path / 'moved'}")
    assert parsed(cli, "--url", f"dir:{tmp_path / 'moved'}", "status") == before
    report = parsed(cli, "doctor")
    assert (report["plane"], report["lineage"]) == (before["plane"], before["lineage"])
    assert before["lineage"] in cli("doctor").stdout


def test_a_restore_that_was_interrupted_after_it_opened_the_key_space_is_repeated(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("queue", "put", "jobs", "1")
    before = parsed(cli, "status")
    cli("backup", str(tmp_path / "backup"))
    with monkeypatch.context() as patch:
        patch.setattr("fastness.cli.restores._publish", lambda draft, folder: 1 / 0)
        cli("restore", str(tmp_path / "backup"), str(tmp_path / "restored"), code=1)
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "restored"))
    assert [parent.lineage for parent in status(f"dir:{tmp_path / 'restored'}").parents] == [before["lineage"]]
    cli("doctor", str(tmp_path / "restored"))


def test_a_copied_directory_is_told_apart_once_it_is_marked(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "1")
    before = parsed(cli, "status")
    copy = shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert parsed(cli, "--url", f"dir:{copy}", "status") == before
    marked = parsed(cli, "--url", f"dir:{copy}", "mark-restored")
    assert (marked["plane"], marked["cause"]) == (before["plane"], "copied")
    assert marked["parents"][0]["lineage"] == before["lineage"]
    text = cli("--url", f"dir:{copy}", "status").stdout
    assert marked["lineage"] in text
    assert before["lineage"] in text
