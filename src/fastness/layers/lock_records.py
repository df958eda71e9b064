"""The records of ordered locks in the key space: what is stored for a lock, and for a session.

    (u, universe, "locks", level, name, "a-held", mode, session)     ->  nothing        holders in S or X
    (u, universe, "locks", level, name, "b-line", ticket)            ->  session, mode  waiting claims, in this order
    (u, universe, "locks", level, name, "c-intents", mode, session)  ->  nothing        holders in IS or IX
    (u, universe, "locks", level, name, "d-fence")                   ->  last fence     stays, so that none is repeated
    (u, universe, "locks", "", "")                                   ->  nothing        once there was a session
    (u, universe, "lock-sessions", session)                          ->  Session

A session is stored under its number, a hash of its id: who can read the key space cannot act as the session. Holders
and line are adjacent, so an intent needs one scan.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from fastness.kv import Subspace, pack, unpack
from fastness.limits import LOCK_KEYS_CACHED_MAX, LOCK_LATE_MS_MAX
from fastness.lock_rules import DATA_LEVELS, Grant, Key, Levels, Mode, Step
from fastness.wire.locks import GrantedLock, GrantedLocks, LockSession

LEVELS: Final = Levels(DATA_LEVELS, nested=True)
INTENTS: Final = (Mode.INTENT_SHARED, Mode.INTENT_EXCLUSIVE)
_NUMBER_BYTES: Final = 12
_HELD: Final = pack(("a-held",))
_LINE: Final = pack(("b-line",))
_INTENTS: Final = pack(("c-intents",))
_FENCE: Final = pack(("d-fence",))
# What is stored in the record of a session at most, with the largest numbers.
_SESSION_BYTES_MAX: Final = 512  # With the owner's name, which has up to 256.
_CLAIM_BYTES_MAX: Final = 256
_LOCK_BYTES_MAX: Final = 24  # Beside its name. The fence, which it gets when it is granted, has up to 9.
_HOLDERS: Final = {mode: (_INTENTS if mode in INTENTS else _HELD) + pack((mode.value,)) for mode in Mode}
_CONFLICTS: Final = {
    Mode.EXCLUSIVE: (_HELD, _INTENTS),
    Mode.SHARED: (_HOLDERS[Mode.EXCLUSIVE], _HOLDERS[Mode.INTENT_EXCLUSIVE]),
    Mode.INTENT_EXCLUSIVE: (_HELD,),
    Mode.INTENT_SHARED: (_HOLDERS[Mode.EXCLUSIVE],),
}


class SessionKey(NamedTuple):
    """Identifies a session among those of its universe, without its secret id."""

    universe: str
    number: str


class Taken(msgspec.Struct, array_like=True, frozen=True):
    """A step of a claim that was granted: the lock, and the mode in which its session holds it."""

    level: int
    name: str
    mode: Mode
    requested: bool
    fence: int  # 0 for an intent.

    @property
    def key(self) -> Key:
        return self.level, self.name


class Claim(msgspec.Struct, array_like=True):
    """What one call acquires, in lock order. It waits for the step after those that it has taken."""

    attempt: str  # The call that asked last: an earlier one that was given up must not release it.
    digest: int  # Of all that was requested.
    taken: list[Taken]
    steps: list[Step] = msgspec.field(default_factory=list)  # Those that it has not taken yet.
    ticket: int = 0  # Its place in the line of the first of `steps`.


class Session(msgspec.Struct, array_like=True):
    """A caller that holds locks or waits for one, under one lease."""

    owner: str
    since_ms: int
    expires_ms: int
    lease_ms: int
    claims: dict[str, Claim]

    def is_expired(self, now_ms: int) -> bool:
        return now_ms >= self.expires_ms

    def bound(self, now_ms: int) -> bool:
        """Let it end at most its lease from now, if the clock was set back since; whether it was."""
        if self.expires_ms - now_ms - LOCK_LATE_MS_MAX <= self.lease_ms:
            return False
        self.expires_ms = now_ms + self.lease_ms
        return True

    def renew(self, now_ms: int, lease_ms: int) -> None:
        """Extend the lease; a renewal never shortens it."""
        self.expires_ms = max(now_ms + lease_ms, self.expires_ms)
        self.lease_ms = self.expires_ms - now_ms

    def bytes_max(self, steps: Sequence[Step] = ()) -> int:
        """How long its record may become: when all that it waits for is granted, and `steps` in one more claim.

        A record grows when other sessions release what it waits for, so a limit must be checked before it waits.
        """
        names = [taken.name for claim in self.claims.values() for taken in claim.taken]
        names += [name for claim in self.claims.values() for (_, name), _, _ in claim.steps]
        names += [name for (_, name), _, _ in steps]
        name_bytes = len("".join(names).encode())
        return (
            _SESSION_BYTES_MAX + _CLAIM_BYTES_MAX * (len(self.claims) + 1) + _LOCK_BYTES_MAX * len(names) + name_bytes
        )

    def waiting(self) -> str | None:
        """The claim that waits in a line, if any."""
        return next((name for name, claim in self.claims.items() if claim.steps), None)

    def held(self, key: Key) -> Taken | None:
        """How the session holds a lock. Claims that hold it again have its mode, but maybe a fence of their own."""
        level, name = key
        found: Taken | None = None
        for claim in self.claims.values():
            for taken in claim.taken:
                if taken.name == name and taken.level == level and (found is None or taken.fence > found.fence):
                    found = taken
        return found

    def grants(self) -> dict[Key, Grant]:
        """Everything that the session holds, in lock order."""
        held = {taken.key: (taken.mode, 0.0) for claim in self.claims.values() for taken in claim.taken}
        return dict(sorted(held.items()))


class LockKeys:
    """The keys of one lock."""

    __slots__ = ("_nearby_intents", "fence", "fence_range", "line", "line_range", "prefix", "range")

    def __init__(self, universe: str, key: Key) -> None:
        level, name = LEVELS.path(key)
        prefix: bytes = Subspace("u", universe, "locks", level, name).prefix
        self.prefix = prefix
        self.fence: bytes = prefix + _FENCE
        self.line: bytes = prefix + _LINE
        self.line_range = self.line + b"\x00", self.line + b"\xff"
        self.fence_range = self.fence, self.fence + b"\x00"
        self.range = prefix + b"\x00", prefix + b"\xff"
        self._nearby_intents = prefix + _HELD, self.line + b"\xff"

    def holder(self, mode: Mode, number: str) -> bytes:
        return self.prefix + _HOLDERS[mode] + pack((number,))

    def place(self, ticket: int) -> bytes:
        return self.line + pack((ticket,))

    def nearby(self, mode: Mode) -> tuple[bytes, bytes]:
        """A range that has at most the fence, if there is nothing that could exclude `mode`."""
        return self._nearby_intents if mode in INTENTS else self.range

    def conflicts(self, mode: Mode) -> list[tuple[bytes, bytes]]:
        """The ranges of the holders that exclude `mode`."""
        return [(self.prefix + area + b"\x00", self.prefix + area + b"\xff") for area in _CONFLICTS[mode]]

    def holder_of(self, key: bytes) -> tuple[Mode, str]:
        """The mode and the number in the key of a holder."""
        _, mode, number = unpack(key[len(self.prefix) :])
        return Mode(mode), number

    def ticket_of(self, key: bytes) -> int:
        """The ticket in the key of a place in line."""
        ticket: int = unpack(key[len(self.prefix) :])[1]
        return ticket


@lru_cache(maxsize=LOCK_KEYS_CACHED_MAX)
def keys_of(universe: str, key: Key) -> LockKeys:
    """The keys of a lock."""
    return LockKeys(universe, key)


class Place(msgspec.Struct, array_like=True, frozen=True):
    """A claim in a line."""

    number: str
    mode: Mode


encode: Final = msgspec.msgpack.Encoder().encode
decode_session: Final = msgspec.msgpack.Decoder(Session).decode
decode_place: Final = msgspec.msgpack.Decoder(Place).decode


def session_key(session: LockSession) -> SessionKey:
    """The key of a session."""
    return SessionKey(session.universe, blake2b(session.id.encode(), digest_size=_NUMBER_BYTES).hexdigest())


@lru_cache(maxsize=1_024)
def sessions_subspace(universe: str) -> Subspace:
    return Subspace("u", universe, "lock-sessions")


@lru_cache(maxsize=1_024)
def use_key(universe: str) -> bytes:
    """The key that exists once the universe has had a session: without it, a write need not look for locks."""
    return Subspace("u", universe, "locks", "", "").prefix


def record_key(session: SessionKey) -> bytes:
    return sessions_subspace(session.universe).key(session.number)


def granted(name: str, session: Session) -> GrantedLocks:
    """The wire form of a claim that is held."""
    locks = [
        GrantedLock(*LEVELS.path(taken.key), taken.mode, taken.fence)
        for taken in session.claims[name].taken
        if taken.requested
    ]
    return GrantedLocks(name, locks, session.expires_ms)
