"""The format of session logs: file names, and the lines in the files.

    2026-11-15_04-42-15_abc123_metrics.jsonl       session abc123, kind metrics, opened at that second (UTC)
    2026-11-15_04-42-15-2_abc123_metrics.jsonl     the second such file of that second

    {"header":{"universe":"main","session":"abc123","kind":"metrics","opened_ms":1763181735123,"writer":"0198..."},"crc":…}
    {"n":0,"at_ms":1763181735123,"record":{...},"crc":3632233996}
    {"n":1,"at_ms":1763181735124,"record":{...},"crc":1028317533}

Sessions and kinds may contain `_`, so only the header separates them. `writer` is a UUIDv7 that identifies the file: it
orders files of the same second, and stays the same when the file moves to the object store. `n` counts from 0 without
gaps. `crc` is the CRC-32 of the line before it (`json_checksums.py`). A damaged or truncated line is skipped and
counted; it does not affect other lines.
"""

import io
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from fastness import limits
from fastness.errors import InvalidArgument, InvalidName, InvalidValue
from fastness.json_checksums import add_checksum, checksum_matches
from fastness.names import checked_name

SUFFIX: Final = ".jsonl"
SECOND_CHARACTERS: Final = len("2026-11-15_04-42-15")
HEADER_BYTES_MAX: Final = 4_096  # Larger than any header that `header_line` returns.


class Header(msgspec.Struct, frozen=True):
    """The first line of a file: the session and kind of its records."""

    universe: str
    session: str
    kind: str
    opened_ms: int
    writer: str


class FileName(msgspec.Struct, frozen=True):
    """The parts of a file name."""

    stem: str
    second: str  # 2026-11-15_04-42-15
    labels: str  # The session and the kind, joined by `_`.
    opened_ms: int

    @property
    def day(self) -> str:
        return self.second.partition("_")[0]


class LogFile(msgspec.Struct, frozen=True):
    """A file of records: local, or rotated into the object store."""

    name: str
    universe: str
    session: str
    kind: str
    opened_ms: int
    writer: str
    path: str  # In the local file system, or in the object store.
    size: int
    is_rotated: bool

    @property
    def second(self) -> str:
        return self.name[:SECOND_CHARACTERS]

    @property
    def id(self) -> str:
        """The identity of the file, local or rotated; ids sort in the order of files."""
        return f"{self.second}_{self.writer or self.name}"


class Position(msgspec.Struct, frozen=True, order=True):
    """The position of a record; it does not change when the file is rotated."""

    file: str
    n: int


class LoggedRecord(msgspec.Struct, frozen=True):
    """A record and the time when it was accepted."""

    session: str
    kind: str
    at_ms: int
    record: bytes  # A JSON object.
    position: Position


class Line(msgspec.Struct, frozen=True):
    """One line of a file after the header."""

    n: int
    at_ms: int
    record: msgspec.Raw
    crc: int


class Content(msgspec.Struct, frozen=True):
    """A summary of a file without what a crash left incomplete at its end."""

    header: Header
    size: int
    records: int
    first_at_ms: int
    last_at_ms: int
    damaged: int = 0  # Lines that were complete once.


class _FirstLine(msgspec.Struct):
    header: Header
    crc: int


def checked_labels(universe: object, session: object, kind: object) -> tuple[str, str, str]:
    """The three names, unchanged.

    Raises:
        InvalidName: one is not a name, or session and kind are too long together.
    """
    universe = checked_name("universe", universe)
    session, kind = checked_name("session", session), checked_name("session log kind", kind)
    if len(session) + len(kind) > limits.ACTIVITY_NAMES_CHARACTERS_MAX:
        raise InvalidName(
            f"The names of session {session} and kind {kind} have {len(session) + len(kind)} characters together, of "
            f"at most {limits.ACTIVITY_NAMES_CHARACTERS_MAX} (ACTIVITY_NAMES_CHARACTERS_MAX); shorten one"
        )
    return universe, session, kind


