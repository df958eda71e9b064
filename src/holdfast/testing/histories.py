"""Histories: what concurrent clients asked and were told, and checkers that decide whether it can be true.

    OK        invoked ──o──── returned      it happened once, in between
    FAILED    invoked ─────── returned      it never happened
    UNKNOWN   invoked ─────────?──── ···    the answer was lost: it happens once, at any later time, or never

`invoked` and `returned` are positions from one counter, so one seed gives one history, and one digest. An
operation that never returned is UNKNOWN. Keys, arguments and results are plain data that msgspec can encode;
two values are the same if they encode to the same bytes (a tuple equals a list, and 1 is not True).

    checker              kinds: argument -> result                             promise
    check_register       read: -> value; write: value; cas: (old, new) -> bool   strictly serializable
    check_counter        increment: amount -> value after                      each counted once, in real-time order
    check_fences         acquire: -> fence                                     a later grant has a higher fence
    check_nothing_lost   write, cas                                            what was acknowledged is there
"""

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError, InvalidArgument, Retry

STATES_MAX: Final = 200_000  # A few seconds and about 100 MB; honest histories need a few states per operation.
SHRINK_STATES_MAX: Final = 20_000  # For all attempts together: a shorter report is a courtesy, and may not take long.
LINES_MAX: Final = 50  # A report that nobody reads to its end explains nothing.
NEVER: Final = 2**63 - 1

_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode
_UNSEEN: Final = b""  # No value encodes to nothing.


