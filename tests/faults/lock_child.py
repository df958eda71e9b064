"""Processes that acquire ordered locks at random, and write what they saw. Reads a `Task` as one line of JSON.

The program imports Fastness once and forks the processes: 100 programs would take 20 s to start. They connect, and all
begin at once. Each appends to a file of its own, before and after every call, so that the file is complete up to the
moment at which the process is killed:

    ["began", number, kind, claim, argument, at]
    ["ended", number, outcome, result, at]           outcome: ok, failed (with the code of the error) or unknown

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share. A process has one session at a time.
In each turn it asks for some locks, also against the lock order, holds what it got, and releases it in reverse order.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fastness
from fastness.client.transport import RemoteTransport  # Imported before the fork; `fastness` does it when it is used.
from fastness.errors import FastnessError, Fenced, LockOrderViolation, RetryAdvice
from fastness.handles.sync.plane import Plane

KINDS = ("edge", "note", "task")
LEVELS = {"database": 0, "entity_type": 1, "record_id": 2}
SLOW, SLOW_TIMES = 0.03, 40  # Some locks are held for longer, so that a test finds their holders.
COVERED = {"IS": ("IS",), "IX": ("IX", "IS"), "S": ("S", "IS"), "X": ("X", "S", "IX", "IS")}

LockPath = list[str]
Key = tuple[int, str]  # The number of a level and a name. Locks are acquired in the order of their keys.


class Task(NamedTuple):
    """What the processes do."""

    urls: list[str]  # Of servers, or of PostgreSQL; each process uses one of them.
    processes: int
    folder: str  # The file of process 7 is `7.jsonl`.
    seconds: float
    seed: int
    rows: int  # Of each kind.
    bulk: float  # The share of requests for whole tables; a fifth as many are for the database.
    lease_seconds: float
    hold_seconds: float  # The longest time between two calls.
    stuck_seconds: float  # A wait that lasts longer counts as a deadlock.


def steps_of(paths: list[LockPath], mode: str) -> dict[Key, str]:
    """The locks of a request with their modes, with the intents on the levels above."""
    intent = "IS" if mode in ("IS", "S") else "IX"
    steps: dict[Key, str] = {}
    for path in paths:
        level, name = LEVELS[path[0]], path[1] if len(path) > 1 else ""
        if level > 0:
            steps.setdefault((0, ""), intent)
        if level > 1:
            steps.setdefault((1, name.partition("/")[0]), intent)
        steps[level, name] = mode
    return steps


def is_against_the_order(steps: dict[Key, str], held: dict[Key, str]) -> bool:
    """Whether a request may wait for a lock before one that is held, or for a stronger mode of a held one."""
    if not held:
        return False
    last = max(held)
    return any(mode not in COVERED[held[key]] if key in held else key < last for key, mode in steps.items())


class Record:
    """The file of one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._number = 0

    def call(self, kind: str, claim: str, argument: Any, function: Callable[[], Any]) -> tuple[str, Any]:
        """The outcome and the result of a call, or its error."""
        self._number += 1
        number = self._number
        self._write("began", number, kind, claim, argument, time.monotonic_ns())
        answer: Any
        try:
            answer = function()
        except FastnessError as error:
            outcome = "unknown" if error.retry is RetryAdvice.IDEMPOTENT else "failed"
            self._write("ended", number, outcome, error.code, time.monotonic_ns(), str(error))
            return outcome, error
        self._write("ended", number, "ok", answer, time.monotonic_ns())
        return "ok", answer

    def note(self, *words: Any) -> None:
        self._write("note", *words)

    def _write(self, *words: Any) -> None:
        os.write(self._file, json.dumps(words).encode() + b"\n")


class Claim(NamedTuple):
    """What one call acquired."""

    id: str
    held: Any
    mode: str
    paths: list[LockPath]
    new: list[Key]  # Not re-entries.
    acquired: float


