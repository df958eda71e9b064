"""How often a step is tried."""

from typing import Final

import msgspec

from fastness.errors import InvalidArgument
from fastness.limits import EFFECT_ATTEMPTS_MAX

_DELAY_SECONDS_MAX: Final = 31_536_000.0  # A year.


class Retry(msgspec.Struct, frozen=True):
    """Try a failing step up to `attempts` times, with growing delays.

    The first delay is `delay_seconds`; each further one is longer by `factor`, up to `delay_seconds_max`. Only errors
    of the types `on` are tried again; a timeout is a TimeoutError.
    """

    attempts: int
    delay_seconds: float = 1.0
    factor: float = 2.0
    delay_seconds_max: float = 300.0
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= EFFECT_ATTEMPTS_MAX:
            raise InvalidArgument(f"attempts is {self.attempts!r}; give 1 to {EFFECT_ATTEMPTS_MAX}")
        for name in ("delay_seconds", "delay_seconds_max"):
            if not 0 <= getattr(self, name) <= _DELAY_SECONDS_MAX:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; give 0 to {_DELAY_SECONDS_MAX:.0f} seconds")
        if not 1 <= self.factor <= 100:
            raise InvalidArgument(f"factor is {self.factor!r}; give 1 to 100")

    def delay_after(self, failures: int) -> float | None:
        """How many seconds to wait after the given number of failures; None if there is no further attempt."""
        if failures >= self.attempts:
            return None
        delay = self.delay_seconds
        for _ in range(failures - 1):  # Not a power, which may be too large for a float.
            delay = min(delay * self.factor, self.delay_seconds_max)
        return min(delay, self.delay_seconds_max)
