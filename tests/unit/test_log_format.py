"""Names and lines of session logs: what is written is read back, and damage does not hide other lines."""

import zlib
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness import limits
from fastness.errors import InvalidArgument, InvalidName, InvalidValue
from fastness.json_checksums import add_checksum
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header, Line
from tests.support.failures import Failures

NOON = Header("main", "abc123", "metrics", 1_794_717_735_123, "0198c9a8-0000-7000-8000-000000000000")
NAMES = st.text("abz019._-", min_size=1, max_size=12)


class Step(msgspec.Struct):
    name: str
    ms: float


class Row(msgspec.Struct, array_like=True):
    name: str


def body(count: int, header: Header = NOON) -> bytes:
    records = (log_format.encode_record({"number": number, "text": "ü\n\0" * number}) for number in range(count))
    lines = (log_format.line(number, 1_000 + number, record) for number, record in enumerate(records))
    return log_format.header_line(header) + b"".join(lines)


def numbers(data: bytes) -> list[int]:
    return [line.n for _, line in log_format.lines(data) if line is not None]


def bad_lines(data: bytes) -> int:
    return sum(line is None for _, line in log_format.lines(data))


def name_of(header: Header, copy: int = 1) -> log_format.FileName:
    name = log_format.parse_name(log_format.file_name(header, copy=copy).removesuffix(log_format.SUFFIX))
    assert name is not None
    return name


def test_a_file_is_named_after_its_second_session_and_kind() -> None:
    assert log_format.file_name(NOON) == "2026-11-15_04-42-15_abc123_metrics.jsonl"
    assert log_format.file_name(NOON, copy=2) == "2026-11-15_04-42-15-2_abc123_metrics.jsonl"


def test_the_lines_of_a_file_have_the_documented_format() -> None:
    assert log_format.header_line(NOON) == (
        b'{"header":{"universe":"main","session":"abc123","kind":"metrics","opened_ms":1794717735123,'
        b'"writer":"0198c9a8-0000-7000-8000-000000000000"},"crc":707873342}\n'
    )
    assert log_format.line(
        17, 1_763_181_735_123, b'{"a":1}'
    ) == b'{"n":17,"at_ms":1763181735123,"record":{"a":1},"crc":%d}\n' % zlib.crc32(
        b'{"n":17,"at_ms":1763181735123,"record":{"a":1}'
    )


def test_a_changed_character_is_noticed_anywhere_in_a_line() -> None:
    """Above all where the line is valid JSON afterwards."""
    text = log_format.line(3, 1_763_181_735_123, b'{"crc":5,"text":"a,\\"crc\\":1"}')
    assert log_format.parse_line(text) is not None
    for position in range(len(text)):
        for bit in range(8):
            damaged = text[:position] + bytes([text[position] ^ 1 << bit]) + text[position + 1 :]
            assert log_format.parse_line(damaged) is None


@given(session=NAMES, kind=NAMES, second=st.integers(0, 4_000_000_000), copy=st.integers(1, 9_999))
def test_session_and_kind_with_underscores_are_restored_from_the_header(
    session: str, kind: str, second: int, copy: int
) -> None:
    header = Header("main", session, kind, second * 1_000, "w")
    name = name_of(header, copy)
    assert (name.opened_ms, name.labels) == (second * 1_000, f"{session}_{kind}")
    assert log_format.header_of(log_format.header_line(header), "main", name) == header
    assert log_format.may_hold(name.labels, session, kind)
    assert log_format.may_hold(name.labels, session, None)
    assert log_format.may_hold(name.labels, None, kind)


@pytest.mark.parametrize(
    "stem",
    [
        "",
        "events",
        "2026-11-15_abc_metrics",
        "2026-13-15_04-42-15_a_b",
        "2026-11-15_04-42-15_abc",
        "2026-11-15_04-42-15_A b_c",
    ],
)
def test_names_of_other_files_are_not_parsed(stem: str) -> None:
    assert log_format.parse_name(stem) is None


def test_names_exclude_other_sessions_and_kinds_where_possible() -> None:
    assert not log_format.may_hold("a_b", "b", None)
    assert not log_format.may_hold("a_b", None, "a")
    assert not log_format.may_hold("a_b_c", "a", "c")


@pytest.mark.parametrize("first", [b"", b"\n", b"\xff\n", b'{"header":{}}\n', b"[" * 100_000, b'{"n":1}\n'])
def test_a_missing_header_is_derived_from_the_name(first: bytes) -> None:
    assert log_format.header_of(first, "main", name_of(NOON)) == Header(
        "main", "abc123", "metrics", 1_794_717_735_000, ""
    )


