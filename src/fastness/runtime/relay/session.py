"""The state of one relay session: a connected agent's uncommitted requests, unsent frames and unconfirmed mail.

    frames of the agent ──► receive ──► sends, confirms ──┐                         ┌──► answers, mail ──► outgoing
                                                          ├── a batch, one commit ──┤
    the mailbox has more ──► wants_mail ──────────────────┘                         └──► in flight until confirmed

A session does not use sockets and is passive: the hub (`hub.py`) commits the work of all its sessions. Everything that
a session holds is bounded. An agent that does not confirm its mail, or does not read its frames, is sent nothing more;
its mail stays in its mailbox. Frames of an agent that does not read its answers are not received either.

`after` is the read position of this connection in its mailbox: mail in flight is not read again, and is not removed
until the agent confirms it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from fastness.clock import Clock
from fastness.errors import (
    BatchTooLarge,
    Busy,
    FastnessError,
    InvalidArgument,
    InvalidName,
    SenderMismatch,
    ShutdownDraining,
    rebuild,
)
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes.sending import check_id
from fastness.limits import (
    MAIL_BATCH_MAX,
    RELAY_CONFIRMS_MAX,
    RELAY_FLUSH_BYTES,
    RELAY_FLUSH_MAILS,
    RELAY_IN_FLIGHT_MAX,
    RELAY_SENDS_BYTES_MAX,
    RELAY_SENDS_MAX,
    RELAY_UNSENT_BYTES_MAX,
)
from fastness.runtime.rate_limits import RateLimiter
from fastness.wire.mail import CONFIRMED, ConfirmMail, MailReceipt, Mails, NewMail, SeeReceipts, SendMail, SentMail
from fastness.wire.relay import (
    Body,
    Confirm,
    DeliveryConfirm,
    Error,
    Frame,
    Mail,
    OfAgent,
    Ping,
    Pong,
    RateLimited,
    ReceiptsSeen,
    Send,
    Sent,
    split_address,
)
from fastness.wire.requests import Request

# The close codes of connections.
PROTOCOL_ERROR: Final = 1002
TOO_BIG: Final = 1009
STOPPING: Final = 1012
REPLACED: Final = 4001
NOT_ALLOWED: Final = 4003
TOO_SLOW: Final = 4008

_FRAME_BYTES: Final = 256  # The size that is counted for a frame without its body.

Authorize = Callable[[Request[Any]], None]  # Raises if the connected agent is not allowed to make this request.


class Hub(Protocol):
    """What a session needs from its hub."""

    clock: Clock
    rate_limiter: RateLimiter
    draining: bool

    def wake(self, session: "Session") -> None:
        """Queue a session that has work."""
        ...


class Session:
    """A connected agent. For use on its event loop only."""

    def __init__(self, hub: Hub, address: Address, id: str, authorize: Authorize | None) -> None:
        """Without `authorize` an agent may use its own mailbox without restriction."""
        self.address = address
        self.name = str(address)
        self.id = id
        self.ended: tuple[int, str] | None = None  # The close code, and why.
        self.is_busy = False  # It takes part in a batch.
        self.sends: list[NewMail] = []  # Not stored yet.
        self.sends_bytes = 0
        self.confirms: deque[str] = deque()  # Not committed yet.
        self.unsaved_receipts_seen: int | None = (
            None  # The agent has seen receipts up to this number; not committed yet.
        )
        self.in_flight: dict[str, str] = {}  # The senders of mails that were sent and not confirmed, by id.
        self.after = -1
        self.known_sequence = -1  # The highest sequence number that was reported for the mailbox.
        self.may_have_mail = True  # There may be mail that was not reported.
        self.must_recheck = False  # The mailbox may have another reader: read it to find out.
        self.expects_mail = False  # The current batch may store mail for it.
        self.receipts_seen = self.receipts_after = -1
        self.known_receipt = -1
        self.may_have_receipts = True
        self.expects_receipts = False
        self.retry_at_ms = 0  # Set after a failed read or confirm.
        self.received_ms = self.checked_ms = hub.clock.now_ms()
        self.pinged_ms: int | None = None
        self.write: Callable[[list[Frame]], bool] | None = (
            None  # Writes frames immediately; False if the connection is busy.
        )
        self._hub = hub
        self.authorize = authorize
        self._unsent: list[Frame] = []
        self._unsent_bytes = 0  # Including frames that are being written.
        self._writer: asyncio.Future[None] | None = None  # Resolved when there are frames to send.
        self._reader: asyncio.Future[None] | None = None  # Resolved when there is capacity.

    # Called by the connection.

    def receive(self, frames: Iterable[OfAgent | Error]) -> None:
        """Handle frames of the agent. A rejected frame is answered with an error, and does not affect the others."""
        self.received_ms, self.pinged_ms = self._hub.clock.now_ms(), None
        for frame in frames:
            try:
                self._handle(frame)
            except FastnessError as error:
                self.refuse(error, frame.message_id if isinstance(frame, Send) else None)
        self._wake()

    async def wait_for_capacity(self) -> None:
        """Return once more frames of the agent can be received."""
        while self.is_full and self.ended is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def outgoing(self) -> tuple[list[Frame], int] | None:
        """The next frames for the agent, and the size for `on_written`; None when the session has ended."""
        while not self._unsent:
            if self.ended is not None:
                return None
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        frames, self._unsent = self._unsent, []
        return frames, self._unsent_bytes

    def on_written(self, size: int) -> None:
        """Account for frames that were written to the connection."""
        self._unsent_bytes -= size
        _release(self._reader)
        self._wake()

    def end(self, code: int, reason: str, *last: Frame) -> None:
        """Accept nothing more; received requests are still committed."""
        if self.ended is None:
            self._unsent += last
            self.ended = (code, reason)
            _release(self._writer)
            _release(self._reader)

    # Called by the hub.

    def abort(self) -> None:
        """End after an unexpected error and drop uncommitted work. The agent reconnects and sends it again."""
        self.sends, self.sends_bytes, self.unsaved_receipts_seen = [], 0, None
        self.confirms.clear()
        self.must_recheck = False
        self.end(STOPPING, "failed")

    def push(self, *frames: Frame) -> None:
        """Send frames to the agent, after those that are queued."""
        if self.ended is not None:
            return
        for frame in frames:
            self._unsent_bytes += _FRAME_BYTES + (len(frame.body) * 4 // 3 if isinstance(frame, Mail) else 0)
        self._unsent += frames
        if not self.is_busy:  # Otherwise the end of the batch flushes all frames together.
            _release(self._writer)

    def flush(self) -> None:
        """Send the queued frames."""
        if not self._unsent:
            return
        is_idle = self._writer is not None and not self._writer.done()
        if is_idle and self.write is not None and self.write(self._unsent):
            self._unsent, self._unsent_bytes = [], 0  # The writer is idle, so nothing else was unsent.
            _release(self._reader)
        else:
            _release(self._writer)

    @property
    def has_work(self) -> bool:
        """Whether a batch has anything to do for this session."""
        if self.retry_at_ms and self.retry_at_ms > self._hub.clock.now_ms():
            return False
        return (
            bool(self.sends or self.confirms)
            or self.unsaved_receipts_seen is not None
            or self.must_recheck
            or self.wants_mail
            or self.wants_receipts
        )

    @property
    def accepts_mail(self) -> bool:
        """Whether more mail can be sent to the agent now."""
        return (
            self.ended is None
            and len(self.in_flight) < RELAY_IN_FLIGHT_MAX
            and self._unsent_bytes < RELAY_UNSENT_BYTES_MAX
        )

    @property
    def wants_mail(self) -> bool:
        """Whether there may be mail, and it can be sent to the agent."""
        return (self.may_have_mail or self.known_sequence > self.after) and self.accepts_mail

    @property
    def wants_receipts(self) -> bool:
        """Whether there may be receipts, and they can be sent to the agent."""
        return self.may_have_receipts and self.ended is None and self._unsent_bytes < RELAY_UNSENT_BYTES_MAX

    @property
    def read_limit(self) -> int:
        """How many mails to read; at least one, because a read also checks who reads the mailbox."""
        return max(min(RELAY_FLUSH_MAILS, RELAY_IN_FLIGHT_MAX - len(self.in_flight)), 1)

    @property
    def is_backlogged(self) -> bool:
        """Whether frames are not received because earlier ones are not committed yet; the agent is not at fault."""
        return (
            len(self.sends) >= RELAY_SENDS_MAX
            or self.sends_bytes >= RELAY_SENDS_BYTES_MAX
            or len(self.confirms) >= MAIL_BATCH_MAX
        )

    def next_writes(self) -> list[Request[Any]]:
        """Remove and return the oldest requests of the agent, as many as one commit should carry."""
        agent, universe = self.address.agent, self.address.universe
        requests: list[Request[Any]] = []
        if self.sends:
            now, self.sends = self.sends[:MAIL_BATCH_MAX], self.sends[MAIL_BATCH_MAX:]
            self.sends_bytes = sum(len(mail.body) for mail in self.sends)
            requests.append(SendMail(agent, now, universe))
        if self.confirms:
            ids = [self.confirms.popleft() for _ in range(min(len(self.confirms), MAIL_BATCH_MAX))]
            requests.append(ConfirmMail(agent, ids, universe))
        if self.unsaved_receipts_seen is not None:
            requests.append(SeeReceipts(agent, self.unsaved_receipts_seen, universe))
            self.unsaved_receipts_seen = None
        _release(self._reader)
        return requests

    def on_sent(self, outcomes: Sequence[SentMail]) -> None:
        """Report to the agent which of its mails were stored, and which were rejected."""
        for outcome in outcomes:
            if outcome.code is None:
                self.push(Sent(outcome.id, outcome.durability, outcome.duplicate))
            else:
                self.refuse(rebuild(outcome.code, outcome.detail or outcome.code), outcome.id)

    def on_send_failed(self, request: SendMail, error: FastnessError) -> None:
        """Report that these mails were not stored, or that it is unknown."""
        for mail in request.mails:
            self.refuse(error, mail.id)

    def refuse(self, error: FastnessError, message_id: str | None = None) -> None:
        """Send an error frame."""
        self.push(Error(error.code, str(error), error.retry, message_id))

    def on_confirmed(self, ids: Iterable[str]) -> None:
        """Remove confirmed mails from those in flight."""
        for id in ids:
            self.in_flight.pop(id, None)

    def deliver(self, found: Mails, *, limit: int, known_sequence: int) -> None:
        """Send the mails that a read returned; `known_sequence` is the value before the read."""
        live_from, size = found.live_from, 0
        frames: list[Frame] = []
        for mail in found.mails:
            self.in_flight[mail.id] = mail.sender
            size += len(mail.body)
            frames.append(
                Mail(
                    mail.sequence,
                    mail.id,
                    mail.sender,
                    mail.to,
                    Body(mail.body),
                    mail.content_type,
                    mail.correlation_id,
                    mail.sent_ms,
                    mail.expires_ms,
                    live_from is None or mail.sequence < live_from,
                )
            )
        if frames:
            self.after = found.mails[-1].sequence
            self.push(*frames)
        self.may_have_mail = len(frames) == limit or size >= RELAY_FLUSH_BYTES
        if not self.may_have_mail and self.known_sequence == known_sequence:
            self.known_sequence = self.after  # The reported mail has expired, or was confirmed elsewhere.

    def deliver_receipts(self, found: Sequence[MailReceipt], *, limit: int, known_receipt: int) -> None:
        """Send delivery confirmations; receipts of other states repeat what the agent already knows."""
        if found:
            self.receipts_after = found[-1].sequence
            self.push(
                *(
                    DeliveryConfirm(each.sequence, each.id, each.to, each.was_stored, each.at_ms)
                    for each in found
                    if each.state == CONFIRMED
                )
            )
        has_more = self.known_receipt != known_receipt and self.known_receipt > self.receipts_after
        self.may_have_receipts = len(found) == limit or has_more

    def _wake(self) -> None:
        """Join the hub's line if there is work. A busy session is checked when its batch ends."""
        if not self.is_busy and self.has_work:
            self._hub.wake(self)

    # Frames of the agent.

    def _handle(self, frame: OfAgent | Error) -> None:
        if isinstance(frame, Send):
            self._send(frame)
        elif isinstance(frame, Confirm):
            if len(frame.message_ids) > MAIL_BATCH_MAX:
                raise BatchTooLarge(f"A confirm frame has at most {MAIL_BATCH_MAX} message ids; split it")
            if len(self.confirms) + len(frame.message_ids) > RELAY_CONFIRMS_MAX:
                raise Busy(f"{RELAY_CONFIRMS_MAX} confirmations are pending; confirm these again in a few seconds")
            for id in frame.message_ids:
                check_id(id)
            if self.authorize is not None:
                self.authorize(ConfirmMail(self.address.agent, frame.message_ids, self.address.universe))
            self.confirms.extend(frame.message_ids)
        elif isinstance(frame, ReceiptsSeen):
            if self.authorize is not None:
                self.authorize(SeeReceipts(self.address.agent, frame.sequence, self.address.universe))
            seen = self.unsaved_receipts_seen
            self.unsaved_receipts_seen = frame.sequence if seen is None else max(seen, frame.sequence)
        elif isinstance(frame, Ping):
            self.push(Pong())
        elif isinstance(frame, Error):
            self.push(frame)
        elif not isinstance(frame, Pong):
            raise InvalidArgument("This connection is already authenticated; open another one for another agent")

    def _send(self, frame: Send) -> None:
        check_id(frame.message_id)
        if self._hub.draining:
            raise ShutdownDraining("The server is shutting down; reconnect in a few seconds and send it again")
        if frame.sender is not None and _address(frame.sender, self.address.universe) != self.address:
            raise SenderMismatch(f"This connection is authenticated as {self.name}; leave `from` out, or open another")
        wait_ms = self._hub.rate_limiter.wait_ms(self.address)
        if wait_ms:
            self.push(RateLimited(frame.message_id, wait_ms))
            return
        mail = NewMail(frame.to, bytes(frame.body), frame.message_id, frame.content_type, frame.correlation_id)
        if self.authorize is not None:
            self.authorize(SendMail(self.address.agent, [mail], self.address.universe))
        self.sends.append(mail)
        self.sends_bytes += len(mail.body)

    @property
    def is_full(self) -> bool:
        """Whether no more frames of the agent are received."""
        # Mail alone slightly exceeds the bound; twice the bound means that the agent does not read its answers.
        return self.is_backlogged or self._unsent_bytes >= 2 * RELAY_UNSENT_BYTES_MAX


def _address(text: str, universe: str) -> Address | None:
    try:
        return Address(*split_address(text if "@" in text else f"{text}@{universe}"))
    except InvalidName:
        return None


def _release(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
