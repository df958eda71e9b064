"""Pushes: data that one agent sends to another, the answer, and what a watch of pushes gets.

    Push, PushMany, NewPush (JSON-RPC) ──► accepted by the ingress ──► PushedData, the body of a mail in the
                                                  └──► DataPush            recipient's mailbox

A watch continues at a position, `EPOCH-SEQUENCE`. The epoch changes when the process of the plane restarts, or has
forgotten the recent pushes of the universe.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.names import UNIVERSE
from fastness.wire.fields import (
    Name,
    batch_of,
    worded,
)
from fastness.wire.json_values import decode_json
from fastness.wire.requests import Operation, Request, Route

PUSH_MEDIA: Final = "application/vnd.fastness.push+json"  # The content type of a mail whose body is `PushedData`.
CHAT_TOPIC: Final = "chat.message"  # Its pushes name a session.

Durability = Literal["accepted", "synced"]
ACCEPTED: Final = "accepted"  # In the memory buffer; lost if the process dies before the next flush.
SYNCED: Final = "synced"  # Committed to the mailbox and synced to disk.

ANYBODY: Final = "anybody"  # The sender of a push whose caller is not authenticated and names none.
_ONCE: Final = "a repeated push has the same idempotency key, and is stored once"


class NewPush(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of `agent.data.push`."""

    topic: str
    content_type: str
    payload_base64: str  # base64url without padding.
    idempotency_key: str
    session_id: str | None = None
    reply_to: str | None = None
    to: str | None = None  # An address; by default the agent in the server's settings.
    sender: str | None = msgspec.field(name="from", default=None)  # Trusted only from unauthenticated callers.
    durability: Durability = ACCEPTED  # When to answer.


class BinaryPush(NewPush, frozen=True, kw_only=True):
    """A push whose payload is given as bytes instead of base64url, as every way in but JSON-RPC has it."""

    payload_base64: str = ""  # Not used.
    payload: bytes


class PushedData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of the recipient's mail: the push, with its payload or the hash of the blob that holds it."""

    topic: str
    content_type: str
    idempotency_key: str
    payload_base64: str | None = None
    blob: str | None = None  # The SHA-256 of a payload that is too large for a mail.
    size: int  # Of the payload, in bytes.
    session_id: str | None = None
    reply_to: str | None = None


class Pushed(msgspec.Struct, frozen=True):
    """The answer to a push. `durability` holds now; receipts refer to the mail by its `id`."""

    accepted: bool
    deduped: bool
    durability: Durability
    id: str


