"""Generated from runtime/mail_waiting.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable
from typing import TypeVar

from fastness.clock import Clock
from fastness.kv import Database, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.wire.mail import MailReceipts, Mails, ReadMail, ReadReceipts

Found = TypeVar("Found", Mails, MailReceipts)


class MailWaiter:
    """Reads mail and receipts, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._waits = CommitWaits(database, clock, options)

    def read(self, address: Address, request: ReadMail, *, wait_ms: int) -> Mails:
        """At least one mail, unless `wait_ms` pass without any.

        Raises:
            MailboxTaken: another session has become the reader of this mailbox.
        """

        def read_once() -> Mails:
            if request.peek:
                peeked: Mails = self._database.read(read_mail, address, request, tier=request.tier)
                return peeked
            return self._database.transact(read_mail, address, request, tier=request.tier)

        return self._wait(address, wait_ms, read_once)

    def receipts(self, address: Address, request: ReadReceipts, *, wait_ms: int) -> MailReceipts:
        """At least one receipt, unless `wait_ms` pass without any."""

        def read_once() -> MailReceipts:
            found: MailReceipts = self._database.read(read_receipts, address, request, tier=request.tier)
            return found

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


def read_mail(tx: Transaction, address: Address, request: ReadMail) -> Mails:
    """The mails that are in the mailbox now."""
    after, limit = request.after, request.limit
    if request.peek:
        return Mails(mailboxes.peek(tx, address, after=after, limit=limit))
    return Mails(
        *mailboxes.deliver(tx, address, after=after, limit=limit, session=request.session, bytes_max=request.bytes_max)
    )


def read_receipts(tx: Transaction, address: Address, request: ReadReceipts) -> MailReceipts:
    """The receipts that the agent has now."""
    return MailReceipts(mailboxes.receipts(tx, address, after=request.after, limit=request.limit))
