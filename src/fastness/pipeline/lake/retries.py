"""Retries of commits that conflict, with back-off."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from fastness.errors import TransactionConflict
from fastness.limits import LAKE_ATTEMPTS, LAKE_PAUSE_MS_MAX

T = TypeVar("T")


def retry_until_committed(subject: str, work: Callable[[], T]) -> T:
    """Do the work, which reads the lake anew each time, until it commits without a conflict.

    Raises:
        TransactionConflict: every attempt conflicted.
    """
    for attempt in range(LAKE_ATTEMPTS):
        try:
            return work()
        except TransactionConflict:
            pause(attempt)
    raise TransactionConflict(
        f"Other runs committed {subject} first, {LAKE_ATTEMPTS} times in a row; wait until they end"
    )


def pause(attempt: int) -> None:
    """Sleep before another attempt: exponential back-off with full jitter."""
    time.sleep(random.random() * min(10 << min(attempt, 10), LAKE_PAUSE_MS_MAX) / 1_000)
