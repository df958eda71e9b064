"""Ordered locks in the key space, as functions over a transaction, on every backend."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from fastness.errors import (
    Busy,
    FastnessError,
    FencingMismatch,
    IdempotencyKeyReused,
    InvalidArgument,
    KeyTooLarge,
    LeaseExpired,
    LockOrderViolation,
)
from fastness.kv import Database, Transaction, fence_floor
from fastness.layers import lock_records, lock_transaction, locks
from fastness.layers.lock_records import SessionKey, session_key
from fastness.layers.lock_transaction import Waiting
from fastness.limits import (
    LOCK_CLAIM_PATHS_MAX,
    LOCK_LATE_MS_MAX,
    LOCK_SESSION_BYTES_MAX,
    LOCK_SESSION_LOCKS_MAX,
    LOCK_SESSIONS_ENDED_MAX,
    VALUE_BYTES_MAX,
)
from fastness.lock_rules import Mode
from fastness.runtime.maintenance import retention
from fastness.testing.clock import ManualClock
from fastness.wire.locks import GrantedLocks, LockProof, LockSession
from tests.support.failures import Failures

LEASE_MS = 10_000
ROW = ("record_id", "task/1")
OTHER_ROW = ("record_id", "task/2")
TABLE = ("entity_type", "task")
ALL = ("database",)


class Caller:
    """A session with its claims, as a thread would use it."""

    def __init__(self, database: Database, name: str) -> None:
        self.database = database
        self.session = LockSession(f"secret-id-of-{name}-0123")
        self.name = name

    def acquire(
        self,
        *paths: Sequence[str],
        mode: str = "X",
        claim: str = "c1",
        may_wait: bool = True,
        continues: bool = False,
        attempt: str = "",
    ) -> GrantedLocks | Waiting:
        steps = locks.steps_of(paths, mode)
        call = locks.AcquireCall(self.session, claim, steps, self.name, LEASE_MS, continues, attempt)
        return self.database.transact(locks.acquire, call, may_wait=may_wait)

    def fence(self, *paths: Sequence[str], mode: str = "X", claim: str = "c1") -> int:
        """Acquire locks that are free, and return the fence of the last of them."""
        granted = self.acquire(*paths, mode=mode, claim=claim, may_wait=False)
        assert isinstance(granted, GrantedLocks), granted
        return granted.locks[-1].fence

    def release(self, claim: str = "c1", attempt: str | None = None) -> bool:
        return self.database.transact(locks.release, self.session, claim, attempt=attempt)

    def renew(self) -> int:
        return self.database.transact(locks.renew, self.session, lease_ms=LEASE_MS)

    def check(self, path: tuple[str, str], fence: int) -> int:
        return self.database.read(locks.check, LockProof(self.session, *path, fence))

    @property
    def key(self) -> SessionKey:
        return session_key(self.session)


@pytest.fixture
def caller(database: Database) -> Callable[[str], Caller]:
    return lambda name: Caller(database, name)


def everything(tx: Transaction) -> list[bytes]:
    return [key for key, _ in tx.scan(b"\x02u", b"\x02v", limit=10_000)]


def held(database: Database) -> dict[str, list[str]]:
    """What the sessions hold and wait for, by owner."""
    found = {}
    for number, session in database.read(locks.page, "main", after="", limit=100):
        shown = locks.describe(number, session)
        found[shown.owner] = [
            f"{'waits ' if lock.is_waiting else ''}{lock.mode} {lock.name or lock.level}" for lock in shown.locks
        ]
    return found


def test_a_row_lock_takes_intents_above_it_and_leaves_only_its_fence(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada = caller("ada")
    granted = ada.acquire(ROW)
    assert isinstance(granted, GrantedLocks)
    assert [(lock.level, lock.name, lock.mode, lock.fence) for lock in granted.locks] == [(*ROW, "X", 1)]
    assert held(database) == {"ada": ["IX database", "IX task", "X task/1"]}
    assert ada.acquire(ROW) == granted  # A repeated call gets the same answer.
    assert (ada.release(), ada.release()) == (True, False)
    fence = lock_records.keys_of("main", (2, "task/1")).fence
    assert (held(database), database.read(everything)) == ({}, [lock_records.use_key("main"), fence])
    assert ada.fence(ROW) == 2


@pytest.mark.parametrize(
    ("first", "second", "is_compatible"),
    [
        ((ROW, "X"), (ROW, "S"), False),
        ((ROW, "S"), (ROW, "S"), True),
        ((ROW, "X"), (OTHER_ROW, "X"), True),
        ((ROW, "X"), (TABLE, "S"), False),
        ((ROW, "S"), (TABLE, "S"), True),
        ((ROW, "S"), (TABLE, "X"), False),
        ((TABLE, "S"), (ROW, "S"), True),
        ((TABLE, "S"), (ROW, "X"), False),
        ((TABLE, "IX"), (TABLE, "IS"), True),
        ((TABLE, "IX"), (TABLE, "S"), False),
        ((TABLE, "X"), (TABLE, "IS"), False),
        ((TABLE, "X"), (("entity_type", "user"), "X"), True),
        ((ALL, "S"), (ROW, "X"), False),
        ((ALL, "S"), (ROW, "S"), True),
        ((ALL, "X"), (ROW, "S"), False),
    ],
)
def test_which_locks_exclude_each_other(
    database: Database,
    caller: Callable[[str], Caller],
    first: tuple[tuple[str, ...], str],
    second: tuple[tuple[str, ...], str],
    is_compatible: bool,
) -> None:
    for one, other in ((first, second), (second, first)):
        ada, bob = caller("ada"), caller("bob")
        ada.fence(one[0], mode=one[1])
        before = database.read(everything)
        outcome = bob.acquire(other[0], mode=other[1], may_wait=False)
        assert isinstance(outcome, GrantedLocks) is is_compatible
        if isinstance(outcome, Waiting):
            assert [holder for holder, _ in outcome.holders] == ["ada"]
            assert database.read(everything) == before  # A claim that may not wait leaves nothing.
        bob.release()
        ada.release()


def test_a_line_is_served_in_order_and_no_newcomer_passes_it(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada, bob, carl, dora = map(caller, ("ada", "bob", "carl", "dora"))
    ada.fence(ROW, mode="S")
    waiting = bob.acquire(ROW)
    assert isinstance(waiting, Waiting)
    assert (waiting.holders, waiting.in_line) == ([("ada", Mode.SHARED)], 0)
    waiting = carl.acquire(ROW, mode="S")  # It would fit beside ada, but bob was first.
    assert isinstance(waiting, Waiting)
    assert waiting.in_line == 1
    assert isinstance(dora.acquire(TABLE), Waiting)
    assert held(database) == {
        "ada": ["IS database", "IS task", "S task/1"],
        "bob": ["IX database", "IX task", "waits X task/1"],
        "carl": ["IS database", "IS task", "waits S task/1"],
        "dora": ["IX database", "waits X task"],
    }
    ada.release()
    assert isinstance(bob.acquire(ROW), GrantedLocks)
    bob.release()
    assert isinstance(carl.acquire(ROW, mode="S"), GrantedLocks)
    assert isinstance(dora.acquire(TABLE), Waiting)
    carl.release()
    assert isinstance(dora.acquire(TABLE), GrantedLocks)


def test_a_claim_goes_on_from_line_to_line(database: Database, caller: Callable[[str], Caller]) -> None:
    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(ROW)
    bob.fence(OTHER_ROW)
    assert isinstance(carl.acquire(OTHER_ROW, ROW), Waiting)
    ada.release()
    assert held(database)["carl"] == ["IX database", "IX task", "X task/1", "waits X task/2"]
    bob.release()
    granted = carl.acquire(OTHER_ROW, ROW)
    assert isinstance(granted, GrantedLocks)
    assert [(lock.name, lock.fence) for lock in granted.locks] == [("task/1", 2), ("task/2", 2)]


def test_claims_of_one_session_nest_in_lock_order(database: Database, caller: Callable[[str], Caller]) -> None:
    ada, bob = caller("ada"), caller("bob")
    fence = ada.fence(OTHER_ROW, claim="outer")
    with pytest.raises(LockOrderViolation, match=r"task/1 comes before record_id task/2"):
        ada.acquire(ROW, claim="inner")
    with pytest.raises(LockOrderViolation, match=r"entity_type task is held in mode IX; .* Acquire it in mode X"):
        ada.acquire(TABLE, mode="S", claim="inner")
    assert isinstance(bob.acquire(TABLE), Waiting)
    # It holds both already, so it waits neither for them nor behind bob.
    assert ada.fence(OTHER_ROW, mode="S", claim="inner") == fence
    assert ada.fence(TABLE, mode="IX", claim="intent") == 1
    ada.release("outer")
    assert ada.check(OTHER_ROW, fence) == fence
    assert isinstance(bob.acquire(TABLE), Waiting)
    ada.release("inner")
    ada.release("intent")
    granted = bob.acquire(TABLE)
    assert isinstance(granted, GrantedLocks)
    assert granted.locks[0].fence == 2


def test_a_session_and_all_of_its_locks_end_with_its_lease(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada, bob, carl, dora = map(caller, ("ada", "bob", "carl", "dora"))
    fence = ada.fence(ROW)
    clock.advance_ms(LEASE_MS - 1)
    assert isinstance(bob.acquire(ROW), Waiting)  # bob crashes as well, a little later.
    clock.advance_ms(LEASE_MS - 1)
    waiting = carl.acquire(ROW)  # It ends ada's session; the lock is bob's for a millisecond.
    assert isinstance(waiting, Waiting)
    assert (waiting.holders, waiting.wake_ms - clock.now_ms()) == ([("bob", Mode.EXCLUSIVE)], 1)
    with pytest.raises(LeaseExpired, match="record_id task/1 has ended"):
        ada.check(ROW, fence)
    with pytest.raises(LeaseExpired):
        ada.renew()
    with pytest.raises(LeaseExpired):
        ada.acquire(OTHER_ROW, claim="c2", continues=True)
    assert ada.release() is False
    clock.advance_ms(1)
    granted = carl.acquire(ROW)
    assert isinstance(granted, GrantedLocks)
    assert granted.locks[0].fence == fence + 2
    assert held(database).keys() == {"carl"}
    clock.advance_ms(LEASE_MS)
    assert dora.fence(ROW) == fence + 3  # Without waiting, too.
    assert database.transact(locks.reap, carl.key) == []


def test_an_expired_session_is_no_longer_in_the_way_at_the_front_of_a_line(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(ROW)
    bob.acquire(ROW)
    clock.advance_ms(LEASE_MS // 2)
    ada.renew()
    carl.acquire(ROW)
    clock.advance_ms(LEASE_MS // 2)
    ada.release()
    assert held(database).keys() == {"carl"}
    assert isinstance(carl.acquire(ROW), GrantedLocks)


def test_many_expired_sessions_are_ended_by_several_commits(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    for number in range(LOCK_SESSIONS_ENDED_MAX + 2):
        caller(f"reader-{number}").acquire(ROW, mode="S")
    clock.advance_ms(LEASE_MS)
    writer = caller("writer")
    outcomes = []
    for _ in range(4):
        outcomes.append(writer.acquire(ROW))
        if isinstance(outcomes[-1], GrantedLocks):
            break
        assert outcomes[-1].wake_ms == clock.now_ms()  # There are more: it is called again at once.
    assert isinstance(outcomes[-1], GrantedLocks)
    assert len(outcomes) > 1
    assert held(database).keys() == {"writer"}


def test_a_waiting_claim_renews_its_session(caller: Callable[[str], Caller], clock: ManualClock) -> None:
    ada, bob = caller("ada"), caller("bob")
    ada.fence(ROW)
    for _ in range(6):
        assert isinstance(bob.acquire(ROW), Waiting)
        ada.renew()
        clock.advance_ms(LEASE_MS // 2)
    ada.release()
    assert isinstance(bob.acquire(ROW), GrantedLocks)


def test_a_claim_that_may_not_wait_longer_ends(database: Database, caller: Callable[[str], Caller]) -> None:
    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(OTHER_ROW)
    bob.acquire(ROW, OTHER_ROW)  # Holds the first row while it waits for the other one.
    carl.acquire(ROW)
    assert isinstance(bob.acquire(ROW, OTHER_ROW, may_wait=False), Waiting)
    assert held(database).keys() == {"ada", "carl"}
    assert isinstance(carl.acquire(ROW), GrantedLocks)


def test_a_new_claim_gives_up_one_that_still_waits(database: Database, caller: Callable[[str], Caller]) -> None:
    ada, bob = caller("ada"), caller("bob")
    ada.fence(ROW)
    bob.acquire(ROW, claim="cancelled")
    bob.fence(OTHER_ROW, claim="next")
    assert held(database)["bob"] == ["IX database", "IX task", "X task/2"]
    bob.release("next")
    bob.acquire(ROW, claim="cancelled-too")
    assert isinstance(bob.acquire(ROW, claim="last", may_wait=False), Waiting)
    assert held(database).keys() == {"ada"}


def test_a_claim_is_repeated_only_for_the_same_locks_in_the_same_mode(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada, bob = caller("ada"), caller("bob")
    granted, waiting = ada.acquire(ROW, mode="S"), bob.acquire(ROW, OTHER_ROW)
    assert isinstance(waiting, Waiting)
    before = held(database)
    for paths, mode in (([OTHER_ROW], "S"), ([ROW], "X"), ([ROW, OTHER_ROW], "S"), ([TABLE], "S")):
        with pytest.raises(IdempotencyKeyReused, match="a claim c1 for other locks"):
            ada.acquire(*paths, mode=mode)
    for paths, mode in (([ROW], "X"), ([ROW, OTHER_ROW], "S")):
        with pytest.raises(IdempotencyKeyReused):
            bob.acquire(*paths, mode=mode)
    assert held(database) == before
    assert ada.acquire(ROW, mode="S") == granted
    assert isinstance(bob.acquire(OTHER_ROW, ROW), Waiting)  # The order of the paths does not matter.
    ada.release()
    assert isinstance(bob.acquire(ROW, OTHER_ROW), GrantedLocks)
    ada.acquire(OTHER_ROW, mode="S")  # A claim that was released is a new one.


def test_a_call_that_was_given_up_does_not_release_what_its_repetition_got(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada, bob = caller("ada"), caller("bob")
    bob.fence(ROW)
    ada.acquire(ROW, attempt="first")
    bob.release()
    granted = ada.acquire(ROW, attempt="second")
    assert isinstance(granted, GrantedLocks)
    assert ada.release(attempt="first") is False
    assert ada.check(ROW, granted.locks[0].fence)
    assert ada.release(attempt="second") is True
    assert held(database) == {}


def test_a_fence_is_checked_against_the_lock_that_is_held(caller: Callable[[str], Caller]) -> None:
    ada = caller("ada")
    first = ada.fence(ROW)
    ada.release()
    second = ada.fence(ROW)
    assert ada.check(ROW, second) == second
    with pytest.raises(FencingMismatch, match=f"is {second}, not {first}"):
        ada.check(ROW, first)
    with pytest.raises(FencingMismatch):
        ada.check(TABLE, 0)  # An intent has no fence.
    with pytest.raises(LeaseExpired, match="was released"):
        ada.check(OTHER_ROW, 1)


def test_fences_are_above_the_floor(database: Database, caller: Callable[[str], Caller]) -> None:
    def with_floor(tx: Transaction) -> int:
        tx.fence_floor = fence_floor.STEP
        ada = caller("ada")
        call = locks.AcquireCall(ada.session, "c1", locks.steps_of([ROW], "X"), "ada", LEASE_MS)
        granted = locks.acquire(tx, call, may_wait=False)
        assert isinstance(granted, GrantedLocks)
        return granted.locks[0].fence

    assert database.transact(with_floor) == fence_floor.STEP + 1


def test_a_session_from_a_clock_that_was_ahead_ends_its_lease_after_the_correction(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada, bob = caller("ada"), caller("bob")
    now_ms = clock.now_ms()
    clock.advance_ms(7_200_000)
    ada.fence(ROW)
    clock.jump_to_ms(now_ms)
    waiting = bob.acquire(ROW, may_wait=False)
    assert isinstance(waiting, Waiting)
    assert waiting.wake_ms == now_ms + LEASE_MS
    clock.advance_ms(LEASE_MS - LOCK_LATE_MS_MAX)
    assert isinstance(bob.acquire(ROW, may_wait=False), Waiting)
    clock.advance_ms(LOCK_LATE_MS_MAX)
    assert isinstance(bob.acquire(ROW, may_wait=False), GrantedLocks)


def test_what_excludes_a_write_of_rows(database: Database, caller: Callable[[str], Caller], clock: ManualClock) -> None:
    def excluding(session: str | None = None) -> list[str]:
        rows = [("task", "1"), ("task", "2")]
        return [
            f"{each.owner} {each.mode} {each.key[1]}"
            for each in database.read(locks.obstacles, "main", rows, session=session)
        ]

    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(TABLE, mode="S")
    bob.fence(ROW, mode="S")
    carl.acquire(TABLE)  # A claim that waits excludes no write.
    assert excluding() == ["ada S task", "bob S task/1"]
    assert excluding(ada.session.id) == ["bob S task/1"]
    before = database.read(everything)
    ada.release()
    bob.release()
    assert excluding() == ["carl X task"]
    assert excluding(carl.session.id) == []
    clock.advance_ms(LEASE_MS)
    assert excluding() == []
    assert before


@pytest.mark.parametrize("how", ["never began", "expired", "ended", "all ended"])
def test_a_write_of_a_session_that_is_not_live_is_refused(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock, how: str
) -> None:
    ada = caller("ada")
    if how != "never began":
        ada.fence(ROW)
    if how == "expired":
        clock.advance_ms(LEASE_MS)
    elif how != "never began":
        database.transact(locks.end, ada.key)
    if how == "ended":
        caller("bob").fence(OTHER_ROW)
    assert database.read(locks.obstacles, "main", [("task", "1")]) == []
    with pytest.raises(LeaseExpired, match="the locks of this write has ended"):
        database.read(locks.obstacles, "main", [("task", "1")], session=ada.session.id)


@pytest.mark.parametrize("mode", ["S", "IX"])
def test_a_write_meets_a_live_holder_after_any_number_of_expired_ones(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(locks, "LOCK_OBSTACLES_MAX", 4)
    path = TABLE if mode == "S" else ROW  # Of a row, an intent is in the way, too.
    crowd = sorted((caller(f"caller-{number}") for number in range(13)), key=lambda each: each.key)
    for each in crowd[:-1]:
        each.fence(path, mode=mode)
    clock.advance_ms(LEASE_MS)
    assert database.read(locks.obstacles, "main", [("task", "1")]) == []
    crowd[-1].fence(path, mode=mode)
    (found,) = database.read(locks.obstacles, "main", [("task", "1")])
    assert found.owner == crowd[-1].name
    assert len(held(database)) == len(crowd)  # The expired ones are still there.


def test_a_session_is_listed_and_ended_without_its_secret(database: Database, caller: Callable[[str], Caller]) -> None:
    ada, bob = caller("ada"), caller("bob")
    fence = ada.fence(ROW)
    bob.acquire(ROW)
    stored = database.read(lambda tx: tx.scan(b"\x02u", b"\x02v", limit=1_000))
    assert not any(b"secret" in key + value for key, value in stored)
    first = database.read(locks.page, "main", after="", limit=1)
    second = database.read(locks.page, "main", after=first[0][0], limit=1)
    assert {number for number, _ in first + second} == {ada.key.number, bob.key.number}
    assert database.transact(locks.end, ada.key) is True
    assert database.transact(locks.end, ada.key) is False
    assert isinstance(bob.acquire(ROW), GrantedLocks)
    with pytest.raises(LeaseExpired):
        ada.check(ROW, fence)


def test_expired_sessions_that_nothing_meets_are_ended_by_the_upkeep(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(ROW)
    bob.acquire(ROW)
    clock.advance_ms(LEASE_MS // 2)
    carl.fence(OTHER_ROW)
    assert retention.end_lock_sessions(database) == 0
    clock.advance_ms(LEASE_MS // 2)
    assert retention.end_lock_sessions(database) == 2
    assert held(database).keys() == {"carl"}


def test_a_full_line_refuses_more(
    database: Database, caller: Callable[[str], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCK_LINE_MAX", 2)
    caller("ada").fence(ROW)
    waiting = [caller(f"w{number}") for number in range(4)]
    for each in waiting[:2]:
        each.acquire(ROW)
    with pytest.raises(Busy, match="2 claims already wait for record_id task/1"):
        waiting[2].acquire(ROW)
    waiting[1].release()
    assert isinstance(waiting[2].acquire(ROW), Waiting)
    assert len(held(database)) == 3


def test_invalid_arguments_write_nothing(database: Database, caller: Callable[[str], Caller]) -> None:
    failures = Failures()
    uses: list[Callable[[Caller], object]] = [
        lambda ada: locks.steps_of([ROW], "Z"),
        lambda ada: locks.steps_of([("record_id", "task_1")], "X"),
        lambda ada: locks.steps_of([("row", "task/1")], "X"),
    ]
    for use in uses:
        with failures.of(use):
            with pytest.raises(InvalidArgument):
                use(caller("ada"))
            assert database.read(everything) == []
    failures.check()


def test_a_session_holds_a_bounded_number_of_locks(database: Database, caller: Callable[[str], Caller]) -> None:
    ada = caller("ada")
    with pytest.raises(InvalidArgument, match="at most 1,024 locks"):
        for number in range(LOCK_SESSION_LOCKS_MAX // LOCK_CLAIM_PATHS_MAX + 1):
            paths = [("record_id", f"task/{number}-{row:03}") for row in range(LOCK_CLAIM_PATHS_MAX)]
            ada.acquire(*paths, claim=f"c{number}")
    for number in range(4):
        with suppress(FastnessError):
            ada.release(f"c{number}")
    assert held(database) == {}


def long_rows(count: int, prefix: str) -> list[tuple[str, str]]:
    """Rows with names of 1,500 bytes in 502 characters."""
    return [("record_id", f"{prefix}{number:03}" + "\u20ac" * 497) for number in range(count)]


def test_what_a_session_waits_for_can_be_stored_when_others_grant_it(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    """A release would fail if it could not store what it grants, and so would the next one, and the sweep."""
    database.transact(fence_floor.raise_floor)  # So that fences are long.
    ada, bob = caller("ada"), caller("bob")
    bob.fence(("record_id", "z/c"))
    ada.fence(*long_rows(250, "z/a"), claim="c1")
    ada.fence(*long_rows(230, "z/b"), claim="c2")
    with pytest.raises(InvalidArgument, match=r"take at most 786,432 bytes, and with these they could take 1,0\d\d,"):
        ada.acquire(("record_id", "z/c"), *long_rows(200, "z/c"), claim="c3")
    assert isinstance(ada.acquire(("record_id", "z/c"), *long_rows(25, "z/c"), claim="c3"), Waiting)
    assert bob.release()
    stored = database.read(Transaction.get, lock_records.record_key(ada.key))
    assert stored is not None
    session = lock_records.decode_session(stored)
    assert session.waiting() is None
    assert len(stored) <= session.bytes_max() <= LOCK_SESSION_BYTES_MAX < VALUE_BYTES_MAX


def test_a_name_that_is_too_long_for_a_key_is_refused_before_it_waits(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    caller("bob").fence(ROW)
    with pytest.raises(KeyTooLarge, match=r"record_id z/.* may have 2,048; shorten the name"):
        caller("ada").acquire(ROW, ("record_id", "z/" + "\U0001f512" * 510))
    assert held(database).keys() == {"bob"}


def test_a_long_line_is_served_by_several_commits(
    database: Database, caller: Callable[[str], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of limited size: the callers that wait serve the rest when they ask again."""
    monkeypatch.setattr(lock_transaction, "LOCK_COMMIT_BYTES_MAX", 6_000)
    ada, readers = caller("ada"), [caller(f"reader-{number}") for number in range(9)]
    ada.fence(ROW)
    for each in readers:
        assert isinstance(each.acquire(ROW, mode="S"), Waiting)
    assert ada.release()

    def granted() -> int:
        return sum(locks[-1] == "S task/1" for locks in held(database).values())

    counts = [granted()]
    for each in readers:
        assert isinstance(each.acquire(ROW, mode="S"), GrantedLocks)
        counts.append(granted())
    assert 0 < counts[0] < counts[-2]
    assert counts[-1] == len(readers)
    assert len(set(counts)) < len(readers)  # Some commits have served several.


