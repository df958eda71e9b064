"""Flow control of subscriptions: at most `credit` messages are unsettled at a time.

A subscription sends in one direction only; its consumer settles messages with other requests. A settlement through this
server's HTTP API returns the credit at once. Any other settlement (a stream, another server) returns it when the
message's lease would have expired.
"""

import asyncio
from typing import Any

from fastness.clock import SystemClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.queues import (
    AckMessages,
    ChangeVisibility,
    ExtendMessages,
    MessageLease,
    NackMessages,
    Outcomes,
    RejectMessages,
)
from fastness.wire.requests import Request


class CreditWindow:
    """The unsettled messages of one subscription."""

    def __init__(self, flow_control: "FlowControl", credit: int) -> None:
        self._flow_control = flow_control
        self._credit = credit
        self._expires_ms: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._clock = SystemClock()

    def available(self) -> int:
        """How many more messages may be delivered now."""
        now_ms = self._clock.now_ms()
        for lease_id in [each for each, expires_ms in self._expires_ms.items() if expires_ms <= now_ms]:
            self.settle(lease_id)
        return self._credit - len(self._expires_ms)

    def hold(self, lease_id: str, expires_ms: int) -> None:
        """Record that a message was delivered, or that its lease was extended."""
        self._expires_ms[lease_id] = expires_ms
        self._flow_control.windows[lease_id] = self

    def settle(self, lease_id: str) -> None:
        """Record that the consumer no longer holds a message."""
        self._expires_ms.pop(lease_id, None)
        self._flow_control.windows.pop(lease_id, None)
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Return when a message is settled, a lease expires, or `seconds` have passed."""
        left = (min(self._expires_ms.values(), default=0) - self._clock.now_ms()) / 1_000
        self._changed.clear()
        try:
            async with asyncio.timeout(max(min(seconds, left), 0.01)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """Stop tracking; the consumer holds its messages until their leases expire."""
        for lease_id in self._expires_ms:
            self._flow_control.windows.pop(lease_id, None)
        self._expires_ms.clear()


class FlowControl:
    """The credit windows of all subscriptions of a server."""

    def __init__(self) -> None:
        self.windows: dict[str, CreditWindow] = {}

    def open(self, credit: int) -> CreditWindow:
        """A window of `credit` messages."""
        return CreditWindow(self, credit)

    def observe(self, request: Request[Any], answer: Any) -> None:
        """Update the windows after a request that may have settled messages or extended leases."""
        if not self.windows:
            return
        if isinstance(request, CommitAtomic):
            for step, each in zip(request.operations, answer.answers, strict=True):
                self.observe(step, each)
        elif isinstance(request, AckMessages | NackMessages | RejectMessages | ExtendMessages | ChangeVisibility):
            self._update(request.leases, answer)

    def _update(self, leases: list[MessageLease], answer: Outcomes) -> None:
        for lease, outcome in zip(leases, answer.outcomes, strict=True):
            window = self.windows.get(lease.lease_id)
            if window is None:
                continue
            if outcome.expires_ms:
                window.hold(lease.lease_id, outcome.expires_ms)
            else:  # If the lease was refused, the consumer does not hold it either.
                window.settle(lease.lease_id)
