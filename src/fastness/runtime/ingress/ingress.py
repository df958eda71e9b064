"""The ingress accepts pushes into memory immediately; one writer stores them in mailboxes, in batches.

    push ──► validated ──► key reserved ──► in the buffer: accepted ──► listeners ──► a batch ──► one synced commit
                │              │              │               │                          │
                ▼              ▼              ▼               ▼                          ▼
            rejected       duplicate        Busy           watches       rejected or lost: the key is released

`accepted` is a BEST_EFFORT promise: pushes in memory are lost when the process is killed. A program that ends by itself
stores them, also without `close` (`close_at_exit`). A push with `durability="synced"`
waits for the commit, and gets its outcome.

The id of a mail is derived from the dedupe key of its push. So a repeated push is stored once while its mail is
pending, even if the key is unknown: after a restart, at another node, or when an abandoned batch was committed later.

Everything here runs on one event loop, except commits (`writer.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress

from fastness import limits
from fastness.clock import Clock, MonotonicClock, SystemClock
from fastness.errors import (
    Backend,
    Busy,
    Closed,
    FastnessError,
    InvalidArgument,
    MailboxFull,
    PayloadTooLarge,
    RateLimited,
    Unsupported,
)
from fastness.kv import Database
from fastness.kv.closing_at_exit import keep_until_exit
from fastness.layers import agents
from fastness.layers.mailboxes import Address
from fastness.layers.quotas import quotas_of
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.ingress import validation
from fastness.runtime.ingress.buffer import IngressBuffer
from fastness.runtime.ingress.dedupe import Dedupe, Reservation, Stage, key_of
from fastness.runtime.ingress.recent import RecentPushes
from fastness.runtime.ingress.validation import IngressCounters, QueuedPush
from fastness.runtime.ingress.writer import OnFlush, PushWriter, short_reason
from fastness.runtime.rate_limits import RateLimiter
from fastness.runtime.timers import sleep
from fastness.tiers import Tier
from fastness.wire.ingress import (
    ACCEPTED,
    SYNCED,
    DataPush,
    Durability,
    IngressStats,
    NewPush,
    Pushed,
    PushOutcome,
    PushOutcomes,
    SeenPushes,
    WatchPushes,
)
from fastness.wire.problems import retry_after_seconds
from fastness.wire.transport import OnDataPush

_log = logging.getLogger("fastness.ingress")

AddressedPush = tuple[Address, NewPush]  # A push and its recipient.


class Ingress:
    """Accepts pushes on one event loop, from `start` or the first push until `close`."""

    def __init__(
        self,
        database: Database,
        blobs: AsyncBlobStore,
        *,
        clock: Clock | None = None,
        pushes_per_minute: int = limits.PUSHES_PER_MINUTE,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._clock = clock or SystemClock()
        self.counters = IngressCounters()
        self.pushes_per_minute = pushes_per_minute
        self.rate_limiter = RateLimiter(
            pushes_per_minute / 60,
            pushes_per_minute,
            callers_max=limits.PUSH_PEERS_MAX,
            clock=clock or MonotonicClock(),
        )
        self.dedupe = Dedupe(self._clock)
        self._buffer: IngressBuffer[QueuedPush] = IngressBuffer(self._clock)
        self._writer = PushWriter(
            database,
            self._buffer,
            self.dedupe,
            clock=self._clock,
            counters=self.counters,
        )
        self._listeners: list[OnDataPush] = []
        self._recent = RecentPushes(self._clock)
        self._logged_ms: dict[str, int] = {}  # When each kind of warning was last logged.
        self._refused = 0  # Pushes rejected as Busy since that was last logged.
        self._saved_ms = self._clock.now_ms()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._forget: Callable[[], None] = _nothing_kept

    @property
    def depth(self) -> int:
        """The number of pushes that wait for the writer."""
        return len(self._buffer)

    @property
    def lag_seconds(self) -> float:
        """How long the oldest of them has waited."""
        return self._buffer.lag_seconds

    def on_data_push(self, listener: OnDataPush) -> Callable[[], None]:
        """Call `listener` with every accepted push, until the returned function is called.

        The listener runs on the event loop, before the push is stored, so it must be fast. Its errors are logged.
        """
        self._listeners.append(listener)

        def stop() -> None:
            with suppress(ValueError):  # It was stopped before.
                self._listeners.remove(listener)

        return stop

    async def watch(self, request: WatchPushes) -> SeenPushes:
        """The pushes to a universe that were accepted after a position, as `RecentPushes.read`.

        Raises:
            InvalidArgument: `after` is not a position, or another event loop pushes.
            Busy: there are too many watches.
            Closed: the plane is being closed.
        """
        await self._ensure_started()
        return await self._recent.read(request)

    def stats(self) -> IngressStats:
        """What waits now, and what was counted since the start."""
        counters = self.counters
        return IngressStats(
            depth=self.depth,
            lag_seconds=self.lag_seconds,
            accepted=counters.accepted,
            duplicates=counters.deduped,
            refused=dict(counters.rejects),
            lost=dict(counters.lost),
            pushes_per_minute=self.pushes_per_minute,
            watches=self._recent.waiting,
        )

    def on_flush(self, listener: OnFlush) -> None:
        """Call `listener` after every batch, stored or dropped, with the number of pushes and the seconds it took."""
        self._writer.on_flush = listener

    async def start(self) -> None:
        """Load the saved dedupe keys, and start the writer.

        Raises:
            Closed: the ingress is closed.
            InvalidArgument: it runs on another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise Closed("The ingress is closed; open the plane again")
        if self._loop not in (None, loop):
            raise InvalidArgument("Another event loop already pushes through this plane; open one plane per event loop")
        if self._starting is None:
            self._loop, self._starting = loop, loop.create_task(self._start())
            self._forget = keep_until_exit(self)
        await asyncio.shield(self._starting)

    async def push(self, sender: Address, to: Address, new: NewPush) -> Pushed:
        """Accept a push, or with `durability="synced"` store it.

        Raises:
            InvalidArgument: a field is missing or invalid.
            PayloadTooLarge: the payload exceeds its limit.
            RateLimited: the sender exceeded its push rate.
            Busy: the buffer is full, or the push could not be stored; it may be pushed again with the same key.
            MailboxFull, SenderBlocked: the recipient's mailbox rejected it.
            Closed: the server is shutting down.
        """
        await self._ensure_started()
        try:
            known, is_duplicate = await self._accept(sender, to, new, is_urgent=new.durability == SYNCED)
            return await self._outcome(known, new, is_duplicate=is_duplicate)
        except FastnessError as error:
            self.counters.rejects[error.code] += 1
            raise

    async def push_many(self, sender: Address, pushes: Sequence[AddressedPush | FastnessError]) -> PushOutcomes:
        """Accept pushes in order, as `push` accepts each; the outcome of each. One that is an error has that outcome.

        Synced ones become due when all are accepted, so one commit stores them, unless other pushes fill the batch.
        When there is no space for one, those after it are refused without waiting for it, too.

        Raises:
            Closed: the server is shutting down.
        """
        await self._ensure_started()
        accepted: list[tuple[NewPush, Reservation, bool] | FastnessError] = []
        busy: Busy | None = None
        is_awaited = False
        for each in pushes:
            try:
                if isinstance(each, FastnessError):
                    raise each
                if busy is not None:
                    raise Busy(str(busy))
                to, new = each
                accepted.append((new, *await self._accept(sender, to, new, is_urgent=False)))
                is_awaited = is_awaited or new.durability == SYNCED
            except FastnessError as error:
                if type(error) is Busy:
                    busy = error
                accepted.append(error)
        if is_awaited:
            self._buffer.flush_soon()
        return PushOutcomes([await self._outcome_in_batch(each) for each in accepted])

    async def _outcome_in_batch(self, accepted: tuple[NewPush, Reservation, bool] | FastnessError) -> PushOutcome:
        try:
            if isinstance(accepted, FastnessError):
                raise accepted
            new, known, is_duplicate = accepted
            return PushOutcome(await self._outcome(known, new, is_duplicate=is_duplicate))
        except FastnessError as error:
            self.counters.rejects[error.code] += 1
            return PushOutcome(None, error.code, str(error), retry_after_seconds(error))

    async def close(self) -> None:
        """Reject new pushes, store accepted ones, and save their dedupe keys."""
        if self._closed:
            return
        self._closed = True
        self._buffer.close()
        self._recent.close()
        if self._starting is not None and self._loop is asyncio.get_running_loop():
            await self._starting
            writing, maintaining = self._tasks
            maintaining.cancel()
            with suppress(asyncio.CancelledError):
                await maintaining
            await writing
            if self.dedupe.has_unsaved:
                await self._writer.save()
        self._writer.close()
        if self._loop is not asyncio.get_running_loop():
            await asyncio.to_thread(self._writer.store_rest)
        self._forget()

    def close_at_exit(self) -> None:
        """Store what was accepted, if the program ends without `close`, or ended its event loop before."""
        loop = self._loop
        if loop is not None and loop.is_running():  # In a daemon thread.
            closing = asyncio.run_coroutine_threadsafe(self.close(), loop)
            with suppress(TimeoutError, CancelledError):
                closing.result(limits.INGRESS_EXIT_SECONDS)
        self._closed = True
        self._writer.store_rest()

    async def _start(self) -> None:
        await self._writer.load()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._writer.write()), loop.create_task(self._maintain())]

    async def _ensure_started(self) -> None:
        if self._closed or not self._tasks or self._loop is not asyncio.get_running_loop():
            await self.start()

    async def _accept(self, sender: Address, to: Address, new: NewPush, *, is_urgent: bool) -> tuple[Reservation, bool]:
        """Accept a push: its reservation, or that of the first push with its key, and whether it is a duplicate."""
        if self._database.low_space:
            raise Busy("The disk is nearly full (disk_reserve_bytes); free some space, then push it again")
        author, recipient = str(sender), str(to)
        validation.check_fields(new)
        self._check_rate(author)
        payload = validation.payload_of(new)
        if self._database.usage is not None:
            quotas_of(self._database).check_size(to.universe, len(payload))
        validation.check_session(new)
        key = key_of(recipient, author, new.topic, new.idempotency_key)
        known = self.dedupe.find(key)
        if known is not None:
            return known, True
        if new.durability != SYNCED and self._writer.is_recently_full(to):
            raise MailboxFull(
                f"The mailbox of {to} is full; nothing was accepted. Push it again after some of its mail is confirmed"
            )
        reservation = self.dedupe.reserve(key)
        try:
            await self._enqueue(sender, to, new, payload, reservation, is_urgent=is_urgent)
        except BaseException as error:
            lost = Busy("The first push with this idempotency key was not accepted; push it again")
            self.dedupe.release(reservation, error if isinstance(error, FastnessError) else lost)
            raise
        self.counters.accepted += 1
        if self._listeners or self._recent.is_watched(to.universe):
            self._announce(author, to, new, payload, reservation)
        return reservation, False

    async def _outcome(self, known: Reservation, new: NewPush, *, is_duplicate: bool) -> Pushed:
        """The result of an accepted push, or of a duplicate: that of the first push."""
        if is_duplicate:
            await known.wait_past(Stage.ENTERING)
        if new.durability == SYNCED:
            if is_duplicate:
                self._buffer.flush_soon()
            await known.wait_past(Stage.QUEUED)
        if is_duplicate:
            self.counters.deduped += 1
        return _push_result(known, deduped=is_duplicate or known.is_duplicate)

    def _check_rate(self, author: str) -> None:
        wait_ms = self.rate_limiter.wait_ms(author)
        if wait_ms:
            seconds = wait_ms / 1_000
            raise RateLimited(
                f"{author} exceeds {self.pushes_per_minute} pushes per minute (ingress_pushes_per_minute); nothing was "
                f"accepted. Push it again in {seconds:g} s, or raise that setting",
                retry_after_seconds=seconds,
            )

    async def _enqueue(
        self,
        sender: Address,
        to: Address,
        new: NewPush,
        payload: bytes,
        reservation: Reservation,
        *,
        is_urgent: bool,
    ) -> None:
        id = reservation.key.hex()
        mail = validation.mail_of(new, id, len(payload))
        size = len(mail.body)
        try:
            await self._buffer.reserve_space(size)
        except Busy:
            self._log_busy()
            raise
        try:
            if await self._is_too_large(to, size):
                mail = validation.mail_of(new, id, len(payload), blob=await self._store_blob(to.universe, payload))
                self._buffer.release_bytes(size - len(mail.body))
                size = len(mail.body)
            self._buffer.put(
                QueuedPush(
                    sender,
                    to,
                    mail,
                    reservation,
                    enqueued_ms=self._clock.now_ms(),
                    is_urgent=is_urgent,
                    is_awaited=new.durability == SYNCED,
                )
            )
        except BaseException:
            self._buffer.release_space(size)
            raise
        reservation.advance(Stage.QUEUED)

    async def _is_too_large(self, to: Address, size: int) -> bool:
        """Whether a mail of `size` bytes does not fit into the recipient's mailbox or inbox."""
        if size <= limits.INBOX_INLINE_BYTES_MAX:
            return False
        if size > limits.MAIL_BYTES_MAX:
            return True
        # The limit of a world's inbox is lower than that of a mailbox.
        world = await self._database.read_async(agents.world_of, to.universe, to.agent, tier=Tier.IMPORTANT)
        return world is not None

    async def _store_blob(self, universe: str, payload: bytes) -> str:
        try:
            async with asyncio.timeout(limits.INGRESS_STORE_SECONDS):
                return (await self._blobs.put(universe, payload, pinned=False)).hash
        except Unsupported as error:
            raise PayloadTooLarge(
                f"The payload is too large for a mail and must be stored as a blob. {error}"
            ) from error
        except (Backend, TimeoutError) as error:
            raise Busy(f"The payload could not be stored as a blob ({short_reason(error)}); push it again") from error

    def _announce(self, author: str, to: Address, new: NewPush, payload: bytes, reservation: Reservation) -> None:
        """Call the listeners with an accepted push, then wake the watches."""
        event = DataPush(
            id=reservation.key.hex(),
            sender=author,
            to=str(to),
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
            except Exception:  # The push is accepted; an error now would make its sender push it again.
                if self._may_log("listener"):
                    _log.exception("a push listener failed; the push was accepted")
        self._recent.add(to.universe, event)

    async def _maintain(self) -> None:
        """Periodically remove expired keys and save the dedupe keys."""
        while True:
            await sleep(self._clock, limits.DEDUPE_PRUNE_SECONDS)
            try:
                await self._maintain_once()
            except Exception:
                _log.exception("unexpected error in the maintenance of dedupe keys; retrying soon")

    async def _maintain_once(self) -> None:
        self.dedupe.prune()
        self._writer.prune()
        self._recent.prune()
        if self.lag_seconds > limits.INGRESS_LAG_SECONDS:
            _log.warning(
                "the writer of pushes is lagging", extra={"lag_seconds": self.lag_seconds, "waiting": self.depth}
            )
        now_ms = self._clock.now_ms()
        if self.dedupe.has_unsaved and now_ms - self._saved_ms >= limits.DEDUPE_SNAPSHOT_SECONDS * 1_000:
            self._saved_ms = now_ms
            await self._writer.save()

    def _log_busy(self) -> None:
        self._refused += 1
        if self._may_log("busy"):
            _log.warning(
                "pushes are rejected: the ingress buffer is full",
                extra={"refused": self._refused, "waiting": self.depth, "lag_seconds": self.lag_seconds},
            )
            self._refused = 0

    def _may_log(self, kind: str) -> bool:
        now_ms = self._clock.now_ms()
        logged_ms = self._logged_ms.get(kind)
        if logged_ms is not None and 0 <= now_ms - logged_ms < limits.INGRESS_LOG_SECONDS * 1_000:
            return False
        self._logged_ms[kind] = now_ms
        return True


def _nothing_kept() -> None:
    """Used until the ingress has started."""


def _push_result(reservation: Reservation, *, deduped: bool) -> Pushed:
    durability: Durability = SYNCED if reservation.stage is Stage.STORED else ACCEPTED
    return Pushed(True, deduped, durability, reservation.key.hex())
