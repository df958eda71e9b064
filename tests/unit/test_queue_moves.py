"""Cancelling, deleting and moving several messages by their ids."""

from collections.abc import Iterator

import cbor2
import pytest

import fastness
from fastness import Plane, QueuePolicy
from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument
from fastness.wire.queues import Outcome

MISSING = "0199a1b2-0000-7000-8000-000000000000"


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


def codes(outcomes: list[Outcome]) -> list[str | None]:
    return [each.code for each in outcomes]


def test_a_moved_message_keeps_its_failures_and_state(plane: Plane) -> None:
    jobs, slow = plane.queue("jobs"), plane.queue("slow")
    jobs.set_policy(QueuePolicy(retry_delay_seconds=0.0))
    id = jobs.put({"n": 1}, attributes={"a": "b"}).id
    message = jobs.receive(with_state=True)
    assert message is not None
    message.save_state({"step": 2})
    message.nack(error=TimeoutError("slow model"))
    assert codes(jobs.move([id], to="slow")) == [None]
    moved = slow.get(id)
    assert (moved.state, moved.payload, moved.attributes) == ("ready", b'{"n":1}', {"a": "b"})
    assert [each.error_type for each in moved.failures] == ["TimeoutError"]
    assert moved.failure_attempts == 1
    assert moved.state_value is not None
    assert cbor2.loads(moved.state_value) == {"step": 2}
    again = slow.receive(with_state=True)
    assert again is not None
    assert again.state == {"step": 2}
    assert again.fence > message.fence
    again.ack()
    assert (jobs.stats().ready, slow.stats().ready) == (0, 0)


def test_a_leased_message_is_neither_moved_nor_deleted(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    held, waiting = (each.id for each in jobs.put_many([1, 2]))
    message = jobs.receive()
    assert message is not None
    assert codes(jobs.move([held, waiting, MISSING, "x"], to="slow")) == [
        "message_leased",
        None,
        "message_not_found",
        "invalid_argument",
    ]
    assert codes(jobs.delete_messages([held])) == ["message_leased"]
    message.ack()
    assert plane.queue("slow").get(waiting).state == "ready"


def test_a_dead_letter_is_moved_as_a_message_without_failures(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    id = jobs.put(1, keep_result=True).id
    message = jobs.receive()
    assert message is not None
    message.reject(error="bad")
    assert jobs.get(id).state == "dead"
    assert codes(jobs.move([id], to="slow")) == [None]
    moved = plane.queue("slow").get(id)
    assert (moved.state, moved.failure_attempts, moved.keep_result) == ("ready", 0, True)
    assert jobs.stats().dead == 0
    assert codes(jobs.delete_messages([id])) == ["message_not_found"]


@pytest.mark.parametrize("to", ["jobs", "jobs.dlq"])
def test_messages_are_not_moved_to_their_own_queue_or_its_dead_letters(plane: Plane, to: str) -> None:
    id = plane.queue("jobs").put(1).id
    with pytest.raises(InvalidArgument, match=r"cannot be moved"):
        plane.queue("jobs").move([id], to=to)


def test_a_unique_key_is_not_moved_to_a_queue_that_has_it(plane: Plane) -> None:
    jobs, slow = plane.queue("jobs"), plane.queue("slow")
    id = jobs.put(1, unique_key="u").id
    first = slow.put(1, unique_key="u").id
    assert codes(jobs.move([id], to="slow")) == ["message_key_taken"]
    slow.cancel(first)
    assert codes(jobs.move([id], to="slow")) == [None]
    assert slow.put(2, unique_key="u").id == id, "the key moves with its message"
    assert jobs.put(2, unique_key="u").id != id


def test_several_messages_are_cancelled_leased_or_not(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    held, keyed, waiting = jobs.put(1).id, jobs.put(2, key="k").id, jobs.put(3, delay_seconds=60.0).id
    done = jobs.put(4, keep_result=True, priority=9).id
    finished = jobs.receive()
    assert finished is not None
    finished.ack()
    messages = jobs.receive_many(2)
    assert codes(jobs.cancel_many([held, keyed, waiting, done, MISSING, held])) == [
        None,
        None,
        None,
        "message_finished",
        "message_not_found",
        None,
    ]
    assert [jobs.get(id).state for id in (held, keyed, waiting, done)] == ["cancelled"] * 3 + ["done"]
    assert len(messages) == 2
    assert jobs.stats().leased == 0


def test_batches_of_ids_have_bounds(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    for change in (jobs.cancel_many, jobs.delete_messages):
        with pytest.raises(EmptyBatch):
            change([])
        with pytest.raises(BatchTooLarge):
            change([MISSING] * 257)
        with pytest.raises(InvalidArgument, match="wrap it in a list"):
            change(MISSING)
