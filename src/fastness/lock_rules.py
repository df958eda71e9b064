"""Lock modes and lock levels: the rules that every implementation of ordered locks follows.

Levels have a declared order, `database → entity_type → record_id`. Within a level, names sort alphabetically. A caller
waits only for a lock that comes after everything it holds, so waits cannot form a cycle.

Two callers may hold the same lock at once where the matrix has a `+`. Locking a row first takes an intent on its type
and on the database, which is how row locks and table locks conflict:

            IS   IX   S    X
        IS  +    +    +    .      IS   intends to read a lock below
        IX  +    +    .    .      IX   intends to write a lock below
        S   +    .    +    .      S    reads all of it
        X   .    .    .    .      X    writes all of it
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Final

from fastness import limits
from fastness.errors import InvalidArgument, LeaseExpired, LockTimeout

DATA_LEVELS: Final = ("database", "entity_type", "record_id")
_RECORDS: Final = DATA_LEVELS.index("record_id")
_ID: Final = re.compile(r"[A-Za-z0-9._@:+=-]{1,200}\Z")  # An id without its type.


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

Path = Sequence[str]  # A level and a name on it, as callers write them.
Key = tuple[int, str]  # The index of a level and a name on it. Keys sort in lock order.
Step = tuple[
    Key, Mode, bool
]  # The key, its mode, and whether the caller requested it (otherwise it is an intent on an ancestor).
Grant = tuple[Mode, float]  # The mode of a held lock, and since when it is held.
ROOT: Final[Key] = (0, "")


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

    def __init__(
        self, names: Sequence[str], *, nested: bool, find_type: Callable[[str], str | None] | None = None
    ) -> None:
        """`find_type` returns the full name, `type/id`, of a record that is named by its id alone."""
        is_valid = isinstance(names, list | tuple) and names and all(name and name.__class__ is str for name in names)
        if not is_valid:
            raise InvalidArgument(f"A lock table needs a list of level names in lock order, not {names!r}")
        self.names = tuple(names)
        self._nested = nested
        self._find_type = find_type
        self._deepest = len(names) - 1
        self._indexes = {name.lower(): index for index, name in enumerate(names)}
        if len(self._indexes) < len(names):
            raise InvalidArgument(f"Two levels of the lock table have the same name: {', '.join(names)}")

    def steps(self, path: Path, mode: Mode) -> list[Step]:
        """The locks to take for `path`, in lock order: intents on its ancestors, then `path` itself."""
        key = level, name = self.parse(path)
        if not self._nested:
            return [(key, mode, True)]
        if not level:
            if name:
                raise InvalidArgument(
                    f"The level {self.names[0]} has a single node without a name; remove the name {name!r}"
                )
            return [(key, mode, True)]
        parts = name.split("/", level - 1)
        if len(parts) < level and level == self._deepest and self._find_type is not None:
            name = self._find_type(name) or name
            key, parts = (level, name), name.split("/", level - 1)
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

    def parse(self, path: Sequence[object]) -> Key:
        """The key of a path, whose name is not checked yet.

        Raises:
            InvalidArgument: it is not a path.
        """
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
        advice = ""
        if level == _RECORDS and self.names == DATA_LEVELS and _ID.match(name):
            kind = name.partition("_")[0] if "_" in name[1:] else "task"
            pattern = f"{kind}_*" if "_" in name[1:] else name
            advice = (
                f', like "{kind}/{name}". To lock it by its id alone, give its type in the tier policy: '
                f'TierPolicy(records={{"{pattern}": "{kind}"}})'
            )
        return InvalidArgument(
            f"Invalid name {name!r} for the level {self.names[level]}; write {form}, with no empty part{advice}"
        )


def find_violation(levels: Levels, steps: Sequence[Step], grants: dict[Key, Grant]) -> tuple[Step, str] | None:
    """The step that a caller with these grants may not take, and why; None if it may take all of `steps`.

    A caller may wait only for keys after everything that it holds. `grants` are in lock order, and there is at least
    one.
    """
    last = next(reversed(grants))
    refused = None
    for step in steps:
        grant = grants.get(step[0])
        if grant is None:
            if step[0] < last:
                refused = step
            break  # The remaining steps are later in lock order.
        if step[1] not in COVERED[grant[0]]:
            refused = step  # The last one gives the best message: the earlier ones are intents on its ancestors.
    if refused is None:
        return None
    return refused, _violation_message(levels, refused, grants.get(refused[0]), last)


def _violation_message(levels: Levels, refused: Step, grant: Grant | None, last: Key) -> str:
    key, mode, requested = refused
    wanted = levels.describe(key)
    if grant is None:
        first = wanted if requested else f"the intent ({mode}) on {wanted}"
        return (
            f"{wanted} comes before {levels.describe(last)} in lock order, which is already held: waiting for it could "
            f"deadlock. Acquire both with acquire_all, or acquire {first} first"
        )
    both = next(each for each in COVERED if {mode, grant[0]} <= COVERED[each])
    return (
        f"{wanted} is held in mode {grant[0]}; waiting to upgrade it to {mode} could deadlock. "
        f"Acquire it in mode {both} at first"
    )


def timeout_error(lock: str, seconds: float, holders: Iterable[str], in_line: int) -> LockTimeout:
    """The error of a caller that was not granted a lock in time."""
    return LockTimeout(
        f"{lock} was not granted within {seconds:g} s: it is held by {', '.join(holders)}, and {in_line} requests wait "
        "for it. Try again later, or raise timeout_seconds"
    )


def released_error() -> LeaseExpired:
    """The error of a check of locks that their holder has released."""
    return LeaseExpired("These locks were released; acquire them again, then read what they protect")
