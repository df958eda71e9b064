"""The checker of queues passes what a correct queue may answer, and finds each kind of lie."""

from typing import Any

import pytest

from holdfast.errors import InvalidArgument
from holdfast.testing.histories import History, Operation, Violation
from holdfast.testing.histories.queues import check_queue


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


# What a correct queue may answer.


def test_nothing_happened(history):
    assert check_queue(history, "jobs") == {}


def test_a_message_that_is_delivered_and_acknowledged(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    deliveries = check_queue(history, "jobs")
    assert [grant.fence for grant in deliveries["m"]] == [1]


@pytest.mark.parametrize("where", ["left", "dead"])
def test_a_message_that_is_still_there(history, where):
    put(history)
    check_queue(history, "jobs", **{where: ["m"]})


def test_other_queues_do_not_matter(history):
    history.ok(history.invoke("ada", "put", "other", None), "m")
    check_queue(history, "jobs")
    with pytest.raises(Violation, match="is lost"):
        check_queue(history, "other")


def test_an_ended_lease_passes_on(history):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 100, 200)
    failed(history, "ack", ["m", 1])
    done(history, "ack", ["m", 2])
    check_queue(history, "jobs")


def test_a_consumer_that_comes_late_is_heard_while_nobody_noticed(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "extend", ["m", 1], 900)
    lease(history, 2, 900, 1_000)
    check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize("kind", ["nack", "reject"])
@pytest.mark.parametrize("end", [done, lost])
def test_a_message_that_was_or_may_have_been_given_back_is_delivered_at_once(history, kind, end):
    put(history)
    lease(history, 1, 0, 100)
    end(history, kind, ["m", 1])
    lease(history, 2, 5, 105)
    check_queue(history, "jobs", left=["m"])


def test_a_nack_and_the_next_lease_may_overlap_in_time(history):
    put(history)
    lease(history, 1, 0, 100)
    nack = history.invoke("ada", "nack", "jobs", ["m", 1])
    second = history.invoke("bob", "lease", "jobs")
    history.ok(second, [["m", 2, 5, 105]])
    history.ok(nack)
    check_queue(history, "jobs", left=["m"])


def test_an_ack_may_be_repeated(history):
    put(history)
    lease(history, 1, 0, 100)
    lost(history, "ack", ["m", 1])
    done(history, "ack", ["m", 1])
    done(history, "ack", ["m", 1])
    check_queue(history, "jobs")


@pytest.mark.parametrize("left", [[], ["m"]])
def test_an_ack_whose_answer_was_lost_explains_both_ends(history, left):
    put(history)
    lease(history, 1, 0, 100)
    lost(history, "ack", ["m", 1])
    check_queue(history, "jobs", left=left)


def test_a_put_whose_answer_was_lost_explains_one_message_that_nobody_knows(history):
    lost(history, "put", "body")
    lease(history, 1, 0, 100, id="x")
    check_queue(history, "jobs", left=["x"])


def test_a_repeated_put_has_one_id(history):
    lost(history, "put", "body")
    put(history)
    put(history)
    check_queue(history, "jobs", left=["m"])


def test_a_lease_whose_answer_was_lost_leaves_a_gap_between_fences(history):
    put(history)
    lost(history, "lease")
    lease(history, 2, 100, 200)
    check_queue(history, "jobs", left=["m"])


def test_leases_that_overlap_in_time_may_answer_in_any_order(history):
    put(history)
    one = history.invoke("ada", "lease", "jobs")
    other = history.invoke("bob", "lease", "jobs")
    history.ok(other, [["m", 2, 100, 200]])
    history.ok(one, [["m", 1, 0, 100]])
    check_queue(history, "jobs", left=["m"])


def test_an_extension_that_was_answered_after_the_ack_of_another_thread(history):
    put(history)
    lease(history, 1, 0, 100)
    extension = history.invoke("lease_renewer", "extend", "jobs", ["m", 1])
    done(history, "ack", ["m", 1])
    history.ok(extension, 150)
    check_queue(history, "jobs")


# Lies.


def test_an_acknowledged_put_that_is_nowhere(history):
    put(history)
    with pytest.raises(Violation, match="acknowledged and is lost") as caught:
        check_queue(history, "jobs")
    assert [each.kind for each in caught.value.operations] == ["put"]


def test_a_message_that_vanished_while_it_was_leased(history):
    put(history)
    lease(history, 1, 0, 100)
    failed(history, "ack", ["m", 1])
    with pytest.raises(Violation, match="acknowledged and is lost"):
        check_queue(history, "jobs")


