"""What every backend does around `work`: run it, check its tier, and pause between retries of a conflict."""

import types
from collections.abc import Iterator
from typing import Any, Protocol

from fastness import limits
from fastness.errors import NestedTransaction, NotSynchronous, UnsupportedTier
from fastness.kv.contract import Result, Work
from fastness.kv.transactions import Transaction
from fastness.tiers import Tier

_LAZY = frozenset({types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType})


def run(tx: Transaction, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Call `work` and close its transaction to further use; the caller commits its writes."""
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


_CRITICAL = Tier.CRITICAL  # Looking up an enum member costs as much as the rest of the check.
_IMPORTANT = Tier.IMPORTANT


def check_tier(tier: Tier) -> None:
    """Reject a tier that a transaction cannot have.

    Raises:
        UnsupportedTier: it is BEST_EFFORT, or not a Tier.
    """
    if tier is not _CRITICAL and tier is not _IMPORTANT:
        raise UnsupportedTier(
            f"A transaction's tier is CRITICAL or IMPORTANT, not {tier!r}; use plane.activity for best-effort records"
        )


def nested_transaction_error() -> NestedTransaction:
    return NestedTransaction(
        "transact was called inside a transaction of the same database; pass `tx` to the other function instead"
    )


class Jitter(Protocol):
    """The part of `random.Random` that a back-off needs."""

    def random(self) -> float: ...


def retry_pauses_seconds(jitter: Jitter) -> Iterator[float]:
    """The pause before each retry of a conflict: exponential with full jitter, bounded in length and number."""
    for attempt in range(limits.CONFLICT_RETRIES_MAX):
        longest_ms = min(1 << min(attempt, 30), limits.CONFLICT_PAUSE_MS_MAX)
        yield jitter.random() * longest_ms / 1_000
