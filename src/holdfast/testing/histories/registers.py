"""Decides whether a register's history is strictly serializable, and says why not in a few operations."""

from collections.abc import Hashable, Iterable
from typing import Any, Final

import msgspec

from holdfast.testing.histories.record import NEVER, History, Operation, Outcome, Violation, by_key, encode

STATES_MAX: Final = 200_000  # About ten seconds; honest histories need a few states per operation.
SHRINK_STATES_MAX: Final = 500  # A shorter report is a courtesy, so neither an attempt at one
SHRINK_ATTEMPTS_MAX: Final = 200  # nor all of them together may take long.

_UNSEEN: Final = b""  # No value encodes to nothing.


class Undecided(RuntimeError):
    """The search met its bound before it found an order or ruled all of them out. This is no verdict."""


def check_registers(history: History, *, initial: Any = None, states_max: int = STATES_MAX) -> int:
    """`check_register` for every key that was read, written or compared."""
    registers = by_key(history, "read", "write", "cas")
    return sum(_check_register(key, operations, initial, states_max) for key, operations in registers.items())


def check_register(history: History, key: Hashable, initial: Any = None, *, states_max: int = STATES_MAX) -> int:
    """Find one order of the operations on `key` that explains every answer; return how many states that took.

    Raises:
        Violation: there is none.
        Undecided: `states_max` states were not enough to tell.
    """
    return _check_register(key, by_key(history, "read", "write", "cas").get(key, []), initial, states_max)


class _Step(msgspec.Struct, frozen=True):
    """An operation as a register sees it; a field is None where it does not care."""

    invoked: int
    returned: int
    needs: bytes | None = None
    refuses: bytes | None = None
    becomes: bytes | None = None

    def fits(self, state: bytes) -> bool:
        return (self.needs is None or self.needs == state) and self.refuses != state


def _step(operation: Operation) -> _Step:
    """What the operation did; without an answer, what it would have done."""
    invoked, returned = operation.invoked, operation.returned
    if operation.kind == "read":
        return _Step(invoked, returned, needs=encode(operation.result))
    if operation.kind == "write":
        return _Step(invoked, returned, becomes=encode(operation.argument))
    expected, new = map(encode, operation.argument)
    if operation.outcome is Outcome.OK and not operation.result:
        return _Step(invoked, returned, refuses=expected)
    return _Step(invoked, returned, needs=expected, becomes=None if new == expected else new)


def _check_register(key: Hashable, operations: list[Operation], initial: Any, states_max: int) -> int:
    steps: dict[Outcome, list[_Step]] = {outcome: [] for outcome in Outcome}
    for operation in operations:
        steps[operation.outcome].append(_step(operation))
    certain, possible, state = steps[Outcome.OK], steps[Outcome.UNKNOWN], encode(initial)
    try:
        states = _explore(certain, possible, state, states_max)
    except Undecided:
        if not _one_value(certain, possible, state):
            raise
        states = None
    if states is not None:
        return states
    certain, possible = _core(*(_one_value(certain, possible, state) or (certain, possible)), state)
    shown = {step.invoked for step in certain + _sources(certain, possible) + _sources(certain, steps[Outcome.FAILED])}
    raise Violation(
        f"Register {key!r}, at first {initial!r}: no order of these operations explains every answer",
        (operation for operation in operations if operation.invoked in shown),
    )


def _explore(certain: list[_Step], possible: list[_Step], state: bytes, states_max: int) -> int | None:
    """How many states it took to find an order, or None if there is none.

    Wing and Gong's search with Lowe's memory: a depth-first walk over (certain steps done, possible ones used,
    value, owed) that enters no configuration twice. These rules keep it small and lose no order:

    - An answer that fits and changes nothing is taken at once: earlier is never worse.
    - All values that no step has yet to see are one value, _UNSEEN; to write one over another changes nothing.
    - A value that some step has yet to see is not left while nothing can bring it back.
    - A possible step is owed a look: one that sees its value comes next. Before any other step it might as
      well have come later, or never.
    """
    search = _Search(certain, possible)
    if any(search.missed(value, 0, 0) for value in search.needed if value not in (None, state)):
        return None
    seen: set[tuple[int, int, bytes, bool]] = set()
    stack = [(0, 0, state, False)]
    while stack:
        done, used, state, owed = stack.pop()
        candidates, deadline = search.candidates(done)
        while True:
            state = state if search.watched(state, done) else _UNSEEN
            taken = sum(1 << i for i in candidates if search.is_idle(certain[i], state, done))
            if not taken:
                break
            done, owed = done | taken, False
            candidates, deadline = search.candidates(done)
        if not candidates:
            return len(seen) + 1
        if (done, used, state, owed) in seen:
            continue
        if len(seen) >= states_max:
            raise Undecided(f"Undecided after {states_max} states; raise states_max, or use more keys or fewer clients")
        seen.add((done, used, state, owed))

        # What is pushed last is tried first: what returned soonest, and possible steps only when all else failed.
        moves = [(search.possible[i], done, used | 1 << i) for i in search.available(done, used, deadline)]
        candidates.sort(key=lambda i: -certain[i].returned)
        moves += [(certain[i], done | 1 << i, used) for i in candidates]
        for step, now_done, now_used in moves:
            if step.becomes is None or not step.fits(state) or (owed and step.needs is None):
                continue
            if step.becomes == state or not search.missed(state, now_done, now_used):
                stack.append((now_done, now_used, step.becomes, now_used != used))
    return None


