"""Several nodes on one queue of a PostgreSQL: what they count, whom a put wakes, and who gets which message."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import fastness
from fastness import limits
from fastness.backends.postgres import PostgresDatabase
from fastness.handles.sync.queues import Queue
from fastness.kv import Subspace, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.plane.executor import Work, execute_alone
from fastness.plane.operations import handler_of
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.dispatcher import Dispatcher
from fastness.wire.queues import MessageLease, NewMessage, PutMessages
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0
JOBS = QueueKey("main", "jobs")
KEYS = queues.keys_of(JOBS)
OpenNode = Callable[[], PostgresDatabase]


@pytest.fixture
def open_node(postgres_url: str) -> Iterator[OpenNode]:
    """Opens the key space as another process."""
    opened: list[PostgresDatabase] = []

    def open_one() -> PostgresDatabase:
        opened.append(PostgresDatabase(postgres_url))
        return opened[-1]

    yield open_one
    for node in opened:
        node.close()


def put_shared(tx: Transaction) -> None:
    tx.share(KEYS.prefix)
    queues.put(tx, JOBS, [NewMessage()])


def test_puts_that_a_process_runs_at_the_same_time_are_all_counted(open_node: OpenNode) -> None:
    """A transaction that waited for a lock runs on a connection of its own, beside the others of its process."""
    one, two = open_node(), open_node()
    is_held, is_running, let_go, finish = (threading.Event() for _ in range(4))
    other = Subspace("u", "main", "states", "s").key()

    def hold(tx: Transaction) -> None:
        tx.get(other)
        is_held.set()
        let_go.wait(DEADLINE_SECONDS)

    def put_and_wait(tx: Transaction) -> None:
        put_shared(tx)
        tx.get(other)
        is_running.set()
        finish.wait(DEADLINE_SECONDS)

    with ThreadPoolExecutor(2) as threads:
        holding = threads.submit(two.transact, hold)
        assert is_held.wait(DEADLINE_SECONDS)
        waiting = threads.submit(one.transact, put_and_wait)
        eventually(lambda: one.contention.lock_waits > 0)
        let_go.set()
        assert is_running.wait(DEADLINE_SECONDS)
        one.transact(put_shared)
        finish.set()
        holding.result(DEADLINE_SECONDS)
        waiting.result(DEADLINE_SECONDS)
    stats = one.read(queues.stats, JOBS)
    assert (stats.put_total, stats.ready) == (2, 2)


def test_plain_puts_of_two_nodes_run_at_the_same_time(open_node: OpenNode) -> None:
    one, two = open_node(), open_node()
    is_putting, finish = threading.Event(), threading.Event()

    def put_and_wait(tx: Transaction) -> None:
        put_shared(tx)
        is_putting.set()
        finish.wait(DEADLINE_SECONDS)

    def put_in_one_call(message: NewMessage) -> None:
        request = PutMessages("jobs", [message])
        two.transact(execute_alone, Work(handler_of(request), request))

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.transact, put_and_wait)
        assert is_putting.wait(DEADLINE_SECONDS)
        put_in_one_call(NewMessage(delay_seconds=1.0, ttl_seconds=60.0))
        assert (two.contention.lock_waits, first.done()) == (0, False)
        exclusive = threads.submit(put_in_one_call, NewMessage(group="g"))
        eventually(lambda: two.contention.lock_waits == 1)
        assert not exclusive.done()
        finish.set()
        first.result(DEADLINE_SECONDS)
        exclusive.result(DEADLINE_SECONDS)
    stats = one.read(queues.stats, JOBS)
    assert (stats.put_total, stats.ready, stats.delayed) == (3, 2, 1)


class CountingNode(PostgresDatabase):
    """Counts the deliveries that are attempted."""

    attempts = 0

    def transact(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        self.attempts += work is queues.lease_or_wait
        return super().transact(work, *args, **options)


def test_a_put_leads_to_at_most_one_attempt_per_node(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many consumers wait. Neither the delivery nor the ack wakes a consumer."""
    monkeypatch.setattr(limits, "WATCH_RECHECK_SECONDS", 3_600.0)
    count, consumers_per_node = 40, 8
    done: SimpleQueue[bytes | None] = SimpleQueue()

    def consume(node: PostgresDatabase, dispatcher: Dispatcher) -> None:
        payload: bytes | None = b""
        while payload != b"stop":
            leased = dispatcher.receive(JOBS, wait_ms=60_000, tier=None, owner="ada")
            (message,) = leased.messages
            payload = message.payload
            node.transact(queues.ack, JOBS, MessageLease(queues.format_id(message.id), message.lease_id, message.fence))
            done.put(payload)

    with CountingNode(postgres_url) as one, CountingNode(postgres_url) as two:
        dispatchers = [Dispatcher(node, None, ConsumerOptions(poll_seconds=3_600.0)) for node in (one, two)]
        with ThreadPoolExecutor(2 * consumers_per_node) as threads:
            for node, dispatcher in zip((one, two), dispatchers, strict=True):
                for _ in range(consumers_per_node):
                    threads.submit(consume, node, dispatcher)
                eventually(lambda dispatcher=dispatcher: dispatcher.waiting(JOBS) == consumers_per_node)  # type: ignore[misc]
            before = one.attempts + two.attempts
            for _ in range(count):
                one.transact(put_shared)
                assert done.get(timeout=DEADLINE_SECONDS) == b""
            attempts = one.attempts + two.attempts - before
            for _ in range(2 * consumers_per_node):
                two.transact(queues.put, JOBS, [NewMessage(b"stop")])
    # When the first message was put, the consumers at the front may still have been reading the empty queue.
    assert count <= attempts <= 2 * count + 2 * consumers_per_node


