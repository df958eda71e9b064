"""Checks that a register's history is strictly serializable, and reports a small contradiction if it is not."""

from collections.abc import Hashable, Iterable
from typing import Any, Final

import msgspec

from fastness.testing.histories.record import NEVER, History, Operation, Outcome, Violation, by_key, encode

STATES_MAX: Final = 200_000  # About ten seconds; valid histories need a few states per operation.
SHRINK_STATES_MAX: Final = 500  # A shorter report is optional, so neither one attempt
SHRINK_ATTEMPTS_MAX: Final = 200  # nor all attempts together may take long.

_UNSEEN: Final = b""  # No value encodes to empty bytes.


class Undecided(RuntimeError):
    """The search reached its bound before it found an order or excluded all of them. The result is unknown."""


def check_registers(history: History, *, initial: Any = None, states_max: int = STATES_MAX) -> int:
    """`check_register` for every key that was read, written or compared."""
    registers = by_key(history, "read", "write", "cas")
    return sum(_check_register(key, operations, initial, states_max) for key, operations in registers.items())


def check_register(history: History, key: Hashable, initial: Any = None, *, states_max: int = STATES_MAX) -> int:
    """Find one order of the operations on `key` that explains every answer; return how many states the search visited.

    Raises:
        Violation: there is no such order.
        Undecided: `states_max` states were not enough to decide.
    """
    return _check_register(key, by_key(history, "read", "write", "cas").get(key, []), initial, states_max)


class _Step(msgspec.Struct, frozen=True):
    """An operation on a register; a field is None where any value is allowed."""

    invoked: int
    returned: int
    needs: bytes | None = None
    excludes: bytes | None = None
    becomes: bytes | None = None

    def fits(self, state: bytes) -> bool:
        return (self.needs is None or self.needs == state) and self.excludes != state


def _step(operation: Operation) -> _Step:
    """The effect of the operation; without an answer, the effect it would have had."""
    invoked, returned = operation.invoked, operation.returned
    if operation.kind == "read":
        return _Step(invoked, returned, needs=encode(operation.result))
    if operation.kind == "write":
        return _Step(invoked, returned, becomes=encode(operation.argument))
    expected, new = map(encode, operation.argument)
    if operation.outcome is Outcome.OK and not operation.result:
        return _Step(invoked, returned, excludes=expected)
    return _Step(invoked, returned, needs=expected, becomes=None if new == expected else new)


def _check_register(key: Hashable, operations: list[Operation], initial: Any, states_max: int) -> int:
    steps: dict[Outcome, list[_Step]] = {outcome: [] for outcome in Outcome}
    for operation in operations:
        steps[operation.outcome].append(_step(operation))
    certain, possible, state = steps[Outcome.OK], steps[Outcome.UNKNOWN], encode(initial)
    try:
        states = _explore(certain, possible, state, states_max)
    except Undecided:
        if not _one_value_conflict(certain, possible, state):
            raise
        states = None
    if states is not None:
        return states
    certain, possible = _shrink(*(_one_value_conflict(certain, possible, state) or (certain, possible)), state)
    shown = {step.invoked for step in certain + _sources(certain, possible) + _sources(certain, steps[Outcome.FAILED])}
    raise Violation(
        f"Register {key!r}, initially {initial!r}: no order of these operations explains every answer",
        (operation for operation in operations if operation.invoked in shown),
    )


def _explore(certain: list[_Step], possible: list[_Step], state: bytes, states_max: int) -> int | None:
    """The number of states visited to find an order, or None if there is none.

    Wing and Gong's search with Lowe's memoization: a depth-first search over (certain steps done, possible steps used,
    value, must_be_read) that visits no configuration twice. These rules keep it small and lose no order:

    - A step that fits and changes nothing is taken at once: earlier is never worse.
    - All values that no remaining step reads count as one value, _UNSEEN; replacing one by another changes nothing.
    - A value that a remaining step needs is not replaced while no step can restore it.
    - After a possible step, a step that reads its value must come next. Before any other step, the possible step could
      as well come later, or never.
    """
    search = _Search(certain, possible)
    if any(search.is_unreachable(value, 0, 0) for value in search.needed if value not in (None, state)):
        return None
    seen: set[tuple[int, int, bytes, bool]] = set()
    stack = [(0, 0, state, False)]
    while stack:
        done, used, state, must_be_read = stack.pop()
        candidates, deadline = search.candidates(done)
        while True:
            state = state if search.is_observable(state, done) else _UNSEEN
            taken = sum(1 << i for i in candidates if search.can_take_now(certain[i], state, done))
            if not taken:
                break
            done, must_be_read = done | taken, False
            candidates, deadline = search.candidates(done)
        if not candidates:
            return len(seen) + 1
        if (done, used, state, must_be_read) in seen:
            continue
        if len(seen) >= states_max:
            raise Undecided(f"Undecided after {states_max} states; raise states_max, or use more keys or fewer clients")
        seen.add((done, used, state, must_be_read))

        # Pushed last means tried first: the step that returned first, and possible steps only after all others.
        moves = [(search.possible[i], done, used | 1 << i) for i in search.available(done, used, deadline)]
        candidates.sort(key=lambda i: -certain[i].returned)
        moves += [(certain[i], done | 1 << i, used) for i in candidates]
        for step, now_done, now_used in moves:
            if step.becomes is None or not step.fits(state) or (must_be_read and step.needs is None):
                continue
            if step.becomes == state or not search.is_unreachable(state, now_done, now_used):
                stack.append((now_done, now_used, step.becomes, now_used != used))
    return None


