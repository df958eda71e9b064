"""How a transaction runs: what every backend does around `work`, and how long it insists after a conflict."""

import types
from collections.abc import Iterator
from typing import Any, Protocol

from holdfast import limits
from holdfast.errors import NestedTransaction, NotSynchronous, UnsupportedTier
from holdfast.kv.contract import Result, Work
from holdfast.kv.transactions import Transaction
from holdfast.tiers import Tier

_LAZY = frozenset({types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType})


def run(tx: Transaction, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Call `work` and close its transaction to further use; the caller commits what it wrote."""
    try:
        result = work(tx, *args, **kwargs)
    finally:
        tx.end()
    if result.__class__ in _LAZY:
        if isinstance(result, types.CoroutineType):
            result.close()  # Otherwise Python warns that it was never awaited.
        raise NotSynchronous(
            f"{getattr(work, '__qualname__', work)} is asynchronous or a generator; "
            "transact runs plain functions, so await before it and return a list"
        )
    return result


_CRITICAL = Tier.CRITICAL  # Looking a member up on its enumeration costs as much as the rest of a check.
_IMPORTANT = Tier.IMPORTANT


def check_tier(tier: Tier) -> None:
    """Refuse a tier that no transaction can keep.

    Raises:
        UnsupportedTier: it is BEST_EFFORT, or no tier at all.
    """
    if tier is not _CRITICAL and tier is not _IMPORTANT:
        raise UnsupportedTier(
            f"A transaction keeps CRITICAL or IMPORTANT, not {tier!r}; best-effort records go to plane.activity"
        )


def nested() -> NestedTransaction:
    return NestedTransaction(
        "transact was called inside a transaction of the same database; pass `tx` on to the other function instead"
    )


class Jitter(Protocol):
    """The one thing a back-off needs from `random.Random`."""

    def random(self) -> float: ...


def pauses_seconds(jitter: Jitter) -> Iterator[float]:
    """How long to pause before each retry of a conflict: doubling, with full jitter, bounded in length and number."""
    for attempt in range(limits.CONFLICT_RETRIES_MAX):
        longest_ms = min(1 << min(attempt, 30), limits.CONFLICT_PAUSE_MS_MAX)
        yield jitter.random() * longest_ms / 1_000
