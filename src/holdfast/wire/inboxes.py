"""Inbox items: the five kinds of input to a world, checked before they are stored."""

import re
from typing import Final

import msgspec

from holdfast.limits import (
    INBOX_HEADERS_MAX,
    INBOX_INLINE_BYTES_MAX,
    INBOX_REQUESTS_MAX,
    INBOX_TEXT_BYTES_MAX,
    INTENT_HASH_BYTES_MAX,
)

_HASH: Final = re.compile("[0-9a-f]{64}")


class Effect(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An external action that a world requests; an orchestrator takes it from the index of pending effects."""

    kind: str
    intent_hash: bytes
    params: bytes = b""


class Timer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A time at which a world wants an item; an orchestrator takes it from the index of due timers."""

    deliver_at_ns: int
    intent_hash: bytes
    payload: bytes = b""


class _Item(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """The fields of all items. A payload is bytes up to 4 KiB, or the hash of a blob."""

    payload: bytes = b""
    payload_blob: str | None = None
    effects: tuple[Effect, ...] = ()
    timers: tuple[Timer, ...] = ()


class DomainEvent(_Item, frozen=True, tag="domain_event"):
    """An event of the application; `schema` names its type."""

    schema: str
    key: bytes | None = None


class EffectReceipt(_Item, frozen=True, tag="receipt"):
    """The result of an effect, signed by the adapter that executed it."""

    intent_hash: bytes
    effect_kind: str
    adapter_id: str
    signature: bytes


class InboundMessage(_Item, frozen=True, tag="inbox"):
    """A message from outside, such as a mail to the agent that is bound to the world."""

    inbox_name: str
    headers: dict[str, str] = {}


class TimerFired(_Item, frozen=True, tag="timer_fired"):
    """A timer that the world set is due."""

    timer_id: str


class Control(_Item, frozen=True, tag="control"):
    """A command of an operator to the world."""

    command: str


InboxItem = DomainEvent | EffectReceipt | InboundMessage | TimerFired | Control


KINDS: Final = (DomainEvent, EffectReceipt, InboundMessage, TimerFired, Control)


def fault_of(item: InboxItem) -> str | None:
    """What is wrong with an item whose types are right; None if it is valid."""
    if item.payload and item.payload_blob is not None:
        return "it has a payload and a blob; give one of them"
    if item.payload_blob is not None and not _HASH.fullmatch(item.payload_blob):
        return "its payload_blob is no blob's name; use the 64 hex digits that put returned"
    if any(not 0 <= timer.deliver_at_ns < 1 << 63 for timer in item.timers):
        return "a timer is due before 1970 or after 2262; nanoseconds since the epoch are wanted"
    return None


def excess_of(item: InboxItem) -> str | None:
    """Which limit an item exceeds; None if it exceeds none."""
    if len(item.payload) > INBOX_INLINE_BYTES_MAX:
        return f"its payload has {len(item.payload)} bytes and may have {INBOX_INLINE_BYTES_MAX}; store it as a blob"
    for field in item.__struct_fields__:
        value = getattr(item, field)
        size = len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else 0
        if field != "payload" and size > INBOX_TEXT_BYTES_MAX:
            return f"its {field} has {size} bytes and may have {INBOX_TEXT_BYTES_MAX}; shorten it"
    if isinstance(item, InboundMessage) and len(item.headers) > INBOX_HEADERS_MAX:
        return f"it has {len(item.headers)} headers and may have {INBOX_HEADERS_MAX}"
    if max(len(item.effects), len(item.timers)) > INBOX_REQUESTS_MAX:
        return f"it asks for more than {INBOX_REQUESTS_MAX} effects or timers; send several items"
    hashes = [effect.intent_hash for effect in item.effects] + [timer.intent_hash for timer in item.timers]
    longest = max(map(len, hashes), default=0)
    if longest > INTENT_HASH_BYTES_MAX:
        return f"an intent hash has {longest} bytes and may have {INTENT_HASH_BYTES_MAX}"
    return None
