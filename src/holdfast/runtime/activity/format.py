"""How session logs are written down: the names of their files, and the lines in them.

    2026-11-15_04-42-15_abc123_metrics.jsonl       session abc123, kind metrics, begun at that second of UTC
    2026-11-15_04-42-15-2_abc123_metrics.jsonl     the second of them in that second

    {"header":{"universe":"main","session":"abc123","kind":"metrics","opened_ms":1763181735123,"writer":"0198..."}}
    {"n":0,"at_ms":1763181735123,"record":{...}}
    {"n":1,"at_ms":1763181735124,"record":{...}}

Sessions and kinds may contain `_`, so only the header tells them apart. `writer` is a UUIDv7 of the file's own: it
orders files of the same second, and stays the same when the file moves to the object store. `n` counts from 0 without
a gap. A line that is damaged or torn is passed over and counted; it hides no other line.
"""

import io
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from holdfast import limits
from holdfast.errors import InvalidArgument, InvalidName, InvalidValue
from holdfast.names import checked_name

SUFFIX: Final = ".jsonl"
SECOND_CHARACTERS: Final = len("2026-11-15_04-42-15")
HEADER_BYTES_MAX: Final = 4_096  # No header that is written here is longer.


class Header(msgspec.Struct, frozen=True):
    """The first line of a file: whose records it holds."""

    universe: str
    session: str
    kind: str
    opened_ms: int
    writer: str


class FileName(msgspec.Struct, frozen=True):
    """What the name of a file tells by itself."""

    stem: str
    second: str  # 2026-11-15_04-42-15
    labels: str  # The session and the kind with a `_` between them.
    opened_ms: int

    @property
    def day(self) -> str:
        return self.second.partition("_")[0]


class LogFile(msgspec.Struct, frozen=True):
    """A file of records: a local one, or one that was rotated into the object store."""

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
        """Names the file wherever it is, and sorts as files do."""
        return f"{self.second}_{self.writer or self.name}"


class Position(msgspec.Struct, frozen=True, order=True):
    """Where a record is; it stays there when its file is rotated."""

    file: str
    n: int


class LoggedRecord(msgspec.Struct, frozen=True):
    """A record as it was accepted, and when."""

    session: str
    kind: str
    at_ms: int
    record: bytes  # A JSON object.
    position: Position


class Line(msgspec.Struct, frozen=True):
    """One line of a file after the first."""

    n: int
    at_ms: int
    record: msgspec.Raw


class Content(msgspec.Struct, frozen=True):
    """What a file holds up to the end of its last good line."""

    header: Header
    size: int
    records: int
    first_at_ms: int
    last_at_ms: int


class _FirstLine(msgspec.Struct):
    header: Header


def checked_labels(universe: object, session: object, kind: object) -> tuple[str, str, str]:
    """The three names, lower-cased.

    Raises:
        InvalidName: one is no name, the universe could not be a folder, or session and kind are too long together.
    """
    universe = checked_name("universe", universe)
    session, kind = checked_name("session", session), checked_name("kind of session log", kind)
    if universe in (".", ".."):
        raise InvalidName(f"{universe!r} is no name for a universe that has session logs; use another")
    if len(session) + len(kind) > limits.ACTIVITY_NAMES_CHARACTERS_MAX:
        raise InvalidName(
            f"The session {session} and its kind {kind} have {len(session) + len(kind)} characters together and may "
            f"have {limits.ACTIVITY_NAMES_CHARACTERS_MAX} (ACTIVITY_NAMES_CHARACTERS_MAX); shorten one"
        )
    return universe, session, kind


def encoded(record: Mapping[str, Any] | msgspec.Struct) -> bytes:
    """The record as a JSON object on one line. A float that is no number becomes null.

    Raises:
        InvalidValue: it is no mapping and no struct, or holds what JSON cannot.
        InvalidArgument: it is too large.
    """
    if not isinstance(record, (dict, msgspec.Struct)):
        if not isinstance(record, Mapping):
            raise InvalidValue(f"A record is a mapping or a msgspec.Struct, not {type(record).__name__}; wrap it")
        record = dict(record)
    try:
        data = _encode(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"The record has no JSON form ({error}); log plain values") from error
    # What msgspec makes of a dict or most structs needs no more than this, and every record passes here.
    is_fine = data[0] == _BRACE and len(data) <= limits.ACTIVITY_RECORD_BYTES_MAX and b"\n" not in data
    return data if is_fine else checked_object(data)


def checked_object(data: bytes) -> bytes:
    """The bytes themselves if they look like one JSON object on one line; whether they are one shows when read.

    Raises:
        InvalidValue: they do not.
        InvalidArgument: they are too many.
    """
    if type(data) is not bytes or data[:1] != b"{" or data[-1:] != b"}" or b"\n" in data:
        raise InvalidValue("A record is one JSON object without a line break, as bytes; encode it so")
    if len(data) > limits.ACTIVITY_RECORD_BYTES_MAX:
        raise InvalidArgument(
            f"The record has {len(data)} bytes and may have {limits.ACTIVITY_RECORD_BYTES_MAX} "
            "(ACTIVITY_RECORD_BYTES_MAX); store a blob and log its hash"
        )
    return data