class Outcome(StrEnum):
    """What a client knows about its operation."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Operation(msgspec.Struct, frozen=True):
    """One call of one client. `returned` is NEVER unless its outcome is known."""

    client: str
    kind: str
    key: Hashable
    argument: Any
    invoked: int
    returned: int = NEVER
    outcome: Outcome = Outcome.UNKNOWN
    result: Any = None

    def __str__(self) -> str:
        asked = f"{self.kind} {self.key!r}" + ("" if self.argument is None else f" {self.argument!r}")
        told = repr(self.result) if self.outcome is Outcome.OK else self.outcome.value
        return f"[{self.invoked}..{'' if self.returned == NEVER else self.returned}] {self.client}: {asked} -> {told}"


class Violation(AssertionError):
    """No correct system gives this history; `operations` are the ones that contradict each other."""

    def __init__(self, message: str, operations: Iterable[Operation]) -> None:
        unique = {operation.invoked: operation for operation in operations}
        self.message = message
        self.operations = tuple(unique[invoked] for invoked in sorted(unique))
        lines = [message, *map(str, self.operations[:LINES_MAX])]
        if len(self.operations) > LINES_MAX:
            lines.append(f"and {len(self.operations) - LINES_MAX} more, in `operations`")
        super().__init__("\n    ".join(lines))


class Undecided(RuntimeError):
    """The search met its bound before it found an order or ruled all of them out. This is no verdict."""


class History:
    """A record of operations that many threads append to at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._position = 0
        self._operations: dict[int, Operation] = {}

    def record(self, client: str, kind: str, key: Hashable, argument: Any, call: Callable[[], Any]) -> Operation:
        """Run `call` and return the operation as it ended; a HoldfastError becomes its outcome.

        Any other exception passes through, and leaves the operation UNKNOWN.
        """
        operation = self.invoke(client, kind, key, argument)
        try:
            result = call()
        except HoldfastError as error:
            return self.raised(operation, error)
        return self.ok(operation, result)

    def invoke(self, client: str, kind: str, key: Hashable, argument: Any = None) -> Operation:
        """Note that `client` is about to call; end the operation with `ok`, `failed`, `unknown` or `raised`."""
        with self._lock:
            self._position += 1
            operation = Operation(client, kind, key, argument, self._position)
            self._operations[operation.invoked] = operation
            return operation

    def ok(self, operation: Operation, result: Any = None) -> Operation:
        """It happened, and answered `result`."""
        return self._end(operation, Outcome.OK, result)

    def failed(self, operation: Operation) -> Operation:
        """It certainly did not happen, and never will."""
        return self._end(operation, Outcome.FAILED)

    def unknown(self, operation: Operation) -> Operation:
        """The answer was lost."""
        return self._end(operation, Outcome.UNKNOWN)

    def raised(self, operation: Operation, error: HoldfastError) -> Operation:
        """It raised: UNKNOWN if the error's `retry` says that it may have happened, FAILED otherwise."""
        return self.unknown(operation) if error.retry is Retry.IDEMPOTENT else self.failed(operation)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Everything so far, in the order of invocation."""
        with self._lock:
            return tuple(self._operations.values())

    def digest(self) -> str:
        """A SHA-256 over every field of every operation: equal digests, equal histories."""
        return hashlib.sha256(_encode(self.operations)).hexdigest()

    def render(self, limit: int = LINES_MAX) -> str:
        """The last `limit` operations, one on a line."""
        operations = self.operations
        hidden = max(0, len(operations) - limit)
        return "\n".join(
            [f"({hidden} earlier operations)"] * bool(hidden) + [str(each) for each in operations[hidden:]]
        )

    def _end(self, operation: Operation, outcome: Outcome, result: Any = None) -> Operation:
        with self._lock:
            if self._operations.get(operation.invoked) is not operation:
                raise InvalidArgument(f"{operation} has already ended, or is another history's; end each one once")
            self._position += 1
            returned = NEVER if outcome is Outcome.UNKNOWN else self._position
            ended = msgspec.structs.replace(operation, returned=returned, outcome=outcome, result=result)
            self._operations[operation.invoked] = ended
            return ended


def check_registers(history: History, *, initial: Any = None, states_max: int = STATES_MAX) -> int:
    """`check_register` for every key that was read, written or compared."""
    registers = _by_key(history, "read", "write", "cas")
    return sum(_check_register(key, operations, initial, states_max) for key, operations in registers.items())


def check_register(history: History, key: Hashable, initial: Any = None, *, states_max: int = STATES_MAX) -> int:
    """Find one order of the operations on `key` that explains every answer; return how many states that took.

    Raises:
        Violation: there is none.
        Undecided: `states_max` states were not enough to tell.
    """
    return _check_register(key, _by_key(history, "read", "write", "cas").get(key, []), initial, states_max)


def check_counter(history: History, key: Hashable, *, initial: int = 0, final: int | None = None) -> None:
    """Find an order of the increments of `key` that explains every answer, and `final`, read after all of them.

    Exact if every increment whose answer was lost adds 1; otherwise a few wrong histories pass. O(n log n).

    Raises:
        Violation: there is none.
    """
    increments = _by_key(history, "increment").get(key, [])
    counted = _growing(f"Counter {key!r}", increments)
    lost = [operation for operation in increments if operation.outcome is Outcome.UNKNOWN]
    lost_invoked = [operation.invoked for operation in lost]
    lost_total = list(accumulate(map(_amount, lost), initial=0))
    # What is below an answer happened before that answer returned, and before every higher one did.
    deadlines = list(accumulate((operation.returned for operation in reversed(counted)), min))[::-1]

    value, missing, previous = initial, 0, counted[:0]
    for operation, deadline in zip(counted, deadlines, strict=True):
        gap = operation.result - _amount(operation) - value
        if gap < 0:
            raise Violation(f"Counter {key!r} was at {value}: this answer is too low", [*previous, operation])
        missing += gap
        available = lost_total[bisect_left(lost_invoked, deadline)]
        if missing > available:
            message = f"Counter {key!r} skipped: no answers explain {missing} of {operation.result}, and increments "
            message += f"that were invoked before {deadline} and lost their answer explain {available}"
            raise Violation(message, [*previous, operation, *(each for each in counted if each.returned == deadline)])
        value, previous = operation.result, [operation]

    highest = initial + sum(map(_amount, counted)) + lost_total[-1]
    if final is not None and not value <= final <= highest:
        raise Violation(f"Counter {key!r} ended at {final}; its answers allow {value} to {highest}", previous)


def check_fences(history: History, key: Hashable) -> None:
    """Check that no fence of `key` was granted twice, and that a later grant has a higher one."""
    _growing(f"Fence {key!r}", _by_key(history, "acquire").get(key, []))


def check_all_fences(history: History) -> None:
    """`check_fences` for every key that was acquired."""
    for key, operations in _by_key(history, "acquire").items():
        _growing(f"Fence {key!r}", operations)


def check_nothing_lost(history: History, found: Mapping[Any, Any]) -> None:
    """Check `found`, read after everything ended, against what was written; None is the same as absent.

    A value may be there if its answer was lost, or if it was acknowledged and no later write was.

    Raises:
        Violation: an acknowledged write is missing, or a value is there that must not be.
    """
    written = _by_key(history, "write", "cas")
    for key in dict.fromkeys([*written, *found]):
        value = _encode(found.get(key))
        writes = [(each, _step(each).becomes) for each in written.get(key, []) if _step(each).becomes is not None]
        acknowledged = [each for each, _ in writes if each.outcome is Outcome.OK]
        last = acknowledged[-1].invoked if acknowledged else 0
        # An answer that was lost has not returned, so its write is never too old.
        allowed = {becomes for each, becomes in writes if each.outcome is not Outcome.FAILED and each.returned > last}
        if value in allowed or (not acknowledged and found.get(key) is None):
            continue
        sources = [each for each, becomes in writes if becomes == value]
        reason = "nobody wrote that"
        if sources:
            reason = "a later write was acknowledged" if sources[0] in acknowledged else "that write failed"
        elif found.get(key) is None:
            reason = "a write was acknowledged"
        raise Violation(f"Key {key!r} holds {found.get(key)!r}, but {reason}", sources + acknowledged[-1:])


def _growing(name: str, operations: list[Operation]) -> list[Operation]:
    """The acknowledged operations in the order of their results, which real time must not contradict."""
    answered = [operation for operation in operations if operation.outcome is Outcome.OK]
    for operation in answered:
        if type(operation.result) is not int:
            raise InvalidArgument(f"{operation} has no integer as its result; record the number it was answered")
    answered.sort(key=lambda operation: operation.result)
    latest = answered[0] if answered else None
    for one, other in pairwise(answered):
        if one.result == other.result:
            raise Violation(f"{name}: {one.result} was given out twice", [one, other])
        latest = max(latest or one, one, key=lambda operation: operation.invoked)
        if other.returned < latest.invoked:
            message = f"{name}: {other.result} had returned before the call that got {latest.result} was made"
            raise Violation(message, [other, latest])
    return answered


def _amount(operation: Operation) -> int:
    amount = 1 if operation.argument is None else operation.argument
    if type(amount) is not int or amount < 1:
        raise InvalidArgument(f"{operation} adds {amount!r}; check_counter knows increments by 1 or more")
    return amount


def _by_key(history: History, *kinds: str) -> dict[Hashable, list[Operation]]:
    keys: dict[Hashable, list[Operation]] = {}
    for operation in history.operations:
        if operation.kind in kinds:
            keys.setdefault(operation.key, []).append(operation)
    return keys


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
        return _Step(invoked, returned, needs=_encode(operation.result))
    if operation.kind == "write":
        return _Step(invoked, returned, becomes=_encode(operation.argument))
    expected, new = map(_encode, operation.argument)
    if operation.outcome is Outcome.OK and not operation.result:
        return _Step(invoked, returned, refuses=expected)
    return _Step(invoked, returned, needs=expected, becomes=None if new == expected else new)


def _check_register(key: Hashable, operations: list[Operation], initial: Any, states_max: int) -> int:
    steps: dict[Outcome, list[_Step]] = {outcome: [] for outcome in Outcome}
    for operation in operations:
        steps[operation.outcome].append(_step(operation))
    certain, possible = steps[Outcome.OK], steps[Outcome.UNKNOWN]
    states = _explore(certain, possible, _encode(initial), states_max)
    if states is not None:
        return states
    certain, possible = _core(certain, possible, _encode(initial))
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


def _core(certain: list[_Step], possible: list[_Step], state: bytes) -> tuple[list[_Step], list[_Step]]:
    """The same contradiction with as many answers forgotten as halving finds.

    A forgotten answer only allows more orders, so what still contradicts itself did so before.
    """
    states_left = SHRINK_STATES_MAX
    for changes in (False, True):  # Reads first: every forgotten write makes the search harder, unless none sees it.
        group = [step for step in certain if (step.becomes is not None) is changes]
        size = len(group)
        while size and states_left > 0:
            for begin in range(0, len(group), size):
                chunk = {step.invoked for step in group[begin : begin + size]}
                forgotten = [step for step in certain if step.invoked in chunk]
                fewer = [step for step in certain if step.invoked not in chunk]
                more = sorted(possible + forgotten * changes, key=lambda step: step.invoked)
                try:
                    states = _explore(fewer, more, state, SHRINK_STATES_MAX // 40) if forgotten else 0
                except Undecided:
                    states = SHRINK_STATES_MAX // 40
                if states is None:
                    certain, possible = fewer, more
                states_left -= states or 1
            size //= 2
    return certain, possible
