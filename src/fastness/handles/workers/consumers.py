"""What both kinds of workers share: options, statistics, the messages that they hold, and error handling."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypedDict, TypeVar

import msgspec

from fastness import limits
from fastness.errors import FastnessError, InvalidArgument, RetryAdvice
from fastness.handles.arguments import check_delay_on_close
from fastness.handles.task_control import Reject, RetryLater
from fastness.wire.queues import MessageLease, lease_mismatch
from fastness.wire.tasks import TASK_ATTRIBUTE

Item = TypeVar("Item", bound="HeldMessage")
Some = TypeVar("Some")

_log = logging.getLogger("fastness.worker")
WAIT_SECONDS: Final = 1.0  # How often a consumer that waits for messages checks whether to stop.
WAIT_SECONDS_MIN: Final = 0.001  # A plane rounds waits to milliseconds.
_MEAN_WEIGHT: Final = (
    0.125  # Of the last handler: one slow handler ends the prefetch, and about 30 quick ones begin it.
)


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How soon a consumer retries after an error of the plane."""

    at_once: int = 3
    first_seconds: float = 0.25
    longest_seconds: float = 300.0

    def pause_seconds(self, failures: int) -> float:
        """How long to wait after this many failures in a row."""
        if failures <= self.at_once:
            return 0.0
        return min(self.first_seconds * 2.0 ** min(failures - self.at_once - 1, 60), self.longest_seconds)


WorkerOutcome = Literal["acked", "settled", "failed", "deferred", "cancelled", "lost"]  # What became of a message.


class WorkerStats(msgspec.Struct):
    """Counts of a worker since it was created. Of messages, also where a handler gets a batch of them."""

    handled: int = 0
    failed: int = 0  # Failed attempts, and errors of the plane.
    deferred: int = 0  # Returned without counting a failure.
    restarts: int = 0  # Errors of the plane.
    cancelled: int = 0  # Cancelled while the worker had them.


class Window:
    """How many messages of a queue a worker may hold: one for each slot, or a batch, and `prefetch` more.

    By itself it buffers as many as its slots handle within `WORKER_WINDOW_SECONDS`, by the mean duration of the last
    handlers: none before the first handler has finished, and none while handlers take longer than that. With batches,
    one call brings many messages anyway, and it buffers none.

    While messages arrive that were delivered before, it holds one for each slot: if one of them ends its process again,
    that counts as a failure of everything the process holds. A given `prefetch` without batches is kept.
    """

    def __init__(self, concurrency: int, prefetch: int | None, batch: int | None = None) -> None:
        self.concurrency = concurrency
        self.batch = 1 if batch is None else batch
        self.has_batches = batch is not None
        self.is_automatic = prefetch is None and not self.has_batches
        self._prefetch = 0 if prefetch is None and self.has_batches else prefetch
        self._mean_seconds: float | None = None
        self._has_repeated = False  # Of the last messages, one was delivered before.

    @property
    def is_used(self) -> bool:
        """Whether messages may be buffered."""
        return self._prefetch != 0 or self.has_batches

    @property
    def prefetch(self) -> int:
        """How many messages to buffer beyond the busy slots."""
        if self._prefetch is not None:
            return self._prefetch
        if self._mean_seconds is None or self._mean_seconds >= limits.WORKER_WINDOW_SECONDS or self._has_repeated:
            return 0
        most = min(self.concurrency * limits.WORKER_PREFETCH_MAX, limits.MESSAGES_MAX)
        if self._mean_seconds * most <= self.concurrency * limits.WORKER_WINDOW_SECONDS:
            return most
        return int(self.concurrency * limits.WORKER_WINDOW_SECONDS / self._mean_seconds)

    def record(self, seconds: float) -> None:
        """Take the duration of a handler into account."""
        if self._mean_seconds is None:
            self._mean_seconds = seconds
        else:
            self._mean_seconds += (seconds - self._mean_seconds) * _MEAN_WEIGHT

    def received(self, attempts: Iterable[int]) -> None:
        """Take into account how often the messages that were received have been delivered."""
        self._has_repeated = any(attempt > 1 for attempt in attempts)

    def room(self, held: int, busy: int = 0) -> int:
        """How many messages to ask for, if this many are held, and so many slots are busy; 0: none."""
        room = self.concurrency * self.batch + self.prefetch - held
        if self.has_batches and self._has_repeated:
            room = min(room, self.concurrency - busy)
        return min(max(room, 0), limits.MESSAGES_MAX)


