"""The durable history of a queue: one record for each change of a message, in the same commit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

import fastness
from fastness import MessageEvent, QueuePolicy
from fastness.errors import InvalidArgument
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.testing.clock import START_MS, ManualClock
from tests.unit.queue_calls import DEAD, JOBS, ack, lease_one, nack, process_due, proof, purge, put, set_policy

IN_MEMORY = pytest.mark.parametrize("backend", ["memory"])


def history(database: Database, queue: queues.QueueKey = JOBS) -> list[MessageEvent]:
    return database.read(queues.read_history, queue).events


def brief(database: Database, queue: queues.QueueKey = JOBS) -> list[tuple[str, int]]:
    return [(event.event, event.attempt) for event in history(database, queue)]


def history_keys(database: Database, queue: queues.QueueKey = JOBS) -> int:
    prefix = queues.keys_of(queue).history
    return len(database.read(lambda tx: tx.scan(prefix, prefix + b"\xff" * 9, limit=10_000)))


def test_every_change_of_a_message_is_recorded(database: Database, clock: ManualClock) -> None:
    set_policy(database, history="durable", max_attempts=2, retry_delay_seconds=0, retry_jitter=0)
    database.transact(queues.set_policy, DEAD, QueuePolicy(history="durable"))
    put(database, b"a", correlation_id="order-7")
    clock.advance_ms(5)
    nack(database, lease_one(database), error="boom", delay_seconds=0)
    lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    process_due(database)
    assert brief(database) == [
        ("put", 0), ("leased", 1), ("nacked", 1), ("leased", 2), ("expired", 2), ("dead-lettered", 2),
    ]  # fmt: skip
    assert brief(database, DEAD) == [("arrived", 2)]
    first, *_, last = history(database)
    assert (first.at_ms, first.correlation_id, last.correlation_id) == (START_MS, "order-7", None)
    assert (last.at_ms, last.error) == (START_MS + 1_005, "The lease of ada ended before it was settled")
    clock.advance_ms(1)
    assert database.transact(queues.redrive, JOBS) == 1
    clock.advance_ms(1)
    ack(database, lease_one(database))
    assert brief(database)[6:] == [("redriven", 2), ("leased", 3), ("acked", 3)]
    assert brief(database, DEAD) == [("arrived", 2), ("returned", 2)]
    assert {event.id for event in history(database)} == {first.id}
    clock.advance_ms(1)
    put(database, b"b", ttl_seconds=1)
    put(database, b"c")
    clock.advance_ms(1_000)
    process_due(database)
    assert purge(database) == 1
    assert sorted(event.event for event in history(database)[9:]) == ["outlived", "purged", "put", "put"]


def test_a_dead_letter_that_is_rejected_again_is_recorded(database: Database) -> None:
    database.transact(queues.set_policy, DEAD, QueuePolicy(history="durable"))
    put(database, b"a", max_attempts=1)
    nack(database, lease_one(database))
    letter = lease_one(database, queue=DEAD)
    database.transact(queues.reject, DEAD, proof(letter))
    assert brief(database, DEAD) == [("arrived", 1), ("leased", 2), ("nacked", 2)]


def test_a_commit_that_fails_records_nothing(database: Database) -> None:
    set_policy(database, history="durable")
    put(database, b"a")

    def work(tx: Transaction) -> None:
        queues.lease(tx, JOBS, owner="ada")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.transact(work)
    assert brief(database) == [("put", 0)]


def test_events_are_kept_for_the_time_of_the_policy(database: Database, clock: ManualClock) -> None:
    set_policy(database, history="durable", history_seconds=100)
    for n in range(5):
        put(database, b"%d" % n)
        clock.advance_ms(30_000)
    assert [event.at_ms - START_MS for event in history(database)] == [60_000, 90_000, 120_000]
    clock.advance_ms(60_000)
    put(database, b"last")
    database.transact(queues.run_upkeep, JOBS)  # Embedded, puts have done it, at most once a minute.
    assert [event.at_ms - START_MS for event in history(database)] == [120_000, 210_000]
    assert history_keys(database) == 2


def test_the_history_ends_with_its_policy_and_with_the_queue(
    database: Database, open_database: Callable[..., Database], backend: str, clock: ManualClock
) -> None:
    put(database, b"before")
    set_policy(database, history="durable")
    put(database, b"a")
    if backend == "postgres":  # Another process knows of it, too.
        with open_database(clock=clock) as other:
            put(other, b"b")
            assert len(history(other)) == 2
            set_policy(database, history="none")
            put(other, b"c")
    else:
        set_policy(database, history="none")
    assert history_keys(database) == 0
    with pytest.raises(InvalidArgument, match='history="durable"'):
        history(database)
    set_policy(database, history="durable")
    put(database, b"again")
    assert brief(database) == [("put", 0)]
    work = queues.Work()
    while not work.is_done:
        work = database.transact(queues.step, JOBS, partial(queues.delete_step, force=True), work, None)
    assert history_keys(database) == 0


class Counted:
    """Counts the keys that transactions read and write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.written = 0
        for name in ("get", "scan", "put", "delete"):
            monkeypatch.setattr(Transaction, name, self._counted(name, getattr(Transaction, name)))

    def _counted(self, name: str, method: Any) -> Any:
        def call(tx: Transaction, *args: Any, **options: Any) -> Any:
            self.read += name in ("get", "scan")
            self.written += name in ("put", "delete")
            return method(tx, *args, **options)

        return call

    def during(self, work: Callable[[], Any]) -> tuple[int, int]:
        before = self.read, self.written
        work()
        return self.read - before[0], self.written - before[1]