class Locker:
    """One process."""

    def __init__(self, task: Task, number: int, plane: Plane, record: Record) -> None:
        self._task, self._number, self._plane, self._record = task, number, plane, record
        self._chance = random.Random(task.seed * 1_000 + number)
        self._claims: list[Claim] = []
        self._held: dict[Key, str] = {}
        self._count = 0

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            for _ in range(self._chance.choice((1, 1, 2, 3))):
                if not self._acquire():
                    break
                is_slow = self._chance.random() < SLOW
                time.sleep(self._chance.random() * self._task.hold_seconds * (SLOW_TIMES if is_slow else 1))
            self._check()
            while self._claims:
                self._release()

    def _acquire(self) -> bool:
        """Whether the session is still alive."""
        paths, mode = self._request()
        steps = steps_of(paths, mode)
        self._count += 1
        id, found = f"{self._number}-{self._count}", []
        options = {"timeout_seconds": self._task.stuck_seconds, "lease_seconds": self._task.lease_seconds}

        def acquire() -> list[Any]:
            locks = self._plane.locks
            if len(paths) == 1:
                found.append(locks.acquire(paths[0], mode, **options))
            else:
                found.append(locks.acquire_all(paths, mode, **options))
            return [[level, name, fence] for (level, name), fence in found[0].fences.items()]

        expects_violation = is_against_the_order(steps, self._held)
        argument = {"paths": paths, "mode": mode, "lease": round(self._task.lease_seconds * 1e9)}
        outcome, answer = self._record.call("acquire", id, argument, acquire)
        if isinstance(answer, LockOrderViolation) != expects_violation and not isinstance(answer, Fenced):
            self._record.note("order", id, f"expected a violation: {expects_violation}; {outcome}: {answer}")
        if found:
            new = [key for key in steps if key not in self._held]
            self._held.update({key: steps[key] for key in new})
            self._claims.append(Claim(id, found[0], mode, paths, new, time.monotonic()))
        return not isinstance(answer, Fenced)

    def _check(self) -> None:
        """Write under some of the exclusive locks; under all of them if their lease may have ended."""
        for claim in self._claims:
            is_old = time.monotonic() - claim.acquired >= self._task.lease_seconds / 2
            if claim.mode != "X" or not (is_old or self._chance.random() < 0.3):
                continue
            for (level, name), fence in claim.held.fences.items():
                write = partial(self._write, claim, state_of(level, name), fence)
                self._record.call("guarded", claim.id, [level, name, fence], write)

    def _write(self, claim: Claim, state: str, fence: int) -> None:
        self._plane.atomic().check(claim.held).update(self._plane.state(state), [claim.id, fence]).commit()

    def _release(self) -> None:
        claim = self._claims.pop()
        self._record.call("release", claim.id, None, partial(release, claim.held))
        for key in claim.new:
            del self._held[key]

    def _request(self) -> tuple[list[LockPath], str]:
        chance = self._chance
        kind, draw, mode = chance.choice(KINDS), chance.random(), chance.choice("SX")
        if draw < self._task.bulk / 5:
            return [["database"]], mode
        if draw < self._task.bulk * 6 / 5:
            return [["entity_type", kind]], mode
        count = 1 if draw < 0.8 else chance.randint(2, 4)
        ids = chance.sample(range(self._task.rows), count)
        return [["record_id", f"{kind}/{id}"] for id in ids], mode


def release(held: Any) -> bool:
    """Release locks as the end of a `with` block does, which raises Fenced if they were lost."""
    held.__exit__(None, None, None)
    return True


def state_of(level: str, name: str) -> str:
    """The document that the holders of a lock write."""
    return f"{level}.{name.replace('/', '.')}"


def run(task: Task, number: int, ready: int, start: int) -> None:
    url = task.urls[number % len(task.urls)]
    folder = Path(task.folder)
    if url.startswith("http"):
        plane = Plane(RemoteTransport(url))
    else:
        plane = fastness.open(url, activity=str(folder / f"activity-{number}"), gc_every_seconds=None)
    with plane:
        plane.state("warm-up").get()
        os.write(ready, b".")
        os.read(start, 1)  # Ends when the program closes its end, for all processes at once.
        Locker(task, number, plane, Record(folder / f"{number}.jsonl")).work(time.monotonic() + task.seconds)


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))
    ready, report_ready = os.pipe()
    start, starting = os.pipe()
    pids = []
    for number in range(task.processes):
        pid = os.fork()
        if pid == 0:
            os.close(starting)
            status = 1
            try:
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
            sys.exit("a process could not connect")
    print(json.dumps(pids), flush=True)
    os.close(starting)
    for pid in pids:
        with suppress(ChildProcessError):
            print(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)


if __name__ == "__main__":
    main()