class NewDataPush(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A push of `push_many`, as the arguments of `push`.

    A handle encodes a payload that is not bytes, and fills in the content type and the idempotency key.
    """

    to: str
    topic: str
    payload: Any
    content_type: str | None = None
    idempotency_key: str | None = None
    session_id: str | None = None
    reply_to: str | None = None


class PushItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One push of a batch."""

    to: str
    topic: str
    content_type: str
    payload: bytes
    idempotency_key: str
    session_id: str | None = None
    reply_to: str | None = None


class PushOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one push of a batch: the answer, or the `code` and `detail` of the error."""

    pushed: Pushed | None = None
    code: str | None = None
    detail: str | None = None
    retry_after_seconds: float | None = None  # How long to wait before the push is repeated, if that is known.


class PushOutcomes(msgspec.Struct, frozen=True):
    """The outcome of each push, in order."""

    outcomes: list[PushOutcome]


class DataPush(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An accepted push, as listeners and watches get it. `id` is that of the mail that stores it."""

    id: str
    sender: str  # An address, `agent@universe`.
    to: str  # An address.
    topic: str
    content_type: str
    payload: bytes
    idempotency_key: str
    session_id: str | None = None
    reply_to: str | None = None
    received_ms: int
    position: str = ""  # Where a watch continues after this push; only watches set it.

    def json(self) -> Any:
        """The payload, from JSON.

        Raises:
            InvalidValue: it is not JSON, or nested too deep.
        """
        return decode_json(self.payload)


class SeenPushes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pushes in the order in which they were accepted, and the position after them."""

    position: str
    pushes: list[DataPush]
    missed: int = 0  # Pushes to the universe that were forgotten before this watch has asked for them.
    restarted: bool = False  # The given position is of an earlier epoch: an unknown number of pushes may be missing.


class IngressStats(msgspec.Struct, frozen=True):
    """What the ingress of one process holds now, and has counted since its start."""

    depth: int  # Accepted pushes that wait to be stored.
    lag_seconds: float  # How long the oldest of them has waited.
    accepted: int
    duplicates: int
    refused: dict[str, int]  # Pushes that were not accepted, by error code.
    lost: dict[str, int]  # Accepted pushes that were not stored, by error code.
    pushes_per_minute: int  # The rate limit of each sender; 0: no limit.
    watches: int  # Watches that wait for pushes now.


class Push(Request[Pushed], frozen=True, tag="ingress.push"):
    """Accept a push; with `durability="synced"`, answer once it is stored.

    A server sets the sender to the name of the caller's token, and refuses another one.
    """

    operation = Operation(
        repeatable=_ONCE,
        permission="mail:send",
        http=(Route("POST", "/v1/pushes", "Push data to an agent."),),
    )

    to: str
    topic: Annotated[str, Meta(min_length=1, max_length=limits.PUSH_TEXT_CHARACTERS_MAX)]
    content_type: Annotated[str, Meta(min_length=1, max_length=limits.PUSH_TEXT_CHARACTERS_MAX)]
    payload: bytes
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=limits.PUSH_TEXT_CHARACTERS_MAX)]
    durability: Durability = ACCEPTED
    sender: str | None = None
    session_id: Annotated[str, Meta(max_length=limits.PUSH_TEXT_CHARACTERS_MAX)] | None = None
    reply_to: Annotated[str, Meta(max_length=limits.PUSH_TEXT_CHARACTERS_MAX)] | None = None
    universe: Name = UNIVERSE


class PushMany(Request[PushOutcomes], frozen=True, tag="ingress.batch"):
    """Accept pushes of one sender, each with an outcome of its own; synced ones are stored together."""

    operation = Operation(
        repeatable=_ONCE,
        permission="mail:send",
        http=(
            Route("POST", "/v1/pushes/batch", "Push data to agents in one request; each push has a result of its own."),
        ),
    )

    pushes: Annotated[list[PushItem], batch_of(limits.PUSH_BATCH_MAX, "pushes")]
    durability: Durability = ACCEPTED
    sender: str | None = None
    universe: Name = UNIVERSE


class WatchPushes(Request[SeenPushes], frozen=True, tag="ingress.watch"):
    """At most `limit` pushes after the position `after`; waits up to `wait_seconds` for the first one.

    Without `after`, the answer is the current position, at once. Only pushes that this process has accepted are seen.
    """

    operation = Operation(
        reads=True,
        permission="mail:read",
        http=(Route("GET", "/v1/pushes", "Read the pushes that were accepted after a position, in order."),),
    )

    to: str | None = None  # Only pushes to this agent.
    topic: Annotated[str, Meta(max_length=limits.PUSH_TEXT_CHARACTERS_MAX)] | None = (
        None  # Only pushes with exactly this topic.
    )
    after: Annotated[str, worded("the `next` of the page before", pattern="^[0-9a-f]{16}-[0-9]{1,15}$")] | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.PUSH_WATCH_MAX)] = 100
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.PUSH_WATCH_SECONDS_MAX)] = 0.0
    universe: Name = UNIVERSE


class ShowIngress(Request[IngressStats], frozen=True, tag="ingress.stats"):
    """The statistics of the ingress of this process."""

    operation = Operation(
        reads=True,
        permission="ingress:stats",
        http=(Route("GET", "/v1/pushes/stats", "Show what the ingress holds, and its counts since the start."),),
    )
