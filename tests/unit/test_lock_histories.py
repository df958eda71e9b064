"""The checker of ordered locks accepts the answers of correct locks, and finds each kind of violation."""

from collections.abc import Sequence

import pytest

from fastness.testing.histories import History, Operation, Violation
from fastness.testing.histories.locks import check_locks

ROW = ["record_id", "task/1"]
OTHER_ROW = ["record_id", "task/2"]
TABLE = ["entity_type", "task"]


class Sessions:
    """A history of sessions. Each call returns before the next one is made, unless its operation is ended by hand."""

    def __init__(self) -> None:
        self.history = History()

    def ask(self, claim: str, *paths: list[str], mode: str = "X", lease: int = 0) -> Operation:
        argument = {"paths": list(paths), "mode": mode, "lease": lease}
        return self.history.invoke(claim.partition(".")[0], "acquire", claim, argument)

    def grant(self, operation: Operation, *fences: int) -> None:
        self.history.ok(
            operation, [[*path, fence] for path, fence in zip(operation.argument["paths"], fences, strict=True)]
        )

    def acquire(self, claim: str, *paths: list[str], fences: Sequence[int], mode: str = "X", lease: int = 0) -> None:
        self.grant(self.ask(claim, *paths, mode=mode, lease=lease), *fences)

    def guarded(self, claim: str, path: list[str], fence: int) -> None:
        self.history.ok(self.history.invoke(claim.partition(".")[0], "guarded", claim, [*path, fence]))

    def release(self, claim: str, *, was_held: bool = True) -> None:
        self.history.ok(self.history.invoke(claim.partition(".")[0], "release", claim), was_held)

    def check(self) -> int:
        return len(check_locks(self.history.operations))


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


# Valid histories.


def test_holders_one_after_the_other_and_readers_together_pass(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1])
    sessions.guarded("ada.1", ROW, 1)
    sessions.acquire("bob.1", OTHER_ROW, fences=[1])
    sessions.release("ada.1")
    sessions.release("bob.1")
    sessions.acquire("ada.2", TABLE, mode="S", fences=[1])
    sessions.acquire("bob.2", ROW, mode="S", fences=[2])
    sessions.release("ada.2")
    sessions.release("bob.2")
    sessions.acquire("cem.1", TABLE, fences=[2])
    sessions.release("cem.1")
    assert sessions.check() == 5


def test_a_session_may_acquire_again_what_it_holds(sessions: Sessions) -> None:
    sessions.acquire("ada.1", TABLE, OTHER_ROW, fences=[1, 1])
    sessions.acquire("ada.2", TABLE, mode="S", fences=[1])
    sessions.release("ada.2")
    sessions.release("ada.1")
    sessions.check()


def test_a_grant_may_overlap_the_release_before_it(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1])
    waiting = sessions.ask("bob.1", ROW)
    release = sessions.history.invoke("ada", "release", "ada.1")
    sessions.grant(waiting, 2)
    sessions.history.ok(release, True)
    sessions.release("bob.1")
    sessions.check()


def test_a_lost_holder_is_not_certain_after_its_lease(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1], lease=4)  # Invoked at 1.
    sessions.history.unknown(sessions.ask("cem.1", ROW))
    sessions.acquire("bob.1", ROW, fences=[3])  # Returns at 5.
    sessions.release("ada.1", was_held=False)
    sessions.release("bob.1")
    assert sessions.check() == 2


# Violations.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((ROW, "X"), (ROW, "S")),
        ((ROW, "X"), (TABLE, "S")),
        ((TABLE, "S"), (ROW, "X")),
        ((["database"], "S"), (ROW, "X")),
    ],
)
def test_two_holders_that_exclude_each_other_are_found(
    sessions: Sessions, first: tuple[list[str], str], second: tuple[list[str], str]
) -> None:
    for claim, (path, mode) in (("ada.1", first), ("bob.1", second)):
        asked = sessions.ask(claim, path, mode=mode)
        fence = 1 if claim == "ada.1" else 2
        sessions.history.ok(asked, [[path[0], path[1] if len(path) > 1 else "", fence]])
    sessions.release("ada.1")
    sessions.release("bob.1")
    with pytest.raises(Violation, match=r"had two holders: ada in mode .*, and bob"):
        sessions.check()


def test_a_holder_counts_until_its_last_guarded_write(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1])
    sessions.acquire("bob.1", TABLE, fences=[1])
    sessions.guarded("ada.1", ROW, 1)
    with pytest.raises(Violation, match="entity_type task had two holders"):
        sessions.check()


def test_a_grant_within_the_lease_of_a_lost_holder_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1], lease=4)  # Invoked at 1.
    sessions.acquire("bob.1", ROW, fences=[2])  # Returns at 4.
    with pytest.raises(Violation, match="two holders"):
        sessions.check()


def test_a_lock_against_the_order_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", OTHER_ROW, fences=[1])
    sessions.acquire("ada.2", ROW, fences=[1])
    sessions.release("ada.2")
    sessions.release("ada.1")
    with pytest.raises(Violation, match="ada acquired record_id task/1 while it held record_id task/2"):
        sessions.check()


def test_a_fence_of_two_sessions_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, mode="S", fences=[1])
    sessions.acquire("bob.1", ROW, mode="S", fences=[1])
    with pytest.raises(Violation, match="fence 1 was granted to two sessions"):
        sessions.check()


def test_a_fence_that_goes_back_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, mode="S", fences=[2])
    sessions.acquire("bob.1", ROW, mode="S", fences=[1])
    with pytest.raises(Violation, match="fence 2 had returned before the call that got 1 was made"):
        sessions.check()


def test_an_old_fence_that_is_accepted_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1])
    sessions.release("ada.1")
    sessions.acquire("bob.1", ROW, fences=[2])
    sessions.guarded("ada.1", ROW, 1)
    with pytest.raises(Violation, match="fence 1 was accepted after fence 2 was granted"):
        sessions.check()


def test_an_accepted_fence_that_was_not_granted_is_found(sessions: Sessions) -> None:
    sessions.acquire("ada.1", ROW, fences=[1])
    sessions.guarded("ada.1", ROW, 2)
    with pytest.raises(Violation, match="fence 2 was accepted, but was not granted"):
        sessions.check()


def test_an_answer_without_a_requested_lock_is_found(sessions: Sessions) -> None:
    asked = sessions.ask("ada.1", ROW, OTHER_ROW)
    sessions.history.ok(asked, [[*ROW, 1]])
    with pytest.raises(Violation, match="were requested"):
        sessions.check()
