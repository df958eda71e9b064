"""Frames of the relay: how an agent in any language sends and receives mail over one WebSocket.

    server ──►  challenge                        a nonce to sign
    agent  ──►  authenticate                     with a signature or a token
    server ──►  welcome, queue_status            then stored mail, then live mail, in order
    agent  ──►  send, confirm, receipts_seen     answered by sent or error
    server ──►  mail, delivery_confirm           and rate_limited, ping, draining, replaced

A WebSocket message is one frame, or a list of frames. It is JSON, where a body is base64url, or MessagePack. `type`
names the frame; docs/relay.md specifies each one.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from typing import Any, Final, Literal

import msgspec

from fastness.errors import RetryAdvice
from fastness.names import UNIVERSE, checked_agent, checked_name
from fastness.wire.mail import BYTES

PROTOCOL: Final = "fastness-relay-1"
NONCE_BYTES: Final = 32

Encoding = Literal["json", "msgpack"]

_TO_BASE64URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_BASE64URL: Final = bytes.maketrans(b"-_+/", b"+/!!")


class Body(bytes):
    """Bytes that are encoded as base64url in JSON."""

    __slots__ = ()


class Frame(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """The base of all frames. Frames without lists cannot be part of a cycle, so they are not garbage-collected."""


# From the agent.


class Authenticate(Frame, frozen=True, gc=False, tag="authenticate"):
    """The agent's address, with a key and a signature, or a token."""

    address: str
    public_key: Body | None = None
    signature: Body | None = None
    token: str | None = None
    receipts_after: int | None = None  # The last delivery_confirm seen; overrides receipts_seen.


class Send(Frame, frozen=True, gc=False, tag="send"):
    """A mail. The sender chooses its id, which is unique among its unconfirmed mails."""

    message_id: str
    to: str
    body: Body = Body()
    content_type: str = BYTES
    correlation_id: str | None = None
    sender: str | None = msgspec.field(default=None, name="from")


class Confirm(Frame, frozen=True, tag="confirm"):
    """Confirm mails: they are removed."""

    message_ids: list[str]


class ReceiptsSeen(Frame, frozen=True, gc=False, tag="receipts_seen"):
    """Every delivery_confirm up to this one was seen; the next connection starts after it."""

    sequence: int


class Ping(Frame, frozen=True, gc=False, tag="ping"):
    """Request a `pong`."""


class Pong(Frame, frozen=True, gc=False, tag="pong"):
    """The answer to `ping`."""


class Rpc(Frame, frozen=True, tag="rpc"):
    """A JSON-RPC 2.0 call or batch; from the server: its answer."""

    body: Any


OfAgent = Authenticate | Send | Confirm | ReceiptsSeen | Ping | Pong | Rpc


# From the server.


class Challenge(Frame, frozen=True, gc=False, tag="challenge"):
    """The nonce to sign."""

    nonce: Body
    host: str
    protocol: str


class Welcome(Frame, frozen=True, gc=False, tag="welcome"):
    """This connection is the mailbox's only reader now."""

    session: str
    address: str
    receipts_seen: int


class QueueStatus(Frame, frozen=True, gc=False, tag="queue_status"):
    """The number of stored mails, which are sent first."""

    pending_count: int


class Mail(Frame, frozen=True, gc=False, tag="mail"):
    """A mail for the agent. `stored`: it waited because the agent was not connected when it arrived."""

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
    """The mail is stored with this durability. `duplicate`: a mail with this id was stored before."""

    message_id: str
    durability: str
    duplicate: bool


class Error(Frame, frozen=True, gc=False, tag="error"):
    """The mail with that id, or the last frame, was refused; nothing was done."""

    code: str
    detail: str
    retry: str
    message_id: str | None = None


class RateLimited(Frame, frozen=True, gc=False, tag="rate_limited"):
    """The mail was refused because of the rate limit; send it again after `retry_after_ms`."""

    message_id: str
    retry_after_ms: int


class DeliveryConfirm(Frame, frozen=True, gc=False, tag="delivery_confirm"):
    """The recipient has confirmed a mail of this agent."""

    sequence: int
    message_id: str
    to: str
    was_stored: bool
    confirmed_ms: int


class Replaced(Frame, frozen=True, gc=False, tag="replaced"):
    """Another connection reads the mailbox now; the server closes this one."""


class Draining(Frame, frozen=True, gc=False, tag="draining"):
    """The server is shutting down: it accepts no more mail, but confirmations until it closes."""


def signed_bytes(host: str, nonce: bytes) -> bytes:
    """The bytes that an agent signs: protocol, host and nonce, each prefixed with its length in four bytes."""
    parts = (PROTOCOL.encode(), host.encode(), nonce)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def split_address(address: str) -> tuple[str, str]:
    """The universe and the agent of an address; without a universe it is in `main`.

    Raises:
        InvalidName: it is not an address.
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
    """The frames of a message: JSON if it is text, MessagePack if it is bytes. An invalid frame becomes an Error.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: the message is neither JSON nor MessagePack.
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
        return Error("invalid_frame", f"This server does not know the frame ({error})", RetryAdvice.NEVER, id)
    return frame


def encode(frames: list[Frame], encoding: Encoding) -> bytes:
    """One message with these frames; JSON is sent as text."""
    return (_to_json if encoding == "json" else _to_msgpack).encode(frames[0] if len(frames) == 1 else frames)
