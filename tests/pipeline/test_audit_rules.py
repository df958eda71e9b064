"""What is wrong with a world is found, and what is not wrong is not."""

import hashlib
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.errors import Unreachable
from holdfast.kv import Transaction
from holdfast.layers import blobs, snapshots, worlds
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.layers.worlds import World
from holdfast.pipeline import replays
from holdfast.pipeline.audit_rules import Case, Verdict, judge, place_value
from holdfast.pipeline.config import Config
from holdfast.pipeline.jobs import audit
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.views import open_view

planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))
CHAIN = planes.CHAIN
NOTHING_OF_THE_LAKE = SimpleNamespace(expected=lambda universe, world: (0, []))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    planes.build(tmp_path / "data", worlds=2, entries=200)
    return tmp_path / "data"


def case_of(data: Path, world: str = "world-0001") -> Case:
    with open_view(Config(data=f"dir:{data}", lake="unused")) as view:
        found = view.world("main", world)
        assert found is not None
        return audit._case(view, found, f"dir:{data.parent / 'staging'}", NOTHING_OF_THE_LAKE)  # type: ignore[arg-type]


def judged(data: Path, world: str = "world-0001", reducer: str | None = CHAIN) -> Verdict:
    return judge(case_of(data, world), Stores(), reducer)


def found(verdict: Verdict) -> list[tuple[int, str]]:
    return [(finding.height, finding.reason) for finding in verdict.findings]


def write(data: Path, work: Callable[[Transaction], Any]) -> Any:
    with holdfast.open(f"dir:{data}") as plane:
        return plane.transact(work)


def change_index(data: Path, world: str, **changes: Any) -> int:
    """Write another baseline, which is another snapshot too; its height."""

    def work(tx: Transaction) -> int:
        room = worlds.subspace(World("main", world))
        record = msgspec.structs.replace(snapshots.baseline(tx, World("main", world)), **changes)
        for key in (room.key("snapshot", record.height), room.key("baseline")):
            tx.put(key, msgspec.msgpack.encode(record))
        return record.height

    return write(data, work)


@pytest.mark.parametrize("reducer", [None, CHAIN])
@pytest.mark.parametrize("world", ["world-0000", "world-0001", "empty"])
def test_a_world_that_nobody_damaged_is_well(data: Path, world: str, reducer: str | None) -> None:
    verdict = judged(data, world, reducer)
    assert (verdict.verdict, verdict.findings) == ("ok", [])
    with holdfast.open(f"dir:{data}") as plane:
        assert verdict.height == verdict.records == plane.world(world).head()
        replayed = plane.world(world).replay(replays.chain)
    assert verdict.digest == replays.digest(replayed.state)
    assert verdict.state is not None
    assert hashlib.sha256(verdict.state).hexdigest() == verdict.digest


def test_a_baseline_that_contradicts_its_journal_is_found(data: Path) -> None:
    height = planes.plant_baseline(data, "world-0001", {"planted": True})
    assert (height, "contradicts") in found(judged(data))
    assert judged(data).verdict == "contradicts"


def test_a_planted_baseline_is_found_without_a_reducer_because_the_journal_notes_another_one(data: Path) -> None:
    height = planes.plant_baseline(data, "world-0001", {"planted": True})
    verdict = judged(data, reducer=None)
    assert set(found(verdict)) == {(height, "contradicts")}
    assert all("notes another snapshot" in finding.detail for finding in verdict.findings)


def test_a_baseline_that_was_planted_with_its_note_is_found_by_the_fold(tmp_path: Path) -> None:
    """Somebody who commits a wrong state leaves an index and a journal that agree with each other."""
    planes.build(tmp_path / "data", worlds=0)
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append([1, 2, 3], expected_head=0)
        manifest = snapshots.NO_MANIFEST
        options = {"promote": True, "receipt_horizon_height": 2, "manifest_hash": manifest}
        world.snapshots.commit("wrong", height=2, **options)
    verdict = judged(tmp_path / "data", "ada")
    assert (2, "contradicts") in found(verdict)
    assert any("not the fold" in finding.detail for finding in verdict.findings)
    assert any("restore" in finding.detail for finding in verdict.findings)
    assert judged(tmp_path / "data", "ada", None).verdict == "ok"  # There is nothing to compare it with.


