"""Reads that add the newest BEST_EFFORT values of entities, from memory and from session logs.

`tests/properties/test_entities.py` compares them with a model, over restarts and torn logs.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, Tier, TierPolicy
from fastness.errors import NotTransactional
from fastness.layers.entities import EntityKey
from fastness.layers.field_tiers import LOG_KIND
from fastness.runtime.activity.best_effort import BestEffortFields
from fastness.runtime.activity.log import ActivityLog
from fastness.testing.clock import START_MS, ManualClock
from tests.support.waiting import eventually
from tests.unit import entity_fixtures
from tests.unit.stored_pairs import everything

url = entity_fixtures.url
plane = entity_fixtures.plane


def test_a_read_adds_best_effort_values_and_names_them(plane: Plane, clock: ManualClock) -> None:
    plane.entities.write("task", "1", {"status": "open", "ml_score": 0.5})
    clock.advance_ms(10)
    plane.entities.write("task", "1", {"ml_score": 0.7, "metrics": {"ms": [1, None]}})
    plane.entities.write("task", "2", {"debug_trace": "x"})
    before = everything(plane)

    assert plane.entities.get("task", "1").fields == {"status": "open"}
    found = plane.entities.get("task", "1", best_effort=True)
    assert found.fields == {"status": "open", "ml_score": 0.7, "metrics": {"ms": [1, None]}}
    assert (found.version, found.best_effort) == (1, {"ml_score": START_MS + 10, "metrics": START_MS + 10})
    assert plane.entities.get("task", "2") is None
    assert plane.entities.get("task", "2", best_effort=True).version == 0
    assert plane.entities.get("task", "3", best_effort=True) is None

    plane.entities.write("task", "0", {"ml_score": 1})  # After the first read a value comes from memory.
    for limit in (1, 2, 3, 4):
        scanned = plane.entities.scan("task", limit=limit, best_effort=True)
        assert [(each.id, list(each.best_effort)) for each in scanned] == [
            ("0", ["ml_score"]),
            ("1", ["ml_score", "metrics"]),
            ("2", ["debug_trace"]),
        ][:limit]
    assert [each.id for each in plane.entities.scan("task", after="1", best_effort=True)] == ["2"]
    assert [each.id for each in plane.entities.scan("task")] == ["1"]
    assert everything(plane) == before  # Nothing of this is in the key space.


def test_values_stay_in_their_universe_and_come_from_every_way_to_write_them(plane: Plane) -> None:
    assert plane.entities.get("task", "1", best_effort=True) is None
    plane.atomic().write("task", "1", {"note": "n", "ml_a": 1}).commit()
    plane.activity.log("by-hand", {"kind": "task", "id": "1", "fields": {"ml_b": 2}}, kind=LOG_KIND)
    for wrong in ({"kind": "task"}, {"kind": "task", "id": 1, "fields": {}}, {"kind": "task", "id": "1", "fields": 7}):
        plane.activity.log("by-hand", wrong, kind=LOG_KIND)
    Plane(plane._transport, "other").entities.write("task", "1", {"ml_c": 3})
    eventually(lambda: "ml_a" in plane.entities.get("task", "1", best_effort=True).fields)  # Logged after the commit.
    assert plane.entities.get("task", "1", best_effort=True).fields == {"note": "n", "ml_a": 1, "ml_b": 2}
    assert Plane(plane._transport, "other").entities.get("task", "1", best_effort=True).fields == {"ml_c": 3}


def test_a_change_of_the_policy_decides_which_value_counts(tmp_path: Path, clock: ManualClock) -> None:
    """A field that is durable by the policy shows no BEST_EFFORT values, and the newer value of the two wins."""
    durable = TierPolicy({"task.ml_score": Tier.IMPORTANT})

    def write_and_read(policy: TierPolicy | None, score: int | None) -> tuple[Any, bool]:
        with fastness.open(f"dir:{tmp_path}", clock=clock, tiers=policy) as plane:
            if score is not None:
                clock.advance_ms(1_000)
                plane.entities.write("task", "1", {"ml_score": score})
            found = plane.entities.get("task", "1", best_effort=True)
            return found.get("ml_score"), "ml_score" in found.best_effort

    assert write_and_read(None, 1) == (1, True)
    assert write_and_read(durable, 2) == (2, False)
    assert write_and_read(None, None) == (2, False)  # The BEST_EFFORT value is older than the durable one.
    assert write_and_read(None, 3) == (3, True)
    assert write_and_read(durable, None) == (2, False)


def test_a_deletion_hides_values_that_were_written_before_it(plane: Plane, clock: ManualClock) -> None:
    plane.entities.write("task", "1", {"ml_score": 1, "status": "open"})
    clock.advance_ms(1)
    plane.entities.delete("task", "1")
    assert plane.entities.get("task", "1", best_effort=True) is None
    clock.advance_ms(1)
    plane.entities.write("task", "1", {"ml_new": 2})
    found = plane.entities.get("task", "1", best_effort=True)
    assert (found.version, found.fields) == (2, {"ml_new": 2})  # A put must expect the version of the deletion.
    clock.advance_ms(1)
    plane.entities.put_if_version("task", "1", {"status": "again"}, expected_version=2)
    assert plane.entities.get("task", "1", best_effort=True).fields == {"status": "again", "ml_new": 2}


def test_memory_is_bounded_and_forgets_the_oldest_entity_first(tmp_path: Path, clock: ManualClock) -> None:
    log = ActivityLog(tmp_path, None, clock=clock, start_flusher=False)
    values = BestEffortFields(lambda: log, tmp_path, None, shared=False, entries_max=6, bytes_max=2_500)
    values.load("main")

    def write(id: str, **fields: Any) -> None:
        log.log("main", "s", {"kind": "task", "id": id, "fields": fields}, kind=LOG_KIND)

    def known() -> list[str]:
        return list(values.ids("main", "task", "", None))

    for number in range(3):
        write(str(number), a=number, b=number)
    write("0", a="again")
    write("3", a=3)
    assert known() == ["0", "2", "3"]
    assert values.get(EntityKey("main", "task", "0"))["a"][1] == b'"again"'
    write("4", a="x" * 1_800)
    assert known() == ["3", "4"]
    write("5", a="x" * 3_000)  # More than all of the memory.
    assert known() == []
    for number in range(10_000):
        write("6", **{f"f{number}": number})
    assert len(values.get(EntityKey("main", "task", "6"))) <= 6
    log.close()


def test_a_load_reads_the_newest_part_of_the_logs(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file whose writer is still at work, up to its last complete line."""
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        for number in range(100):
            plane.entities.write("task", f"{number:02}", {"ml_score": number}, session=f"s{number % 2}")
    monkeypatch.setattr("fastness.limits.BEST_EFFORT_LOAD_BYTES_MAX", 1_000)
    folder = tmp_path / "activity" / "main"
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        found = plane.entities.scan("task", best_effort=True)
        assert 0 < len(found) < 20
        assert all(int(each.id) >= 80 and each["ml_score"] == int(each.id) for each in found)
    assert not list(folder.glob("*.jsonl"))  # They were in the object store.


