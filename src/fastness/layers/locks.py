"""Ordered locks that processes share: the rules of `fastness.lock_rules`, in the key space, under leases, with fences.

A session is one caller, such as a thread. It has one lease for all of its locks, begins with its first claim, and ends
with the release of its last one, or with its lease. A claim is what one call acquires.

    acquire ──► checked against the order ──► taken, lock by lock ──► held ──► released
                  │                             │       ▲                │
                  ▼                             ▼       │ served         ▼
                LockOrderViolation             waits in the lock's line  its session's lease ends: released as well

`fastness.layers.lock_records` has the keys, `fastness.layers.lock_transaction` the single steps. What holds after every
transaction:

- No two sessions hold a lock in modes that exclude each other.
- A claim waits in the line of exactly one lock, keeps what it has taken, and waits only for a lock that comes after
  all of them. So waits cannot form a cycle.
- A line is served from its front only, and a newcomer does not pass it. So no claim waits forever.
- Whatever frees a lock serves its line in the same transaction, up to a bound. The claim that is at the front then goes
  on when it is acquired again.
- The fence of a lock grows with every grant of it. An intent has none.

A session that has expired is ended by the first transaction that meets it as an obstacle or at the front of a line. So
a crashed session delays others until its lease ends, if each waiting claim is acquired again at `wake_ms`. It may take
up to a lease more if a claim waits for many holders, because it reads only some of them.

An intent that meets no obstacle shares the lock (`tx.share`): it writes only its own key. Everything else has the lock
alone. So where several nodes write, those that lock different rows do not wait for each other's commits.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from fastness.errors import (
    FencingMismatch,
    IdempotencyKeyReused,
    InvalidArgument,
    KeyTooLarge,
    LeaseExpired,
    LockOrderViolation,
)
from fastness.kv import Transaction, pages
from fastness.layers.lock_records import (
    INTENTS,
    LEVELS,
    Claim,
    Session,
    SessionKey,
    decode_session,
    encode,
    granted,
    keys_of,
    record_key,
    session_key,
    sessions_subspace,
    use_key,
)
from fastness.layers.lock_transaction import LockTransaction, Waiting, is_locked
from fastness.limits import (
    KEY_BYTES_MAX,
    LOCK_LINE_MAX,
    LOCK_OBSTACLES_MAX,
    LOCK_SESSION_BYTES_MAX,
    LOCK_SESSION_LOCKS_MAX,
)
from fastness.lock_rules import Key, Mode, Path, Step, find_violation, parse_mode
from fastness.wire.locks import GrantedLocks, LockHolding, LockProof, LockSession, LockSessionInfo


class Obstacle(NamedTuple):
    """A session that excludes a write."""

    key: Key
    mode: Mode
    owner: str
    expires_ms: int


def steps_of(paths: Sequence[Path], mode: Mode | str) -> list[Step]:
    """The locks to take for `paths`, in lock order, with intents.

    Raises:
        InvalidArgument: a path or the mode is not one.
    """
    return LEVELS.steps_for_all(paths, parse_mode(mode))


class AcquireCall(NamedTuple):
    """What a caller wants to acquire. `attempt` names the call, for `release`."""

    session: LockSession
    claim: str
    steps: Sequence[Step]
    owner: str
    lease_ms: int
    continues: bool = False  # The session must exist.
    attempt: str = ""


def acquire(tx: Transaction, call: AcquireCall, *, may_wait: bool) -> GrantedLocks | Waiting:
    """The locks of a claim, or why they are not granted.

    Commit it as CRITICAL: a fence must be durable before its holder sees it.

    With `may_wait`, a claim that is not granted waits in line: call this again when the session's record changes, and
    at `wake_ms`. It also renews the lease. Without, the claim ends.

    Raises:
        LockOrderViolation: the session holds a lock that comes after one of these, or one of them in a weaker mode.
        LeaseExpired: the session has ended, and `continues`.
        IdempotencyKeyReused: the session has a claim of this name for other locks, or in another mode.
        Busy: too many claims wait for the lock.
        InvalidArgument: the session would hold too many locks, or too long names of them.
        KeyTooLarge: the name of a lock is too long.
    """
    key = session_key(call.session)
    part = tx if may_wait else tx.nested()  # A claim that may not wait writes nothing unless it is granted.
    locks = LockTransaction(part, key.universe)
    current = locks.live(key.number)
    if current is None:
        if call.continues:
            raise _ended(LEVELS.describe(call.steps[-1][0]))
        current = locks.begin(key.number, call.owner)
    was_waiting = current.waiting() is not None  # That claim ends, unless it is this one and is granted.
    outcome = _acquire(locks, key, current, call, may_wait=may_wait)
    locks.store()
    if part is not tx and (was_waiting or locks.has_shortened or locks.ended or isinstance(outcome, GrantedLocks)):
        tx.merge(part)
    return outcome


def _acquire(
    locks: LockTransaction, key: SessionKey, session: Session, call: AcquireCall, *, may_wait: bool
) -> GrantedLocks | Waiting:
    now_ms, number = locks.tx.now_ms, key.number
    name, steps, lease_ms, attempt = call.claim, call.steps, call.lease_ms, call.attempt
    claim, digest = session.claims.get(name), crc32(encode(steps))  # It only detects mistakes.
    if claim is not None and claim.digest != digest:
        raise IdempotencyKeyReused(
            f"The session has a claim {name} for other locks or another mode; use a new id for every acquire, and the "
            "same id only to repeat one"
        )
    if claim is None:
        abandoned = session.waiting()
        if abandoned is not None:  # A session makes one call at a time, so that one was given up.
            locks.release(number, abandoned)
            locks.serve()
        _check_steps(key, session, steps)
        claim = session.claims[name] = Claim(attempt, digest, [], list(steps))
        session.renew(now_ms, lease_ms)
        locks.change(number)
    elif claim.attempt != attempt:
        claim.attempt = attempt
        locks.change(number)
    waiting = None
    while claim.steps:
        if not claim.ticket:
            locks.advance(number, session, claim)
            if not claim.steps:
                break
        waiting, has_changed = locks.look(claim)
        if not has_changed:
            break
    if not claim.steps:
        return granted(name, session)
    assert waiting is not None
    if not may_wait:
        locks.release(number, name)
        locks.serve()
    elif not claim.ticket:
        locks.enqueue(number, claim, line_max=LOCK_LINE_MAX)
    elif session.expires_ms - now_ms < lease_ms * 2 // 3:
        session.renew(now_ms, lease_ms)
        locks.change(number)
    return waiting


def release(tx: Transaction, session: LockSession, claim: str, *, attempt: str | None = None) -> bool:
    """End a claim that is held or waits; whether it was held until now.

    With `attempt`, only if no later call has asked for the same claim.
    """
    key = session_key(session)
    locks = LockTransaction(tx, key.universe)
    current = locks.live(key.number)
    found = None if current is None else current.claims.get(claim)
    if found is None or (attempt is not None and found.attempt != attempt):
        locks.store()
        return False
    was_held = not found.steps
    locks.release(key.number, claim)
    locks.serve()
    locks.store()
    return was_held


def renew(tx: Transaction, session: LockSession, *, lease_ms: int) -> int:
    """Extend the lease of a session to at least `lease_ms` from now; returns when it ends.

    Raises:
        LeaseExpired: it has ended.
    """
    key = session_key(session)
    current = _live(tx, key)
    if current is None:
        raise _ended("its locks")
    current.renew(tx.now_ms, lease_ms)
    tx.put(record_key(key), encode(current))
    return current.expires_ms


def check(tx: Transaction, proof: LockProof) -> int:
    """The fence of a proof, if its session holds the lock with this fence now.

    Raises:
        LeaseExpired: the session has ended, or has released the lock.
        FencingMismatch: the session acquired the lock again since.
    """
    key = LEVELS.parse((proof.level, proof.name))
    current = _live(tx, session_key(proof.session))
    if current is None:
        raise _ended(LEVELS.describe(key))
    fences = {taken.fence for claim in current.claims.values() for taken in claim.taken if taken.key == key}
    if proof.fence and proof.fence in fences:
        return proof.fence
    if not fences:
        raise LeaseExpired(f"{LEVELS.describe(key)} was released; stop, acquire it again, then read its state")
    raise FencingMismatch(
        f"The fence of {LEVELS.describe(key)} is {max(fences)}, not {proof.fence}; its session acquired it again"
    )


def end(tx: Transaction, session: SessionKey) -> bool:
    """End a session and release its locks; whether there was one."""
    locks = LockTransaction(tx, session.universe)
    found = locks.load(session.number) is not None
    if found:
        locks.end(session.number)
        locks.serve()
    locks.store()
    return found


def reap(tx: Transaction, session: SessionKey) -> list[str]:
    """End a session that has expired. Returns the numbers of all sessions that were ended, in this order."""
    locks = LockTransaction(tx, session.universe)
    locks.live(session.number)
    locks.store()
    return locks.ended


def obstacles(
    tx: Transaction, universe: str, rows: Iterable[tuple[str, str]], *, session: str | None = None
) -> list[Obstacle]:
    """What excludes a write of these rows (entity type and id) now: locks of other sessions than `session`.

    Of the sessions that hold one lock, it names the first. It takes nothing and delays no one, so lines do not count.
    Where several nodes write, none of these locks is granted before the transaction ends. It costs one read if the
    universe never had a session, and two if it has none now and transactions run one by one.

    Raises:
        LeaseExpired: `session` has ended. The write may rest on what was read under its locks, so it must not happen,
            even if nothing excludes it any more.
    """
    own = None if session is None else session_key(LockSession(session, universe))
    is_used = use_key(universe)
    tx.share(is_used)
    # Where transactions run one by one, no session can begin meanwhile.
    if tx.get(is_used) is None or not (tx.writer or tx.scan(*sessions_subspace(universe).range(), limit=1)):
        if own is not None:
            raise _ended("the locks of this write")
        return []
    found = []
    for key, mode, _ in LEVELS.steps_for_all([("record_id", "/".join(row)) for row in rows], Mode.EXCLUSIVE):
        tx.share(keys_of(universe, key).prefix)
        obstacle = _find_obstacle(tx, universe, key, mode, own)
        if obstacle is not None:
            found.append(obstacle)
    if own is not None:
        # Read after the locks: if it is live now, then no other session is granted one of them before the write.
        tx.share(record_key(own))
        if _live(tx, own) is None:
            raise _ended("the locks of this write")
    return found


def _find_obstacle(tx: Transaction, universe: str, key: Key, mode: Mode, own: SessionKey | None) -> Obstacle | None:
    """The first live session that holds a lock and excludes `mode`. There may be any number of expired ones before."""
    keys = keys_of(universe, key)
    if not is_locked(tx, keys, mode):
        return None
    for bounds in keys.conflicts(mode):
        for pairs in pages(tx, *bounds, items=LOCK_OBSTACLES_MAX):
            for held, number in map(keys.holder_of, (pair[0] for pair in pairs)):
                holder = SessionKey(universe, number)
                if holder == own:
                    continue
                tx.share(record_key(holder))
                holding = _live(tx, holder)
                if holding is not None:
                    return Obstacle(key, held, holding.owner, holding.expires_ms)
    return None


def page(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, Session]]:
    """At most `limit` sessions after the number `after`, in order, with those that have expired."""
    subspace = sessions_subspace(universe)
    begin, end_ = subspace.range()
    pairs = tx.scan(subspace.key(after) + b"\x00" if after else begin, end_, limit=limit)
    return [(subspace.unpack(key)[0], _decoded(value, tx.now_ms)) for key, value in pairs]


def describe(number: str, session: Session) -> LockSessionInfo:
    """The wire form of a session."""
    held = [
        LockHolding(*LEVELS.path(key), mode, is_intent=mode in INTENTS, is_waiting=False)
        for key, (mode, _) in session.grants().items()
    ]
    waiting = [
        LockHolding(*LEVELS.path(key), mode, is_intent=mode in INTENTS, is_waiting=True)
        for claim in session.claims.values()
        for key, mode, _ in claim.steps[:1]
    ]
    return LockSessionInfo(number, session.owner, session.since_ms, session.expires_ms, held + waiting)


def watch_prefix(session: LockSession) -> bytes:
    """The key prefix to watch for changes of a session: a grant to one of its claims, or its end."""
    return record_key(session_key(session))


def _check_steps(key: SessionKey, session: Session, steps: Sequence[Step]) -> None:
    """Refuse what could not be stored when it is granted: other sessions grant it, and would fail."""
    grants = session.grants()
    if len(grants) + len(steps) > LOCK_SESSION_LOCKS_MAX:
        raise InvalidArgument(
            f"A session holds at most {LOCK_SESSION_LOCKS_MAX:,} locks, including intents; release some, or lock the "
            "entity type instead of its records"
        )
    bytes_max = session.bytes_max(steps)
    if bytes_max > LOCK_SESSION_BYTES_MAX:
        raise InvalidArgument(
            f"The locks of a session, with their names, take at most {LOCK_SESSION_BYTES_MAX:,} bytes, and with these "
            f"they could take {bytes_max:,}; release some, or lock the entity type instead of its records"
        )
    for lock, mode, _ in steps:
        length = len(keys_of(key.universe, lock).holder(mode, key.number))
        if length > KEY_BYTES_MAX:
            raise KeyTooLarge(
                f"The key of the lock on {LEVELS.describe(lock):.100} has {length:,} bytes and may have "
                f"{KEY_BYTES_MAX:,}; shorten the name"
            )
    refused = find_violation(LEVELS, steps, grants) if grants else None
    if refused is not None:
        raise LockOrderViolation(refused[1])


def _live(tx: Transaction, key: SessionKey) -> Session | None:
    """The session, if it has not expired. Writes nothing."""
    stored = tx.get(record_key(key))
    session = None if stored is None else _decoded(stored, tx.now_ms)
    return None if session is None or session.is_expired(tx.now_ms) else session


def _decoded(stored: bytes, now_ms: int) -> Session:
    session: Session = decode_session(stored)
    session.bound(now_ms)
    return session


def _ended(what: str) -> LeaseExpired:
    return LeaseExpired(f"The session that held {what} has ended; stop, acquire it again, then read its state")
