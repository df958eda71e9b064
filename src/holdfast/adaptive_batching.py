"""Who is alone need not wait for others: turns of an event loop that had one caller.

Callers of one turn share what is dear, a sync or a frame, and wait for the end of the turn for that. Where there has
been only one for a while, it goes at once. A second one in the same turn shows that there are others again.
"""

import asyncio
from typing import Final

LONE_TURNS_MIN: Final = 8  # So many turns in a row had one caller.


class AdaptiveBatching:
    """Counts the callers of the turns of one event loop."""

    __slots__ = ("_is_taken", "_lone", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lone = 0
        self._is_taken = False

    def take(self) -> bool:
        """Whether a caller may go at once."""
        if self._lone < LONE_TURNS_MIN:
            return False
        if self._is_taken:
            self._lone = 0
            return False
        self._is_taken = True
        self._loop.call_soon(self._end)
        return True

    def shared(self, callers: int) -> None:
        """So many have waited for the end of a turn."""
        self._lone = self._lone + 1 if callers == 1 else 0

    def _end(self) -> None:
        self._is_taken = False
