"""The registry of the holders and waiters of locks in one process.

Nothing in this module blocks, and only one thread at a time may use it; `fastness.runtime.locks.table` guarantees that
and documents the locking protocol.
"""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from operator import itemgetter
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias

from fastness.errors import LockOrderViolation
from fastness.lock_rules import COMPATIBLE, Grant, Key, Levels, Mode, Step, find_violation
from fastness.wire.locks import LevelStats

# The holders of a node are counted in one integer with 32 bits per mode, so that a single `&` finds a conflict.
UNIT: Final = {mode: 1 << 32 * index for index, mode in enumerate(Mode)}
CONFLICTS: Final = {mode: sum(UNIT[each] * 0xFFFF_FFFF for each in set(Mode) - COMPATIBLE[mode]) for mode in Mode}


class NoTask:
    """The owner of locks that a coroutine acquires before it runs in a task."""

    def get_name(self) -> str:
        return "of a call"


Identity: TypeAlias = "threading.Thread | asyncio.Task[Any] | NoTask"


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
        refused = find_violation(self.levels, claim.steps, claim.owner.grants)
        if refused is not None:
            (key, _, _), message = refused
            self.counters[key[0]].violations += 1
            raise LockOrderViolation(message)

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
