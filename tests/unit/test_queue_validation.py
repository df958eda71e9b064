"""Arguments of queue functions that are refused, and the limits that are accepted."""

from typing import Any

import pytest

from fastness.errors import (
    BatchTooLarge,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidName,
    PayloadTooLarge,
)
from fastness.kv import Database
from fastness.layers import queues
from fastness.plane.operations import execute
from fastness.wire.queues import NewMessage, PutMessages, QueuePolicy
from tests.unit.queue_calls import JOBS, everything, lease, lease_one, nack, payloads, peek, put, set_policy


def test_an_empty_batch_is_refused(database: Database) -> None:
    with pytest.raises(EmptyBatch, match="The batch is empty"):
        database.transact(queues.put, JOBS, [])
    assert everything(database) == []


def test_a_batch_has_at_most_256_messages(database: Database) -> None:
    with pytest.raises(BatchTooLarge, match="at most 256 messages, not 257"):
        put(database, *[b""] * 257)
    assert everything(database) == []
    assert len(put(database, *[b""] * 256)) == 256


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"payload": bytes(16_385)}, PayloadTooLarge),
        *[({"priority": priority}, InvalidArgument) for priority in (-1, 10)],
        *[({"delay_seconds": delay}, InvalidArgument) for delay in (-0.001, 31_536_001, float("nan"), float("inf"))],
        *[({"ttl_seconds": ttl}, InvalidArgument) for ttl in (0, -1, 0.0001, 1e10, float("nan"), float("inf"))],
        *[({"max_attempts": attempts}, InvalidArgument) for attempts in (0, -1, 1_001)],
        *[({"visibility_seconds": seconds}, InvalidArgument) for seconds in (0, -1, 43_201, float("nan"))],
        *[({"correlation_id": text}, InvalidArgument) for text in ("", "x" * 129, "ü", "a\nb", "\x7f")],
        ({"attributes": {str(number): "" for number in range(65)}}, InvalidArgument),
        ({"attributes": {"a": "x" * 8_192}}, InvalidArgument),
        *[({"idempotency_key": key}, InvalidArgument) for key in ("", "x" * 257, "ü" * 129)],
        *[({"group": name}, InvalidName) for name in ("", "a b", "x" * 256, "ü")],
        ({"payload": b"a", "blob": "0" * 64}, InvalidArgument),
        ({"blob": "no hash"}, InvalidArgument),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_message_is_refused_with_its_batch(
    database: Database, wrong: dict[str, Any], error: type[FastnessError]
) -> None:
    with pytest.raises(error):
        database.transact(queues.put, JOBS, [NewMessage(payload=b"fine"), NewMessage(**wrong)])
    assert everything(database) == []


