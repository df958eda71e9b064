"""The lease checker accepts the answers of a correct lease, and finds each kind of violation."""

from typing import Any

import pytest

from fastness.testing.histories import History, Operation, Violation
from fastness.testing.histories.leases import check_lease


@pytest.fixture
def history() -> History:
    return History()


def done(history: History, kind: str, argument: Any = None, result: Any = None) -> Operation:
    """An operation that returned before anything else was invoked."""
    return history.ok(history.invoke("ada", kind, "deploy", argument), result)


def grant(history: History, fence: int, acquired_ms: int, expires_ms: int) -> Operation:
    return done(history, "grant", f"owner-{fence}", [fence, acquired_ms, expires_ms])


# Valid histories.


def test_grants_one_after_the_other_pass(history: History) -> None:
    grant(history, 1, 0, 100)
    done(history, "keepalive", 1, 200)
    done(history, "guarded", 1)
    grant(history, 2, 200, 300)
    done(history, "release", 1, False)
    done(history, "release", 2, True)
    grant(history, 4, 210, 300)
    assert [holder.fence for holder in check_lease(history, "deploy")] == [1, 2, 4]


def test_other_leases_are_ignored(history: History) -> None:
    grant(history, 1, 0, 100)
    history.ok(history.invoke("bob", "grant", "other", "bob"), [1, 50, 150])
    check_lease(history, "deploy")
    check_lease(history, "other")


@pytest.mark.parametrize("end", ["ok", "unknown"])
def test_a_grant_may_overlap_a_release(history: History, end: str) -> None:
    grant(history, 1, 0, 100)
    release = history.invoke("ada", "release", "deploy", 1)
    grant(history, 2, 50, 150)
    history.ok(release, True) if end == "ok" else history.unknown(release)
    check_lease(history, "deploy")


def test_grants_whose_answer_was_lost_are_not_checked(history: History) -> None:
    history.unknown(history.invoke("bob", "grant", "deploy", "bob"))
    history.failed(history.invoke("cem", "grant", "deploy", "cem"))
    grant(history, 3, 0, 100)
    assert len(check_lease(history, "deploy")) == 1


def test_a_call_that_overlaps_the_next_grant_passes(history: History) -> None:
    grant(history, 1, 0, 100)
    write = history.invoke("ada", "guarded", "deploy", 1)
    grant(history, 2, 100, 200)
    history.ok(write)
    check_lease(history, "deploy")


# Violations.


def test_two_holders_at_once_are_found(history: History) -> None:
    grant(history, 1, 0, 100)
    grant(history, 2, 99, 200)
    with pytest.raises(Violation, match="two holders: fence 1 until 100, and fence 2 from 99"):
        check_lease(history, "deploy")


def test_a_holder_that_renewed_counts_until_its_new_expiry(history: History) -> None:
    grant(history, 1, 0, 100)
    done(history, "keepalive", 1, 500)
    grant(history, 2, 499, 600)
    with pytest.raises(Violation, match="until 500"):
        check_lease(history, "deploy")


def test_two_holders_are_found_although_others_are_between_them(history: History) -> None:
    grant(history, 1, 0, 1_000)
    history.unknown(history.invoke("bob", "release", "deploy", 2))
    grant(history, 2, 2_000, 2_001)
    grant(history, 3, 999, 3_000)
    with pytest.raises(Violation, match="fence 1 until 1000, and fence 3 from 999"):
        check_lease(history, "deploy")


def test_a_failed_release_releases_nothing(history: History) -> None:
    grant(history, 1, 0, 100)
    history.failed(history.invoke("ada", "release", "deploy", 1))
    grant(history, 2, 50, 200)
    with pytest.raises(Violation, match="two holders"):
        check_lease(history, "deploy")


def test_a_release_after_the_next_grant_explains_nothing(history: History) -> None:
    grant(history, 1, 0, 100)
    grant(history, 2, 50, 200)
    done(history, "release", 1, False)
    with pytest.raises(Violation, match="two holders"):
        check_lease(history, "deploy")


def test_a_fence_that_is_granted_twice_is_found(history: History) -> None:
    grant(history, 1, 0, 100)
    grant(history, 1, 100, 200)
    with pytest.raises(Violation, match="fence 1 was granted twice"):
        check_lease(history, "deploy")


def test_a_fence_that_goes_back_is_found(history: History) -> None:
    grant(history, 2, 0, 100)
    grant(history, 1, 100, 200)
    with pytest.raises(Violation, match="fence 2 had returned before the call that got 1 was made"):
        check_lease(history, "deploy")


@pytest.mark.parametrize(("kind", "result"), [("keepalive", 300), ("guarded", None), ("release", True)])
def test_an_old_fence_that_is_accepted_is_found(history: History, kind: str, result: object) -> None:
    grant(history, 1, 0, 100)
    grant(history, 2, 400, 500)
    done(history, kind, 1, result)
    with pytest.raises(Violation, match=f"{kind} with fence 1 was accepted after fence 2 had been granted"):
        check_lease(history, "deploy")


@pytest.mark.parametrize(("kind", "result"), [("keepalive", 300), ("guarded", None), ("release", True)])
def test_a_fence_that_is_accepted_after_its_release_is_found(history: History, kind: str, result: object) -> None:
    grant(history, 1, 0, 100)
    done(history, "release", 1, True)
    done(history, kind, 1, result)
    with pytest.raises(Violation, match="was accepted after its release"):
        check_lease(history, "deploy")
