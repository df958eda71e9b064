"""The mail sweeper removes expired mail from unread mailboxes. Time is moved, never slept."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.clock import SystemClock
from fastness.errors import Unreachable
from fastness.kv import Event, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address, expiry
from fastness.layers.mailboxes.keys import MailEvent
from fastness.runtime.maintenance import mail_sweeper, scan
from fastness.runtime.maintenance.mail_sweeper import MailSweeper
from fastness.testing.clock import ManualClock
from fastness.wire.mail import MailPolicy, NewMail
from tests.support.background import DrivenRunner
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.
EVERY = 300.0
TTL_MS = 7 * 86_400_000
ADA, BOB = Address("main", "ada"), Address("main", "bob")


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

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.runner = DrivenRunner()
        self.published: list[Event] = []
        self.database = WatchedDatabase(self.clock)
        self.database.publish = self.published.extend

    def start(self, *, shared: bool = False) -> float:
        """Start the sweeper; its pause after the first sweep."""
        self.job = MailSweeper(self.database, shared=shared).job
        return self.runner.start(self.job)

    def advance(self, milliseconds: int) -> float:
        """Advance the clock, and the time by one sweep; the next pause of the sweeper."""
        self.clock.advance_ms(milliseconds)
        return self.runner.advance(self.job.due_at - self.runner.now, self.job)

    def send(self, to: Address = BOB, count: int = 1) -> None:
        def work(tx: Transaction) -> None:
            for _ in range(count):
                mailboxes.send(tx, Address(to.universe, "ada"), to, NewMail(str(to)))

        self.database.transact(work)

    def count(self, of: Address = BOB) -> int:
        return self.database.read(mailboxes.summary, of).box.count


@pytest.fixture
def day() -> Iterator[Day]:
    day = Day()
    yield day
    day.runner.stop()
    day.database.close()


def is_swept(plane: fastness.Plane) -> bool:
    jobs = plane._transport.services.background.jobs  # type: ignore[attr-defined]
    return any(job.name == "the removal of expired mail" for job in jobs)


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


def test_an_unreachable_key_space_is_retried_soon(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day.send()
    day.clock.advance_ms(TTL_MS + 300_000)

    def read(*args: Any, **options: Any) -> Any:
        raise Unreachable("away")

    monkeypatch.setattr(day.database, "read", read)
    assert day.start() == 1
    assert "the removal of expired mail failed; it is tried again in 1 s, and then until it works: away" in caplog.text
    monkeypatch.undo()
    day.advance(300_000)
    assert day.count() == 0


def test_each_transaction_of_a_universe_is_a_step(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs take their turns in between, and a plane that closes waits for one transaction only."""
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 1)
    day.send(count=50)
    day.start()
    day.clock.advance_ms(TTL_MS + 300_000)
    day.database.sweeps.clear()
    steps = day.job.run()
    for count in range(1, 4):
        assert next(steps) == 0
        assert day.database.sweeps["main"] == count


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
        assert is_swept(plane)


def test_a_plane_in_memory_starts_to_sweep_with_the_first_mail() -> None:
    with fastness.open("memory:") as plane:
        plane.queue("jobs").put(1)
        assert not is_swept(plane)
        plane.mailbox("ada").send("bob", 1)
        assert is_swept(plane)


def test_a_manual_clock_starts_no_sweeper(tmp_path: Path) -> None:
    for url in ("memory:", f"dir:{tmp_path}"):
        with fastness.open(url, clock=ManualClock()) as plane:
            plane.mailbox("ada").send("bob", 1)
            assert not is_swept(plane)


def test_an_unexpected_error_of_the_key_space_is_retried_soon(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day.send()
    day.clock.advance_ms(TTL_MS + 300_000)

    def read(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(day.database, "read", read)
    assert day.start() == 1
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    day.advance(300_000)
    assert day.count() == 0
