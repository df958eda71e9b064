"""Nodes on one PostgreSQL: transactions on different parts never wait, and those on the same part queue up.

Run as a program, this file is a node that is paused in the middle of a transaction.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastness import limits
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.postgres.sessions import Session
from fastness.backends.postgres.statements import Statement
from fastness.kv import Transaction
from fastness.kv.keys import pack, prefix_range
from fastness.layers import locks
from fastness.layers.lock_transaction import Waiting
from fastness.wire.locks import GrantedLocks, LockSession
from tests.support.depth import Depth
from tests.support.forked import start_python
from tests.support.waiting import eventually

DEADLINE_SECONDS = 60.0  # Bounds every wait; far longer than any step takes.
AREAS = ("q", "w", "mail", "states", "leases")


def key_in(area: str, name: str, *rest: str) -> bytes:
    """A key of a queue, world, mailbox, state or lease."""
    return pack(("u", "main", area, name, *rest))


def append(tx: Transaction, key: bytes, by: bytes) -> bytes:
    value = (tx.get(key) or b"") + by
    tx.put(key, value)
    return value


def increment(tx: Transaction, *keys: bytes) -> None:
    for key in keys:
        tx.put(key, b"%d" % (int(tx.get(key) or b"0") + 1))


def value_of(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def acquire(tx: Transaction, owner: str, path: tuple[str, str], mode: str = "X") -> GrantedLocks | Waiting:
    """An ordered lock of the session of `owner`."""
    session = LockSession(f"session-of-{owner}-0123456789")
    steps = locks.steps_of([path], mode)
    return locks.acquire(tx, locks.AcquireCall(session, "claim", steps, owner, 60_000), may_wait=True)


class Held:
    """A transaction that stays open after its first read, or after its work, until it is released."""

    def __init__(
        self,
        database: PostgresDatabase,
        key: bytes = b"",
        *,
        shares: bool = False,
        work: Callable[[Transaction], object] | None = None,
    ) -> None:
        self.runs = 0
        self._database = database
        self._key = key
        self._shares = shares
        self._special_work = work
        self._is_open = threading.Event()
        self._release = threading.Event()
        self._thread = threading.Thread(target=self._transact, daemon=True)
        self._error: BaseException | None = None

    def _work(self, tx: Transaction) -> None:
        self.runs += 1
        if self._special_work is not None:
            self._special_work(tx)
        elif self._shares:
            tx.share(self._key)
            tx.put(self._key + b"shared by the first", b"")
            tx.get(self._key)
        else:
            append(tx, self._key, b"1")
        self._is_open.set()
        assert self._release.wait(DEADLINE_SECONDS)

    def _transact(self) -> None:
        try:
            self._database.transact(self._work)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Held":
        self._thread.start()
        assert self._is_open.wait(DEADLINE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()
        assert self._error is None


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not end a transaction that a test holds open."""
    monkeypatch.setattr(limits, "IDLE_TRANSACTION_SECONDS_MAX", 2 * DEADLINE_SECONDS)
    monkeypatch.setattr(limits, "LOCK_WAIT_SECONDS_MAX", 2 * DEADLINE_SECONDS)


@pytest.fixture
def nodes(postgres_url: str) -> Iterator[list[PostgresDatabase]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PostgresDatabase(postgres_url)) for _ in range(3)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def wait_for_waiters(postgres_url: str) -> Iterator[Callable[[int], None]]:
    """Returns once this many transactions wait for a lock."""
    query = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def wait(waiters: int) -> None:
            eventually(lambda: connection.execute(query).fetchone() == (waiters,), f"{waiters} transactions wait")

        yield wait


def contention_of(nodes: list[PostgresDatabase]) -> tuple[int, int, int]:
    counts = [(each.contention.conflicts, each.contention.retries, each.contention.lock_waits) for each in nodes]
    return sum(each[0] for each in counts), sum(each[1] for each in counts), sum(each[2] for each in counts)


# Different parts.


def test_transactions_on_other_parts_do_not_wait(nodes: list[PostgresDatabase], threads: ThreadPoolExecutor) -> None:
    """Everything but the queue that is held: other queues, and other areas with the same name."""
    one, other, _ = nodes
    with Held(one, key_in("q", "held")) as held:
        for area in AREAS:
            for name in ("held", "free"):
                if (area, name) != ("q", "held"):
                    done = threads.submit(other.transact, append, key_in(area, name), b"2")
                    assert done.result(DEADLINE_SECONDS) == b"2"
    assert held.runs == 1
    assert one.read(value_of, key_in("q", "held")) == b"1"
    assert contention_of(nodes) == (0, 0, 0)


