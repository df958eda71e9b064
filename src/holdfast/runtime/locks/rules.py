"""Lock modes, lock levels, and the registry of holders and waiters.

Nothing in this module blocks, and only one thread at a time may use it; `holdfast.runtime.locks.table` guarantees that
and documents the locking protocol.
"""

import asyncio
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from operator import itemgetter
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from holdfast import limits
from holdfast.errors import InvalidArgument, LockOrderViolation


class Mode(StrEnum):
    """The mode of a lock."""

    INTENT_SHARED = "IS"
    INTENT_EXCLUSIVE = "IX"
    SHARED = "S"
    EXCLUSIVE = "X"


IS, IX, S, X = Mode
COMPATIBLE: Final[dict[Mode, set[Mode]]] = {IS: {IS, IX, S}, IX: {IS, IX}, S: {IS, S}, X: set()}
COVERED: Final = {
    IS: {IS},
    IX: {IX, IS},
    S: {S, IS},
    X: {X, S, IX, IS},
}  # The modes that each mode includes; the weakest first.
INTENT: Final = {IS: IS, IX: IX, S: IS, X: IX}  # The mode to take on every ancestor.

# The holders of a node are counted in one integer with 32 bits per mode, so that a single `&` finds a conflict.
UNIT: Final = {mode: 1 << 32 * index for index, mode in enumerate(Mode)}
CONFLICTS: Final = {mode: sum(UNIT[each] * 0xFFFF_FFFF for each in set(Mode) - COMPATIBLE[mode]) for mode in Mode}

Path = Sequence[str]  # A level and a name on it, as callers write them.
Key = tuple[int, str]  # The index of a level and a name on it. Keys sort in lock order.
Step = tuple[
    Key, Mode, bool
]  # The key, its mode, and whether the caller requested it (otherwise it is an intent on an ancestor).
Grant = tuple[Mode, float]  # The mode of a held lock, and since when it is held.
ROOT: Final[Key] = (0, "")


class NoTask:
    """The owner of locks that a coroutine acquires before it runs in a task."""

    def get_name(self) -> str:
        return "of a call"


Identity: TypeAlias = "threading.Thread | asyncio.Task[Any] | NoTask"


def parse_mode(mode: Mode | str) -> Mode:
    """The mode with this name.

    Raises:
        InvalidArgument: there is no such mode.
    """
    if isinstance(mode, Mode):
        return mode
    try:
        return Mode(mode)
    except ValueError:
        raise InvalidArgument(f"Unknown lock mode {mode!r}; use one of {', '.join(Mode)}") from None


