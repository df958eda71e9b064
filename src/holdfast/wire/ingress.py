"""Pushes: what one agent hands to another by `agent.data.push`, and what it hears back.

NewPush ──► accepted by the ingress ──► PushedData, the body of a mail in the recipient's mailbox
"""

from typing import Final, Literal

import msgspec

PUSH_MEDIA: Final = "application/vnd.holdfast.push+json"  # The content type of a mail whose body is `PushedData`.
CHAT_TOPIC: Final = "chat.message"  # Its pushes name a session.

Durability = Literal["accepted", "synced"]
ACCEPTED: Final = "accepted"  # By the queue in memory; lost with the process until the next flush.
SYNCED: Final = "synced"  # Committed to the mailbox and synced to disk.


class NewPush(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of `agent.data.push`."""

    topic: str
    content_type: str
    payload_base64: str  # base64url without padding.
    idempotency_key: str
    session_id: str | None = None
    reply_to: str | None = None
    to: str | None = None  # An address; the agent that the server's settings name if nothing is said.
    sender: str | None = msgspec.field(name="from", default=None)  # Believed only where nobody is authenticated.
    durability: Durability = ACCEPTED  # What to wait for.


class PushedData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the recipient finds in its mail: the push, with its payload or the hash of the blob that has it."""

    topic: str
    content_type: str
    idempotency_key: str
    payload_base64: str | None = None
    blob: str | None = None  # The SHA-256 of a payload that is too large for a mail.
    size: int  # Of the payload, in bytes.
    session_id: str | None = None
    reply_to: str | None = None


class Pushed(msgspec.Struct, frozen=True):
    """What becomes of a push. `durability` is the promise that holds now; receipts tell of the mail by its `id`."""

    accepted: bool
    deduped: bool
    durability: Durability
    id: str