def test_a_consumer_that_begins_to_wait_reads_the_queue_once(postgres_url: str) -> None:
    with CountingNode(postgres_url) as node, ThreadPoolExecutor(1) as threads:
        with node.watch(KEYS.prefix) as watch:
            assert watch.wait(DEADLINE_SECONDS)  # All watches fire once when the process begins to listen.
        dispatcher = Dispatcher(node, None, ConsumerOptions(poll_seconds=3_600.0))
        waiting = threads.submit(dispatcher.receive, JOBS, wait_ms=60_000, tier=None, owner="ada")
        eventually(lambda: dispatcher.waiting(JOBS) == 1)
        node.transact(put_shared)
        assert len(waiting.result(DEADLINE_SECONDS).messages) == 1
        assert node.attempts == 2


def test_consumers_of_two_nodes_share_a_backlog(postgres_url: str, tmp_path: Path) -> None:
    count, consumers_per_node, batch = 600, 4, 7
    payloads = [b"%d" % number for number in range(count)]
    received: dict[str, list[bytes]] = {"one": [], "two": []}
    have_all_received = threading.Barrier(2 * consumers_per_node)

    def consume(node: str, jobs: Queue) -> None:
        is_first = True
        while left:
            messages = jobs.receive_many(batch, wait_seconds=1.0)
            received[node] += [message.payload or b"" for message in messages]
            for message in messages:
                message.ack()
                left.discard(message.payload)
            if is_first:  # Every consumer gets some of the backlog, however fast the others are.
                assert messages
                have_all_received.wait(DEADLINE_SECONDS)
                is_first = False

    def put_one(jobs: Queue, payload: bytes) -> None:
        jobs.put(payload)

    def fold_meanwhile() -> None:
        with PostgresDatabase(postgres_url) as another:
            while left:
                another.transact(queues.fold, JOBS)

    left = set(payloads)
    folder = str(tmp_path)
    with fastness.open(postgres_url, activity=folder) as one, fastness.open(postgres_url, activity=folder) as two:
        half = count // 2
        for begin in range(0, half, 50):
            one.queue("jobs").put_many(payloads[begin : begin + 50])
        with ThreadPoolExecutor(2 * consumers_per_node + 3) as threads:
            running = [
                threads.submit(consume, name, node.queue("jobs"))
                for name, node in (("one", one), ("two", two))
                for _ in range(consumers_per_node)
            ]
            running.append(threads.submit(fold_meanwhile))
            running += [
                threads.submit(put_one, node.queue("jobs"), payload)
                for node, part in ((one, payloads[half : half + half // 2]), (two, payloads[half + half // 2 :]))
                for payload in part
            ]
            for each in running:
                each.result(DEADLINE_SECONDS)
        assert sorted(received["one"] + received["two"]) == sorted(payloads)
        assert received["one"]
        assert received["two"]
        stats = two.queue("jobs").stats()
        assert (stats.put_total, stats.delivered_total, stats.acked_total) == (count, count, count)
        assert (stats.ready, stats.leased, stats.expired_total, stats.failed_total) == (0, 0, 0, 0)