class Levels:
    """The levels of a lock table in lock order; resolves paths to keys."""

    def __init__(self, names: Sequence[str], *, nested: bool) -> None:
        is_valid = isinstance(names, list | tuple) and names and all(name and name.__class__ is str for name in names)
        if not is_valid:
            raise InvalidArgument(f"A lock table needs a list of level names in lock order, not {names!r}")
        self.names = tuple(names)
        self._nested = nested
        self._deepest = len(names) - 1
        self._indexes = {name.lower(): index for index, name in enumerate(names)}
        if len(self._indexes) < len(names):
            raise InvalidArgument(f"Two levels of the lock table have the same name: {', '.join(names)}")

    def steps(self, path: Path, mode: Mode) -> list[Step]:
        """The locks to take for `path`, in lock order: intents on its ancestors, then `path` itself."""
        key = level, name = self._parse(path)
        if not self._nested:
            return [(key, mode, True)]
        if not level:
            if name:
                raise InvalidArgument(
                    f"The level {self.names[0]} has a single node without a name; remove the name {name!r}"
                )
            return [(key, mode, True)]
        parts = name.split("/", level - 1)
        # A type with a slash in its name would collide with the records of another type.
        if len(parts) < level or "" in parts or (level < self._deepest and "/" in parts[-1]):
            raise self._invalid_name(level, name)
        intent = INTENT[mode]
        steps: list[Step] = [(ROOT, intent, False)]
        above = parts[0]
        for depth in range(1, level):
            steps.append(((depth, above), intent, False))
            above = f"{above}/{parts[depth]}"
        steps.append((key, mode, True))
        return steps

    def steps_for_all(self, paths: Sequence[Path], mode: Mode) -> list[Step]:
        """The locks to take for all of `paths`, without duplicates, in lock order."""
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            raise InvalidArgument(f"acquire_all takes a list of paths, not {paths!r}")
        steps: dict[Key, Step] = {}
        for path in paths:
            for step in self.steps(path, mode):
                if step[2] or step[0] not in steps:  # A mode includes its own intent.
                    steps[step[0]] = step
        return sorted(steps.values(), key=itemgetter(0))

    def timeout_for(self, timeout_seconds: float | None, steps: list[Step]) -> float:
        """The wait limit in seconds: `timeout_seconds`, or the default for the levels of `steps`."""
        if timeout_seconds is None:
            for (level, _), _, requested in steps:
                if requested and level < self._deepest and self._nested:
                    return limits.LOCK_BULK_WAIT_SECONDS
            return limits.LOCK_WAIT_SECONDS
        if timeout_seconds.__class__ not in (int, float) or not 0 <= timeout_seconds < math.inf:
            raise InvalidArgument(f"timeout_seconds must be a number of at least 0, not {timeout_seconds!r}")
        return timeout_seconds

    def path(self, key: Key) -> tuple[str, str]:
        """`key` as a path."""
        return self.names[key[0]], key[1]

    def describe(self, key: Key) -> str:
        """`key` as text for a message."""
        level, name = self.path(key)
        return f"{level} {name}" if name else level

    def _parse(self, path: Sequence[object]) -> Key:
        if path.__class__ not in (list, tuple) and (isinstance(path, str) or not isinstance(path, Sequence)):
            raise InvalidArgument(f"A path must be a list of a level and a name, not {path!r}")
        if len(path) == 2:
            level, name = path
        elif len(path) == 1:
            level, name = path[0], ""
        else:
            raise InvalidArgument(f"A path has a level and an optional name; {path!r} has {len(path)} parts")
        if not isinstance(level, str) or not isinstance(name, str):
            raise InvalidArgument(f"The level and the name of a path must be strings, not {path!r}")
        index = self._indexes.get(level)
        if index is None:
            index = self._indexes.get(level.lower())
            if index is None:
                raise InvalidArgument(f"Unknown lock level {level!r}; use one of {', '.join(self.names)}")
        if len(name) > limits.LOCK_NAME_CHARACTERS_MAX:
            raise InvalidArgument(
                f"A lock name has at most {limits.LOCK_NAME_CHARACTERS_MAX} characters; this one has {len(name):,}"
            )
        return index, name

    def _invalid_name(self, level: int, name: str) -> InvalidArgument:
        form = {1: "a name without a slash", 2: "type/id"}.get(level, "/".join(self.names[1 : level + 1]))
        return InvalidArgument(
            f"Invalid name {name!r} for the level {self.names[level]}; write {form}, with no empty part"
        )


class Owner:
    """A thread or a task, and the locks that it holds."""

    __slots__ = ("grants", "identity", "reentries")

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.grants: dict[Key, Grant] = {}  # In lock order, because they are acquired in that order.
        self.reentries: dict[Key, int] = {}  # How many more times it acquired a key that it already held.


class Waiter(Protocol):
    """Wakes the thread or task that waits for a claim."""

    def wake(self) -> bool:
        """Wake the waiter; False if it no longer exists."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the waiter can no longer be woken, because its event loop is closed."""
        ...


class Claim:
    """The locks that an owner requested in one call, and how many of them it has so far."""

    __slots__ = ("is_waiting", "owner", "since", "steps", "taken", "waiter")

    owner: Owner
    steps: list[Step]
    taken: int  # How many of the steps are acquired.
    is_waiting: bool  # It is queued for its next step.
    since: float  # When it was queued.
    waiter: Waiter | None  # Set when the claim first has to wait.

    @property
    def next(self) -> Step:
        return self.steps[self.taken]


class LevelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Lock statistics of one level: totals since the table was created, and current counts."""

    acquisitions: int  # Requested locks that were acquired.
    intents: int  # Intents that were acquired on ancestors.
    waits: int  # How many of both had to wait.
    unserved: int  # Waits that ended without the lock: timed out or cancelled.
    wait_seconds_total: float
    wait_seconds_max: float
    timeouts: int  # Including attempts with a timeout of 0.
    violations: int
    holders: int  # Including intents.
    waiting: int

    @property
    def contention(self) -> float:
        """The share of requests that had to wait, from 0 to 1."""
        requests = self.acquisitions + self.intents + self.unserved + self.waiting
        return self.waits / requests if requests else 0.0


class Counters:
    """Mutable counters of one level."""

    __slots__ = tuple(name for name in LevelStats.__struct_fields__ if name != "holders")

    def __init__(self) -> None:
        self.acquisitions = self.intents = self.waits = self.unserved = 0
        self.wait_seconds_total = self.wait_seconds_max = 0.0
        self.timeouts = self.violations = self.waiting = 0

    def snapshot(self, holders: int) -> LevelStats:
        return LevelStats(holders=holders, **{name: getattr(self, name) for name in self.__slots__})


class LockRegistry:
    """The holders and waiters of every lock. The caller must serialise access to it."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.held: dict[Key, int] = {}  # The number of holders per mode, in the units of `UNIT`.
        self.lines: dict[Key, OrderedDict[Claim, None]] = {}  # The waiting claims of each key, in FIFO order.
        self.owners: dict[Identity, Owner] = {}  # The owners that hold a lock.
        self.counters = [Counters() for _ in levels.names]
        self.waiting = 0  # The number of waiting claims.
        self.completed: deque[Claim] = deque()  # Claims that were completed while they waited, and must be woken.
        self.unnoticed: set[Claim] = set()  # Completed claims whose waiter has not resumed yet.

    def check(self, claim: Claim) -> None:
        """Check the lock order: a claim may wait only for keys after everything that its owner holds.

        Raises:
            LockOrderViolation: it might wait for an earlier key, or for a stronger mode of a held key.
        """
        grants = claim.owner.grants
        last = next(reversed(grants))
        refused = None
        for step in claim.steps:
            grant = grants.get(step[0])
            if grant is None:
                if step[0] < last:
                    refused = step
                break  # The remaining steps are later in lock order.
            if step[1] not in COVERED[grant[0]]:
                refused = step  # The last one gives the best message: the earlier ones are intents on its ancestors.
        if refused is not None:
            self.counters[refused[0][0]].violations += 1
            raise LockOrderViolation(self._violation_message(refused, grants.get(refused[0]), last))

    def advance(self, claim: Claim, served: Key | None = None) -> bool:
        """Acquire the remaining steps of `claim` until one conflicts; whether the claim is complete.

        `served` is the key for which the claim has already waited, so its line is not considered again.
        """
        owner, taken = claim.owner, claim.taken
        held, lines, grants, counters = self.held, self.lines, owner.grants, self.counters
        new = not grants
        now = monotonic()
        for key, mode, requested in claim.steps[taken:] if taken else claim.steps:
            # Steps after the first new one are later in lock order, so the owner does not hold them either.
            if new or key not in grants:
                new = True
                count = held.get(key, 0)
                if count & CONFLICTS[mode] or (lines and key in lines and key != served):
                    break
                held[key] = count + UNIT[mode]
                grants[key] = mode, now
            else:
                owner.reentries[key] = owner.reentries.get(key, 0) + 1
            taken += 1
            if requested:
                counters[key[0]].acquisitions += 1
            else:
                counters[key[0]].intents += 1
        claim.taken = taken
        if grants:
            self.owners[owner.identity] = owner
        return taken == len(claim.steps)

    def enqueue(self, claim: Claim) -> None:
        """Add `claim` to the end of the line of its next step."""
        key = claim.next[0]
        self.lines.setdefault(key, OrderedDict())[claim] = None
        claim.is_waiting, claim.since = True, monotonic()
        self.waiting += 1
        counters = self.counters[key[0]]
        counters.waits += 1
        counters.waiting += 1

    def release(self, claim: Claim) -> None:
        """Release everything that `claim` acquired, in reverse order, and its position in line. Idempotent."""
        if claim.waiter is not None:
            self.unnoticed.discard(claim)
            if claim.is_waiting:
                key = claim.next[0]
                self.counters[key[0]].unserved += 1
                self._dequeue(claim, key)
                self._serve(key)
        owner, held, lines = claim.owner, self.held, self.lines
        grants, reentries = owner.grants, owner.reentries
        steps, claim.taken = claim.steps[: claim.taken], 0
        for key, _, _ in reversed(steps):
            if reentries and key in reentries:
                reentries[key] -= 1
                if not reentries[key]:
                    del reentries[key]
                continue
            grant = grants.pop(key, None)
            if grant is None:  # The owner was reset by `clear`.
                return
            count = held.pop(key) - UNIT[grant[0]]
            if count:
                held[key] = count
            if lines and key in lines:
                self._serve(key)
        if steps and not grants:
            self.owners.pop(owner.identity, None)

    def clear(self) -> None:
        """Reset every owner and claim, so that their later releases have no effect."""
        for owner in self.owners.values():
            owner.grants.clear()
        for line in self.lines.values():
            for claim in line:
                claim.is_waiting, claim.taken = False, 0

    def stats(self) -> dict[str, LevelStats]:
        """The statistics of each level, by its name."""
        held = Counter(level for owner in self.owners.values() for level, _ in owner.grants)
        return {name: self.counters[level].snapshot(held[level]) for level, name in enumerate(self.levels.names)}

    def holding(self, key: Key) -> Iterator[tuple[Owner, Mode]]:
        """The holders of `key` and their modes."""
        return ((owner, grant[0]) for owner in self.owners.values() if (grant := owner.grants.get(key)))

    def entries(self) -> list[tuple[Key, Mode, Owner, float, bool]]:
        """Every held and awaited lock in lock order: key, mode, owner, since when, and whether the owner waits."""
        held = [
            (key, mode, owner, since, False)
            for owner in self.owners.values()
            for key, (mode, since) in owner.grants.items()
        ]
        waiting = [
            (key, claim.next[1], claim.owner, claim.since, True) for key, line in self.lines.items() for claim in line
        ]
        return sorted([*held, *waiting], key=itemgetter(0))

    def _violation_message(self, refused: Step, grant: Grant | None, last: Key) -> str:
        key, mode, requested = refused
        wanted = self.levels.describe(key)
        if grant is None:
            first = wanted if requested else f"the intent ({mode}) on {wanted}"
            return (
                f"{wanted} comes before {self.levels.describe(last)} in lock order, which is already held: waiting for "
                f"it could deadlock. Acquire both with acquire_all, or acquire {first} first"
            )
        both = next(each for each in COVERED if {mode, grant[0]} <= COVERED[each])
        return (
            f"{wanted} is held in mode {grant[0]}; waiting to upgrade it to {mode} could deadlock. "
            f"Acquire it in mode {both} at first"
        )

    def _serve(self, key: Key) -> None:
        """Grant `key` to the claims at the front of its line, as far as their modes are compatible."""
        while line := self.lines.get(key):
            claim = next(iter(line))
            if self.held.get(key, 0) & CONFLICTS[claim.next[1]]:
                return
            self._dequeue(claim, key)
            if self.advance(claim, served=key):
                self.unnoticed.add(claim)
                self.completed.append(claim)
            else:
                self.enqueue(claim)

    def _dequeue(self, claim: Claim, key: Key) -> None:
        line = self.lines[key]
        del line[claim]
        if not line:
            del self.lines[key]
        claim.is_waiting = False
        self.waiting -= 1
        counters = self.counters[key[0]]
        counters.waiting -= 1
        seconds = monotonic() - claim.since
        counters.wait_seconds_total += seconds
        counters.wait_seconds_max = max(counters.wait_seconds_max, seconds)