def batches(messages: Sequence[Some]) -> Iterator[Sequence[Some]]:
    """The messages, in as few batches as one call each can settle."""
    return (messages[start : start + limits.MESSAGES_MAX] for start in range(0, len(messages), limits.MESSAGES_MAX))


class HeldMessage(Protocol):
    """The part of a received message that says whether it is to be handled, and what became of it."""

    settled: bool
    lost: bool
    cancelled: bool

    @property
    def id(self) -> str: ...

    @property
    def attempts(self) -> int: ...

    @property
    def failure_attempts(self) -> int: ...

    @property
    def attributes(self) -> Mapping[str, str]: ...

    @property
    def lease(self) -> MessageLease: ...


class Buffer(Generic[Item]):
    """Received messages that wait for a handler.

    A batch is ready when it is full, or `wait_seconds` after its first message arrived. A message that was delivered
    before is a batch of its own: if it ends the process again, no other message of a batch fails with it.
    """

    def __init__(self, batch: int, wait_seconds: float) -> None:
        self._batch = batch
        self._wait_seconds = wait_seconds
        self._new: deque[tuple[float, Item]] = deque()  # With the times of their arrival.
        self._repeated: deque[tuple[float, Item]] = deque()

    def __len__(self) -> int:
        return len(self._new) + len(self._repeated)

    def __iter__(self) -> Iterator[Item]:
        return (message for some in (self._repeated, self._new) for _, message in some)

    @property
    def repeated(self) -> int:
        """How many of the messages were delivered before, and are handled alone."""
        return len(self._repeated)

    def add(self, messages: Iterable[Item], now: float) -> None:
        for message in messages:
            is_alone = self._batch > 1 and message.attempts > 1
            (self._repeated if is_alone else self._new).append((now, message))

    def take(self, now: float) -> list[Item]:
        """The messages of the next call of a handler; none if no batch is ready."""
        is_ready = self._new_ready_at(now) <= now
        if self._repeated and not (is_ready and self._new[0][0] < self._repeated[0][0]):
            return [self._repeated.popleft()[1]]
        return [self._new.popleft()[1] for _ in range(min(self._batch, len(self._new)))] if is_ready else []

    def ready_in(self, now: float) -> float | None:
        """After how many seconds a batch is ready; None if there is no message."""
        if self._repeated:
            return 0.0
        return max(self._new_ready_at(now) - now, 0.0) if self._new else None

    def clear(self) -> list[Item]:
        """Take all messages out."""
        messages = list(self)
        self._new.clear()
        self._repeated.clear()
        return messages

    def arrived_before(self, moment: float) -> list[Item]:
        return [message for some in (self._repeated, self._new) for arrived, message in some if arrived <= moment]

    @property
    def oldest(self) -> float | None:
        """When the message arrived that has waited the longest; None if there is none."""
        return min([some[0][0] for some in (self._repeated, self._new) if some], default=None)

    def _new_ready_at(self, now: float) -> float:
        if not self._new:
            return float("inf")
        return now if len(self._new) >= self._batch else self._new[0][0] + self._wait_seconds


class Handling(Generic[Item]):
    """A running call of a handler, and its messages."""

    __slots__ = ("messages", "started")

    def __init__(self, messages: list[Item], started: float) -> None:
        self.messages = messages
        self.started = started


AnyHandling = TypeVar("AnyHandling", bound=Handling[Any])


