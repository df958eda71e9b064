"""Several processes share a queue on one PostgreSQL: each message has one owner, and waiting consumers are woken."""

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec
import psycopg
import pytest

import fastness
from fastness.limits import LOCK_LATE_MS_MAX
from fastness.testing.histories import History, Outcome
from fastness.testing.histories.queues import check_queue
from tests.faults import queue_child
from tests.support.depth import Depth
from tests.support.forked import start_python
from tests.support.waiting import eventually, exit_code

CHILD = Path(__file__).parent / "queue_child.py"
DEADLINE_SECONDS = 60.0  # A generous deadline for conditions that the tests wait for.
WAIT_SECONDS = 250.0  # More than the deadline and less than the polling interval, so a message in time was notified.


class Node:
    """A child process that puts and receives by itself, and executes single requests."""

    def __init__(
        self, url: str, name: str, *, producers: int = 0, puts: int = 0, consumers: int = 0, visibility: float = 30
    ) -> None:
        self.name = name
        self.lines: list[bytes] = []
        self._requests = count()
        arguments: list[str | Path] = [CHILD, url, name, *map(str, (producers, puts, consumers, visibility))]
        self._process = start_python(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self.lines.append(line)

    def request(self, kind: str, **options: Any) -> Callable[[], Any]:
        """Send a request; returns a function that waits for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([kind, options]) + b"\n")
        self._process.stdin.flush()
        client = f"{self.name}-{next(self._requests)}"
        return lambda: eventually(lambda: self._result(client), f"{client}'s answer to {kind}")[0]

    def call(self, kind: str, **options: Any) -> Any:
        """Send a request, and wait for its result."""
        return self.request(kind, **options)()

    def _result(self, client: str) -> list[Any] | None:
        for line in list(self.lines):
            _, sender, word, *details = msgspec.json.decode(line)
            if sender == client and word not in ("call", "ready"):
                assert word == "result", details
                return list(details)
        return None

    def count_results(self, kind: str, word: str = "result") -> int:
        """How many operations of a kind have had this result so far."""
        operations = queue_child.history_of(list(self.lines)).operations
        outcome = {"result": Outcome.OK, "call": Outcome.UNKNOWN}[word]
        return sum(each.kind == kind and each.outcome is outcome for each in operations)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process wherever it is, also inside a transaction."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def finish(self) -> None:
        """Wait for a successful exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert exit_code(self._process) == 0
        self._reader.join()

    def __enter__(self) -> Self:
        try:
            eventually(lambda: self.lines or self._process.poll() is not None, f"{self.name} to start")
            assert self.lines, f"{self.name} ended before it began"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture(autouse=True)
def logs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def check_jobs(history: History, **ids: Any) -> None:
    check_queue(history, "jobs", late_ms=LOCK_LATE_MS_MAX, **ids)


@contextmanager
def two_nodes(url: str) -> Iterator[tuple[Node, Node]]:
    """Two processes that only execute requests."""
    with Node(url, "one") as one, Node(url, "two") as two:
        yield one, two


def content(url: str) -> tuple[set[str], set[str], Any]:
    """The ids in the queue and its dead letter queue, and the counters that a third process reads."""
    with fastness.open(url) as plane:
        stats = plane.queue("jobs").stats()
        found, buried = plane.transact(queue_child.content), plane.transact(queue_child.content, "jobs.dlq")
        assert stats.ready == len(found["ready"])
        assert stats.blocked == len(found["blocked"])
        assert (stats.delayed, stats.leased) == (len(found["delayed"]), len(found["leased"]))
        left = {id for place in found.values() for id in place}
        return left, {id for place in buried.values() for id in place}, stats


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.rotating)])
def test_each_message_is_settled_by_one_owner(nodes: int, postgres_url: str, depth: Depth) -> None:
    """Producers and consumers in every process; conflicts are retried and reach no caller."""
    puts, producers = round(60 * depth.load), 2
    total = nodes * producers * puts
    fleet = [Node(postgres_url, f"node{n}", producers=producers, puts=puts, consumers=2) for n in range(nodes)]
    try:
        eventually(lambda: sum(node.count_results("put") for node in fleet) == total, "every put")
        eventually(lambda: sum(node.count_results("ack") for node in fleet) == total, "every ack")
        seen = [node.call("stats") for node in fleet]
        for node in fleet:
            node.finish()
    finally:
        for node in fleet:
            node.__exit__()
    lines = [line for node in fleet for line in node.lines]
    assert queue_child.errors_of(lines) == {}
    history = queue_child.history_of(lines)
    left, dead, stats = content(postgres_url)
    assert (left, dead) == (set(), set())
    check_jobs(history)

    # All processes see the same counters, except for the consumers waiting in each.
    assert stats.put_total == stats.acked_total == total
    for each in seen:
        assert msgspec.convert({**each, "waiting_consumers": 0}, type(stats)) == stats
    by_node = Counter(each.client.split("-")[0] for each in history.operations if each.kind == "ack")
    print(f"acks by node: {dict(by_node)}")  # One process may have received all.


