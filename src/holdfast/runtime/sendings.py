"""Sendings: which calls are sent for the first time, and which keys are to be forgotten."""

import logging
import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.kv import Database
from holdfast.layers.once import Fresh, any_forgotten, forget, period_of
from holdfast.tiers import Tier

_log = logging.getLogger("holdfast.sendings")
_NOT_FORGOTTEN = "the keys of old calls could not be forgotten, and will be in ten minutes: %s"


class Sendings:
    """Tells the first sendings of calls from later ones: what is sent for the first time need not be looked for.

    The first sending of a call may still wait for its turn while the call is sent again, and be carried out after it.
    So nothing that came before a call that is sent again counts as the first from then on.

    When a period of keys is over, the next call that comes has those of the one before the last forgotten, beside it.
    """

    def __init__(self, database: Database, now_ms: Callable[[], int], *, shared: bool) -> None:
        """Where several servers share the key space, another one may have heard the call: there nothing is fresh."""
        self._database = database
        self._now_ms = now_ms
        self._shared = shared
        self._again = 0
        self._period = -1
        self._forgetting: threading.Thread | None = None

    def heard(self, *, again: bool) -> Fresh:
        """A call has come; says later whether it is the first of its kind."""
        period = period_of(self._now_ms())
        if period != self._period and (self._forgetting is None or not self._forgetting.is_alive()):
            self._period = period
            forgetting = threading.Thread(target=self._forget, name="holdfast-forgetting", daemon=True)
            try:
                forgetting.start()
                self._forgetting = forgetting
            except RuntimeError as error:
                _log.warning(_NOT_FORGOTTEN, error)
        self._again += again
        if again or self._shared:
            return _never
        before = self._again
        return lambda: self._again == before

    def stop(self) -> None:
        """Finish what is being forgotten."""
        if self._forgetting is not None:
            self._forgetting.join()

    def _forget(self) -> None:
        """A bounded number a transaction: calls go on meanwhile."""
        try:
            while self._database.read(any_forgotten, tier=Tier.IMPORTANT):
                self._database.transact(forget, tier=Tier.IMPORTANT)
        except HoldfastError as error:  # They are in nobody's way until the next period is over.
            _log.warning(_NOT_FORGOTTEN, error)
        except Exception as error:
            _log.exception(_NOT_FORGOTTEN, error)


def _never() -> bool:
    return False