def test_damage_is_named_with_its_height_and_what_lies_above_is_looked_at_too(data: Path) -> None:
    start, _ = planes.flip_byte(data, "world-0001")
    planes.plant_baseline(data, "world-0001", {"planted": True})
    height = case_of(data).baseline.height  # type: ignore[union-attr]
    verdict = judged(data)
    assert (start, "checksum") in found(verdict)
    assert (height, "contradicts") in found(verdict)
    assert verdict.height == start
    assert verdict.verdict == "contradicts"


def test_a_missing_segment_leaves_the_state_below_it(data: Path) -> None:
    start, end = planes.remove_segment(data, "world-0001", 1)
    verdict = judged(data)
    assert found(verdict) == [(start, "missing")]
    assert (verdict.verdict, verdict.height) == ("incomplete", start)
    assert verdict.records == case_of(data).head - (end - start + 1)


def test_a_hole_in_the_hot_records_is_found(data: Path) -> None:
    planes.remove_record(data, "world-0000", 50)
    verdict = judged(data, "world-0000")
    assert found(verdict) == [(50, "missing")]
    assert (verdict.height, verdict.verdict) == (50, "incomplete")


def test_a_record_of_a_newer_version_is_found(data: Path) -> None:
    height = planes.append_unknown(data, "world-0001")
    assert found(judged(data)) == [(height, "schema")]


def test_a_snapshot_whose_bytes_are_gone_is_found(data: Path) -> None:
    case = case_of(data)
    body = case.snapshots[1]

    def lose(tx: Transaction) -> None:
        tx.delete(blobs._key("main", bytes.fromhex(body.record.snapshot_ref)))

    write(data, lose)
    for reducer in (None, CHAIN):
        assert found(judged(data, reducer=reducer)) == [(body.record.height, "blob")]


def test_a_snapshot_with_other_bytes_is_found(data: Path) -> None:
    case = case_of(data)
    bodies = [msgspec.structs.replace(case.snapshots[1], inline=b"\x00" * (case.snapshots[1].size or 0))]
    changed = msgspec.structs.replace(case, snapshots=[case.snapshots[0], *bodies, *case.snapshots[2:]])
    assert found(judge(changed, Stores(), CHAIN)) == [(bodies[0].record.height, "blob")]


def test_what_was_staged_and_is_not_there_is_no_damage_of_the_plane(data: Path) -> None:
    case = case_of(data)
    body = msgspec.structs.replace(
        case.snapshots[1], inline=None, store=f"dir:{data / 'gone'}", path="cas/x", staged=True
    )
    changed = msgspec.structs.replace(case, snapshots=[case.snapshots[0], body, *case.snapshots[2:]])
    with pytest.raises(Unreachable, match="was staged"):
        judge(changed, Stores(), CHAIN)
    lost = msgspec.structs.replace(body, staged=False)
    changed = msgspec.structs.replace(case, snapshots=[case.snapshots[0], lost, *case.snapshots[2:]])
    assert found(judge(changed, Stores(), CHAIN)) == [(body.record.height, "blob")]


def test_a_baseline_beyond_the_head_is_found(data: Path) -> None:
    head = case_of(data).head
    change_index(data, "world-0001", height=head + 5, receipt_horizon_height=head + 5)
    verdict = judged(data, reducer=None)
    assert (head + 5, "index") in found(verdict)
    assert "beyond the head" in verdict.findings[0].detail


def test_a_baseline_that_goes_back_is_found(data: Path) -> None:
    def work(tx: Transaction) -> None:
        world = World("main", "world-0001")
        tx.put(worlds.subspace(world).key("baseline"), msgspec.msgpack.encode(snapshots.at(tx, world, 0)))

    write(data, work)
    verdict = judged(data)
    assert found(verdict) == [(0, "contradicts")]
    assert "notes a later baseline" in verdict.findings[0].detail


