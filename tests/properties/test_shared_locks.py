"""Random histories of locks in the key space match the registry of one process: grants, lines, refusals.

After the clock has moved, expired sessions are ended at once in one half of the examples, so that the registry can
follow. In the other half, the calls of others meet and end them, and only what must always hold is checked.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import FastnessError, LeaseExpired, LockOrderViolation
from fastness.kv import Database, Pair, Subspace, Transaction, fence_floor, pages
from fastness.layers import locks
from fastness.layers.lock_records import LEVELS, LockKeys, Session, SessionKey, decode_place, session_key, use_key
from fastness.layers.lock_transaction import LockTransaction, Waiting
from fastness.lock_rules import COMPATIBLE, Key, Mode
from fastness.runtime.locks import registry
from fastness.runtime.locks.registry import LockRegistry, NoTask, Owner
from fastness.testing.clock import ManualClock
from fastness.wire.locks import GrantedLocks, LockProof, LockSession
from tests.support.restores import START_MS, back_up, restore

CALLERS = 5
LEASE_MS = 1_000

# Few names and mostly one at a time, so that callers often conflict and seldom violate the lock order.
paths = st.sampled_from(
    [("record_id", "a/1"), ("record_id", "a/2"), ("entity_type", "a"), ("record_id", "b/1"), ("database",)]
)
several = paths.map(lambda path: [path]) | st.lists(paths, min_size=1, max_size=3)
choices = st.integers(0, 99)  # Used modulo the number of choices.
requests = st.tuples(
    choices, several, st.sampled_from(("X", "S", "S", "X", "IS", "IX")), st.sampled_from((True, True, True, False))
)


class Claim(registry.Claim):
    """A claim of the model, whose waiter is never woken."""

    __slots__ = ("name", "requested")

    def __init__(self, owner: Owner, name: str, requested: list[tuple[str, ...]], mode: str) -> None:
        self.owner, self.name, self.requested = owner, name, (requested, mode)
        self.steps = locks.steps_of(requested, mode)
        self.taken, self.is_waiting, self.waiter = 0, False, None


class Awaken:
    """A waiter that exists."""

    is_closed = False

    def wake(self) -> bool:
        return True


class Caller:
    """A session in the model. It is lost when its lease ends."""

    def __init__(self, number: int, universe: str) -> None:
        self.session = LockSession(f"id-{number:020}", universe)
        self.label = f"caller-{number}"
        self.owner = Owner(NoTask())
        self.claims: dict[str, Claim] = {}
        self.expires_ms = 0

    @property
    def waiting(self) -> Claim | None:
        return next((claim for claim in self.claims.values() if claim.is_waiting), None)

    @property
    def key(self) -> SessionKey:
        return session_key(self.session)


class SharedLocks(RuleBasedStateMachine):
    """Five callers at a time, which crash, expire and come back as others, and restores of older backups."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    names: Iterator[int]  # Examples may share a database, so each has its own universe.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(START_MS)
        self.database = next(self.openers)(clock=self.clock)
        self.universe = str(next(self.names))
        self.registry = LockRegistry(LEVELS)
        self.numbers = count()
        self.callers = [self.new_caller() for _ in range(CALLERS)]
        self.sessions: dict[str, Caller] = {}  # By their numbers; also of crashed callers.
        self.fences: dict[Key, int] = {}  # The last fence of each lock.
        self.issued: dict[Key, int] = {}  # The same, also before a restore.
        self.known: set[tuple[str, Key]] = set()  # Who held which lock after the step before.
        self.is_eager = True
        self.backup: tuple[list[Pair], Any] = back_up(self.database, self.universe), deepcopy(self.model)

    @property
    def model(self) -> Any:
        """What a restore brings back."""
        return self.registry, self.callers, self.sessions, self.fences, self.known

    def new_caller(self) -> Caller:
        return Caller(next(self.numbers), self.universe)

    def transact(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.database.transact(work, *args, **kwargs)

    @initialize(is_eager=st.booleans())
    def start(self, is_eager: bool) -> None:
        self.is_eager = is_eager

    # Rules.

    @rule(requests=st.lists(requests, min_size=1, max_size=5))
    def several_callers_acquire(self, requests: list[tuple[int, list[tuple[str, ...]], str, bool]]) -> None:
        for request in requests:
            self.request(*request)

    def request(self, choice: int, requested: list[tuple[str, ...]], mode: str, may_wait: bool) -> None:
        idle = [caller for caller in self.callers if caller.waiting is None]
        if not idle:
            return
        caller = idle[choice % len(idle)]
        name = f"claim-{len(caller.claims)}-{next(self.numbers)}"
        claim = Claim(caller.owner, name, requested, mode)
        outcome = self.acquire(caller, claim, may_wait=may_wait)
        if not self.is_eager:
            self.follow_outcome(caller, claim, outcome, may_wait=may_wait)
            return
        refusal = self.refusal(claim)
        assert (str(outcome) if isinstance(outcome, FastnessError) else None) == refusal
        if refusal is not None:
            return
        is_granted = self.registry.advance(claim)
        assert is_granted is isinstance(outcome, GrantedLocks)
        self.sessions[caller.key.number] = caller
        caller.expires_ms = max(caller.expires_ms, self.clock.now_ms() + LEASE_MS)
        caller.claims[name] = claim
        if not is_granted:
            claim.waiter = Awaken()
            if may_wait:
                self.registry.enqueue(claim)
            else:
                self.end_claim(caller, name)

    @precondition(lambda self: self.waiting)
    @rule(choice=choices, may_wait=st.booleans())
    def a_waiting_caller_asks_again(self, choice: int, may_wait: bool) -> None:
        caller = self.waiting[choice % len(self.waiting)]
        claim = caller.waiting
        assert claim is not None
        outcome = self.acquire(caller, claim, may_wait=may_wait)
        if not self.is_eager:
            self.follow_outcome(caller, claim, outcome, may_wait=may_wait)
            return
        assert isinstance(outcome, Waiting)
        assert outcome.key == claim.next[0]
        if not may_wait:
            self.end_claim(caller, claim.name)
        elif caller.expires_ms - self.clock.now_ms() < LEASE_MS * 2 // 3:
            caller.expires_ms = self.clock.now_ms() + LEASE_MS

    @precondition(lambda self: self.held)
    @rule(choice=choices)
    def a_caller_asks_again_for_what_it_holds(self, choice: int) -> None:
        caller, claim = self.held[choice % len(self.held)]
        outcome = self.acquire(caller, claim, may_wait=True)
        if self.is_eager:
            assert isinstance(outcome, GrantedLocks)
        else:
            self.follow_outcome(caller, claim, outcome, may_wait=True)

    @precondition(lambda self: any(caller.claims for caller in self.callers))
    @rule(choice=choices)
    def a_caller_releases(self, choice: int) -> None:
        claims = [(caller, claim) for caller in self.callers for claim in caller.claims.values()]
        caller, claim = claims[choice % len(claims)]
        is_held = not claim.is_waiting
        assert self.transact(locks.release, caller.session, claim.name) is is_held or not self.is_eager
        self.end_claim(caller, claim.name)
        assert self.transact(locks.release, caller.session, claim.name) is False

    @rule(choice=choices)
    def a_caller_crashes(self, choice: int) -> None:
        self.callers[choice % CALLERS] = self.new_caller()

    @precondition(lambda self: not self.is_eager)
    @rule(path=paths)
    def all_callers_crash_and_another_reads_what_they_read(self, path: tuple[str, ...]) -> None:
        for number in range(CALLERS):
            self.request(number, [path], "S", may_wait=False)
        self.callers = [self.new_caller() for _ in self.callers]
        self.clock.advance_ms(LEASE_MS)
        self.request(0, [path], "S", may_wait=False)

    @rule(milliseconds=st.sampled_from((1, LEASE_MS // 3, LEASE_MS // 2, LEASE_MS)), late=st.none() | choices)
    def time_passes_and_callers_renew(self, milliseconds: int, late: int | None) -> None:
        """All but one in time."""
        for number, caller in enumerate(self.callers):
            if late is None or late % CALLERS != number:
                self.renew(caller)
        self.clock.advance_ms(milliseconds)
        if self.is_eager:
            self.end_expired()
        if late is not None:
            self.renew(self.callers[late % CALLERS])

    @precondition(lambda self: not self.is_eager)
    @rule()
    def expired_sessions_are_ended(self) -> None:
        self.end_expired()

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = back_up(self.database, self.universe), deepcopy(self.model)

    @rule(seldom=st.integers(0, 3))
    def the_backup_is_restored(self, seldom: int) -> None:
        if not seldom:
            pairs, model = self.backup
            restore(self.database, self.universe, pairs, self.clock)
            self.registry, self.callers, self.sessions, self.fences, self.known = deepcopy(model)
            if self.is_eager:
                self.end_expired()

    def renew(self, caller: Caller) -> None:
        try:
            expires_ms = self.transact(locks.renew, caller.session, lease_ms=LEASE_MS)
        except LeaseExpired:
            assert not caller.claims or not self.is_eager
        else:
            assert caller.claims or not self.is_eager
            caller.expires_ms = expires_ms
            assert expires_ms == self.clock.now_ms() + LEASE_MS

    # What must hold.

    @invariant()
    def grants_and_lines_equal_the_registry(self) -> None:
        if not self.is_eager:
            return
        held, lines = self.database.read(self.read_locks)
        labels = {id(caller.owner): number for number, caller in self.sessions.items()}
        assert held == {
            (key, mode, labels[id(owner)])
            for caller in self.sessions.values()
            for owner in (caller.owner,)
            for key, (mode, _) in owner.grants.items()
        }
        assert lines == {
            key: [(labels[id(claim.owner)], claim.next[1]) for claim in line]
            for key, line in self.registry.lines.items()
        }

    @invariant()
    def no_two_holders_exclude_each_other(self) -> None:
        held, _ = self.database.read(self.read_locks)
        for key, mode, number in held:
            for other_key, other_mode, other in held:
                assert key != other_key or number == other or mode in COMPATIBLE[other_mode]

    @invariant()
    def locks_are_those_of_the_sessions(self) -> None:
        held, lines = self.database.read(self.read_locks)
        sessions = self.database.read(self.read_sessions)
        assert held == {
            (key, mode, number) for number, session in sessions.items() for key, (mode, _) in session.grants().items()
        }
        assert sorted((key, number, mode) for key, line in lines.items() for number, mode in line) == sorted(
            (key, number, mode)
            for number, session in sessions.items()
            for claim in session.claims.values()
            for key, mode, _ in claim.steps[:1]
        )
        assert all(session.claims for session in sessions.values())

    @invariant()
    def fences_grow(self) -> None:
        fences = self.database.read(self.read_fences)
        known = set()
        for number, session in self.database.read(self.read_sessions).items():
            for key in session.grants():
                taken = session.held(key)
                assert taken is not None
                if taken.fence:
                    known.add((number, key))
                    assert taken.fence <= fences[key]
                    assert (number, key) in self.known or taken.fence > self.issued.get(key, 0)
        assert all(fences[key] >= last for key, last in self.fences.items())
        self.fences, self.known = fences, known
        self.issued = {key: max(fences.get(key, 0), last) for key, last in (fences | self.issued).items()}

    @invariant()
    def no_session_can_use_the_fence_of_another(self) -> None:
        sessions = self.database.read(self.read_sessions)
        used = [
            (taken.key, taken.fence, number)
            for number, session in sessions.items()
            for claim in session.claims.values()
            for taken in claim.taken
            if taken.fence
        ]
        assert len({each[:2] for each in used}) == len(set(used))
        for caller in self.callers:
            session = sessions.get(caller.key.number)
            alive = session is not None and not session.is_expired(self.clock.now_ms())
            for key, fence, number in used:
                proof = LockProof(caller.session, *LEVELS.path(key), fence)
                assert self.database.read(_passes, proof) is (alive and number == caller.key.number)

    @invariant()
    def a_write_is_excluded_by_any_live_holder_and_by_no_other(self) -> None:
        held, _ = self.database.read(self.read_locks)
        sessions = self.database.read(self.read_sessions)
        now_ms = self.clock.now_ms()
        live = [each for each in held if not sessions[each[2]].is_expired(now_ms)]
        for row in (("a", "1"), ("a", "2"), ("b", "1")):
            wanted = {key: mode for key, mode, _ in LEVELS.steps(("record_id", "/".join(row)), Mode.EXCLUSIVE)}
            excluding = {key for key, mode, _ in live if key in wanted and mode not in COMPATIBLE[wanted[key]]}
            found = self.database.read(locks.obstacles, self.universe, [row])
            assert {each.key for each in found} == excluding
        for caller in self.callers:
            session = sessions.get(caller.key.number)
            alive = session is not None and not session.is_expired(now_ms)
            assert self.database.read(_may_write, caller.session, ("a", "1")) is alive

    @invariant()
    def a_line_waits_for_a_holder(self) -> None:
        """Nothing is left waiting: once the expired sessions have ended, a holder excludes the front of each line."""
        now_ms = self.clock.now_ms()
        sessions = self.database.read(self.read_sessions)
        if any(session.is_expired(now_ms) for session in sessions.values()):
            return
        held, lines = self.database.read(self.read_locks)
        for key, line in lines.items():
            _, mode = line[0]
            assert any(other == key and mode not in COMPATIBLE[held_mode] for other, held_mode, _ in held)

    # The database.

    def acquire(self, caller: Caller, claim: Claim, *, may_wait: bool) -> GrantedLocks | Waiting | FastnessError:
        requested, mode = claim.requested
        try:
            steps = locks.steps_of(requested, mode)
            call = locks.AcquireCall(caller.session, claim.name, steps, caller.label, LEASE_MS)
            outcome: GrantedLocks | Waiting = self.transact(locks.acquire, call, may_wait=may_wait)
        except LockOrderViolation as error:
            return error
        return outcome

    def end_expired(self) -> None:
        for number, session in self.database.read(self.read_sessions).items():
            if session.is_expired(self.clock.now_ms()):
                for ended in self.transact(locks.reap, SessionKey(self.universe, number)):
                    self.lose(ended)

    def read_sessions(self, tx: Transaction) -> dict[str, Session]:
        return dict(locks.page(tx, self.universe, after="", limit=1_000))

    def read_locks(self, tx: Transaction) -> tuple[set[tuple[Key, Mode, str]], dict[Key, list[tuple[str, Mode]]]]:
        """The holders of all locks, and their lines."""
        held: set[tuple[Key, Mode, str]] = set()
        lines: dict[Key, list[tuple[str, Mode]]] = {}
        for key, kind, rest, value in self.read_keys(tx):
            if kind == "b-line":
                place = decode_place(value)
                lines.setdefault(key, []).append((place.number, place.mode))
            elif kind != "d-fence":
                held.add((key, Mode(rest[0]), rest[1]))
        return held, lines

    def read_fences(self, tx: Transaction) -> dict[Key, int]:
        return {key: int.from_bytes(value, "big") for key, kind, _, value in self.read_keys(tx) if kind == "d-fence"}

    def read_keys(self, tx: Transaction) -> list[tuple[Key, str, list[str], bytes]]:
        subspace = Subspace("u", self.universe, "locks")
        pairs = tx.scan(*subspace.range(), limit=10_000)
        found = [(subspace.unpack(key), value) for key, value in pairs if key != use_key(self.universe)]
        return [(LEVELS.parse((level, name)), kind, rest, value) for (level, name, kind, *rest), value in found]

    # The model.

    @property
    def waiting(self) -> list[Caller]:
        return [caller for caller in self.callers if caller.waiting is not None]

    @property
    def held(self) -> list[tuple[Caller, Claim]]:
        return [(caller, claim) for caller in self.callers for claim in caller.claims.values() if not claim.is_waiting]

    def refusal(self, claim: Claim) -> str | None:
        """Why the registry refuses a claim."""
        try:
            if claim.owner.grants:
                self.registry.check(claim)
        except LockOrderViolation as error:
            return str(error)
        return None

    def end_claim(self, caller: Caller, name: str) -> None:
        claim = caller.claims.pop(name, None)
        if claim is not None and self.is_eager:
            self.registry.release(claim)
        if not caller.claims:
            self.sessions.pop(caller.key.number, None)
            caller.expires_ms = 0

    def follow_outcome(
        self, caller: Caller, claim: Claim, outcome: GrantedLocks | Waiting | FastnessError, *, may_wait: bool
    ) -> None:
        """Without the registry, only note which claims the caller believes in."""
        caller.claims.pop(claim.name, None)
        if isinstance(outcome, GrantedLocks) or (isinstance(outcome, Waiting) and may_wait):
            claim.is_waiting = isinstance(outcome, Waiting)
            caller.claims[claim.name] = claim

    def lose(self, number: str) -> None:
        caller = self.sessions.get(number)
        if caller is not None:
            for name in [*reversed(caller.claims)]:
                self.end_claim(caller, name)

    def teardown(self) -> None:
        """Nothing but fences is left when all sessions have ended."""
        for caller in self.callers:
            for name in list(caller.claims):
                self.transact(locks.release, caller.session, name)
        self.clock.advance_ms(LEASE_MS)
        self.end_expired()
        assert self.database.read(self.read_sessions) == {}
        assert {kind for _, kind, _, _ in self.database.read(self.read_keys)} <= {"d-fence"}
        self.database.close()


@pytest.fixture(autouse=True)
def pages_of_one_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few expired holders are a crowd."""
    monkeypatch.setattr(locks, "LOCK_OBSTACLES_MAX", 1)


def _may_write(tx: Transaction, session: LockSession, row: tuple[str, str]) -> bool:
    """Whether the session is live, or its write would be refused."""
    try:
        locks.obstacles(tx, session.universe, [row], session=session.id)
    except LeaseExpired:
        return False
    return True


def _passes(tx: Transaction, proof: LockProof) -> bool:
    try:
        return locks.check(tx, proof) == proof.fence
    except FastnessError:
        return False


@pytest.mark.examples(30)
def test_locks_in_memory_match_the_registry(run_machine: Callable[..., None]) -> None:
    run_machine(SharedLocks, steps=40, openers=repeat(MemoryDatabase), names=count())


@pytest.mark.examples(6)
def test_locks_on_rocksdb_match_the_registry(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(SharedLocks, steps=40, openers=fresh, names=count())


@pytest.mark.examples(4)
def test_locks_on_postgres_match_the_registry(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(SharedLocks, steps=40, openers=repeat(open_postgres), names=count())


# Layers that are wrong on purpose.


def newcomers_pass_the_line(patch: pytest.MonkeyPatch) -> None:
    take = LockTransaction._take
    patch.setattr(LockTransaction, "_take", lambda *args, is_served: take(*args, is_served=True))


def a_release_serves_no_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockTransaction, "serve", lambda self: self._freed.clear())


def an_expired_session_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockTransaction, "live", LockTransaction.load)


def a_shared_lock_ignores_intents(patch: pytest.MonkeyPatch) -> None:
    conflicts = LockKeys.conflicts
    patch.setattr(LockKeys, "conflicts", lambda self, mode: conflicts(self, mode)[: 1 if mode is Mode.SHARED else 2])


def a_served_claim_stops_at_its_next_lock(patch: pytest.MonkeyPatch) -> None:
    advance = LockTransaction.advance

    def only_once(self: Any, number: str, session: Session, claim: Any, served: Key | None = None) -> None:
        later, claim.steps = (claim.steps[1:], claim.steps[:1]) if served else ([], claim.steps)
        advance(self, number, session, claim, served)
        claim.steps = claim.steps + later

    patch.setattr(LockTransaction, "advance", only_once)


def fences_are_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockTransaction, "_next_fence", lambda self, keys, stored: 1)


def fences_are_repeated_after_a_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fence_floor, "next_fence", lambda tx, *last: max(last) + 1)


def a_write_looks_at_the_first_holders_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(locks, "pages", lambda *args, items: islice(pages(*args, items=items), 1))


@pytest.mark.parametrize(
    "fault",
    [
        newcomers_pass_the_line,
        a_release_serves_no_line,
        an_expired_session_stays,
        a_shared_lock_ignores_intents,
        a_served_claim_stops_at_its_next_lock,
        fences_are_repeated,
        fences_are_repeated_after_a_restore,
        a_write_looks_at_the_first_holders_only,
    ],
)
def test_a_wrong_layer_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    machine = type("WrongLocks", (SharedLocks,), {"openers": repeat(MemoryDatabase), "names": count()})
    bounds = settings(
        max_examples=200,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=bounds)