def test_a_header_that_contradicts_the_name_is_ignored() -> None:
    other = Header("main", "other", "metrics", 5, "w")
    assert log_format.header_of(log_format.header_line(other), "main", name_of(NOON)).session == "abc123"


@pytest.mark.parametrize(
    ("universe", "session", "kind"),
    [("..", "s", "k"), (".", "s", "k"), ("a/b", "s", "k"), ("main", "", "k"), ("main", "s", "k k"), ("main", 5, "k")],
)
def test_names_that_are_not_valid_in_paths_are_rejected(universe: Any, session: Any, kind: Any) -> None:
    with pytest.raises(InvalidName):
        log_format.checked_labels(universe, session, kind)


def test_session_and_kind_together_fit_into_a_file_name() -> None:
    longest = limits.ACTIVITY_NAMES_CHARACTERS_MAX
    log_format.checked_labels("main", "s" * 100, "k" * (longest - 100))
    with pytest.raises(InvalidName, match="ACTIVITY_NAMES_CHARACTERS_MAX"):
        log_format.checked_labels("main", "s" * 100, "k" * (longest - 99))


@pytest.mark.parametrize(
    "record", [{"name": "a", "ms": 1.5}, MappingProxyType({"name": "a", "ms": 1.5}), Step("a", 1.5)]
)
def test_mappings_and_structs_are_encoded_as_one_object(record: Any) -> None:
    assert log_format.encode_record(record) == b'{"name":"a","ms":1.5}'


def test_values_without_a_json_line_are_rejected() -> None:
    failures = Failures()
    record: Any
    for record in [
        None,
        [],
        "text",
        b"{}",
        Row("a"),
        {"a": object()},
        {"a": "\ud800"},
        {(1, 2): 3},
        {"a": msgspec.Raw(b'{\n"b":1}')},
        MappingProxyType({"a": {1, object()}}),
    ]:
        with failures.of(record), pytest.raises(InvalidValue):
            log_format.encode_record(record)
    failures.check()


def test_a_record_that_contains_itself_is_rejected() -> None:
    record: dict[str, Any] = {}
    record["self"] = record
    with pytest.raises(InvalidValue):
        log_format.encode_record(record)


def test_the_size_of_a_record_is_limited() -> None:
    limit = limits.ACTIVITY_RECORD_BYTES_MAX - len(b'{"a":""}')
    log_format.encode_record({"a": "x" * limit})
    with pytest.raises(InvalidArgument, match="ACTIVITY_RECORD_BYTES_MAX"):
        log_format.encode_record({"a": "x" * (limit + 1)})


def test_bytes_that_are_not_one_json_object_line_are_rejected() -> None:
    failures = Failures()
    data: Any
    for data in [b"", b"{", b"[]", b'{"a":\n1}', b"{}\n", b" {}", "{}", bytearray(b"{}"), 5, None]:
        with failures.of(data), pytest.raises(InvalidValue):
            log_format.checked_object(data)
    failures.check()


def test_all_lines_of_a_complete_file_are_read() -> None:
    assert numbers(body(20)) == list(range(20))
    assert bad_lines(body(20)) == 0
    assert bad_lines(b"") == bad_lines(log_format.header_line(NOON)) == 0


def test_a_bad_line_is_counted_and_does_not_hide_others() -> None:
    """One truncated line does not make the file unreadable."""
    failures = Failures()
    for bad in [
        b"\n",
        b"torn",
        b'{"n":5,"at_ms":1,"record":{"a":\n',
        b'{"n":5,"at_ms":1,"record":{}}\n',
        log_format.line(5, 1, b"[]"),
        log_format.line(5, 1, b'{"a":"\xff"}'),
        add_checksum(b'{"n":5,"at_ms":1}') + b"\n",
        add_checksum(b'{"n":"5","at_ms":1,"record":{}}') + b"\n",
        b'{"n":5,"at_ms":1,"record":{"a":' + b"[" * 100_000 + b"\n",
        b"\0" * 4_096,
        log_format.header_line(NOON),
    ]:
        with failures.of(bad):
            whole = body(4)
            assert numbers(whole + bad) == [0, 1, 2, 3]
            assert bad_lines(whole + bad) == 1
            middle = whole.index(b'{"n":2')
            in_the_middle = whole[:middle] + bad.rstrip(b"\n") + b"\n" + whole[middle:]
            assert numbers(in_the_middle) == [0, 1, 2, 3]
            assert bad_lines(in_the_middle) == 1
    failures.check()


