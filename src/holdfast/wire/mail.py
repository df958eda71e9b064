"""Mail: envelopes from one agent to another, and what becomes of them."""

from typing import Any

import msgspec

from holdfast.limits import MAIL_TTL_SECONDS, MAILBOX_MAILS_MAX
from holdfast.names import UNIVERSE
from holdfast.tiers import Tier
from holdfast.wire.requests import Committed, Operation, Request

BYTES = "application/octet-stream"

STORED = "stored"
DELIVERED = "delivered"
CONFIRMED = "confirmed"


class NewMail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mail as its sender writes it. The id is the sender's to choose; one that waits already is not stored again."""

    to: str
    body: bytes = b""
    id: str | None = None
    content_type: str = BYTES
    correlation_id: str | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mail in somebody's mailbox. `sequence` is its place there, which no other one ever had."""

    sequence: int
    id: str
    sender: str
    to: str
    body: bytes
    content_type: str
    correlation_id: str
    sent_ms: int
    expires_ms: int

    def json(self) -> Any:
        """The body, from JSON."""
        return msgspec.json.decode(self.body)


class SentMail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one mail of a batch: it is stored, or `code` and `detail` say why not."""

    id: str
    durability: Tier = Tier.CRITICAL
    duplicate: bool = False  # It was stored before, under this id.
    code: str | None = None
    detail: str | None = None


class SentMails(msgspec.Struct, frozen=True):
    """The outcome of each mail, in order."""

    mails: list[SentMail]


class Mails(msgspec.Struct, frozen=True):
    """Mail in the order in which it was stored, and whether what follows will be live."""

    mails: list[Envelope]
    live_from: int | None = None  # Mail from this sequence on came while its reader was there for it.


class Joined(msgspec.Struct, frozen=True):
    """A reader has the mailbox for itself: how much mail waits for it, and which receipts it has seen."""

    pending: int
    receipts_seen: int


class MailCount(msgspec.Struct, frozen=True):
    """How many mails wait for their confirmation, since when the oldest of them does, and whether anybody reads."""

    pending: int
    pending_max: int
    oldest_ms: int | None
    joined: bool


class MailReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a mail which somebody sent. `sequence` is where to go on from."""

    sequence: int
    id: str
    to: str
    state: str  # stored, delivered or confirmed.
    at_ms: int
    was_stored: bool = False  # Of a confirmed one: it waited, because nobody was there for it when it came.


class MailReceipts(msgspec.Struct, frozen=True):
    """Receipts in order."""

    receipts: list[MailReceipt]


class MailboxSize(msgspec.Struct, frozen=True):
    """A mailbox in a list of them: how many mails wait, since when the oldest does, and whether anybody reads."""

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
    """What holds for all mailboxes of a universe."""

    pending_max: int = MAILBOX_MAILS_MAX  # Mails that one mailbox holds; the next one is refused.
    ttl_seconds: float = MAIL_TTL_SECONDS


class Confirmed(msgspec.Struct, frozen=True):
    """How many of the mails were still there."""

    count: int


class SendMail(Request[SentMails], frozen=True, tag="mail.send"):
    """Store mails of `sender`, each by itself: one that is refused does not stop the others."""

    operation = Operation(atomic=True)

    sender: str
    mails: list[NewMail]
    universe: str = UNIVERSE


class JoinMailbox(Request[Joined], frozen=True, tag="mail.join"):
    """Read the mailbox as `session` from now on. Whoever did before is refused from now on."""

    agent: str
    session: str
    universe: str = UNIVERSE


class LeaveMailbox(Request[Committed], frozen=True, tag="mail.leave"):
    """Stop being the mailbox's reader; of no effect if somebody else is by now."""

    agent: str
    session: str
    universe: str = UNIVERSE


class ReadMail(Request[Mails], frozen=True, tag="mail.read"):
    """At most `limit` mails behind the sequence `after`, in order; waits for the first one if asked to.

    Reading removes nothing. With `session` it is that of the mailbox's reader, and fails once there is another one.
    """

    operation = Operation(repeatable="reading removes nothing, and the sender gets one delivery receipt")

    agent: str
    after: int = -1
    limit: int = 50
    wait_seconds: float = 0.0
    session: str | None = None
    peek: bool = False  # Nobody is told that the mail was delivered.
    universe: str = UNIVERSE
    bytes_max: int | None = None  # No more once their bodies have so many bytes.


class ConfirmMail(Request[Confirmed], frozen=True, tag="mail.confirm"):
    """Mails have arrived for good: they are removed, and their senders are told."""

    operation = Operation(atomic=True)

    agent: str
    ids: list[str]
    universe: str = UNIVERSE


class CountMail(Request[MailCount], frozen=True, tag="mail.count"):
    operation = Operation(reads=True)

    agent: str
    universe: str = UNIVERSE


class ReadReceipts(Request[MailReceipts], frozen=True, tag="mail.receipts"):
    """At most `limit` receipts for what `agent` has sent, behind `after`; waits for the first one if asked to."""

    operation = Operation(reads=True)

    agent: str
    after: int = -1
    limit: int = 100
    wait_seconds: float = 0.0
    universe: str = UNIVERSE


class SeeReceipts(Request[Committed], frozen=True, tag="mail.see"):
    """Receipts up to `sequence` were seen: whoever joins the mailbox later is told so."""

    agent: str
    sequence: int
    universe: str = UNIVERSE


class BlockSender(Request[Committed], frozen=True, tag="mail.block"):
    """Refuse, or with `blocked=False` accept again, what `sender` sends to `agent`."""

    agent: str
    sender: str
    blocked: bool = True
    universe: str = UNIVERSE


class ListBlocks(Request[Addresses], frozen=True, tag="mail.blocks"):
    operation = Operation(reads=True)

    agent: str
    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class ListMailboxes(Request[Mailboxes], frozen=True, tag="mail.list"):
    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class GetMailPolicy(Request[MailPolicy], frozen=True, tag="mail.policy"):
    operation = Operation(reads=True)

    universe: str = UNIVERSE


class SetMailPolicy(Request[MailPolicy], frozen=True, tag="mail.set_policy"):
    policy: MailPolicy
    universe: str = UNIVERSE
