"""Failed attempts: what a queue keeps about them, and the back-off before the next attempt."""

from typing import Any

import msgspec
import pytest

from fastness import Failure
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import StoredMessage
from fastness.layers.queues import keys as queue_keys
from fastness.limits import FAILURES_BYTES_MAX, FAILURES_DELIVERED_BYTES_MAX
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.queues import MessageInfo, NewMessage
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    ack,
    counts,
    everything,
    lease,
    lease_one,
    nack,
    peek,
    process_due,
    proof,
    purge,
    put,
    remaining_keys,
    set_policy,
)

IN_MEMORY = pytest.mark.parametrize("backend", ["memory"])


def failures(database: Database, queue: queue_keys.QueueKey = JOBS) -> list[list[Failure]]:
    """The failures of the ready messages, in order."""
    messages = peek(database, queue)
    found = database.read(queues.failures_of, queue, messages)
    return [found.get(message.id, []) for message in messages]


def fail(database: Database, **options: Any) -> None:
    """Lease a message and nack it, for delivery at once."""
    nack(database, lease_one(database), **{"delay_seconds": 0, **options})


# What is kept.


def test_attempts_of_every_outcome_are_kept_in_order(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    first = lease_one(database, owner="ada")
    clock.advance_ms(250)
    nack(database, first, error="boom", error_type="ValueError", traceback="Traceback …", delay_seconds=0)
    lease_one(database, owner="bob", visibility_ms=1_000)
    clock.advance_ms(5_000)  # The lease ends after one second, and is processed later.
    third = lease_one(database, owner="eve")
    assert [failure.outcome for failure in database.read(queues.failures_of, JOBS, [third])[third.id]] == [
        "failed",
        "expired",
    ]
    clock.advance_ms(10)
    database.transact(queues.reject, JOBS, proof(third), error_type="KeyError")
    ended = "The lease of bob ended before it was settled"
    assert failures(database, DEAD) == [
        [
            Failure(1, "ada", "failed", START_MS, START_MS + 250, "ValueError", "boom", "Traceback …"),
            Failure(2, "bob", "expired", START_MS + 250, START_MS + 1_250, None, ended, None),
            Failure(3, "eve", "rejected", START_MS + 5_250, START_MS + 5_260, "KeyError", None, None),
        ]
    ]
    assert [letter.last_error for letter in peek(database, DEAD)] == ["KeyError"]


def test_a_deferred_message_has_no_failure(database: Database) -> None:
    put(database, b"a")
    nack(database, lease_one(database), counts=False, error="ignored")
    assert failures(database) == [[]]
    assert lease_one(database).failures == 0


def test_the_policy_bounds_how_many_failures_are_kept(database: Database) -> None:
    put(database, b"a", max_attempts=100)
    for n in range(12):
        fail(database, error=str(n))
    assert [failure.message for failure in failures(database)[0]] == [str(n) for n in range(2, 12)]
    set_policy(database, failures_kept=2)
    fail(database, error="12")
    assert [failure.message for failure in failures(database)[0]] == ["11", "12"]
    set_policy(database, failures_kept=0)
    fail(database, error="13")
    assert (failures(database), peek(database)[0].last_error) == ([[]], "13")
    ack(database, lease_one(database))
    assert remaining_keys(database) == []


def test_the_texts_of_a_failure_are_bounded(database: Database) -> None:
    """The start of a message is kept, and the end of a traceback."""
    put(database, b"a")
    fail(database, error="ü" * 5_000, error_type="E" * 500, traceback="ü" * 5_000 + "ValueError: the end")
    [[failure]] = failures(database)
    assert (failure.message, failure.error_type) == ("ü" * 512, "E" * 255)
    assert failure.traceback is not None
    assert failure.traceback.endswith("üüValueError: the end")
    assert 8_190 <= len(failure.traceback.encode()) <= 8_192
    fail(database, error="odd \ud800", error_type="\ud800", traceback="\ud800")
    assert failures(database)[0][1].message == "odd ?"


def test_old_tracebacks_are_dropped_first(database: Database) -> None:
    set_policy(database, failures_kept=100)
    put(database, b"a", max_attempts=1_000)
    sizes = set()
    for n in range(60):
        fail(database, error=f"{n} ".ljust(1_000), error_type="ValueError", traceback="x" * 9_000)
        [stored] = database.read(lambda tx: tx.scan(*_prefix(queues.keys_of(JOBS).failures), limit=10))
        sizes.add(len(stored[1]))
    assert max(sizes) <= FAILURES_BYTES_MAX
    kept = failures(database)[0]
    numbers = [int((failure.message or "").split()[0]) for failure in kept]
    assert numbers == list(range(numbers[0], 60))
    assert len(kept) > 10
    traced = [failure.traceback is not None for failure in kept]
    assert traced == sorted(traced)  # The newest ones have theirs.
    assert traced[-1]


def _prefix(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, prefix + b"\xff" * 17


@IN_MEMORY
def test_batches_of_long_failures_fit_transactions_and_deliveries(database: Database) -> None:
    """256 messages with the longest failures and payloads are nacked, dead-lettered and redriven in one commit each."""
    message = NewMessage(payload=b"x" * 16_384, attributes={"a": "x" * 8_191}, max_attempts=6)
    database.transact(queues.put, JOBS, [message] * 256)
    texts: dict[str, Any] = {"error": "m" * 4_096, "error_type": "E" * 255, "traceback": "t" * 8_192}

    def nack_all(tx: Transaction, messages: list[StoredMessage]) -> None:
        for message in messages:
            queues.nack(tx, JOBS, proof(message), delay_seconds=0, **texts)

    for _ in range(6):
        database.transact(nack_all, lease(database, 256, owner="o" * 256))
    assert counts(database) == {"dead": 256}
    assert database.transact(queues.redrive, JOBS, limit=256) == 256
    leased = database.transact(queues.lease_or_wait, JOBS, owner="ada", limit=256)
    delivered = [delivery.failures for delivery in queues.deliveries_of(leased)]
    assert all(delivered)
    newest = len(msgspec.msgpack.encode(delivered[-1][-1]))
    assert len(msgspec.msgpack.encode(delivered)) <= FAILURES_DELIVERED_BYTES_MAX + 256 * newest
    assert {failure.traceback for each in delivered for failure in each} == {None}


def test_failures_survive_dead_lettering_and_redrive(database: Database) -> None:
    put(database, b"a", max_attempts=2)
    for error in ("first", "second"):
        fail(database, error=error, traceback=error)
    assert [failure.traceback for failure in failures(database, DEAD)[0]] == ["first", "second"]
    assert database.transact(queues.redrive, JOBS) == 1
    message = lease_one(database)
    assert (message.failures, message.attempts) == (0, 3)
    nack(database, message, error="third", delay_seconds=0)
    assert [(failure.attempt, failure.message) for failure in failures(database)[0]] == [
        (1, "first"),
        (2, "second"),
        (3, "third"),
    ]
    ack(database, lease_one(database))
    assert remaining_keys(database) == []


@pytest.mark.parametrize(
    "end",
    [
        "acked",
        "purged",
        "purged while delayed",
        "expired",
        "expired while leased",
        "dead letter expired",
        "letter acked",
    ],
)
def test_failures_are_removed_with_their_message(database: Database, clock: ManualClock, end: str) -> None:
    put(database, b"a", ttl_seconds=60 if "expired" in end else None, max_attempts=1 if "letter" in end else 5)
    fail(database, error="boom", delay_seconds=600 if "delayed" in end else 0)
    assert any(
        key.startswith((queues.keys_of(JOBS).failures, queues.keys_of(DEAD).failures)) for key in _keys(database)
    )
    if end == "acked":
        ack(database, lease_one(database))
    elif end == "letter acked":
        ack(database, lease_one(database, queue=DEAD), DEAD)
    elif end.startswith("purged"):
        assert purge(database) == 1
    elif end == "expired while leased":
        message = lease_one(database, visibility_ms=120_000)
        clock.advance_ms(60_000)
        process_due(database)
        nack(database, message)
    else:
        clock.advance_ms(14 * 86_400_000)
        process_due(database)
        process_due(database, DEAD)
    assert remaining_keys(database) == []


def test_a_late_ack_of_a_kept_message_keeps_its_failures(database: Database, clock: ManualClock) -> None:
    (receipt,) = database.transact(queues.put, JOBS, [NewMessage(b"a", keep_result=True)])
    message = lease_one(database, owner="ada", visibility_ms=1_000)
    clock.advance_ms(1_000)
    process_due(database)
    database.transact(queues.ack, JOBS, proof(message), late=True)
    found = database.read(queues.get, JOBS, receipt.id)
    assert isinstance(found, MessageInfo)
    assert (found.state, [each.outcome for each in found.failures]) == ("done", ["expired"])


def _keys(database: Database) -> list[bytes]:
    return [key for key, _ in everything(database)]


@IN_MEMORY
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_message_that_never_failed_reads_and_writes_no_failures(database: Database, is_kept: bool) -> None:
    touched: list[bytes] = []

    class Recording:
        """A view that records the keys that are read."""

        def __init__(self, view: Any) -> None:
            self.view = view

        def get(self, key: bytes) -> Any:
            touched.append(key)
            return self.view.get(key)

        def scan(self, begin: bytes, *rest: Any) -> Any:
            touched.append(begin)
            return self.view.scan(begin, *rest)

    def live(tx: Transaction) -> None:
        tx.view = Recording(tx.view)
        queues.put(tx, JOBS, [NewMessage(payload=b"a", keep_result=is_kept)])
        leased = queues.lease_or_wait(tx, JOBS, owner="ada")
        queues.deliveries_of(leased)
        queues.ack(tx, JOBS, proof(leased.messages[0]))
        touched.extend(tx.writes)

    database.transact(live)
    assert touched
    keys = queues.keys_of(JOBS)
    assert not any(key.startswith(keys.failures) for key in touched)
    assert sum(key.startswith(keys.expiries) for key in touched) == is_kept, "only that of the outcome"


# Back-off.


def test_a_failure_is_retried_after_the_back_off_of_the_policy(database: Database, clock: ManualClock) -> None:
    set_policy(
        database, retry_delay_seconds=2, retry_factor=3, retry_delay_max_seconds=10, retry_jitter=0, max_attempts=9
    )
    put(database, b"a")
    for delay_ms in (2_000, 6_000, 10_000, 10_000):
        nack(database, lease_one(database))
        clock.advance_ms(delay_ms - 1)
        assert lease(database) == []
        clock.advance_ms(1)
    nack(database, lease_one(database), delay_seconds=0)  # An explicit delay is used as given.
    nack(database, lease_one(database), counts=False)
    lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    assert lease_one(database).failures == 6  # A lease that ended has waited for its visibility timeout.


def test_a_message_may_have_a_retry_delay_of_its_own(database: Database, clock: ManualClock) -> None:
    set_policy(database, retry_jitter=0)
    put(database, b"a", retry_delay_seconds=20)
    put(database, b"b", retry_delay_seconds=0)
    slow, quick = lease(database, 2)
    for message in (slow, quick):
        nack(database, message)
    assert lease_one(database).payload == b"b"
    clock.advance_ms(19_999)
    assert lease(database) == []
    clock.advance_ms(1)
    nack(database, lease_one(database))
    clock.advance_ms(39_999)
    assert b"a" not in [message.payload for message in lease(database, 2)]
    clock.advance_ms(1)
    assert b"a" in [message.payload for message in lease(database, 2)]


def test_a_message_that_backs_off_blocks_its_group(database: Database, clock: ManualClock) -> None:
    put(database, b"first", b"second", group="g")
    nack(database, lease_one(database))
    assert lease(database, 2) == []
    clock.advance_ms(1_100)
    assert [message.payload for message in lease(database, 2)] == [b"first"]
