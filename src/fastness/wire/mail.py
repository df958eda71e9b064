"""Mail: envelopes from one agent to another, and their receipts."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import SealBroken
from fastness.limits import MAIL_TTL_SECONDS, MAILBOX_MAILS_MAX
from fastness.names import UNIVERSE
from fastness.tiers import Tier
from fastness.wire.fields import CorrelationId, Limit, MailId, Name, NameAfter, batch_of
from fastness.wire.json_values import decode_json
from fastness.wire.requests import Committed, Operation, Request, Route

BYTES = "application/octet-stream"

STORED = "stored"
DELIVERED = "delivered"
CONFIRMED = "confirmed"


class NewMail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mail to send. The sender may choose the id; a mail whose id is unconfirmed is not stored again."""

    to: str
    body: bytes = b""
    id: str | None = None
    content_type: str = BYTES
    correlation_id: CorrelationId | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mail in a mailbox. `sequence` is its unique position there.

    A mailbox that was opened with the agent's key sets the last three fields; those that a server sends are ignored.

    `sealed_by` is the address whose key sealed the mail for this agent under this id; None if that was not proven.
    `sealed_ms` is the time of sealing by the sender's clock. `seal_error` says why the mail must not be trusted: it
    could not be decrypted, and its body is still sealed, or it is not sealed although the mailbox requires that.
    """

    sequence: int
    id: str
    sender: str
    to: str
    body: bytes
    content_type: str
    correlation_id: str
    sent_ms: int
    expires_ms: int
    seal_error: str | None = None
    sealed_by: str | None = None
    sealed_ms: int | None = None

    def json(self) -> Any:
        """The body, from JSON.

        Raises:
            SealBroken: the mail has a `seal_error`.
            InvalidValue: the body is not JSON, or nested too deep.
        """
        if self.seal_error is not None:
            raise SealBroken(self.seal_error)
        return decode_json(self.body)


class SentMail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome for one mail of a batch: stored, or the `code` and `detail` of the error."""

    id: str
    durability: Tier = Tier.CRITICAL
    duplicate: bool = False  # A mail with this id was stored before.
    code: str | None = None
    detail: str | None = None


class SentMails(msgspec.Struct, frozen=True):
    """The outcome of each mail, in order."""

    mails: list[SentMail]


class Mails(msgspec.Struct, frozen=True):
    """Mail in the order of storing, and from which sequence on mail is live."""

    mails: list[Envelope]
    live_from: int | None = None  # Mail from this sequence on arrived while the reader was subscribed.


class Joined(msgspec.Struct, frozen=True):
    """The caller is the mailbox's only reader: its mails that can be delivered, and the last receipt it has seen."""

    pending: int
    receipts_seen: int


class MailCount(msgspec.Struct, frozen=True):
    """The number of mails that can be delivered and its limit, the time of the oldest, and whether a reader is there.

    Mail that is confirmed or has expired does not count.
    """

    pending: int
    pending_max: int
    oldest_ms: int | None
    joined: bool


class MailReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state change of a sent mail. `sequence` is where to resume reading."""

    sequence: int
    id: str
    to: str
    state: str  # stored, delivered or confirmed.
    at_ms: int
    was_stored: bool = False  # If confirmed: the mail waited because no reader was subscribed when it arrived.


class MailReceipts(msgspec.Struct, frozen=True):
    """Receipts in order."""

    receipts: list[MailReceipt]


class MailboxSize(msgspec.Struct, frozen=True):
    """A mailbox in a list: its mails that can be delivered, the time of the oldest, and whether a reader is there."""

    agent: str
    pending: int
    oldest_ms: int | None = None
    joined: bool = False


class Mailboxes(msgspec.Struct, frozen=True):
    """Mailboxes in the order of their names."""

    mailboxes: list[MailboxSize]


class Addresses(msgspec.Struct, frozen=True):
    """Addresses in order."""

    addresses: list[str]


class MailPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of all mailboxes of a universe. A server may have other defaults, for universes without a policy."""

    pending_max: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.MAILBOX_MAILS_LIMIT_MAX,
            description="The maximum number of unconfirmed mails of a mailbox; more are refused.",
        ),
    ] = MAILBOX_MAILS_MAX
    ttl_seconds: Annotated[
        float, Meta(ge=1, le=limits.MAIL_TTL_SECONDS_MAX, description="Remove mail after this time.")
    ] = MAIL_TTL_SECONDS


class Confirmed(msgspec.Struct, frozen=True):
    """How many of the mails still existed."""

    count: int


class SendMail(Request[SentMails], frozen=True, tag="mail.send"):
    """Store mails of `sender`. A refused mail does not affect the others."""

    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/mail/send", "Send mails of one sender; each has a result of its own."),),
    )

    sender: str
    mails: Annotated[list[NewMail], batch_of(limits.MAIL_BATCH_MAX, "mails")]
    universe: Name = UNIVERSE