@IN_MEMORY
def test_a_queue_without_history_reads_and_writes_the_same_keys(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Keys read, keys written) of a put, a lease and an ack. With a history, each change is one more key."""
    keys = Counted(monkeypatch)
    found = {}
    for name, policy in (("none", QueuePolicy()), ("durable", QueuePolicy(history="durable"))):
        queue = queues.QueueKey("main", name)
        database.transact(queues.set_policy, queue, policy)
        put(database, b"first", queue=queue)
        put_keys = keys.during(lambda: put(database, b"a", queue=queue))  # noqa: B023
        held: list[Any] = []
        lease_keys = keys.during(lambda: held.append(lease_one(database, queue=queue)))  # noqa: B023
        ack_keys = keys.during(lambda: database.transact(queues.ack, queue, proof(held[0])))  # noqa: B023
        found[name] = (put_keys, lease_keys, ack_keys)
    assert found["durable"] == tuple((read, written + 1) for read, written in found["none"])
    assert found["none"] == ((2, 2), (3, 3), (2, 3))


@IN_MEMORY
@pytest.mark.parametrize(
    "wrong", [{"history": "yes"}, {"history_seconds": 0}, {"history_seconds": float("inf")}, {"history": None}]
)
def test_invalid_policies_are_refused(database: Database, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        set_policy(database, **wrong)


@IN_MEMORY
def test_invalid_positions_are_refused(database: Database) -> None:
    set_policy(database, history="durable")
    for after in ("x", "00"):
        with pytest.raises(InvalidArgument):
            database.read(queues.read_history, JOBS, after=after)


def test_a_handle_reads_the_history_in_pages() -> None:
    with fastness.open("memory:") as plane:
        queue = plane.queue("jobs")
        queue.set_policy(msgspec.structs.replace(queue.policy(), history="durable"))
        queue.put_many(range(5))
        for message in queue.receive_many(5):
            message.ack()
        found = list[MessageEvent]()
        after: str | None = ""
        while after is not None:
            page = queue.history(4, after=after)
            found += page.events
            after = page.next
        assert [sum(event.event == name for event in found) for name in ("put", "leased", "acked")] == [5, 5, 5]
        assert len(found) == 15
