"""Inbox items: the five kinds of input to a world, checked before they are stored."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import PayloadTooLarge
from fastness.limits import (
    EFFECT_ATTEMPTS,
    EFFECT_KIND_BYTES_MAX,
    EFFECT_PARAMS_BYTES_MAX,
    INBOX_HEADERS_MAX,
    INBOX_INLINE_BYTES_MAX,
    INBOX_REQUESTS_MAX,
    INBOX_TEXT_BYTES_MAX,
    INTENT_HASH_BYTES_MAX,
)
from fastness.wire.fields import Hash, RecordNumber


class Effect(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An external action that a world requests: a host claims it, carries it out and returns a receipt."""

    kind: str
    intent_hash: bytes
    params: bytes = b""
    max_attempts: Annotated[int, Meta(ge=1, le=limits.EFFECT_ATTEMPTS_MAX)] = EFFECT_ATTEMPTS


class Timer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A time at which a world wants an item in its inbox. A pending timer with the same intent hash is replaced."""

    deliver_at_ns: RecordNumber
    intent_hash: bytes
    payload: bytes = b""


class _Item(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """The fields of all items. A payload is bytes up to 4 KiB, or the hash of a blob."""

    payload: bytes = b""
    payload_blob: Hash | None = None
    effects: tuple[Effect, ...] = ()
    timers: tuple[Timer, ...] = ()


class DomainEvent(_Item, frozen=True, tag="domain_event"):
    """An event of the application; `schema` names its type."""

    schema: str
    key: bytes | None = None
    sender: str | None = None  # `world@universe`, if it is of another universe. Only the plane sets it.


class EffectReceipt(_Item, frozen=True, tag="receipt"):
    """The result of an effect, signed by the adapter that executed it."""

    intent_hash: bytes
    effect_kind: str
    adapter_id: str
    signature: bytes
    error: str | None = None  # The effect is dead: this is the error of its last attempt.


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


def check_requests(effects: Sequence[Effect], timers: Sequence[Timer]) -> None:
    """Check effects and timers that are not part of an item.

    Raises:
        PayloadTooLarge: one of them is too large.
    """
    if (excess := _excess_of_requests(effects, timers)) is not None:
        raise PayloadTooLarge(f"The effects or timers are too large: {excess}")
    largest = max((len(effect.params) for effect in effects), default=0)
    if largest > EFFECT_PARAMS_BYTES_MAX:
        raise PayloadTooLarge(
            f"An effect has {largest} bytes of params and may have {EFFECT_PARAMS_BYTES_MAX}; store them as a blob"
        )


def excess_of(item: InboxItem, *, payload_bytes_max: int = INBOX_INLINE_BYTES_MAX) -> str | None:
    """Which limit an item exceeds; None if it exceeds none."""
    if len(item.payload) > payload_bytes_max:
        return f"its payload has {len(item.payload)} bytes and may have {payload_bytes_max}; store it as a blob"
    for field in item.__struct_fields__:
        value = getattr(item, field)
        size = len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else 0
        if field != "payload" and size > INBOX_TEXT_BYTES_MAX:
            return f"its {field} has {size} bytes and may have {INBOX_TEXT_BYTES_MAX}; shorten it"
    if isinstance(item, InboundMessage) and len(item.headers) > INBOX_HEADERS_MAX:
        return f"it has {len(item.headers)} headers and may have {INBOX_HEADERS_MAX}"
    if max(len(item.effects), len(item.timers)) > INBOX_REQUESTS_MAX:
        return f"it asks for more than {INBOX_REQUESTS_MAX} effects or timers; send several items"
    return _excess_of_requests(item.effects, item.timers)


def _excess_of_requests(effects: Sequence[Effect], timers: Sequence[Timer]) -> str | None:
    hashes = [effect.intent_hash for effect in effects] + [timer.intent_hash for timer in timers]
    longest = max(map(len, hashes), default=0)
    if longest > INTENT_HASH_BYTES_MAX:
        return f"an intent hash has {longest} bytes and may have {INTENT_HASH_BYTES_MAX}"
    longest = max((len(effect.kind.encode()) for effect in effects), default=0)
    if longest > EFFECT_KIND_BYTES_MAX:
        return f"the kind of an effect has {longest} bytes and may have {EFFECT_KIND_BYTES_MAX}; shorten it"
    longest = max((len(timer.payload) for timer in timers), default=0)
    if longest > INBOX_INLINE_BYTES_MAX:
        return f"the payload of a timer has {longest} bytes and may have {INBOX_INLINE_BYTES_MAX}"
    return None
