"""States as folds of records, without Spark."""

import hashlib
from functools import partial
from pathlib import Path

import pytest

import fastness
from fastness.errors import InvalidArgument
from fastness.layers import journal_records
from fastness.pipeline.replays import Reducer, chain, digest, reducer_of, replay, state_of
from fastness.wire.canonical import canonical
from fastness.wire.restores import Entry

RECORDS = [journal_records.entry(canonical({"n": n, "blob": bytes([n])})) for n in range(20)]


def total(state: int | None, entry: Entry) -> int:
    n: int = entry.value["n"]
    return (state or 0) + n * (entry.height + 1)


def test_replay_folds_records_with_their_heights() -> None:
    assert replay(RECORDS[:3], total) == 0 * 1 + 1 * 2 + 2 * 3
    assert replay(RECORDS[2:3], total, 5, height=2) == 5 + 2 * 3


@pytest.mark.parametrize("reducer", [chain, total])
@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_replay_can_be_split_anywhere(reducer: Reducer, cut: int) -> None:
    whole = replay(RECORDS, reducer)
    assert replay(RECORDS[cut:], reducer, replay(RECORDS[:cut], reducer), height=cut) == whole


def test_chain_of_bytes_equals_chain_of_entries() -> None:
    state = None
    for record in RECORDS:
        kind, _ = journal_records.split(record)
        state = chain(state, Entry(0, kind, state_of(record)[1]))
    assert replay(RECORDS, chain) == state
    assert replay(RECORDS, partial(chain)) == state


def test_chain_differs_for_any_change_of_content_or_order() -> None:
    assert replay([], chain) is None
    assert replay(RECORDS[:1], chain) == hashlib.sha256(RECORDS[0]).digest()
    assert replay(RECORDS[::-1], chain) != replay(RECORDS, chain)
    assert replay(RECORDS[:-1], chain) != replay(RECORDS, chain)


def test_restore_with_the_chain_equals_the_replay_of_the_bytes() -> None:
    with fastness.open("memory:") as plane:
        world = plane.world("alpha")
        world.create()
        world.append([{"n": 1}, {"n": b"2"}], expected_head=0)
        world.set_manifest("f" * 64, expected_head=2)
        raw = [journal_records.join(journal_records.Kind[each.kind.upper()], each.value) for each in world.read()]
        assert world.restore(chain).state == replay(raw, chain)
        snapshot = world.snapshots.commit(replay(raw, chain), height=3)
        assert snapshot.snapshot_ref == digest(replay(raw, chain))
        assert world.verify(chain).agrees


def test_reducer_is_found_by_name() -> None:
    assert reducer_of(None) is chain
    assert reducer_of("fastness.pipeline.replays:chain") is chain


def test_module_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reducer.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgument, match=r"broken_reducer:fold.*division by zero"):
        reducer_of("broken_reducer:fold")


@pytest.mark.parametrize("name", ["", "json", "json:nothing", "no.such.module:f", ":f", "fastness:__version__"])
def test_invalid_reducer_name_is_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument, match="reducer"):
        reducer_of(name)
