"""One session of the relay: what an agent that is connected has sent, was sent, and has still to hear.

    frames of the agent ──► take ──► sends, confirms ──┐                        ┌──► answers, mail ──► outgoing
                                                       ├── a round, one commit ──┤
    the mailbox has more ──► is_hungry ────────────────┘                        └──► in flight until confirmed

A session knows nothing of sockets and does nothing by itself: a hub (`rounds.py`) commits what all its sessions want.
Everything that it holds is bounded. An agent that confirms nothing, or that does not read what it is sent, is sent
nothing more; its mail waits where it is safe, in its mailbox. One that does not hear its answers is not heard either.

`after` is where this connection has come to in its mailbox: what is in flight is not read again, and is not removed
either, until the agent confirms it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from holdfast.clock import Clock
from holdfast.errors import (
    BatchTooLarge,
    Busy,
    HoldfastError,
    InvalidArgument,
    InvalidName,
    SenderMismatch,
    ShutdownDraining,
    rebuild,
)
from holdfast.layers.mailboxes import Address
from holdfast.layers.mailboxes.sending import check_id
from holdfast.limits import (
    MAIL_BATCH_MAX,
    RELAY_CONFIRMS_MAX,
    RELAY_FLUSH_BYTES,
    RELAY_FLUSH_MAILS,
    RELAY_IN_FLIGHT_MAX,
    RELAY_SENDS_BYTES_MAX,
    RELAY_SENDS_MAX,
    RELAY_UNSENT_BYTES_MAX,
)
from holdfast.runtime.rate_limits import Rates
from holdfast.wire.mail import CONFIRMED, ConfirmMail, MailReceipt, Mails, NewMail, SeeReceipts, SendMail, SentMail
from holdfast.wire.relay import (
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
from holdfast.wire.requests import Request

# Why a connection is closed, as its close code says it.
PROTOCOL_ERROR: Final = 1002
TOO_BIG: Final = 1009
STOPPING: Final = 1012
REPLACED: Final = 4001
NOT_ALLOWED: Final = 4003
TOO_SLOW: Final = 4008

_FRAME_BYTES: Final = 256  # What a frame counts for beside its body.

Allow = Callable[[Request[Any]], None]  # Raises if whoever is connected may not ask for this.


class Hub(Protocol):
    """Where sessions have their work done."""

    clock: Clock
    rates: Rates
    draining: bool

    def wake(self, session: "Session") -> None:
        """A session has something to do."""
        ...


class Session:
    """An agent that is connected. Only on its event loop."""

    def __init__(self, hub: Hub, address: Address, id: str, allow: Allow | None) -> None:
        """Without `allow` an agent may do with its own mail what it likes."""
        self.address = address
        self.name = str(address)
        self.id = id
        self.ended: tuple[int, str] | None = None  # The close code, and why.
        self.is_busy = False  # Something is being committed for it.
        self.sends: list[NewMail] = []  # Not stored yet.
        self.sends_bytes = 0
        self.confirms: deque[str] = deque()  # Not removed yet.
        self.seen: int | None = None  # Receipts up to here, not remembered yet.
        self.in_flight: dict[str, str] = {}  # The senders of mails that were sent and not confirmed, by id.
        self.after = -1
        self.told = -1  # The highest sequence that was said to be in the mailbox.
        self.is_behind = True  # There may be more than that.
        self.must_look = False  # Somebody else may have the mailbox.
        self.expects_mail = False  # What is being committed may have some.
        self.receipts_seen = self.receipts_after = -1
        self.receipts_told = -1
        self.receipts_behind = True
        self.expects_receipts = False
        self.rests_until_ms = 0  # The key space has failed.
        self.heard_ms = self.looked_ms = hub.clock.now_ms()
        self.pinged_ms: int | None = None
        self.write: Callable[[list[Frame]], bool] | None = None  # Writes frames at once, if nothing is in their way.
        self._hub = hub
        self.allow = allow
        self._unsent: list[Frame] = []
        self._unsent_bytes = 0  # With what the other end has not taken yet.
        self._writer: asyncio.Future[None] | None = None  # Waits for something to send.
        self._reader: asyncio.Future[None] | None = None  # Waits for room.

    # What the connection calls.

    def take(self, frames: Iterable[OfAgent | Error]) -> None:
        """Begin what the agent asks for. A frame that is refused is answered, and disturbs no other."""
        self.heard_ms, self.pinged_ms = self._hub.clock.now_ms(), None
        for frame in frames:
            try:
                self._take(frame)
            except HoldfastError as error:
                self.refuse(error, frame.message_id if isinstance(frame, Send) else None)
        self._wake()

    async def room(self) -> None:
        """Return once there is room for more of the agent's frames."""
        while self.is_full and self.ended is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def outgoing(self) -> tuple[list[Frame], int] | None:
        """The next frames for the agent, and what to say to `written` once they are; None when there are no more."""
        while not self._unsent:
            if self.ended is not None:
                return None
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        frames, self._unsent = self._unsent, []
        return frames, self._unsent_bytes

    def written(self, size: int) -> None:
        """The other end has taken as much."""
        self._unsent_bytes -= size
        _release(self._reader)
        self._wake()

    def end(self, code: int, reason: str, *last: Frame) -> None:
        """Nothing more is begun; what was taken is still done."""
        if self.ended is None:
            self._unsent += last
            self.ended = (code, reason)
            _release(self._writer)
            _release(self._reader)

    # What the hub calls.

    def give_up(self) -> None:
        """Something went wrong: end, and want nothing more. The agent connects again, and sends again what it must."""
        self.sends, self.sends_bytes, self.seen = [], 0, None
        self.confirms.clear()
        self.must_look = False
        self.end(STOPPING, "failed")

    def push(self, *frames: Frame) -> None:
        """Send these to the agent, behind what it has still to hear."""
        if self.ended is not None:
            return
        for frame in frames:
            self._unsent_bytes += _FRAME_BYTES + (len(frame.body) * 4 // 3 if isinstance(frame, Mail) else 0)
        self._unsent += frames
        if not self.is_busy:  # Otherwise there may be more, and the round's end flushes them together.
            _release(self._writer)

    def flush(self) -> None:
        """Send what there is."""
        if not self._unsent:
            return
        is_idle = self._writer is not None and not self._writer.done()
        if is_idle and self.write is not None and self.write(self._unsent):
            self._unsent, self._unsent_bytes = [], 0  # Whoever writes is idle: nothing else was unsent.
            _release(self._reader)
        else:
            _release(self._writer)

    @property
    def has_work(self) -> bool:
        """Whether a round would do something for this session."""
        if self.rests_until_ms and self.rests_until_ms > self._hub.clock.now_ms():
            return False
        return (
            bool(self.sends or self.confirms)
            or self.seen is not None
            or self.must_look
            or self.is_hungry
            or self.wants_receipts
        )

    @property
    def is_open(self) -> bool:
        """Whether the agent takes more mail now."""
        return (
            self.ended is None
            and len(self.in_flight) < RELAY_IN_FLIGHT_MAX
            and self._unsent_bytes < RELAY_UNSENT_BYTES_MAX
        )

    @property
    def is_hungry(self) -> bool:
        """Whether there may be mail, and the agent takes more."""
        return (self.is_behind or self.told > self.after) and self.is_open

    @property
    def wants_receipts(self) -> bool:
        """Whether there are receipts to be read now, and the agent takes more."""
        return self.receipts_behind and self.ended is None and self._unsent_bytes < RELAY_UNSENT_BYTES_MAX

    @property
    def read_limit(self) -> int:
        """How many mails to read; a session that only has to look reads one more than it may have."""
        return max(min(RELAY_FLUSH_MAILS, RELAY_IN_FLIGHT_MAX - len(self.in_flight)), 1)

    @property
    def is_held(self) -> bool:
        """Whether the agent is not heard because what it has sent is not committed yet, for no fault of its own."""
        return (
            len(self.sends) >= RELAY_SENDS_MAX
            or self.sends_bytes >= RELAY_SENDS_BYTES_MAX
            or len(self.confirms) >= MAIL_BATCH_MAX
        )

    def writes(self) -> list[Request[Any]]:
        """What the agent has asked for first, as much of it as one commit should carry."""
        agent, universe = self.address.agent, self.address.universe
        requests: list[Request[Any]] = []
        if self.sends:
            now, self.sends = self.sends[:MAIL_BATCH_MAX], self.sends[MAIL_BATCH_MAX:]
            self.sends_bytes = sum(len(mail.body) for mail in self.sends)
            requests.append(SendMail(agent, now, universe))
        if self.confirms:
            ids = [self.confirms.popleft() for _ in range(min(len(self.confirms), MAIL_BATCH_MAX))]
            requests.append(ConfirmMail(agent, ids, universe))
        if self.seen is not None:
            requests.append(SeeReceipts(agent, self.seen, universe))
            self.seen = None
        _release(self._reader)
        return requests

    def sent(self, outcomes: Sequence[SentMail]) -> None:
        """Mails of the agent were stored, or refused one by one."""
        for sent in outcomes:
            if sent.code is None:
                self.push(Sent(sent.id, sent.durability, sent.duplicate))
            else:
                self.refuse(rebuild(sent.code, sent.detail or sent.code), sent.id)

    def not_sent(self, request: SendMail, error: HoldfastError) -> None:
        """None of these mails could be stored, or nobody knows."""
        for mail in request.mails:
            self.refuse(error, mail.id)

    def refuse(self, error: HoldfastError, message_id: str | None = None) -> None:
        """Tell the agent what was not done, and why."""
        self.push(Error(error.code, str(error), error.retry, message_id))

    def confirmed(self, ids: Iterable[str]) -> None:
        """These are not in flight any more."""
        for id in ids:
            self.in_flight.pop(id, None)

    def deliver(self, found: Mails, *, limit: int, told: int) -> None:
        """Send what a read has found; `told` is what this session had been told before it."""
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
        self.is_behind = len(frames) == limit or size >= RELAY_FLUSH_BYTES
        if not self.is_behind and self.told == told:
            self.told = self.after  # What it was told of and is not there has expired, or was confirmed elsewhere.

    def receipt(self, found: Sequence[MailReceipt], *, limit: int, told: int) -> None:
        """Tell the agent which of its mails have arrived; that they are stored it knows already."""
        if found:
            self.receipts_after = found[-1].sequence
            self.push(
                *(
                    DeliveryConfirm(each.sequence, each.id, each.to, each.was_stored, each.at_ms)
                    for each in found
                    if each.state == CONFIRMED
                )
            )
        is_told_more = self.receipts_told != told and self.receipts_told > self.receipts_after
        self.receipts_behind = len(found) == limit or is_told_more

    def _wake(self) -> None:
        """Stand in line if there is work; whoever is busy is asked when that is over."""
        if not self.is_busy and self.has_work:
            self._hub.wake(self)

    # What the agent asks for.

    def _take(self, frame: OfAgent | Error) -> None:
        if isinstance(frame, Send):
            self._send(frame)
        elif isinstance(frame, Confirm):
            if len(frame.message_ids) > MAIL_BATCH_MAX:
                raise BatchTooLarge(f"One confirm names at most {MAIL_BATCH_MAX} mails; split it")
            if len(self.confirms) + len(frame.message_ids) > RELAY_CONFIRMS_MAX:
                raise Busy(f"{RELAY_CONFIRMS_MAX} mails are being confirmed already; confirm these again in a moment")
            for id in frame.message_ids:
                check_id(id)
            if self.allow is not None:
                self.allow(ConfirmMail(self.address.agent, frame.message_ids, self.address.universe))
            self.confirms.extend(frame.message_ids)
        elif isinstance(frame, ReceiptsSeen):
            if self.allow is not None:
                self.allow(SeeReceipts(self.address.agent, frame.sequence, self.address.universe))
            self.seen = frame.sequence if self.seen is None else max(self.seen, frame.sequence)
        elif isinstance(frame, Ping):
            self.push(Pong())
        elif isinstance(frame, Error):
            self.push(frame)
        elif not isinstance(frame, Pong):
            raise InvalidArgument("This connection is authenticated already; open another one for another agent")

    def _send(self, frame: Send) -> None:
        check_id(frame.message_id)
        if self._hub.draining:
            raise ShutdownDraining("The server is shutting down; connect again in a moment and send it again")
        if frame.sender is not None and _address(frame.sender, self.address.universe) != self.address:
            raise SenderMismatch(f"This connection is authenticated as {self.name}; leave `from` out, or open another")
        wait_ms = self._hub.rates.wait_ms(self.address)
        if wait_ms:
            self.push(RateLimited(frame.message_id, wait_ms))
            return
        mail = NewMail(frame.to, bytes(frame.body), frame.message_id, frame.content_type, frame.correlation_id)
        if self.allow is not None:
            self.allow(SendMail(self.address.agent, [mail], self.address.universe))
        self.sends.append(mail)
        self.sends_bytes += len(mail.body)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more of the agent's frames."""
        # Mail alone comes to the bound and a little more; whoever is at twice of it does not hear its answers.
        return self.is_held or self._unsent_bytes >= 2 * RELAY_UNSENT_BYTES_MAX


def _address(text: str, universe: str) -> Address | None:
    try:
        return Address(*split_address(text if "@" in text else f"{text}@{universe}"))
    except InvalidName:
        return None


def _release(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