class HeldMessages(Generic[Item, AnyHandling]):
    """The messages of a queue that a worker holds.

    received ──► buffered ──► running ──► done ──► acknowledged, with the next receive or by themselves
    """

    def __init__(
        self, name: str, handler: Callable[[list[Item]], Any], window: Window, *, batch_wait_seconds: float
    ) -> None:
        self.name = name
        self.handler = handler
        self.window = window
        self.buffered: Buffer[Item] = Buffer(window.batch, batch_wait_seconds)
        self.buffered_at = 0.0  # The time of the last receive.
        self.running: dict[AnyHandling, None] = {}  # In the order of their starts.
        self.done: list[Item] = []
        self.done_at = 0.0  # When the first of them was handled.
        self.acking = 0  # Messages that are being acknowledged by themselves.

    def room(self, done: int = 0) -> int:
        """How many messages may be received, if this many handled ones are not acknowledged with that."""
        running, buffered = len(self.running), self.buffered
        held = running * self.window.batch + len(buffered) + self.acking + done
        return self.window.room(held, running + buffered.repeated)

    def unwanted(self, messages: list[Item]) -> list[Item]:
        """Those of received messages that are returned: with batches, one that was delivered before needs a slot."""
        if not self.window.has_batches:
            return []
        repeated = [message for message in messages if message.attempts > 1]
        return repeated[max(self.window.concurrency - len(self.running) - self.buffered.repeated, 0) :]

    @property
    def may_be_late(self) -> bool:
        """Whether messages wait to be acknowledged, or for a handler. A given prefetch and batches may wait."""
        return bool(self.done or (self.window.is_automatic and self.buffered))

    def add_buffered(self, messages: Iterable[Item], now: float) -> None:
        self.buffered.add(messages, now)
        self.buffered_at = now

    def add_done(self, messages: list[Item], now: float) -> None:
        if not self.done:
            self.done_at = now
        self.done += messages

    def take_done(self) -> list[Item]:
        done, self.done = self.done[: limits.MESSAGES_MAX], self.done[limits.MESSAGES_MAX :]
        return done

    def wait_seconds(self, now: float) -> float:
        """How long a receive may wait for messages: until the buffered ones are a batch."""
        ready_in = self.buffered.ready_in(now)
        return WAIT_SECONDS if ready_in is None else min(max(ready_in, WAIT_SECONDS_MIN), WAIT_SECONDS)

    def held_for_long(self, now: float) -> list[Item]:
        """The messages to ask about whether they are cancelled."""
        moment = now - limits.WORKER_CANCEL_SECONDS
        handlings = [handling for handling in self.running if handling.started <= moment]
        messages = [message for handling in handlings for message in handling.messages]
        return [
            message
            for message in (*messages, *self.buffered.arrived_before(moment))
            if not message.settled and not message.lost
        ]

    def held_for_long_in(self, now: float) -> float | None:
        """After how many seconds to look again for messages that are held for long; None if none is held."""
        begins = [handling.started for handling in self.running][:1]
        if self.buffered.oldest is not None:
            begins.append(self.buffered.oldest)
        if not begins:
            return None
        pause = min(begins) + limits.WORKER_CANCEL_SECONDS - now
        return pause if pause > 0 else limits.WORKER_CANCEL_SECONDS  # The oldest ones may be lost or settled.


class CancelQuestions:
    """Which messages of a queue a worker asks about next, and for how long: within a second about all of them."""

    def __init__(self) -> None:
        self._calls = 0

    def next(self, held: Sequence[Item]) -> tuple[Sequence[Item], float]:
        parts = list(batches(held))
        part = parts[self._calls % len(parts)]
        self._calls += 1
        return part, limits.WORKER_CANCEL_WAIT_SECONDS / len(parts)


class WorkerOptions(TypedDict, Generic[Item], total=False):
    """The options of `Worker` and `AsyncWorker`; `Consumers` describes them."""

    concurrency: int
    prefetch: int | None
    owner: str | None
    with_state: bool
    visibility_seconds: float | None
    extend_for_seconds: float | None
    retry_delay_seconds: Callable[[int], float] | None
    restarts: "RestartPolicy | None"
    drain_seconds: float
    delay_on_close_seconds: float | None
    on_start: Callable[[], object] | None
    on_message: Callable[[Item], object] | None
    on_settled: Callable[[Item, WorkerOutcome], object] | None
    on_error: Callable[[Exception, str], object] | None
    on_stop: Callable[[], object] | None


class ReceiveOptions(TypedDict):
    """The options that a worker passes to `receive_many`."""

    owner: str | None
    with_state: bool
    visibility_seconds: float | None
    extend_for_seconds: float | None
    delay_on_close_seconds: float | None


