"""Several works in one transaction, each as if it were alone: one that raises leaves nothing and disturbs nobody."""

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.kv.transactions import Transaction
from holdfast.limits import TRANSACTION_BYTES_MAX

GROUP_BYTES = TRANSACTION_BYTES_MAX // 4  # A group that has grown so large ends, and the rest is another one's.

# A function, and what it is given beside the transaction. As a pair they cost nothing; bound together, a call more.
Work = tuple[Callable[[Transaction, Any], Any], Any]


def run_group(tx: Transaction, works: Iterable[Work], catch: type[Exception] = HoldfastError) -> list[Any]:
    """The result of each work, or the error that it raised; fewer than there are works if they did not all fit.

    An error that is not to be caught ends the group, and the transaction with it.
    """
    outcomes: list[Any] = []
    for run, request in works:
        inner = tx.inside()
        try:
            outcomes.append(run(inner, request))
        except catch as error:
            outcomes.append(error)
        else:
            tx.absorb(inner)
        finally:
            inner.end()
        if tx.size_bytes > GROUP_BYTES:
            break
    return outcomes
