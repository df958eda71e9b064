"""Skips batching while an event loop has a single caller.

Callers in the same iteration (tick) of an event loop share an expensive step, such as a sync or a frame, and wait for
the end of the tick. After several ticks with one caller each, a caller may run at once. A second caller in the same
tick turns batching on again.
"""

import asyncio
from typing import Final

SINGLE_CALLER_TICKS_MIN: Final = 8  # Consecutive ticks with one caller before batching is skipped.


class AdaptiveBatching:
    """Counts the callers in each tick of one event loop."""

    __slots__ = ("_has_skipped", "_loop", "_single_ticks")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._single_ticks = 0
        self._has_skipped = False

    def may_skip(self) -> bool:
        """Whether this caller may run at once instead of waiting for the end of the tick."""
        if self._single_ticks < SINGLE_CALLER_TICKS_MIN:
            return False
        if self._has_skipped:
            self._single_ticks = 0
            return False
        self._has_skipped = True
        self._loop.call_soon(self._end_tick)
        return True

    def record_batch(self, callers: int) -> None:
        """Record how many callers waited for the end of a tick."""
        self._single_ticks = self._single_ticks + 1 if callers == 1 else 0

    def _end_tick(self) -> None:
        self._has_skipped = False
