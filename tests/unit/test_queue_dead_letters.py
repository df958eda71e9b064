"""Dead letters of queues: when a message becomes one, and redriving it, on every backend."""

import pytest

from fastness.errors import (
    QueueMessageLeaseMismatch,
)
from fastness.kv import Database
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    ack,
    counts,
    lease,
    lease_one,
    nack,
    payloads,
    peek,
    process_due,
    proof,
    put,
    reject,
    remaining_keys,
    set_policy,
    stats,
)


def test_a_redriven_message_precedes_blocked_ones_of_its_group(database: Database) -> None:
    put(database, b"first", b"second", b"third", group="g")
    reject(database, lease_one(database))
    second = lease_one(database)
    assert database.transact(queues.redrive, JOBS) == 1
    assert counts(database) == {"leased": 1, "blocked": 2}
    ack(database, second)
    found = []
    for _ in range(2):
        found += lease(database, 10)
        ack(database, found[-1])
    assert payloads(found) == [b"first", b"third"]
    assert remaining_keys(database) == []


@pytest.mark.parametrize("by_ids", [False, True])
def test_dead_letters_of_a_group_are_redriven_in_order(database: Database, by_ids: bool) -> None:
    """Independent of their priorities and of the order of the ids."""
    ids = [
        put(database, name, group="g", priority=priority)[0].id for name, priority in ((b"first", 1), (b"second", 9))
    ]
    for _ in ids:
        reject(database, lease_one(database))
    assert database.transact(queues.redrive, JOBS, ids=ids[::-1] if by_ids else None) == 2
    assert payloads(lease(database, 2)) == [b"first"]


def test_a_message_becomes_a_dead_letter_after_max_attempts(database: Database, clock: ManualClock) -> None:
    put(database, b"a", max_attempts=2, correlation_id="because", priority=7, attributes={"kind": "x"})
    nack(database, lease_one(database), error="first", delay_seconds=0)
    clock.advance_ms(1_000)
    nack(database, lease_one(database), error="second", delay_seconds=60)
    assert counts(database) == {"dead": 1}
    (letter,) = peek(database, DEAD)
    assert (letter.payload, letter.attempts, letter.failures, letter.fence) == (b"a", 2, 2, 2)
    assert (letter.last_error, letter.origin, letter.died_ms) == ("second", "jobs", clock.now_ms())
    assert (letter.correlation_id, letter.priority, letter.attributes) == ("because", 7, {"kind": "x"})
    assert (stats(database).dead_total, stats(database).failed_total) == (1, 2)


def test_a_rejected_message_is_a_dead_letter_at_once(database: Database) -> None:
    put(database, b"a")
    reject(database, lease_one(database), "hopeless")
    (letter,) = peek(database, DEAD)
    assert (letter.failures, letter.last_error) == (1, "hopeless")


def test_a_dead_letter_is_never_dead_lettered_again(database: Database, clock: ManualClock) -> None:
    """Neither a nack, nor an expired lease, nor a reject moves it."""
    put(database, b"a", max_attempts=1)
    reject(database, lease_one(database), "boom")
    nack(database, lease_one(database, queue=DEAD), DEAD, delay_seconds=0)
    lease_one(database, queue=DEAD)
    clock.advance_ms(30_000)
    database.transact(queues.reject, DEAD, proof(lease_one(database, queue=DEAD)), error="bang")
    assert (counts(database), counts(database, DEAD)) == ({"dead": 1}, {"ready": 1})
    assert [(letter.origin, letter.failures) for letter in peek(database, DEAD)] == [("jobs", 4)]
    assert database.transact(queues.redrive, JOBS) == 1


def test_a_redriven_message_has_no_failures(database: Database, clock: ManualClock) -> None:
    put(database, b"a", max_attempts=2)
    reject(database, lease_one(database), "boom")
    clock.advance_ms(1_000)
    assert database.transact(queues.redrive, JOBS) == 1
    assert database.transact(queues.redrive, JOBS) == 0
    message = lease_one(database)
    assert (message.failures, message.origin, message.died_ms) == (0, None, 0)
    assert (message.attempts, message.fence) == (2, 2)
    nack(database, message, delay_seconds=0)
    assert counts(database) == {"ready": 1}
    nack(database, lease_one(database), delay_seconds=0)
    assert counts(database) == {"dead": 1}


