"""Checks a lease's guarantees: one holder at a time, fences only increase, an old fence is refused.

    grant      owner   -> [fence, acquired_ms, expires_ms]
    keepalive  fence   -> expires_ms
    guarded    fence      a write under the lease
    release    fence   -> whether it was held until now

Each grant has an owner of its own. Times in milliseconds are the database's own. A grant whose answer was lost is not
known to its owner, so nothing is checked for it.
"""

from collections.abc import Hashable
from typing import NamedTuple

from fastness.testing.histories.record import History, Operation, Outcome, Violation, by_key, check_increases


class Holder(NamedTuple):
    """One grant, as its owner saw it."""

    fence: int
    acquired_ms: int
    expires_ms: int
    grant: Operation


def check_lease(history: History, key: Hashable) -> list[Holder]:
    """Check the history of the lease `key`, and return its grants in the order of fences.

    Raises:
        Violation: two owners held it at once, a fence did not increase, or a fence was accepted after a higher one had
            been granted or after its release.
    """
    operations = by_key(history, "grant", "keepalive", "guarded", "release").get(key, [])
    answered = [each for each in operations if each.outcome is Outcome.OK]
    holders = sorted((_holder(each) for each in answered if each.kind == "grant"), key=lambda holder: holder.fence)
    check_increases(f"Lease {key!r}: fence ", [(holder.fence, holder.grant) for holder in holders])
    for number, later in enumerate(holders):
        for earlier in holders[:number]:
            _check_apart(key, earlier, later, operations)
    for operation in answered:
        if operation.kind != "grant" and operation.result is not False:
            _check_accepted(key, operation, holders, answered)
    return holders


def _holder(grant: Operation) -> Holder:
    fence, acquired_ms, expires_ms = grant.result
    return Holder(fence, acquired_ms, expires_ms, grant)


def _check_apart(key: Hashable, earlier: Holder, later: Holder, operations: list[Operation]) -> None:
    """A lease is not granted while an earlier owner holds it."""
    own = [each for each in operations if each.kind != "grant" and each.argument == earlier.fence]
    renewals = [each for each in own if each.kind == "keepalive" and each.outcome is Outcome.OK]
    until_ms = max([earlier.expires_ms, *(each.result for each in renewals)])
    was_released = any(
        each.kind == "release" and each.outcome is not Outcome.FAILED and each.invoked < later.grant.returned
        for each in own
    )
    if later.acquired_ms < until_ms and not was_released:
        message = f"Lease {key!r} had two holders: fence {earlier.fence} until {until_ms}, "
        message += f"and fence {later.fence} from {later.acquired_ms}"
        raise Violation(message, [earlier.grant, *renewals, later.grant])


def _check_accepted(key: Hashable, operation: Operation, holders: list[Holder], answered: list[Operation]) -> None:
    """No fence is accepted after a higher one was returned to an owner, or after its own release had returned."""
    for holder in holders:
        if holder.fence > operation.argument and holder.grant.returned < operation.invoked:
            message = f"Lease {key!r}: {operation.kind} with fence {operation.argument} was accepted "
            raise Violation(message + f"after fence {holder.fence} had been granted", [holder.grant, operation])
    for release in answered:
        is_own = release.kind == "release" and release.result and release.argument == operation.argument
        if is_own and release.returned < operation.invoked:
            message = f"Lease {key!r}: {operation.kind} with fence {operation.argument} was accepted after its release"
            raise Violation(message, [release, operation])
