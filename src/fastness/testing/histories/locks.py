"""Checks ordered locks that processes share: modes exclude each other, the order is kept, fences grow.

    acquire  {paths, mode, lease}  -> [[level, name, fence], …]   all or none of the locks; the key is the claim
    guarded  [level, name, fence]                                  a write under a lock of the claim
    release                        -> whether it was held until now

The client is the session. `lease` is how long an acquire grants its locks, in the units of the positions; leave it out
if positions are not times. A claim is certainly held from the answer to its acquire until the call of its release, if
that says so. If its holder was lost, it is certainly held only until its lease may have ended, or until the last
`guarded` that succeeded. An acquire whose answer was lost is not checked.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from fastness.lock_rules import COMPATIBLE, DATA_LEVELS, Key, Levels, Mode
from fastness.testing.histories.record import Operation, Outcome, Violation, check_increases

_LEVELS: Final = Levels(DATA_LEVELS, nested=True)


class Hold(NamedTuple):
    """A claim that was granted, as its session saw it."""

    session: str
    modes: dict[Key, Mode]  # Of all its locks in lock order, with the intents above them.
    fences: dict[Key, int]  # Of the locks that it requested.
    certain_until: int  # It was certainly held from the answer until then, if that is later.
    acquire: Operation

    @property
    def asked(self) -> int:
        return self.acquire.invoked

    @property
    def answered(self) -> int:
        return self.acquire.returned


def check_locks(operations: Iterable[Operation]) -> list[Hold]:
    """Check a history of locks, and return the claims that were granted, in the order of their calls.

    Raises:
        Violation: two sessions held locks that exclude each other, a session acquired a lock against the order, a fence
            did not grow, or an old fence was accepted.
    """
    ordered = sorted(operations, key=attrgetter("invoked"))
    of_claim: dict[object, list[Operation]] = {}
    for operation in ordered:
        if operation.kind != "acquire":
            of_claim.setdefault(operation.key, []).append(operation)
    holds = [
        _hold(operation, of_claim.get(operation.key, []))
        for operation in ordered
        if operation.kind == "acquire" and operation.outcome is Outcome.OK
    ]
    by_lock: dict[Key, list[Hold]] = {}
    for hold in holds:
        for key in hold.modes:
            by_lock.setdefault(key, []).append(hold)
    for key, sharing in by_lock.items():
        _check_modes(key, sharing)
        _check_fences(key, [hold for hold in sharing if key in hold.fences])
    _check_order(holds)
    _check_guarded(ordered, by_lock)
    return holds


def _hold(acquire: Operation, later: list[Operation]) -> Hold:
    steps = _LEVELS.steps_for_all(acquire.argument["paths"], Mode(acquire.argument["mode"]))
    fences = {_LEVELS.parse((level, name)): fence for level, name, fence in acquire.result}
    requested = {key for key, _, requested in steps if requested}
    if fences.keys() != requested:
        raise Violation(f"The answer names {sorted(fences)}, but {sorted(requested)} were requested", [acquire])
    until = acquire.invoked + acquire.argument.get("lease", 0)
    release = next((each for each in later if each.kind == "release"), None)
    for each in later:
        proves = each.kind == "guarded" or (each is release and each.result is True)
        if proves and each.outcome is Outcome.OK:
            until = max(until, each.invoked)
    if release is not None:
        until = min(until, release.invoked)
    return Hold(acquire.client, {key: mode for key, mode, _ in steps}, fences, until, acquire)


def _check_modes(key: Key, sharing: list[Hold]) -> None:
    """No two sessions certainly hold the lock in modes that exclude each other."""
    active: list[Hold] = []
    for hold in sharing:
        active = [other for other in active if max(other.certain_until, other.answered) > hold.asked]
        for other in active:
            if other.session == hold.session or hold.modes[key] in COMPATIBLE[other.modes[key]]:
                continue
            overlap = max(hold.answered, other.answered) < min(hold.certain_until, other.certain_until)
            # It was granted at some time during its call, although others held it all the time.
            inside = any(
                one.answered <= two.asked and two.answered <= one.certain_until
                for one, two in ((hold, other), (other, hold))
            )
            if overlap or inside:
                raise Violation(
                    f"{_LEVELS.describe(key)} had two holders: {other.session} in mode {other.modes[key]}, and "
                    f"{hold.session} in mode {hold.modes[key]}",
                    [other.acquire, hold.acquire],
                )
        active.append(hold)


def _check_fences(key: Key, holds: list[Hold]) -> None:
    """Fences grow, as far as real time orders the grants. A session that acquires a lock again keeps its fence."""
    first: dict[int, Hold] = {}
    for hold in holds:  # In the order of their calls.
        granted = first.setdefault(hold.fences[key], hold)
        if granted.session != hold.session:
            message = f"{_LEVELS.describe(key)}: fence {hold.fences[key]} was granted to two sessions"
            raise Violation(message, [granted.acquire, hold.acquire])
    check_increases(f"{_LEVELS.describe(key)}: fence ", [(fence, first[fence].acquire) for fence in sorted(first)])


def _check_order(holds: list[Hold]) -> None:
    """A session acquires only locks that come after those that it holds."""
    by_session: dict[str, list[Hold]] = {}
    for hold in holds:
        held = [each for each in by_session.get(hold.session, []) if each.certain_until >= hold.answered]
        before = {key for each in held for key in each.modes}
        new = hold.modes.keys() - before
        if before and new and min(new) < max(before):
            raise Violation(
                f"{hold.session} acquired {_LEVELS.describe(min(new))} while it held {_LEVELS.describe(max(before))}",
                [*(each.acquire for each in held), hold.acquire],
            )
        by_session[hold.session] = [*held, hold]


def _check_guarded(operations: Iterable[Operation], by_lock: dict[Key, list[Hold]]) -> None:
    """No fence is accepted after another session has got a higher one in a mode that excludes it."""
    for operation in operations:
        if operation.kind != "guarded" or operation.outcome is not Outcome.OK:
            continue
        level, name, fence = operation.argument
        key = _LEVELS.parse((level, name))
        sharing = by_lock.get(key, [])
        own = next((hold for hold in sharing if hold.acquire.key == operation.key), None)
        if own is None or own.fences.get(key) != fence:
            raise Violation(f"{_LEVELS.describe(key)}: fence {fence} was accepted, but was not granted", [operation])
        for hold in sharing:
            is_later = hold.fences.get(key, 0) > fence and hold.answered < operation.invoked
            if is_later and hold.session != own.session and hold.modes[key] not in COMPATIBLE[own.modes[key]]:
                raise Violation(
                    f"{_LEVELS.describe(key)}: fence {fence} was accepted after fence {hold.fences[key]} was granted",
                    [hold.acquire, operation],
                )
