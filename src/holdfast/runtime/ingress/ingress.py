"""The ingress: pushes are accepted in memory, at once, and stored in mailboxes by one writer, in batches.

    push ──► checked ──► reserved ──► in the backlog: accepted ──► listeners ──► a batch ──► one synced commit
                │           │              │                                        │
                ▼           ▼              ▼                                        ▼
             refused    a duplicate      Busy                                 refused or lost: the key is given back

`accepted` is a BEST_EFFORT promise: what is in memory when the process dies is gone. Whoever asks for `synced` waits
for the commit, and hears what became of the push.

The id of a push's mail comes from its key. So a push that is made again while its mail waits is stored once, also where
nobody remembers the key: after a restart, at another node, or when a batch that was given up was committed after all.

Everything here happens on one event loop; only commits do not (`pushwriter.py`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from holdfast import limits
from holdfast.clock import Clock, MonotonicClock, SystemClock
from holdfast.errors import (
    Backend,
    Busy,
    Closed,
    HoldfastError,
    InvalidArgument,
    MailboxFull,
    PayloadTooLarge,
    RateLimited,
    Unsupported,
)
from holdfast.kv import Database
from holdfast.layers import agents
from holdfast.layers.mailboxes import Address
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.ingress import validation
from holdfast.runtime.ingress.buffer import Backlog
from holdfast.runtime.ingress.dedupe import Dedupe, Reservation, Stage, key_of
from holdfast.runtime.ingress.validation import DataPush, QueuedPush, Tallies
from holdfast.runtime.ingress.writer import OnFlush, Publish, PushWriter, why
from holdfast.runtime.locks.table import LockTable
from holdfast.runtime.rate_limits import Rates
from holdfast.runtime.timers import sleep
from holdfast.tiers import Tier
from holdfast.wire.ingress import ACCEPTED, SYNCED, Durability, NewPush, Pushed

_log = logging.getLogger("holdfast.ingress")

Listener = Callable[[DataPush], None]


class Ingress:
    """Accepts pushes on one event loop, from `start`, or the first push, until `close`."""

    def __init__(
        self,
        database: Database,
        blobs: AsyncBlobStore,
        publish: Publish,
        *,
        clock: Clock | None = None,
        locks: LockTable,
        pushes_per_minute: int = limits.PUSHES_PER_MINUTE,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._clock = clock or SystemClock()
        self.tallies = Tallies()
        self.pushes_per_minute = pushes_per_minute
        self.rates = Rates(
            pushes_per_minute / 60,
            pushes_per_minute,
            callers_max=limits.PUSH_PEERS_MAX,
            clock=clock or MonotonicClock(),
        )
        self.dedupe = Dedupe(self._clock)
        self._backlog: Backlog[QueuedPush] = Backlog(self._clock)
        self._writer = PushWriter(
            database,
            self._backlog,
            self.dedupe,
            publish=publish,
            clock=self._clock,
            locks=locks,
            tallies=self.tallies,
        )
        self._listeners: list[Listener] = []
        self._said: dict[str, int] = {}  # When what was last logged.
        self._refused = 0  # For want of room, since that was last logged.
        self._saved_ms = self._clock.now_ms()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def depth(self) -> int:
        """Pushes that wait for the writer."""
        return len(self._backlog)

    @property
    def lag_seconds(self) -> float:
        """How long the first of them has waited."""
        return self._backlog.lag_seconds

    def on_data_push(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with every push that is accepted, until the function that this returns is called.

        It is called before the push is stored, on the event loop, so it must not take long. What it raises is logged.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def on_flush(self, listener: OnFlush) -> None:
        """Have `listener` told of every batch that was stored or dropped: how many pushes, and how many seconds."""
        self._writer.on_flush = listener

    async def start(self) -> None:
        """Remember the keys that were written down, and begin to store what is accepted.

        Raises:
            Closed: it has ended.
            InvalidArgument: another event loop has it.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise Closed("The ingress was closed; open the plane again")
        if self._loop not in (None, loop):
            raise InvalidArgument("Another event loop pushes through this plane; open one for each of them")
        if self._starting is None:
            self._loop, self._starting = loop, loop.create_task(self._start())
        await asyncio.shield(self._starting)

    async def push(self, sender: Address, to: Address, new: NewPush) -> Pushed:
        """Accept a push, or with `durability="synced"` store it.

        Raises:
            InvalidArgument: something in it is missing or wrong.
            PayloadTooLarge: it is larger than one may be.
            RateLimited: the sender has pushed as often as it may.
            Busy: there is no room for it, or it could not be stored; it may be pushed again with the same key.
            MailboxFull, SenderBlocked: the recipient's mailbox did not take it.
            Closed: the server is about to stop.
        """
        if self._closed or not self._tasks or self._loop is not asyncio.get_running_loop():
            await self.start()
        try:
            return await self._push(sender, to, new)
        except HoldfastError as error:
            self.tallies.rejects[error.code] += 1
            raise

    async def close(self) -> None:
        """Refuse what comes from now on, store what was accepted, and write its keys down."""
        if self._closed:
            return
        self._closed = True
        self._backlog.close()
        if self._starting is not None and self._loop is asyncio.get_running_loop():
            await self._starting
            writing, tending = self._tasks
            tending.cancel()
            with suppress(asyncio.CancelledError):
                await tending
            await writing
            if self.dedupe.has_news:
                await self._writer.save()
        self._writer.close()

    async def _start(self) -> None:
        await self._writer.load()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._writer.write()), loop.create_task(self._tend())]

    async def _push(self, sender: Address, to: Address, new: NewPush) -> Pushed:
        author, recipient = str(sender), str(to)
        validation.check_fields(new)
        self._check_rate(author)
        payload = validation.payload_of(new)
        validation.check_session(new)
        key = key_of(recipient, author, new.topic, new.idempotency_key)
        known = self.dedupe.find(key)
        if known is not None:
            return await self._repeated(known, new)
        if new.durability != SYNCED and self._writer.was_full(to):
            raise MailboxFull(
                f"The mailbox of {to} was full a moment ago; nothing was accepted. Push it again when some of its "
                "mails are confirmed"
            )
        reservation = self.dedupe.reserve(key)
        try:
            await self._enqueue(sender, to, new, payload, reservation)
        except BaseException as error:
            lost = Busy("The push that came first under this key was not accepted; push it again")
            self.dedupe.release(reservation, error if isinstance(error, HoldfastError) else lost)
            raise
        self.tallies.accepted += 1
        if self._listeners:
            self._tell_listeners(author, recipient, new, payload, reservation)
        if new.durability == SYNCED:
            await reservation.beyond(Stage.QUEUED)
        return _pushed(reservation, deduped=reservation.was_there)

    def _check_rate(self, author: str) -> None:
        wait_ms = self.rates.wait_ms(author)
        if wait_ms:
            raise RateLimited(
                f"{author} may push {self.pushes_per_minute} times a minute (ingress_pushes_per_minute); nothing was "
                f"accepted. Push it again in {wait_ms / 1_000:.1f} s"
            )

    async def _repeated(self, known: Reservation, new: NewPush) -> Pushed:
        """The answer to a push whose key is remembered: what became of the first one."""
        await known.beyond(Stage.ENTERING)
        if new.durability == SYNCED:
            self._backlog.hurry()
            await known.beyond(Stage.QUEUED)
        self.tallies.deduped += 1
        return _pushed(known, deduped=True)

    async def _enqueue(
        self, sender: Address, to: Address, new: NewPush, payload: bytes, reservation: Reservation
    ) -> None:
        id, hurries = reservation.key.hex(), new.durability == SYNCED
        mail = validation.mail_of(new, id, len(payload))
        size = len(mail.body)
        try:
            await self._backlog.enter(size)
        except Busy:
            self._say_busy()
            raise
        try:
            if await self._is_too_large(to, size):
                mail = validation.mail_of(new, id, len(payload), blob=await self._store_blob(to.universe, payload))
                self._backlog.shrink(size - len(mail.body))
                size = len(mail.body)
            self._backlog.put(QueuedPush(sender, to, mail, reservation, since_ms=self._clock.now_ms(), hurries=hurries))
        except BaseException:
            self._backlog.leave(size)
            raise
        reservation.move(Stage.QUEUED)

    async def _is_too_large(self, to: Address, size: int) -> bool:
        """Whether so much does not fit where the recipient's mail goes."""
        if size <= limits.INBOX_INLINE_BYTES_MAX:
            return False
        if size > limits.MAIL_BYTES_MAX:
            return True
        # The inbox of a world takes less than a mailbox.
        world = await self._database.read_async(agents.world_of, to.universe, to.agent, tier=Tier.IMPORTANT)
        return world is not None

    async def _store_blob(self, universe: str, payload: bytes) -> str:
        try:
            async with asyncio.timeout(limits.INGRESS_STORE_SECONDS):
                return (await self._blobs.put(universe, payload)).hash
        except Unsupported as error:
            raise PayloadTooLarge(f"A payload that is too large for a mail is stored as a blob. {error}") from error
        except (Backend, TimeoutError) as error:
            raise Busy(f"The payload could not be stored as a blob ({why(error)}); push it again") from error

    def _tell_listeners(
        self, author: str, recipient: str, new: NewPush, payload: bytes, reservation: Reservation
    ) -> None:
        event = DataPush(
            id=reservation.key.hex(),
            sender=author,
            to=recipient,
            topic=new.topic,
            content_type=new.content_type,
            payload=payload,
            idempotency_key=new.idempotency_key,
            session_id=new.session_id,
            reply_to=new.reply_to,
            received_ms=reservation.at_ms,
        )
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # The queue has the push; an error now would have its sender push it again.
                if self._may_say("listener"):
                    _log.exception("a listener of pushes failed, and the push was accepted all the same")

    async def _tend(self) -> None:
        """Forget what is over and write keys down, now and then."""
        while True:
            await sleep(self._clock, limits.DEDUPE_PRUNE_SECONDS)
            try:
                await self._tend_once()
            except Exception:
                _log.exception("the keys of pushes could not be tended, and will be soon")

    async def _tend_once(self) -> None:
        self.dedupe.prune()
        self._writer.prune()
        if self.lag_seconds > limits.INGRESS_LAG_SECONDS:
            _log.warning(
                "the writer of pushes is behind", extra={"lag_seconds": self.lag_seconds, "waiting": self.depth}
            )
        now_ms = self._clock.now_ms()
        if self.dedupe.has_news and now_ms - self._saved_ms >= limits.DEDUPE_SNAPSHOT_SECONDS * 1_000:
            self._saved_ms = now_ms
            await self._writer.save()

    def _say_busy(self) -> None:
        self._refused += 1
        if self._may_say("busy"):
            _log.warning(
                "pushes are refused: as many wait to be stored as may",
                extra={"refused": self._refused, "waiting": self.depth, "lag_seconds": self.lag_seconds},
            )
            self._refused = 0

    def _may_say(self, what: str) -> bool:
        now_ms = self._clock.now_ms()
        said_ms = self._said.get(what)
        if said_ms is not None and 0 <= now_ms - said_ms < limits.INGRESS_SAY_SECONDS * 1_000:
            return False
        self._said[what] = now_ms
        return True


def _pushed(reservation: Reservation, *, deduped: bool) -> Pushed:
    durability: Durability = SYNCED if reservation.stage is Stage.STORED else ACCEPTED
    return Pushed(True, deduped, durability, reservation.key.hex())
