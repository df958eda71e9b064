"""Several nodes on one queue of a PostgreSQL: what they count, whom a put wakes, and who gets which message."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.backends.postgres import PostgresDatabase
from holdfast.kv import Subspace, Transaction
from holdfast.layers import queues
from holdfast.layers.queues import QueueKey
from holdfast.wire.queues import NewMessage

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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
        until(lambda: one.contention.lock_waits > 0)
        let_go.set()
        assert is_running.wait(DEADLINE_SECONDS)
        one.transact(put_shared)
        finish.set()
        holding.result(DEADLINE_SECONDS)
        waiting.result(DEADLINE_SECONDS)
    stats = one.read(queues.stats, JOBS)
    assert (stats.put_total, stats.ready) == (2, 2)