def test_a_redriven_message_gets_the_policy_retention(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b", ttl_seconds=60)
    first, second = lease(database, 2)
    reject(database, first)
    database.transact(queues.redrive, JOBS)
    reject(database, second)
    set_policy(database, retention_seconds=5)
    database.transact(queues.redrive, JOBS)
    clock.advance_ms(5_000)
    process_due(database)
    assert payloads(peek(database)) == [b"a"]
    clock.advance_ms(1_209_600_000)
    process_due(database)
    assert payloads(peek(database)) == [b"a"]


def test_dead_letters_are_redriven_by_id_or_up_to_a_limit(database: Database) -> None:
    ids = [receipt.id for receipt in put(database, b"a", b"b", b"c", b"d")]
    for message in lease(database, 4):
        reject(database, message)
    held = lease_one(database, queue=DEAD)
    assert database.transact(queues.redrive, JOBS, ids=[ids[0], ids[2], ids[2]]) == 1
    assert database.transact(queues.redrive, JOBS, limit=1) == 1
    assert payloads(peek(database)) == [b"b", b"c"]
    ack(database, held, DEAD)
    assert payloads(peek(database, DEAD)) == [b"d"]
    assert database.transact(queues.redrive, JOBS, ids=[]) == 0


def test_queues_can_share_a_dead_letter_queue(database: Database) -> None:
    other, shared = QueueKey("main", "other"), QueueKey("main", "shared-dlq")
    for queue in (JOBS, other):
        assert set_policy(database, queue, dead_letter_queue=shared.name).dead_letter_queue == shared.name
        put(database, queue.name.encode(), queue=queue)
        message = lease_one(database, queue=queue)
        database.transact(queues.reject, queue, proof(message))
    assert payloads(peek(database, shared)) == [b"jobs", b"other"]
    assert database.transact(queues.redrive, other) == 1
    assert payloads(lease(database, 10, queue=other)) == [b"other"]
    assert payloads(peek(database, shared)) == [b"jobs"]


def test_dead_letters_expire_after_the_policy_retention(database: Database, clock: ManualClock) -> None:
    put(database, b"short")
    message = lease_one(database)
    set_policy(database, dead_letter_retention_seconds=5)
    reject(database, message)
    set_policy(database)
    put(database, b"long")
    reject(database, lease_one(database))
    clock.advance_ms(5_000)
    process_due(database, DEAD)
    assert payloads(peek(database, DEAD)) == [b"long"]
    clock.advance_ms(1_209_600_000)
    process_due(database, DEAD)
    assert counts(database) == {}
    assert remaining_keys(database) == []


def test_a_message_whose_leases_expire_becomes_a_dead_letter(database: Database, clock: ManualClock) -> None:
    """An expired lease counts as a failure, so a message that crashes its consumers is dead-lettered too."""
    put(database, b"a", max_attempts=3)
    for attempt in range(1, 4):
        message = lease_one(database, owner=f"victim-{attempt}")
        assert (message.attempts, message.failures) == (attempt, attempt - 1)
        clock.advance_ms(30_000)
    assert lease(database) == []
    (letter,) = peek(database, DEAD)
    assert (letter.failures, letter.attempts) == (3, 3)
    assert letter.last_error == "The lease of victim-3 ended before it was settled"
    assert (stats(database).expired_total, stats(database).dead_total) == (3, 1)


@pytest.mark.parametrize("point", [0, 1, 2])
@pytest.mark.parametrize("how", ["nack", "reject", "expire"])
def test_a_crash_while_dead_lettering_keeps_the_message_in_one_queue(
    database: Database, clock: ManualClock, how: str, point: int
) -> None:
    """The move is one commit, so a crash leaves the message in one queue, and a retry is safe."""
    put(database, b"x" * 2_000, max_attempts=1)
    put(database, b"next")
    message = lease_one(database, with_state=True)
    faulty = FaultyDatabase(database, ChosenFault(point, Crash))
    if how == "expire":
        clock.advance_ms(30_000)
    with pytest.raises(Crash):
        if how == "expire":
            faulty.transact(queues.sweep, JOBS)
        else:
            faulty.transact(getattr(queues, how), JOBS, proof(message))
    has_happened = point == 2
    assert counts(database) == ({"ready": 1, "dead": 1} if has_happened else {"ready": 1, "leased": 1})
    if how == "expire":
        process_due(database)
    elif has_happened:
        with pytest.raises(QueueMessageLeaseMismatch):
            database.transact(getattr(queues, how), JOBS, proof(message))
    else:
        database.transact(getattr(queues, how), JOBS, proof(message))
    assert payloads(peek(database, DEAD)) == [b"x" * 2_000]
    assert payloads(lease(database, 10)) == [b"next"]
    assert stats(database).dead_total == 1


@pytest.mark.parametrize("end", ["nack", "reject"])
def test_settling_without_an_error_keeps_the_last_error(database: Database, end: str) -> None:
    put(database, b"a", max_attempts=2)
    nack(database, lease_one(database), error="boom", delay_seconds=0)
    message = lease_one(database)
    assert message.last_error == "boom"
    database.transact(getattr(queues, end), JOBS, proof(message))
    (letter,) = peek(database, DEAD)
    assert (letter.last_error, letter.failures) == ("boom", 2)
    database.transact(queues.reject, DEAD, proof(lease_one(database, queue=DEAD)))
    assert [each.last_error for each in peek(database, DEAD)] == ["boom"]


def test_a_dead_letter_keeps_the_last_error(database: Database) -> None:
    put(database, b"a", max_attempts=2)
    for error in ("first", "second"):
        nack(database, lease_one(database), error=error, delay_seconds=0)
    assert [letter.last_error for letter in peek(database, DEAD)] == ["second"]
    nack(database, lease_one(database, queue=DEAD), DEAD, counts=False)
    database.transact(queues.redrive, JOBS)
    assert lease_one(database).last_error == "second"


def test_dead_letters_are_listed_and_redriven_and_a_lease_takes_a_full_batch(database: Database) -> None:
    put(database, *(bytes((number,)) for number in range(256)))
    found = lease(database, 256)
    assert len(found) == 256
    for message in found[:5]:
        reject(database, message, f"error {message.payload!r}")
    assert [letter.last_error for letter in peek(database, DEAD)] == [f"error {bytes((n,))!r}" for n in range(5)]
    assert database.transact(queues.redrive, JOBS, ids=[queues.format_id(found[3].id)]) == 1
    assert database.transact(queues.redrive, JOBS) == 4
    assert payloads(lease(database, 256)) == [bytes((number,)) for number in range(5)]
