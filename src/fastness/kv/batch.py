"""Runs several functions in one transaction, each isolated from the failures of the others.

Nearly every function either succeeds or raises before it writes, so they all write to the one transaction. Only if a
function raises after it wrote, the batch is undone and run again with a nested transaction for each function.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastness.errors import FastnessError
from fastness.kv.transactions import Transaction
from fastness.limits import TRANSACTION_BYTES_MAX

Argument = TypeVar("Argument")
Result = TypeVar("Result")

BATCH_WRITE_BYTES_MAX = TRANSACTION_BYTES_MAX // 4  # A batch that wrote more ends; the rest runs in the next.

# A function and its request. A pair avoids the extra call of a `partial`.
BatchedCall = tuple[Callable[[Transaction, Any], Any], Any]
ErrorType = type[Exception]
StopCondition = Callable[[], bool]  # Checked after each function: whether the batch ends here.


def _never() -> bool:
    return False


def run_batch(
    tx: Transaction, calls: Sequence[BatchedCall], catch: ErrorType = FastnessError, should_stop: StopCondition = _never
) -> list[Any]:
    """The result of each function, or the error it raised. The list is shorter than `calls` if they did not all fit.

    An error that `catch` does not cover propagates and ends the transaction. A function may run twice, so it must do
    nothing but read and write its transaction.
    """
    if not tx.has_writes and not tx.events:
        outcomes = _run_shared(tx, calls, catch, should_stop)
        if outcomes is not None:
            return outcomes
        tx.discard_writes()
    return _run_nested(tx, calls, catch, should_stop)


def run_isolated(tx: Transaction, run: Callable[[Transaction, Argument], Result], request: Argument) -> Result:
    """The result of `run`. If it raises, its writes are discarded and those of `tx` stay."""
    inner = tx.nested()
    try:
        result = run(inner, request)
    finally:
        inner.end()
    tx.merge(inner)
    return result


def _run_shared(
    tx: Transaction, calls: Sequence[BatchedCall], catch: ErrorType, should_stop: StopCondition
) -> list[Any] | None:
    """The outcomes, or None if a function raised after it wrote."""
    outcomes: list[Any] = []
    events, written = tx.events, tx.size_bytes
    for run, request in calls:
        event_count = len(events)
        try:
            outcomes.append(run(tx, request))
        except catch as error:
            if tx.size_bytes != written or len(events) != event_count:
                return None
            outcomes.append(error)
        written = tx.size_bytes
        if written > BATCH_WRITE_BYTES_MAX or should_stop():
            break
    return outcomes


def _run_nested(
    tx: Transaction, calls: Sequence[BatchedCall], catch: ErrorType, should_stop: StopCondition
) -> list[Any]:
    outcomes: list[Any] = []
    for run, request in calls:
        try:
            outcomes.append(run_isolated(tx, run, request))
        except catch as error:
            outcomes.append(error)
        if tx.size_bytes > BATCH_WRITE_BYTES_MAX or should_stop():
            break
    return outcomes
