"""Frames of the relay: how an agent of any language sends and gets mail over one WebSocket.

    server ──►  challenge                        prove who you are
    agent  ──►  authenticate                     by a signature, or with a token
    server ──►  welcome, queue_status            then mail in order: what was stored, then what comes
    agent  ──►  send, confirm, receipts_seen     answered by sent or error
    server ──►  mail, delivery_confirm           and rate_limited, ping, draining, replaced

A WebSocket message is one frame, or a list of frames. It is JSON, where a body is base64url, or MessagePack. `type`
says what a frame is; docs/relay.md says what it means.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import Retry
from holdfast.names import UNIVERSE, checked_agent, checked_name
from holdfast.wire.mail import BYTES

PROTOCOL: Final = "holdfast-relay-1"
NONCE_BYTES: Final = 32

Encoding = Literal["json", "msgpack"]

_TO_BASE64URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_BASE64URL: Final = bytes.maketrans(b"-_+/", b"+/!!")


class Body(bytes):
    """Bytes that travel as base64url where there are no bytes."""

    __slots__ = ()


class Frame(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """What every frame has in common: its `type`. Those that hold no lists are in no cycle, and nothing to collect."""


# Of the agent.


class Authenticate(Frame, frozen=True, gc=False, tag="authenticate"):
    """Who is there, and what proves it: a key and a signature, or a token."""

    address: str
    public_key: Body | None = None
    signature: Body | None = None
    token: str | None = None
    receipts_after: int | None = None  # The last delivery_confirm that was seen, if not what receipts_seen has said.


class Send(Frame, frozen=True, gc=False, tag="send"):
    """A mail. Its id is the sender's to choose, and names it for as long as the mail is there."""

    message_id: str
    to: str
    body: Body = Body()
    content_type: str = BYTES
    correlation_id: str | None = None
    sender: str | None = msgspec.field(default=None, name="from")


class Confirm(Frame, frozen=True, tag="confirm"):
    """Mails have arrived for good."""

    message_ids: list[str]


class ReceiptsSeen(Frame, frozen=True, gc=False, tag="receipts_seen"):
    """Every delivery_confirm up to this one was seen; the next connection begins behind it."""

    sequence: int


class Ping(Frame, frozen=True, gc=False, tag="ping"):
    """Are you there?"""


class Pong(Frame, frozen=True, gc=False, tag="pong"):
    """Yes."""


class Rpc(Frame, frozen=True, tag="rpc"):
    """A call of JSON-RPC 2.0, or a batch of them; of the server: what answers it."""

    body: Any


OfAgent = Authenticate | Send | Confirm | ReceiptsSeen | Ping | Pong | Rpc


# Of the server.


class Challenge(Frame, frozen=True, gc=False, tag="challenge"):
    """What to sign."""

    nonce: Body
    host: str
    protocol: str


class Welcome(Frame, frozen=True, gc=False, tag="welcome"):
    """The mailbox is this connection's now."""

    session: str
    address: str
    receipts_seen: int


class QueueStatus(Frame, frozen=True, gc=False, tag="queue_status"):
    """How many mails were stored, and come first."""

    pending_count: int


class Mail(Frame, frozen=True, gc=False, tag="mail"):
    """A mail for the agent. `stored`: it waited, because nobody was there for it when it came."""

    sequence: int
    message_id: str
    sender: str = msgspec.field(name="from")
    to: str
    body: Body
    content_type: str
    correlation_id: str
    sent_ms: int
    expires_ms: int
    stored: bool


class Sent(Frame, frozen=True, gc=False, tag="sent"):
    """The mail is stored, and as safe as `durability` says. `duplicate`: it waited already, under this id."""

    message_id: str
    durability: str
    duplicate: bool


class Error(Frame, frozen=True, gc=False, tag="error"):
    """Something was refused: the mail of that id, or the frame that came last. Nothing was done."""

    code: str
    detail: str
    retry: str
    message_id: str | None = None


class RateLimited(Frame, frozen=True, gc=False, tag="rate_limited"):
    """The mail was refused because there were too many; it may be sent again after a while."""

    message_id: str
    retry_after_ms: int


class DeliveryConfirm(Frame, frozen=True, gc=False, tag="delivery_confirm"):
    """A mail that the agent has sent was confirmed by its recipient."""

    sequence: int
    message_id: str
    to: str
    was_stored: bool
    confirmed_ms: int


class Replaced(Frame, frozen=True, gc=False, tag="replaced"):
    """Another connection has this mailbox now; the server closes this one."""


class Draining(Frame, frozen=True, gc=False, tag="draining"):
    """The server is about to stop: it takes no more mail, and confirmations until it closes."""


def signed_bytes(host: str, nonce: bytes) -> bytes:
    """What an agent signs: protocol, host and nonce, each behind its length in four bytes."""
    parts = (PROTOCOL.encode(), host.encode(), nonce)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def split_address(address: str) -> tuple[str, str]:
    """The universe and the agent of an address; one that names no universe is of `main`.

    Raises:
        InvalidName: it is no address.
    """
    agent, at, universe = address.partition("@")
    home = checked_name("universe", universe) if at else UNIVERSE
    return home, checked_agent(agent, home)


def _body_of(kind: type[Any], value: object) -> Body:
    if kind is not Body:
        raise NotImplementedError(kind)
    if isinstance(value, bytes):
        return Body(value)
    if not isinstance(value, str):
        raise ValueError("bytes are base64url text in JSON, and bin in MessagePack")
    try:
        text = value.encode("ascii").rstrip(b"=").translate(_FROM_BASE64URL)
        return Body(a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True))
    except (Base64Error, ValueError) as error:
        raise ValueError(f"no base64url (RFC 4648, 5): {error}") from None


def _text_of(body: Any) -> str:
    return b2a_base64(body, newline=False).rstrip(b"=").translate(_TO_BASE64URL).decode()


_FORMS: Final[Any] = OfAgent | list[OfAgent]
_from_json = msgspec.json.Decoder(_FORMS, dec_hook=_body_of)
_from_msgpack = msgspec.msgpack.Decoder(_FORMS, dec_hook=_body_of)
_to_json = msgspec.json.Encoder(enc_hook=_text_of)
_to_msgpack = msgspec.msgpack.Encoder(enc_hook=bytes)


def decode(data: str | bytes) -> list[OfAgent | Error]:
    """The frames of a message: JSON if it is text, MessagePack if it is bytes. One that is none is an Error instead.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: the message is not even JSON, or MessagePack.
    """
    try:
        found = _from_json.decode(data) if isinstance(data, str) else _from_msgpack.decode(data)
    except msgspec.ValidationError:
        loose = msgspec.json.decode(data) if isinstance(data, str) else msgspec.msgpack.decode(data)
        return [_converted(item) for item in (loose if isinstance(loose, list) else [loose])]
    return found if isinstance(found, list) else [found]


def _converted(item: Any) -> OfAgent | Error:
    try:
        frame: OfAgent = msgspec.convert(item, OfAgent, dec_hook=_body_of)
    except msgspec.ValidationError as error:
        named = item.get("message_id") if isinstance(item, dict) else None
        id = named if isinstance(named, str) else None
        return Error("invalid_frame", f"The frame is none that this server knows ({error})", Retry.NEVER, id)
    return frame


def encode(frames: list[Frame], encoding: Encoding) -> bytes:
    """A message of these frames; that of JSON is sent as text."""
    return (_to_json if encoding == "json" else _to_msgpack).encode(frames[0] if len(frames) == 1 else frames)