def test_nodes_that_share_a_folder_see_each_others_values(postgres_url: str, tmp_path: Path) -> None:
    with (
        fastness.open(postgres_url, activity=str(tmp_path)) as one,
        fastness.open(postgres_url, activity=str(tmp_path)) as other,
    ):
        assert other.entities.get("task", "1", best_effort=True) is None
        for score in (1, 2):  # The second time, the file is followed.
            one.entities.write("task", "1", {"ml_score": score})
            eventually(
                lambda: (
                    (found := other.entities.get("task", "1", best_effort=True)) is not None
                    and found["ml_score"] == score  # noqa: B023
                )
            )
        other.entities.write("task", "1", {"ml_score": 3})
        assert other.entities.get("task", "1", best_effort=True).fields["ml_score"] == 3


def test_nodes_with_an_object_store_see_ended_sessions(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.limits.BEST_EFFORT_LIST_SECONDS", 0)
    objects = f"dir:{tmp_path / 'objects'}"
    with (
        fastness.open(postgres_url, activity=str(tmp_path / "one"), objects=objects) as one,
        fastness.open(postgres_url, activity=str(tmp_path / "other"), objects=objects) as other,
    ):
        for score in (1, 2):
            assert score == 1 or other.entities.get("task", "1", best_effort=True).fields["ml_score"] == 1
            one.entities.write("task", "1", {"ml_score": score}, session="s")
            one.activity.end("s")
            eventually(
                lambda: (
                    (found := other.entities.get("task", "1", best_effort=True)) is not None
                    and found["ml_score"] == score  # noqa: B023
                )
            )


def test_a_transaction_of_the_callers_own_has_no_best_effort_values(postgres_url: str) -> None:
    import psycopg

    with (
        fastness.open(postgres_url) as plane,
        psycopg.connect(postgres_url) as connection,
        pytest.raises(NotTransactional, match=r"plane\.entities"),
    ):
        plane.within(connection).entities.get("task", "1", best_effort=True)


async def test_tasks_read_best_effort_values(url: str) -> None:
    async with fastness.open_async(url) as plane:
        await asyncio.gather(*(plane.entities.write("task", f"{n}", {"ml_score": n}) for n in range(8)))
        found = await asyncio.gather(*(plane.entities.get("task", f"{n}", best_effort=True) for n in range(8)))
        assert [each.fields["ml_score"] for each in found] == list(range(8))
        assert len(await plane.entities.scan("task", limit=5, best_effort=True)) == 5


def test_values_are_those_of_the_log_also_from_memory(plane: Plane) -> None:
    """Session logs are JSON, so a value is the same before and after a restart."""
    plane.entities.get("task", "1", best_effort=True)
    plane.entities.write("task", "1", {"ml_bytes": b"\x00\xff", "ml_nan": float("nan"), "ml_big": 2**60})
    logged = msgspec.json.decode(plane.activity.read(kind=LOG_KIND).records[0].record)
    found = plane.entities.get("task", "1", best_effort=True)
    assert found.fields == logged["fields"] == {"ml_bytes": "AP8=", "ml_nan": None, "ml_big": 2**60}
