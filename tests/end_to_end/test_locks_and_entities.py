"""A lock that one process holds excludes the writes of entities by other processes, over servers and on PostgreSQL.

Run as a program, this file is such a process: it executes the commands that it reads, and prints the answers.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane
from fastness.errors import FastnessError
from fastness.wire.locks import ListLockSessions, LockSessionInfo
from tests.support.forked import start_python
from tests.support.server_process import Server
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 60.0  # Bounds every wait; far longer than any step takes.
LEASE_SECONDS = 2.0  # Shorter than a write waits.


# The process.


def main(url: str, folder: str) -> None:
    plane = fastness.connect(url) if url.startswith("http") else fastness.open(url, activity=folder)
    with plane, ExitStack() as held:

        def lock(*path: str) -> str:
            held.enter_context(plane.locks.acquire(path, lease_seconds=LEASE_SECONDS))
            return "locked"

        def unlock() -> str:
            held.close()
            return "unlocked"

        commands: dict[str, Callable[..., Any]] = {
            "lock": lock,
            "unlock": unlock,
            "write": lambda *entity: plane.entities.write(*entity).versions[0],
            "write at once": lambda *entity: len(plane.atomic().write(*entity).commit()),
        }
        print("ready", flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = commands[name](*arguments)
            except FastnessError as error:
                answer = error.code
            print(json.dumps(answer), flush=True)


class Process:
    """A process that locks and writes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.process = start_python(
            ["-m", "tests.end_to_end.test_locks_and_entities", url, folder],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def start(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def do(self, *command: Any) -> Any:
        self.start(*command)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(SECONDS_MAX)}"
        return line.strip()


# The tests.


class Shared:
    """A plane that processes share: two of them, and the test's own connection."""

    def __init__(self, urls: list[str], plane: Plane, folder: Path, stack: ExitStack) -> None:
        self.plane = plane
        self.holder, self.writer = (Process(url, folder / f"activity-{n}") for n, url in enumerate(urls))
        for each in (self.holder, self.writer):
            stack.callback(each.close)

    def status(self, id: str) -> Any:
        found = self.plane.entities.get("task", id)
        return None if found is None else found["status"]

    def sessions(self) -> list[LockSessionInfo]:
        return self.plane._transport.call(ListLockSessions()).sessions

    def wait_for_a_waiter(self) -> None:
        """Until a session waits for a lock."""
        eventually(lambda: any(lock.is_waiting for session in self.sessions() for lock in session.locks))


@pytest.fixture(params=["server", "two servers on PostgreSQL", "nodes on PostgreSQL"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    with ExitStack() as stack:
        if request.param == "server":
            server = Server(tmp_path)
            stack.callback(server.kill)
            urls = [server.url] * 2
            plane = stack.enter_context(fastness.connect(server.url))
        else:
            url = request.getfixturevalue("postgres_url")
            plane = stack.enter_context(fastness.open(url, activity=str(tmp_path / "own")))
            urls = [url] * 2
            if request.param.startswith("two servers"):
                urls = []
                for number in range(2):
                    folder = tmp_path / f"node-{number}"
                    folder.mkdir()
                    server = Server(folder, data=url, activity=str(folder / "activity"))
                    stack.callback(server.kill)
                    urls.append(server.url)
        yield Shared(urls, plane, tmp_path, stack)


def test_a_lock_excludes_the_writes_of_another_process(shared: Shared) -> None:
    holder, writer = shared.holder, shared.writer
    assert writer.do("write", "task", "1", {"status": "open"}) == 1
    assert holder.do("lock", "entity_type", "task") == "locked"

    assert writer.do("write", "note", "1", {"text": "another table"}) == 1
    assert writer.do("write at once", "task", "1", {"status": "early"}) == "lock_timeout"
    assert holder.do("write", "task", "1", {"status": "held"}) == 2  # The holder itself may write.
    writer.start("write", "task", "1", {"status": "done"})
    shared.wait_for_a_waiter()
    assert shared.status("1") == "held"

    assert holder.do("unlock") == "unlocked"
    assert writer.answer() == 3
    assert shared.status("1") == "done"
    assert shared.sessions() == []  # A write releases what it has waited for.

    # A lock that a killed process held excludes writes until its lease ends.
    assert holder.do("lock", "record_id", "task/1") == "locked"
    [session] = shared.sessions()
    holder.close()
    assert writer.do("write", "task", "1", {"status": "later"}) == 4
    written = shared.plane.entities.get("task", "1")
    assert written is not None
    assert written.updated_ms >= session.expires_ms
    assert shared.sessions() == []


if __name__ == "__main__":
    main(*sys.argv[1:])