def test_snapshot_reads_do_not_wait(nodes: list[PostgresDatabase], threads: ThreadPoolExecutor) -> None:
    one, other, _ = nodes
    key = key_in("q", "held")
    one.transact(append, key, b"0")
    with Held(one, key):
        assert threads.submit(other.read, value_of, key).result(DEADLINE_SECONDS) == b"0"
    assert other.read(value_of, key) == b"01"


def test_a_transaction_that_waits_does_not_hold_up_others_of_its_node(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, wait_for_waiters: Callable[[int], None]
) -> None:
    one, other, _ = nodes
    with Held(one, key_in("q", "held")):
        waiting = [threads.submit(other.transact, append, key_in("q", "held"), b"2") for _ in range(3)]
        wait_for_waiters(1)  # Those of one node wait together.
        for number in range(10):
            done = threads.submit(other.transact, append, key_in("q", f"free-{number}"), b"2")
            assert done.result(DEADLINE_SECONDS) == b"2"
        assert not any(each.done() for each in waiting)
    assert sorted(each.result(DEADLINE_SECONDS) for each in waiting) == [b"12", b"122", b"1222"]


def test_nodes_with_queues_of_their_own_have_no_contention(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor
) -> None:
    """No transaction is aborted, run again, or has to wait, although all write to the same pages."""
    calls = [
        threads.submit(node.transact, increment, key_in("q", f"own-{number}"), key_in("q", f"own-{number}", "more"))
        for _ in range(50)
        for number, node in enumerate(nodes)
    ]
    for call in calls:
        call.result(DEADLINE_SECONDS)
    assert [nodes[0].read(value_of, key_in("q", f"own-{number}", "more")) for number in range(3)] == [b"50"] * 3
    assert contention_of(nodes) == (0, 0, 0)


# The same part.


def test_transactions_on_the_same_part_run_in_the_order_of_their_waiting(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, wait_for_waiters: Callable[[int], None]
) -> None:
    one, *others = nodes
    key = key_in("q", "held")
    waiting: list[Future[bytes]] = []
    with Held(one, key) as held:
        for number, node in enumerate(others):
            waiting.append(threads.submit(node.transact, append, key, b"%d" % (number + 2)))
            wait_for_waiters(number + 1)
        assert not any(each.done() for each in waiting)
    assert [each.result(DEADLINE_SECONDS) for each in waiting] == [b"12", b"123"]
    assert held.runs == 1
    conflicts, retries, lock_waits = contention_of(nodes)
    assert (conflicts, retries) == (0, 0)
    assert lock_waits == 2


def test_no_increment_of_a_shared_counter_is_lost(nodes: list[PostgresDatabase], threads: ThreadPoolExecutor) -> None:
    key = key_in("q", "shared")
    calls = [threads.submit(node.transact, increment, key) for _ in range(60) for node in nodes]
    for call in calls:
        call.result(DEADLINE_SECONDS)
    assert nodes[0].read(value_of, key) == b"180"
    assert contention_of(nodes)[:2] == (0, 0)


def test_transactions_that_share_a_part_do_not_wait_for_each_other(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, wait_for_waiters: Callable[[int], None]
) -> None:
    """One that owns the part waits for those that share it."""
    one, other, third = nodes
    key = key_in("q", "shared")

    def put_shared(tx: Transaction) -> bytes | None:
        tx.share(key)
        tx.put(key + b"shared by the second", b"")
        return tx.get(key)

    with Held(one, key, shares=True):
        assert threads.submit(other.transact, put_shared).result(DEADLINE_SECONDS) is None
        owning = threads.submit(third.transact, lambda tx: len(tx.scan(*prefix_range(key), limit=10)))
        wait_for_waiters(1)
        assert not owning.done()
    assert owning.result(DEADLINE_SECONDS) == 2


def test_a_part_that_is_not_shared_any_more_is_waited_for(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, wait_for_waiters: Callable[[int], None]
) -> None:
    one, other, _ = nodes
    key = key_in("q", "shared")
    runs = []

    def own(tx: Transaction) -> tuple[bytes | None, int]:
        runs.append(1)
        tx.share(key)
        first = tx.get(key + b"exclusive")
        tx.unshare(key)
        tx.share(key)  # Without effect: what it writes would not be locked.
        tx.put(key + b"exclusive", b"")
        return first, len(tx.scan(*prefix_range(key), limit=10))

    with Held(one, key, shares=True):
        owning = threads.submit(other.transact, own)
        wait_for_waiters(1)
        assert not owning.done()
    assert owning.result(DEADLINE_SECONDS) == (None, 2)
    assert len(runs) == 2


