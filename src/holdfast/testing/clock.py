"""A clock that stands still until a test moves it."""

from holdfast.errors import InvalidArgument

START_MS = 1_700_000_000_000


class ManualClock:
    """Give it to `holdfast.open(url, clock=...)`, then move time instead of sleeping."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance_ms(self, milliseconds: int) -> None:
        """Move time forward."""
        if milliseconds < 0:
            raise InvalidArgument("advance_ms moves forward; use jump_to_ms for a clock that was set back")
        self._now_ms += milliseconds

    def jump_to_ms(self, now_ms: int) -> None:
        """Set the time, back as well: wall clocks are set back in real life too."""
        self._now_ms = now_ms