class Consumers(Generic[Item]):
    """The base of both kinds of workers."""

    def __init__(
        self,
        handlers: Mapping[str, Callable[[Any], Any]],
        *,
        batch: int | None = None,
        batch_wait_seconds: float = 0.0,
        concurrency: int = 1,
        prefetch: int | None = None,
        owner: str | None = None,
        with_state: bool = False,
        visibility_seconds: float | None = None,
        extend_for_seconds: float | None = None,
        retry_delay_seconds: Callable[[int], float] | None = None,
        restarts: RestartPolicy | None = None,
        drain_seconds: float = 10.0,
        delay_on_close_seconds: float | None = None,
        on_start: Callable[[], object] | None = None,
        on_message: Callable[[Item], object] | None = None,
        on_settled: Callable[[Item, WorkerOutcome], object] | None = None,
        on_error: Callable[[Exception, str], object] | None = None,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        """Run the handler of each queue for its messages.

        Args:
            handlers: a function for each queue name; it takes a message, or with `batch` a list of messages. Its result
                is ignored.
            batch: how many messages a handler gets at a time, 1 to 256: as soon as so many have arrived, or
                `batch_wait_seconds` after the first of them. What the handler has not settled itself is acknowledged
                when it returns, and nacked with the error when it raises, in one call. A message that was delivered
                before comes alone, so that it cannot take others to the dead letters.

                    def index(messages: list[Message]) -> None:
                        search.add_documents([message.json() for message in messages])

                    Worker(plane, {"documents": index}, batch=100, batch_wait_seconds=0.5).run()

            batch_wait_seconds: how long a message waits for others, up to 60; 0: a batch is what one receive returned.
            concurrency: how many messages of each queue, or batches, are handled at a time.
            prefetch: how many messages of each queue to receive beyond the busy handlers. By default as many as are
                handled within about 20 ms: none while handlers are slow, and up to 32 for each slot and 256 in all
                while they are quick. Then handled messages are acknowledged together, with the request for the next
                ones, or after 20 to 40 ms if a handler takes longer; a crash delivers them again, at most a window.
                With 0, a message is acknowledged with the next receive, or at once if that waits for messages.
            owner: the consumer's name in leases; random by default.
            with_state: receive messages with their workflow state.
            visibility_seconds: the length of a lease, instead of the queue's policy.
            extend_for_seconds: how long leases are extended automatically; an hour by default.
            retry_delay_seconds: the delay after this many failures of a message, instead of the back-off of the
                queue's policy.
            restarts: how soon to retry after an error of the plane.
            drain_seconds: how long `stop` waits for running handlers.
            delay_on_close_seconds: the delay of messages that the worker returns when it stops, because they wait for a
                handler or their handler has not finished; at once by default. It does not count as a failure.
            on_start: called before the first message is received.
            on_message: called with every message before its handler runs.
            on_settled: called with every message that the worker is done with, and what became of it: `acked`;
                `settled`, by the handler itself; `failed`, and nacked; `deferred`, returned without counting a failure;
                `cancelled`; `lost`, because its lease ended before. A message that could not be settled because the
                plane failed is reported to `on_error` only.
            on_error: called with every error and the name of its queue.
            on_stop: called when the worker has stopped and settled its messages.

        An error of a hook (the functions `on_…`) is logged and has no other effect. Keep them short: they run where the
        worker does its work. Those of an AsyncWorker may be coroutine functions.

        While a handler runs for longer than 0.25 s, the worker asks whether its message is cancelled, in a call that
        waits for a second. `message.cancelled` is then set; an AsyncWorker also cancels the handler's task. Afterwards
        nothing is settled, and the message counts as `cancelled`.
        """
        if not handlers:
            raise InvalidArgument("A worker needs at least one handler; give a dictionary of queue names and functions")
        if concurrency < 1 or drain_seconds < 0:
            raise InvalidArgument(
                f"concurrency is {concurrency} and drain_seconds is {drain_seconds}; give at least 1 and 0"
            )
        if prefetch is not None and not 0 <= prefetch <= limits.MESSAGES_MAX:
            raise InvalidArgument(f"prefetch is {prefetch}; give 0 to {limits.MESSAGES_MAX}, or None")
        _check_batch(batch, batch_wait_seconds)
        if delay_on_close_seconds is not None:
            check_delay_on_close(delay_on_close_seconds)
        self.stats = WorkerStats()
        self.error: Exception | None = None  # What ended the worker, if no retry could succeed.
        self._handlers = dict(handlers) if batch is not None else {n: _one_by_one(h) for n, h in handlers.items()}
        self._batch = batch
        self._batch_wait_seconds = batch_wait_seconds
        self._asks_for_cancels = True  # Until the plane refuses to answer.
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._monotonic: Callable[[], float] = time.monotonic  # Measures handlers, and how long messages wait.
        self._receive_options: ReceiveOptions = {
            "owner": owner,
            "with_state": with_state,
            "visibility_seconds": visibility_seconds,
            "extend_for_seconds": extend_for_seconds,
            "delay_on_close_seconds": delay_on_close_seconds,
        }
        self._retry_delay_seconds = retry_delay_seconds
        self._restarts = restarts or RestartPolicy()
        self._drain_seconds = drain_seconds
        self._delay_on_close_seconds = delay_on_close_seconds
        self._on_start = on_start
        self._on_message = on_message
        self._on_settled = on_settled
        self._on_error = on_error
        self._on_stop = on_stop

    def _delay(self, failures: int) -> float | None:
        """The delay after this many failures of a message; None: the back-off of the queue's policy."""
        return None if self._retry_delay_seconds is None else self._retry_delay_seconds(failures)

    def _without_lost(self, messages: list[Item], queue: str) -> list[Item]:
        """The messages that are to be handled, without those whose leases ended while they were buffered."""
        kept: list[Item] = []
        for message in messages:
            if message.lost:
                self._count_lost(message, queue)
            else:
                kept.append(message)
        return kept

    def _count_handled(self, messages: Sequence[Item]) -> list[Item]:
        """The messages of a handler that has returned that are to be acknowledged; counts the others."""
        done: list[Item] = []
        for message in messages:
            if message.settled:
                self.stats.handled += 1
                self._note_handled(message, "settled")
            elif message.cancelled:
                self.stats.cancelled += 1
                self._note_handled(message, "cancelled")
            else:
                done.append(message)
        return done

    def _count_failed(self, error: Exception, queue: str, messages: Sequence[Item]) -> list[Item]:
        """The messages of a handler that has raised an error that are to be nacked; counts them and the others.

        The error is logged and passed to `on_error`, unless it is that of a handler whose messages are cancelled.
        """
        unsettled = [message for message in messages if not message.settled]
        failed = [message for message in unsettled if not message.cancelled]
        self.stats.cancelled += len(unsettled) - len(failed)
        if self._batch is not None:
            self.stats.handled += len(messages) - len(unsettled)
        if self._on_settled is not None:
            for message in messages:
                if message.settled or message.cancelled:
                    self._note_handled(message, "settled" if message.settled else "cancelled")
        if failed or not unsettled:
            self._report_failure(error, queue, failed or messages[:1])
        return failed

    def _report_failure(self, error: Exception, queue: str, messages: Sequence[Item]) -> None:
        """Count an error of a handler, log it, and pass it to `on_error`. What a task has decided has no traceback."""
        first, kind = messages[0], type(error).__name__
        decision = _decision(error, first)
        if len(messages) == 1:
            self.stats.failed += 1
            extra = {"queue": queue, "message_id": first.id, "attempt": first.attempts}
            text = decision or f"message {first.id} failed on attempt {first.attempts}: {kind}"
        else:
            self.stats.failed += len(messages)
            extra = {"queue": queue, "message_ids": [message.id for message in messages]}
            text = f"a batch of {len(messages)} messages failed, the first one is {first.id}: {kind}"
        _log.warning("%s: %s", queue, text, exc_info=None if decision else error, extra=extra)
        self._call_on_error(error, queue)

    def _report(self, error: Exception, queue: str) -> None:
        """Count an error, log it, and pass it to `on_error`."""
        self.stats.failed += 1
        _log.warning("%s: %s: %s", queue, type(error).__name__, error)
        self._call_on_error(error, queue)

    def _report_unsettled(self, error: Exception, queue: str) -> None:
        """Report that a message could not be acknowledged. Its lease will expire; that does not end the worker."""
        self._report(error, queue)
        self.stats.restarts += 1

    def _count_lost(self, message: Item, queue: str) -> None:
        """Count a message whose lease has ended; report it unless it was cancelled."""
        if message.cancelled:
            self.stats.cancelled += 1
            self._note_settled(message, "cancelled")
        else:
            self._report_unsettled(lease_mismatch(message.lease), queue)
            self._note_settled(message, "lost")

    def _count_acked(self, messages: Sequence[Item], queue: str, error: Exception | None = None) -> None:
        """Count the handled messages that a call has acknowledged, and report the others. `error` is the call's."""
        failed = False
        for message in messages:
            if message.settled:
                self.stats.handled += 1
                self._note_settled(message, "acked")
            elif message.lost:
                self._count_lost(message, queue)
            else:
                failed = True
        if failed and error is not None:
            self._report_unsettled(error, queue)

    def _note_unanswered(self, error: Exception, queue: str) -> None:
        """Log that the plane did not say which messages are cancelled, and ask no more if it never will."""
        _log.info("%s: cannot ask for cancelled messages: %s: %s", queue, type(error).__name__, error)
        if is_final(error):  # The token does not allow it. Lease renewals find them, too.
            self._asks_for_cancels = False

    def _call_on_error(self, error: Exception, queue: str) -> None:
        if self._on_error is not None:
            self._call_hook("on_error", self._on_error, error, queue)

    def _note_settled(self, message: Item, outcome: WorkerOutcome) -> None:
        """Pass to `on_settled` what became of a message."""
        if self._on_settled is not None:
            self._call_hook("on_settled", self._on_settled, message, outcome)

    def _note_handled(self, message: Item, outcome: WorkerOutcome) -> None:
        """`_note_settled` for a message whose handler has ended."""
        self._note_settled(message, outcome)

    def _note_returned(self, messages: Iterable[Item], outcome: WorkerOutcome) -> None:
        """Pass messages to `on_settled` that a call was to settle with `outcome`; some may be lost or cancelled."""
        if self._on_settled is not None:
            for message in messages:
                if message.settled or message.lost:
                    refused: WorkerOutcome = "cancelled" if message.cancelled else "lost"
                    self._note_settled(message, outcome if message.settled else refused)

    def _call_hook(self, name: str, hook: Callable[..., object], *args: object) -> None:
        """Call a hook. Its error is logged, and changes nothing."""
        try:
            hook(*args)
        except Exception:
            _log.exception("%s raised an error", name)


def is_final(error: Exception) -> bool:
    """Whether a retry of a call to the plane cannot succeed.

    The base class does not tell: unexpected errors of a server arrive as that, and may pass.
    """
    return isinstance(error, FastnessError) and type(error) is not FastnessError and error.retry is RetryAdvice.NEVER


def _check_batch(batch: int | None, wait_seconds: float) -> None:
    if batch is None and wait_seconds:
        raise InvalidArgument("batch_wait_seconds is given without batch; give the size of the batches, too")
    if batch is not None and not 1 <= batch <= limits.MESSAGES_MAX:
        raise InvalidArgument(f"batch is {batch}; give 1 to {limits.MESSAGES_MAX}, or None for one message at a time")
    if not 0 <= wait_seconds <= limits.WORKER_BATCH_WAIT_SECONDS_MAX:
        raise InvalidArgument(
            f"batch_wait_seconds is {wait_seconds}; give 0 to {limits.WORKER_BATCH_WAIT_SECONDS_MAX:.0f}"
        )


def _decision(error: Exception, message: HeldMessage) -> str | None:
    """What a task has decided about its message; None if it failed."""
    if not (message.settled and isinstance(error, Reject | RetryLater)):
        return None
    task, attempt = message.attributes.get(TASK_ATTRIBUTE), f"message {message.id} on attempt {message.attempts}"
    if isinstance(error, Reject):
        return f"task {task} rejected {attempt}: {error}"
    return f"task {task} returned {attempt}, to try again in {error.seconds:g} s: {error}"


def _one_by_one(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function for lists of one message."""
    return lambda messages: handler(messages[0])
