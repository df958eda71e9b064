"""Duty: whether this process does the periodic work of its key space.

The only process of an embedded key space always does. Where several nodes share one, the node that holds the
maintenance lease does (`layers/maintenance.py`); `heartbeat.py` renews it.
"""

from fastness.clock import Clock, SystemClock


class Duty:
    """The duty of the only process of a key space."""

    def is_ours(self) -> bool:
        """Whether this process does the periodic work now. Ask before each pass."""
        return True


class LeasedDuty(Duty):
    """The duty of one of several nodes: it lasts as long as the lease, measured from before it was requested."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._now_ms = (clock or SystemClock()).now_ms
        self._until_ms = 0

    def is_ours(self) -> bool:
        return self._now_ms() < self._until_ms

    def hold_until(self, at_ms: int) -> None:
        """Have the duty until `at_ms`, by the clock of this process; 0: another node has it."""
        self._until_ms = at_ms
