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

from fastness import limits
from fastness.backends.postgres import statements
from fastness.backends.postgres.parts import (
    CALLERS,
    EVERYTHING,
    UNIVERSES,
    is_read_often,
    lock_number,
    part_of,
    part_of_range,
)
from fastness.backends.postgres.sessions import Session, pairs_of, value_of
from fastness.backends.postgres.statements import Statement
from fastness.errors import Busy
from fastness.kv import Pair, Transaction, fence_floor
from fastness.kv.value_cipher import GENERATION, MARK, RECORDS, RECORDS_MAX, decode_generation, open_all

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
        self._cipher = session.cipher
        self._has_keys = False  # Whether the cipher has the keys of this transaction.
        self._generation = 0  # Of those keys.
        self.fence_floor: int | None = None  # None: nothing was read yet.
        self._oldest_keys: int | None = None  # The generation of the oldest that it may see, if it may see older ones.
        self._is_awaited = is_awaited
        self._held: Needs = {}
        self._shared: set[bytes] = set()  # The parts that the current work shares.
        self._unshared: set[bytes] = set()  # The parts that it does not share any more.
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
        self._unshared.clear()

    def wait_for(self, needs: Needs) -> None:
        """Wait for these locks; the first thing that a transaction does."""
        wanted = sorted(needs.items(), key=_lock_order)
        if wanted[0][0] != EVERYTHING:
            wanted.insert(0, (EVERYTHING, False))
        *answers, keys = self._session.run(
            *((b"wait" if exclusive else b"wait_shared", [_number(part)]) for part, exclusive in wanted), _KEYS
        )
        self._held |= dict(wanted)
        self._note_time(answers[-1])
        self._use_plane(keys)

    def share(self, prefix: bytes) -> None:
        part = part_of(prefix)
        if part not in self._unshared:  # Otherwise, the writes of the part would not lock it.
            self._shared.add(part)

    def unshare(self, prefix: bytes) -> None:
        part = part_of(prefix)
        self._shared.discard(part)  # The next read or write there locks it.
        self._unshared.add(part)

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
        stored = value_of(self._read(part_of(key), statements.get(key))[0])
        value = self._values_read[key] = self._opened(key, stored)
        return value

    def prefetch(self, *keys: bytes) -> None:
        missing = [key for key in keys if key not in self._values_read]
        if missing:
            answers = self._read(part_of(missing[0]), *map(statements.get, missing))
            self._values_read |= {
                key: self._opened(key, value_of(answer)) for key, answer in zip(missing, answers, strict=True)
            }

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        part = part_of_range(begin, end)
        known = self._scans.get((begin, end, reverse))
        if known is None:
            pairs = self._pairs(self._read(part, statements.scan(begin, end, limit, reverse))[0])
            if self._has(part, exclusive=True):
                self._keep((begin, end, reverse), _Scanned(list(pairs), len(pairs) < limit))
            return pairs
        missing = limit - len(known.pairs)
        if missing > 0 and not known.is_complete:
            # Jobs that take messages ask again for more each time, because those taken before are still stored.
            first, last = (begin, known.pairs[-1][0]) if reverse else (known.pairs[-1][0] + b"\x00", end)
            more = self._pairs(self._read(part, statements.scan(first, last, missing, reverse))[0])
            self._keep((begin, end, reverse), _Scanned(known.pairs + more, len(more) < missing))
            return known.pairs + more
        return known.pairs[:limit]

    def lock_writes(self, tx: Transaction) -> None:
        """Lock what `tx` writes and has not read."""
        needs: Needs = {}
        last = _NOTHING  # Most keys are in the part of the one before.
        excludes_callers = False
        for key in tx.writes:
            if not key.startswith(last):
                part = part_of(key)
                excludes_callers |= key in (GENERATION, fence_floor.KEY)
                needs[part] = part not in self._shared
                last = part if part.startswith(UNIVERSES) else _NOTHING
        for begin, end in tx.cleared:
            needs[part_of_range(begin, end)] = True
        missing = [(part, exclusive) for part, exclusive in needs.items() if not self._has(part, exclusive)]
        self.needs |= {part: exclusive or self.needs.get(part, False) for part, exclusive in needs.items()}
        for part, exclusive in missing:
            self._try(part, exclusive)
        if excludes_callers:
            self._exclude_callers()

    def _use_plane(self, answer: "pq.abc.PGresult") -> None:
        """Use the keys and the fence floor of the plane, which `_KEYS` has read."""
        self.fence_floor = fence_floor.decode(answer.get_value(0, 1))
        self.use_keys(answer.get_value(0, 0))

    def use_keys(self, record: bytes | None) -> None:
        """Load the keys of encrypted universes, if another process has changed them. `record` is their generation's.

        What this transaction reads is sealed with keys of this generation, or of earlier ones. A writing transaction
        shares the lock of the whole key space, which a change of the keys has alone: none happens until it ends. So a
        record that differs in any way is loaded. If it lacks keys of this process, because the database has lost its
        last commits, they would seal values that no other process can open, and the load is refused.
        """
        cipher = self._cipher
        self._generation = cipher.generation
        if record != cipher.generation_record and not cipher.is_raw:
            self._generation = decode_generation(record)
            records = pairs_of(self._run(statements.scan(*RECORDS, RECORDS_MAX, False))[0])
            cipher.load(records, oldest=self._oldest_keys)
        self._has_keys = True

    def _exclude_callers(self) -> None:
        """Refuse to change the encryption keys or the fence floor while a caller has a transaction open.

        It may have sealed values, or issued fences, and is not committed yet.
        """
        (answer,) = self._run((b"try", [_number(CALLERS)]))
        if answer.get_value(0, 0) != b"\x01":
            raise Busy(
                "A transaction with calls of plane.within is open, so the encryption keys and the fence floor cannot "
                "be changed; nothing was changed. Try again when it has ended"
            )

    def _opened(self, key: bytes, stored: bytes | None) -> bytes | None:
        cipher = self._cipher
        if stored is None or (stored[:1] != MARK and not cipher.is_on):
            return stored
        return cipher.open(key, stored, self._generation)

    def _pairs(self, answer: "pq.abc.PGresult") -> list[Pair]:
        return open_all(self._cipher, pairs_of(answer), self._generation)

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
        first = [] if self._held else [(b"wait_shared", [_number(EVERYTHING)]), _KEYS]
        answers = self._run(*first, lock, *wanted)
        if first:
            self._use_plane(answers[1])
            del answers[:2]
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

    def __init__(self, session: Session, is_awaited: IsAwaited = nothing_is_awaited, *, may_lag: bool = False) -> None:
        """`may_lag` is for a standby, which may not have the last commits yet."""
        super().__init__(session, is_awaited)
        # It sees all keys that were known before its first read, and perhaps not those that others load after that.
        self._oldest_keys = 0 if may_lag else self._cipher.generation

    def share(self, prefix: bytes) -> None:
        pass

    def unshare(self, prefix: bytes) -> None:
        pass

    def wait_for(self, needs: Needs) -> None:
        pass

    def lock_writes(self, tx: Transaction) -> None:
        if tx.has_writes:
            self._read(EVERYTHING)  # Loads the keys, if nothing was read before.

    def size(self, begin: bytes, end: bytes, limit: int) -> tuple[int, int, bytes | None]:
        """The number and bytes of the first `limit` pairs of a range, and the key of the next one, if there is one."""
        sized, after = self._read(part_of(begin), *statements.size(begin, end, limit))
        count, size = (_unpack_number(sized.get_value(0, column) or b"")[0] for column in (0, 1))
        return count, size, value_of(after)

    def _read(self, part: bytes, *wanted: Statement) -> "list[pq.abc.PGresult]":
        del part
        if self._has_keys:
            return self._run(*wanted) if wanted else []
        now, keys, *answers = self._run((b"now", []), _KEYS, *wanted)
        self._note_time(now, column=0)
        self._use_plane(keys)
        return answers


_KEYS: Final[Statement] = (b"keys", [])
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
