"""The rules of locking: modes, levels, and the book of who holds what and who waits for it.

Nothing here waits, and one thread at a time may use it: `holdfast.runtime.locktable` sees to that and explains it.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from operator import itemgetter
from time import monotonic
from typing import Any, Final, Protocol

import msgspec

from holdfast import limits
from holdfast.errors import InvalidArgument, LockOrderViolation


class Mode(StrEnum):
    """How something is locked."""

    INTENT_SHARED = "IS"
    INTENT_EXCLUSIVE = "IX"
    SHARED = "S"
    EXCLUSIVE = "X"


IS, IX, S, X = Mode
COMPATIBLE: Final[dict[Mode, set[Mode]]] = {IS: {IS, IX, S}, IX: {IS, IX}, S: {IS, S}, X: set()}
COVERED: Final = {IS: {IS}, IX: {IX, IS}, S: {S, IS}, X: {X, S, IX, IS}}  # What each mode allows; the weakest first.
INTENT: Final = {IS: IS, IX: IX, S: IS, X: IX}  # What to take on everything that something is inside of.

# How many hold a node is one number with 32 bits for each mode, so that a single `&` finds a conflict.
UNIT: Final = {mode: 1 << 32 * index for index, mode in enumerate(Mode)}
CONFLICTS: Final = {mode: sum(UNIT[each] * 0xFFFF_FFFF for each in set(Mode) - COMPATIBLE[mode]) for mode in Mode}

Path = Sequence[str]  # A level and a name on it, as people write them.
Key = tuple[int, str]  # The index of a level and a name on it. Keys compare in the order of locking.
Step = tuple[Key, Mode, bool]  # What to take and how, and whether it was asked for or is an intent on the way.
Grant = tuple[Mode, float]  # How something is held, and since when.
ROOT: Final[Key] = (0, "")


def known_mode(mode: Mode | str) -> Mode:
    """The mode that people write like this."""
    if isinstance(mode, Mode):
        return mode
    try:
        return Mode(mode)
    except ValueError:
        raise InvalidArgument(f"{mode!r} is no mode of a lock; take one of {', '.join(Mode)}") from None


class Levels:
    """The levels of a table in their order, and what a path in them stands for."""

    def __init__(self, names: Sequence[str], *, nested: bool) -> None:
        sound = isinstance(names, list | tuple) and names and all(name and name.__class__ is str for name in names)
        if not sound:
            raise InvalidArgument(f"A lock table needs the names of its levels, in order, not {names!r}")
        self.names = tuple(names)
        self._nested = nested
        self._deepest = len(names) - 1
        self._indexes = {name.lower(): index for index, name in enumerate(names)}
        if len(self._indexes) < len(names):
            raise InvalidArgument(f"Two levels of a lock table have the same name: {', '.join(names)}")

    def steps(self, path: Path, mode: Mode) -> list[Step]:
        """What to take for `path`, in order: intents on all that it is inside of, then itself."""
        key = level, name = self._parse(path)
        if not self._nested:
            return [(key, mode, True)]
        if not level:
            if name:
                raise InvalidArgument(f"There is one {self.names[0]} and it has no name; leave out {name!r}")
            return [(key, mode, True)]
        parts = name.split("/", level - 1)
        # A type with a slash in its name would look as if records of another type were inside of it.
        if len(parts) < level or "" in parts or (level < self._deepest and "/" in parts[-1]):
            raise self._misnamed(level, name)
        intent = INTENT[mode]
        steps: list[Step] = [(ROOT, intent, False)]
        above = parts[0]
        for depth in range(1, level):
            steps.append(((depth, above), intent, False))
            above = f"{above}/{parts[depth]}"
        steps.append((key, mode, True))
        return steps

    def steps_for_all(self, paths: Sequence[Path], mode: Mode) -> list[Step]:
        """What to take for all of `paths`, each once and in order."""
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            raise InvalidArgument(f"acquire_all takes a list of paths, not {paths!r}")
        steps: dict[Key, Step] = {}
        for path in paths:
            for step in self.steps(path, mode):
                if step[2] or step[0] not in steps:  # A mode covers its own intent.
                    steps[step[0]] = step
        return sorted(steps.values(), key=itemgetter(0))

    def patience(self, timeout_seconds: float | None, steps: list[Step]) -> float:
        """How long to wait for `steps`: as long as was asked for, or what their levels call for."""
        if timeout_seconds is None:
            for (level, _), _, asked in steps:
                if asked and level < self._deepest and self._nested:
                    return limits.LOCK_BULK_WAIT_SECONDS
            return limits.LOCK_WAIT_SECONDS
        if timeout_seconds.__class__ not in (int, float) or not 0 <= timeout_seconds < math.inf:
            raise InvalidArgument(f"timeout_seconds must be a number from 0 up, not {timeout_seconds!r}")
        return timeout_seconds

    def path(self, key: Key) -> tuple[str, str]:
        """`key` as a path."""
        return self.names[key[0]], key[1]

    def describe(self, key: Key) -> str:
        """`key` in a sentence."""
        level, name = self.path(key)
        return f"{level} {name}" if name else level

    def _parse(self, path: Sequence[Any]) -> Key:
        if path.__class__ not in (list, tuple) and (isinstance(path, str) or not isinstance(path, Sequence)):
            raise InvalidArgument(f"A path is a list of a level and a name, not {path!r}")
        if len(path) == 2:
            level, name = path
        elif len(path) == 1:
            level, name = path[0], ""
        else:
            raise InvalidArgument(f"A path has a level and perhaps a name; {path!r} has {len(path)} parts")
        if not isinstance(level, str) or not isinstance(name, str):
            raise InvalidArgument(f"The level and the name in a path are text, unlike {path!r}")
        index = self._indexes.get(level)
        if index is None:
            index = self._indexes.get(level.lower())
            if index is None:
                raise InvalidArgument(f"{level!r} is no level of this table; take one of {', '.join(self.names)}")
        if len(name) > limits.LOCK_NAME_CHARACTERS_MAX:
            raise InvalidArgument(
                f"A lock's name may have {limits.LOCK_NAME_CHARACTERS_MAX} characters, and this has {len(name):,}"
            )
        return index, name

    def _misnamed(self, level: int, name: str) -> InvalidArgument:
        form = {1: "a name without a slash", 2: "type/id"}.get(level, "/".join(self.names[1 : level + 1]))
        return InvalidArgument(f"{name!r} does not name one {self.names[level]}; write {form}, with no part empty")


class Owner:
    """A thread or a task, and what it holds."""

    __slots__ = ("again", "grants", "who")

    def __init__(self, who: Any) -> None:
        self.who = who
        self.grants: dict[Key, Grant] = {}  # In the order of locking, since there is no other way to take them.
        self.again: dict[Key, int] = {}  # How often it took what it had already.


class Waiter(Protocol):
    """Wakes whoever waits for a claim."""

    def ring(self) -> bool:
        """Wake them, and say whether there is still somebody to wake."""
        ...

    @property
    def deaf(self) -> bool:
        """Whether nobody will ever hear it."""
        ...


class Claim:
    """What an owner asked for at once, and how much of it was taken so far."""

    __slots__ = ("bell", "owner", "since", "steps", "taken", "waits")

    owner: Owner
    steps: list[Step]
    taken: int  # How many of the steps.
    waits: bool  # In the line for its next step.
    since: float  # When it came there.
    bell: Waiter | None  # There since it first had to wait.

    @property
    def next(self) -> Step:
        return self.steps[self.taken]


class LevelStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one level of a table has seen, and sees now."""

    acquisitions: int  # What was asked for by name, and taken.
    intents: int  # What was taken on the way to something inside.
    waits: int  # Of both, how many had to stand in line.
    unserved: int  # Those who left the line with nothing: timed out, or cancelled.
    wait_seconds_total: float
    wait_seconds_max: float
    timeouts: int  # Tries that did not wait are among them.
    violations: int
    holders: int  # Intents included.
    waiting: int

    @property
    def contention(self) -> float:
        """The share of those who came that had to wait, from 0 to 1."""
        came = self.acquisitions + self.intents + self.unserved + self.waiting
        return self.waits / came if came else 0.0


