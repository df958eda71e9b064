"""Decoding of journal records into rows, and reporting of damage, without Spark."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pyarrow as pa
import pytest

from fastness import limits
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import ChecksumMismatch, MalformedSegment, MissingObject, Unreachable
from fastness.layers import journal_records, segments
from fastness.layers.journal_records import Kind
from fastness.pipeline.codec import Damaged, journal_rows, payload_of, read_chunk
from fastness.pipeline.journal_chunks import JournalChunk, Stores
from fastness.pipeline.schemas import JOURNAL, decoded
from fastness.wire.canonical import canonical

ENTRIES = [journal_records.entry(canonical({"n": n, "who": f"agent-{n % 7}"})) for n in range(100)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'objects'}"


def stored(
    store: str, items: list[bytes], *, start: int = 0, world: str = "alpha", hot: bool = False, first: int = 0
) -> JournalChunk:
    data = b"".join(segments.body(items))
    path = f"segments/main/{world}/{start}.log"
    open_objects(store).put(path, data)
    end = start + len(items) - 1
    return JournalChunk("main", world, start, end, store, path, segments.checksum(data), len(data), hot, first)


def rows_of(chunks: list[JournalChunk]) -> tuple[list[dict[str, Any]], list[Damaged]]:
    rows, damaged = [], []
    for found in journal_rows(chunks, Stores()):
        if isinstance(found, Damaged):
            damaged.append(found)
        else:
            assert found.schema.equals(decoded(JOURNAL))
            rows += found.to_pylist()
    return rows, damaged


def test_record_becomes_a_row_with_its_bytes_and_hash(store: str) -> None:
    chunk = stored(store, ENTRIES)
    rows, damaged = rows_of([chunk])
    assert damaged == []
    assert [row["height"] for row in rows] == list(range(100))
    assert [row["raw"] for row in rows] == ENTRIES
    assert rows[3] == {
        "universe": "main",
        "world": "alpha",
        "height": 3,
        "kind": "entry",
        "payload": '{"n":3,"who":"agent-3"}',
        "raw": ENTRIES[3],
        "hash": hashlib.sha256(ENTRIES[3]).hexdigest(),
        "segment": chunk.path,
    }


def test_hot_record_has_no_segment_and_every_kind_has_a_name(store: str) -> None:
    items = [journal_records.of(kind, f"value of {kind}") for kind in Kind]
    rows, damaged = rows_of([stored(store, items, hot=True)])
    assert damaged == []
    assert [row["kind"] for row in rows] == ["entry", "ingress", "snapshot", "baseline", "manifest"]
    assert {row["segment"] for row in rows} == {None}


def test_only_wanted_heights_of_a_chunk_become_rows(store: str) -> None:
    chunk = stored(store, ENTRIES, start=1_000, first=1_090)
    rows, _ = rows_of([chunk])
    assert [row["height"] for row in rows] == list(range(1_090, 1_100))
    assert rows[0]["raw"] == ENTRIES[90]
    short = msgspec.structs.replace(chunk, last=1_094)
    assert [row["height"] for row in rows_of([short])[0]] == list(range(1_090, 1_095))
    assert (chunk.rows, short.rows) == (10, 5)


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (b"\x00\xff", '{"$bytes":"AP8="}'),
        ([1, {"deep": b"x"}], '[1,{"deep":{"$bytes":"eA=="}}]'),
        ({1: "one"}, '{"1":"one"}'),
        (None, "null"),
        (datetime(2026, 11, 15, tzinfo=UTC), '"2026-11-15T00:00:00+00:00"'),
        ({b"key": 1}, None),
        (1 << 80, None),
        (cbor2.CBORTag(9_999, "?"), None),
        (cbor2.undefined, None),
    ],
)
def test_payload_is_json_or_none(store: str, value: object, payload: str | None) -> None:
    rows, damaged = rows_of([stored(store, [journal_records.entry(cbor2.dumps(value, canonical=True))])])
    assert damaged == []
    assert rows[0]["payload"] == payload == payload_of(value)
    assert cbor2.loads(rows[0]["raw"])[1] == value


def test_batches_are_bounded_by_rows_and_by_bytes(store: str) -> None:
    many = [journal_records.entry(canonical(n)) for n in range(limits.ROWS_BATCH + 10)]
    batches = list(journal_rows([stored(store, many)], Stores()))
    assert [batch.num_rows for batch in batches] == [limits.ROWS_BATCH, 10]
    large = [journal_records.entry(canonical(bytes(limits.ROWS_BATCH_BYTES // 300))) for _ in range(1_000)]
    batches = list(journal_rows([stored(store, large, world="large")], Stores()))
    assert len(batches) == 2
    assert sum(batch.num_rows for batch in batches) == 1_000


def test_chunks_of_several_worlds_share_batches_in_order(store: str) -> None:
    chunks = [stored(store, ENTRIES, world="alpha"), stored(store, ENTRIES, world="beta")]
    found = list(journal_rows(chunks, Stores()))
    assert len(found) == 1
    assert not isinstance(found[0], Damaged)
    assert found[0]["world"].to_pylist() == ["alpha"] * 100 + ["beta"] * 100


def test_flipped_byte_damages_only_its_segment(store: str, tmp_path: Path) -> None:
    chunks = [stored(store, ENTRIES), stored(store, ENTRIES, start=100), stored(store, ENTRIES, start=200)]
    place = tmp_path / "objects" / chunks[1].path
    data = bytearray(place.read_bytes())
    data[50] ^= 1
    place.write_bytes(data)
    rows, damaged = rows_of(chunks)
    assert [row["height"] for row in rows] == [*range(100), *range(200, 300)]
    assert [(each.start, each.end, each.reason, each.segment) for each in damaged] == [
        (100, 199, "checksum", chunks[1].path)
    ]
    with pytest.raises(ChecksumMismatch):
        read_chunk(chunks[1], Stores()(store))


def test_missing_segment_and_gap_are_reported_as_missing(store: str, tmp_path: Path) -> None:
    gone = stored(store, ENTRIES, first=10)
    (tmp_path / "objects" / gone.path).unlink()
    gap = JournalChunk("main", "alpha", 100, 109, "", "", "", 0, hot=True, first=100)
    rows, damaged = rows_of([gone, gap, stored(store, ENTRIES, start=110)])
    assert len(rows) == 100
    assert [(each.start, each.end, each.reason) for each in damaged] == [(10, 99, "missing"), (100, 109, "missing")]
    with pytest.raises(MissingObject):
        read_chunk(gone, Stores()(store))


def test_segment_with_too_few_records_is_malformed(store: str) -> None:
    chunk = stored(store, ENTRIES)
    short = msgspec.structs.replace(chunk, end=120)
    _, damaged = rows_of([short])
    assert [(each.start, each.end, each.reason) for each in damaged] == [(0, 120, "malformed")]
    with pytest.raises(MalformedSegment):
        read_chunk(short, Stores()(store))


def test_records_of_an_unknown_kind_do_not_affect_others(store: str) -> None:
    unknown = b"\x82\x09" + canonical({"new": True})
    items = [ENTRIES[0], unknown, unknown, ENTRIES[3], b"\x82\x00\xff", b"", ENTRIES[6], b"\xa0", b"\x82\x18\x20\x00"]
    rows, damaged = rows_of([stored(store, items, start=10)])
    assert [row["height"] for row in rows] == [10, 13, 16]
    assert [(each.start, each.end, each.reason) for each in damaged] == [
        (11, 12, "schema"),
        (14, 14, "malformed"),
        (15, 15, "malformed"),
        (17, 17, "malformed"),
        (18, 18, "schema"),
    ]
    assert "upgrade" in damaged[0].detail


def test_unreachable_store_is_not_damage(store: str) -> None:
    class Silent(ObjectStore):
        def get(self, path: str) -> bytes:
            raise Unreachable("The store does not answer; try again")

    chunk = stored(store, ENTRIES)
    silent = Silent(open_objects("memory:")._store)
    with pytest.raises(Unreachable):
        list(journal_rows([chunk], lambda url: silent))


def test_no_chunks_give_no_rows() -> None:
    assert list(journal_rows([], Stores())) == []


def test_hash_of_every_row_matches_its_bytes(store: str) -> None:
    table = pa.Table.from_batches(journal_rows([stored(store, ENTRIES)], Stores()))
    for row in table.to_pylist():
        assert row["hash"] == hashlib.sha256(row["raw"]).hexdigest()
        assert json.loads(row["payload"]) == cbor2.loads(row["raw"])[1]
