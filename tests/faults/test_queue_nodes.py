"""Several processes share a queue on one PostgreSQL: each message has one owner at a time, and nobody waits in vain."""

import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

import holdfast
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.testing.histories import Outcome
from holdfast.testing.histories.queues import check_queue

CHILD = Path(__file__).parent / "queue_child.py"
SAID: Any = runpy.run_path(str(CHILD))  # Test files cannot import each other.
DEADLINE_SECONDS = 60.0  # Far more than anything here takes; whoever waits for a condition must end some day.
WAIT_SECONDS = 250.0  # More than the deadline, and less than the safety poll: what comes in time was notified.


class Node:
    """A process that puts and receives on its own account, and does single things when it is asked to."""

    def __init__(
        self, url: str, name: str, *, producers: int = 0, puts: int = 0, consumers: int = 0, visibility: float = 30
    ) -> None:
        self.name = name
        self.lines: list[bytes] = []
        self._asked = count()
        command = [sys.executable, str(CHILD), url, name, *map(str, (producers, puts, consumers, visibility))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self.lines.append(line)

    def ask(self, kind: str, **options: Any) -> Callable[[], Any]:
        """Have something done; a function that waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([kind, options]) + b"\n")
        self._process.stdin.flush()
        client = f"{self.name}-{next(self._asked)}"
        return lambda: until(lambda: self._answer(client), f"{client}'s answer to {kind}")[0]

    def do(self, kind: str, **options: Any) -> Any:
        """Have something done, and wait for its answer."""
        return self.ask(kind, **options)()

    def _answer(self, client: str) -> list[Any] | None:
        for line in list(self.lines):
            _, who, word, *about = msgspec.json.decode(line)
            if who == client and word not in ("asks", "ready"):
                assert word == "told", about
                return about
        return None

    def said(self, kind: str, word: str = "told") -> int:
        """How many operations of a kind had such an answer by now."""
        operations = SAID["history_of"](list(self.lines)).operations
        outcome = {"told": Outcome.OK, "asks": Outcome.UNKNOWN}[word]
        return sum(each.kind == kind and each.outcome is outcome for each in operations)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def finish(self) -> None:
        """Let it come to its end, which must be a good one."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE_SECONDS) == 0
        self._reader.join()

    def __enter__(self) -> Self:
        try:
            until(lambda: self.lines or self._process.poll() is not None, f"{self.name} to start")
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


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for other processes; what the condition came to be."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"Waited {DEADLINE_SECONDS} s in vain for {what}")


@pytest.fixture(autouse=True)
def logs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@contextmanager
def two_nodes(url: str) -> Iterator[tuple[Node, Node]]:
    """Two processes that do only what they are asked to."""
    with Node(url, "one") as one, Node(url, "two") as two:
        yield one, two


def content(url: str) -> tuple[set[str], set[str], Any]:
    """The ids in the queue and among its dead letters, and the counts that a third process sees."""
    with holdfast.open(url) as plane:
        stats = plane.queue("jobs").stats()
        found, buried = plane.transact(SAID["content"]), plane.transact(SAID["content"], "jobs.dlq")
        assert stats.ready == len(found["ready"])
        assert stats.blocked == len(found["blocked"])
        assert stats.delayed + stats.leased == len(found["parked"])
        left = {id for place in found.values() for id in place}
        return left, {id for place in buried.values() for id in place}, stats


@pytest.mark.parametrize("nodes", [2, 3])
def test_each_message_is_settled_by_its_one_owner(nodes: int, postgres_url: str) -> None:
    """Producers and consumers in every process; conflicts are retried and reach no caller."""
    puts, producers = 60, 2
    total = nodes * producers * puts
    fleet = [Node(postgres_url, f"node{n}", producers=producers, puts=puts, consumers=2) for n in range(nodes)]
    try:
        until(lambda: sum(node.said("put") for node in fleet) == total, "every put")
        until(lambda: sum(node.said("ack") for node in fleet) == total, "every ack")
        seen = [node.do("stats") for node in fleet]
        for node in fleet:
            node.finish()
    finally:
        for node in fleet:
            node.__exit__()
    lines = [line for node in fleet for line in node.lines]
    assert SAID["errors_of"](lines) == {}
    history = SAID["history_of"](lines)
    left, dead, stats = content(postgres_url)
    assert (left, dead) == (set(), set())
    check_queue(history, "jobs")

    # Everybody counts the same, except for who waits in its own process.
    assert stats.put_total == stats.acked_total == total
    for each in seen:
        assert msgspec.convert({**each, "waiting_consumers": 0}, type(stats)) == stats
    by_node = Counter(each.client.split("-")[0] for each in history.operations if each.kind == "ack")
    print(f"acks by node: {dict(by_node)}")  # Who is fast may have got them all.


def test_what_a_killed_process_had_is_delivered_to_another(postgres_url: str) -> None:
    """Lesson 7: a consumer that crashed has failed, and its messages go on. A killed keeper keeps nothing."""
    with two_nodes(postgres_url) as (one, two):
        ids = [one.do("put") for _ in range(5)]
        before = one.do("receive", limit=5, visibility_seconds=1.0)
        assert [id for id, *_ in before] == ids
        one.kill()
        after: list[Any] = []
        while len(after) < 5:
            after += two.do("receive", limit=5, visibility_seconds=30, wait_seconds=WAIT_SECONDS)
        assert sorted(id for id, *_ in after) == ids
        for _, fence, _, _, more in after:
            assert (fence, more["failures"]) == (2, 1)
        assert min(leased_ms for _, _, leased_ms, *_ in after) >= before[0][3]
        check_queue(SAID["history_of"](one.lines + two.lines), "jobs", left=ids)
        assert two.do("stats")["expired_total"] == 5


def test_a_lease_is_kept_while_its_process_lives(postgres_url: str) -> None:
    """Lesson 31: the other process waits for twice the visibility, and gets the next message instead."""
    with two_nodes(postgres_url) as (one, two):
        first = one.do("put")
        held = one.do("receive", visibility_seconds=4)
        assert [id for id, *_ in held] == [first]
        second = one.do("put", delay_seconds=8)
        found = two.do("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS, limit=5)
        assert [id for id, *_ in found] == [second]
        stats = two.do("stats")
        assert (stats["leased"], stats["expired_total"]) == (2, 0)


def test_a_process_killed_in_the_middle_of_everything_holds_nobody_up(postgres_url: str) -> None:
    with (
        Node(postgres_url, "victim", producers=1, puts=1_000, consumers=3, visibility=1.0) as victim,
        Node(postgres_url, "one", producers=1, puts=60, consumers=2, visibility=1.0) as one,
        Node(postgres_url, "two", producers=1, puts=60, consumers=2, visibility=1.0) as two,
    ):
        until(lambda: victim.said("ack") > 10, "the victim to be in the middle")
        victim.kill()
        print(f"killed with {victim.said('put')} puts and {victim.said('ack')} acks")
        until(lambda: one.said("put") == two.said("put") == 60, "every put of the others")
        until(lambda: not sum(map(len, _places(postgres_url).values())), "everything to be delivered")
        one.finish()
        two.finish()
        lines = victim.lines + one.lines + two.lines
    assert set(SAID["errors_of"](lines)) <= {"queue_message_lease_mismatch"}
    left, dead, stats = content(postgres_url)
    check_queue(SAID["history_of"](lines), "jobs", left=left, dead=dead)
    assert (left, stats.put_total) == (set(), stats.acked_total + stats.dead_total)


def _places(url: str) -> dict[str, list[str]]:
    with holdfast.open(url) as plane:
        found: dict[str, list[str]] = plane.transact(SAID["content"])
        return found


def test_a_waiting_consumer_is_woken_by_a_put_of_another_process(postgres_url: str) -> None:
    """By notification: it would look by itself only after five minutes, and its wait ends after the deadline here."""
    assert ConsumerOptions().resilient_poll_seconds > WAIT_SECONDS
    assert WAIT_SECONDS > 2 * DEADLINE_SECONDS
    with two_nodes(postgres_url) as (one, two):
        for _ in range(3):
            waiting = one.ask("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
            until(lambda: one.do("stats")["waiting_consumers"] == 1, "the consumer to wait")
            id = two.do("put")
            assert [found for found, *_ in waiting()] == [id]


def test_consumers_of_two_processes_that_wait_get_a_message_each(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two):
        waiting = [
            node.ask("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS) for node in (one, two) for _ in "ab"
        ]
        for node in (one, two):
            until(lambda node=node: node.do("stats")["waiting_consumers"] == 2, "all of them to wait")
        ids = [one.do("put") for _ in range(2)] + [two.do("put") for _ in range(2)]
        assert sorted(id for answer in waiting for id, *_ in answer()) == sorted(ids)


def test_a_delayed_message_of_one_process_is_delivered_by_the_other_once_it_is_due(postgres_url: str) -> None:
    """Lesson 13: a due time is waited for, not polled for. Which process put the message does not matter."""
    with two_nodes(postgres_url) as (one, two):
        for giver, taker in ((one, two), (two, one)):
            waiting = taker.ask("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
            until(lambda taker=taker: taker.do("stats")["waiting_consumers"] == 1, "the consumer to wait")
            id = giver.do("put", delay_seconds=0.7)
            [[found, _, leased_ms, _, more]] = waiting()
            assert found == id
            assert leased_ms >= more["created_ms"] + 700


def test_a_nack_in_one_process_wakes_the_other(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two), holdfast.open(postgres_url) as plane:
        id = one.do("put")
        message = plane.queue("jobs").receive()
        assert message.id == id
        waiting = two.ask("receive", visibility_seconds=30, wait_seconds=WAIT_SECONDS)
        until(lambda: two.do("stats")["waiting_consumers"] == 1, "the consumer to wait")
        message.nack()
        assert [(found, fence) for found, fence, *_ in waiting()] == [(id, 2)]


def test_a_group_is_delivered_in_order_by_all_processes_together(postgres_url: str) -> None:
    with two_nodes(postgres_url) as (one, two), holdfast.open(postgres_url) as plane:
        nodes, jobs, order = (one, two), plane.queue("jobs"), []
        ids = [nodes[number % 2].do("put", group="g") for number in range(8)]
        while message := jobs.receive():
            assert jobs.receive() is None, "the rest of the group waits"
            order.append(message.id)
            message.ack()
        assert order == ids


def test_an_idempotency_key_counts_in_every_process(postgres_url: str) -> None:
    """Lesson 32: whoever lost the answer may ask another node."""
    with two_nodes(postgres_url) as (one, two):
        asked = [node.ask("put", idempotency_key="k") for node in (one, two) for _ in range(5)]
        assert len({answer() for answer in asked}) == 1
        assert one.do("stats")["ready"] == two.do("stats")["ready"] == 1
