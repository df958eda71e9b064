"""A clock that changes only when a test moves it."""

from collections.abc import Callable

from fastness.errors import InvalidArgument

START_MS = 1_700_000_000_000


class ManualClock:
    """A clock for tests: pass it to `fastness.open(url, clock=...)`, then advance it instead of sleeping."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms
        self._subscribers: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def advance_ms(self, milliseconds: int) -> None:
        """Move time forward."""
        if milliseconds < 0:
            raise InvalidArgument("advance_ms moves forward; use jump_to_ms for a clock that was set back")
        self.jump_to_ms(self._now_ms + milliseconds)

    def jump_to_ms(self, now_ms: int) -> None:
        """Set the time, forward or back: real wall clocks are sometimes set back."""
        self._now_ms = now_ms
        for wake in list(self._subscribers):
            wake()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after every change. Returns a function that ends the subscription."""
        self._subscribers.append(wake)
        return lambda: self._subscribers.remove(wake)
