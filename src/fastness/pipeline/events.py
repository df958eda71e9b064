"""Parse queue, mail and lease events out of session logs, and group them by message or mail. No Spark here.

    records ──► parsed ──► bucketed: one payload per bucket ──► grouped: all events of one message, or of one mail id

All events of one message go into the same bucket, whichever file they come from, so a bucket can be folded by itself.
A payload is bytes: thousands of events in one row. A few events are collected without buckets.

Any client can write session logs, so invalid records are skipped.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from fastness.limits import ROWS_BATCH
from fastness.pipeline.lifecycles import AT_MS_MAX, Event, MailGroup, MessageGroup, PresentMessage, events_before

_TimestampMs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=AT_MS_MAX)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Duration: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _MessageRecord(msgspec.Struct, frozen=True, gc=False):
    """The fields of `runtime.activity.events.MessageRecord`."""

    event: str
    queue: str
    id: str
    at_ms: _TimestampMs
    correlation_id: str
    attempt: _Count = 0
    error: str | None = None


class _MailRecord(msgspec.Struct, frozen=True, gc=False):
    event: str
    to: str
    sender: str
    id: str
    at_ms: _TimestampMs


class LeaseEvent(msgspec.Struct, frozen=True, gc=False):
    """An acquire of a lease that was not granted at once."""

    event: str
    key: str
    owner: str
    waited_ms: _Duration
    at_ms: _TimestampMs


MessageKey: TypeAlias = tuple[str, str, str]  # universe, queue, id
MailKey: TypeAlias = tuple[str, str, str, str]  # universe, recipient, sender, id


# universe, queue, id, event, at_ms, correlation_id, attempt, error
MessageEvent: TypeAlias = tuple[str, str, str, str, int, str | None, int, str | None]
MailEvent: TypeAlias = tuple[str, str, str, str, str, int]  # universe, recipient, sender, id, event, at_ms


class _MessageEvents(msgspec.Struct, array_like=True):
    """The payload of one bucket of message events."""

    events: list[MessageEvent] = []
    present: list[PresentMessage] = []


_MailEvents: TypeAlias = list[MailEvent]

Buckets: TypeAlias = Iterator[tuple[int, bytes]]  # The bucket and its encoded events.


def message_events(batch: pa.RecordBatch) -> Iterator[MessageEvent]:
    """The events of messages in a batch of (universe, record)."""
    for universe, event in _parse(batch, _decode_message):
        yield (
            universe,
            event.queue,
            event.id,
            event.event,
            event.at_ms,
            event.correlation_id,
            event.attempt,
            event.error,
        )


def history_events(batch: pa.RecordBatch) -> Iterator[MessageEvent]:
    """The rows of a batch of `queue_events`."""
    for row in batch.to_pylist():
        at_ms = round(row["changed_at"].timestamp() * 1_000)
        key = (row["universe"], row["queue"], row["id"])
        yield (*key, row["event"], at_ms, row["correlation_id"], row["attempt"], row["error"])


def mail_events(batch: pa.RecordBatch) -> Iterator[MailEvent]:
    """The events of mails in a batch of (universe, record)."""
    for universe, event in _parse(batch, _decode_mail):
        yield universe, event.to, event.sender, event.id, event.event, event.at_ms


class MessageCollector:
    """Collects events by message."""

    def __init__(self) -> None:
        self.events: dict[MessageKey, list[Event]] = {}
        self.present: dict[MessageKey, PresentMessage] = {}
        self._correlations: dict[MessageKey, str] = {}

    def add(self, events: Iterable[MessageEvent]) -> None:
        for universe, queue, id, event, at_ms, correlation_id, attempt, error in events:
            key = (universe, queue, id)
            self.events.setdefault(key, []).append(Event(event, at_ms, attempt, error))
            self._correlate(key, correlation_id)

    def add_known(self, key: MessageKey, events: Iterable[Event], correlation_id: str | None) -> None:
        """Add the events of a row."""
        self.events.setdefault(key, []).extend(events)
        self._correlate(key, correlation_id)

    def add_present(self, messages: Iterable[PresentMessage]) -> None:
        """Add messages of the plane. A dead letter in its queue alone makes no row."""
        for message in messages:
            self.present[message[:3]] = message

    def keys(self) -> list[MessageKey]:
        """The messages that have a row."""
        only_present = (key for key, message in self.present.items() if not message.is_letter)
        return [*self.events, *(key for key in only_present if key not in self.events)]

    def group(self, key: MessageKey) -> MessageGroup:
        """All that is known of a message."""
        return MessageGroup(*key, self._correlations.get(key), self.events.get(key, []), self.present.get(key))

    def _correlate(self, key: MessageKey, correlation_id: str | None) -> None:
        if correlation_id is not None and self._correlations.get(key, "") <= correlation_id:
            self._correlations[key] = correlation_id


def bucket_messages(batch: pa.RecordBatch, buckets: int) -> Buckets:
    """The events of a batch of (universe, record), encoded by bucket."""
    return _bucket_events(message_events(batch), buckets)


def bucket_history(batch: pa.RecordBatch, buckets: int) -> Buckets:
    """The rows of a batch of `queue_events`, encoded by bucket."""
    return _bucket_events(history_events(batch), buckets)


def _bucket_events(events: Iterable[MessageEvent], buckets: int) -> Buckets:
    payloads: dict[int, _MessageEvents] = {}
    for event in events:
        payloads.setdefault(_bucket(event[:3], buckets), _MessageEvents()).events.append(event)
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
    for event in mail_events(batch):
        payloads.setdefault(_bucket(event[:4], buckets), []).append(event)
    return _encode_buckets(payloads)


def bucket_known_messages(batch: pa.RecordBatch, buckets: int, before_ms: Mapping[str, int]) -> Buckets:
    """The events in rows of `messages` from before the time of their universe, encoded by bucket."""
    return _bucket_events(_known_messages(batch, before_ms), buckets)


def _known_messages(batch: pa.RecordBatch, before_ms: Mapping[str, int]) -> Iterator[MessageEvent]:
    names = ("universe", "queue", "id", "correlation_id", "events")
    for universe, queue, id, correlation_id, stored in zip(*_values(batch, names), strict=True):
        for event in events_before(stored, before_ms.get(universe, 0)):
            yield universe, queue, id, event.event, event.at_ms, correlation_id, event.attempt, event.error


def bucket_known_mails(batch: pa.RecordBatch, buckets: int, before_ms: Mapping[str, int]) -> Buckets:
    """The events in rows of `mail` from before the time of their universe, encoded by bucket."""
    payloads: dict[int, _MailEvents] = {}
    names = ("universe", "recipient", "sender", "id", "events")
    for universe, recipient, sender, id, stored in zip(*_values(batch, names), strict=True):
        key = (universe, recipient, sender, id)
        for event in events_before(stored, before_ms.get(universe, 0)):
            payloads.setdefault(_bucket(key, buckets), []).append((*key, event.event, event.at_ms))
    return _encode_buckets(payloads)


def _values(batch: pa.RecordBatch, names: Sequence[str]) -> list[list[Any]]:
    return [batch.column(name).to_pylist() for name in names]


def group_messages(payloads: Iterable[bytes]) -> Iterator[list[MessageGroup]]:
    """All events of each message of a bucket, a bounded number of messages at a time."""
    collected = MessageCollector()
    for payload in payloads:
        decoded = _decode_messages(payload)
        collected.add(decoded.events)
        collected.add_present(decoded.present)
    for keys in _batches(collected.keys()):
        yield [collected.group(key) for key in keys]


def group_mails(payloads: Iterable[bytes]) -> Iterator[list[MailGroup]]:
    """All events of each (recipient, sender, id), a bounded number at a time."""
    events: dict[MailKey, list[Event]] = {}
    for payload in payloads:
        for universe, recipient, sender, id, event, at_ms in _decode_mails(payload):
            events.setdefault((universe, recipient, sender, id), []).append(Event(event, at_ms))
    for keys in _batches(events):
        yield [
            MailGroup(universe, recipient, sender, id, events[universe, recipient, sender, id])
            for universe, recipient, sender, id in keys
        ]


def lease_events(batch: pa.RecordBatch) -> Iterator[tuple[str, LeaseEvent]]:
    """The lease events in a batch of (universe, record), each with its universe."""
    return _parse(batch, _decode_lease)


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
_decode_lease: Final = msgspec.json.Decoder(LeaseEvent).decode
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_messages: Final = msgspec.msgpack.Decoder(_MessageEvents).decode
_decode_mails: Final = msgspec.msgpack.Decoder(_MailEvents).decode