def test_a_message_that_vanished_with_its_nack(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "nack", ["m", 1])
    with pytest.raises(Violation, match="acknowledged and is lost"):
        check_queue(history, "jobs")


def test_a_message_that_nobody_put(history):
    failed(history, "put", "body")
    lease(history, 1, 0, 100)
    with pytest.raises(Violation, match="0 puts lost their answer, but 1 messages have no put: m"):
        check_queue(history, "jobs")


def test_one_lost_answer_does_not_explain_two_messages(history):
    lost(history, "put", "body")
    with pytest.raises(Violation, match="have no put"):
        check_queue(history, "jobs", left=["x"], dead=["y"])


def test_a_message_in_two_places(history):
    put(history)
    with pytest.raises(Violation, match="among its dead letters"):
        check_queue(history, "jobs", left=["m"], dead=["m"])


def test_two_owners_at_once(history):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 99, 199)
    with pytest.raises(Violation, match="two owners: fence 1 until 100, and fence 2 from 99"):
        check_queue(history, "jobs", left=["m"])


def test_two_owners_after_an_extension(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "extend", ["m", 1], 500)
    lease(history, 2, 100, 200)
    with pytest.raises(Violation, match="two owners: fence 1 until 500") as caught:
        check_queue(history, "jobs", left=["m"])
    assert [each.kind for each in caught.value.operations] == ["lease", "extend", "lease"]


def test_a_nack_that_failed_did_not_give_the_message_back(history):
    put(history)
    lease(history, 1, 0, 100)
    failed(history, "nack", ["m", 1])
    lease(history, 2, 5, 105)
    with pytest.raises(Violation, match="two owners"):
        check_queue(history, "jobs", left=["m"])


def test_a_nack_that_came_after_the_next_lease_did_not_give_the_message_back(history):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 5, 105)
    lost(history, "nack", ["m", 1])
    with pytest.raises(Violation, match="two owners"):
        check_queue(history, "jobs", left=["m"])


def test_a_fence_that_was_given_out_twice(history):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 1, 100, 200)
    with pytest.raises(Violation, match="fence 1 was granted twice"):
        check_queue(history, "jobs", left=["m"])


def test_a_fence_that_fell(history):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 3, 100, 200)
    lease(history, 2, 200, 300)
    with pytest.raises(Violation, match="fence 3 had returned before the call that got 2"):
        check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize("kind", ["ack", "nack", "reject", "extend"])
def test_an_old_fence_that_was_accepted(history, kind):
    put(history)
    lease(history, 1, 0, 100)
    lease(history, 2, 100, 200)
    done(history, kind, ["m", 1], 100)
    with pytest.raises(Violation, match=f"{kind} with fence 1 was accepted after fence 2"):
        check_queue(history, "jobs", left=["m"])


@pytest.mark.parametrize(("first", "second"), [("nack", "ack"), ("nack", "nack"), ("ack", "reject"), ("reject", "ack")])
def test_a_lease_that_ended_twice(history, first, second):
    put(history)
    lease(history, 1, 0, 100)
    done(history, first, ["m", 1])
    done(history, second, ["m", 1])
    with pytest.raises(Violation, match="fence 1 was accepted for"):
        check_queue(history, "jobs", left=["m"])


def test_an_extension_of_what_was_given_back(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "nack", ["m", 1])
    done(history, "extend", ["m", 1], 200)
    with pytest.raises(Violation, match="accepted for nack and for extend"):
        check_queue(history, "jobs", left=["m"])


def test_a_message_that_came_back_after_its_ack(history):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    lease(history, 2, 100, 200)
    with pytest.raises(Violation, match="delivered again after its ack"):
        check_queue(history, "jobs")


def test_an_ack_that_was_answered_although_somebody_else_had_the_message(history):
    """However the answers crossed: an ack that is good ends the deliveries of a message."""
    put(history)
    lease(history, 1, 0, 100)
    ack = history.invoke("ada", "ack", "jobs", ["m", 1])
    lease(history, 2, 100, 200)
    history.ok(ack)
    with pytest.raises(Violation, match="delivered again after its ack"):
        check_queue(history, "jobs")


@pytest.mark.parametrize("where", ["left", "dead"])
def test_a_message_that_is_there_after_its_ack(history, where):
    put(history)
    lease(history, 1, 0, 100)
    done(history, "ack", ["m", 1])
    with pytest.raises(Violation, match="still there after its ack"):
        check_queue(history, "jobs", **{where: ["m"]})


def test_a_put_without_an_id_is_a_mistake_of_the_test(history):
    done(history, "put", "body", None)
    with pytest.raises(InvalidArgument, match="record the returned id"):
        check_queue(history, "jobs")
