"""Several works in one transaction, each as if it were alone: one that raises leaves nothing and disturbs nobody.

Nearly all works either succeed or are refused before they write anything, so they all write to the one transaction.
Only if one raises after it wrote, the group is run again, each work in a transaction of its own on top of the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.kv.transactions import Transaction
from holdfast.limits import TRANSACTION_BYTES_MAX

GROUP_BYTES = TRANSACTION_BYTES_MAX // 4  # A group that has grown so large ends, and the rest is another one's.

# A function, and what it is given beside the transaction. As a pair they cost nothing; bound together, a call more.
Work = tuple[Callable[[Transaction, Any], Any], Any]
Caught = type[Exception]
Enough = Callable[[], bool]  # Asked behind each work: whether the rest is another group's.


def _never() -> bool:
    return False


def run_batch(
    tx: Transaction, works: Sequence[Work], catch: Caught = HoldfastError, enough: Enough = _never
) -> list[Any]:
    """The result of each work, or the error that it raised; fewer than there are works if they did not all fit.

    An error that is not to be caught ends the group, and the transaction with it. Works may be run twice, so they do
    nothing but read and write.
    """
    if not tx.wrote and not tx.events:
        outcomes = _run_together(tx, works, catch, enough)
        if outcomes is not None:
            return outcomes
        tx.undo()
    return _run_apart(tx, works, catch, enough)


def run_isolated(tx: Transaction, run: Callable[[Transaction, Any], Any], request: Any) -> Any:
    """The result of a work that may raise after it wrote: nothing is left of it then, and the group need not know."""
    inner = tx.nested()
    try:
        result = run(inner, request)
    finally:
        inner.end()
    tx.merge(inner)
    return result


def _run_together(tx: Transaction, works: Sequence[Work], catch: Caught, enough: Enough) -> list[Any] | None:
    """The outcomes; None if a work raised after it wrote."""
    outcomes: list[Any] = []
    events, written = tx.events, tx.size_bytes
    for run, request in works:
        noted = len(events)
        try:
            outcomes.append(run(tx, request))
        except catch as error:
            if tx.size_bytes != written or len(events) != noted:
                return None
            outcomes.append(error)
        written = tx.size_bytes
        if written > GROUP_BYTES or enough():
            break
    return outcomes


def _run_apart(tx: Transaction, works: Sequence[Work], catch: Caught, enough: Enough) -> list[Any]:
    outcomes: list[Any] = []
    for run, request in works:
        try:
            outcomes.append(run_isolated(tx, run, request))
        except catch as error:
            outcomes.append(error)
        if tx.size_bytes > GROUP_BYTES or enough():
            break
    return outcomes
