"""Limits on waiting consumers, and how often they poll."""

import os
from random import Random

import msgspec

from holdfast.errors import InvalidArgument


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the dispatcher."""

    consumers_max: int = 0  # Consumers that may wait at once. 0: 64 per CPU, at least 128 and at most 4,096.
    poll_seconds: float = 3.0  # Poll interval where commits of other processes are not notified.
    poll_jitter_seconds: float = 0.5  # Random addition that spreads the polls of several nodes.
    resilient_poll_seconds: float = 300.0  # Poll interval beside notifications, in case one is lost. 0: never.

    def __post_init__(self) -> None:
        if not self.consumers_max:
            msgspec.structs.force_setattr(self, "consumers_max", min(max(64 * (os.cpu_count() or 1), 128), 4_096))
        if (
            self.consumers_max < 1
            or self.poll_seconds <= 0
            or min(self.poll_jitter_seconds, self.resilient_poll_seconds) < 0
        ):
            raise InvalidArgument(
                "consumers_max and poll_seconds must be positive; "
                "poll_jitter_seconds and resilient_poll_seconds must be at least 0"
            )

    def resilient_poll_ms(self, jitter: Random) -> int:
        """The time until the next poll that does not depend on a notification."""
        if not self.resilient_poll_seconds:
            return 1 << 40
        return round((self.resilient_poll_seconds + jitter.random() * self.poll_jitter_seconds) * 1_000)
