"""Runs of workflows on a real server: over HTTP with plain JSON, with the client, and with the command line."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.errors import ResultNotReady, RunCancelled, RunFailed, RunNotFound
from fastness.wire.atomic import CommitAtomic
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimWorlds, CommitTurn
from fastness.wire.runs import UpdateRun
from tests.support.forked import run_python
from tests.support.http_server import Server, serving

SECONDS_MAX = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}") as running:
        yield running


@pytest.fixture
def plane(server: Server) -> Iterator[fastness.Plane]:
    with fastness.connect(server.url) as plane:
        yield plane


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command to its end; its JSON output, or the problem of one that fails."""

    def run(*words: str, code: int = 0) -> Any:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        done = run_python(
            ["-m", "fastness.cli", "workflow", *words, "--json"],
            env={**kept, "FASTNESS_URL": server.url, "XDG_CONFIG_HOME": str(tmp_path)},
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout or done.stderr)

    return run


def end(plane: fastness.Plane, id: str, workflow: str, entries: list[Any], **outcome: Any) -> None:
    """Do what a host does that runs the last turn of a run."""
    claims = plane._transport.call(ClaimWorlds([f"workflow:{workflow}"], "host", 100)).worlds
    [claim] = [each for each in claims if each.world == f"run:{id}"]
    turn = CommitTurn(
        claim.world,
        "host",
        claim.fence,
        claim.head,
        claim.items[-1][0],
        opening=[canonical({"turn": 1_000})],
        entries=[canonical(each) for each in entries],
    )
    plane._transport.call(CommitAtomic([turn, UpdateRun(id, claim.fence, **outcome)]))


def test_a_run_over_http_is_plain_json(server: Server, plane: fastness.Plane) -> None:
    body = {"workflow": "http", "args": ["q", 1.5, None], "kwargs": {"depth": {"most": 3}}}
    started = server.ask("PUT", "/v1/runs/h-1", body)
    assert (started.status, started.json()["is_duplicate"]) == (201, False)
    assert server.ask("PUT", "/v1/runs/h-1", body).json()["is_duplicate"]
    assert server.ask("PUT", "/v1/runs/h-1", {**body, "args": []}).code == "run_exists"
    assert server.post("/v1/runs/h-1/signals/approval", {"value": {"by": ["ada"]}}).status == 201
    items = server.get("/v1/worlds/run:h-1/inbox").json()["items"]
    assert [item["schema"] for _, item in items] == ["run.start", "run.signal"]
    events = plane.workflows.history("h-1")
    assert events == []  # No host has taken them.

    described = server.get("/v1/runs/h-1").json()
    assert (described["state"], described["result"], described["ended_ms"]) == ("running", None, None)
    assert server.ask("DELETE", "/v1/runs/h-1").code == "run_not_ended"
    shown = canonical({"done": 1})
    end(plane, "h-1", "http", [], state="completed", result=canonical({"pages": [1, b"\x00"]}), published=shown)
    ended = server.get("/v1/runs/h-1?wait_seconds=20").json()
    assert (ended["state"], ended["result"]) == ("completed", {"pages": [1, "AA=="]})
    assert ended["published"] == {"done": 1}
    listed = server.get("/v1/runs?workflow=http&state=completed").json()
    assert [(each["id"], each["result"]) for each in listed["runs"]] == [("h-1", None)]
    assert server.post("/v1/runs/h-1/signals/approval", {}).code == "run_ended"
    assert server.ask("DELETE", "/v1/runs/h-1").status == 200
    assert server.get("/v1/runs/h-1").code == "run_not_found"
    assert server.get("/v1/runs?workflow=http").json() == {"runs": [], "next": None}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"args": []}, "missing_fields"),
        ({"workflow": "bad", "args": {}}, "invalid_body"),
        ({"workflow": "bad", "kwargs": []}, "invalid_body"),
        ({"workflow": "bad", "arguments": "gIA="}, "invalid_body"),
        ({"workflow": "bad/name"}, "invalid_name"),
        ({"workflow": "bad", "id": "x" * 201}, "invalid_name"),
        ({"workflow": "bad", "parent": "nothing"}, "run_not_found"),
        ({"workflow": "bad", "args": ["x" * 50_000]}, "payload_too_large"),
        ({"workflow": "bad", "arguments_blob": "0" * 64}, "blob_not_found"),
    ],
)
def test_a_bad_start_starts_nothing(server: Server, body: Any, code: str) -> None:
    assert server.post("/v1/runs", body).code == code
    assert server.get("/v1/runs?workflow=bad").json() == {"runs": [], "next": None}


