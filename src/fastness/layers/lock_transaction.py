"""The sessions and locks of a universe in one transaction: taking, waiting, serving and releasing, lock by lock.

`fastness.layers.locks` has the operations, and says what holds after each of them.
"""

from collections import deque
from typing import NamedTuple

import msgspec

from fastness.errors import Busy
from fastness.kv import Pair, Transaction, fence_floor
from fastness.layers.lock_records import (
    INTENTS,
    LEVELS,
    Claim,
    LockKeys,
    Place,
    Session,
    SessionKey,
    Taken,
    decode_place,
    decode_session,
    encode,
    keys_of,
    record_key,
    use_key,
)
from fastness.limits import (
    LOCK_COMMIT_BYTES_MAX,
    LOCK_OBSTACLES_MAX,
    LOCK_PAIRS_READ_MAX,
    LOCK_SESSIONS_ENDED_MAX,
)
from fastness.lock_rules import Key, Mode

_HOLDERS_READ = 3  # By a claim that waits, also for its error message; a lock may have thousands of holders.
_FENCE_BYTES = 8


class Waiting(NamedTuple):
    """Why a claim was not granted: the lock that it needs next, and what is in its way."""

    key: Key
    mode: Mode
    holders: list[tuple[str, Mode]]  # The owners of some sessions that exclude it.
    in_line: int  # How many claims wait for the lock, of the first ones.
    wake_ms: int  # When the first session that is in its way expires.


