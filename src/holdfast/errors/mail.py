"""Mail and mailboxes."""

from holdfast.errors.families import Busy, Conflict, Corrupt, NotAllowed, NotFound, Retry


class QueueFull(Busy):
    """The mailbox holds as many mails as it may; nothing was stored."""

    code = "queue_full"


class RateLimited(Busy):
    """The sender has sent as much as it may in this time; nothing was stored."""

    code = "rate_limited"


class SenderBlocked(NotAllowed):
    """The recipient does not want mail of this sender; nothing was stored."""

    code = "sender_blocked"


class SenderMismatch(NotAllowed):
    """A mail says that it is from somebody else than whoever is connected; nothing was stored."""

    code = "sender_mismatch"


class MailNotFound(NotFound):
    """A mail that was to be confirmed as part of a commit is gone: confirmed before, or its time is over."""

    code = "mail_not_found"


class MailboxTaken(Conflict):
    """Somebody else reads this mailbox now: whoever joined it last does."""

    code = "mailbox_taken"
    retry = Retry.NEVER


class AgentExists(Conflict):
    """The agent is registered with another key."""

    code = "agent_exists"
    retry = Retry.NEVER


class SealBroken(Corrupt):
    """A sealed mail was not sealed by its sender for this key, or was changed on its way."""

    code = "seal_broken"
