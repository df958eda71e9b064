"""Several real servers on one PostgreSQL: they see each other, and one of them does the periodic work."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner

from fastness.backends.postgres import PostgresDatabase
from fastness.cli.main import root
from fastness.clock import SystemClock
from fastness.layers import nodes, queues
from fastness.layers.queues import QueueKey
from fastness.limits import NODE_GONE_SECONDS
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually

Found = TypeVar("Found")
JOBS = QueueKey("main", "jobs")


class Cluster:
    """Servers on one PostgreSQL."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self._folder, self._stack = url, folder, stack
        self.servers: list[Any] = []

    def start(self) -> Any:
        folder = self._folder / f"node-{len(self.servers)}"
        folder.mkdir()
        server = Server(folder, data=self.url, activity=str(folder / "activity"))
        self._stack.callback(server.kill)
        self.servers.append(server)
        return server

    def nodes(self) -> list[dict[str, Any]]:
        """The servers that `fastness node list` lists, through PostgreSQL."""
        result = CliRunner().invoke(root, ["--url", self.url, "node", "list", "--json"])
        assert result.exit_code == 0, result.output
        return [node for node in json.loads(result.stdout)["nodes"] if node["kind"] == "server"]

    def holder(self) -> Any | None:
        """The server with the maintenance lease."""
        addresses = [node["address"] for node in self.nodes() if node["maintenance"]]
        return next((server for server in self.servers if server.url in addresses), None)

    def other(self, than: Any) -> Any:
        return next(server for server in self.servers if server is not than)


@pytest.fixture
def cluster(postgres_url: str, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(postgres_url, tmp_path, stack)
        cluster.start()
        cluster.start()
        yield cluster


def both(cluster: Cluster) -> Any:
    """The server with the maintenance lease, once both servers are listed."""
    eventually(lambda: len(cluster.nodes()) == 2)
    return eventually(cluster.holder)


def in_the_past(url: str, seconds: float) -> PostgresDatabase:
    """The key space at an earlier time."""
    return PostgresDatabase(url, clock=ManualClock(SystemClock().now_ms() - round(seconds * 1_000)))


def _is_ready(stats: Callable[[], Any]) -> bool:
    return bool(stats().ready)


def ready(server: Server) -> int:
    with server.plane() as plane:
        return int(plane.queue("jobs").stats().ready)


def test_servers_see_each_other(cluster: Cluster) -> None:
    both(cluster)
    found = {node["address"]: node for node in cluster.nodes()}
    assert {*found} == {server.url for server in cluster.servers}
    assert {node["pid"] for node in found.values()} == {server.process.pid for server in cluster.servers}
    assert all(node["alive"] for node in found.values())
    assert sum(node["maintenance"] for node in found.values()) == 1
    for server in cluster.servers:
        status, _, body = server.get("/v1/nodes")
        assert status == 200
        assert {node["address"] for node in json.loads(body)["nodes"] if node["address"]} == {*found}
    metrics = [server.get("/metrics")[2].decode() for server in cluster.servers]
    assert sorted("fastness_maintenance_holder 1.0" in each for each in metrics) == [False, True]
    text = CliRunner().invoke(root, ["--url", cluster.servers[0].url, "node", "list"]).output
    assert all(server.url in text for server in cluster.servers)


@pytest.mark.rotating
def test_another_node_takes_over_from_one_that_was_killed_and_fires_a_schedule(cluster: Cluster) -> None:
    holder = both(cluster)
    survivor, killed_pid = cluster.other(holder), holder.process.pid
    holder.kill()
    # It is due at once, and no node has committed it, so only a scan of all queues finds it.
    with in_the_past(cluster.url, 120) as database:
        message = NewMessage(b"now")
        database.transact(queues.set_schedule, JOBS, "report", cron="* * * * *", timezone="UTC", message=message)
    eventually(lambda: ready(survivor))
    assert eventually(cluster.holder) is survivor
    gone = next(node for node in cluster.nodes() if node["pid"] == killed_pid)
    assert gone["alive"]  # It could still be: its last heartbeat was a few seconds ago.
    with in_the_past(cluster.url, NODE_GONE_SECONDS) as database:
        record = next(node for node in database.read(nodes.list_nodes) if node.id == gone["id"])
        database.transact(nodes.renew, record)
    states = {node["pid"]: node["alive"] for node in cluster.nodes()}
    assert states == {killed_pid: False, survivor.process.pid: True}


def test_a_node_that_stops_hands_the_periodic_work_over(cluster: Cluster) -> None:
    holder = both(cluster)
    survivor = cluster.other(holder)
    holder.process.send_signal(signal.SIGTERM)
    assert holder.process.wait(SECONDS_MAX) == 0
    assert eventually(cluster.holder) is survivor
    assert [node["address"] for node in cluster.nodes()] == [survivor.url]


def test_a_delayed_message_becomes_ready_whichever_node_is_on_duty(cluster: Cluster) -> None:
    holder = both(cluster)
    waiting = []
    for server in (holder, cluster.other(holder)):
        with server.plane() as plane:
            for seconds in (1.0, 5.0):
                name = f"jobs-{server.process.pid}-{seconds:g}"
                plane.queue(name).put({"n": 1}, delay_seconds=seconds)
                waiting.append(name)
    with holder.plane() as plane:
        for name in waiting:
            eventually(partial(_is_ready, plane.queue(name).stats))


@pytest.mark.rotating
def test_a_paused_holder_loses_the_periodic_work_and_does_not_take_it_back(cluster: Cluster) -> None:
    holder = both(cluster)
    survivor = cluster.other(holder)
    holder.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: cluster.holder() is survivor)
    finally:
        holder.process.send_signal(signal.SIGCONT)
    eventually(lambda: b"fastness_maintenance_holder 0.0" in holder.get("/metrics")[2])
    with holder.plane() as plane:
        plane.queue("jobs").put({"n": 1}, delay_seconds=1)
    eventually(lambda: ready(survivor))
    assert cluster.holder() is survivor
