"""Pushes as the ingress has them: what is checked before one is accepted, and what it becomes in a mailbox."""

import re
import uuid
from base64 import urlsafe_b64decode
from collections import Counter
from typing import Final

import msgspec

from holdfast.errors import InvalidArgument, PayloadTooLarge
from holdfast.layers.mailboxes import Address
from holdfast.limits import PUSH_PAYLOAD_BYTES_MAX, PUSH_TEXT_CHARACTERS_MAX
from holdfast.runtime.ingress.dedupe import Reservation
from holdfast.wire.ingress import CHAT_TOPIC, PUSH_MEDIA, NewPush, PushedData
from holdfast.wire.mail import NewMail

_BASE64URL: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_REQUIRED: Final = ("topic", "content_type", "payload_base64", "idempotency_key")
_SHORT: Final = ("topic", "content_type", "idempotency_key", "session_id", "reply_to")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

encode = msgspec.json.Encoder().encode


class DataPush(msgspec.Struct, frozen=True, kw_only=True):
    """A push that the queue has, for whoever wants to know of it at once."""

    id: str
    sender: str
    to: str
    topic: str
    content_type: str
    payload: bytes
    idempotency_key: str
    session_id: str | None
    reply_to: str | None
    received_ms: int


class QueuedPush:
    """A push in the backlog."""

    __slots__ = ("hurries", "mail", "reservation", "sender", "since_ms", "to")

    def __init__(
        self, sender: Address, to: Address, mail: NewMail, reservation: Reservation, *, since_ms: int, hurries: bool
    ) -> None:
        self.sender = sender
        self.to = to
        self.mail = mail
        self.reservation = reservation
        self.since_ms = since_ms
        self.hurries = hurries

    @property
    def size(self) -> int:
        return len(self.mail.body)


class Tallies:
    """What the ingress has counted since it began."""

    def __init__(self) -> None:
        self.accepted = 0
        self.deduped = 0
        self.rejects: Counter[str] = Counter()  # Pushes that were answered with an error, by its code.
        self.lost: Counter[str] = Counter()  # Pushes that were accepted and are not stored, by the code of the reason.


def check_fields(new: NewPush) -> None:
    """Refuse a push that lacks something, or says too much.

    Raises:
        InvalidArgument: a field is blank or too long.
    """
    for name in _REQUIRED:
        if not getattr(new, name).strip():
            raise InvalidArgument(f"{name} is required; give it")
    for name in _SHORT:
        text = getattr(new, name)
        if text is not None and (len(text) > PUSH_TEXT_CHARACTERS_MAX or _CONTROL.search(text)):
            raise InvalidArgument(
                f"{name} has at most {PUSH_TEXT_CHARACTERS_MAX} characters, none of them a control character"
            )
    if not new.content_type.isascii():
        raise InvalidArgument(f"{new.content_type!r} is no content type; use one like application/json")


def payload_of(new: NewPush) -> bytes:
    """The bytes that were pushed.

    Raises:
        InvalidArgument: they are not base64url without padding.
        PayloadTooLarge: they are more than one push may have.
    """
    text = new.payload_base64.encode(errors="replace")
    if text.translate(None, _BASE64URL) or len(text) % 4 == 1:
        raise InvalidArgument("payload_base64 is not base64url without padding; encode it again")
    payload = urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    if len(payload) > PUSH_PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(
            f"A payload has at most {PUSH_PAYLOAD_BYTES_MAX} bytes, not {len(payload)}; store a blob and push its hash"
        )
    return payload


def check_session(new: NewPush) -> None:
    """Refuse a chat message that belongs to no session.

    Raises:
        InvalidArgument: it names none, or something else than a UUIDv7.
    """
    if new.topic != CHAT_TOPIC:
        return
    try:
        version = uuid.UUID(new.session_id or "").version
    except ValueError:
        version = None
    if version != 7:
        raise InvalidArgument(f"A push to {CHAT_TOPIC} has a session_id that is a UUIDv7; give it one")


def mail_of(new: NewPush, id: str, size: int, *, blob: str | None = None) -> NewMail:
    """The mail that carries a push: with its payload, or with the hash of the blob that has it."""
    body = PushedData(
        topic=new.topic,
        content_type=new.content_type,
        idempotency_key=new.idempotency_key,
        payload_base64=new.payload_base64 if blob is None else None,
        blob=blob,
        size=size,
        session_id=new.session_id,
        reply_to=new.reply_to,
    )
    return NewMail("", encode(body), id=id, content_type=PUSH_MEDIA)
