"""The view of a writing transaction: it locks each part of the key space before it reads or writes there.

A lock is exclusive, or shared if the work said so (`Transaction.share`), or if the part is nearly always only read.
Locks are held until the transaction ends, and what is read under them does not change meanwhile. So transactions on
different parts never wait for each other, and those on the same part run one after the other.

A transaction that holds a lock never waits for another one, so there are no deadlocks. It only tries. If another
process holds the lock, the work is stopped (`LockTaken`), and run again in a transaction that first waits for all locks
it is known to need, in a fixed order.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from psycopg import pq

from holdfast import limits
from holdfast.backends.postgres import statements
from holdfast.backends.postgres.parts import EVERYTHING, UNIVERSES, is_read_often, lock_number, part_of, part_of_range
from holdfast.backends.postgres.sessions import Session, pairs_of, value_of
from holdfast.backends.postgres.statements import Statement
from holdfast.kv import Pair, Transaction

Needs = dict[bytes, bool]  # Part to whether its lock is exclusive.
IsAwaited = Callable[[bytes], bool]  # Whether other work of this process waits for a part.


def nothing_is_awaited(part: bytes) -> bool:
    del part
    return False


class _Scanned(NamedTuple):
    """What a scan has found so far, and whether there is no more."""

    pairs: list[Pair]
    is_complete: bool


class LockTaken(Exception):
    """Another process holds a lock that the work needs; run it again once the lock is free."""


class LockedView:
    """The view and the clock of one transaction."""

    def __init__(self, session: Session, is_awaited: IsAwaited = nothing_is_awaited) -> None:
        self._session = session
        self._is_awaited = is_awaited
        self._held: Needs = {}
        self._shared: set[bytes] = set()  # The parts that the current work shares.
        self._values_read: dict[bytes, bytes | None] = {}
        self._scans: dict[tuple[bytes, bytes, bool], _Scanned] = {}
        self._scanned_pairs = 0  # In `_scans`.
        self._latest_ms: int | None = None  # The time of the last lock that was granted.
        self._now_ms: int | None = None  # The time of the current work.
        self.log_position = _START_OF_LOG  # Covers everything that was read.
        self.needs: Needs = {}  # What the current work has locked or tried to.
        self.taken: LockTaken | None = None  # Why the current work has to be run again.
        self.waited_for: bytes = EVERYTHING  # The part of that lock.

    def start_work(self) -> None:
        """Begin the next function of this transaction."""
        self.needs, self.taken, self._now_ms = {}, None, None
        self._shared.clear()

    def wait_for(self, needs: Needs) -> None:
        """Wait for these locks; the first thing that a transaction does."""
        wanted = sorted(needs.items(), key=_lock_order)
        if wanted[0][0] != EVERYTHING:
            wanted.insert(0, (EVERYTHING, False))
        answers = self._session.run(
            *((b"wait" if exclusive else b"wait_shared", [_number(part)]) for part, exclusive in wanted)
        )
        self._held |= dict(wanted)
        self._note_time(answers[-1])

    def share(self, prefix: bytes) -> None:
        self._shared.add(part_of(prefix))

    def now_ms(self) -> int:
        """The database's clock, when the last lock was granted before the first call of the current work."""
        if self._now_ms is None:
            if self._latest_ms is None:
                self._note_time(self._run((b"now", []))[0], column=0)
            self._now_ms = self._latest_ms
            assert self._now_ms is not None
        return self._now_ms

    def get(self, key: bytes) -> bytes | None:
        # The jobs of a group often read the same keys, and what is locked does not change.
        if key in self._values_read:
            return self._values_read[key]
        value = self._values_read[key] = value_of(self._read(part_of(key), statements.get(key))[0])
        return value

    def prefetch(self, *keys: bytes) -> None:
        missing = [key for key in keys if key not in self._values_read]
        if missing:
            answers = self._read(part_of(missing[0]), *map(statements.get, missing))
            self._values_read |= zip(missing, map(value_of, answers), strict=True)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        part = part_of_range(begin, end)
        known = self._scans.get((begin, end, reverse))
        if known is None:
            pairs = pairs_of(self._read(part, statements.scan(begin, end, limit, reverse))[0])
            if self._has(part, exclusive=True):
                self._keep((begin, end, reverse), _Scanned(list(pairs), len(pairs) < limit))
            return pairs
        missing = limit - len(known.pairs)
        if missing > 0 and not known.is_complete:
            # Jobs that take messages ask again for more each time, because those taken before are still stored.
            first, last = (begin, known.pairs[-1][0]) if reverse else (known.pairs[-1][0] + b"\x00", end)
            more = pairs_of(self._read(part, statements.scan(first, last, missing, reverse))[0])
            self._keep((begin, end, reverse), _Scanned(known.pairs + more, len(more) < missing))
            return known.pairs + more
        return known.pairs[:limit]

    def lock_writes(self, tx: Transaction) -> None:
        """Lock what `tx` writes and has not read."""
        needs: Needs = {}
        last = _NOTHING  # Most keys are in the part of the one before.
        for key in tx.writes:
            if not key.startswith(last):
                part = part_of(key)
                needs[part] = part not in self._shared
                last = part if part.startswith(UNIVERSES) else _NOTHING
        for begin, end in tx.cleared:
            needs[part_of_range(begin, end)] = True
        missing = [(part, exclusive) for part, exclusive in needs.items() if not self._has(part, exclusive)]
        self.needs |= {part: exclusive or self.needs.get(part, False) for part, exclusive in needs.items()}
        for part, exclusive in missing:
            self._try(part, exclusive)

    def _forget(self) -> None:
        """Forget what was read."""
        self._values_read.clear()
        self._scans.clear()

    def _keep(self, bounds: tuple[bytes, bytes, bool], found: "_Scanned") -> None:
        """Remember what a scan has found: nothing else changes a part that this transaction has to itself."""
        self._scanned_pairs += len(found.pairs)
        if self._scanned_pairs > limits.SCANNED_PAIRS_MAX:
            self._scans.clear()
            self._scanned_pairs = len(found.pairs)
        self._scans[bounds] = found

    def _read(self, part: bytes, *wanted: Statement) -> "list[pq.abc.PGresult]":
        exclusive = part not in self._shared and not is_read_often(part)
        self.needs[part] = exclusive or self.needs.get(part, False)
        if self._has(part, exclusive):
            return self._run(*wanted)
        return self._try(part, exclusive, *wanted)

    def _has(self, part: bytes, exclusive: bool) -> bool:
        if self._held.get(EVERYTHING):
            return True
        held = self._held.get(part)
        return held is not None and held >= exclusive

    def _try(self, part: bytes, exclusive: bool, *wanted: Statement) -> "list[pq.abc.PGresult]":
        """Lock a part, and answer the statements in the same round trip."""
        if self.taken is not None:  # The work has caught the exception.
            raise self.taken
        if len(self._held) > limits.LOCKED_PARTS_MAX and part not in self._held:
            part, exclusive = EVERYTHING, True
            self.needs[EVERYTHING] = True
        if self._is_awaited(part):
            self._stop(part)
        lock = (b"try" if exclusive else b"try_shared", [_number(part)])
        first = [] if self._held else [(b"wait_shared", [_number(EVERYTHING)])]
        answers = self._run(*first, lock, *wanted)[len(first) :]
        self._held.setdefault(EVERYTHING, False)
        if answers[0].get_value(0, 0) != b"\x01":
            self._stop(part)
        if part in self._held:  # Others that shared the part may have changed it before this transaction owned it.
            self._forget()
        self._held[part] = exclusive
        if not self._note_time(answers[0]):
            self._stop(part)
        return answers[1:]

    def _stop(self, part: bytes) -> None:
        self.waited_for = part
        self.taken = LockTaken(f"another process holds the lock of {part!r}")
        raise self.taken

    def _note_time(self, answer: "pq.abc.PGresult", column: int = 1) -> bool:
        """Note the time and the log position of an answer; whether the time of the work is not too old for it.

        A process may pause before it gets a lock. With a time from before that, it would take leases that others got
        meanwhile for older or newer than they are.
        """
        at_ms: int = _unpack_number(answer.get_value(0, column) or b"")[0]
        self._latest_ms = at_ms
        self.log_position = answer.get_value(0, column + 1) or b""
        return self._now_ms is None or at_ms - self._now_ms <= limits.LOCK_LATE_MS_MAX

    def _run(self, *wanted: Statement) -> "list[pq.abc.PGresult]":
        return self._session.run(*wanted)


