"""What a worker does with failures, whether it runs on threads or on an event loop."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from holdfast.errors import Closed, InvalidArgument, Validation

_log = logging.getLogger("holdfast.worker")
WAIT_SECONDS: Final = 1.0  # Whoever waits for messages looks this often whether it is to stop.


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How soon a consumer goes on after the plane failed it."""

    at_once: int = 3
    first_seconds: float = 0.25
    longest_seconds: float = 300.0

    def pause_seconds(self, failures: int) -> float:
        """How long to rest after so many failures in a row."""
        if failures <= self.at_once:
            return 0.0
        return min(self.first_seconds * 2.0 ** min(failures - self.at_once - 1, 60), self.longest_seconds)


def back_off(failures: int) -> float:
    """How many seconds a message rests after so many failures: 1, 2, 4, up to five minutes."""
    return min(2.0 ** min(failures - 1, 60), 300.0)


class WorkerStats(msgspec.Struct):
    """What a worker has done so far."""

    handled: int = 0
    failed: int = 0
    deferred: int = 0
    restarts: int = 0


class Consumers:
    """What both kinds of workers have in common."""

    def __init__(
        self,
        plane: Any,
        handlers: Mapping[str, Callable[[Any], Any]],
        *,
        concurrency: int = 1,
        owner: str | None = None,
        with_state: bool = False,
        visibility_seconds: float | None = None,
        extend_for_seconds: float | None = None,
        retry_delay_seconds: Callable[[int], float] = back_off,
        restarts: RestartPolicy | None = None,
        on_error: Callable[[Exception, str], None] | None = None,
        drain_seconds: float = 10.0,
    ) -> None:
        """Handle the messages of each queue by its handler, `concurrency` at a time for each.

        Args:
            handlers: by the name of the queue; a handler takes a message, and what it returns is not looked at.
            retry_delay_seconds: how long a message rests after so many failures.
            restarts: how soon to go on after the plane failed.
            on_error: is given every error, and the name of its queue.
            drain_seconds: how long `stop` waits for handlers that are at work.
        """
        if not handlers:
            raise InvalidArgument("A worker needs at least one handler; give a queue's name and a function")
        if concurrency < 1 or drain_seconds < 0:
            raise InvalidArgument("concurrency is at least 1, and drain_seconds is not negative")
        self.stats = WorkerStats()
        self._plane = plane
        self._handlers = dict(handlers)
        self._concurrency = concurrency
        self._options = {
            "owner": owner,
            "with_state": with_state,
            "visibility_seconds": visibility_seconds,
            "extend_for_seconds": extend_for_seconds,
        }
        self._delay = retry_delay_seconds
        self._restarts = restarts or RestartPolicy()
        self._on_error = on_error
        self._drain_seconds = drain_seconds
        self._at_work: set[Any] = set()

    def _told(self, error: Exception, queue: str) -> None:
        """The one path of every error."""
        self.stats.failed += 1
        _log.warning("%s: %s: %s", queue, type(error).__name__, error)
        if self._on_error is not None:
            try:
                self._on_error(error, queue)
            except Exception:
                _log.exception("on_error failed itself")

    @staticmethod
    def _is_final(error: Exception) -> bool:
        """Whether trying again would only fail again."""
        return isinstance(error, Validation | Closed)


def reason_of(error: Exception) -> str:
    """What a message is said to have failed of; names of files may hold what nobody can encode."""
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
