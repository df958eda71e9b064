"""Parse queue, mail and lease events out of session logs, and group them by message or mail. No Spark here.

    records ──► parsed ──► bucketed: one payload per bucket ──► grouped: all events of one message, or of one mail id

All events of one message go into the same bucket, whichever file they come from, so a bucket can be folded by itself.
A payload is bytes: thousands of events in one row.

Any client can write session logs, so invalid records are skipped.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from holdfast.limits import ROWS_BATCH
from holdfast.pipeline.lifecycles import AT_MS_MAX, Event, MailGroup, MessageGroup, PresentMessage

_TimestampMs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=AT_MS_MAX)]
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


class _MessageRecord(msgspec.Struct, frozen=True, gc=False):
    """The fields of `runtime.activity.events.QueueEvent`; logs of older versions have fewer."""

    event: str
    queue: str
    id: str
    at_ms: _TimestampMs
    correlation_id: str | None = None
    attempt: _Count | None = None
    error: str | None = None


class _MailRecord(msgspec.Struct, frozen=True, gc=False):
    event: str
    to: str
    sender: str
    id: str
    at_ms: _TimestampMs


class _LeaseRecord(msgspec.Struct, frozen=True, gc=False):
    event: str
    key: str
    owner: str
    waited_ms: _Duration
    at_ms: _TimestampMs


_MessageKey: TypeAlias = tuple[str, str, str]  # universe, queue, id
_MailKey: TypeAlias = tuple[str, str, str, str]  # universe, recipient, sender, id


class _MessageEvents(msgspec.Struct, array_like=True):
    """The payload of one bucket of message events."""

    events: list[tuple[str, str, str, str, int, str | None, int | None, str | None]] = []
    present: list[PresentMessage] = []


_MailEvents: TypeAlias = list[tuple[str, str, str, str, str, int]]

Buckets: TypeAlias = Iterator[tuple[int, bytes]]  # The bucket and its encoded events.


def bucket_messages(batch: pa.RecordBatch, buckets: int) -> Buckets:
    """The events of a batch of (universe, record), encoded by bucket."""
    payloads: dict[int, _MessageEvents] = {}
    for universe, event in _parse(batch, _decode_message):
        bucket = _bucket((universe, event.queue, event.id), buckets)
        payloads.setdefault(bucket, _MessageEvents()).events.append(
            (
                universe,
                event.queue,
                event.id,
                event.event,
                event.at_ms,
                event.correlation_id,
                event.attempt,
                event.error,
            )
        )
    return _encode_buckets(payloads)


def bucket_history(batch: pa.RecordBatch, buckets: int) -> Buckets:
    """The rows of a batch of `queue_events`, encoded by bucket."""
    payloads: dict[int, _MessageEvents] = {}
    for row in batch.to_pylist():
        key = (row["universe"], row["queue"], row["id"])
        at_ms = round(row["changed_at"].timestamp() * 1_000)
        payloads.setdefault(_bucket(key, buckets), _MessageEvents()).events.append(
            (*key, row["event"], at_ms, row["correlation_id"], row["attempt"], row["error"])
        )
    return _encode_buckets(payloads)


def bucket_present(messages: Iterable[PresentMessage], buckets: int) -> Buckets:
    """The messages in the plane, encoded by bucket."""
    payloads: dict[int, _MessageEvents] = {}
    for message in messages:
        payloads.setdefault(_bucket(message[:3], buckets), _MessageEvents()).present.append(message)
    return _encode_buckets(payloads)


def bucket_mails(batch: pa.RecordBatch, buckets: int) -> Buckets:
    """The events of a batch of (universe, record), encoded by bucket."""
    payloads: dict[int, _MailEvents] = {}
    for universe, event in _parse(batch, _decode_mail):
        key = (universe, event.to, event.sender, event.id)
        payloads.setdefault(_bucket(key, buckets), []).append((*key, event.event, event.at_ms))
    return _encode_buckets(payloads)


def group_messages(payloads: Iterable[bytes]) -> Iterator[list[MessageGroup]]:
    """All events of each message of a bucket, a bounded number of messages at a time."""
    events: dict[_MessageKey, list[Event]] = {}
    correlations: dict[_MessageKey, str] = {}
    present: dict[_MessageKey, PresentMessage] = {}
    for payload in payloads:
        decoded = _decode_messages(payload)
        for universe, queue, id, event, at_ms, correlation_id, attempt, error in decoded.events:
            key = (universe, queue, id)
            events.setdefault(key, []).append(Event(event, at_ms, attempt, error))
            if correlation_id is not None and correlations.get(key, "") <= correlation_id:
                correlations[key] = correlation_id
        for message in decoded.present:
            present[message[:3]] = message
            if not message.is_letter:
                events.setdefault(message[:3], [])
    for keys in _batches(events):
        yield [
            MessageGroup(key[0], key[1], key[2], correlations.get(key), events[key], present.get(key)) for key in keys
        ]


def group_mails(payloads: Iterable[bytes]) -> Iterator[list[MailGroup]]:
    """All events of each (recipient, sender, id), a bounded number at a time."""
    events: dict[_MailKey, list[Event]] = {}
    for payload in payloads:
        for universe, recipient, sender, id, event, at_ms in _decode_mails(payload):
            events.setdefault((universe, recipient, sender, id), []).append(Event(event, at_ms))
    for keys in _batches(events):
        yield [
            MailGroup(universe, recipient, sender, id, events[universe, recipient, sender, id])
            for universe, recipient, sender, id in keys
        ]


def lease_events(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The lease events in a batch of (universe, record)."""
    rows = [{"universe": universe, **msgspec.structs.asdict(event)} for universe, event in _parse(batch, _decode_lease)]
    return pa.RecordBatch.from_pylist(rows, LEASES)


def _parse(batch: pa.RecordBatch, decode: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    for universe, record in zip(batch.column("universe").to_pylist(), batch.column("record").to_pylist(), strict=True):
        try:
            yield universe, decode(record)
        except (msgspec.DecodeError, UnicodeError):
            continue


def _bucket(key: Sequence[str], buckets: int) -> int:
    return zlib.crc32("\0".join(key).encode()) % buckets


def _encode_buckets(payloads: dict[int, Any]) -> Buckets:
    return ((bucket, _encode(payload)) for bucket, payload in payloads.items())


def _batches(keys: Collection[Any]) -> Iterator[list[Any]]:
    all_keys = list(keys)
    return (all_keys[begin : begin + ROWS_BATCH] for begin in range(0, len(all_keys), ROWS_BATCH))


_decode_message: Final = msgspec.json.Decoder(_MessageRecord).decode
_decode_mail: Final = msgspec.json.Decoder(_MailRecord).decode
_decode_lease: Final = msgspec.json.Decoder(_LeaseRecord).decode
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_messages: Final = msgspec.msgpack.Decoder(_MessageEvents).decode
_decode_mails: Final = msgspec.msgpack.Decoder(_MailEvents).decode
