"""The queue checker accepts the answers of a correct queue, and finds each kind of violation."""

from collections.abc import Callable
from typing import Any

import pytest

from fastness.errors import InvalidArgument
from fastness.testing.histories import History, Operation, Violation
from fastness.testing.histories.queues import check_queue


@pytest.fixture
def history() -> History:
    return History()


def done(history: History, kind: str, argument: Any = None, result: Any = None) -> Operation:
    """An operation that returned before anything else was invoked."""
    return history.ok(history.invoke("ada", kind, "jobs", argument), result)


def lost(history: History, kind: str, argument: Any = None) -> Operation:
    return history.unknown(history.invoke("bob", kind, "jobs", argument))


def failed(history: History, kind: str, argument: Any = None) -> Operation:
    return history.failed(history.invoke("cem", kind, "jobs", argument))


def put(history: History, id: str = "m") -> Operation:
    return done(history, "put", f"body of {id}", id)


def lease(history: History, fence: int, leased_ms: int, expires_ms: int, id: str = "m") -> Operation:
    return done(history, "lease", None, [[id, fence, leased_ms, expires_ms]])


# Valid histories.


def test_an_empty_history_passes(history: History) -> None:
    assert check_queue(history, "jobs") == {}


def test_a_delivered_and_acked_message_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    deliveries = check_queue(history, "jobs")
    assert [grant.fence for grant in deliveries["m"]] == [1]


@pytest.mark.parametrize("state", ["left", "dead"])
def test_a_queued_or_dead_message_passes(history: History, state: str) -> None:
    put(history)
    options: dict[str, Any] = {state: ["m"]}
    check_queue(history, "jobs", **options)


def test_operations_on_other_queues_are_ignored(history: History) -> None:
    history.ok(history.invoke("ada", "put", "other", None), "m")
    check_queue(history, "jobs")
    with pytest.raises(Violation, match="is lost"):
        check_queue(history, "other")


def test_a_delivery_after_an_expired_lease_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 100, 200)
    failed(history, "ack", ["m", 1])
    done(history, "ack", ["m", 2])
    check_queue(history, "jobs")


def test_a_delivery_that_took_effect_after_its_time_passes(history: History) -> None:
    """Another transaction with a later time processed the expiry, and committed before it."""
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 90, 200)
    check_queue(history, "jobs", left=["m"], late_ms=10)
    with pytest.raises(Violation, match="two owners: fence 1 until 100, and fence 2 from 90"):
        check_queue(history, "jobs", left=["m"], late_ms=9)


def test_a_late_extension_before_the_next_delivery_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "extend", ["m", 1], 900)
    lease(history, 2, 900, 1_000)
    check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize("kind", ["nack", "reject"])
@pytest.mark.parametrize("end", [done, lost])
def test_a_delivery_after_a_possible_release_passes(history: History, kind: str, end: Callable[..., Operation]) -> None:
    put(history)
    lease(history, 1, 0, 100)
    end(history, kind, ["m", 1])
    lease(history, 2, 5, 105)
    check_queue(history, "jobs", left=["m"])


def test_a_nack_that_overlaps_with_the_next_lease_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    nack = history.invoke("ada", "nack", "jobs", ["m", 1])
    second = history.invoke("bob", "lease", "jobs")
    history.ok(second, [["m", 2, 5, 105]])
    history.ok(nack)
    check_queue(history, "jobs", left=["m"])


def test_a_repeated_ack_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lost(history, "ack", ["m", 1])
    done(history, "ack", ["m", 1])
    done(history, "ack", ["m", 1])
    check_queue(history, "jobs")


@pytest.mark.parametrize("left", [[], ["m"]])
def test_an_ack_with_a_lost_answer_may_or_may_not_have_happened(history: History, left: list[str]) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lost(history, "ack", ["m", 1])
    check_queue(history, "jobs", left=left)


def test_a_put_with_a_lost_answer_explains_one_unknown_message(history: History) -> None:
    lost(history, "put", "body")
    lease(history, 1, 0, 100, id="x")
    check_queue(history, "jobs", left=["x"])


def test_repeated_puts_with_one_id_pass(history: History) -> None:
    lost(history, "put", "body")
    put(history)
    put(history)
    check_queue(history, "jobs", left=["m"])


def test_a_gap_between_fences_after_a_lost_lease_passes(history: History) -> None:
    put(history)
    lost(history, "lease")
    lease(history, 2, 100, 200)
    check_queue(history, "jobs", left=["m"])


def test_overlapping_leases_may_return_in_any_order(history: History) -> None:
    put(history)
    one = history.invoke("ada", "lease", "jobs")
    other = history.invoke("bob", "lease", "jobs")
    history.ok(other, [["m", 2, 100, 200]])
    history.ok(one, [["m", 1, 0, 100]])
    check_queue(history, "jobs", left=["m"])


def test_an_extension_that_returns_after_an_ack_passes(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    extension = history.invoke("renewer", "extend", "jobs", ["m", 1])
    done(history, "ack", ["m", 1])
    history.ok(extension, 150)
    check_queue(history, "jobs")


# Violations.


def test_a_lost_acknowledged_put_is_found(history: History) -> None:
    put(history)
    with pytest.raises(Violation, match="acknowledged and is lost") as caught:
        check_queue(history, "jobs")
    assert [each.kind for each in caught.value.operations] == ["put"]


def test_a_message_lost_while_leased_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    failed(history, "ack", ["m", 1])
    with pytest.raises(Violation, match="acknowledged and is lost"):
        check_queue(history, "jobs")


def test_a_message_lost_by_its_nack_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "nack", ["m", 1])
    with pytest.raises(Violation, match="acknowledged and is lost"):
        check_queue(history, "jobs")


