"""Limits on waiting consumers, and how often they poll."""

from random import Random

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Database
from fastness.kv.serial_database import SerialDatabase
from fastness.limits import WAITING_CONSUMERS_MAX


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of everything that waits for a commit."""

    consumers_max: int = 0  # Consumers that may wait at once, over all queues. 0: `WAITING_CONSUMERS_MAX`.
    poll_seconds: float = 3.0  # Poll interval where several processes share a store.
    poll_jitter_seconds: float = 0.5  # Random addition that spreads the polls of several nodes.
    resilient_poll_seconds: float = 300.0  # Applies to waiting callers if it is shorter than `poll_seconds`. 0: never.

    def __post_init__(self) -> None:
        if not self.consumers_max:
            msgspec.structs.force_setattr(self, "consumers_max", WAITING_CONSUMERS_MAX)
        if (
            self.consumers_max < 1
            or self.poll_seconds <= 0
            or min(self.poll_jitter_seconds, self.resilient_poll_seconds) < 0
        ):
            raise InvalidArgument(
                "consumers_max and poll_seconds must be positive; "
                "poll_jitter_seconds and resilient_poll_seconds must be at least 0"
            )


class Polling:
    """How long a caller that waits for a commit may sleep before it reads again.

    A commit wakes those that wait for it. Where several processes share a store, a notification can be lost, so waiting
    callers also poll. An embedded store loses none and is never polled.
    """

    def __init__(self, database: Database, options: ConsumerOptions) -> None:
        self._is_shared = not isinstance(database, SerialDatabase)
        self._seconds = min(options.poll_seconds, options.resilient_poll_seconds or options.poll_seconds)
        self._jitter_seconds = options.poll_jitter_seconds
        self._random = Random()

    def pause_ms(self, most_ms: int) -> int:
        """The milliseconds until the next read, at most `most_ms`."""
        if not self._is_shared:
            return most_ms
        return min(most_ms, round((self._seconds + self._random.random() * self._jitter_seconds) * 1_000))