def test_a_caller_waits_for_the_result_of_a_run(plane: fastness.Plane, server: Server) -> None:
    large = "x" * 100_000
    run = plane.workflows.start("slow", large, id="s-1")
    assert plane.workflows.start("slow", large, id="s-1").is_duplicate
    with pytest.raises(ResultNotReady, match="wait_seconds"):
        run.result()
    found: list[Any] = []

    def wait() -> None:
        with fastness.connect(server.url) as other:
            found.append(other.workflows.get("s-1").result(wait_seconds=SECONDS_MAX))

    waiting = threading.Thread(target=wait)
    waiting.start()
    stored = plane.blobs.put(canonical({"text": large}))
    end(plane, "s-1", "slow", [], state="completed", result_blob=stored)
    waiting.join(SECONDS_MAX)
    assert found == [{"text": large}]


def test_a_run_that_failed_or_was_cancelled_says_so(plane: fastness.Plane) -> None:
    failed, cancelled = (plane.workflows.start("broken", id=id) for id in ("b-1", "b-2"))
    end(plane, "b-1", "broken", [], state="failed", error="ValueError: no", error_code="step_failed")
    with pytest.raises(RunFailed, match="ValueError: no"):
        failed.result()
    assert cancelled.cancel("not needed").state == "running"
    assert cancelled.describe().is_cancelling
    assert cancelled.cancel("now", force=True).state == "cancelled"
    with pytest.raises(RunCancelled, match="now"):
        cancelled.result()
    with pytest.raises(RunNotFound):
        plane.workflows.get("b-3").result()


def test_a_run_with_the_command_line(cli: Callable[..., Any], plane: fastness.Plane) -> None:
    words = ("start", "order", "4711", "what now?", '{"n": 1}', "--kwarg", "to=ada", "--kwarg", "fast:=true")
    assert cli(*words, "--id", "c-1") == {"id": "c-1", "workflow": "order", "is_duplicate": False}
    assert cli(*words, "--id", "c-1")["is_duplicate"]
    assert cli("start", "order", "--id", "c-1", code=5)["code"] == "run_exists"
    assert cli("result", "c-1", code=7)["code"] == "result_not_ready"
    cli("signal", "c-1", "approval", "true")
    cli("signal", "c-1", "note", "hello there")
    assert cli("cancel", "c-1", "--reason", "late")["state"] == "cancelling"
    entries = [
        ["step", 900, 0, "charge", 400, {"paid": True}],
        ["wait", 950, 1, "delivery", None],
        ["end", 1_000, "completed", [1, 2], None],
    ]
    outcome = {"state": "completed", "result": canonical([1, 2]), "published": canonical("half way")}
    end(plane, "c-1", "order", entries, **outcome)
    assert cli("result", "c-1", "--wait", "forever") == {"id": "c-1", "result": [1, 2]}
    assert cli("query", "c-1")["published"] == "half way"
    shown = cli("show", "c-1")
    assert (shown["state"], shown["result"], shown["timers"]) == ("completed", [1, 2], [])
    timeline = [(each["kind"], each["name"], each["duration_ms"]) for each in shown["timeline"]]
    assert timeline == [
        ("started", "", None),
        ("signal", "approval", None),
        ("signal", "note", None),
        ("cancel", "", None),
        ("step", "charge", 500),
        ("wait", "delivery", None),
        ("ended", "completed", None),
    ]
    assert shown["timeline"][0]["details"] == {
        "args": [4711, "what now?", {"n": 1}],
        "kwargs": {"fast": True, "to": "ada"},
    }
    assert [each["details"].get("value") for each in shown["timeline"][1:3]] == [True, "hello there"]
    assert [each["id"] for each in cli("list", "--workflow", "order", "--state", "completed")] == ["c-1"]
    assert cli("signal", "c-1", "approval", code=5)["code"] == "run_ended"
    assert cli("delete", "c-1", "--yes") == {"id": "c-1", "deleted": True}
    assert cli("show", "c-1", code=4)["code"] == "run_not_found"


def test_a_run_starts_with_the_commit_that_acknowledges_a_message(plane: fastness.Plane) -> None:
    queue = plane.queue("orders")
    queue.put({"order": 17})
    with queue.receive() as message:
        plane.atomic().ack(message).start_run("order", message.json()["order"], id="from-queue").commit()
    assert queue.stats().ready == 0
    assert plane.workflows.describe("from-queue").state == "running"
    plane.atomic().signal_run("from-queue", "approval", True).commit()
    kinds = [item.__class__.__name__ for _, item in plane.world("run:from-queue").inbox.read()]
    assert kinds == ["DomainEvent", "DomainEvent"]