def test_rows_of_one_type_are_locked_at_the_same_time_and_their_table_is_not(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, wait_for_waiters: Callable[[int], None]
) -> None:
    """The intents on the type are shared until a commit; a lock of the whole type waits for it."""
    one, other, third = nodes
    one.transact(acquire, "dora", ("record_id", "user/1"))  # The first one of a universe leaves a mark.
    with Held(one, work=partial(acquire, owner="ada", path=("record_id", "task/1"))):
        row = threads.submit(other.transact, acquire, "bob", ("record_id", "task/2"))
        assert isinstance(row.result(DEADLINE_SECONDS), GrantedLocks)
        table = threads.submit(third.transact, acquire, "carl", ("entity_type", "task"), "S")
        wait_for_waiters(1)
        assert not table.done()
    waiting = table.result(DEADLINE_SECONDS)
    assert isinstance(waiting, Waiting)
    assert sorted(owner for owner, _ in waiting.holders) == ["ada", "bob"]
    assert contention_of(nodes)[:2] == (0, 0)


def test_a_write_excludes_ordered_locks_until_its_transaction_ends(
    nodes: list[PostgresDatabase],
    threads: ThreadPoolExecutor,
    wait_for_waiters: Callable[[int], None],
    postgres_url: str,
) -> None:
    """Also in a transaction of the caller's own connection."""
    one, other, _ = nodes
    one.transact(acquire, "dora", ("entity_type", "user"))
    with psycopg.connect(postgres_url) as connection:
        assert one.within(connection).run(locks.obstacles, "main", [("task", "1")]) == []
        table = threads.submit(other.transact, acquire, "ada", ("entity_type", "task"))
        wait_for_waiters(1)
        assert not table.done()
        connection.commit()
        assert isinstance(table.result(DEADLINE_SECONDS), GrantedLocks)
        (obstacle,) = one.within(connection).run(locks.obstacles, "main", [("task", "1")])
        assert obstacle.owner == "ada"


def test_a_row_lock_and_its_release_take_a_known_number_of_round_trips(
    nodes: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[int] = []

    def counted(session: Session, wanted: Any, **options: Any) -> Any:
        sends.append(len(wanted))
        return send(session, wanted, **options)

    nodes[0].transact(acquire, "ada", ("record_id", "task/1"))
    send = Session._send
    monkeypatch.setattr(Session, "_send", counted)
    nodes[1].transact(acquire, "bob", ("record_id", "task/2"))
    assert len(sends) == 6  # Its session, the mark of the universe, three locks, and the commit.
    sends.clear()
    nodes[1].transact(locks.release, LockSession("session-of-bob-0123456789"), "claim")
    assert len(sends) == 5


# Several parts.


def test_prefetched_keys_are_read_in_one_round_trip_and_seen_as_by_get(
    nodes: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, new = (key_in("w", "ada", name) for name in ("one", "other", "new"))
    nodes[0].transact(increment, one, other)
    trips: list[list[bytes]] = []

    def counted(session: Session, *wanted: Statement) -> Any:
        trips.append([name for name, _ in wanted])
        return run(session, *wanted)

    def prefetch(tx: Transaction) -> list[bytes | None]:
        tx.put(other, b"own")
        tx.prefetch(one, other, new)
        nested = tx.nested()
        nested.prefetch(one, new)
        return [nested.get(key) for key in (one, other, new)]

    run = Session.run
    monkeypatch.setattr(Session, "run", counted)
    assert nodes[1].transact(prefetch) == [b"1", b"own", None]
    assert [trip for trip in trips if b"get" in trip] == [[b"wait_shared", b"keys", b"try", b"get", b"get", b"get"]]
    trips.clear()
    assert nodes[1].read(prefetch_and_get, one, new) == [b"1", None]
    assert [trip for trip in trips if b"get" in trip] == [[b"now", b"keys", b"get", b"get"]]


def prefetch_and_get(tx: Transaction, *keys: bytes) -> list[bytes | None]:
    tx.prefetch(*keys)
    return [tx.get(key) for key in keys]


def test_the_whole_key_space_is_read_as_of_one_moment(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor
) -> None:
    """One node moves units between queues, and another one adds all of them up in transactions that also write."""
    one, other, _ = nodes
    keys = [key_in("q", f"account-{number}") for number in range(4)]
    one.transact(lambda tx: [tx.put(key, b"10") for key in keys])

    def move(tx: Transaction, number: int) -> None:
        source, target = keys[number % 4], keys[(number + 1 + number % 3) % 4]
        amount = int(tx.get(source) or b"")
        tx.put(source, b"%d" % (amount - 1))
        tx.put(target, b"%d" % (int(tx.get(target) or b"") + 1))

    def total(tx: Transaction, number: int) -> int:
        tx.put(key_in("states", "checked"), b"%d" % number)
        return sum(int(value) for _, value in tx.scan(*prefix_range(pack(("u", "main", "q"))), limit=100))

    moves = [threads.submit(one.transact, move, number) for number in range(100)]
    totals = [threads.submit(other.transact, total, number) for number in range(25)]
    assert {each.result(DEADLINE_SECONDS) for each in totals} == {40}
    for each in moves:
        each.result(DEADLINE_SECONDS)
    assert one.transact(total, 0) == 40


# Which node, and the parts that its transaction touches, in order: it takes one from the first and adds it to the last.
transfers = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)),
    min_size=2,
    max_size=24,
)


