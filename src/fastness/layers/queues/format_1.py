"""Converts the queues of a plane in format 1, in which every leased message had a record of its own.

A message that is leased becomes a delayed one until its lease ends: its consumer cannot settle it any more. Records of
acknowledged messages are left out: nobody repeats an ack after so long.
"""

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from fastness.kv import Pair
from fastness.layers.queues.counters import decode_counters
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.limits import PAYLOAD_CARRIED_BYTES_MAX
from fastness.wire.stored_messages import StoredMessage, encode, format_id


class _OldMessage(msgspec.Struct, array_like=True):
    """A message in format 1."""

    id: bytes
    payload: bytes | None
    blob: str | None
    size: int
    content_type: str
    attributes: dict[str, str]
    correlation_id: str
    priority: int
    group: str | None
    created_ms: int
    max_attempts: int
    visibility_ms: int
    ttl_at_ms: int = 0
    attempts: int = 0
    failures: int = 0
    fence: int = 0
    last_error: str | None = None
    origin: str | None = None
    died_ms: int = 0
    due_ms: int = 0
    owner: str | None = None
    txn_id: str | None = None
    stateful: bool = False
    leased_ms: int = 0
    retry_delay_ms: int | None = None
    has_failures: bool = False
    parked_for_ms: int = 0


_decode = msgspec.msgpack.Decoder(_OldMessage).decode


class QueueConverter:
    """Converts the pairs of some queues."""

    def __init__(self, queues: Iterable[QueueKey]) -> None:
        self._keys = sorted(map(keys_of, queues), key=lambda keys: keys.prefix)
        self._prefixes = [keys.prefix for keys in self._keys]

    def convert(self, key: bytes, value: bytes) -> Pair | None:
        """A pair in this version's format; None if it is left out. Pairs of other layers are unchanged."""
        index = bisect_right(self._prefixes, key) - 1
        if index < 0 or not key.startswith(self._prefixes[index]):
            return key, value
        keys = self._keys[index]
        if key.startswith((keys.ready, keys.delayed, keys.waiting.prefix)):
            return key, encode(_message(_decode(value)))
        if key.startswith(keys.acks.prefix):
            return None
        return key, convert_counters(value) if key.startswith(keys.all_counters.prefix) else value


def convert_counters(value: bytes) -> bytes:
    """The counters of a queue: leased messages become delayed ones."""
    counters = decode_counters(value)
    counters.delayed += counters.leased
    counters.leased, counters.shortened = 0, b""
    return encode(counters)


def _message(old: _OldMessage) -> StoredMessage:
    is_stored_apart = old.blob is not None or old.size > PAYLOAD_CARRIED_BYTES_MAX
    return StoredMessage(
        id=old.id,
        fence=old.fence,
        attempts=old.attempts,
        ttl_at_ms=old.ttl_at_ms,
        visibility_ms=old.visibility_ms,
        group=old.group,
        blob=old.blob,
        size=old.size,
        has_failures=old.has_failures,
        stateful=old.stateful,
        is_special=is_stored_apart
        or old.has_failures
        or old.stateful
        or old.ttl_at_ms > 0
        or old.group is not None
        or old.correlation_id != format_id(old.id),
        correlation_id=old.correlation_id,
        job=None,
        payload=old.payload,
        content_type=old.content_type,
        attributes=old.attributes,
        priority=old.priority,
        created_ms=old.created_ms,
        max_attempts=old.max_attempts,
        failures=old.failures,
        last_error=old.last_error,
        origin=old.origin,
        died_ms=old.died_ms,
        due_ms=old.due_ms,
        delayed_for_ms=old.parked_for_ms,
        leased_ms=old.leased_ms,
        retry_delay_ms=old.retry_delay_ms,
    )
