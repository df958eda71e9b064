"""`fastness host` as a process, on a server and on PostgreSQL: kills, pauses, drains and reloads."""

import os
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane, Program
from tests.support.forked import start_python
from tests.support.server_process import Server
from tests.support.waiting import eventually, exit_code

LEASE_SECONDS = "1"
WORLDS = 12
ORDERS = 6

MODULE = """
import os, pathlib, time
import fastness

HERE = pathlib.Path(__file__).parent
app = fastness.HostApp()

def note(name):
    with open(HERE / "notes", "a") as notes:
        notes.write(f"{name} {os.getpid()}\\n")

@app.program
def agent(state, event, context):
    found = state or {"orders": [], "charged": []}
    if event.name == "order":
        context.call("charge", event.json())
        return {**found, "orders": [*found["orders"], event.json()]}
    if event.is_receipt("charge"):
        context.put("charged", event.json())
        context.send("ledger", event.json())
        return {**found, "charged": sorted([*found["charged"], event.json()])}
    return found

@app.program
def ledger(state, event, context):
    return (state or 0) + 1

@app.program
def slow(state, event, context):
    note("slow")
    while not (HERE / "go").exists():
        time.sleep(0.01)
    context.put("slow", os.getpid())
    return (state or 0) + 1

@app.program
def version(state, event, context):
    return 1

@app.adapter("charge")
def charge(call):
    note("charge")
    _, order = call.json()
    while order and not (HERE / "go").exists():
        time.sleep(0.01)
    return call.json()
"""


class HostProcess:
    """`fastness host` in the folder of its module."""

    def __init__(self, folder: Path, url: str, universe: str, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self.log = folder / "host.log"
        words = ["host", "shop:app", "--lease-seconds", LEASE_SECONDS, *options]
        with self.log.open("ab") as log:
            self.process = start_python(
                ["-m", "fastness.cli", *words],
                cwd=folder,
                env={**environment, "FASTNESS_URL": url, "FASTNESS_UNIVERSE": universe},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.wait_until_running()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_running(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Running agent, ledger, slow, version, charge"), line + self.log.read_text()

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


@pytest.fixture(params=["server", pytest.param("postgres", marks=pytest.mark.rotating)])
def url(request: pytest.FixtureRequest) -> str:
    """Where the hosts find the plane: on a server, or each as a node of one PostgreSQL."""
    if request.param == "server":
        return str(request.getfixturevalue("server").url)
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def plane(url: str, folder: Path) -> Iterator[Plane]:
    opened = fastness.connect if url.startswith("http") else fastness.open
    with opened(url, universe=folder.name) as plane:
        yield plane


@pytest.fixture
def start(folder: Path, url: str) -> Iterator[Callable[..., HostProcess]]:
    started: list[HostProcess] = []

    def start(*options: str) -> HostProcess:
        started.append(HostProcess(folder, url, folder.name, *options))
        return started[-1]

    yield start
    for host in started:
        host.close()


def program(folder: Path, name: str) -> Program:
    """A program of the module."""
    found: Program = runpy.run_path(str(folder / "shop.py"), run_name="shop")["app"].programs[name]
    return found


def state_of(plane: Plane, world: str, program: Program) -> Any:
    """The state of a world, which a replay of its whole journal must give, too."""
    found = plane.world(world)
    assert found.verify(program.reducer).agrees
    return found.restore(program).state


def notes(folder: Path, name: str) -> list[int]:
    """The processes that have noted this, in order."""
    file = folder / "notes"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [int(pid) for noted, pid in lines if noted == name]


def test_the_worlds_of_a_killed_host_continue_on_another_and_nothing_is_done_twice(
    folder: Path, plane: Plane, start: Callable[..., HostProcess]
) -> None:
    names = [f"agent-{number}" for number in range(WORLDS)]
    for name in names:
        plane.world(name).create(program="agent")
    plane.world("ledger").create(program="ledger")
    killed = start()
    for order in range(ORDERS):
        for number, name in enumerate(names):
            plane.world(name).send("order", [number, order])
    eventually(lambda: notes(folder, "charge").count(killed.pid) >= 5)
    other = start()
    assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
    (folder / "go").touch()
    total = WORLDS * ORDERS
    eventually(lambda: plane.queue("charged").stats().put_total == total)
    agent, ledger = program(folder, "agent"), program(folder, "ledger")
    eventually(lambda: plane.world("ledger").restore(ledger).state == total)
    assert state_of(plane, "ledger", ledger) == total
    for number, name in enumerate(names):
        orders = [[number, order] for order in range(ORDERS)]
        assert state_of(plane, name, agent) == {"orders": orders, "charged": orders}
    assert plane.effects.list().effects == []
    assert other.stop() == 0
    assert {plane.world(name).hosting().owner for name in names} == {None}, "it has given them back"
    assert plane.queue("charged").stats().put_total == total


def test_a_paused_host_is_fenced_when_it_continues(
    folder: Path, plane: Plane, start: Callable[..., HostProcess]
) -> None:
    plane.world("ada").create(program="slow")
    paused = start()
    plane.world("ada").send("go")
    eventually(lambda: notes(folder, "slow") == [paused.pid])
    paused.process.send_signal(signal.SIGSTOP)
    fence = plane.world("ada").hosting().fence
    other = start()
    (folder / "go").touch()
    eventually(lambda: plane.queue("slow").stats().put_total == 1)
    assert plane.world("ada").hosting().fence > fence
    paused.process.send_signal(signal.SIGCONT)
    eventually(lambda: "world ada is lost" in paused.log.read_text())
    plane.world("ada").send("go")
    eventually(lambda: plane.queue("slow").stats().put_total == 2)
    assert state_of(plane, "ada", program(folder, "slow")) == 2
    assert [host.stop() for host in (paused, other)] == [0, 0]
    assert plane.world("ada").head() == 4, "two turns of one item each"


@pytest.mark.parametrize("url", ["server"], indirect=True)
def test_a_host_that_is_stopped_finishes_its_turn_and_a_hangup_loads_changed_code(
    folder: Path, plane: Plane, start: Callable[..., HostProcess]
) -> None:
    for name in ("slow", "version"):
        plane.world(name).create(program=name)
    host = start()
    plane.world("version").send("go")
    version = program(folder, "version")
    eventually(lambda: plane.world("version").restore(version).state == 1)
    (folder / "shop.py").write_text(MODULE.replace("return 1\n", "return 22\n"))
    host.process.send_signal(signal.SIGHUP)
    host.wait_until_running()
    plane.world("version").send("go")
    eventually(lambda: state_of(plane, "version", program(folder, "version")) == 22)
    plane.world("slow").send("go")
    eventually(lambda: notes(folder, "slow"))
    host.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping: waiting" in host.log.read_text())
    (folder / "go").touch()
    assert exit_code(host.process) == 0
    assert plane.queue("slow").stats().put_total == 1
    assert plane.world("slow").hosting().owner is None
