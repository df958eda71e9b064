"""Checks a queue's guarantees: nothing is lost, one owner at a time, fences only increase.

    put      anything      -> id
    lease    anything      -> [[id, fence, leased_ms, expires_ms, ...], ...], one list per delivered message
    extend   [id, fence]   -> expires_ms
    ack      [id, fence]      it is removed
    nack     [id, fence]      it is delivered again, or becomes a dead letter
    reject   [id, fence]      it becomes a dead letter

Times in milliseconds are the database's own, so leases can be compared regardless of how long an answer took. Where
several processes share a store, a transaction may take effect a little after its time. The owner of a lease whose
answer was lost does not know of it, so nothing is checked for it.

A power loss may undo a delivery that was returned, and its message then has another owner before the lease ends. Every
other operation is durable when it returns, with all deliveries before it. A message is durable when it is delivered.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable
from itertools import pairwise
from typing import Final, NamedTuple

from fastness.errors import InvalidArgument
from fastness.testing.histories.record import History, Operation, Outcome, Violation, by_key, check_increases

_SETTLING: Final = ("ack", "nack", "reject")
_WITH_FENCE: Final = (*_SETTLING, "extend")


class Grant(NamedTuple):
    """One delivery of one message, as its consumer saw it."""

    id: str
    fence: int
    leased_ms: int
    expires_ms: int
    lease: Operation


def check_queue(
    history: History, key: Hashable, *, left: Collection[str] = (), dead: Collection[str] = (), late_ms: int = 0
) -> dict[str, list[Grant]]:
    """Check the history of the queue `key`, and return its deliveries by message, in the order of fences.

    `left` has the ids of the messages in the queue at the end, `dead` those of its dead letters. `late_ms` is how much
    later than its time a transaction may take effect.

    Raises:
        Violation: an acknowledged put or a delivered message is lost, or a message was never put; a message had two
            owners at once; a fence did not increase; an old fence settled a message; a message was delivered again
            after its ack.
    """
    operations = by_key(history, "put", "lease", *_WITH_FENCE).get(key, [])
    grants = grants_of(operations)
    fenced_calls: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind in _WITH_FENCE:
            fenced_calls[operation.argument[0]].append(operation)
    losses = PowerLosses(history)
    for id, deliveries in grants.items():
        check_increases(f"Message {id}: fence ", [(grant.fence, grant.lease) for grant in deliveries])
        _check_owners(id, deliveries, fenced_calls[id], losses, late_ms)
    for id, calls in fenced_calls.items():
        certain = [operation for operation in calls if operation.outcome is Outcome.OK]
        _check_stale(id, certain, grants.get(id, []))
        _check_settled_once(id, certain)
        _check_acked_stays_removed(id, certain, grants.get(id, []), {*left, *dead})
    _check_nothing_lost(key, operations, grants, set(left), set(dead))
    return grants


class PowerLosses:
    """The power losses of a history, and what they may have undone."""

    def __init__(self, history: History) -> None:
        self._losses = history.power_losses
        self._syncs = [each for each in history.operations if each.kind != "lease" and each.outcome is Outcome.OK]

    def may_have_undone(self, grant: Grant, *, before: Operation) -> bool:
        """Whether a delivery may have been lost before the operation `before` returned."""
        return any(
            grant.lease.invoked < loss < before.returned
            and not any(grant.lease.returned < sync.invoked and sync.returned < loss for sync in self._syncs)
            for loss in self._losses
        )


def grants_of(operations: Collection[Operation]) -> dict[str, list[Grant]]:
    """The deliveries of the leases among `operations`, by message, in the order of fences."""
    grants: dict[str, list[Grant]] = defaultdict(list)
    for operation in operations:
        if operation.kind == "lease" and operation.outcome is Outcome.OK:
            for id, fence, leased_ms, expires_ms, *_ in operation.result:
                grants[id].append(Grant(id, fence, leased_ms, expires_ms, operation))
    for deliveries in grants.values():
        deliveries.sort(key=lambda grant: grant.fence)
    return dict(grants)


def leased_until_ms(grant: Grant, fenced_calls: Collection[Operation]) -> int:
    """The latest expiry that its owner was given, even if it settled the message earlier."""
    extended: list[int] = [
        each.result for each in fenced_calls if _is(each, "extend", grant.fence) and each.outcome is Outcome.OK
    ]
    return max([grant.expires_ms, *extended])


def was_released(grant: Grant, fenced_calls: Collection[Operation], *, before: Operation) -> bool:
    """Whether its owner may have released the message before the operation `before` returned."""
    return any(
        (_is(each, "nack", grant.fence) or _is(each, "reject", grant.fence))
        and each.outcome is not Outcome.FAILED
        and each.invoked < before.returned
        for each in fenced_calls
    )


def _check_owners(
    id: str, deliveries: list[Grant], fenced_calls: list[Operation], losses: PowerLosses, late_ms: int
) -> None:
    """A message is not delivered while its previous owner holds an unexpired lease."""
    for one, other in pairwise(deliveries):
        until_ms = leased_until_ms(one, fenced_calls)
        if (
            other.leased_ms + late_ms < until_ms
            and not was_released(one, fenced_calls, before=other.lease)
            and not losses.may_have_undone(one, before=other.lease)
        ):
            message = f"Message {id} had two owners: fence {one.fence} until {until_ms}, "
            message += f"and fence {other.fence} from {other.leased_ms}"
            extensions = [each for each in fenced_calls if _is(each, "extend", one.fence)]
            raise Violation(message, [one.lease, *extensions, other.lease])


def _check_stale(id: str, certain: list[Operation], deliveries: list[Grant]) -> None:
    """No fence is accepted after a higher one was returned to a consumer."""
    for operation in certain:
        for grant in deliveries:
            if grant.fence > operation.argument[1] and grant.lease.returned < operation.invoked:
                message = f"Message {id}: {operation.kind} with fence {operation.argument[1]} was accepted "
                raise Violation(message + f"after fence {grant.fence} had been granted", [grant.lease, operation])


def _check_settled_once(id: str, certain: list[Operation]) -> None:
    """A lease is settled once. Only an ack may be repeated."""
    ends = [operation for operation in certain if operation.kind in _SETTLING]
    for operation in certain:
        for end in ends:
            if operation is end or operation.argument[1] != end.argument[1] or operation.kind == end.kind == "ack":
                continue
            if operation.kind != "extend" or operation.invoked > end.returned:
                message = f"Message {id}: fence {end.argument[1]} was accepted for {end.kind} and for {operation.kind}"
                raise Violation(message, [operation, end])


def _check_acked_stays_removed(id: str, certain: list[Operation], deliveries: list[Grant], present: set[str]) -> None:
    """An acked message is never delivered again."""
    for ack in certain:
        if ack.kind != "ack":
            continue
        for grant in deliveries:
            if grant.fence > ack.argument[1] or grant.lease.invoked > ack.returned:
                raise Violation(f"Message {id} was delivered again after its ack", [ack, grant.lease])
        if id in present:
            raise Violation(f"Message {id} is still there after its ack", [ack])


def _check_nothing_lost(
    key: Hashable, operations: list[Operation], grants: dict[str, list[Grant]], left: set[str], dead: set[str]
) -> None:
    """Every message that was acknowledged or delivered is acked, dead or still queued, and was put."""
    if left & dead:
        raise Violation(f"Queue {key!r}: {min(left & dead)} is in the queue and among its dead letters", [])
    puts = [operation for operation in operations if operation.kind == "put"]
    acked = {each.argument[0] for each in operations if each.kind == "ack" and each.outcome is not Outcome.FAILED}
    known: set[str] = set()
    for put in puts:
        if put.outcome is Outcome.OK:
            if type(put.result) is not str:
                raise InvalidArgument(f"{put} has no text result; record the returned id")
            known.add(put.result)
            if put.result not in acked | left | dead:
                seen = [grant.lease for grant in grants.get(put.result, [])]
                raise Violation(f"Message {put.result} was acknowledged and is lost", [put, *seen])
    unexplained = {*grants, *left, *dead} - known
    lost = [put for put in puts if put.outcome is Outcome.UNKNOWN]
    if len(unexplained) > len(lost):
        seen = [grant.lease for id in unexplained for grant in grants.get(id, [])]
        message = f"Queue {key!r}: {len(lost)} puts lost their answer, but {len(unexplained)} messages have no put: "
        raise Violation(message + ", ".join(sorted(unexplained)[:5]), [*lost, *seen])
    for id in sorted(grants.keys() - acked - left - dead):
        raise Violation(f"Message {id} was delivered and is lost", [grant.lease for grant in grants[id]])


def _is(operation: Operation, kind: str, fence: int) -> bool:
    return operation.kind == kind and bool(operation.argument[1] == fence)
