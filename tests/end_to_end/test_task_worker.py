"""`fastness worker` as a process, with a real server: kills, drains, reloads, and tasks in two processes."""

import os
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastness import Plane
from fastness.errors import MessageCancelled
from tests.support.forked import start_python
from tests.support.server_process import Server
from tests.support.waiting import eventually, exit_code

RESULT_SECONDS = 3_600  # Bounds the waits for results; far longer than any takes.

MODULE = """
import asyncio, os, pathlib, time
import fastness

app = fastness.TaskApp()
HERE = pathlib.Path(__file__).parent

def note(name):
    with open(HERE / "notes", "a") as notes:
        notes.write(f"{name} {os.getpid()}\\n")

@app.task(visibility_seconds=1, retry_delay_seconds=0.01)
def slow(n: int) -> int:
    note("slow")
    while not (HERE / "go").exists():
        if fastness.current_job().cancelled:
            note("cancelled")
            return -1
        time.sleep(0.01)
    note("slow-end")
    return n + 1

@app.task(queue="last")
def last(value: int) -> int:
    note("last")
    return value

@app.task(queue="totals")
async def total(values: list[int]) -> int:
    note("total")
    return sum(values)

@app.task(queue="coroutines")
async def endless() -> None:
    note("endless")
    try:
        await asyncio.sleep(3_600)
    except asyncio.CancelledError:
        note("cancelled")
        raise

@app.task
def version() -> int:
    return 1
"""


