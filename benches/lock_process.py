"""The agents of `profile_locks`: as threads on one lock table, or as processes on servers or nodes.

python -m benches.lock_process      {"urls": ["http://127.0.0.1:9440"], "processes": 100, "seconds": 60, "hold_seconds":
                                     0.0002, "folder": "/tmp/found"}

As a program it reads a task from its input, imports Fastness once, and forks the processes. 100 of them took 1.8 s of
processor time and 0.6 GiB until all were connected; 100 programs took 43 s and 2.1 GiB. It prints a line when all are
connected and start, and one with the exit code of each. Each leaves its figures as JSON in the folder.
"""

import json
import os
import random
import sys
import time
from array import array
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

import fastness
from benches import zipfian
from fastness.client.transport import RemoteTransport  # Imported before the fork; `fastness` does it when it is used.
from fastness.errors import FastnessError
from fastness.handles.sync.plane import Plane

TABLES: Final = ("task", "decision", "edge", "metrics")
ROWS: Final = 1_000  # Of each table.
MIX: Final = {"row": 949, "rows": 40, "table": 10, "database": 1}


class Locks(Protocol):
    """A lock table of this process, or `plane.locks`."""

    def acquire(self, path: list[str], mode: str = "X", /) -> AbstractContextManager[Any]: ...

    def acquire_all(self, paths: list[list[str]], mode: str = "X", /) -> AbstractContextManager[Any]: ...


class Sample(NamedTuple):
    """Acquisitions of one agent: the second of each, and its duration."""

    second: "array[int]"
    durations: "array[float]"


class Agent:
    """One thread or process that locks and unlocks."""

    def __init__(self, locks: Locks, number: int, hold_seconds: float) -> None:
        self._locks = locks
        self._random = random.Random(number)
        self._choose = zipfian.zipfian(ROWS, self._random)
        self._hold_seconds = hold_seconds
        self.samples = {kind: Sample(array("l"), array("d")) for kind in MIX}
        self.failures: Counter[str] = Counter()

    def work(self, started: float, deadline: float) -> None:
        """Lock until the deadline."""
        clock, operations = time.perf_counter, [kind for kind, share in MIX.items() for _ in range(share)]
        while clock() < deadline:
            self._random.shuffle(operations)
            for kind in operations:
                started_at = clock()
                if started_at >= deadline:
                    break
                try:
                    with self._acquire(kind):
                        acquired = clock()
                        time.sleep(self._hold_seconds)
                except FastnessError as error:
                    self.failures[error.code] += 1
                else:
                    self.samples[kind].second.append(int(acquired - started))
                    self.samples[kind].durations.append(acquired - started_at)

    def _acquire(self, kind: str) -> AbstractContextManager[Any]:
        if kind == "database":
            return self._locks.acquire(["database"], "S")
        name = self._random.choice(TABLES)
        if kind == "table":
            return self._locks.acquire(["entity_type", name], self._random.choice("SX"))
        if kind == "rows":
            rows = {f"{name}/{self._choose()}" for _ in range(self._random.randint(2, 5))}
            return self._locks.acquire_all([["record_id", row] for row in rows])
        return self._locks.acquire(["record_id", f"{name}/{self._choose()}"], self._random.choice("SX"))


class Task(NamedTuple):
    """What the processes do."""

    urls: list[str]  # Of servers, or of a PostgreSQL on which each process is a node; they are used in turns.
    processes: int
    seconds: float
    hold_seconds: float
    folder: str


def connect(url: str, folder: Path) -> Plane:
    if url.startswith("http"):
        return Plane(RemoteTransport(url))
    return fastness.open(url, activity=str(folder), gc_every_seconds=None)


def own_stats(plane: Plane) -> dict[str, Any]:
    """The lock statistics of a plane in this process; those of a server are about all its clients."""
    return {} if isinstance(plane._transport, RemoteTransport) else msgspec.to_builtins(plane.locks.stats())


def run(task: Task, number: int, ready: int, start: int) -> None:
    """One process, from its fork to its end."""
    folder = Path(task.folder)
    with connect(task.urls[number % len(task.urls)], folder / f"activity-{number}") as plane:
        plane.locks.acquire(["record_id", f"connected/{number}"]).release()
        agent = Agent(plane.locks, number, task.hold_seconds)
        os.write(ready, b".")
        os.read(start, 1)  # Ends when the program closes its end, for all processes at once.
        started = time.perf_counter()
        before = own_stats(plane)
        agent.work(started, started + task.seconds)
        stats = [before, own_stats(plane)]
    samples = {kind: [each.second.tolist(), each.durations.tolist()] for kind, each in agent.samples.items()}
    (folder / f"{number}.json").write_text(json.dumps({"samples": samples, "failures": agent.failures, "stats": stats}))


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))
    ready, report_ready = os.pipe()
    start, starting = os.pipe()
    pids = []
    for number in range(task.processes):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(starting)
                run(task, number, report_ready, start)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(report_ready)
    for _ in pids:
        if not os.read(ready, 1):
            sys.exit("A process could not connect")
    os.close(starting)
    print("started", flush=True)
    for pid in pids:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
