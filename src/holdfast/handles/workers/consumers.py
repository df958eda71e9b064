"""What both kinds of workers share: options, statistics, how many messages to receive, and error handling."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar

import msgspec

from holdfast import limits
from holdfast.errors import HoldfastError, InvalidArgument, Retry
from holdfast.wire.queues import MessageLease, lease_mismatch

Handler = TypeVar("Handler", bound=Callable[[Any], object])
Item = TypeVar("Item")

_log = logging.getLogger("holdfast.worker")
WAIT_SECONDS: Final = 1.0  # How often a consumer that waits for messages checks whether to stop.
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


class WorkerStats(msgspec.Struct):
    """Counts of a worker since it was created."""

    handled: int = 0
    failed: int = 0
    deferred: int = 0
    restarts: int = 0


class Window:
    """How many messages of a queue a worker may hold: one for each slot, and `prefetch` more.

    By itself it buffers as many as its slots handle within `WORKER_WINDOW_SECONDS`, by the mean duration of the last
    handlers: none before the first handler has finished, and none while handlers take longer than that. It also buffers
    none while messages arrive that were delivered before: if one of them ends its process again, that counts as a
    failure of everything the process holds.
    """

    def __init__(self, concurrency: int, prefetch: int | None) -> None:
        self.concurrency = concurrency
        self.is_automatic = prefetch is None
        self._prefetch = prefetch
        self._mean_seconds: float | None = None
        self._has_repeated = False  # Of the last messages, one was delivered before.

    @property
    def is_used(self) -> bool:
        """Whether messages may be buffered."""
        return self._prefetch != 0

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

    def room(self, held: int) -> int:
        """How many messages to ask for, if this many are held; 0: none."""
        return min(max(self.concurrency + self.prefetch - held, 0), limits.MESSAGES_MAX)


def batches(messages: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """The messages, in as few batches as one call each can settle."""
    return (messages[start : start + limits.MESSAGES_MAX] for start in range(0, len(messages), limits.MESSAGES_MAX))


class Settled(Protocol):
    """The part of a received message that says what became of its acknowledgement."""

    settled: bool
    lost: bool

    @property
    def lease(self) -> MessageLease: ...


class WorkerOptions(TypedDict, total=False):
    """The options of `Worker` and `AsyncWorker`; `Consumers` describes them."""

    concurrency: int
    prefetch: int | None
    owner: str | None
    with_state: bool
    visibility_seconds: float | None
    extend_for_seconds: float | None
    retry_delay_seconds: Callable[[int], float] | None
    restarts: "RestartPolicy | None"
    on_error: Callable[[Exception, str], None] | None
    drain_seconds: float


class ReceiveOptions(TypedDict):
    """The options that a worker passes to `receive_many`."""

    owner: str | None
    with_state: bool
    visibility_seconds: float | None
    extend_for_seconds: float | None


class Consumers(Generic[Handler]):
    """The base of both kinds of workers."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        concurrency: int = 1,
        prefetch: int | None = None,
        owner: str | None = None,
        with_state: bool = False,
        visibility_seconds: float | None = None,
        extend_for_seconds: float | None = None,
        retry_delay_seconds: Callable[[int], float] | None = None,
        restarts: RestartPolicy | None = None,
        on_error: Callable[[Exception, str], None] | None = None,
        drain_seconds: float = 10.0,
    ) -> None:
        """Run the handler of each queue for its messages.

        Args:
            handlers: a function for each queue name; it takes a message, and its result is ignored.
            concurrency: how many messages of each queue are handled at a time.
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
            on_error: called with every error and the name of its queue.
            drain_seconds: how long `stop` waits for running handlers.
        """
        if not handlers:
            raise InvalidArgument("A worker needs at least one handler; give a dictionary of queue names and functions")
        if concurrency < 1 or drain_seconds < 0:
            raise InvalidArgument(
                f"concurrency is {concurrency} and drain_seconds is {drain_seconds}; give at least 1 and 0"
            )
        if prefetch is not None and not 0 <= prefetch <= limits.MESSAGES_MAX:
            raise InvalidArgument(f"prefetch is {prefetch}; give 0 to {limits.MESSAGES_MAX}, or None")
        self.stats = WorkerStats()
        self.error: Exception | None = None  # What ended the worker, if no retry could succeed.
        self._handlers = dict(handlers)
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._monotonic: Callable[[], float] = time.monotonic  # Measures handlers, and how long messages wait.
        self._receive_options: ReceiveOptions = {
            "owner": owner,
            "with_state": with_state,
            "visibility_seconds": visibility_seconds,
            "extend_for_seconds": extend_for_seconds,
        }
        self._retry_delay_seconds = retry_delay_seconds
        self._restarts = restarts or RestartPolicy()
        self._on_error = on_error
        self._drain_seconds = drain_seconds

    def _delay(self, failures: int) -> float | None:
        """The delay after this many failures of a message; None: the back-off of the queue's policy."""
        return None if self._retry_delay_seconds is None else self._retry_delay_seconds(failures)

    def _report_failure(self, error: Exception, queue: str, *, message_id: str, attempt: int) -> None:
        """Count an error of a handler, log it with its traceback, and pass it to `on_error`."""
        self.stats.failed += 1
        _log.warning(
            "%s: message %s failed on attempt %d: %s",
            queue,
            message_id,
            attempt,
            type(error).__name__,
            exc_info=error,
            extra={"queue": queue, "message_id": message_id, "attempt": attempt},
        )
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

    def _count_acked(self, messages: Sequence[Settled], queue: str, error: Exception | None = None) -> None:
        """Count the handled messages that a call has acknowledged, and report the others. `error` is the call's."""
        failed = False
        for message in messages:
            if message.settled:
                self.stats.handled += 1
            elif message.lost:
                self._report_unsettled(lease_mismatch(message.lease), queue)
            else:
                failed = True
        if failed and error is not None:
            self._report_unsettled(error, queue)

    def _call_on_error(self, error: Exception, queue: str) -> None:
        if self._on_error is not None:
            try:
                self._on_error(error, queue)
            except Exception:
                _log.exception("on_error raised an error")

    @staticmethod
    def _is_final(error: Exception) -> bool:
        """Whether a retry cannot succeed.

        The base class does not tell: unexpected errors of a server arrive as that, and may pass.
        """
        return isinstance(error, HoldfastError) and type(error) is not HoldfastError and error.retry is Retry.NEVER
