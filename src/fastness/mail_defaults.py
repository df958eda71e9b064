"""The mail policy of universes that have none of their own."""

from typing import Final

import msgspec

from fastness.limits import MAIL_TTL_SECONDS, MAILBOX_MAILS_MAX


class MailDefaults(msgspec.Struct, frozen=True):
    """What applies to mailboxes until their universe sets a policy. Every transaction of a process has it."""

    pending_max: int = MAILBOX_MAILS_MAX
    ttl_seconds: float = MAIL_TTL_SECONDS


MAIL_DEFAULTS: Final = MailDefaults()