class LockTransaction:
    """The locks and sessions of a universe in one transaction."""

    def __init__(self, tx: Transaction, universe: str) -> None:
        self.tx = tx
        self.ended: list[str] = []  # Sessions that were ended, in this order.
        self.has_shortened = False  # A session's lease, because the clock was set back.
        self._universe = universe
        self._sessions: dict[str, Session | None] = {}
        self._changed: dict[str, None] = {}  # Sessions to store, in the order of their first change.
        self._freed: deque[Key] = deque()  # Locks whose lines have to be served.
        self._record_bytes = 0  # Of the records of changed sessions at most, which are written at the end.

    # Sessions.

    def begin(self, number: str, owner: str) -> Session:
        key = use_key(self._universe)
        self.tx.share(key)
        if self.tx.get(key) is None:
            # Waits for all transactions that found no key, and so looked for no locks.
            self.tx.unshare(key)
            self.tx.put(key, b"")
        session = self._sessions[number] = Session(owner, self.tx.now_ms, self.tx.now_ms, 0, {})
        self.change(number)
        return session

    def live(self, number: str) -> Session | None:
        """The session; it is ended if it has expired."""
        session = self.load(number)
        if session is not None and session.is_expired(self.tx.now_ms):
            self.end(number)
            self.serve()
            return None
        return session

    def load(self, number: str, *, shared: bool = False) -> Session | None:
        """The session, `shared` with others that only read it."""
        if number not in self._sessions:
            key = self._record(number)
            (self.tx.share if shared else self.tx.unshare)(key)
            stored = self.tx.get(key)
            session = None if stored is None else decode_session(stored)
            self._sessions[number] = session
            if session is not None and session.bound(self.tx.now_ms):
                self.has_shortened = True  # Otherwise it would last for its lease again, however often it is read.
                self.change(number)
        return self._sessions[number]

    def change(self, number: str) -> None:
        if number not in self._changed:
            self.tx.unshare(self._record(number))
            self._changed[number] = None
            session = self._sessions[number]
            self._record_bytes += 0 if session is None else session.bytes_max()

    def store(self) -> None:
        """Write the sessions that have changed; one without claims has ended."""
        for number in self._changed:
            session = self._sessions[number]
            if session is None or not session.claims:
                self.tx.delete(self._record(number))
            else:
                self.tx.put(self._record(number), encode(session))

    def end(self, number: str) -> None:
        """End a session: release all of its claims. `serve` grants what they held."""
        session = self._sessions[number]
        assert session is not None
        for name in [*reversed(session.claims)]:
            self.release(number, name)
        self._sessions[number] = None
        self.change(number)
        self.ended.append(number)

    def release(self, number: str, name: str) -> None:
        """Release a claim: its place in line, and what it has taken and no other claim of the session has."""
        session = self._sessions[number]
        assert session is not None
        claim = session.claims.pop(name)
        self.change(number)
        if claim.ticket:
            keys = keys_of(self._universe, claim.steps[0][0])
            self.tx.unshare(keys.prefix)
            self.tx.delete(keys.place(claim.ticket))
            self._freed.append(claim.steps[0][0])
        for taken in reversed(claim.taken):
            if session.held(taken.key) is None:
                self._free(number, taken)

    # Locks.

    def advance(self, number: str, session: Session, claim: Claim, served: Key | None = None) -> None:
        """Take the remaining steps of a claim until one is blocked. `served` is the lock whose line it has left."""
        while claim.steps:
            key, mode, requested = claim.steps[0]
            held = session.held(key)
            if held is None:
                fence = self._take(number, key, mode, requested, is_served=key == served)
                if fence is None:
                    return
            else:  # It waits neither for the lock nor behind its line.
                mode, fence = held.mode, held.fence
                if requested and not fence:
                    keys = keys_of(self._universe, key)
                    self.tx.unshare(keys.prefix)
                    fence = self._next_fence(keys, _scan(self.tx, keys, keys.fence_range, limit=1, is_alone=True))
            claim.taken.append(Taken(*key, mode, requested, fence))
            del claim.steps[0]
            self.change(number)

    def look(self, claim: Claim) -> tuple[Waiting, bool]:
        """What is in the way of a claim's next step. Ends what has expired there; whether something has changed.

        It reads some of the holders and the front of the line only: hundreds of claims may wait, and no other
        transaction can use the lock meanwhile. The others are met when they come to the front.
        """
        key, mode, _ = claim.steps[0]
        keys = keys_of(self._universe, key)
        self.tx.unshare(keys.prefix)
        holders = find_holders(self.tx, keys, mode, limit=_HOLDERS_READ, is_alone=True)
        line = _scan(self.tx, keys, keys.line_range, limit=LOCK_OBSTACLES_MAX, is_alone=True)
        ahead = [pair for pair in line[:1] if not claim.ticket or keys.ticket_of(pair[0]) < claim.ticket]
        found = [*holders, *((place, stored.mode, stored.number) for place, stored in map(_place, ahead))]
        expired, live = [], []
        for place, held, number in found:
            session = self.load(number, shared=True)
            if session is None or session.is_expired(self.tx.now_ms):
                expired.append((place, number))
            else:
                live.append((session, held))
        have_ended = [self._end_expired(place, number) for place, number in expired]
        if claim.ticket and not found:  # The transaction that freed the lock was full, and has not served its line.
            self._freed.append(key)
        left = len(claim.steps)
        self.serve()
        has_changed = any(have_ended) or len(claim.steps) < left
        named = [(session.owner, held) for session, held in live[: len(holders)]]
        wake_ms = min((session.expires_ms for session, _ in live), default=self.tx.now_ms)
        return Waiting(key, mode, named, len(line), self.tx.now_ms if expired else wake_ms), has_changed

    def enqueue(self, number: str, claim: Claim, *, line_max: int | None = None) -> None:
        """Put a claim at the end of the line of its next step.

        Raises:
            Busy: the line has `line_max` claims.
        """
        key, mode, _ = claim.steps[0]
        keys = keys_of(self._universe, key)
        self.tx.unshare(keys.prefix)
        last = _scan(self.tx, keys, keys.line_range, limit=1, is_alone=True, reverse=True)
        claim.ticket = keys.ticket_of(last[0][0]) + 1 if last else 1
        may_be_full = line_max is not None and claim.ticket > line_max
        if line_max and may_be_full and len(self.tx.scan(*keys.line_range, limit=line_max)) >= line_max:
            raise Busy(f"{line_max:,} claims already wait for {LEVELS.describe(key)}; try again later")
        self.tx.put(keys.place(claim.ticket), encode(Place(number, mode)))
        self.change(number)

    def serve(self) -> None:
        """Serve the lines of all locks that were freed."""
        while self._freed:
            self._serve(self._freed.popleft())

    def _serve(self, key: Key) -> None:
        """Grant a lock to the claims at the front of its line, as far as their modes are compatible."""
        keys = keys_of(self._universe, key)
        self.tx.unshare(keys.prefix)
        while not self._is_full() and (front := _scan(self.tx, keys, keys.line_range, limit=1, is_alone=True)):
            place, (number, mode) = front[0][0], msgspec.structs.astuple(decode_place(front[0][1]))
            session = self.load(number)
            if session is None or session.is_expired(self.tx.now_ms):
                if not self._end_expired(place, number):
                    return
                continue
            holders = find_holders(self.tx, keys, mode, limit=1, is_alone=True)
            if holders:
                holder, _, holding = holders[0]
                excluding = self.load(holding, shared=True)
                is_over = excluding is None or excluding.is_expired(self.tx.now_ms)
                if is_over and self._end_expired(holder, holding):
                    continue
                return
            name = session.waiting()
            assert name is not None, "a session in a line has a claim that waits"
            claim = session.claims[name]
            self.tx.delete(place)
            claim.ticket = 0
            self.advance(number, session, claim, served=key)
            if claim.steps:
                self.enqueue(number, claim)
            self.change(number)

    def _end_expired(self, place: bytes, number: str) -> bool:
        """End the session that was met at the key `place`; False if this transaction has ended enough of them."""
        if self._sessions.get(number) is None:
            self.tx.delete(place)  # Its session was ended just now, or its record was lost.
            return True
        if len(self.ended) >= LOCK_SESSIONS_ENDED_MAX or self._is_full():
            return False
        self.end(number)
        return True

    def _is_full(self) -> bool:
        """Whether this transaction has changed so much that the next one has to go on."""
        return self.tx.size_bytes + self._record_bytes >= LOCK_COMMIT_BYTES_MAX

    def _take(self, number: str, key: Key, mode: Mode, requested: bool, *, is_served: bool) -> int | None:
        """Take a lock that the session does not hold, and return its fence; None if others exclude it.

        A step that was not requested is an intent, which has no fence.
        """
        keys = keys_of(self._universe, key)
        is_alone = requested or is_served
        (self.tx.unshare if is_alone else self.tx.share)(keys.prefix)
        first = _scan(self.tx, keys, keys.nearby(mode), limit=1, is_alone=is_alone)
        is_free = not first or first[0][0] == keys.fence
        if not is_free:
            if find_holders(self.tx, keys, mode, limit=1, is_alone=is_alone):
                return None
            if not is_served and _scan(self.tx, keys, keys.line_range, limit=1, is_alone=is_alone):
                return None
        self.tx.put(keys.holder(mode, number), b"")
        if not requested:
            return 0
        if is_free and mode not in INTENTS:
            return self._next_fence(keys, first)
        return self._next_fence(keys, _scan(self.tx, keys, keys.fence_range, limit=1, is_alone=True))

    def _free(self, number: str, taken: Taken) -> None:
        keys = keys_of(self._universe, taken.key)
        is_alone = taken.mode not in INTENTS
        (self.tx.unshare if is_alone else self.tx.share)(keys.prefix)
        self.tx.delete(keys.holder(taken.mode, number))
        if _scan(self.tx, keys, keys.line_range, limit=1, is_alone=is_alone):
            self._freed.append(taken.key)

    def _next_fence(self, keys: LockKeys, stored: list[Pair]) -> int:
        last = int.from_bytes(stored[0][1], "big") if stored else 0
        fence = fence_floor.next_fence(self.tx, last)
        self.tx.put(keys.fence, fence.to_bytes(_FENCE_BYTES, "big"))
        return fence

    def _record(self, number: str) -> bytes:
        return record_key(SessionKey(self._universe, number))


