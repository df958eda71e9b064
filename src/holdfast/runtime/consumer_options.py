"""How long consumers may wait, how many of them, and how often they look by themselves."""

import os
from random import Random

import msgspec

from holdfast.errors import InvalidArgument


class ConsumerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of the dispatcher."""

    consumers_max: int = 0  # 0: 64 for each processor, at least 128 and at most 4,096.
    poll_seconds: float = 3.0  # How often a queue is looked at where no notification comes.
    poll_jitter_seconds: float = 0.5  # Spreads the looks of several nodes.
    resilient_poll_seconds: float = 300.0  # How often it is looked at although notifications come. 0: never.

    def __post_init__(self) -> None:
        if not self.consumers_max:
            msgspec.structs.force_setattr(self, "consumers_max", min(max(64 * (os.cpu_count() or 1), 128), 4_096))
        if (
            self.consumers_max < 1
            or self.poll_seconds <= 0
            or min(self.poll_jitter_seconds, self.resilient_poll_seconds) < 0
        ):
            raise InvalidArgument("Consumers and poll intervals are positive, and the jitter is not negative")

    def look_again_ms(self, jitter: Random) -> int:
        """When to look at a queue although nothing told to."""
        if not self.resilient_poll_seconds:
            return 1 << 40
        return round((self.resilient_poll_seconds + jitter.random() * self.poll_jitter_seconds) * 1_000)
