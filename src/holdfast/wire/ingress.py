"""Pushes: data that one agent sends to another with `agent.data.push`, and the answer.

NewPush ──► accepted by the ingress ──► PushedData, the body of a mail in the recipient's mailbox
"""

from typing import Final, Literal

import msgspec

PUSH_MEDIA: Final = "application/vnd.holdfast.push+json"  # The content type of a mail whose body is `PushedData`.
CHAT_TOPIC: Final = "chat.message"  # Its pushes name a session.

Durability = Literal["accepted", "synced"]
ACCEPTED: Final = "accepted"  # In the memory buffer; lost if the process dies before the next flush.
SYNCED: Final = "synced"  # Committed to the mailbox and synced to disk.


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