class _Search:
    """Steps, and for every value a bit mask of those that need it or leave it."""

    def __init__(self, certain: list[_Step], possible: list[_Step]) -> None:
        self.refusing = sum(1 << i for i, step in enumerate(certain) if step.refuses is not None)
        self.certain = certain
        self.possible = possible if self.refusing else _sources(certain, possible)
        self.needed = _masks(step.needs for step in certain)
        self.left = _masks(step.becomes for step in certain)
        self.maybe_needed = _masks(step.needs for step in self.possible)
        self.maybe_left = _masks(step.becomes for step in self.possible)

    def watched(self, value: bytes | None, done: int) -> bool:
        """Whether a step that is not done could tell `value` from another."""
        return bool((self.needed.get(value, 0) | self.refusing) & ~done) or value in self.maybe_needed

    def missed(self, value: bytes | None, done: int, used: int) -> bool:
        """Whether a step that is not done needs `value`, and none can bring it back."""
        sources = self.left.get(value, 0) & ~done or self.maybe_left.get(value, 0) & ~used
        return bool(self.needed.get(value, 0) & ~done) and not sources

    def is_idle(self, step: _Step, state: bytes, done: int) -> bool:
        if step.becomes is None:
            return step.fits(state)
        return state == _UNSEEN and step.needs is None and not self.watched(step.becomes, done)

    def candidates(self, done: int) -> tuple[list[int], int]:
        """What may come next, all that was invoked before the first return among the rest; and that return."""
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
        """The possible steps that may come next: the first of those that do the same, if somebody may see it."""
        found: dict[tuple[bytes | None, bytes | None], int] = {}
        for i, step in enumerate(self.possible):
            if step.invoked > deadline:
                break
            if not used >> i & 1 and self.watched(step.becomes, done):
                found.setdefault((step.needs, step.becomes), i)
        return list(found.values())


def _masks(values: Iterable[bytes | None]) -> dict[bytes | None, int]:
    masks: dict[bytes | None, int] = {}
    for i, value in enumerate(values):
        masks[value] = masks.get(value, 0) | 1 << i
    return masks


def _sources(certain: list[_Step], steps: list[_Step]) -> list[_Step]:
    """Those of `steps` whose value a certain step saw, or that led to one of these."""
    values = {step.needs for step in certain} - {None}
    size = 0
    while size != len(values):
        size = len(values)
        values |= {step.needs for step in steps if step.becomes in values} - {None}
    return [step for step in steps if step.becomes in values]


# A smaller contradiction. A forgotten answer only allows more orders, so what still has none had none before.


def _one_value(certain: list[_Step], possible: list[_Step], state: bytes) -> tuple[list[_Step], list[_Step]] | None:
    """A contradiction among those that saw one value, and all writes; most lies are that plain."""
    for value in dict.fromkeys(step.needs for step in certain if step.needs is not None):
        others = {step.invoked for step in certain if step.refuses is not None or step.needs not in (None, value)}
        smaller = _forget(certain, possible, others)
        if _is_contradiction(*smaller, state):
            return smaller
    return None


def _core(certain: list[_Step], possible: list[_Step], state: bytes) -> tuple[list[_Step], list[_Step]]:
    """The same contradiction with as many answers forgotten as halving finds."""
    attempts = SHRINK_ATTEMPTS_MAX
    size = len(certain)
    while size:
        begin = 0
        while begin < len(certain) and attempts:
            smaller = _forget(certain, possible, {step.invoked for step in certain[begin : begin + size]})
            if _is_contradiction(*smaller, state):
                certain, possible = smaller
            else:
                begin += size
            attempts -= 1
        size //= 2
    return certain, possible


def _forget(certain: list[_Step], possible: list[_Step], those: set[int]) -> tuple[list[_Step], list[_Step]]:
    forgotten = [step for step in certain if step.invoked in those and step.becomes is not None]
    more = sorted(possible + forgotten, key=lambda step: step.invoked)
    return [step for step in certain if step.invoked not in those], more


def _is_contradiction(certain: list[_Step], possible: list[_Step], state: bytes) -> bool:
    try:
        return _explore(certain, possible, state, SHRINK_STATES_MAX) is None
    except Undecided:
        return False