class SnapshotView(LockedView):
    """A view that locks nothing, for SERIALIZABLE and for reading only: all reads are of the moment of the first."""

    def share(self, prefix: bytes) -> None:
        pass

    def wait_for(self, needs: Needs) -> None:
        pass

    def lock_writes(self, tx: Transaction) -> None:
        pass

    def _read(self, part: bytes, *wanted: Statement) -> "list[pq.abc.PGresult]":
        del part
        if self._latest_ms is not None:
            return self._run(*wanted)
        now, *answers = self._run((b"now", []), *wanted)
        self._note_time(now, column=0)
        return answers


_START_OF_LOG: Final = bytes(8)
_NOTHING: Final = b"\xff"  # No key of a part starts with it.
_unpack_number: Final = struct.Struct("!q").unpack


def _number(part: bytes) -> bytes:
    return statements.number(lock_number(part))


def _lock_order(need: tuple[bytes, bool]) -> tuple[bool, int]:
    """The whole key space first, then by number, which is the same order in every process."""
    return need[0] != EVERYTHING, lock_number(need[0])


def union(needs: Iterable[Needs]) -> Needs:
    """Everything that any of these needs."""
    together: Needs = {}
    for each in needs:
        for part, exclusive in each.items():
            together[part] = exclusive or together.get(part, False)
    return {EVERYTHING: True} if together.get(EVERYTHING) else together