def test_a_waiting_claim_gets_the_lock_of_a_session_whose_record_was_lost(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada, bob = caller("ada"), caller("bob")
    ada.fence(ROW)
    assert isinstance(bob.acquire(ROW), Waiting)
    database.transact(Transaction.delete, lock_records.record_key(ada.key))
    assert isinstance(bob.acquire(ROW), GrantedLocks)


def test_an_expired_holder_is_ended_by_the_release_of_another(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada, bob, carl = map(caller, ("ada", "bob", "carl"))
    ada.fence(ROW, mode="S")
    clock.advance_ms(LEASE_MS // 2)
    bob.fence(ROW, mode="S")
    assert isinstance(carl.acquire(ROW), Waiting)
    clock.advance_ms(LEASE_MS // 2)
    bob.release()
    assert held(database) == {"carl": ["IX database", "IX task", "X task/1"]}


def test_a_line_of_more_expired_claims_than_one_commit_ends_is_served_by_the_next(
    database: Database, caller: Callable[[str], Caller], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_transaction, "LOCK_SESSIONS_ENDED_MAX", 1)
    ada, bob, carl, dora = map(caller, ("ada", "bob", "carl", "dora"))
    ada.fence(ROW)
    for each in (bob, carl):
        each.acquire(ROW)
    clock.advance_ms(LEASE_MS // 2)
    ada.renew()
    dora.acquire(ROW)
    clock.advance_ms(LEASE_MS // 2)
    ada.release()
    assert held(database).keys() == {"carl", "dora"}
    assert isinstance(dora.acquire(ROW), GrantedLocks)
    assert held(database).keys() == {"dora"}


def test_the_lock_of_a_session_whose_record_was_lost_is_granted(
    database: Database, caller: Callable[[str], Caller]
) -> None:
    ada, bob = caller("ada"), caller("bob")
    fence = ada.fence(ROW)
    database.transact(Transaction.delete, lock_records.record_key(ada.key))
    assert bob.fence(ROW) == fence + 1


def test_a_lock_with_many_holders_is_read_in_parts(
    database: Database, caller: Callable[[str], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_transaction, "LOCK_PAIRS_READ_MAX", 2)
    readers = [caller(f"reader-{number}") for number in range(3)]
    for each in readers:
        each.fence(ROW, mode="S")
    writers = [caller(f"writer-{number}") for number in range(2)]
    for each in writers:
        assert isinstance(each.acquire(ROW), Waiting)
    for each in readers:
        each.release()
    assert {name: last for name, (*_, last) in held(database).items()} == {
        "writer-0": "X task/1",
        "writer-1": "waits X task/1",
    }