@pytest.mark.parametrize(
    "change", [{"manifest_hash": "0" * 64}, {"manifest_hash": None}, {"receipt_horizon_height": 1}]
)
def test_a_baseline_that_does_not_qualify_is_found(data: Path, change: dict[str, Any]) -> None:
    height = change_index(data, "world-0001", **change)
    assert {where for where, _ in found(judged(data))} == {height}
    assert judged(data).verdict == "contradicts"


def test_a_snapshot_that_only_the_journal_knows_is_found(data: Path) -> None:
    height = case_of(data).snapshots[1].record.height
    write(data, lambda tx: tx.delete(worlds.subspace(World("main", "world-0001")).key("snapshot", height)))
    assert found(judged(data)) == [(height, "index")]


def test_a_fork_is_well_although_notes_of_its_snapshots_stayed_behind(data: Path) -> None:
    with holdfast.open(f"dir:{data}") as plane:
        height = plane.world("world-0001").snapshots.baseline().height
        for at in (height - 1, height, height + 1):
            plane.world("world-0001").fork(f"fork-{at}", height=at)
    for at in (height - 1, height, height + 1):
        for reducer in (None, CHAIN):
            assert judged(data, f"fork-{at}", reducer).findings == []


REDUCERS = """
def fails_at_five(state, entry):
    if entry.height == 5:
        raise ValueError("five")
    return (state or 0) + 1

def keeps_no_state(state, entry):
    return object()

def mixes_tuples(state, entry):
    # Its state is another one after it was stored: CBOR has no tuples.
    was_stored = isinstance(state, list) or (state is not None and state[0] == "list")
    return ("list" if was_stored else "tuple", entry.height)
"""


@pytest.fixture
def reducers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reducers_of_mine.py").write_text(REDUCERS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("reducers")
def test_a_reducer_that_fails_is_a_finding(data: Path) -> None:
    verdict = judged(data, reducer="reducers_of_mine:fails_at_five")
    assert (5, "reducer") in found(verdict)
    assert (verdict.height, verdict.state) == (5, b"\x05")


@pytest.mark.usefixtures("reducers")
def test_a_state_without_a_form_is_a_finding(data: Path) -> None:
    assert "reducer" in {reason for _, reason in found(judged(data, reducer="reducers_of_mine:keeps_no_state"))}


@pytest.mark.usefixtures("reducers")
def test_a_restore_that_differs_from_a_replay_is_found_although_every_snapshot_is_right(tmp_path: Path) -> None:
    planes.build(tmp_path / "data", worlds=0)
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append([1, 2, 3], expected_head=0)
        options = {"promote": True, "receipt_horizon_height": 2, "manifest_hash": snapshots.NO_MANIFEST}
        world.snapshots.commit(["tuple", 1], height=2, **options)
    (finding,) = judged(tmp_path / "data", "ada", "reducers_of_mine:mixes_tuples").findings
    assert (finding.height, finding.reason) == (5, "contradicts")
    assert "restore" in finding.detail


def test_what_the_lake_should_have_is_summed_up(data: Path) -> None:
    case = case_of(data)
    records = planes.truth(data)["world-0001"]
    verdict = judge(msgspec.structs.replace(case, lake_next=100, lake_lacks=[(10, 19)]), Stores())
    expected = [n for n in range(100) if not 10 <= n <= 19]
    hashes = {n: hashlib.sha256(records[n]).hexdigest() for n in expected}
    assert verdict.lake_count == 90
    assert int(verdict.lake_sum) == sum(place_value(n, hashes[n]) for n in expected)


def test_a_world_without_a_baseline_is_found(data: Path) -> None:
    case = msgspec.structs.replace(case_of(data), baseline=None)
    assert (0, "index") in found(judge(case, Stores()))


def test_a_verdict_travels(data: Path) -> None:
    verdict = judged(data)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict
    assert isinstance(case_of(data).baseline, SnapshotRecord)