class WorkerProcess:
    """`fastness worker` in the folder of its module."""

    def __init__(self, folder: Path, url: str, universe: str, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self.log = folder / "worker.log"
        with self.log.open("ab") as log:
            self.process = start_python(
                ["-m", "fastness.cli", "worker", "shop:app", *options],
                cwd=folder,
                env={**environment, "FASTNESS_URL": url, "FASTNESS_UNIVERSE": universe},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.wait_until_running()

    def wait_until_running(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Running the tasks of coroutines, last, tasks, totals"), line + self.log.read_text()

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal; returns when it has been handled."""
        self.process.send_signal(number)
        eventually(lambda: "stopping: waiting" in self.log.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return exit_code(self.process)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(MODULE)
    return tmp_path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server; each test has a universe of its own."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def start(folder: Path, server: Server) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(*options: str) -> WorkerProcess:
        started.append(WorkerProcess(folder, server.url, folder.name, *options))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@contextmanager
def sender(folder: Path, server: Server) -> Iterator[tuple[dict[str, Any], Plane]]:
    """The module as the sender has it, connected to the server."""
    module = runpy.run_path(str(folder / "shop.py"), run_name="shop")
    with server.plane(universe=folder.name) as plane:
        module["app"].use(plane)
        yield module, plane


def notes(folder: Path, name: str) -> list[int]:
    """The processes that have noted this, in order."""
    file = folder / "notes"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [int(pid) for noted, pid in lines if noted == name]


def test_a_killed_worker_loses_nothing_and_the_chain_continues_once(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    killed = start("--concurrency", "1")
    with sender(folder, server) as (shop, plane):
        [receipt] = shop["slow"].s(1).then(shop["last"].s()).send()
        eventually(lambda: notes(folder, "slow") == [killed.process.pid])
        assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
        (folder / "go").touch()
        other = start("--concurrency", "1")
        assert receipt.result(wait_seconds=RESULT_SECONDS) == 2
        eventually(lambda: notes(folder, "last"))
        assert other.stop() == 0
        assert notes(folder, "slow") == [killed.process.pid, other.process.pid]
        assert notes(folder, "last") == [other.process.pid]
        stats = plane.queue("last").stats()
        assert (stats.put_total, stats.acked_total) == (1, 1)
        assert plane.queue("tasks").stats().expired_total == 1


def test_a_group_of_two_processes_finishes_once_although_one_is_killed(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    from fastness import group

    workers = [start("--concurrency", "4"), start("--concurrency", "4")]
    with sender(folder, server) as (shop, plane):
        receipts = group(*[shop["slow"].s(n) for n in range(20)]).then(shop["total"].s()).send()
        eventually(lambda: {worker.process.pid for worker in workers} <= set(notes(folder, "slow")))
        workers[0].stop(signal.SIGKILL)
        (folder / "go").touch()
        eventually(lambda: notes(folder, "total"))
        eventually(lambda: plane.queue("totals").stats().acked_total)
        assert [receipt.result() for receipt in receipts] == list(range(1, 21))
        assert workers[1].stop() == 0
        assert notes(folder, "total") == [workers[1].process.pid]
        assert plane.queue("totals").stats().put_total == 1
        assert plane.queue("tasks").stats().acked_total == 20


def test_a_stopped_worker_finishes_running_calls(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    worker = start("--concurrency", "1")
    with sender(folder, server) as (shop, plane):
        receipt, second = shop["slow"].send(1), shop["slow"].send(2)
        eventually(lambda: notes(folder, "slow"))
        worker.drain()
        assert worker.process.poll() is None, "it waits for the running call"
        (folder / "go").touch()
        assert exit_code(worker.process) == 0
        assert receipt.result() == 2
        assert plane.queue("tasks").get(second.id).state == "ready"
        assert len(notes(folder, "slow")) == 1


def test_a_worker_returns_what_it_cannot_finish_and_a_second_signal_ends_it(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    with sender(folder, server) as (shop, plane):
        receipt = shop["slow"].send(1)
        worker = start("--concurrency", "1", "--drain-seconds", "0.1")
        eventually(lambda: notes(folder, "slow"))
        assert worker.stop(signal.SIGINT) == 0
        worker.log.unlink()
        info = plane.queue("tasks").get(receipt.id)
        assert (info.state, info.failure_attempts) == ("ready", 0)
        patient = start("--concurrency", "1", "--drain-seconds", "1h")
        eventually(lambda: len(notes(folder, "slow")) == 2)
        patient.drain()
        assert patient.stop() == -signal.SIGTERM


def test_a_hangup_starts_the_worker_again_with_the_changed_code(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    worker = start()
    with sender(folder, server) as (shop, _):
        assert shop["version"].send().result(wait_seconds=RESULT_SECONDS) == 1
        (folder / "shop.py").write_text(MODULE.replace("return 1", "return 22"))
        worker.process.send_signal(signal.SIGHUP)
        worker.wait_until_running()
        assert shop["version"].send().result(wait_seconds=RESULT_SECONDS) == 22
        assert worker.stop() == 0


def test_a_worker_that_is_to_stop_does_not_start_again(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    worker = start("--concurrency", "1", "--drain-seconds", "1h")
    with sender(folder, server) as (shop, _):
        receipt = shop["slow"].send(1)
        eventually(lambda: notes(folder, "slow"))
        worker.drain(signal.SIGHUP)
        worker.process.send_signal(signal.SIGTERM)
        (folder / "go").touch()
        assert exit_code(worker.process) == 0
        assert receipt.result() == 2


def test_a_running_function_sees_that_it_is_cancelled(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    worker = start("--concurrency", "1")
    with sender(folder, server) as (shop, plane):
        [receipt] = shop["slow"].s(1).then(shop["last"].s()).send()
        eventually(lambda: notes(folder, "slow"))
        plane.queue("tasks").cancel(receipt.id)
        eventually(lambda: notes(folder, "cancelled"))
        with pytest.raises(MessageCancelled):
            receipt.result()
        assert worker.stop() == 0
        assert plane.queue("last").stats().put_total == 0


def test_a_running_coroutine_is_cancelled(folder: Path, server: Server, start: Callable[..., WorkerProcess]) -> None:
    worker = start("--concurrency", "1")
    with sender(folder, server) as (shop, plane):
        receipt = shop["endless"].send()
        eventually(lambda: notes(folder, "endless"))
        plane.queue("coroutines").cancel(receipt.id)
        eventually(lambda: notes(folder, "cancelled"))
        with pytest.raises(MessageCancelled):
            receipt.result()
        assert worker.stop() == 0


@pytest.mark.nightly
def test_many_chains_and_groups_survive_random_kills(
    folder: Path, server: Server, start: Callable[..., WorkerProcess]
) -> None:
    """Two workers run 40 groups, and one of them is killed and replaced again and again: each group ends once."""
    from fastness import group

    (folder / "go").touch()
    workers = [start("--concurrency", "2"), start("--concurrency", "2")]
    with sender(folder, server) as (shop, plane):
        slow, total, last = (shop[name].with_options(max_attempts=1_000) for name in ("slow", "total", "last"))
        for n in range(40):
            members = [slow.s(n).then(slow.s()), slow.s(n), slow.s(n)]
            slow.s(n).then(group(*members), pass_result=False).then(total.s()).then(last.s()).send()
        kills = 0
        while plane.queue("last").stats().put_total < 40:
            workers[kills % 2].stop(signal.SIGKILL)
            workers[kills % 2] = start("--concurrency", "2")
            kills += 1
            assert kills < 200
        eventually(lambda: plane.queue("last").stats().acked_total == 40)
        assert [worker.stop() for worker in workers] == [0, 0]
        counts = [plane.queue(name).stats() for name in ("tasks", "totals", "last")]
        assert [(stats.put_total, stats.acked_total) for stats in counts] == [(200, 200), (40, 40), (40, 40)]
        assert kills > 0