def test_a_message_that_was_never_put_is_found(history: History) -> None:
    failed(history, "put", "body")
    lease(history, 1, 0, 100)
    with pytest.raises(Violation, match="0 puts lost their answer, but 1 messages have no put: m"):
        check_queue(history, "jobs")


def test_one_lost_answer_does_not_explain_two_messages(history: History) -> None:
    lost(history, "put", "body")
    with pytest.raises(Violation, match="have no put"):
        check_queue(history, "jobs", left=["x"], dead=["y"])


def test_a_message_that_is_queued_and_dead_is_found(history: History) -> None:
    put(history)
    with pytest.raises(Violation, match="among its dead letters"):
        check_queue(history, "jobs", left=["m"], dead=["m"])


def test_two_owners_at_once_are_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 99, 199)
    with pytest.raises(Violation, match="two owners: fence 1 until 100, and fence 2 from 99"):
        check_queue(history, "jobs", left=["m"])


def test_two_owners_after_an_extension_are_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "extend", ["m", 1], 500)
    lease(history, 2, 100, 200)
    with pytest.raises(Violation, match="two owners: fence 1 until 500") as caught:
        check_queue(history, "jobs", left=["m"])
    assert [each.kind for each in caught.value.operations] == ["lease", "extend", "lease"]


def test_a_delivery_after_a_failed_nack_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    failed(history, "nack", ["m", 1])
    lease(history, 2, 5, 105)
    with pytest.raises(Violation, match="two owners"):
        check_queue(history, "jobs", left=["m"])


def test_a_delivery_before_the_nack_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 5, 105)
    lost(history, "nack", ["m", 1])
    with pytest.raises(Violation, match="two owners"):
        check_queue(history, "jobs", left=["m"])


def test_a_fence_granted_twice_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 1, 100, 200)
    with pytest.raises(Violation, match="fence 1 was granted twice"):
        check_queue(history, "jobs", left=["m"])


def test_a_decreasing_fence_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 3, 100, 200)
    lease(history, 2, 200, 300)
    with pytest.raises(Violation, match="fence 3 had returned before the call that got 2"):
        check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize("kind", ["ack", "nack", "reject", "extend"])
def test_an_accepted_old_fence_is_found(history: History, kind: str) -> None:
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 100, 200)
    done(history, kind, ["m", 1], 100)
    with pytest.raises(Violation, match=f"{kind} with fence 1 was accepted after fence 2"):
        check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize(("first", "second"), [("nack", "ack"), ("nack", "nack"), ("ack", "reject"), ("reject", "ack")])
def test_a_lease_settled_twice_is_found(history: History, first: str, second: str) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, first, ["m", 1])
    done(history, second, ["m", 1])
    with pytest.raises(Violation, match="fence 1 was accepted for"):
        check_queue(history, "jobs", left=["m"])


def test_an_extension_after_a_nack_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "nack", ["m", 1])
    done(history, "extend", ["m", 1], 200)
    with pytest.raises(Violation, match="accepted for nack and for extend"):
        check_queue(history, "jobs", left=["m"])


def test_a_delivery_after_an_ack_is_found(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    lease(history, 2, 100, 200)
    with pytest.raises(Violation, match="delivered again after its ack"):
        check_queue(history, "jobs")


def test_an_accepted_ack_of_a_message_leased_to_another_owner_is_found(history: History) -> None:
    """Whatever the order of the answers: no delivery may follow an accepted ack."""
    put(history)
    lease(history, 1, 0, 100)
    ack = history.invoke("ada", "ack", "jobs", ["m", 1])
    lease(history, 2, 100, 200)
    history.ok(ack)
    with pytest.raises(Violation, match="delivered again after its ack"):
        check_queue(history, "jobs")


@pytest.mark.parametrize("state", ["left", "dead"])
def test_a_message_stored_after_its_ack_is_found(history: History, state: str) -> None:
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    options: dict[str, Any] = {state: ["m"]}
    with pytest.raises(Violation, match="still there after its ack"):
        check_queue(history, "jobs", **options)


def test_a_put_without_an_id_is_refused(history: History) -> None:
    done(history, "put", "body", None)
    with pytest.raises(InvalidArgument, match="record the returned id"):
        check_queue(history, "jobs")


# Power losses.


def test_a_power_loss_may_undo_a_delivery(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    history.power_lost()
    lease(history, 2, 50, 150)
    check_queue(history, "jobs", left=["m"])


def test_a_power_loss_undoes_no_delivery_before_a_durable_operation(history: History) -> None:
    put(history)
    lease(history, 1, 0, 100)
    put(history, "other")
    history.power_lost()
    lease(history, 2, 50, 150)
    with pytest.raises(Violation, match="had two owners"):
        check_queue(history, "jobs", left=["m", "other"])


def test_a_delivered_message_that_is_lost_is_found(history: History) -> None:
    lost(history, "put", "body")
    lease(history, 1, 0, 100)
    history.power_lost()
    with pytest.raises(Violation, match="was delivered and is lost"):
        check_queue(history, "jobs")
