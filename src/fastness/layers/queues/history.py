"""The history of a queue: every change of its messages, recorded in the commit that makes it.

    "y" | at_ms | id | attempt | kind  ->  nothing, or the correlation id of a put, or the error of a dead letter

Only queues whose policy has `history="durable"` have one; for all others nothing is read or written. Once a minute, a
put deletes what is older than the policy's `history_seconds`. Events of a message in one millisecond are in the order
of its attempts. A redrive that lets them begin anew comes first there, which matters only if the message was delivered
in the same millisecond. A complete history replays to the counts of the queue:

    in the queue = put + redriven + arrived - acked - dead-lettered - outlived - cancelled - replaced - moved -
                   purged - returned
"""

from typing import Final

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.policies import history_ms, policy_of
from fastness.limits import HISTORY_PAGE_MAX
from fastness.wire.queues import MessageEvent, MessageEvents
from fastness.wire.stored_messages import ID_BYTES, format_id

# Stored as the position in this list, in the order of a message's life. Only append.
KINDS: Final = (
    "put",
    "arrived",
    "leased",
    "deferred",
    "nacked",
    "expired",
    "dead-lettered",
    "redriven",
    "returned",
    "acked",
    "outlived",
    "purged",
    "cancelled",
    "replaced",
    "updated",
    "moved",
)
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
_TIME_BYTES: Final = 8
_ATTEMPT_BYTES: Final = 4
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str | None]).decode


def history_key(keys: QueueKeys, at_ms: int, id: bytes, attempt: int, kind: str) -> bytes:
    return (keys.history + at_ms.to_bytes(_TIME_BYTES, "big") + id + attempt.to_bytes(_ATTEMPT_BYTES, "big")) + bytes(
        (_CODES[kind],)
    )


def history_value(kind: str, correlation_id: str, error: str | None) -> bytes:
    """The value of a record, which is empty for most of them."""
    if kind == "put" or error is not None:
        return _encode((correlation_id if kind == "put" else "", error))
    return b""


def read_history(tx: Transaction, queue: QueueKey, *, after: str = "", limit: int = HISTORY_PAGE_MAX) -> MessageEvents:
    """At most `limit` events after the position `after`, in the order of their times.

    Raises:
        InvalidArgument: the queue has no history, or `after` is invalid.
    """
    kept_ms = history_ms(policy_of(tx, queue))
    if not kept_ms:
        raise InvalidArgument(
            f'Queue {queue.name} has no history; set a policy with history="durable", which records from then on'
        )
    keys = keys_of(queue)
    begin = keys.history + max(tx.now_ms - kept_ms, 0).to_bytes(_TIME_BYTES, "big")
    if after:
        begin = max(begin, keys.history + _position(after) + b"\x00")
    pairs = tx.scan(begin, keys.history + b"\xff" * (_TIME_BYTES + 1), limit=limit)
    events = [_event(key[len(keys.history) :], value) for key, value in pairs]
    return MessageEvents(events, pairs[-1][0][len(keys.history) :].hex() if len(pairs) == limit else None)


def position_at(at_ms: int) -> str:
    """The position before all events of a time."""
    return (at_ms.to_bytes(_TIME_BYTES, "big") + bytes(ID_BYTES + _ATTEMPT_BYTES + 1)).hex()


def events_before(keys: QueueKeys, before_ms: int) -> tuple[bytes, bytes]:
    """The key range of the events before a time."""
    return keys.history, keys.history + before_ms.to_bytes(_TIME_BYTES, "big")


def delete_all(tx: Transaction, keys: QueueKeys) -> None:
    """Delete the whole history."""
    tx.delete_range(keys.history, keys.history + b"\xff" * (_TIME_BYTES + 1))


def _event(position: bytes, value: bytes) -> MessageEvent:
    at_ms = int.from_bytes(position[:_TIME_BYTES], "big")
    id = position[_TIME_BYTES : _TIME_BYTES + ID_BYTES]
    attempt = int.from_bytes(position[_TIME_BYTES + ID_BYTES : -1], "big")
    correlation_id, error = _decode(value) if value else ("", None)
    return MessageEvent(format_id(id), KINDS[position[-1]], at_ms, attempt, correlation_id or None, error)


def _position(text: str) -> bytes:
    try:
        position = bytes.fromhex(text)
    except ValueError:
        position = b""
    if len(position) != _TIME_BYTES + ID_BYTES + _ATTEMPT_BYTES + 1:
        raise InvalidArgument(f"{text[:80]!r} is not a position in a history; use the `next` of the page before")
    return position
