"""Commits that lose to others are tried again, with a rest in between."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import TransactionConflict
from holdfast.limits import LAKE_ATTEMPTS, LAKE_PAUSE_MS_MAX

T = TypeVar("T")


def until_committed(what: str, work: Callable[[], T]) -> T:
    """Do the work, which looks at the lake anew each time, until nobody else is faster.

    Raises:
        TransactionConflict: others always were.
    """
    for attempt in range(LAKE_ATTEMPTS):
        try:
            return work()
        except TransactionConflict:
            pause(attempt)
    raise TransactionConflict(f"Other runs wrote {what} {LAKE_ATTEMPTS} times in a row; wait until they have ended")


def pause(attempt: int) -> None:
    """Rest a little before another attempt; nobody knows how long the others will."""
    time.sleep(random.random() * min(10 << min(attempt, 10), LAKE_PAUSE_MS_MAX) / 1_000)
