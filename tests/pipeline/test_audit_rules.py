"""Audit rules find every kind of damage of a world, and report nothing else."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

import fastness
from fastness.errors import Unreachable
from fastness.kv import Subspace, Transaction
from fastness.layers import blobs, snapshots, worlds
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.worlds import World
from fastness.pipeline import replays
from fastness.pipeline.audit_rules import AuditInput, AuditResult, audit_world, record_checksum
from fastness.pipeline.config import Config
from fastness.pipeline.jobs import audit
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.views import open_view
from fastness.wire.inboxes import DomainEvent, Effect
from tests.pipeline import planes

T = TypeVar("T")
CHAIN = planes.CHAIN
EMPTY_LAKE = SimpleNamespace(expected=lambda universe, world: (0, []))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    planes.build(tmp_path / "data", worlds=2, entries=200)
    return tmp_path / "data"


def input_of(data: Path, world: str = "world-0001") -> AuditInput:
    with open_view(Config(data=f"dir:{data}", lake="unused")) as view:
        found = view.world("main", world)
        assert found is not None
        return audit._audit_input(view, found, f"dir:{data.parent / 'staging'}", EMPTY_LAKE)  # type: ignore[arg-type]


def audit_of(data: Path, world: str = "world-0001", reducer: str | None = CHAIN) -> AuditResult:
    return audit_world(input_of(data, world), Stores(), reducer)


def found(verdict: AuditResult) -> list[tuple[int, str]]:
    return [(finding.height, finding.reason) for finding in verdict.findings]


def write(data: Path, work: Callable[[Transaction], T]) -> T:
    with fastness.open(f"dir:{data}") as plane:
        return plane.transact(work)


def change_index(data: Path, world: str, **changes: Any) -> int:
    """Change the baseline and its snapshot in the index; returns its height."""

    def work(tx: Transaction) -> int:
        subspace = worlds.subspace(World("main", world))
        record = msgspec.structs.replace(snapshots.baseline(tx, World("main", world)), **changes)
        for key in (subspace.key("snapshot", record.height), subspace.key("baseline")):
            tx.put(key, msgspec.msgpack.encode(record))
        return record.height

    return write(data, work)


@pytest.mark.parametrize("reducer", [None, CHAIN])
@pytest.mark.parametrize("world", ["world-0000", "world-0001", "empty"])
def test_undamaged_world_has_no_findings(data: Path, world: str, reducer: str | None) -> None:
    verdict = audit_of(data, world, reducer)
    assert (verdict.verdict, verdict.findings) == ("ok", [])
    with fastness.open(f"dir:{data}") as plane:
        assert verdict.height == verdict.records == plane.world(world).head()
        replayed = plane.world(world).replay(replays.chain)
    assert verdict.digest == replays.digest(replayed.state)
    assert verdict.state is not None
    assert hashlib.sha256(verdict.state).hexdigest() == verdict.digest


def test_baseline_with_wrong_state_is_found(data: Path) -> None:
    height = planes.plant_baseline(data, "world-0001", {"planted": True})
    assert (height, "contradicts") in found(audit_of(data))
    assert audit_of(data).verdict == "contradicts"


def test_planted_baseline_is_found_without_a_reducer(data: Path) -> None:
    height = planes.plant_baseline(data, "world-0001", {"planted": True})
    verdict = audit_of(data, reducer=None)
    assert set(found(verdict)) == {(height, "contradicts")}
    assert all("records a snapshot that differs" in finding.detail for finding in verdict.findings)


def test_planted_baseline_that_the_journal_records_is_found_by_the_fold(tmp_path: Path) -> None:
    """A wrong state that was committed leaves an index and a journal that agree."""
    planes.build(tmp_path / "data", worlds=0)
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append([1, 2, 3], expected_head=0)
        options: dict[str, Any] = {"promote": True, "receipt_horizon_height": 2, "manifest_hash": snapshots.NO_MANIFEST}
        world.snapshots.commit("wrong", height=2, **options)
    verdict = audit_of(tmp_path / "data", "ada")
    assert (2, "contradicts") in found(verdict)
    assert any("differs from the fold" in finding.detail for finding in verdict.findings)
    assert any("restore" in finding.detail for finding in verdict.findings)
    assert audit_of(tmp_path / "data", "ada", None).verdict == "ok"  # Without a reducer it cannot be found.


def test_damage_is_reported_with_its_height_and_later_damage_too(data: Path) -> None:
    start, _ = planes.flip_byte(data, "world-0001")
    planes.plant_baseline(data, "world-0001", {"planted": True})
    height = input_of(data).baseline.height
    verdict = audit_of(data)
    assert (start, "checksum") in found(verdict)
    assert (height, "contradicts") in found(verdict)
    assert verdict.height == start
    assert verdict.verdict == "contradicts"


def test_state_before_a_missing_segment_is_reported(data: Path) -> None:
    start, end = planes.remove_segment(data, "world-0001", 1)
    verdict = audit_of(data)
    assert found(verdict) == [(start, "missing")]
    assert (verdict.verdict, verdict.height) == ("incomplete", start)
    assert verdict.records == input_of(data).head - (end - start + 1)


def test_gap_in_hot_records_is_found(data: Path) -> None:
    planes.remove_record(data, "world-0000", 50)
    verdict = audit_of(data, "world-0000")
    assert found(verdict) == [(50, "missing")]
    assert (verdict.height, verdict.verdict) == (50, "incomplete")


def test_record_of_an_unknown_kind_is_found(data: Path) -> None:
    height = planes.append_unknown(data, "world-0001")
    assert found(audit_of(data)) == [(height, "schema")]


def test_snapshot_with_a_missing_blob_is_found(data: Path) -> None:
    audit_input = input_of(data)
    body = audit_input.snapshots[1]

    def lose(tx: Transaction) -> None:
        tx.delete(blobs._key("main", bytes.fromhex(body.record.snapshot_ref)))

    write(data, lose)
    for reducer in (None, CHAIN):
        assert found(audit_of(data, reducer=reducer)) == [(body.record.height, "blob")]


def test_snapshot_with_a_corrupt_blob_is_found(data: Path) -> None:
    audit_input = input_of(data)
    bodies = [msgspec.structs.replace(audit_input.snapshots[1], inline=b"\x00" * (audit_input.snapshots[1].size or 0))]
    changed = msgspec.structs.replace(
        audit_input, snapshots=[audit_input.snapshots[0], *bodies, *audit_input.snapshots[2:]]
    )
    assert found(audit_world(changed, Stores(), CHAIN)) == [(bodies[0].record.height, "blob")]


def test_missing_staged_object_is_not_damage(data: Path) -> None:
    audit_input = input_of(data)
    body = msgspec.structs.replace(
        audit_input.snapshots[1], inline=None, store=f"dir:{data / 'gone'}", path="cas/x", staged=True
    )
    changed = msgspec.structs.replace(
        audit_input, snapshots=[audit_input.snapshots[0], body, *audit_input.snapshots[2:]]
    )
    with pytest.raises(Unreachable, match="was staged"):
        audit_world(changed, Stores(), CHAIN)
    lost = msgspec.structs.replace(body, staged=False)
    changed = msgspec.structs.replace(
        audit_input, snapshots=[audit_input.snapshots[0], lost, *audit_input.snapshots[2:]]
    )
    assert found(audit_world(changed, Stores(), CHAIN)) == [(body.record.height, "blob")]


def test_baseline_above_the_head_is_found(data: Path) -> None:
    head = input_of(data).head
    change_index(data, "world-0001", height=head + 5, receipt_horizon_height=head + 5)
    verdict = audit_of(data, reducer=None)
    assert (head + 5, "index") in found(verdict)
    assert "above the head" in verdict.findings[0].detail


def test_baseline_older_than_the_journal_says_is_found(data: Path) -> None:
    def work(tx: Transaction) -> None:
        world = World("main", "world-0001")
        tx.put(worlds.subspace(world).key("baseline"), msgspec.msgpack.encode(snapshots.at(tx, world, 0)))

    write(data, work)
    verdict = audit_of(data)
    assert found(verdict) == [(0, "contradicts")]
    assert "records a later baseline" in verdict.findings[0].detail


@pytest.mark.parametrize(
    "change", [{"manifest_hash": "0" * 64}, {"manifest_hash": None}, {"receipt_horizon_height": 1}]
)
def test_baseline_that_does_not_qualify_is_found(data: Path, change: dict[str, Any]) -> None:
    height = change_index(data, "world-0001", **change)
    assert {where for where, _ in found(audit_of(data))} == {height}
    assert audit_of(data).verdict == "contradicts"


def test_snapshot_missing_from_the_index_is_found(data: Path) -> None:
    height = input_of(data).snapshots[1].record.height
    write(data, lambda tx: tx.delete(worlds.subspace(World("main", "world-0001")).key("snapshot", height)))
    assert found(audit_of(data)) == [(height, "index")]


def test_snapshot_whose_promotion_waited_for_its_effects_has_no_findings(data: Path) -> None:
    """The journal's record of the snapshot has no horizon, and the one of its promotion has it."""
    with fastness.open(f"dir:{data}") as plane:
        world = plane.world("waiting")
        world.create()
        world.inbox.put(DomainEvent(schema="s", effects=(Effect("mail", b"1"),)))
        world.drain()
        state = replays.replay([b"\x82\x01" + world.read()[0].value], replays.chain)
        assert world.snapshots.commit(state, height=1).receipt_horizon_height is None
        plane.transact(Transaction.delete_range, *Subspace("u", "main", "effects", "pending").range("waiting"))
        assert world.snapshots.promote(1).receipt_horizon_height == 1
    assert audit_of(data, "waiting").findings == []


