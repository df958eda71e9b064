"""Credits: how many messages of a subscription may be unsettled, and how it hears that one was settled.

A subscription speaks in one direction only; its consumer settles messages by other requests. Whatever settles a message
through the HTTP door gives its credit back at once. Otherwise (a stream, another server) it comes back when the lease
would have ended.
"""

import asyncio
import time
from typing import Any

from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.queues import AckMessages, ExtendMessages, MessageLease, NackMessages, Outcomes, RejectMessages


class Account:
    """The unsettled messages of one subscription."""

    def __init__(self, credits: "Credits", credit: int) -> None:
        self._credits = credits
        self._credit = credit
        self._expires_ms: dict[str, int] = {}
        self._changed = asyncio.Event()

    def free(self) -> int:
        """How many more messages may be delivered now."""
        now_ms = time.time() * 1_000
        for lease_id in [each for each, expires_ms in self._expires_ms.items() if expires_ms <= now_ms]:
            self.settle(lease_id)
        return self._credit - len(self._expires_ms)

    def hold(self, lease_id: str, expires_ms: int) -> None:
        """A message was delivered, or its lease extended."""
        self._expires_ms[lease_id] = expires_ms
        self._credits.holders[lease_id] = self

    def settle(self, lease_id: str) -> None:
        """A message is not this consumer's any more."""
        self._expires_ms.pop(lease_id, None)
        self._credits.holders.pop(lease_id, None)
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Return when a message was settled, a lease ended, or `seconds` have passed."""
        left = min(self._expires_ms.values(), default=0) / 1_000 - time.time()
        self._changed.clear()
        try:
            async with asyncio.timeout(max(min(seconds, left), 0.01)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """Forget everything; the messages stay their consumer's until their leases end."""
        for lease_id in self._expires_ms:
            self._credits.holders.pop(lease_id, None)
        self._expires_ms.clear()


class Credits:
    """The accounts of all subscriptions of a server."""

    def __init__(self) -> None:
        self.holders: dict[str, Account] = {}

    def open(self, credit: int) -> Account:
        """An account of `credit` messages."""
        return Account(self, credit)

    def saw(self, request: Any, answer: Any) -> None:
        """A request was carried out: perhaps it settled messages, or extended their leases."""
        if not self.holders:
            return
        if isinstance(request, CommitAtomic):
            for step, each in zip(request.operations, answer.answers, strict=True):
                self.saw(step, each)
        elif isinstance(request, AckMessages | NackMessages | RejectMessages | ExtendMessages):
            self._settled(request.leases, answer, extended=isinstance(request, ExtendMessages))

    def _settled(self, leases: list[MessageLease], answer: Outcomes, *, extended: bool) -> None:
        for lease, outcome in zip(leases, answer.outcomes, strict=True):
            account = self.holders.get(lease.lease_id)
            if account is None:
                continue
            if extended and outcome.code is None:
                account.hold(lease.lease_id, outcome.expires_ms)
            else:  # A lease that was refused is not this consumer's either.
                account.settle(lease.lease_id)