def test_a_record_without_a_line_end_is_truncated() -> None:
    """The next write would be appended to it."""
    assert numbers(body(3)[:-1]) == [0, 1]


def test_a_missing_header_does_not_hide_records() -> None:
    records = body(3).partition(b"\n")[2]
    assert numbers(records) == [0, 1, 2]
    assert numbers(b"\xff\n" + records) == [0, 1, 2]
    assert bad_lines(b"\xff\n" + records) == 1


@given(count=st.integers(0, 8), cut=st.integers(0, 200), tail=st.binary(max_size=200))
def test_bytes_at_the_end_do_not_hide_earlier_records(count: int, cut: int, tail: bytes) -> None:
    """For every way in which the end of a file may be lost or overwritten."""
    whole = body(count)
    kept = whole[: max(len(whole) - cut, 0)]
    survivors = [n for end, n in ends(whole) if end <= len(kept)]
    assert numbers(kept + tail)[: len(survivors)] == survivors
    content = log_format.content(kept + tail, "main", name_of(NOON))
    assert content.records >= len(survivors)
    assert numbers((kept + tail)[: content.size])[: len(survivors)] == survivors


@given(data=st.binary(max_size=300), at=st.integers(0, 2_000))
def test_the_reader_never_raises_for_damage(data: bytes, at: int) -> None:
    whole = body(8)
    damaged = whole[:at] + data + whole[at + len(data) :]
    untouched = [n for end, n in ends(whole) if end <= at]
    assert numbers(damaged)[: len(untouched)] == untouched
    log_format.content(damaged, "main", name_of(NOON))


def ends(data: bytes) -> list[tuple[int, int]]:
    return [(end, line.n) for end, line in log_format.lines(data) if line is not None]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"n":3,"at_ms":17', bytes(4_096), b'{"n":3,' + bytes(500) + b"\n"])
def test_the_content_of_a_file_ends_before_what_a_crash_left(torn: bytes) -> None:
    whole = body(3)
    content = log_format.content(whole + torn, "main", name_of(NOON))
    assert content == log_format.Content(NOON, len(whole), records=3, first_at_ms=1_000, last_at_ms=1_002)
    content = log_format.content(whole + b"bad\nbad too\n" + torn, "main", name_of(NOON))
    assert (content.size, content.records, content.damaged) == (len(whole) + 12, 3, 2)
    assert log_format.damaged_lines(whole + b"bad\n" + torn) == 1


def test_an_end_that_no_writer_began_is_damaged_and_not_truncated() -> None:
    whole = body(3)
    content = log_format.content(whole + b"\xff" * 100, "main", name_of(NOON))
    assert (content.size, content.records, content.damaged) == (len(whole) + 100, 3, 1)


def test_a_record_whose_line_end_was_changed_is_damaged_and_not_truncated() -> None:
    whole = body(3)
    content = log_format.content(whole[:-1] + b"\x0b", "main", name_of(NOON))
    assert (content.size, content.records, content.damaged) == (len(whole), 2, 1)


def test_the_content_of_a_file_without_records_is_empty() -> None:
    content = log_format.content(log_format.header_line(NOON) + b'{"n":0', "main", name_of(NOON))
    assert (content.size, content.records) == (0, 0)


def test_bad_lines_are_counted_with_the_next_record() -> None:
    """A reader of pages counts each of them once."""
    whole = body(4)
    parts = whole.splitlines(keepends=True)
    damaged = b"".join([*parts[:2], b"bad\n", *parts[2:4], b"bad\n", b"bad\n", parts[4], b"torn"])
    assert counted(log_format.lines_after(damaged, -1)) == [(0, 0), (1, 1), (0, 2), (2, 3), (1, None)]
    assert counted(log_format.lines_after(damaged, 1)) == [(0, 2), (2, 3), (1, None)]
    assert counted(log_format.lines_after(damaged, 3)) == [(1, None)]


def test_a_position_stays_valid_when_its_record_is_damaged() -> None:
    parts = body(5).splitlines(keepends=True)
    damaged = b"".join([*parts[:2], b"bad\n", parts[2], b"damaged\n", *parts[4:]])
    assert counted(log_format.lines_after(damaged, 2)) == [(1, 3), (0, 4), (0, None)]


def counted(pairs: Any) -> list[tuple[int, int | None]]:
    def number(line: Line | None) -> int | None:
        return None if line is None else line.n

    return [(bad, number(line)) for bad, line in pairs]