class JoinMailbox(Request[Joined], frozen=True, tag="mail.join"):
    """Become the mailbox's only reader, as `session`; an earlier reader is refused from now on."""

    operation = Operation(http=(Route("POST", "/v1/mailboxes/{agent}/join", "Become the only reader of the mailbox."),))

    agent: str
    session: MailId
    universe: Name = UNIVERSE


class LeaveMailbox(Request[Committed], frozen=True, tag="mail.leave"):
    """Stop being the mailbox's reader; no effect if another session has replaced this one."""

    operation = Operation(http=(Route("POST", "/v1/mailboxes/{agent}/leave", "Stop being the reader of the mailbox."),))

    agent: str
    session: MailId
    universe: Name = UNIVERSE


class ReadMail(Request[Mails], frozen=True, tag="mail.read"):
    """At most `limit` mails after the sequence `after`, in order; waits up to `wait_seconds` for the first one.

    Reading removes nothing. With `session`, it fails once another session reads the mailbox.
    """

    operation = Operation(
        repeatable="reading removes nothing, and the sender gets one delivery receipt",
        http=(
            Route("GET", "/v1/mailboxes/{agent}/mail", "Read the mails after the sequence number `after`, in order."),
        ),
    )

    agent: str
    after: int = -1
    limit: Annotated[int, Meta(ge=1, le=limits.MAIL_BATCH_MAX)] = 50
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.MAIL_WAIT_SECONDS_MAX)] = 0.0
    session: MailId | None = None
    peek: bool = False  # Send no delivery receipts.
    universe: Name = UNIVERSE
    bytes_max: int | None = None  # Stop after this many bytes of bodies.


class ConfirmMail(Request[Confirmed], frozen=True, tag="mail.confirm"):
    """Confirm mails: they are removed, and their senders get receipts."""

    operation = Operation(
        atomic=True,
        http=(
            Route(
                "POST",
                "/v1/mailboxes/{agent}/confirm",
                "Confirm mails: remove them, and send receipts.",
            ),
        ),
    )

    agent: str
    ids: Annotated[list[MailId], batch_of(limits.MAIL_BATCH_MAX, "mails")]
    universe: Name = UNIVERSE


class CountMail(Request[MailCount], frozen=True, tag="mail.count"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(
            Route(
                "GET",
                "/v1/mailboxes/{agent}",
                "Describe a mailbox: the number of waiting mails, the age of the oldest, and its reader.",
            ),
        ),
    )

    agent: str
    universe: Name = UNIVERSE


class ReadReceipts(Request[MailReceipts], frozen=True, tag="mail.receipts"):
    """At most `limit` receipts for mail that `agent` has sent, after `after`; waits up to `wait_seconds`."""

    operation = Operation(
        reads=True,
        http=(
            Route(
                "GET", "/v1/mailboxes/{agent}/receipts", "Read the delivery receipts of mail that the agent has sent."
            ),
        ),
    )

    agent: str
    after: int = -1
    limit: Limit = 100
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.MAIL_WAIT_SECONDS_MAX)] = 0.0
    universe: Name = UNIVERSE


class SeeReceipts(Request[Committed], frozen=True, tag="mail.see"):
    """Mark receipts up to `sequence` as seen; `JoinMailbox` returns it."""

    operation = Operation(
        http=(Route("POST", "/v1/mailboxes/{agent}/receipts", "Mark receipts as seen up to a sequence number."),)
    )

    agent: str
    sequence: int
    universe: Name = UNIVERSE


class BlockSender(Request[Committed], frozen=True, tag="mail.block"):
    """Refuse mail from `sender` to `agent`, or accept it again with `blocked=False`."""

    operation = Operation(http=(Route("POST", "/v1/mailboxes/{agent}/blocks", "Block or unblock a sender."),))

    agent: str
    sender: str
    blocked: bool = True
    universe: Name = UNIVERSE


class ListBlocks(Request[Addresses], frozen=True, tag="mail.blocks"):
    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/mailboxes/{agent}/blocks", "List the blocked senders."),)
    )

    agent: str
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=limits.BLOCKS_MAX)] = 100
    universe: Name = UNIVERSE


class ListMailboxes(Request[Mailboxes], frozen=True, tag="mail.list"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/mailboxes", "List the mailboxes, with the number of waiting mails in each."),),
    )

    after: NameAfter = ""
    limit: Annotated[int, Meta(ge=1, le=limits.MAIL_BATCH_MAX)] = 100
    universe: Name = UNIVERSE


class GetMailPolicy(Request[MailPolicy], frozen=True, tag="mail.policy"):
    operation = Operation(
        reads=True,
        http=(
            Route(
                "GET",
                "/v1/mail/policy",
                "Read the mail policy: the capacity of mailboxes, and how long they keep mail.",
            ),
        ),
    )

    universe: Name = UNIVERSE


class SetMailPolicy(Request[MailPolicy], frozen=True, tag="mail.set_policy"):
    operation = Operation(
        audited=True, http=(Route("PUT", "/v1/mail/policy", "Set the mail policy.", body_field="policy"),)
    )

    policy: MailPolicy
    universe: Name = UNIVERSE
