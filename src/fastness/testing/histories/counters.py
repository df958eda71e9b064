"""Checks histories whose answers must increase, and that acknowledged writes are stored."""

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from itertools import accumulate
from typing import Any

from fastness.errors import InvalidArgument
from fastness.testing.histories.record import History, Operation, Outcome, Violation, by_key, check_increases, encode


def check_counter(history: History, key: Hashable, *, initial: int = 0, final: int | None = None) -> None:
    """Find an order of the increments of `key` that explains every answer, and `final`, read after all of them.

    Exact if every increment with a lost answer adds 1; otherwise a few invalid histories pass. O(n log n).

    Raises:
        Violation: there is no such order.
    """
    increments = by_key(history, "increment").get(key, [])
    counted = _increasing(f"Counter {key!r}", increments)
    lost = [operation for operation in increments if operation.outcome is Outcome.UNKNOWN]
    lost_invoked = [operation.invoked for operation in lost]
    lost_total = list(accumulate(map(_amount, lost), initial=0))
    # Increments below an answer happened before it returned, and before every higher answer returned.
    deadlines = list(accumulate((operation.returned for operation in reversed(counted)), min))[::-1]

    value, missing, previous = initial, 0, counted[:0]
    for operation, deadline in zip(counted, deadlines, strict=True):
        gap = operation.result - _amount(operation) - value
        if gap < 0:
            raise Violation(f"Counter {key!r} was at {value}: this answer is too low", [*previous, operation])
        missing += gap
        available = lost_total[bisect_left(lost_invoked, deadline)]
        if missing > available:
            message = f"Counter {key!r} skipped: {missing} of {operation.result} have no answer, and increments with a "
            message += f"lost answer that were invoked before {deadline} explain only {available}"
            raise Violation(message, [*previous, operation, *(each for each in counted if each.returned == deadline)])
        value, previous = operation.result, [operation]

    highest = initial + sum(map(_amount, counted)) + lost_total[-1]
    if final is not None and not value <= final <= highest:
        raise Violation(f"Counter {key!r} ended at {final}; its answers allow {value} to {highest}", previous)


def check_fences(history: History, key: Hashable) -> None:
    """Check that no fence of `key` was granted twice, and that later grants have higher fences."""
    _increasing(f"Fence {key!r}", by_key(history, "acquire").get(key, []))


def check_all_fences(history: History) -> None:
    """`check_fences` for every key that was acquired."""
    for key, operations in by_key(history, "acquire").items():
        _increasing(f"Fence {key!r}", operations)


def check_nothing_lost(history: History, found: Mapping[Any, Any]) -> None:
    """Check `found`, read after everything ended, against what was written; None is the same as absent.

    A value may be present if its answer was lost, or if it was acknowledged and no later write was.

    Raises:
        Violation: an acknowledged write is missing, or a value is present that must not be.
    """
    written = by_key(history, "write", "cas")
    for key in dict.fromkeys([*written, *found]):
        value = encode(found.get(key))
        writes = [(each, left) for each in written.get(key, []) if (left := _value_left(each)) is not None]
        acknowledged = [each for each, _ in writes if each.outcome is Outcome.OK]
        last = acknowledged[-1].invoked if acknowledged else 0
        # An operation with a lost answer has not returned, so its write is never too old.
        allowed = {left for each, left in writes if each.outcome is not Outcome.FAILED and each.returned > last}
        if value in allowed or (not acknowledged and found.get(key) is None):
            continue
        sources = [each for each, left in writes if left == value]
        reason = "no write has this value"
        if sources:
            reason = "a later write was acknowledged" if sources[0] in acknowledged else "that write failed"
        elif found.get(key) is None:
            reason = "a write was acknowledged"
        raise Violation(f"Key {key!r} holds {found.get(key)!r}, but {reason}", sources + acknowledged[-1:])


def _value_left(operation: Operation) -> bytes | None:
    """The value that a write or a cas stores, or would have stored; None if it certainly stored none."""
    if operation.kind == "write":
        return encode(operation.argument)
    if operation.outcome is Outcome.OK and not operation.result:
        return None
    return encode(operation.argument[1])


def _increasing(name: str, operations: list[Operation]) -> list[Operation]:
    """The acknowledged operations in the order of their results, which real time must not contradict."""
    answered = [operation for operation in operations if operation.outcome is Outcome.OK]
    for operation in answered:
        if type(operation.result) is not int:
            raise InvalidArgument(f"{operation} has no integer result; record the returned number")
    answered.sort(key=lambda operation: operation.result)
    check_increases(f"{name}: ", [(operation.result, operation) for operation in answered])
    return answered


def _amount(operation: Operation) -> int:
    amount = 1 if operation.argument is None else operation.argument
    if type(amount) is not int or amount < 1:
        raise InvalidArgument(f"{operation} adds {amount!r}; check_counter supports increments of 1 or more")
    return amount
