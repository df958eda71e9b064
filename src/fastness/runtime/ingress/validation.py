"""Validation of pushes, and their conversion to mail."""

import re
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from typing import Final

import msgspec

from fastness.errors import InvalidArgument, PayloadTooLarge
from fastness.layers.mailboxes import Address
from fastness.limits import PUSH_PAYLOAD_BYTES_MAX, PUSH_TEXT_CHARACTERS_MAX
from fastness.runtime.ingress.dedupe import Reservation
from fastness.wire.ingress import CHAT_TOPIC, PUSH_MEDIA, BinaryPush, NewPush, PushedData
from fastness.wire.mail import NewMail

_BASE64URL: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_REQUIRED: Final = ("topic", "content_type", "idempotency_key")
_SHORT: Final = ("topic", "content_type", "idempotency_key", "session_id", "reply_to")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

encode = msgspec.json.Encoder().encode


class QueuedPush:
    """A push in the ingress buffer."""

    __slots__ = ("enqueued_ms", "is_awaited", "is_urgent", "mail", "reservation", "sender", "to")

    def __init__(
        self,
        sender: Address,
        to: Address,
        mail: NewMail,
        reservation: Reservation,
        *,
        enqueued_ms: int,
        is_urgent: bool,
        is_awaited: bool,
    ) -> None:
        """`is_urgent`: its batch is due at once. `is_awaited`: its caller gets the outcome of the commit."""
        self.sender = sender
        self.to = to
        self.mail = mail
        self.reservation = reservation
        self.enqueued_ms = enqueued_ms
        self.is_urgent = is_urgent
        self.is_awaited = is_awaited

    @property
    def size(self) -> int:
        return len(self.mail.body)


class IngressCounters:
    """Counters of the ingress since its start."""

    def __init__(self) -> None:
        self.accepted = 0
        self.deduped = 0
        self.rejects: Counter[str] = Counter()  # Rejected pushes by error code.
        self.lost: Counter[str] = Counter()  # Accepted pushes that were not stored, by error code.


def check_fields(new: NewPush) -> None:
    """Check the text fields of a push.

    Raises:
        InvalidArgument: a field is missing or too long.
    """
    for name in _REQUIRED if isinstance(new, BinaryPush) else (*_REQUIRED, "payload_base64"):
        if not getattr(new, name).strip():
            raise InvalidArgument(f"{name} is required and must not be blank")
    if isinstance(new, BinaryPush) and not new.payload:
        raise InvalidArgument("payload is required and must not be empty")
    for name in _SHORT:
        text = getattr(new, name)
        if text is not None and (len(text) > PUSH_TEXT_CHARACTERS_MAX or _CONTROL.search(text)):
            raise InvalidArgument(
                f"{name} must have at most {PUSH_TEXT_CHARACTERS_MAX} characters and no control characters"
            )
    if not new.content_type.isascii():
        raise InvalidArgument(f"Invalid content_type {new.content_type!r}; use one like application/json")


def payload_of(new: NewPush) -> bytes:
    """The payload of a push.

    Raises:
        InvalidArgument: it is not base64url without padding.
        PayloadTooLarge: it has more than PUSH_PAYLOAD_BYTES_MAX bytes.
    """
    payload = new.payload if isinstance(new, BinaryPush) else _decoded(new.payload_base64)
    if len(payload) > PUSH_PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(
            f"The payload has {len(payload)} bytes, of at most {PUSH_PAYLOAD_BYTES_MAX}; store a blob and push its hash"
        )
    return payload


def _decoded(payload_base64: str) -> bytes:
    text = payload_base64.encode(errors="replace")
    if text.translate(None, _BASE64URL) or len(text) % 4 == 1:
        raise InvalidArgument("payload_base64 is not base64url without padding; encode it again")
    return urlsafe_b64decode(text + b"=" * (-len(text) % 4))


def check_session(new: NewPush) -> None:
    """Check the session of a chat message.

    Raises:
        InvalidArgument: its session_id is missing or not a UUIDv7.
    """
    if new.topic != CHAT_TOPIC:
        return
    try:
        version = uuid.UUID(new.session_id or "").version
    except ValueError:
        version = None
    if version != 7:
        raise InvalidArgument(f"A push to {CHAT_TOPIC} needs a session_id that is a UUIDv7")


def mail_of(new: NewPush, id: str, size: int, *, blob: str | None = None) -> NewMail:
    """The mail for a push, with its payload or with the hash of the blob that contains it."""
    body = PushedData(
        topic=new.topic,
        content_type=new.content_type,
        idempotency_key=new.idempotency_key,
        payload_base64=_encoded(new) if blob is None else None,
        blob=blob,
        size=size,
        session_id=new.session_id,
        reply_to=new.reply_to,
    )
    return NewMail("", encode(body), id=id, content_type=PUSH_MEDIA)


def _encoded(new: NewPush) -> str:
    if isinstance(new, BinaryPush):
        return urlsafe_b64encode(new.payload).rstrip(b"=").decode()
    return new.payload_base64
