"""The writer of pushes: stores the batches of the ingress buffer as mail, each batch in one synced commit.

Commits run in one dedicated thread, one at a time. A commit that takes too long is abandoned. If it has not started by
then, it never happens. If it is being synced, it may still succeed; a retry then finds the mail stored.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fastness import limits
from fastness.clock import Clock
from fastness.errors import Busy, FastnessError, MailboxFull, NotAllowed, Validation, WorldNotActive, WorldNotFound
from fastness.kv import Database, Result, Transaction
from fastness.kv.batch import run_batch
from fastness.layers import dedupe, mailboxes
from fastness.layers.dedupe import Entry
from fastness.layers.mailboxes import Address
from fastness.runtime.ingress.buffer import IngressBuffer
from fastness.runtime.ingress.dedupe import Dedupe, Stage
from fastness.runtime.ingress.validation import IngressCounters, QueuedPush
from fastness.runtime.timers import call_after, wake
from fastness.tiers import Tier

SendOutcome = tuple[str, bool] | Exception  # The id of the mail and whether it is a duplicate, or the error.

_log = logging.getLogger("fastness.ingress")

OnFlush = Callable[[int, float], None]  # The number of pushes in a batch, and the duration of its commit in seconds.

_REST_BATCH: Final = limits.INGRESS_BATCH_BYTES_MAX // limits.MAIL_BYTES_MAX  # Pushes that fit one commit, of any size.


class PushWriter:
    """Stores the pushes of the buffer, and saves their dedupe keys."""

    def __init__(
        self,
        database: Database,
        buffer: IngressBuffer[QueuedPush],
        keys: Dedupe,
        *,
        clock: Clock,
        counters: IngressCounters,
    ) -> None:
        self._database = database
        self._clock = clock
        self._buffer = buffer
        self._keys = keys
        self._tallies = counters
        self.on_flush: OnFlush = _ignore_flush
        self._full: dict[Address, int] = {}  # Mailboxes that were full recently, and when.
        self._unsettled: dict[int, QueuedPush] = {}  # Of the current batch, by identity: not committed, not refused.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastness-ingress")

    async def write(self) -> None:
        """Store batches until the buffer is closed and empty."""
        is_closed = False
        while not is_closed:
            try:
                is_closed = not await self._write_batch()
            except Exception:  # The writer must not end: nothing would be stored any more.
                _log.exception("unexpected error in the writer of pushes; it continues")
                await asyncio.sleep(limits.INGRESS_FLUSH_SECONDS)

    async def _write_batch(self) -> bool:
        """Store the next batch; drop what cannot be stored. False if the buffer is closed and empty."""
        batch = await self._buffer.next_batch()
        if not batch:
            return False
        self._unsettled |= {id(each): each for each in batch}
        started, abandoned = time.perf_counter(), threading.Event()
        try:
            self._settle(batch, await self._run_in_writer_thread(self._store, batch, abandoned))
        except Exception as error:
            abandoned.set()
            self._drop_batch([each for each in batch if each.reservation.stage < Stage.STORED], error)
        self._forget(batch)
        self.on_flush(len(batch), time.perf_counter() - started)
        return True

    def _forget(self, batch: list[QueuedPush]) -> None:
        for each in batch:
            self._unsettled.pop(id(each), None)

    def store_rest(self) -> None:
        """Store what is left when the event loop has ended, and with it the tasks of the ingress."""
        rest = [*self._unsettled.values(), *self._buffer.take_all()]
        self._unsettled.clear()
        for start in range(0, len(rest), _REST_BATCH):
            batch = rest[start : start + _REST_BATCH]
            try:
                outcomes = self._store(batch, threading.Event())
            except Exception as error:
                _log.error("%s pushes that were accepted are lost: %s", len(batch), short_reason(error))
                continue
            for each, outcome in zip(batch, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._keys.mark_stored(each.reservation)
        if self._keys.has_unsaved:
            try:
                self._save(self._keys.stored())
            except Exception as error:
                _log.warning("the dedupe keys of pushes could not be saved: %s", short_reason(error))

    async def load(self) -> None:
        """Load the saved dedupe keys; a failure is logged."""
        try:
            self._keys.restore(await self._run_in_writer_thread(self._load))
        except Exception as error:
            _log.warning(
                "the saved dedupe keys cannot be read, so earlier pushes are not deduplicated: %s", short_reason(error)
            )

    async def save(self) -> None:
        """Save the dedupe keys of stored pushes; a failure is logged and retried later."""
        try:
            await self._run_in_writer_thread(self._save, self._keys.stored())
        except asyncio.CancelledError:  # The ingress closes, and saves again.
            self._keys.has_unsaved = True
            raise
        except Exception as error:
            self._keys.has_unsaved = True
            _log.warning("the dedupe keys of pushes could not be saved; retrying soon: %s", short_reason(error))

    def is_recently_full(self, to: Address) -> bool:
        """Whether a mailbox was full within INGRESS_FULL_SECONDS."""
        at_ms = self._full.get(to)
        return at_ms is not None and self._clock.now_ms() - at_ms < limits.INGRESS_FULL_SECONDS * 1_000

    def prune(self) -> None:
        """Remove the records of mailboxes that were full longer ago."""
        self._full = {to: at_ms for to, at_ms in self._full.items() if self.is_recently_full(to)}

    def close(self) -> None:
        """Start no more commits."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _store(self, batch: list[QueuedPush], abandoned: threading.Event) -> list[SendOutcome]:
        outcomes = self._database.transact(_send_all, batch, abandoned)
        self._forget(batch)
        return outcomes

    def _save(self, entries: list[Entry]) -> None:
        since_ms = self._clock.now_ms() - self._keys.ttl_ms
        self._database.transact(dedupe.save, entries, since_ms=since_ms, most=self._keys.keys_max, tier=Tier.IMPORTANT)

    def _load(self) -> list[Entry]:
        return self._database.read(dedupe.load, tier=Tier.IMPORTANT)

    def _settle(self, batch: list[QueuedPush], outcomes: list[SendOutcome]) -> None:
        refused: Counter[str] = Counter()
        for each, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                _, each.reservation.is_duplicate = outcome
                self._keys.settle(each.reservation)
                continue
            if isinstance(outcome, FastnessError):
                reason = outcome
            else:
                _log.error("unexpected error while storing a push", exc_info=outcome)
                reason = FastnessError("Unexpected error in the server; see its log")
            if isinstance(reason, MailboxFull):
                self._full[each.to] = self._clock.now_ms()
            refused[reason.code] += 1
            self._drop_push(each, reason)
        if refused:
            counts = ", ".join(f"{code} {count}" for code, count in sorted(refused.items()))
            _log.warning("mailboxes refused %s of %s pushes: %s", refused.total(), len(batch), counts)

    def _drop_batch(self, batch: list[QueuedPush], error: Exception) -> None:
        _log.error(
            "a batch of pushes was dropped: %s",
            short_reason(error),
            extra={"pushes": len(batch), "waiting": len(self._buffer)},
            exc_info=None if isinstance(error, FastnessError | TimeoutError) else error,
        )
        reason = Busy(
            f"The push could not be stored ({short_reason(error)}); push it again with the same idempotency key"
        )
        for each in batch:
            self._drop_push(each, reason)

    def _drop_push(self, each: QueuedPush, reason: FastnessError) -> None:
        if not each.is_awaited:  # An awaited push was not acknowledged, and its caller gets the error.
            self._tallies.lost[reason.code] += 1
        self._keys.release(each.reservation, reason)

    async def _run_in_writer_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        """The result of `work` in the writer's thread.

        Raises:
            TimeoutError: it took too long. If it has started, it continues in the background.
        """
        try:
            submitted = self._thread.submit(work, *args)
        except RuntimeError:  # The program ends: no thread takes work any more, but a daemon thread may run this loop.
            return work(*args)
        done, timed_out = asyncio.wrap_future(submitted), asyncio.get_running_loop().create_future()
        stop = call_after(self._clock, limits.INGRESS_STORE_SECONDS, lambda: wake(timed_out))
        try:
            await asyncio.wait({done, timed_out}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop()
            done.add_done_callback(_ignore_late_result)
        if done.done():
            return done.result()
        submitted.cancel()
        raise TimeoutError(f"it took more than {limits.INGRESS_STORE_SECONDS:g} s")


def short_reason(error: Exception) -> str:
    """The message of an expected error, or the type of any other one."""
    return str(error) if isinstance(error, FastnessError | TimeoutError) and str(error) else type(error).__name__


def _send_all(tx: Transaction, batch: list[QueuedPush], abandoned: threading.Event) -> list[SendOutcome]:
    """The outcome of each push: the id of its mail and whether it is a duplicate, or the error."""
    if abandoned.is_set():
        raise Busy("The batch was abandoned before its commit started")
    outcomes = run_batch(tx, [(_send, each) for each in batch], Exception)
    assert len(outcomes) == len(batch), "INGRESS_BATCH_BYTES_MAX keeps a batch within one transaction"
    return outcomes


def _send(tx: Transaction, each: QueuedPush) -> SendOutcome:
    """Send one mail. A layer checks before it writes, so a rejected mail has written nothing but its event."""
    try:
        return mailboxes.send(tx, each.sender, each.to, each.mail)
    except (Validation, Busy, NotAllowed, WorldNotActive, WorldNotFound) as error:
        return error


def _ignore_late_result(done: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of abandoned work, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


def _ignore_flush(pushes: int, seconds: float) -> None:
    """Used when no listener is registered."""
    del pushes, seconds
