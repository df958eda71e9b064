"""Rate limits: a token bucket per caller.

A bucket is stored as one number, the time at which it is full again. A full bucket need not be stored, so the table
contains only recent callers, and never more than `callers_max`.
"""

from collections.abc import Hashable
from math import ceil

from fastness.clock import Clock


class RateLimiter:
    """A token bucket per caller."""

    def __init__(self, per_second: float, burst: int, *, callers_max: int, clock: Clock) -> None:
        """Unlimited if `per_second` is 0."""
        self._interval_ms = 1_000 / per_second if per_second else 0.0
        self._burst_ms = self._interval_ms * burst
        self._callers_max = callers_max
        self._clock = clock
        self._full_ms: dict[Hashable, float] = {}  # Ordered by the last call.

    def __len__(self) -> int:
        return len(self._full_ms)

    def wait_ms(self, caller: Hashable) -> int:
        """0 if the caller may proceed, which uses a token; otherwise the time until it may."""
        if not self._interval_ms:
            return 0
        now_ms = self._clock.now_ms()
        self._evict(now_ms)
        full_ms = max(self._full_ms.pop(caller, 0.0), now_ms)
        left_ms = full_ms + self._interval_ms - self._burst_ms - now_ms
        self._full_ms[caller] = full_ms if left_ms > 0 else full_ms + self._interval_ms
        return ceil(left_ms) if left_ms > 0 else 0

    def _evict(self, now_ms: int) -> None:
        """Remove two full buckets per call, so that the table shrinks faster than it grows; more if it is full."""
        removed = 0
        while self._full_ms and (removed < 2 or len(self._full_ms) >= self._callers_max):
            oldest = next(iter(self._full_ms))
            if self._full_ms[oldest] > now_ms and len(self._full_ms) < self._callers_max:
                return
            del self._full_ms[oldest]
            removed += 1
