"""Distinguishes the first sending of a call from repeated ones, and expires the stored results of old calls."""

from collections.abc import Callable

from fastness.kv import Database
from fastness.layers.idempotency import IsNewCall, forget, has_expired_keys, period_of
from fastness.runtime.background import BackgroundRunner, Job, Steps
from fastness.tiers import Tier


class RepeatDetector:
    """Skips the lookup of a stored result for calls that cannot have been sent before.

    The first sending of a call may still wait in line while the call is sent again, and be executed after it. So once a
    repeated call arrives, no call that arrived before it counts as new.

    When a period of keys ends, the next call wakes a job that deletes the keys of the period before the last.
    """

    def __init__(
        self, database: Database, now_ms: Callable[[], int], *, shared: bool, background: BackgroundRunner
    ) -> None:
        """With `shared`, other servers write to the key space and may have received the call: no call counts as new."""
        self._database = database
        self._now_ms = now_ms
        self._shared = shared
        self._repeats = 0
        self._period = -1
        self._background = background
        self._expiry = Job("the expiry of the results of old calls", self._expire)

    def received(self, *, again: bool) -> IsNewCall:
        """Register a call; the result says, inside its transaction, whether the call is new."""
        period = period_of(self._now_ms())
        if period != self._period:
            self._period = period
            self._background.add(self._expiry)
            self._expiry.wake()
        self._repeats += again
        if again or self._shared:
            return _never
        before = self._repeats
        return lambda: self._repeats == before

    def _expire(self) -> Steps:
        """Delete expired keys, a bounded number per transaction."""
        while True:
            while self._database.read(has_expired_keys, tier=Tier.IMPORTANT):
                self._database.transact(forget, tier=Tier.IMPORTANT)
                yield 0.0
            yield None


def _never() -> bool:
    return False
