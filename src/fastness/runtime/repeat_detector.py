"""Distinguishes the first sending of a call from repeated ones, and expires the stored results of old calls."""

import logging
import threading
from collections.abc import Callable

from fastness.errors import FastnessError
from fastness.kv import Database
from fastness.layers.idempotency import IsNewCall, forget, has_expired_keys, period_of
from fastness.tiers import Tier

_log = logging.getLogger("fastness.idempotency")
_EXPIRY_FAILED = "results of old calls could not be expired; the next attempt is in ten minutes: %s"


class RepeatDetector:
    """Skips the lookup of a stored result for calls that cannot have been sent before.

    The first sending of a call may still wait in line while the call is sent again, and be executed after it. So once a
    repeated call arrives, no call that arrived before it counts as new.

    When a period of keys ends, the next call starts a thread that deletes the keys of the period before the last.
    """

    def __init__(self, database: Database, now_ms: Callable[[], int], *, shared: bool) -> None:
        """With `shared`, other servers write to the key space and may have received the call: no call counts as new."""
        self._database = database
        self._now_ms = now_ms
        self._shared = shared
        self._repeats = 0
        self._period = -1
        self._expiry: threading.Thread | None = None

    def received(self, *, again: bool) -> IsNewCall:
        """Register a call; the result says, inside its transaction, whether the call is new."""
        period = period_of(self._now_ms())
        if period != self._period and (self._expiry is None or not self._expiry.is_alive()):
            self._period = period
            expiry = threading.Thread(target=self._expire, name="fastness-idempotency-expiry", daemon=True)
            try:
                expiry.start()
                self._expiry = expiry
            except RuntimeError as error:
                _log.warning(_EXPIRY_FAILED, error)
        self._repeats += again
        if again or self._shared:
            return _never
        before = self._repeats
        return lambda: self._repeats == before

    def stop(self) -> None:
        """Wait for the expiry that is running."""
        if self._expiry is not None:
            self._expiry.join()

    def _expire(self) -> None:
        """Delete expired keys, a bounded number per transaction."""
        try:
            while self._database.read(has_expired_keys, tier=Tier.IMPORTANT):
                self._database.transact(forget, tier=Tier.IMPORTANT)
        except FastnessError as error:
            _log.warning(_EXPIRY_FAILED, error)
        except Exception as error:
            _log.exception(_EXPIRY_FAILED, error)


def _never() -> bool:
    return False
