"""The history of a running server: stored without a page, kept across a restart, and served to those who may see it."""

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.layers import samples
from tests.support.server_process import Server
from tests.support.waiting import eventually


def ask(server: Server, query: str, token: str) -> tuple[int, Any]:
    status, _, body = server.get(f"/console/history?{query}", token=token)
    return status, json.loads(body)


@pytest.mark.rotating
def test_a_server_stores_samples_and_serves_them_after_a_restart(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        admin = plane.tokens.create("admin", universes="*", verbs="*").token
        reader = plane.tokens.create("reader", universes="main", verbs="queue:stats").token
        plane.queue("jobs").put_many([{"n": number} for number in range(7)])
    first = Server(tmp_path, tokens=True)
    try:
        eventually(lambda: ask(first, "seconds=3600", admin)[1]["samples"])  # One every ten seconds.
        found = ask(first, "seconds=3600", admin)[1]
        assert found["kept_seconds"] == 86_400
        assert found["samples"][0]["queues"]["main"]["ready"] == 7
        assert first.stop() == 0
    finally:
        first.kill()
    second = Server(tmp_path, tokens=True)
    try:
        status, again = ask(second, "seconds=86400", admin)
        assert status == 200
        assert again["samples"][0]["at_ms"] == found["samples"][0]["at_ms"]
        status, of_queue = ask(second, "seconds=300&queue=jobs", reader)
        assert status == 200
        assert of_queue["samples"][0]["queues"] == {"main": {"put": 7, "ready": 7} | _oldest(of_queue)}
        assert ask(second, "seconds=300", reader)[0] == 403
        assert ask(second, "seconds=300&queue=jobs&universe=other", reader)[0] == 403
        for bad in ("servers=some", "seconds=0", "seconds=x", "seconds=90000", "seconds=nan"):
            assert ask(second, bad, admin)[0] == 400, bad
    finally:
        second.kill()


def _oldest(answer: Any) -> dict[str, float]:
    numbers = answer["samples"][0]["queues"]["main"]
    return {"oldest": numbers["oldest"]} if "oldest" in numbers else {}


def test_a_server_without_a_history_stores_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, history_seconds=0)
    try:
        status, _, body = server.get("/console/history?seconds=300")
        assert (status, json.loads(body)["kept_seconds"], json.loads(body)["samples"]) == (200, 0, [])
    finally:
        server.kill()


@pytest.mark.rotating
def test_a_chart_of_two_servers_has_the_calls_of_both(postgres_url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            folder = tmp_path / f"node-{number}"
            folder.mkdir()
            servers.append(Server(folder, data=postgres_url, activity=str(folder / "activity")))
            stack.callback(servers[-1].kill)
        planes = [stack.enter_context(server.plane()) for server in servers]

        def until_newest(is_enough: Callable[[Any], bool]) -> Any:
            def newest() -> Any:
                found = ask(servers[0], "seconds=3600", "")[1]
                return found["servers"] == 2 and is_enough(found["samples"][-1]) and found["samples"][-1]

            return eventually(newest)

        for number, plane in enumerate(planes):
            for each in range(30 + number):
                plane.queue("jobs").put({"n": each})
        newest = until_newest(lambda sample: sample["calls"] >= 61 and sample["queues"]["main"]["put"] >= 61)
        with fastness.open(postgres_url) as embedded:
            database = embedded._transport.services.database  # type: ignore[attr-defined]
            assert set(database.read(samples.nodes)) == {f"{socket.gethostname()} {server.url}" for server in servers}
        numbers = newest["queues"]["main"]
        assert (numbers["ready"], numbers["put"]) == (61, 61), "queues are of the plane, and are taken once"
        own = []
        for server in servers:
            found = ask(server, "seconds=3600&servers=own", "")[1]
            assert found["servers"] == 1
            own.append({sample["at_ms"] // 10_000: sample["calls"] for sample in found["samples"]})
        step = max(own[0].keys() & own[1].keys())
        every = ask(servers[1], "seconds=3600", "")[1]["samples"]
        (calls,) = [sample["calls"] for sample in every if sample["at_ms"] // 10_000 == step]
        assert calls == own[0][step] + own[1][step]
        servers[1].kill()  # What it did stays in the chart, and the counter goes on with the other.
        for each in range(10):
            planes[0].queue("jobs").put({"n": each})
        until_newest(lambda sample: sample["calls"] >= newest["calls"] + 10)
