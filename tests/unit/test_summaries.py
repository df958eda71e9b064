"""Summary lists, and integrity checks of worlds."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane, Tier
from fastness.errors import InvalidArgument, InvalidName, WorldNotFound
from fastness.handles.sync.plane import Plane as Handle
from fastness.layers.queues import admin
from fastness.limits import SUMMARY_LIST_MAX
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.tiers import TierPolicy
from tests.support.waiting import eventually

NO_MANIFEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def plane(database: Any) -> Iterator[Plane]:
    policy = TierPolicy({"order.total": Tier.CRITICAL}, {"trace_*": Tier.BEST_EFFORT})
    with Handle(EmbeddedTransport(Services(database, policy=policy))) as opened:
        yield opened


def test_universes_are_those_with_data(plane: Plane) -> None:
    assert plane.universes() == []
    for name in ("b", "a", "a-1"):
        Handle(plane._transport, name).queue("jobs").put(b"x")
    assert plane.universes() == ["a", "a-1", "b"]
    assert plane.universes(after="a", limit=1) == ["a-1"]


def test_queue_survey_has_the_stats_of_each_queue(plane: Plane) -> None:
    for name in ("mail", "jobs", "bills"):
        plane.queue(name).put(b"x")
    plane.queue("jobs").put(b"y", delay_seconds=60)
    survey = plane.survey_queues()
    assert [each.queue for each in survey.queues] == ["bills", "jobs", "mail"]
    assert survey.next is None
    jobs = survey.queues[1]
    assert (jobs.ready, jobs.delayed, jobs.put_total) == (1, 1, 2)
    first = plane.survey_queues(limit=2)
    assert first.next == "jobs"
    assert [each.queue for each in plane.survey_queues(after=first.next).queues] == ["mail"]


def test_world_survey_counts_hot_and_cold_records(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        _world(plane, records=40, baseline=30, entries=10)
        plane.world("fork").create()
        old = plane.world("old")
        old.create()
        old.archive()
        old.delete()
        ada, fork = plane.survey_worlds().worlds  # A deleted world is not listed.
        assert (ada.name, ada.state, ada.head, ada.hot, ada.baseline) == ("ada", "active", 42, 20, 30)
        assert (fork.head, fork.hot, fork.baseline) == (0, 0, 0)
        assert plane.world("ada").describe() == ada
        assert plane.survey_worlds(limit=1).next == "ada"


def test_entity_kinds_list_the_tiers_of_their_fields(plane: Plane) -> None:
    plane.entities.write("order", "1", {"total": 5, "note": "n", "trace_id": "t"})
    plane.entities.write("agent", "ada", {"name": "Ada"})
    agent, order = plane.entities.kinds()
    assert (agent.kind, agent.tiers) == ("agent", {"name": Tier.IMPORTANT})
    assert (order.kind, order.tiers) == ("order", {"note": Tier.IMPORTANT, "total": Tier.CRITICAL})
    assert [each.kind for each in plane.entities.kinds(after="agent")] == ["order"]


def test_entity_kinds_list_policy_fields_that_no_entity_has(plane: Plane) -> None:
    plane.entities.write("order", "1", {"note": "n"})
    assert plane.entities.kinds()[0].tiers["total"] is Tier.CRITICAL


def test_mailboxes_list_the_oldest_mail_and_whether_an_agent_reads(plane: Plane) -> None:
    plane.mailbox("ada").send("bob", b"hello")
    ada, bob = plane.mailboxes()
    assert (ada.pending, ada.oldest_ms, ada.joined) == (0, None, False)
    assert bob.pending == 1
    assert bob.oldest_ms == plane.mailbox("bob").stats().oldest_ms


def test_queues_are_found_by_a_part_of_their_names(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "SURVEY_NAMES_MAX", 10)
    names = [f"{team}-{number:02}" for team in ("Mail", "print") for number in range(20)]
    for name in names:
        plane.queue(name).put(b"x")
    for text in ("mAIL", "print-1", "-07", "nothing", ""):
        for limit in (1, 3, 100):
            found, pages = list[str](), 0
            after: str | None = ""
            while after is not None:
                page = plane.survey_queues(text=text, limit=limit, after=after)
                found, after, pages = found + [each.queue for each in page.queues], page.next, pages + 1
                assert len(page.queues) <= limit
            assert found == [name for name in names if text.lower() in name.lower()]
            assert pages <= 1 + len(found) // limit + len(names) // 10
    with pytest.raises(InvalidArgument, match="0 to 255 characters"):
        plane.survey_queues(text="x" * 256)


def test_lease_waiters_are_listed(plane: Plane) -> None:
    held = plane.lease("orders/1").acquire("ada", ttl_seconds=600)
    assert plane.waits().lines == []
    waiting = threading.Thread(target=lambda: plane.lease("orders/1").acquire("bob", wait_seconds=600).release())
    waiting.start()
    try:
        eventually(lambda: plane.waits().lines != [])
        (line,) = plane.waits().lines
        assert (line.key, line.waiting) == ("orders/1", 1)
        assert line.waited_seconds >= 0
        assert [each.owner for each in line.callers] == ["bob"]
    finally:
        held.release()
        waiting.join()
    assert plane.waits().lines == []


def test_locks_of_this_process_are_listed(plane: Plane) -> None:
    with plane.locks.acquire(["entity_type", "task"]):
        locks = plane.waits().locks
    assert locks[-1].path == ["entity_type", "task"]
    assert locks[-1].held_seconds is not None
    assert locks[-1].waiting_seconds is None
    assert plane.waits().locks == []


def test_listing_locks_creates_no_lock_table(plane: Plane) -> None:
    transport: Any = plane._transport
    for number in range(3):
        assert Handle(transport, f"other-{number}").waits().locks == []
    assert transport.services._locks == {}
    with plane.locks.acquire(["entity_type", "task"]):
        assert Handle(transport, "other-0").waits().locks == []


@pytest.mark.parametrize(
    "call",
    [
        lambda plane, limit: plane.survey_queues(limit=limit),
        lambda plane, limit: plane.survey_worlds(limit=limit),
        lambda plane, limit: plane.entities.kinds(limit=limit),
        lambda plane, limit: plane.waits(limit=limit),
    ],
)
@pytest.mark.parametrize("limit", [0, -1, SUMMARY_LIST_MAX + 1])
def test_page_size_is_bounded(call: Callable[[Plane, int], Any], limit: int) -> None:
    with fastness.open("memory:") as plane, pytest.raises(InvalidArgument, match=str(SUMMARY_LIST_MAX)):
        call(plane, limit)


def test_invalid_name_is_refused() -> None:
    with fastness.open("memory:") as plane:
        for call in (plane.survey_queues, plane.survey_worlds, plane.entities.kinds, plane.universes):
            with pytest.raises(InvalidName):
                call(after="a b")


# Checks.


def test_check_reads_all_of_an_intact_world(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        _world(plane, records=40, baseline=30, entries=10)
        found = plane.world("ada").check()
        assert (found.fault, found.records, found.segments, found.snapshots) == (None, 42, 2, 2)
        plane.world("new").create()
        assert plane.world("new").check().records == 0


def test_check_finds_a_changed_segment_although_it_was_read_before(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        _world(plane, records=40, baseline=30, entries=10)
        assert len(plane.world("ada").read(0)) == 42
        (body,) = tmp_path.rglob("10-19.log")
        body.write_bytes(body.read_bytes()[:-1] + b"\x00")
        found = plane.world("ada").check()
        assert found.fault is not None
        assert "10-19.log" in found.fault


def test_check_finds_a_snapshot_without_its_blob(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        world = plane.world("ada")
        world.create()
        world.append([1], expected_head=0)
        snapshot = world.snapshots.commit({"big": "x" * 20_000}, height=1)
        (body,) = [path for path in tmp_path.rglob("*") if path.name.startswith(snapshot.snapshot_ref)]
        body.unlink()
        found = world.check()
        assert found.fault is not None
        assert snapshot.snapshot_ref in found.fault


def test_check_finds_a_changed_record(plane: Plane) -> None:
    world = plane.world("ada")
    world.create()
    world.append([1, 2], expected_head=0)
    plane.transact(lambda tx: tx.put(_hot_key(tx, 1), b"\x82\x00\xff"))
    fault = world.check().fault
    assert fault is not None
    assert "Record 1" in fault


def test_check_of_an_unknown_world_fails(plane: Plane) -> None:
    with pytest.raises(WorldNotFound):
        plane.world("unknown").check()


def _hot_key(tx: Any, height: int) -> bytes:
    (key,) = [key for key, value in tx.scan(b"", b"\xff", limit=100) if value == b"\x82\x00" + bytes([height + 1])]
    return bytes(key)


def _world(plane: Plane, *, records: int, baseline: int, entries: int) -> None:
    """A world of `records` entries with a baseline; the entries below it are compacted into segments."""
    world = plane.world("ada")
    world.create()
    world.append(list(range(records)), expected_head=0)
    world.snapshots.commit(
        {"n": baseline}, height=baseline, promote=True, receipt_horizon_height=baseline, manifest_hash=NO_MANIFEST
    )
    world.compact(entries=entries, margin=5)
