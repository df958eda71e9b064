"""Views of planes: of a data directory, of a server, of a PostgreSQL."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast import limits
from holdfast.errors import (
    BlobNotFound,
    DirectoryInUse,
    HashMismatch,
    InvalidUrl,
    MissingObject,
    NotFound,
    SchemaMismatch,
)
from holdfast.pipeline import codec
from holdfast.pipeline.codec import Damaged
from holdfast.pipeline.config import Config
from holdfast.pipeline.logs import DamagedLines, Reached, activity_rows
from holdfast.pipeline.pieces import Piece
from holdfast.pipeline.views import View, open_view

planes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("planes.py"))))  # Test files cannot import.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def staging(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'staging'}"


def config(data: Path, **options: object) -> Config:
    return Config(data=f"dir:{data}", lake="unused", **options)


def rows_of(view: View, pieces: list[Piece]) -> tuple[dict[int, bytes], list[Damaged]]:
    rows: dict[int, bytes] = {}
    damaged = []
    for found in codec.journal_rows(pieces, view.stores):
        if isinstance(found, Damaged):
            damaged.append(found)
        else:
            rows.update(zip(found["height"].to_pylist(), found["raw"].to_pylist(), strict=True))
    return rows, damaged


def everything(view: View, staging: str, universe: str = "main") -> dict[str, list[bytes]]:
    found = {}
    for world in view.worlds(universe):
        rows, damaged = rows_of(view, view.pieces(world, 0, staging))
        assert damaged == []
        assert sorted(rows) == list(range(world.head))
        found[world.name] = [rows[height] for height in range(world.head)]
    return found


def test_a_view_of_a_directory_holds_every_record_of_every_world(data, staging):
    built = planes.build(data, worlds=3, entries=300)
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["main"]
        found = everything(view, staging)
        worlds = {world.name: world for world in view.worlds("main")}
    assert found == planes.truth(data)
    assert sum(map(len, found.values())) == built.entries
    assert list(worlds) == ["empty", *built.worlds]
    assert worlds["empty"].head == 0
    assert worlds["world-0000"].segments == []
    cold = worlds["world-0001"]
    assert [segment.start for segment in cold.segments] == [0, 64, 128]
    assert cold.first_hot == cold.segments[-1].end + 1 == 192
    assert cold.baseline == cold.snapshots[-1]
    assert [snapshot.height for snapshot in cold.snapshots] == [0, 111, 223]


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100, 191, 192, 250, 301])
def test_pieces_begin_where_they_are_asked_to_and_reach_the_head(data, staging, start):
    planes.build(data, worlds=2, entries=300)
    with open_view(config(data)) as view:
        world = view.world("main", "world-0001")
        pieces = view.pieces(world, start, staging)
        rows, damaged = rows_of(view, pieces)
    assert damaged == []
    assert sorted(rows) == list(range(start, world.head))
    assert sum(piece.rows for piece in pieces) == len(rows)


def test_long_tails_are_staged_in_pieces_of_bounded_size(data, staging, monkeypatch):
    planes.build(data, worlds=1, entries=300)
    monkeypatch.setattr("holdfast.pipeline.views.moments.PIECE_ENTRIES", 100)
    with open_view(config(data)) as view:
        world = view.world("main", "world-0000")
        pieces = view.pieces(world, 0, staging)
        assert [(piece.start, piece.end) for piece in pieces] == [(0, 99), (100, 199), (200, 299), (300, 300)]
        assert all(piece.hot for piece in pieces)
        monkeypatch.setattr("holdfast.pipeline.views.moments.PIECE_BYTES", 1_000)
        small = view.pieces(world, 0, staging)
        assert len(small) > 4
        assert rows_of(view, small) == rows_of(view, pieces)


def test_the_directory_is_free_while_a_view_is_open_and_the_view_stays_as_it_was(data, staging):
    planes.build(data, worlds=2, entries=300)
    before = planes.truth(data)
    with open_view(config(data)) as view:
        planes.extend(data, ["world-0000", "world-0001"], 500)
        with planes.opened(f"dir:{data}") as plane:
            plane.world("late").create()
            plane.world("world-0001").archive()
            plane.world("world-0000").compact(entries=64, margin=8)
        found = everything(view, staging)
    assert found == before
    with open_view(config(data)) as view:
        found = everything(view, staging)
    assert len(found["world-0000"]) == len(before["world-0000"]) + 500
    assert "late" in found


def test_a_view_leaves_nothing_behind_and_removes_what_a_dead_one_left(data):
    planes.build(data, worlds=1, entries=10)
    child = (
        "import os, sys; from holdfast.pipeline.views import open_view; from holdfast.pipeline.config import Config\n"
        "view = open_view(Config(data=sys.argv[1], lake='')); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", child, f"dir:{data}"], check=False)
    assert len(list(data.glob(".view-*"))) == 1
    with open_view(config(data)) as first:
        (folder,) = data.glob(".view-*")  # The other one is gone; this one is ours.
        with open_view(config(data)) as second:
            assert len(list(data.glob(".view-*"))) == 2
            assert [world.name for world in second.worlds("main")] == [world.name for world in first.worlds("main")]
        assert list(data.glob(".view-*")) == [folder]
        first.close()
        first.close()
    assert list(data.glob(".view-*")) == []


def test_a_directory_that_somebody_has_open_is_refused_with_what_to_do(data):
    planes.build(data, worlds=1, entries=10)
    with planes.opened(f"dir:{data}"), pytest.raises(DirectoryInUse, match="--data http://HOST:PORT"):
        open_view(config(data))
    assert list(data.glob(".view-*")) == []


def test_what_is_no_plane_is_refused_and_nothing_is_made(data, tmp_path):
    with pytest.raises(NotFound, match="no data directory"):
        open_view(config(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    planes.build(data, worlds=1, entries=10)
    (data / "holdfast.json").write_text('{"format": 999}')
    with pytest.raises(SchemaMismatch, match="upgrade"):
        open_view(config(data))
    for url in ("nonsense", "dir:", "ftp://host", "memory:"):
        with pytest.raises(InvalidUrl, match="no plane"):
            open_view(Config(data=url, lake=""))


def test_only_the_universes_that_were_asked_for_are_shown(data):
    for universe in ("main", "other", "third"):
        planes.build(data, worlds=1, entries=10, universe=universe)
    with open_view(config(data, universes=("other", "unknown"))) as view:
        assert list(view.universes()) == ["other"]
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["main", "other", "third"]


def test_a_deleted_world_has_no_history_and_an_archived_one_has(data):
    planes.build(data, worlds=2, entries=100)
    with planes.opened(f"dir:{data}") as plane:
        for name in ("world-0000", "world-0001"):
            plane.world(name).archive()
        plane.world("world-0001").delete()
    with open_view(config(data)) as view:
        assert [(world.name, world.state) for world in view.worlds("main")] == [
            ("empty", "active"),
            ("world-0000", "archived"),
        ]
        assert view.world("main", "world-0001") is None
        assert view.world("main", "unknown") is None


def test_holes_in_the_hot_tail_and_lost_segments_are_missing_pieces(data, staging):
    planes.build(data, worlds=2, entries=300)
    for height in (200, 201, 250):
        planes.remove_record(data, "world-0001", height)
    lost = planes.remove_segment(data, "world-0001", 1)
    with open_view(config(data)) as view:
        world = view.world("main", "world-0001")
        rows, damaged = rows_of(view, view.pieces(world, 0, staging))
    assert [(each.start, each.end, each.reason) for each in damaged] == [
        (*lost, "missing"),
        (200, 201, "missing"),
        (250, 250, "missing"),
    ]
    gone = {*range(lost[0], lost[1] + 1), 200, 201, 250}
    assert sorted(rows) == [height for height in range(world.head) if height not in gone]


def test_a_lost_entry_of_the_index_is_a_hole_up_to_the_next_segment(data, staging):
    planes.build(data, worlds=2, entries=300)
    from holdfast.layers import segments
    from holdfast.layers.worlds import World

    with planes.opened(f"dir:{data}") as plane:
        where = World("main", "world-0001")
        plane.transact(lambda tx: segments.forget(tx, where, segments.find(tx, where, 64)))
    with open_view(config(data)) as view:
        world = view.world("main", "world-0001")
        rows, damaged = rows_of(view, view.pieces(world, 0, staging))
    assert [(each.start, each.end, each.reason) for each in damaged] == [(64, 127, "missing")]
    assert len(rows) == world.head - 64


def test_a_world_without_a_baseline_is_shown_without_one(data):
    planes.build(data, worlds=1, entries=100)
    from holdfast.layers.worlds import World, room

    with planes.opened(f"dir:{data}") as plane:
        plane.transact(lambda tx: tx.delete(room(World("main", "world-0000")).key("baseline")))
    with open_view(config(data)) as view:
        world = view.world("main", "world-0000")
        assert world.baseline is None
        assert world.head == 101


def test_blobs_are_checked_wherever_they_are(data):
    planes.build(data, worlds=1, entries=10)
    with planes.opened(f"dir:{data}") as plane:
        small = plane.blobs.put(b"small")
        large = plane.blobs.put(b"x" * (limits.BLOB_INLINE_BYTES_MAX + 1))
        lost = plane.blobs.put(b"y" * (limits.BLOB_INLINE_BYTES_MAX + 1))
    with open_view(config(data)) as view:
        assert view.blob("main", small) == b"small"
        assert len(view.blob("main", large)) == limits.BLOB_INLINE_BYTES_MAX + 1
        with pytest.raises(BlobNotFound):
            view.blob("main", "0" * 64)
        (data / "objects" / "cas" / "main" / "sha256" / lost).unlink()
        with pytest.raises(MissingObject):
            view.blob("main", lost)
        (data / "objects" / "cas" / "main" / "sha256" / large).write_bytes(b"other")
        with pytest.raises(HashMismatch):
            view.blob("main", large)


def test_session_logs_are_read_where_they_are_or_staged(data, staging):
    planes.build(data, worlds=1, entries=10, activity=30)
    left = planes.leave_log(data, 5, garbled=2, torn=True)
    with open_view(config(data)) as view:
        files = list(view.logs("main"))
        left.unlink()  # A view has links of its own.
        pieces = [view.log_piece(file, staging) for file in files]
        found = list(activity_rows(pieces, view.stores))
    assert sum(file.is_rotated for file in files) == 3
    assert sum(batch.num_rows for batch in found if hasattr(batch, "num_rows")) == 30 + 3
    damaged = [(each.start, each.end, each.reason) for each in found if isinstance(each, DamagedLines)]
    assert damaged == [(2, 2, "malformed"), (4, 4, "torn")]
    assert len([each for each in found if isinstance(each, Reached)]) == 4


def test_a_log_goes_on_at_its_offset_also_when_it_was_rotated_since(data, staging):
    planes.build(data, worlds=1, entries=10)
    planes.leave_log(data, 5)
    with open_view(config(data)) as view:
        (file,) = view.logs("main")
        (reached,) = [
            each for each in activity_rows([view.log_piece(file, staging)], view.stores) if isinstance(each, Reached)
        ]
        assert view.log_body(file)[: reached.offset].count(b"\n") == 6
    with planes.opened(f"dir:{data}") as plane:
        plane.activity.log("other", {"wakes": "the log"}, kind="metrics")
    with open_view(config(data)) as view:
        rotated = next(each for each in view.logs("main") if each.id == file.id)
        assert rotated.is_rotated
        piece = view.log_piece(rotated, staging, start=reached.offset, n=reached.n)
        assert list(activity_rows([piece], view.stores)) == [reached]


def test_the_objects_of_a_directory_may_be_elsewhere(data, tmp_path, staging):
    elsewhere = f"dir:{tmp_path / 'elsewhere'}"
    planes.build(data, worlds=2, entries=300, objects=elsewhere)
    with open_view(config(data, objects=elsewhere)) as view:
        found = everything(view, staging)
    assert len(found["world-0001"]) == 301
    assert not (data / "objects").exists()
