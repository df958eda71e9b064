"""Events: what session logs tell of messages, mail and leases, record by record. No Spark in it.

    records ──► parsed ──► dealt: one hand for each bucket ──► gathered: all that is told of one message, or of one id

Everything that is told of one message goes into the same bucket, whatever file told it, so whoever has all hands of a
bucket can fold what is in it. A hand is bytes: thousands of events that travel as one row.

Session logs are open to anybody, so a record that makes no sense is left out.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from holdfast.limits import ROWS_BATCH
from holdfast.pipeline.lifecycles import AT_MS_MAX, Event, MailGroup, MessageGroup

_Moment: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=AT_MS_MAX)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Duration: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

LEASES: Final = pa.schema(
    [
        ("universe", pa.string()),
        ("event", pa.string()),
        ("key", pa.string()),
        ("owner", pa.string()),
        ("waited_ms", pa.int64()),
        ("at_ms", pa.int64()),
    ]
)


class _OfMessage(msgspec.Struct, frozen=True, gc=False):
    """As `runtime.events.QueueEvent`; logs of older versions have fewer fields."""

    event: str
    queue: str
    id: str
    at_ms: _Moment
    correlation_id: str | None = None
    attempt: _Count | None = None
    error: str | None = None


class _OfMail(msgspec.Struct, frozen=True, gc=False):
    event: str
    to: str
    sender: str
    id: str
    at_ms: _Moment


class _OfLease(msgspec.Struct, frozen=True, gc=False):
    event: str
    key: str
    owner: str
    waited_ms: _Duration
    at_ms: _Moment


_MessageKey: TypeAlias = tuple[str, str, str]  # universe, queue, id
_MailKey: TypeAlias = tuple[str, str, str, str]  # universe, recipient, sender, id


class _Messages(msgspec.Struct, array_like=True):
    """A hand of what is told of messages."""

    events: list[tuple[str, str, str, str, int, str | None, int | None, str | None]] = []
    errors: list[tuple[str, str, str, str]] = []  # universe, queue, id, error: what the plane knows of dead letters


_Mails: TypeAlias = list[tuple[str, str, str, str, str, int]]

Hands: TypeAlias = Iterator[tuple[int, bytes]]  # A bucket, and what goes into it.


def deal_messages(batch: pa.RecordBatch, buckets: int) -> Hands:
    """Deal out a batch of (universe, record)."""
    hands: dict[int, _Messages] = {}
    for universe, told in _parsed(batch, _decode_message):
        bucket = _bucket((universe, told.queue, told.id), buckets)
        hands.setdefault(bucket, _Messages()).events.append(
            (universe, told.queue, told.id, told.event, told.at_ms, told.correlation_id, told.attempt, told.error)
        )
    return _packed(hands)


def deal_errors(errors: Iterable[tuple[str, str, str, str]], buckets: int) -> Hands:
    """Deal out what the plane knows: (universe, queue, id, error) of dead letters that are still there."""
    hands: dict[int, _Messages] = {}
    for error in errors:
        hands.setdefault(_bucket(error[:3], buckets), _Messages()).errors.append(error)
    return _packed(hands)


def deal_mails(batch: pa.RecordBatch, buckets: int) -> Hands:
    """Deal out a batch of (universe, record)."""
    hands: dict[int, _Mails] = {}
    for universe, told in _parsed(batch, _decode_mail):
        key = (universe, told.to, told.sender, told.id)
        hands.setdefault(_bucket(key, buckets), []).append((*key, told.event, told.at_ms))
    return _packed(hands)


def gather_messages(hands: Iterable[bytes]) -> Iterator[list[MessageGroup]]:
    """What is told of each message of a bucket, a bounded number of messages at a time."""
    events: dict[_MessageKey, list[Event]] = {}
    correlations: dict[_MessageKey, str] = {}
    errors: dict[_MessageKey, str] = {}
    for hand in hands:
        told = _unpack_messages(hand)
        for universe, queue, id, event, at_ms, correlation_id, attempt, error in told.events:
            key = (universe, queue, id)
            events.setdefault(key, []).append(Event(event, at_ms, attempt, error))
            if correlation_id is not None and correlations.get(key, "") <= correlation_id:
                correlations[key] = correlation_id
        errors.update(((universe, queue, id), error) for universe, queue, id, error in told.errors)
    for keys in _pages(events):
        yield [
            MessageGroup(key[0], key[1], key[2], correlations.get(key), events[key], errors.get(key)) for key in keys
        ]


def gather_mails(hands: Iterable[bytes]) -> Iterator[list[MailGroup]]:
    """What is told of each id under which somebody sent mail to somebody."""
    events: dict[_MailKey, list[Event]] = {}
    for hand in hands:
        for universe, recipient, sender, id, event, at_ms in _unpack_mails(hand):
            events.setdefault((universe, recipient, sender, id), []).append(Event(event, at_ms))
    for keys in _pages(events):
        yield [
            MailGroup(universe, recipient, sender, id, events[universe, recipient, sender, id])
            for universe, recipient, sender, id in keys
        ]


def leases(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The events of leases in a batch of (universe, record)."""
    rows = [{"universe": universe, **msgspec.structs.asdict(told)} for universe, told in _parsed(batch, _decode_lease)]
    return pa.RecordBatch.from_pylist(rows, LEASES)


def _parsed(batch: pa.RecordBatch, decode: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    for universe, record in zip(batch.column("universe").to_pylist(), batch.column("record").to_pylist(), strict=True):
        try:
            yield universe, decode(record)
        except (msgspec.DecodeError, UnicodeError):
            continue


def _bucket(key: Sequence[str], buckets: int) -> int:
    return zlib.crc32("\0".join(key).encode()) % buckets


def _packed(hands: dict[int, Any]) -> Hands:
    return ((bucket, _pack(hand)) for bucket, hand in hands.items())


def _pages(keys: Collection[Any]) -> Iterator[list[Any]]:
    every = list(keys)
    return (every[begin : begin + ROWS_BATCH] for begin in range(0, len(every), ROWS_BATCH))


_decode_message: Final = msgspec.json.Decoder(_OfMessage).decode
_decode_mail: Final = msgspec.json.Decoder(_OfMail).decode
_decode_lease: Final = msgspec.json.Decoder(_OfLease).decode
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack_messages: Final = msgspec.msgpack.Decoder(_Messages).decode
_unpack_mails: Final = msgspec.msgpack.Decoder(_Mails).decode