class Counters:
    """What happens on one level."""

    __slots__ = tuple(name for name in LevelStats.__struct_fields__ if name != "holders")

    def __init__(self) -> None:
        self.acquisitions = self.intents = self.waits = self.unserved = 0
        self.wait_seconds_total = self.wait_seconds_max = 0.0
        self.timeouts = self.violations = self.waiting = 0

    def snapshot(self, holders: int) -> LevelStats:
        return LevelStats(holders=holders, **{name: getattr(self, name) for name in self.__slots__})


class LockRegistry:
    """Who holds what, and who waits for it. Whoever keeps it lets one thread at a time in."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.held: dict[Key, int] = {}  # What somebody holds, and by how many, in units of their modes.
        self.lines: dict[Key, OrderedDict[Claim, None]] = {}  # Where somebody waits, and who.
        self.owners: dict[Any, Owner] = {}  # Those who hold something, by who they are.
        self.counters = [Counters() for _ in levels.names]
        self.waiting = 0  # How many stand in line.
        self.served: deque[Claim] = deque()  # Those who got everything while they waited, and are to be told.
        self.unaware: set[Claim] = set()  # Those who did, and have not noticed yet.

    def check(self, claim: Claim) -> None:
        """Refuse what the owner might have to wait for, unless it comes after all that the owner holds."""
        grants = claim.owner.grants
        last = next(reversed(grants))
        refused = None
        for step in claim.steps:
            grant = grants.get(step[0])
            if grant is None:
                if step[0] < last:
                    refused = step
                break  # What follows comes later in order.
            if step[1] not in COVERED[grant[0]]:
                refused = step  # Of several, the last says most: the others are intents on the way to it.
        if refused is not None:
            self.counters[refused[0][0]].violations += 1
            raise LockOrderViolation(self._advice(refused, grants.get(refused[0]), last))

    def advance(self, claim: Claim, served: Key | None = None) -> bool:
        """Take what `claim` still lacks, in order, until somebody is in the way. Whether it has everything.

        At `served` it has stood in line already.
        """
        owner, taken = claim.owner, claim.taken
        held, lines, grants, counters = self.held, self.lines, owner.grants, self.counters
        new = not grants
        now = monotonic()
        for key, mode, asked in claim.steps[taken:] if taken else claim.steps:
            # What follows the first step that is new to the owner comes later in order, and so is new as well.
            if new or key not in grants:
                new = True
                count = held.get(key, 0)
                if count & CONFLICTS[mode] or (lines and key in lines and key != served):
                    break
                held[key] = count + UNIT[mode]
                grants[key] = mode, now
            else:
                owner.again[key] = owner.again.get(key, 0) + 1
            taken += 1
            if asked:
                counters[key[0]].acquisitions += 1
            else:
                counters[key[0]].intents += 1
        claim.taken = taken
        if grants:
            self.owners[owner.who] = owner
        return taken == len(claim.steps)

    def stand_in_line(self, claim: Claim) -> None:
        """Have `claim` wait for its next step, behind all who do."""
        key = claim.next[0]
        self.lines.setdefault(key, OrderedDict())[claim] = None
        claim.waits, claim.since = True, monotonic()
        self.waiting += 1
        counters = self.counters[key[0]]
        counters.waits += 1
        counters.waiting += 1

    def undo(self, claim: Claim) -> None:
        """Give back all that `claim` took, the last first, and its place in line. Done again, it does nothing."""
        if claim.bell is not None:
            self.unaware.discard(claim)
            if claim.waits:
                key = claim.next[0]
                self.counters[key[0]].unserved += 1
                self._step_out(claim, key)
                self._serve(key)
        owner, held, lines = claim.owner, self.held, self.lines
        grants, again = owner.grants, owner.again
        steps, claim.taken = claim.steps[: claim.taken], 0
        for key, _, _ in reversed(steps):
            if again and key in again:
                again[key] -= 1
                if not again[key]:
                    del again[key]
                continue
            grant = grants.pop(key, None)
            if grant is None:  # The owner was made to forget.
                return
            count = held.pop(key) - UNIT[grant[0]]
            if count:
                held[key] = count
            if lines and key in lines:
                self._serve(key)
        if steps and not grants:
            self.owners.pop(owner.who, None)

    def forget(self) -> None:
        """Have everybody hold nothing and wait for nothing any more, so that what they give back later is nothing."""
        for owner in self.owners.values():
            owner.grants.clear()
        for line in self.lines.values():
            for claim in line:
                claim.waits, claim.taken = False, 0

    def stats(self) -> dict[str, LevelStats]:
        """What each level has seen so far."""
        held = Counter(level for owner in self.owners.values() for level, _ in owner.grants)
        return {name: self.counters[level].snapshot(held[level]) for level, name in enumerate(self.levels.names)}

    def holding(self, key: Key) -> Iterator[tuple[Owner, Mode]]:
        """Who holds `key`, and how."""
        return ((owner, grant[0]) for owner in self.owners.values() if (grant := owner.grants.get(key)))

    def everybody(self) -> list[tuple[Key, Mode, Owner, float, bool]]:
        """Who holds or waits for what, how and since when, in the order of locking; True for those who wait."""
        held = [
            (key, mode, owner, since, False)
            for owner in self.owners.values()
            for key, (mode, since) in owner.grants.items()
        ]
        waiting = [
            (key, claim.next[1], claim.owner, claim.since, True) for key, line in self.lines.items() for claim in line
        ]
        return sorted([*held, *waiting], key=itemgetter(0))

    def _advice(self, refused: Step, grant: Grant | None, last: Key) -> str:
        key, mode, asked = refused
        wanted = self.levels.describe(key)
        if grant is None:
            first = wanted if asked else f"the intent ({mode}) on {wanted}"
            return (
                f"{wanted} comes before {self.levels.describe(last)}, which is held already: waiting for it could "
                f"become a deadlock. Take them together with acquire_all, or take {first} first"
            )
        both = next(each for each in COVERED if {mode, grant[0]} <= COVERED[each])
        return (
            f"{wanted} is held with mode {grant[0]}, and waiting to raise that to {mode} could become a deadlock. "
            f"Take it with mode {both} at first"
        )

    def _serve(self, key: Key) -> None:
        """Let those in front of the line go on, as far as they can hold `key` together."""
        while line := self.lines.get(key):
            claim = next(iter(line))
            if self.held.get(key, 0) & CONFLICTS[claim.next[1]]:
                return
            self._step_out(claim, key)
            if self.advance(claim, served=key):
                self.unaware.add(claim)
                self.served.append(claim)
            else:
                self.stand_in_line(claim)

    def _step_out(self, claim: Claim, key: Key) -> None:
        line = self.lines[key]
        del line[claim]
        if not line:
            del self.lines[key]
        claim.waits = False
        self.waiting -= 1
        counters = self.counters[key[0]]
        counters.waiting -= 1
        seconds = monotonic() - claim.since
        counters.wait_seconds_total += seconds
        counters.wait_seconds_max = max(counters.wait_seconds_max, seconds)