@pytest.mark.parametrize(
    "right",
    [
        {"payload": bytes(16_384)},
        {"priority": 0},
        {"priority": 9},
        {"delay_seconds": 31_536_000},
        {"ttl_seconds": 0.001},
        {"ttl_seconds": 315_360_000},
        {"max_attempts": 1_000},
        {"visibility_seconds": 43_200},
        {"correlation_id": "x" * 128},
        {"attributes": {str(number): "" for number in range(64)}},
        {"idempotency_key": "ü" * 128},
        {"group": "x" * 255},
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("backend", ["memory"])
def test_values_at_the_limits_are_accepted(database: Database, right: dict[str, Any]) -> None:
    assert not database.transact(queues.put, JOBS, [NewMessage(**right)])[0].duplicate


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": True},
        {"priority": 5.0},
        {"max_attempts": True},
        {"max_attempts": 2.5},
        {"content_type": 5},
        {"content_type": "\ud800"},
        {"attributes": {b"a": b"b"}},
        {"attributes": {"a": b"b"}},
        {"attributes": {"a": 1}},
        {"attributes": {"a": "\ud800"}},
        {"attributes": {"\ud800": "a"}},
        {"attributes": [("a", "b")]},
        {"payload": "text"},
        {"blob": 5},
        {"blob": "0" * 64, "blob_size": -1},
        {"blob": "0" * 64, "blob_size": "1"},
        {"idempotency_key": 5},
        {"idempotency_key": "\ud800"},
        {"correlation_id": 5},
        {"delay_seconds": "1"},
        {"ttl_seconds": "1"},
        {"visibility_seconds": "1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["memory"])
def test_a_message_with_a_field_of_the_wrong_type_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    """A stored field of the wrong type would make the whole queue unreadable."""
    with pytest.raises(InvalidArgument, match=f"^{list(wrong)[-1]}" if wrong.get("blob_size") != -1 else "^blob"):
        database.transact(execute, PutMessages(JOBS.name, [NewMessage(**wrong)]))
    assert everything(database) == []
    put(database, b"next")
    assert payloads(lease(database, 2)) == [b"next"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 2.5},
        {"max_attempts": True},
        {"max_attempts": 0},
        {"max_attempts": 1_001},
        {"paused": 1},
        {"rate_per_second": True},
        {"rate_per_second": 0},
        {"rate_per_second": 1_000_001},
        {"retention_seconds": True},
        {"retention_seconds": 0},
        {"visibility_seconds": True},
        {"visibility_seconds": 0},
        {"visibility_seconds": 43_201},
        {"dead_letter_retention_seconds": None},
        {"dead_letter_retention_seconds": 0},
        {"dead_letter_queue": "jobs"},
        *({"failures_kept": value} for value in (-1, 101, 1.5)),
        *({"retry_delay_seconds": value} for value in (-1, 31_536_001, float("nan"), None)),
        *({"retry_factor": value} for value in (0.5, 1_001, float("nan"))),
        *({"retry_delay_max_seconds": value} for value in (-1, float("inf"))),
        *({"retry_jitter": value} for value in (-0.1, 1.1, float("nan"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["memory"])
def test_an_invalid_policy_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        database.transact(queues.set_policy, JOBS, QueuePolicy(**wrong))
    assert everything(database) == []
    assert database.read(queues.policy_of, JOBS) == QueuePolicy()


@pytest.mark.parametrize("backend", ["memory"])
def test_a_queue_name_leaves_space_for_the_dead_letter_suffix(database: Database) -> None:
    assert queues.queue_name("X" * 251) == "X" * 251
    assert queues.queue_name("x" * 251 + ".dlq") == "x" * 251 + ".dlq"
    with pytest.raises(InvalidArgument, match="at most 251 characters, not 252"):
        queues.queue_name("x" * 252)
    for wrong in ("", "a b", 5, None, "x" * 256):
        with pytest.raises(InvalidName):
            queues.queue_name(wrong)
    with pytest.raises(InvalidName):
        set_policy(database, dead_letter_queue="a b")


@pytest.mark.parametrize(
    "wrong",
    [{"owner": ""}, {"owner": "x" * 257}, {"owner": 5}, {"owner": None}, {"txn_id": ""}]
    + [{"limit": limit} for limit in (0, -1, 257)],
    ids=str,
)
def test_invalid_lease_arguments_are_refused(database: Database, wrong: dict[str, Any]) -> None:
    put(database, b"a")
    before = everything(database)
    with pytest.raises(InvalidArgument):
        lease(database, **wrong)
    assert everything(database) == before


def test_other_arguments_out_of_range_are_refused(database: Database) -> None:
    put(database, b"a")
    message = lease_one(database)
    before = everything(database)
    for delay in (-1, 31_536_001, float("nan")):
        with pytest.raises(InvalidArgument, match="delay_seconds"):
            nack(database, message, delay_seconds=delay)
    for options in ({"limit": 0}, {"limit": 257}, {"ids": [queues.format_id(message.id)] * 257}, {"ids": ["nonsense"]}):
        with pytest.raises(InvalidArgument):
            database.transact(queues.redrive, JOBS, **options)
    for limit in (0, 10_001):
        with pytest.raises(InvalidArgument):
            peek(database, limit=limit)
        with pytest.raises(InvalidArgument):
            database.read(queues.names, "main", after="", limit=limit)
    assert everything(database) == before