def find_holders(
    tx: Transaction, keys: LockKeys, mode: Mode, *, limit: int, is_alone: bool
) -> list[tuple[bytes, Mode, str]]:
    """Some of the holders that exclude `mode`: the key, the mode and the session of each."""
    found: list[tuple[bytes, Mode, str]] = []
    for bounds in keys.conflicts(mode):
        for key, _ in _scan(tx, keys, bounds, limit=limit, is_alone=is_alone):
            found.append((key, *keys.holder_of(key)))
        if len(found) >= limit:
            break
    return found[:limit]


def _scan(
    tx: Transaction, keys: LockKeys, bounds: tuple[bytes, bytes], *, limit: int, is_alone: bool, reverse: bool = False
) -> list[Pair]:
    """A range of a lock's keys.

    Where each read is a round trip, a lock that the transaction has alone is read once and as a whole, if it is small.
    """
    if is_alone and tx.writer:
        everything = tx.scan(*keys.range, limit=LOCK_PAIRS_READ_MAX)
        if len(everything) < LOCK_PAIRS_READ_MAX:
            begin, end_ = bounds
            found = [pair for pair in everything if begin <= pair[0] < end_]
            return found[::-1][:limit] if reverse else found[:limit]
    return tx.scan(*bounds, limit=limit, reverse=reverse)


def is_locked(tx: Transaction, keys: LockKeys, mode: Mode) -> bool:
    """Whether something may exclude `mode`; mostly nothing does, and one read is enough."""
    first = tx.scan(*keys.nearby(mode), limit=1)
    return bool(first) and first[0][0] != keys.fence


def _place(pair: tuple[bytes, bytes]) -> tuple[bytes, Place]:
    return pair[0], decode_place(pair[1])
