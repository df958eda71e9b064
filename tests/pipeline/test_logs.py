"""Lines of session logs as rows, without Spark."""

import json
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from holdfast import limits
from holdfast.backends.objects import open_objects
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.logs import DamagedLines, LogPiece, Reached, activity_rows
from holdfast.pipeline.schemas import ACTIVITY
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import Header

HEADER = log_format.header_line(Header("main", "ada", "metrics", 1_763_181_735_123, "0198"))
AT_MS = 1_763_181_735_123


def line(n: int) -> bytes:
    return log_format.line(n, AT_MS + n, b'{"n":%d,"said":"caf\xc3\xa9"}' % n)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'objects'}"


def stored(store: str, data: bytes, *, start: int = 0, base: int = 0, n: int = 0) -> LogPiece:
    open_objects(store).put("activity/a.jsonl", data[base:])
    return LogPiece(
        "main", "ada", "metrics", "2026-11-15_0198", store, "activity/a.jsonl", start, len(data), base=base, n=n
    )


def read(piece: LogPiece) -> tuple[list[dict[str, object]], list[tuple[int, int, str]], Reached | None]:
    rows, damaged, reached = [], [], None
    for found in activity_rows([piece], Stores()):
        if isinstance(found, DamagedLines):
            damaged.append((found.start, found.end, found.reason))
        elif isinstance(found, Reached):
            reached = found
        else:
            assert found.schema.equals(ACTIVITY.schema)
            rows += found.to_pylist()
    return rows, damaged, reached


def test_a_line_becomes_a_row_with_its_moment_and_its_record(store):
    data = HEADER + b"".join(map(line, range(3)))
    rows, damaged, reached = read(stored(store, data))
    assert damaged == []
    assert reached == Reached("main", "2026-11-15_0198", len(data), 3)
    assert [row["n"] for row in rows] == [0, 1, 2]
    assert json.loads(str(rows[1].pop("record"))) == {"n": 1, "said": "café"}
    assert rows[1] == {
        "universe": "main",
        "session": "ada",
        "kind": "metrics",
        "file": "2026-11-15_0198",
        "n": 1,
        "at": datetime.fromtimestamp(AT_MS // 1_000, UTC).replace(microsecond=124_000),
        "day": date(2025, 11, 15),
    }


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_file_goes_on_where_it_was_left(store, is_staged):
    data = HEADER + b"".join(map(line, range(10)))
    start = len(HEADER + b"".join(map(line, range(6))))
    rows, damaged, reached = read(stored(store, data, start=start, base=start if is_staged else 0, n=6))
    assert [row["n"] for row in rows] == [6, 7, 8, 9]
    assert (damaged, reached.offset, reached.n) == ([], len(data), 10)


def test_a_torn_end_is_told_and_not_passed(store):
    whole = HEADER + line(0) + line(1)
    rows, damaged, reached = read(stored(store, whole + line(2)[:-5]))
    assert [row["n"] for row in rows] == [0, 1]
    assert damaged == [(2, 2, "torn")]
    assert (reached.offset, reached.n) == (len(whole), 2)
    rows, damaged, _ = read(stored(store, whole + line(2), start=reached.offset, n=reached.n))
    assert [row["n"] for row in rows] == [2]
    assert damaged == []


def test_a_damaged_line_hides_no_other(store):
    data = HEADER + line(0) + b'{"n":1,"at_ms"\x00\xff}\n' + b"garbage\n" + line(3) + b"{}\n"
    rows, damaged, reached = read(stored(store, data))
    assert [row["n"] for row in rows] == [0, 3]
    assert damaged == [(1, 2, "malformed"), (4, 4, "malformed")]
    assert (reached.offset, reached.n) == (len(data), 5)


def test_a_moment_that_no_calendar_has_is_damage(store):
    data = HEADER + log_format.line(0, 1 << 62, b"{}") + line(1)
    rows, damaged, _ = read(stored(store, data))
    assert [row["n"] for row in rows] == [1]
    assert damaged == [(0, 0, "malformed")]


@pytest.mark.parametrize("n", [-1, 1 << 63])
def test_a_number_that_no_line_has_is_damage(store, n):
    data = HEADER + line(0) + log_format.line(n, 5, b"{}") + line(2)
    rows, damaged, _ = read(stored(store, data))
    assert [row["n"] for row in rows] == [0, 2]
    assert damaged == [(1, 1, "malformed")]


def test_a_file_that_is_gone_is_missing(store):
    piece = LogPiece("main", "ada", "metrics", "f", store, "activity/gone.jsonl", 0, 100)
    assert read(piece) == ([], [(0, 0, "missing")], None)


def test_nothing_new_gives_nothing_and_stays_where_it_was(store):
    data = HEADER + line(0)
    rows, damaged, reached = read(stored(store, data, start=len(data), n=1))
    assert (rows, damaged, reached.offset, reached.n) == ([], [], len(data), 1)


def test_batches_of_a_long_file_are_bounded(store):
    data = HEADER + b"".join(map(line, range(limits.ROWS_BATCH + 5)))
    sizes = [found.num_rows for found in activity_rows([stored(store, data)], Stores()) if hasattr(found, "num_rows")]
    assert sizes == [limits.ROWS_BATCH, 5]