def test_messages_of_a_killed_process_are_delivered_to_another(postgres_url: str) -> None:
    """The leases of a killed process are not renewed, so they expire and count as failures."""
    with two_nodes(postgres_url) as (one, two):
        ids = [one.call("put") for _ in range(5)]
        before = one.call("receive", limit=5, visibility_seconds=1.0)
        assert [id for id, *_ in before] == ids
        one.kill()
        after: list[Any] = []
        while len(after) < 5:
            after += two.call("receive", limit=5, visibility_seconds=30, wait_seconds=WAIT_SECONDS)
        assert sorted(id for id, *_ in after) == ids
        for _, fence, _, _, more in after:
            assert (fence, more["failures"]) == (2, 1)
        assert min(leased_ms for _, _, leased_ms, *_ in after) >= before[0][3]
        check_jobs(queue_child.history_of(one.lines + two.lines), left=ids)
        assert two.call("stats")["expired_total"] == 5


def test_a_lease_is_renewed_while_its_process_runs(postgres_url: str) -> None:
    """The other process waits for twice the visibility timeout, and gets the next message instead."""
    with two_nodes(postgres_url) as (one, two):
        first = one.call("put")
        held = one.call("receive", visibility_seconds=4)
        assert [id for id, *_ in held] == [first]
        second = one.call("put", delay_seconds=8)
        found = two.call("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS, limit=5)
        assert [id for id, *_ in found] == [second]
        stats = two.call("stats")
        assert (stats["leased"], stats["expired_total"]) == (2, 0)


def test_a_killed_process_does_not_block_others(postgres_url: str, depth: Depth) -> None:
    puts = round(60 * depth.load)
    with (
        Node(postgres_url, "victim", producers=1, puts=1_000, consumers=3, visibility=1.0) as victim,
        Node(postgres_url, "one", producers=1, puts=puts, consumers=2, visibility=1.0) as one,
        Node(postgres_url, "two", producers=1, puts=puts, consumers=2, visibility=1.0) as two,
    ):
        eventually(lambda: victim.count_results("ack") > 10, "the victim to be in the middle")
        victim.kill()
        print(f"killed with {victim.count_results('put')} puts and {victim.count_results('ack')} acks")
        eventually(lambda: one.count_results("put") == two.count_results("put") == puts, "every put of the others")
        eventually(lambda: not sum(map(len, _ids_by_state(postgres_url).values())), "everything to be delivered")
        one.finish()
        two.finish()
        lines = victim.lines + one.lines + two.lines
    assert set(queue_child.errors_of(lines)) <= {"queue_message_lease_mismatch"}
    left, dead, stats = content(postgres_url)
    check_jobs(queue_child.history_of(lines), left=left, dead=dead)
    assert (left, stats.put_total) == (set(), stats.acked_total + stats.dead_total)


@pytest.mark.rotating
def test_a_paused_process_does_not_block_others(postgres_url: str, depth: Depth) -> None:
    """PostgreSQL soon ends its transaction. No caller of either process notices."""
    puts = round(120 * depth.load)
    with (
        Node(postgres_url, "paused", producers=1, puts=puts, consumers=2) as paused,
        Node(postgres_url, "one", producers=1, puts=puts, consumers=2) as one,
    ):
        for _ in range(3):
            with paused.paused():
                before = one.count_results("lease")
                eventually(lambda: one.count_results("lease") >= before + 10, "progress")  # noqa: B023
        eventually(lambda: paused.count_results("put") == one.count_results("put") == puts, "every put")
        eventually(lambda: paused.count_results("ack") + one.count_results("ack") == 2 * puts, "every ack")
        paused.finish()
        one.finish()
        lines = paused.lines + one.lines
    assert queue_child.errors_of(lines) == {}
    assert content(postgres_url)[:2] == (set(), set())
    check_jobs(queue_child.history_of(lines))


def test_a_killed_postgresql_loses_nothing_acknowledged(own_postgres_url: str, depth: Depth) -> None:
    """When one of its processes is killed, PostgreSQL ends all sessions and recovers from its log."""
    kills = max(1, depth.server_kills - 1)
    puts = 40 * kills
    with (
        Node(own_postgres_url, "one", producers=2, puts=puts, consumers=2) as one,
        Node(own_postgres_url, "two", producers=2, puts=puts, consumers=2) as two,
    ):
        for kill in range(1, kills + 1):
            eventually(lambda: one.count_results("ack") + two.count_results("ack") > 25 * kill, "some acks")  # noqa: B023
            kill_postgresql(own_postgres_url)
        one.finish()
        two.finish()
        lines = one.lines + two.lines
    errors = queue_child.errors_of(lines)
    print(f"errors: {errors}")
    assert set(errors) <= {"commit_unknown", "unreachable"}
    left = {id for ids in _ids_by_state(own_postgres_url).values() for id in ids}
    check_jobs(queue_child.history_of(lines), left=left)


def kill_postgresql(url: str) -> None:
    """Send SIGKILL to a process of PostgreSQL that serves Fastness; the server restarts all of them."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fastness'"
    with psycopg.connect(url, autocommit=True) as connection:
        [pid] = eventually(lambda: connection.execute(query).fetchone(), "a session")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not _answers(lambda: connection.execute("SELECT 1")), "PostgreSQL to end all sessions")
    eventually(lambda: _answers(lambda: psycopg.connect(url).close()), "PostgreSQL to recover")


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except psycopg.OperationalError:
        return False
    return True


def _ids_by_state(url: str) -> dict[str, list[str]]:
    with fastness.open(url) as plane:
        found: dict[str, list[str]] = plane.transact(queue_child.content)
        return found


def test_a_waiting_consumer_is_woken_by_a_put_of_another_process(postgres_url: str) -> None:
    """By notification: the processes poll less often than the deadline here."""
    assert queue_child.POLL_SECONDS > WAIT_SECONDS > 2 * DEADLINE_SECONDS
    with two_nodes(postgres_url) as (one, two):
        for _ in range(3):
            waiting = one.request("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
            eventually(lambda: one.call("stats")["waiting_consumers"] == 1, "the consumer to wait")
            id = two.call("put")
            assert [found for found, *_ in waiting()] == [id]


def test_waiting_consumers_of_two_processes_get_one_message_each(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two):
        waiting = [
            node.request("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
            for node in (one, two)
            for _ in "ab"
        ]
        for node in (one, two):
            eventually(lambda: node.call("stats")["waiting_consumers"] == 2, "all of them to wait")  # noqa: B023
        ids = [one.call("put") for _ in range(2)] + [two.call("put") for _ in range(2)]
        assert sorted(id for answer in waiting for id, *_ in answer()) == sorted(ids)


def test_a_delayed_message_is_delivered_by_another_process_when_due(postgres_url: str) -> None:
    """Consumers wait for due times of messages from any process."""
    with two_nodes(postgres_url) as (one, two):
        for giver, taker in ((one, two), (two, one)):
            waiting = taker.request("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
            eventually(lambda: taker.call("stats")["waiting_consumers"] == 1, "the consumer to wait")  # noqa: B023
            id = giver.call("put", delay_seconds=0.7)
            [[found, _, leased_ms, _, more]] = waiting()
            assert found == id
            assert leased_ms >= more["created_ms"] + 700


def test_a_nack_in_one_process_wakes_the_other(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two), fastness.open(postgres_url) as plane:
        id = one.call("put")
        message = plane.queue("jobs").receive()
        assert message.id == id
        waiting = two.request("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
        eventually(lambda: two.call("stats")["waiting_consumers"] == 1, "the consumer to wait")
        message.nack(delay_seconds=0)
        assert [(found, fence) for found, fence, *_ in waiting()] == [(id, 2)]


def test_a_group_is_delivered_in_order_across_processes(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two), fastness.open(postgres_url) as plane:
        nodes, jobs, order = (one, two), plane.queue("jobs"), []
        ids = [nodes[number % 2].call("put", group="g") for number in range(8)]
        while message := jobs.receive():
            assert jobs.receive() is None, "the rest of the group waits"
            order.append(message.id)
            message.ack()
        assert order == ids


def test_an_idempotency_key_applies_to_every_process(postgres_url: str) -> None:
    """A client that lost the response may repeat the call on another node."""
    with two_nodes(postgres_url) as (one, two):
        asked = [node.request("put", idempotency_key="k") for node in (one, two) for _ in range(5)]
        assert len({answer() for answer in asked}) == 1
        assert one.call("stats")["ready"] == two.call("stats")["ready"] == 1
