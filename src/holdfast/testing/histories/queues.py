"""Decides whether a queue kept its promises: nothing lost, one owner at a time, fences that only grow.

    put      anything      -> id
    lease    anything      -> [[id, fence, leased_ms, expires_ms, ...], ...], a list for each message that was delivered
    extend   [id, fence]   -> expires_ms
    ack      [id, fence]      it is gone
    nack     [id, fence]      it is to be delivered again, or a dead letter
    reject   [id, fence]      it is a dead letter

The moments in milliseconds are the database's own, so leases are compared without knowing how long an answer took. A
lease whose answer was lost has an owner who does not know of it, and promises nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable
from itertools import pairwise
from typing import Final, NamedTuple

from holdfast.errors import InvalidArgument
from holdfast.testing.histories.record import History, Operation, Outcome, Violation, by_key

_SETTLING: Final = ("ack", "nack", "reject")
_WITH_FENCE: Final = (*_SETTLING, "extend")


class Grant(NamedTuple):
    """One delivery of one message, as whoever got it knows it."""

    id: str
    fence: int
    leased_ms: int
    expires_ms: int
    lease: Operation


def check_queue(
    history: History, key: Hashable, *, left: Collection[str] = (), dead: Collection[str] = ()
) -> dict[str, list[Grant]]:
    """Check what `history` says of the queue `key`, and return what was delivered, by message, in the order of fences.

    `left` are the ids of the messages that are in it at the end, `dead` those of its dead letters.

    Raises:
        Violation: an acknowledged put is lost, or a message is there that nobody put; a message had two owners at once;
            a fence did not grow; an old fence settled a message; a message came back after its ack.
    """
    operations = by_key(history, "put", "lease", *_WITH_FENCE).get(key, [])
    grants = grants_of(operations)
    proven: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind in _WITH_FENCE:
            proven[operation.argument[0]].append(operation)
    for id, deliveries in grants.items():
        _check_growth(id, deliveries)
        _check_owners(id, deliveries, proven[id])
    for id, mine in proven.items():
        certain = [operation for operation in mine if operation.outcome is Outcome.OK]
        _check_stale(id, certain, grants.get(id, []))
        _check_settled_once(id, certain)
        _check_gone(id, certain, grants.get(id, []), {*left, *dead})
    _check_nothing_lost(key, operations, grants, set(left), set(dead))
    return grants


def grants_of(operations: Collection[Operation]) -> dict[str, list[Grant]]:
    """What was delivered according to the leases among `operations`, by message, in the order of fences."""
    grants: dict[str, list[Grant]] = defaultdict(list)
    for operation in operations:
        if operation.kind == "lease" and operation.outcome is Outcome.OK:
            for id, fence, leased_ms, expires_ms, *_ in operation.result:
                grants[id].append(Grant(id, fence, leased_ms, expires_ms, operation))
    for deliveries in grants.values():
        deliveries.sort(key=lambda grant: grant.fence)
    return dict(grants)


def lives_until_ms(grant: Grant, proven: Collection[Operation]) -> int:
    """Until when its owner was told that it has the message, whatever it did with it before."""
    extended: list[int] = [
        each.result for each in proven if _is(each, "extend", grant.fence) and each.outcome is Outcome.OK
    ]
    return max([grant.expires_ms, *extended])


def was_given_back(grant: Grant, proven: Collection[Operation], *, before: Operation) -> bool:
    """Whether its owner may have given the message back before another operation had its answer."""
    return any(
        (_is(each, "nack", grant.fence) or _is(each, "reject", grant.fence))
        and each.outcome is not Outcome.FAILED
        and each.invoked < before.returned
        for each in proven
    )


def _check_growth(id: str, deliveries: list[Grant]) -> None:
    """Fences of one message strictly grow, as far as real time tells which delivery came first."""
    latest = deliveries[0]
    for one, other in pairwise(deliveries):
        if one.fence == other.fence:
            raise Violation(f"Message {id}: fence {one.fence} was given out twice", [one.lease, other.lease])
        latest = max(latest, one, key=lambda grant: grant.lease.invoked)
        if other.lease.returned < latest.lease.invoked:
            message = f"Message {id}: fence {other.fence} had returned before the call that got {latest.fence} was made"
            raise Violation(message, [other.lease, latest.lease])


def _check_owners(id: str, deliveries: list[Grant], proven: list[Operation]) -> None:
    """Nobody gets a message while the one who had it before was told that it has it still."""
    for one, other in pairwise(deliveries):
        until_ms = lives_until_ms(one, proven)
        if other.leased_ms < until_ms and not was_given_back(one, proven, before=other.lease):
            message = f"Message {id} had two owners: fence {one.fence} until {until_ms}, "
            message += f"and fence {other.fence} from {other.leased_ms}"
            extensions = [each for each in proven if _is(each, "extend", one.fence)]
            raise Violation(message, [one.lease, *extensions, other.lease])


def _check_stale(id: str, certain: list[Operation], deliveries: list[Grant]) -> None:
    """What was done with a fence was done before anybody had heard of a higher one."""
    for operation in certain:
        for grant in deliveries:
            if grant.fence > operation.argument[1] and grant.lease.returned < operation.invoked:
                message = f"Message {id}: {operation.kind} with fence {operation.argument[1]} was accepted "
                raise Violation(message + f"after fence {grant.fence} had been given out", [grant.lease, operation])


def _check_settled_once(id: str, certain: list[Operation]) -> None:
    """A lease ends in one way. Only an ack may be repeated."""
    ends = [operation for operation in certain if operation.kind in _SETTLING]
    for operation in certain:
        for end in ends:
            if operation is end or operation.argument[1] != end.argument[1] or operation.kind == end.kind == "ack":
                continue
            if operation.kind != "extend" or operation.invoked > end.returned:
                message = f"Message {id}: fence {end.argument[1]} was good for {end.kind} and for {operation.kind}"
                raise Violation(message, [operation, end])


def _check_gone(id: str, certain: list[Operation], deliveries: list[Grant], there: set[str]) -> None:
    """A message that was acknowledged is never seen again."""
    for ack in certain:
        if ack.kind != "ack":
            continue
        for grant in deliveries:
            if grant.fence > ack.argument[1] or grant.lease.invoked > ack.returned:
                raise Violation(f"Message {id} was delivered again after its ack", [ack, grant.lease])
        if id in there:
            raise Violation(f"Message {id} is still there after its ack", [ack])


def _check_nothing_lost(
    key: Hashable, operations: list[Operation], grants: dict[str, list[Grant]], left: set[str], dead: set[str]
) -> None:
    """Every acknowledged put is acked, dead or there; and nothing is there that nobody put."""
    if left & dead:
        raise Violation(f"Queue {key!r}: {min(left & dead)} is in the queue and among its dead letters", [])
    puts = [operation for operation in operations if operation.kind == "put"]
    acked = {each.argument[0] for each in operations if each.kind == "ack" and each.outcome is not Outcome.FAILED}
    known: set[str] = set()
    for put in puts:
        if put.outcome is Outcome.OK:
            if type(put.result) is not str:
                raise InvalidArgument(f"{put} has no text as its result; record the id that it was answered")
            known.add(put.result)
            if put.result not in acked | left | dead:
                seen = [grant.lease for grant in grants.get(put.result, [])]
                raise Violation(f"Message {put.result} was acknowledged and is lost", [put, *seen])
    strange = {*grants, *left, *dead} - known
    lost = [put for put in puts if put.outcome is Outcome.UNKNOWN]
    if len(strange) > len(lost):
        seen = [grant.lease for id in strange for grant in grants.get(id, [])]
        message = f"Queue {key!r}: {len(lost)} puts lost their answer, and {len(strange)} messages have no put: "
        raise Violation(message + ", ".join(sorted(strange)[:5]), [*lost, *seen])


def _is(operation: Operation, kind: str, fence: int) -> bool:
    return operation.kind == kind and bool(operation.argument[1] == fence)
