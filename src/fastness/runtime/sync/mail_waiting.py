"""Generated from runtime/mail_waiting.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable
from typing import TypeVar

from fastness.clock import Clock
from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.tiers import Tier
from fastness.wire.mail import MailReceipts, Mails

Found = TypeVar("Found", Mails, MailReceipts)


class MailWaiter:
    """Reads mail and receipts, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._waits = CommitWaits(database, clock, options)

    def read(
        self,
        address: Address,
        *,
        after: int,
        limit: int,
        wait_ms: int,
        session: str | None,
        peek: bool,
        bytes_max: int | None = None,
        tier: Tier,
    ) -> Mails:
        """At least one mail, unless `wait_ms` pass without any.

        Raises:
            MailboxTaken: another session has become the reader of this mailbox.
        """

        def read_once() -> Mails:
            if peek:
                found = self._database.read(mailboxes.peek, address, after=after, limit=limit, tier=tier)
                return Mails(found)
            found, live_from = self._database.transact(
                mailboxes.deliver, address, after=after, limit=limit, session=session, bytes_max=bytes_max, tier=tier
            )
            return Mails(found, live_from)

        return self._wait(address, wait_ms, read_once)

    def receipts(self, address: Address, *, after: int, limit: int, wait_ms: int, tier: Tier) -> MailReceipts:
        """At least one receipt, unless `wait_ms` pass without any."""

        def read_once() -> MailReceipts:
            return MailReceipts(self._database.read(mailboxes.receipts, address, after=after, limit=limit, tier=tier))

        return self._wait(address, wait_ms, read_once)

    def _wait(self, address: Address, wait_ms: int, read_once: Callable[[], Found]) -> Found:
        """The first result of `read_once` that is not empty, or its last one."""
        found = read_once()
        if _has_items(found) or not wait_ms:
            return found
        prefix = mailboxes.keys_of(address).prefix
        with self._waits.open(prefix, until_ms=self._waits.now_ms() + wait_ms) as wait:
            while True:
                found = read_once()
                if _has_items(found) or wait.is_over:
                    return found
                wait.pause()


def _has_items(found: Mails | MailReceipts) -> bool:
    return bool(found.mails if isinstance(found, Mails) else found.receipts)
