"""Decoding of session log lines into rows, without Spark."""

import json
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from fastness import limits
from fastness.backends.objects import open_objects
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.logs import DamagedLines, LogChunk, ReadPosition, activity_rows
from fastness.pipeline.schemas import ACTIVITY, decoded
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header

HEADER = log_format.header_line(Header("main", "ada", "metrics", 1_763_181_735_123, "0198"))
AT_MS = 1_763_181_735_123


def line(n: int) -> bytes:
    return log_format.line(n, AT_MS + n, b'{"n":%d,"said":"caf\xc3\xa9"}' % n)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'objects'}"


def stored(store: str, data: bytes, *, start: int = 0, base: int = 0, n: int = 0) -> LogChunk:
    open_objects(store).put("activity/a.jsonl", data[base:])
    return LogChunk(
        "main", "ada", "metrics", "2026-11-15_0198", store, "activity/a.jsonl", start, len(data), base=base, n=n
    )


def read(chunk: LogChunk) -> tuple[list[dict[str, object]], list[tuple[int, int, str]], ReadPosition | None]:
    rows, damaged, position = [], [], None
    for found in activity_rows([chunk], Stores()):
        if isinstance(found, DamagedLines):
            damaged.append((found.start, found.end, found.reason))
        elif isinstance(found, ReadPosition):
            position = found
        else:
            assert found.schema.equals(decoded(ACTIVITY))
            rows += found.to_pylist()
    return rows, damaged, position


def test_line_becomes_a_row_with_its_time_and_record(store: str) -> None:
    data = HEADER + b"".join(map(line, range(3)))
    rows, damaged, position = read(stored(store, data))
    assert damaged == []
    assert position == ReadPosition("main", "2026-11-15_0198", len(data), 3)
    assert [row["n"] for row in rows] == [0, 1, 2]
    assert json.loads(str(rows[1].pop("record"))) == {"n": 1, "said": "café"}
    assert rows[1] == {
        "universe": "main",
        "session": "ada",
        "kind": "metrics",
        "file": "2026-11-15_0198",
        "n": 1,
        "logged_at": datetime.fromtimestamp(AT_MS // 1_000, UTC).replace(microsecond=124_000),
        "day": date(2025, 11, 15),
    }


@pytest.mark.parametrize("is_staged", [False, True])
def test_file_is_read_from_its_last_position(store: str, is_staged: bool) -> None:
    data = HEADER + b"".join(map(line, range(10)))
    start = len(HEADER + b"".join(map(line, range(6))))
    rows, damaged, position = read(stored(store, data, start=start, base=start if is_staged else 0, n=6))
    assert [row["n"] for row in rows] == [6, 7, 8, 9]
    assert (damaged, position.offset, position.n) == ([], len(data), 10)


def test_torn_line_is_reported_and_not_passed(store: str) -> None:
    whole = HEADER + line(0) + line(1)
    rows, damaged, position = read(stored(store, whole + line(2)[:-5]))
    assert [row["n"] for row in rows] == [0, 1]
    assert damaged == [(2, 2, "torn")]
    assert (position.offset, position.n) == (len(whole), 2)
    rows, damaged, _ = read(stored(store, whole + line(2), start=position.offset, n=position.n))
    assert [row["n"] for row in rows] == [2]
    assert damaged == []


def test_damaged_line_does_not_affect_others(store: str) -> None:
    data = HEADER + line(0) + b'{"n":1,"at_ms"\x00\xff}\n' + b"garbage\n" + line(3) + b"{}\n"
    rows, damaged, position = read(stored(store, data))
    assert [row["n"] for row in rows] == [0, 3]
    assert damaged == [(1, 2, "malformed"), (4, 4, "malformed")]
    assert (position.offset, position.n) == (len(data), 5)


def test_invalid_timestamp_is_damage(store: str) -> None:
    data = HEADER + log_format.line(0, 1 << 62, b"{}") + line(1)
    rows, damaged, _ = read(stored(store, data))
    assert [row["n"] for row in rows] == [1]
    assert damaged == [(0, 0, "malformed")]


@pytest.mark.parametrize("n", [-1, 1 << 63])
def test_invalid_line_number_is_damage(store: str, n: int) -> None:
    data = HEADER + line(0) + log_format.line(n, 5, b"{}") + line(2)
    rows, damaged, _ = read(stored(store, data))
    assert [row["n"] for row in rows] == [0, 2]
    assert damaged == [(1, 1, "malformed")]


def test_missing_file_is_reported(store: str) -> None:
    chunk = LogChunk("main", "ada", "metrics", "f", store, "activity/gone.jsonl", 0, 100)
    assert read(chunk) == ([], [(0, 0, "missing")], None)


def test_file_without_new_lines_keeps_its_position(store: str) -> None:
    data = HEADER + line(0)
    rows, damaged, position = read(stored(store, data, start=len(data), n=1))
    assert (rows, damaged, position.offset, position.n) == ([], [], len(data), 1)


def test_long_file_is_read_in_bounded_batches(store: str) -> None:
    data = HEADER + b"".join(map(line, range(limits.ROWS_BATCH + 5)))
    sizes = [found.num_rows for found in activity_rows([stored(store, data)], Stores()) if hasattr(found, "num_rows")]
    assert sizes == [limits.ROWS_BATCH, 5]
