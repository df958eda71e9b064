"""Arguments of queue functions that are refused, and the limits that are accepted."""

from typing import Any

import pytest

from fastness.errors import BatchTooLarge, EmptyBatch, FastnessError, InvalidArgument, PayloadTooLarge
from fastness.kv import Database
from fastness.layers import queues
from fastness.plane.executor import execute
from fastness.wire.queues import NewMessage, PutMessages, QueuePolicy, SetQueuePolicy
from tests.support.failures import Failures
from tests.unit.queue_calls import JOBS, everything, lease, payloads, put


def test_a_batch_has_1_to_256_messages(database: Database) -> None:
    with pytest.raises(EmptyBatch, match="The batch has no messages"):
        database.transact(execute, PutMessages("jobs", []))
    with pytest.raises(BatchTooLarge, match="at most 256 messages, not 257"):
        database.transact(execute, PutMessages("jobs", [NewMessage()] * 257))
    assert everything(database) == []
    assert len(put(database, *[b""] * 256)) == 256


def test_an_invalid_message_is_refused_with_its_batch(database: Database) -> None:
    failures = Failures()
    wrong: list[tuple[dict[str, Any], type[FastnessError]]] = [
        ({"payload": bytes(16_385)}, PayloadTooLarge),
        ({"attributes": {str(number): "" for number in range(65)}}, InvalidArgument),
        ({"attributes": {"a": "x" * 8_192}}, InvalidArgument),
        ({"idempotency_key": "ü" * 129}, InvalidArgument),
        ({"payload": b"a", "blob": "0" * 64}, InvalidArgument),
        ({"blob": "no hash"}, InvalidArgument),
        ({"blob_size": 1}, InvalidArgument),
        ({"debounce_seconds": 1.0}, InvalidArgument),
        ({"debounce_max_seconds": 0.0}, InvalidArgument),
    ]
    for fields, error in wrong:
        before = everything(database)
        with failures.of(fields):
            with pytest.raises(error):
                database.transact(execute, PutMessages("jobs", [NewMessage(payload=b"fine"), NewMessage(**fields)]))
            assert everything(database) == before
    failures.check()


@pytest.mark.parametrize("backend", ["memory"])
def test_values_at_the_limits_are_accepted(database: Database) -> None:
    failures = Failures()
    right: list[dict[str, Any]] = [
        {"payload": bytes(16_384)},
        {"attributes": {str(number): "" for number in range(64)}},
        {"idempotency_key": "ü" * 128},
    ]
    for fields in right:
        with failures.of(fields):
            assert not database.transact(queues.put, JOBS, [NewMessage(**fields)])[0].duplicate
    failures.check()


@pytest.mark.parametrize("backend", ["memory"])
def test_a_message_with_a_field_that_cannot_be_encoded_is_refused(database: Database) -> None:
    """A stored field that cannot be decoded would make the whole queue unreadable."""
    failures = Failures()
    wrong: list[dict[str, Any]] = [
        {"content_type": "\ud800"},
        {"attributes": {"a": "\ud800"}},
        {"attributes": {"\ud800": "a"}},
        {"idempotency_key": "\ud800"},
        {"unique_key": "\ud800"},
        {"blob": "0" * 64, "blob_size": -1},
    ]
    for fields in wrong:
        before = everything(database)
        with failures.of(fields):
            with pytest.raises(InvalidArgument, match=f"^{next(iter(fields))}"):
                database.transact(execute, PutMessages(JOBS.name, [NewMessage(**fields)]))
            assert everything(database) == before
    failures.check()
    put(database, b"next")
    assert payloads(lease(database, 2)) == [b"next"]


@pytest.mark.parametrize("backend", ["memory"])
def test_a_policy_without_sense_or_of_wrong_types_is_refused(database: Database) -> None:
    wrong: dict[str, Any]
    for wrong in ({"dead_letter_queue": "jobs"}, {"paused": 1}, {"max_attempts": 2.5}, {"dead_letter_rule": "often"}):
        with pytest.raises(InvalidArgument):
            database.transact(execute, SetQueuePolicy("jobs", QueuePolicy(**wrong)))
        assert everything(database) == [], wrong


@pytest.mark.parametrize("backend", ["memory"])
def test_a_queue_name_leaves_space_for_the_dead_letter_suffix(database: Database) -> None:
    for name in ("X" * 251, "x" * 251 + ".dlq"):
        database.transact(execute, PutMessages(name, [NewMessage()]))
    with pytest.raises(InvalidArgument, match="at most 251 characters, not 252"):
        database.transact(execute, PutMessages("x" * 252, [NewMessage()]))


def test_a_redrive_of_invalid_ids_is_refused(database: Database) -> None:
    put(database, b"a")
    before = everything(database)
    with pytest.raises(InvalidArgument):
        database.transact(queues.redrive, JOBS, ids=["nonsense"])
    assert everything(database) == before
