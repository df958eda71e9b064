"""Several works in one transaction, each as if it were alone: one that raises leaves nothing and disturbs nobody."""

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.kv.transactions import Transaction
from holdfast.limits import TRANSACTION_BYTES_MAX

GROUP_BYTES = TRANSACTION_BYTES_MAX // 4  # A group that has grown so large ends, and the rest is another one's.


def run_group(tx: Transaction, works: Sequence[Callable[[Transaction], Any]]) -> list[Any]:
    """The result of each work, or the error that it raised; fewer than there are works if they did not all fit."""
    outcomes: list[Any] = []
    for work in works:
        inner = tx.inside()
        try:
            outcomes.append(work(inner))
        except HoldfastError as error:
            outcomes.append(error)
        else:
            tx.absorb(inner)
        finally:
            inner.end()
        if tx.size_bytes > GROUP_BYTES:
            break
    return outcomes