class _Search:
    """The steps, with a bit mask for each value of the steps that need it or store it."""

    def __init__(self, certain: list[_Step], possible: list[_Step]) -> None:
        self.excluding = sum(1 << i for i, step in enumerate(certain) if step.excludes is not None)
        self.certain = certain
        self.possible = possible if self.excluding else _sources(certain, possible)
        self.needed = _masks(step.needs for step in certain)
        self.left = _masks(step.becomes for step in certain)
        self.maybe_needed = _masks(step.needs for step in self.possible)
        self.maybe_left = _masks(step.becomes for step in self.possible)

    def is_observable(self, value: bytes | None, done: int) -> bool:
        """Whether a remaining step could distinguish `value` from another one."""
        return bool((self.needed.get(value, 0) | self.excluding) & ~done) or value in self.maybe_needed

    def is_unreachable(self, value: bytes | None, done: int, used: int) -> bool:
        """Whether a remaining step needs `value`, and none can restore it."""
        sources = self.left.get(value, 0) & ~done or self.maybe_left.get(value, 0) & ~used
        return bool(self.needed.get(value, 0) & ~done) and not sources

    def can_take_now(self, step: _Step, state: bytes, done: int) -> bool:
        if step.becomes is None:
            return step.fits(state)
        return state == _UNSEEN and step.needs is None and not self.is_observable(step.becomes, done)

    def candidates(self, done: int) -> tuple[list[int], int]:
        """The steps that may come next (those invoked before the first remaining return), and that return."""
        first = (~done & (done + 1)).bit_length() - 1
        found, deadline = [], NEVER
        for i in range(first, len(self.certain)):
            if self.certain[i].invoked > deadline:
                break
            if not done >> i & 1:
                found.append(i)
                deadline = min(deadline, self.certain[i].returned)
        return [i for i in found if self.certain[i].invoked < deadline], deadline

    def available(self, done: int, used: int, deadline: int) -> list[int]:
        """The possible steps that may come next: the first of each kind, if a step could observe it."""
        found: dict[tuple[bytes | None, bytes | None], int] = {}
        for i, step in enumerate(self.possible):
            if step.invoked > deadline:
                break
            if not used >> i & 1 and self.is_observable(step.becomes, done):
                found.setdefault((step.needs, step.becomes), i)
        return list(found.values())


def _masks(values: Iterable[bytes | None]) -> dict[bytes | None, int]:
    masks: dict[bytes | None, int] = {}
    for i, value in enumerate(values):
        masks[value] = masks.get(value, 0) | 1 << i
    return masks


def _sources(certain: list[_Step], steps: list[_Step]) -> list[_Step]:
    """The steps whose value a certain step read, or that led to one of these."""
    values = {step.needs for step in certain} - {None}
    size = 0
    while size != len(values):
        size = len(values)
        values |= {step.needs for step in steps if step.becomes in values} - {None}
    return [step for step in steps if step.becomes in values]


# Shrinking a contradiction. Dropping an answer only allows more orders, so a subset without an order proves it.


def _one_value_conflict(
    certain: list[_Step], possible: list[_Step], state: bytes
) -> tuple[list[_Step], list[_Step]] | None:
    """A contradiction between the reads of one value and all writes, the most common kind; None if there is none."""
    for value in dict.fromkeys(step.needs for step in certain if step.needs is not None):
        others = {step.invoked for step in certain if step.excludes is not None or step.needs not in (None, value)}
        smaller = _drop_answers(certain, possible, others)
        if _is_contradiction(*smaller, state):
            return smaller
    return None


def _shrink(certain: list[_Step], possible: list[_Step], state: bytes) -> tuple[list[_Step], list[_Step]]:
    """The same contradiction with as many answers dropped as bisection finds."""
    attempts = SHRINK_ATTEMPTS_MAX
    size = len(certain)
    while size:
        begin = 0
        while begin < len(certain) and attempts:
            smaller = _drop_answers(certain, possible, {step.invoked for step in certain[begin : begin + size]})
            if _is_contradiction(*smaller, state):
                certain, possible = smaller
            else:
                begin += size
            attempts -= 1
        size //= 2
    return certain, possible


def _drop_answers(certain: list[_Step], possible: list[_Step], dropped: set[int]) -> tuple[list[_Step], list[_Step]]:
    unanswered = [step for step in certain if step.invoked in dropped and step.becomes is not None]
    more = sorted(possible + unanswered, key=lambda step: step.invoked)
    return [step for step in certain if step.invoked not in dropped], more


def _is_contradiction(certain: list[_Step], possible: list[_Step], state: bytes) -> bool:
    try:
        return _explore(certain, possible, state, SHRINK_STATES_MAX) is None
    except Undecided:
        return False