def header_line(header: Header) -> bytes:
    return _encode(_FirstLine(header)) + b"\n"


def line(n: int, at_ms: int, data: bytes) -> bytes:
    """The line of a record that `encoded` or `checked_object` returned."""
    return b'{"n":%d,"at_ms":%d,"record":%b}\n' % (n, at_ms, data)


def file_name(header: Header, *, copy: int = 1) -> str:
    """The name of a new file; `copy` tells apart those that begin in the same second."""
    second = (_EPOCH + timedelta(milliseconds=header.opened_ms)).strftime(_SECOND_FORMAT)
    return f"{second}{f'-{copy}' if copy > 1 else ''}_{header.session}_{header.kind}{SUFFIX}"


def parsed_name(stem: str) -> FileName | None:
    """What a name without its suffix tells; None if no file of a log is called so."""
    found = _STEM.match(stem)
    if found is None:
        return None
    try:
        opened = datetime.strptime(found["second"], _SECOND_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None
    return FileName(stem, found["second"], found["labels"], (opened - _EPOCH) // timedelta(milliseconds=1))


def may_hold(labels: str, session: str | None, kind: str | None) -> bool:
    """Whether files with these labels could be of this session and kind; None is any of them."""
    if session is not None and kind is not None:
        return labels == f"{session}_{kind}"
    if session is not None:
        return labels.startswith(f"{session}_")
    return kind is None or labels.endswith(f"_{kind}")


def header_of(first_line: bytes, universe: str, name: FileName) -> Header:
    """The header, or if that is damaged the best that can be told without it."""
    try:
        header = _decode_first(first_line).header
    except (ValueError, RecursionError):
        header = None
    if header is not None and f"{header.session}_{header.kind}" == name.labels:
        return header
    session, _, kind = name.labels.rpartition("_")
    return Header(universe, session, kind, name.opened_ms, writer="")


def lines(data: bytes, start: int = 0) -> Iterator[tuple[int, Line | None]]:
    """For every line after the header, where it ends and what it holds; None for one that is damaged or torn.

    A first line that is no header counts as damaged, unless it is a record: then only the header was lost.
    """
    end = start
    stream = io.BytesIO(data)
    stream.seek(start)
    for text in stream:
        is_first, end = end == 0, end + len(text)
        found = parsed_line(text)
        if found is not None or not is_first or not is_header(text):
            yield end, found


def lines_after(data: bytes, n: int) -> Iterator[tuple[int, Line | None]]:
    """The records with a higher number, each with how many bad lines stand before it; None for those at the end."""
    bad = 0
    # What was read before is searched, not parsed: many pages of a large file would parse it as many times.
    for _, found in lines(data, data.find(b'\n{"n":%d,' % n) + 1):
        if found is None:
            bad += 1
        elif found.n <= n:
            bad = 0  # They were counted with the records that came with them.
        else:
            yield bad, found
            bad = 0
    yield bad, None


def parsed_line(text: bytes) -> Line | None:
    """The record in a line; None if it is not whole, or not JSON."""
    try:
        found = _decode_line(text)
        if not text.isascii():
            text.decode()  # Values that are kept raw have not been decoded yet.
    except (ValueError, RecursionError):  # Those of msgspec and of Unicode are ValueErrors too.
        return None
    return found if text.endswith(b"\n") and bytes(found.record).startswith(b"{") else None


def is_header(text: bytes) -> bool:
    try:
        _decode_first(text)
    except (ValueError, RecursionError):
        return False
    return text.endswith(b"\n")


def content(data: bytes, universe: str, name: FileName) -> Content:
    """What the bytes of a closed file hold, without the torn or damaged lines at their end."""
    size = records = first_at_ms = last_at_ms = 0
    for end, found in lines(data):
        if found is not None:
            size, last_at_ms = end, found.at_ms
            first_at_ms = first_at_ms if records else found.at_ms
            records += 1
    header = header_of(data[: data.find(b"\n") + 1], universe, name)
    return Content(header, size, records, first_at_ms, last_at_ms)


_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(Line).decode
_decode_first: Final = msgspec.json.Decoder(_FirstLine).decode
_BRACE: Final = ord("{")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_FORMAT: Final = "%Y-%m-%d_%H-%M-%S"
_STEM: Final = re.compile(
    r"(?P<second>[0-9]{4}-[0-9]{2}-[0-9]{2}_[0-9]{2}-[0-9]{2}-[0-9]{2})(-[0-9]+)?_(?P<labels>[a-z0-9._-]+_[a-z0-9._-]+)\Z"
)