def encode_record(record: Mapping[str, object] | msgspec.Struct) -> bytes:
    """The record as a JSON object on one line. NaN and infinities become null.

    Raises:
        InvalidValue: it is not a mapping or struct, or cannot be encoded as JSON.
        InvalidArgument: it is too large.
    """
    if not isinstance(record, (dict, msgspec.Struct)):
        if not isinstance(record, Mapping):
            raise InvalidValue(f"A record must be a mapping or a msgspec.Struct, not {type(record).__name__}")
        record = dict(record)
    try:
        data = _encode(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"The record cannot be encoded as JSON ({error}); log plain values") from error
    # A fast check, because every record passes here; msgspec's output for dicts and most structs passes it.
    is_fine = data[0] == _BRACE and len(data) <= limits.ACTIVITY_RECORD_BYTES_MAX and b"\n" not in data
    return data if is_fine else checked_object(data)


def checked_object(data: bytes) -> bytes:
    """The bytes, after a cheap check that they may be one JSON object on one line; they are parsed only when read.

    Raises:
        InvalidValue: they are not a JSON object on one line.
        InvalidArgument: they are too large.
    """
    if type(data) is not bytes or data[:1] != b"{" or data[-1:] != b"}" or b"\n" in data:
        raise InvalidValue("An encoded record must be the bytes of one JSON object without line breaks")
    if len(data) > limits.ACTIVITY_RECORD_BYTES_MAX:
        raise InvalidArgument(
            f"The record has {len(data)} bytes, of at most {limits.ACTIVITY_RECORD_BYTES_MAX} "
            "(ACTIVITY_RECORD_BYTES_MAX); store a blob and log its hash"
        )
    return data


def header_line(header: Header) -> bytes:
    return add_checksum(_encode({"header": header})) + b"\n"


def line(n: int, at_ms: int, data: bytes) -> bytes:
    """The line of a record that `encode_record` or `checked_object` returned."""
    # As `add_checksum` does, without its copies: every record passes here.
    body = b'{"n":%d,"at_ms":%d,"record":%b' % (n, at_ms, data)
    return b'%b,"crc":%d}\n' % (body, zlib.crc32(body))


def file_name(header: Header, *, copy: int = 1) -> str:
    """The name of a new file; `copy` distinguishes files of the same second."""
    second = (_EPOCH + timedelta(milliseconds=header.opened_ms)).strftime(_SECOND_FORMAT)
    return f"{second}{f'-{copy}' if copy > 1 else ''}_{header.session}_{header.kind}{SUFFIX}"