def test_fork_without_its_parents_snapshot_records_has_no_findings(data: Path) -> None:
    with fastness.open(f"dir:{data}") as plane:
        height = plane.world("world-0001").snapshots.baseline().height
        for at in (height - 1, height, height + 1):
            plane.world("world-0001").fork(f"fork-{at}", height=at)
    for at in (height - 1, height, height + 1):
        for reducer in (None, CHAIN):
            assert audit_of(data, f"fork-{at}", reducer).findings == []


REDUCERS = """
def fails_at_five(state, entry):
    if entry.height == 5:
        raise ValueError("five")
    return (state or 0) + 1

def keeps_no_state(state, entry):
    return object()

def mixes_tuples(state, entry):
    # Its state changes when it is stored: CBOR has no tuples.
    was_stored = isinstance(state, list) or (state is not None and state[0] == "list")
    return ("list" if was_stored else "tuple", entry.height)
"""


@pytest.fixture
def reducers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reducers_of_mine.py").write_text(REDUCERS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("reducers")
def test_failing_reducer_is_a_finding(data: Path) -> None:
    verdict = audit_of(data, reducer="reducers_of_mine:fails_at_five")
    assert (5, "reducer") in found(verdict)
    assert (verdict.height, verdict.state) == (5, b"\x05")


