"""The mail sweeper removes expired mail from unread mailboxes. Time is moved, never slept."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.clock import SystemClock
from fastness.errors import Closed, Unreachable
from fastness.kv import Event, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address, expiry
from fastness.layers.mailboxes.keys import MailEvent
from fastness.runtime.maintenance import mail_sweeper, scan
from fastness.runtime.maintenance.mail_sweeper import MailSweeper
from fastness.testing.clock import ManualClock
from fastness.wire.mail import MailPolicy, NewMail
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.
EVERY = 300.0
TTL_MS = 7 * 86_400_000
ADA, BOB = Address("main", "ada"), Address("main", "bob")


class Rest:
    """An event whose waits end when the test advances the time; `pauses` records their timeouts."""

    def __init__(self) -> None:
        self.pauses: SimpleQueue[float] = SimpleQueue()
        self._set = threading.Event()
        self._over = threading.Semaphore(0)

    def set(self) -> None:
        self._set.set()
        self._over.release()

    def is_set(self) -> bool:
        return self._set.is_set()

    def end(self) -> None:
        self._over.release()

    def wait(self, seconds: float) -> bool:
        if seconds:
            self.pauses.put(seconds)
            assert self._over.acquire(timeout=DEADLINE_SECONDS)
        return self.is_set()


class WatchedDatabase(MemoryDatabase):
    """Counts sweeps by universe, and can be made to fail."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.sweeps: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}

    def transact(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if work is mailboxes.sweep:
            universe, _ = args
            self.sweeps[universe] += 1
            if universe in self.errors:
                raise self.errors[universe]
        return super().transact(work, *args, **kwargs)


class Day:
    """The sweeper with its clock and database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.rest = Rest()
        self.published: list[Event] = []
        self.database = WatchedDatabase(self.clock)
        self.database.publish = self.published.extend
        self.sweeper: MailSweeper | None = None
        threads = SimpleNamespace(Event=lambda: self.rest, Thread=threading.Thread)
        monkeypatch.setattr(mail_sweeper, "threading", threads)

    def start(self, *, shared: bool = False) -> float:
        """Start the sweeper; its pause after the first sweep."""
        self.sweeper = MailSweeper(self.database, shared=shared)
        return self.rest.pauses.get(timeout=DEADLINE_SECONDS)

    def advance(self, milliseconds: int) -> float:
        """Advance the time by one sweep; the next pause of the sweeper."""
        self.clock.advance_ms(milliseconds)
        self.rest.end()
        return self.rest.pauses.get(timeout=DEADLINE_SECONDS)

    def send(self, to: Address = BOB, count: int = 1) -> None:
        def work(tx: Transaction) -> None:
            for _ in range(count):
                mailboxes.send(tx, Address(to.universe, "ada"), to, NewMail(str(to)))

        self.database.transact(work)

    def count(self, of: Address = BOB) -> int:
        return self.database.read(mailboxes.summary, of).box.count


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    day = Day(monkeypatch)
    yield day
    if day.sweeper is not None:
        day.sweeper.stop()
    day.database.close()


def is_running() -> bool:
    return any(thread.name == "fastness-mail-sweeper" for thread in threading.enumerate())


def test_expired_mail_is_removed_every_five_minutes_without_readers(day: Day) -> None:
    day.send(count=3)
    assert day.start() == EVERY
    assert day.advance(TTL_MS - 1) == EVERY
    assert day.count() == 3
    day.send()
    day.advance(300_001)
    assert day.count() == 1
    day.advance(TTL_MS)
    assert day.count() == 0
    mails = [event.event for event in day.published if isinstance(event, MailEvent)]
    assert mails.count("expired") == 4


def test_mail_that_expired_before_the_start_is_removed_immediately(day: Day) -> None:
    day.send()
    day.clock.advance_ms(TTL_MS + 300_000)
    day.start()
    assert day.count() == 0


def test_removed_mail_is_logged_per_agent(day: Day, caplog: pytest.LogCaptureFixture) -> None:
    day.send(Address("main", "agent-7"), 12)
    day.send(Address("main", "agent-8"))
    day.send(Address("other", "agent-7"), 300)
    day.clock.advance_ms(TTL_MS + 300_000)
    with caplog.at_level(logging.INFO, "fastness.mail"):
        day.start()
    assert [record.getMessage() for record in caplog.records] == [
        "cleaned 12 expired mails for agent-7@main",
        "cleaned 1 expired mail for agent-8@main",
        "cleaned 300 expired mails for agent-7@other",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastness.mail"):
        day.advance(300_000)
    assert caplog.records == []


def test_every_universe_is_swept(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PAGE", 2)
    agents = [Address(f"universe-{number}", "bob") for number in range(5)]
    for agent in agents:
        day.send(agent)
    day.clock.advance_ms(TTL_MS + 300_000)
    day.start()
    assert [day.count(agent) for agent in agents] == [0] * 5


def test_a_sweep_of_a_universe_is_bounded(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 10)
    monkeypatch.setattr(mail_sweeper, "MAIL_SWEEPS_MAX", 9)
    other = Address("other", "bob")
    day.send(count=60)
    day.send(other)
    day.clock.advance_ms(TTL_MS + 300_000)
    day.start()
    assert day.database.sweeps["main"] == 9
    assert 0 < day.count() < 60
    assert day.count(other) == 0, "the next universe is swept"
    for _ in range(3):
        day.advance(300_000)
    assert day.count() == 0


def test_a_failing_universe_does_not_stop_the_sweep_of_others(day: Day, caplog: pytest.LogCaptureFixture) -> None:
    agents = [Address(f"universe-{number}", "bob") for number in range(3)]
    for agent in agents:
        day.send(agent)
    day.clock.advance_ms(TTL_MS + 300_000)
    day.database.errors = {"universe-0": Unreachable("PostgreSQL is away"), "universe-1": ValueError("damaged")}
    with caplog.at_level(logging.WARNING, "fastness.mail"):
        day.start()
    assert [day.count(agent) for agent in agents] == [1, 1, 0]
    assert "PostgreSQL is away" in caplog.text
    assert "damaged" in caplog.text
    day.database.errors = {}
    day.advance(300_000)
    assert [day.count(agent) for agent in agents] == [0, 0, 0]


def test_an_unreachable_key_space_is_retried_at_the_next_sweep(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day.send()
    day.clock.advance_ms(TTL_MS + 300_000)

    def read(*args: Any, **options: Any) -> Any:
        raise Unreachable("away")

    monkeypatch.setattr(day.database, "read", read)
    with caplog.at_level(logging.WARNING, "fastness.mail"):
        day.start()
    assert "retrying in 300 s: away" in caplog.text
    monkeypatch.undo()
    day.advance(300_000)
    assert day.count() == 0


def test_a_closed_database_ends_the_thread(day: Day) -> None:
    day.send()
    day.start()
    day.database.errors = {"main": Closed("closed")}
    day.clock.advance_ms(TTL_MS + 300_000)
    day.rest.end()
    assert day.sweeper is not None
    day.sweeper._thread.join(DEADLINE_SECONDS)
    assert not is_running()


def test_stop_interrupts_the_pause_and_takes_effect_between_transactions(
    day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 1)
    day.send(count=50)
    day.start()
    assert day.sweeper is not None
    sweeper, entered, leave = day.sweeper, threading.Event(), threading.Event()

    def committed(keys: object, ranges: object) -> None:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)

    day.database.subscribe(committed)
    day.database.sweeps.clear()
    day.clock.advance_ms(TTL_MS + 300_000)
    day.rest.end()
    assert entered.wait(DEADLINE_SECONDS)
    stopping = threading.Thread(target=sweeper.stop)
    stopping.start()
    while not day.rest.is_set():
        time.sleep(0)
    leave.set()
    stopping.join(DEADLINE_SECONDS)
    assert not is_running()
    assert day.database.sweeps["main"] == 1


def test_the_sweeps_of_several_nodes_are_spread(day: Day) -> None:
    pauses = {day.start(shared=True), *(day.advance(1) for _ in range(5))}
    assert len(pauses) > 1
    assert all(EVERY <= seconds <= 1.1 * EVERY for seconds in pauses)


def test_concurrent_sweeps_remove_everything_once(postgres_url: str) -> None:
    """During sends and reads: only expired mail is removed, and counters stay correct."""
    clock = ManualClock()
    nodes = [PostgresDatabase(postgres_url, clock=clock) for _ in range(3)]
    agents = [Address("main", f"agent-{number}") for number in range(8)]

    def some(tx: Transaction, prefix: str) -> None:
        for agent in agents:
            for number in range(10):
                mailboxes.send(tx, ADA, agent, NewMail(str(agent), b"", f"{prefix}-{number}"))

    def sweep(node: PostgresDatabase) -> Counter[str]:
        cleaned: Counter[str] = Counter()
        for _ in range(100):
            entries = node.read(mailboxes.due_entries, "main")
            if not entries:
                break
            cleaned.update(node.transact(mailboxes.sweep, "main", entries))
        return cleaned

    try:
        nodes[0].transact(some, "old")
        clock.advance_ms(TTL_MS + 300_000)
        with ThreadPoolExecutor(4) as threads:
            sending = threads.submit(nodes[0].transact, some, "new")
            cleaned = list(threads.map(sweep, nodes))
            sending.result(DEADLINE_SECONDS)
        assert sum(cleaned, Counter()) == Counter({agent.agent: 10 for agent in agents})
        for agent in agents:
            assert nodes[1].read(mailboxes.summary, agent).box.count == 10
            mails = nodes[2].read(mailboxes.peek, agent, after=-1, limit=256)
            assert [mail.id for mail in mails] == [f"new-{number}" for number in range(10)]
    finally:
        for node in nodes:
            node.close()


def test_a_reopened_plane_removes_expired_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any call: the sweeper starts with the plane."""
    with fastness.open(f"dir:{tmp_path}") as plane:
        plane.set_mail_policy(MailPolicy(ttl_seconds=60))
        plane.mailbox("ada").send("bob", 1)
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: time.time_ns() // 1_000_000 + 700_000)
    with fastness.open(f"dir:{tmp_path}") as plane:
        eventually(lambda: plane.mailbox("bob").count() == 0)
        assert is_running()
    assert not is_running()


def test_a_plane_in_memory_starts_to_sweep_with_the_first_mail() -> None:
    with fastness.open("memory:") as plane:
        plane.queue("jobs").put(1)
        assert not is_running()
        plane.mailbox("ada").send("bob", 1)
        assert is_running()
    assert not is_running()


def test_a_manual_clock_starts_no_sweeper(tmp_path: Path) -> None:
    for url in ("memory:", f"dir:{tmp_path}"):
        with fastness.open(url, clock=ManualClock()) as plane:
            plane.mailbox("ada").send("bob", 1)
            assert not is_running()


def test_an_unexpected_error_of_the_key_space_is_retried_at_the_next_sweep(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day.send()
    day.clock.advance_ms(TTL_MS + 300_000)

    def read(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(day.database, "read", read)
    assert day.start() == EVERY
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    day.advance(300_000)
    assert day.count() == 0
