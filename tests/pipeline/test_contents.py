"""`contents`: what the handles of a plane return is what the tables have."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.errors import TransactionConflict
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import contents
from fastness.pipeline.lake import Lake, LakeTable
from fastness.pipeline.schemas import (
    CONTENTS,
    LEASES,
    QUEUED_MESSAGES,
    RECEIPTS,
    SCHEDULES,
    STATE_CHANGES,
    STATES,
    STORED_MAIL,
    TOKENS,
    Table,
)

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))


def change(config: Config, work: Callable[[fastness.Plane], object], universe: str = "main") -> None:
    with fastness.open(config.data, universe=universe) as plane:
        work(plane)


def run(config: Config, *, minutes: int = 0, payloads: bool = False) -> JobResult:
    return contents.run(None, config, payloads=payloads, now=NOW + timedelta(minutes=minutes))


def rows(config: Config, table: Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Lake(config.lake).table(table).rows().to_pylist()
    return sorted(found, key=lambda row: (row["universe"], *(row[name] for name in table.order)))


def fill(plane: fastness.Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put({"n": 1}, priority=7, group="g", attributes={"a": "b"}, correlation_id="c-1")
    jobs.put({"n": 2}, group="g")
    jobs.put(b"\xff\xfe", delay_seconds=60)
    jobs.put("x" * 20_000)
    jobs.put("soon", ttl_seconds=3_600)
    broken = plane.queue("broken")
    broken.put("bad", max_attempts=1)
    message = broken.receive()
    assert message is not None
    message.nack(error="no such file")
    jobs.schedule("nightly", "0 3 * * *", "go", timezone="Europe/Berlin")
    ada, bob = plane.mailbox("ada"), plane.mailbox("bob")
    for text in ("one", "two", "three"):
        bob.send("ada", text)
    first = ada.read(limit=2)
    ada.confirm([first[0].id])
    plane.state("deploy/web").update({"image": "v1", "raw": b"\x00"})
    plane.state("deploy/api").update([1, 2])
    plane.lease("deploy/web").acquire("ada", ttl_seconds=3_600)
    plane.lease("deploy/api").acquire("bob").release()
    made = plane.tokens.create("ci", universes="main", verbs="queue:put,queue:stats", rate_per_second=5)
    plane.tokens.revoke(made.info.id)


def test_tables_equal_what_the_handles_return(config: Config) -> None:
    change(config, fill)
    change(config, lambda plane: plane.queue("jobs").put("other"), universe="other")
    done = run(config, payloads=True)
    assert done.ok
    assert done.rows == {table.name: len(rows(config, table)) for table in CONTENTS}
    with fastness.open(config.data) as plane:
        jobs, dead = plane.queue("jobs"), plane.queue("broken").dead_letters()
        found = {row["id"]: row for row in rows(config, QUEUED_MESSAGES) if row["universe"] == "main"}
        for each in [*jobs.peek(10), *dead]:
            row = found[each.id]
            assert (row["priority"], row["group_name"], row["size"]) == (each.priority, each.group, each.size)
            assert (row["blob"], row["last_error"], row["origin"]) == (each.blob, each.last_error, each.origin)
            assert (row["payload"] or "").encode() == (each.payload or b"")
            assert row["put_at"].timestamp() * 1_000 == pytest.approx(each.created_ms, abs=0.5)
        assert sorted(row["state"] for row in found.values()) == [
            "blocked",
            "delayed",
            "ready",
            "ready",
            "ready",
            "ready",
        ]
        assert sum(row["blob"] is not None for row in found.values()) == 1
        assert [row["payload"] for row in found.values() if row["state"] == "delayed"] == ['{"$bytes":"//4="}']
        assert [row["died_at"] is not None for row in found.values() if row["origin"] == "broken"] == [True]
        mails = plane.mailbox("ada").read(peek=True)
        assert [(row["id"], row["body"], row["delivered"]) for row in rows(config, STORED_MAIL)] == [
            (mails[0].id, '"two"', True),
            (mails[1].id, '"three"', False),
        ]
        receipts = plane.mailbox("bob").receipts()
        assert [(row["sequence"], row["mail_id"], row["state"]) for row in rows(config, RECEIPTS)] == [
            (each.sequence, each.id, each.state) for each in receipts
        ]
        assert {row["key"]: (row["etag"], row["value"]) for row in rows(config, STATES)} == {
            "deploy/api": (plane.state("deploy/api").get().etag, "[1,2]"),
            "deploy/web": (plane.state("deploy/web").get().etag, '{"raw":{"$bytes":"AA=="},"image":"v1"}'),
        }
        assert [(row["key"], row["owner"], row["held"], row["fence"]) for row in rows(config, LEASES)] == [
            ("deploy/api", "bob", False, 1),
            ("deploy/web", "ada", True, 1),
        ]
        [schedule] = jobs.schedules()
        [row] = rows(config, SCHEDULES)
        assert (row["queue"], row["name"], row["cron"], row["timezone"]) == (
            "jobs",
            "nightly",
            "0 3 * * *",
            "Europe/Berlin",
        )
        assert row["next_at"] == datetime.fromtimestamp(schedule.next_ms / 1_000, UTC)
    [token] = rows(config, TOKENS)
    assert (token["universe"], token["name"], token["verbs"]) == ("(plane)", "ci", ["queue:put", "queue:stats"])
    assert token["revoked_at"] is not None
    assert not {"secret", "secret_hash"} & set(token)


def test_content_is_copied_only_on_request(config: Config) -> None:
    change(config, fill)
    run(config)
    assert {row["payload"] for row in rows(config, QUEUED_MESSAGES)} == {None}
    assert {row["body"] for row in rows(config, STORED_MAIL)} == {None}


def test_a_run_replaces_the_one_before(config: Config) -> None:
    change(config, lambda plane: plane.queue("jobs").put_many(["a", "b", "c"]))
    run(config)
    change(config, lambda plane: plane.queue("jobs").receive())
    run(config, minutes=1)
    found = rows(config, QUEUED_MESSAGES)
    assert sorted(row["state"] for row in found) == ["leased", "ready", "ready"]
    assert {row["seen_at"] for row in found} == {NOW + timedelta(minutes=1)}


def changes(config: Config) -> list[tuple[str, int, bool]]:
    return [(row["key"], row["version"], row["removed"]) for row in rows(config, STATE_CHANGES)]


def edit_states(config: Config) -> None:
    """Three runs: two documents are new, then one has changed twice, then one is removed and another is new."""
    change(config, lambda plane: [plane.state(key).update(1) for key in ("a", "b")])
    run(config)
    change(config, lambda plane: [plane.state("a").update(value) for value in (2, 3)])
    run(config, minutes=1)
    change(config, lambda plane: (plane.state("b").remove(), plane.state("c").update(1)))
    run(config, minutes=2)


EDITED = [("a", 1, False), ("a", 3, False), ("b", 1, False), ("b", 1, True), ("c", 1, False)]


def test_changes_of_state_documents_are_added_once(config: Config) -> None:
    edit_states(config)
    run(config, minutes=3)
    assert changes(config) == EDITED
    assert [row["key"] for row in rows(config, STATES)] == ["a", "c"]


def test_a_removed_document_is_written_again(config: Config) -> None:
    change(config, lambda plane: plane.state("a").update(1))
    run(config)
    change(config, lambda plane: plane.state("a").remove())
    run(config, minutes=1)
    run(config, minutes=2)
    change(config, lambda plane: plane.state("a").update(1))
    run(config, minutes=3)
    assert changes(config) == [("a", 1, False), ("a", 1, True), ("a", 1, False)]


def test_a_run_that_ends_between_the_two_tables_repeats_no_change(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite = LakeTable.overwrite

    def fail(table: LakeTable, *args: Any, **options: Any) -> None:
        if table.table is STATES:
            raise KeyboardInterrupt
        overwrite(table, *args, **options)

    change(config, lambda plane: plane.state("a").update(1))
    run(config)
    change(config, lambda plane: (plane.state("a").update(2), plane.state("b").update(1)))
    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "overwrite", fail)
        with pytest.raises(KeyboardInterrupt):
            run(config, minutes=1)
    change(config, lambda plane: plane.state("b").update(2))
    run(config, minutes=2)
    run(config, minutes=3)
    assert changes(config) == [("a", 1, False), ("a", 2, False), ("b", 1, False), ("b", 2, False)]


def test_two_runs_at_once_add_each_change_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    change(config, lambda plane: plane.state("a").update(1))
    append, others = LakeTable.append, [1]

    def append_after_another_run(table: LakeTable, *args: Any, **options: Any) -> None:
        if table.table is STATE_CHANGES and others:
            others.clear()
            run(config, minutes=1)
            with pytest.raises(TransactionConflict):
                append(table, *args, **options)
            raise TransactionConflict("another run committed first")
        append(table, *args, **options)

    monkeypatch.setattr(LakeTable, "append", append_after_another_run)
    run(config)
    assert changes(config) == [("a", 1, False)]


def test_a_run_of_one_universe_leaves_the_others(config: Config) -> None:
    for universe in ("one", "two"):
        change(config, lambda plane: (plane.queue("q").put(1), plane.state("s").update(1)), universe)
    run(config)
    for universe in ("one", "two"):
        change(config, lambda plane: (plane.queue("q").put(2), plane.state("s").update(2)), universe)
    only = Config(data=config.data, lake=config.lake, universes=("one",))
    run(only, minutes=1)
    assert [row["universe"] for row in rows(config, QUEUED_MESSAGES)] == ["one", "one", "two"]
    assert [row["version"] for row in rows(config, STATES)] == [2, 1]
    run(config, minutes=2)
    assert changes(config) == [("s", 1, False), ("s", 2, False)] * 2