def parse_name(stem: str) -> FileName | None:
    """The parts of a file name without its suffix; None if it is not the name of a session log."""
    found = _STEM.match(stem)
    if found is None:
        return None
    year, month, day, hour, minute, second = map(int, found["second"].replace("_", "-").split("-"))
    try:  # `strptime` makes this four times slower, and a run parses the name of every file.
        opened = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return FileName(stem, found["second"], found["labels"], (opened - _EPOCH) // timedelta(milliseconds=1))


def may_hold(labels: str, session: str | None, kind: str | None) -> bool:
    """Whether a file with these labels may belong to the session and kind; None matches any."""
    if session is not None and kind is not None:
        return labels == f"{session}_{kind}"
    if session is not None:
        return labels.startswith(f"{session}_")
    return kind is None or labels.endswith(f"_{kind}")


def header_of(first_line: bytes, universe: str, name: FileName) -> Header:
    """The header; if it is damaged, a header derived from the file name."""
    header = _parse_header(first_line)
    if header is not None and f"{header.session}_{header.kind}" == name.labels:
        return header
    session, _, kind = name.labels.rpartition("_")
    return Header(universe, session, kind, name.opened_ms, writer="")


def lines(data: bytes, start: int = 0) -> Iterator[tuple[int, Line | None]]:
    """For every line after the header, its end offset and its record; None for a damaged or truncated line.

    A first line that is not a header counts as damaged, unless it is a record: then only the header is missing.
    """
    end = start
    stream = io.BytesIO(data)
    stream.seek(start)
    for text in stream:
        is_first, end = end == 0, end + len(text)
        found = parse_line(text)
        if found is not None or not is_first or not is_header(text):
            yield end, found


def lines_after(data: bytes, n: int) -> Iterator[tuple[int, Line | None]]:
    """The records after number `n`, each with the number of bad lines before it; None for those at the end."""
    bad = 0
    # Lines that were read before are searched, not parsed, so that paging through a large file stays fast.
    for _, found in lines(data, data.find(b'\n{"n":%d,' % n) + 1):
        if found is None:
            bad += 1
        elif found.n <= n:
            bad = 0  # They were counted by an earlier page.
        else:
            yield bad, found
            bad = 0
    yield bad, None


def parse_line(text: bytes) -> Line | None:
    """The record in a line; None if it is damaged or truncated."""
    try:
        found = _decode_line(text)
        if not text.isascii():
            text.decode()  # msgspec.Raw values have not been checked for valid UTF-8 yet.
    except (ValueError, RecursionError):  # Errors of msgspec and Unicode are ValueErrors.
        return None
    is_valid = text.endswith(b"\n") and bytes(found.record).startswith(b"{") and checksum_matches(text, found.crc)
    return found if is_valid else None


def is_header(text: bytes) -> bool:
    return _parse_header(text) is not None and text.endswith(b"\n")


def _parse_header(text: bytes) -> Header | None:
    try:
        found = _decode_first(text)
    except (ValueError, RecursionError):
        return None
    return found.header if checksum_matches(text, found.crc) else None


def content(data: bytes, universe: str, name: FileName) -> Content:
    """The summary of a closed file, without what a crash left incomplete at its end.

    A damaged line is kept, so that readers of the rotated file count it too.
    """
    size = records = damaged = first_at_ms = last_at_ms = 0
    for end, found, is_damaged in _judged_lines(data):
        if found is not None:
            size, last_at_ms = end, found.at_ms
            first_at_ms = first_at_ms if records else found.at_ms
            records += 1
        elif is_damaged:
            size, damaged = end, damaged + 1
    header = header_of(data[: data.find(b"\n") + 1], universe, name)
    return Content(header, size, records, first_at_ms, last_at_ms, damaged)


def damaged_lines(data: bytes) -> int:
    """How many lines of a file are damaged. What a crash leaves incomplete is not."""
    return sum(is_damaged for _, _, is_damaged in _judged_lines(data))


def _judged_lines(data: bytes) -> Iterator[tuple[int, Line | None, bool]]:
    """As `lines`, with whether a bad line is damaged."""
    for end, found in lines(data):
        begin = data.rfind(b"\n", 0, end - 1) + 1
        yield end, found, found is None and not _is_unwritten(data[begin:end])


def _is_unwritten(bad: bytes) -> bool:
    """Whether a crash or a power loss can have left a bad line: only its beginning was written, or it has zeros."""
    if _ZEROS in bad:
        return True
    is_beginning = any(bad[: len(begin)] == begin[: len(bad)] for begin in _BEGINNINGS)
    # A complete line whose line end was changed is damaged.
    return is_beginning and not bad.endswith(b"\n") and parse_line(bad[:-1] + b"\n") is None


_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(Line).decode
_decode_first: Final = msgspec.json.Decoder(_FirstLine).decode
_BRACE: Final = ord("{")
_BEGINNINGS: Final = (b'{"n":', b'{"header":')
_ZEROS: Final = bytes(16)  # No line has any.
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_FORMAT: Final = "%Y-%m-%d_%H-%M-%S"
_STEM: Final = re.compile(
    r"(?P<second>[0-9]{4}-[0-9]{2}-[0-9]{2}_[0-9]{2}-[0-9]{2}-[0-9]{2})(-[0-9]+)?_(?P<labels>[A-Za-z0-9._@:+=-]+_[A-Za-z0-9._@:+=-]+)\Z"
)