def test_transactions_on_several_parts_never_block_each_other_for_ever(
    nodes: list[PostgresDatabase], threads: ThreadPoolExecutor, depth: Depth
) -> None:
    """In any order of parts. Every transaction ends, and every counter has what the transactions say."""
    examples = count()

    @settings(max_examples=round(40 * depth.stored_examples), suppress_health_check=list(HealthCheck))
    @given(transfers)
    def check(plan: list[tuple[int, list[int]]]) -> None:
        example = next(examples)
        keys = [key_in(area, f"example-{example}") for area in AREAS]
        expected: Counter[int] = Counter()

        def move(tx: Transaction, parts: list[int]) -> None:
            amounts = {part: int(tx.get(keys[part]) or b"0") for part in parts}
            amounts[parts[0]] -= 1
            amounts[parts[-1]] += 1
            for part, amount in amounts.items():
                tx.put(keys[part], b"%d" % amount)

        calls = []
        for node, parts in plan:
            expected[parts[0]] -= 1
            expected[parts[-1]] += 1
            calls.append(threads.submit(nodes[node].transact, move, parts))
        for call in calls:
            call.result(DEADLINE_SECONDS)
        found = [int(nodes[0].read(value_of, key) or b"0") for key in keys]
        assert found == [expected[part] for part in range(len(keys))]
        assert sum(found) == 0

    check()
    conflicts, retries, lock_waits = contention_of(nodes)
    print(f"{next(examples)} examples, {lock_waits} lock waits")
    assert (conflicts, retries) == (0, 0)


# A node that is paused.


def test_a_paused_node_blocks_only_what_it_holds_and_not_for_long(
    postgres_url: str, nodes: list[PostgresDatabase], threads: ThreadPoolExecutor
) -> None:
    """PostgreSQL ends its transaction. When it goes on, it runs its function again."""
    one = nodes[0]
    key, other = key_in("q", "held"), key_in("q", "free")
    with start_python([__file__, postgres_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as paused:
        try:
            assert paused.stdin is not None
            assert paused.stdout is not None
            assert paused.stdout.readline() == b"holding\n"
            paused.send_signal(signal.SIGSTOP)
            waiting = threads.submit(one.transact, append, key, b"1")
            assert threads.submit(one.transact, append, other, b"1").result(DEADLINE_SECONDS) == b"1"
            assert waiting.result(DEADLINE_SECONDS) == b"1", "the write of the paused node is not there"
            paused.send_signal(signal.SIGCONT)
            paused.stdin.write(b"\n")
            paused.stdin.close()
            assert paused.wait(DEADLINE_SECONDS) == 0
            assert paused.stdout.read() == b"ran 2 times\n"
        finally:
            paused.kill()
    assert one.read(value_of, key) == b"12"


def paused_node(url: str) -> None:
    limits.IDLE_TRANSACTION_SECONDS_MAX = 1.0  # type: ignore[misc]
    runs: list[Any] = []

    def hold(tx: Transaction) -> None:
        append(tx, key_in("q", "held"), b"2")
        runs.append(None)
        if len(runs) == 1:
            os.write(1, b"holding\n")
            sys.stdin.readline()

    with PostgresDatabase(url) as database:
        database.transact(hold)
    os.write(1, b"ran %d times\n" % len(runs))


if __name__ == "__main__":
    paused_node(sys.argv[1])