@pytest.mark.usefixtures("reducers")
def test_state_that_cannot_be_encoded_is_a_finding(data: Path) -> None:
    assert "reducer" in {reason for _, reason in found(audit_of(data, reducer="reducers_of_mine:keeps_no_state"))}


@pytest.mark.usefixtures("reducers")
def test_restore_that_differs_from_a_replay_is_found(tmp_path: Path) -> None:
    planes.build(tmp_path / "data", worlds=0)
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append([1, 2, 3], expected_head=0)
        options: dict[str, Any] = {"promote": True, "receipt_horizon_height": 2, "manifest_hash": snapshots.NO_MANIFEST}
        world.snapshots.commit(["tuple", 1], height=2, **options)
    (finding,) = audit_of(tmp_path / "data", "ada", "reducers_of_mine:mixes_tuples").findings
    assert (finding.height, finding.reason) == (5, "contradicts")
    assert "restore" in finding.detail


def test_expected_rows_of_the_lake_are_counted_and_summed(data: Path) -> None:
    audit_input = input_of(data)
    records = planes.truth(data)["world-0001"]
    verdict = audit_world(msgspec.structs.replace(audit_input, lake_next=100, lake_gaps=[(10, 19)]), Stores())
    expected = [n for n in range(100) if not 10 <= n <= 19]
    hashes = {n: hashlib.sha256(records[n]).hexdigest() for n in expected}
    assert verdict.lake_count == 90
    assert int(verdict.lake_sum) == sum(record_checksum(n, hashes[n]) for n in expected)


def test_world_without_a_baseline_is_found(data: Path) -> None:
    audit_input = msgspec.structs.replace(input_of(data), baseline=None)
    assert (0, "index") in found(audit_world(audit_input, Stores()))


def test_audit_result_can_be_encoded(data: Path) -> None:
    verdict = audit_of(data)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=AuditResult) == verdict
    assert isinstance(input_of(data).baseline, SnapshotRecord)
