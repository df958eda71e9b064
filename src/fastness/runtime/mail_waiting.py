"""Waiting for mail: a reader is woken by the commit that stores mail for it.

    read ──► not empty ──► returned
      ▲  └─► empty: wait for a commit in this agent's mailbox ─┐
      └────────────────────────────────────────────────────────┘

The watch is opened before the read, so what is stored between the read and the wait is not missed. Where several nodes
share a PostgreSQL database, the watch fires for the commits of all of them, and a poll every few seconds covers lost
notifications.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastness.clock import Clock
from fastness.kv import Database, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.wire.mail import MailReceipts, Mails, ReadMail, ReadReceipts

Found = TypeVar("Found", Mails, MailReceipts)


class AsyncMailWaiter:
    """Reads mail and receipts, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._waits = AsyncCommitWaits(database, clock, options)

    async def read(self, address: Address, request: ReadMail, *, wait_ms: int) -> Mails:
        """At least one mail, unless `wait_ms` pass without any.

        Raises:
            MailboxTaken: another session has become the reader of this mailbox.
        """

        async def read_once() -> Mails:
            if request.peek:
                peeked: Mails = await self._database.read_async(read_mail, address, request, tier=request.tier)
                return peeked
            return await self._database.transact_async(read_mail, address, request, tier=request.tier)

        return await self._wait(address, wait_ms, read_once)

    async def receipts(self, address: Address, request: ReadReceipts, *, wait_ms: int) -> MailReceipts:
        """At least one receipt, unless `wait_ms` pass without any."""

        async def read_once() -> MailReceipts:
            found: MailReceipts = await self._database.read_async(read_receipts, address, request, tier=request.tier)
            return found

        return await self._wait(address, wait_ms, read_once)

    async def _wait(self, address: Address, wait_ms: int, read_once: Callable[[], Awaitable[Found]]) -> Found:
        """The first result of `read_once` that is not empty, or its last one."""
        found = await read_once()
        if _has_items(found) or not wait_ms:
            return found
        prefix = mailboxes.keys_of(address).prefix
        with self._waits.open(prefix, until_ms=self._waits.now_ms() + wait_ms) as wait:
            while True:
                found = await read_once()
                if _has_items(found) or wait.is_over:
                    return found
                await wait.pause()


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
