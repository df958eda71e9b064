"""The writer of pushes: batches of the backlog become mail, each batch in one synced commit.

Commits run on a thread of their own, one at a time, and hold the locks of everything that they touch, in the declared
order: keys, the recipients' inboxes, the senders' outboxes. A commit that takes too long is given up. If it waits for
its turn then it never happens; if it is being synced then it may, and whoever pushes again finds its mail there.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast import limits
from holdfast.clock import Clock
from holdfast.errors import Busy, HoldfastError, MailboxFull, NotAllowed, Validation, WorldNotActive
from holdfast.kv import Database, Transaction
from holdfast.kv.batch import run_batch
from holdfast.layers import dedupe, mailboxes
from holdfast.layers.dedupe import Entry
from holdfast.layers.mailboxes import Address
from holdfast.runtime.ingress.buffer import Backlog
from holdfast.runtime.ingress.dedupe import Dedupe, Stage
from holdfast.runtime.ingress.validation import QueuedPush, Tallies
from holdfast.runtime.locks.table import LockTable
from holdfast.runtime.timers import ring_after, wake
from holdfast.tiers import Tier

_log = logging.getLogger("holdfast.ingress")

Publish = Callable[[Sequence[tuple[Any, ...]]], None]
OnFlush = Callable[[int, float], None]  # How many pushes, and how many seconds it took.

_DEDUPE: Final = ("dedupe",)


class PushWriter:
    """Stores what is in a backlog, and writes the keys of it down."""

    def __init__(
        self,
        database: Database,
        backlog: Backlog[QueuedPush],
        keys: Dedupe,
        *,
        publish: Publish,
        clock: Clock,
        locks: LockTable,
        tallies: Tallies,
    ) -> None:
        self._database = database
        self._publish = publish
        self._clock = clock
        self._locks = locks
        self._backlog = backlog
        self._keys = keys
        self._tallies = tallies
        self.on_flush: OnFlush = _nobody
        self._full: dict[Address, int] = {}  # Mailboxes that were full lately, and when.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-ingress")

    async def write(self) -> None:
        """Store batches until the backlog is closed and empty."""
        is_over = False
        while not is_over:
            try:
                is_over = not await self._write_batch()
            except Exception:  # Whatever it is: a writer that ended would store nothing any more.
                _log.exception("the writer of pushes failed in a way that nobody thought of, and goes on")
                await asyncio.sleep(limits.INGRESS_FLUSH_SECONDS)

    async def _write_batch(self) -> bool:
        """Store a batch; whether there was one."""
        batch = await self._backlog.batch()
        if not batch:
            return False
        started, given_up = time.perf_counter(), threading.Event()
        try:
            self._settle(batch, await self._aside(self._store, batch, given_up))
        except Exception as error:
            given_up.set()
            self._lose([each for each in batch if each.reservation.stage < Stage.STORED], error)
        self.on_flush(len(batch), time.perf_counter() - started)
        return True

    async def load(self) -> None:
        """Remember the keys that were written down, as far as they can be read."""
        try:
            self._keys.restore(await self._aside(self._load))
        except Exception as error:
            _log.warning("the keys of earlier pushes cannot be read, so they are not recognised: %s", why(error))

    async def save(self) -> None:
        """Write down the keys of what is stored, if that is possible."""
        try:
            await self._aside(self._save, self._keys.stored())
        except Exception as error:
            self._keys.has_news = True
            _log.warning("the keys of pushes could not be written down, and will be soon: %s", why(error))

    def was_full(self, to: Address) -> bool:
        """Whether a mailbox had no room a moment ago."""
        at_ms = self._full.get(to)
        return at_ms is not None and self._clock.now_ms() - at_ms < limits.INGRESS_FULL_SECONDS * 1_000

    def prune(self) -> None:
        """Forget which mailboxes had no room a while ago."""
        self._full = {to: at_ms for to, at_ms in self._full.items() if self.was_full(to)}

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _store(self, batch: list[QueuedPush], given_up: threading.Event) -> list[Any]:
        paths: list[tuple[str, ...]] = [_DEDUPE]
        paths += {("inbox", str(each.to)) for each in batch}
        paths += {("outbox", str(each.sender)) for each in batch}  # Receipts are written there.
        with self._locks.acquire_all(paths, timeout_seconds=limits.INGRESS_STORE_SECONDS):
            outcomes, events = self._database.transact(_send_all, batch, given_up)
        self._publish(events)
        return outcomes

    def _save(self, entries: list[Entry]) -> None:
        since_ms = self._clock.now_ms() - self._keys.ttl_ms
        with self._locks.acquire(_DEDUPE, timeout_seconds=limits.INGRESS_STORE_SECONDS):
            self._database.transact(dedupe.save, entries, since_ms=since_ms, most=self._keys.most, tier=Tier.IMPORTANT)

    def _load(self) -> list[Entry]:
        return self._database.read(dedupe.load, tier=Tier.IMPORTANT)

    def _settle(self, batch: list[QueuedPush], outcomes: list[Any]) -> None:
        refused: Counter[str] = Counter()
        for each, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                _, each.reservation.was_there = outcome
                self._keys.settle(each.reservation)
                continue
            if isinstance(outcome, HoldfastError):
                reason = outcome
            else:
                _log.error("a push could not be stored, in a way that nobody expected", exc_info=outcome)
                reason = HoldfastError("The server failed; its log says how")
            if isinstance(reason, MailboxFull):
                self._full[each.to] = self._clock.now_ms()
            refused[reason.code] += 1
            self._drop(each, reason)
        if refused:
            counts = ", ".join(f"{code} {count}" for code, count in sorted(refused.items()))
            _log.warning("mailboxes refused %s of %s pushes: %s", refused.total(), len(batch), counts)

    def _lose(self, batch: list[QueuedPush], error: Exception) -> None:
        _log.error(
            "a batch of pushes was dropped: %s",
            why(error),
            extra={"pushes": len(batch), "waiting": len(self._backlog)},
            exc_info=None if isinstance(error, HoldfastError | TimeoutError) else error,
        )
        reason = Busy(f"The push could not be stored ({why(error)}); push it again, with the same key")
        for each in batch:
            self._drop(each, reason)

    def _drop(self, each: QueuedPush, reason: HoldfastError) -> None:
        if not each.hurries:  # Whoever waits for it hears of it, and has been promised nothing.
            self._tallies.lost[reason.code] += 1
        self._keys.release(each.reservation, reason)

    async def _aside(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work` on the writer's thread.

        Raises:
            TimeoutError: it took too long. If it has begun, it goes on.
        """
        begun = self._thread.submit(work, *args)
        done, over = asyncio.wrap_future(begun), asyncio.get_running_loop().create_future()
        stop = ring_after(self._clock, limits.INGRESS_STORE_SECONDS, lambda: wake(over))
        try:
            await asyncio.wait({done, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop()
            done.add_done_callback(_hear)
        if done.done():
            return done.result()
        begun.cancel()
        raise TimeoutError(f"it took more than {limits.INGRESS_STORE_SECONDS:g} s")


def why(error: Exception) -> str:
    """An error in a few words."""
    return str(error) if isinstance(error, HoldfastError | TimeoutError) and str(error) else type(error).__name__


def _send_all(
    tx: Transaction, batch: list[QueuedPush], given_up: threading.Event
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """What became of each push: the id of its mail and whether it was there, or why it is not."""
    if given_up.is_set():
        raise Busy("The batch was given up while it waited for its turn")
    outcomes = run_batch(tx, [(_send, each) for each in batch], Exception)
    assert len(outcomes) == len(batch), "INGRESS_BATCH_BYTES_MAX leaves room for all of a batch"
    return outcomes, tx.events


def _send(tx: Transaction, each: QueuedPush) -> Any:
    """A layer checks before it writes, so a mail that is refused has written nothing but the note of it."""
    try:
        return mailboxes.send(tx, each.sender, each.to, each.mail)
    except (Validation, Busy, NotAllowed, WorldNotActive) as error:
        return error


def _hear(done: "asyncio.Future[Any]") -> None:
    """What comes after its time is up concerns nobody."""
    if not done.cancelled():
        done.exception()


def _nobody(pushes: int, seconds: float) -> None:
    """Nobody wants to be told of flushes."""
    del pushes, seconds
