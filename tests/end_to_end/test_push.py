"""Pushes against a real server: ways in, identity, limits, watches, restarts, and `fastness push`."""

import asyncio
import http.client
import json
import os
import subprocess
import threading
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import DataPush, NewDataPush, Pushed
from fastness.errors import (
    BatchTooLarge,
    FastnessError,
    InvalidArgument,
    NotAllowed,
    PayloadTooLarge,
    RateLimited,
    SenderMismatch,
    Unreachable,
)
from tests.support.forked import start_python
from tests.support.proxy import Proxy
from tests.support.server_process import Server
from tests.support.waiting import eventually

SECONDS_MAX = 60.0
UNLIMITED: dict[str, Any] = {"ingress_pushes_per_minute": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, **UNLIMITED)
    yield server
    server.kill()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, ingress_pushes_per_minute=2)
    yield server
    server.kill()


def by_http(server: Server, body: dict[str, Any], *, token: str | None = None) -> tuple[int, dict[str, str], Any]:
    status, headers, answer = server.get("/v1/pushes", body=json.dumps(body).encode(), token=token)
    return status, headers, json.loads(answer)


def http_push(key: str, **more: Any) -> dict[str, Any]:
    payload = b64encode(b"x").decode()
    return {
        "to": "bob",
        "topic": "t",
        "content_type": "text/plain",
        "payload": payload,
        "idempotency_key": key,
    } | more


def by_rpc(server: Server, key: str, *, token: str | None = None, **more: Any) -> tuple[dict[str, str], Any]:
    params = {
        "to": "bob",
        "topic": "t",
        "content_type": "text/plain",
        "payload_base64": urlsafe_b64encode(b"x").decode().rstrip("="),
        "idempotency_key": key,
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": "agent.data.push", "params": params | more}
    status, headers, answer = server.get("/v1/rpc", body=json.dumps(body).encode(), token=token)
    assert status == 200
    return headers, json.loads(answer)


# Ways in.


def test_a_key_is_one_mail_whichever_way_it_came_in(postgres_url: str, tmp_path: Path) -> None:
    server = Server(tmp_path, data=postgres_url, activity=str(tmp_path / "activity"), **UNLIMITED)
    try:
        with fastness.open(postgres_url, activity=f"dir:{tmp_path / 'other'}") as embedded, server.plane() as plane:
            ways: dict[str, Callable[[str], tuple[str, bool]]] = {
                "embedded": lambda key: pushed(embedded.ingress.push("bob", "t", b"x", **of(key))),
                "stream": lambda key: pushed(plane.ingress.push("bob", "t", b"x", **of(key))),
                "batch": lambda key: pushed(
                    plane.ingress.push_many([NewDataPush("bob", "t", b"x", None, key)], synced=True, sender="ada")[0]
                ),
                "http": lambda key: answer_of(by_http(server, http_push(key, **WIRE))[2]),
                "rpc": lambda key: answer_of(by_rpc(server, key, durability="synced", **FROM_ADA)[1]["result"]),
            }
            for key, first_way in ways.items():
                id, is_duplicate = first_way(key)
                assert not is_duplicate
                assert {way(key) for way in ways.values()} == {(id, True)}
            assert len(plane.mailbox("bob").read(limit=256)) == 5
    finally:
        server.kill()


WIRE = {"sender": "ada", "durability": "synced"}
FROM_ADA = {"from": "ada"}


def of(key: str) -> dict[str, Any]:
    return {"idempotency_key": key, "sender": "ada", "synced": True, "content_type": "text/plain"}


def pushed(answer: Any) -> tuple[str, bool]:
    assert isinstance(answer, Pushed), answer
    assert answer.durability == "synced"
    return answer.id, answer.deduped


def answer_of(answer: Any) -> tuple[str, bool]:
    assert answer["durability"] == "synced", answer
    return answer["id"], answer["deduped"]


def test_synced_pushes_survive_the_kill_of_the_server(tmp_path: Path) -> None:
    """The server is killed while callers push; what was answered is there, and a key that is repeated is there once."""
    server = Server(tmp_path, **UNLIMITED)
    answered: set[str] = set()
    with ThreadPoolExecutor(4) as threads:

        def push_until_killed(thread: int) -> None:
            with server.plane(patience_seconds=0.1) as plane:
                for number in range(100_000):
                    key = f"{thread}-{number}"
                    try:
                        if number % 3:
                            plane.ingress.push(f"agent-{thread}", "t", key, idempotency_key=key, synced=True)
                            answered.add(key)
                        else:
                            new = [NewDataPush(f"agent-{thread}", "t", key, None, f"{key}-{part}") for part in range(3)]
                            outcomes = plane.ingress.push_many(new, synced=True)
                            answered.update(
                                each.idempotency_key or ""
                                for each, outcome in zip(new, outcomes, strict=True)
                                if isinstance(outcome, Pushed)
                            )
                    except Unreachable:
                        return

        running = [threads.submit(push_until_killed, thread) for thread in range(4)]
        eventually(lambda: len(answered) > 200)
        server.kill()
        for each in running:
            each.result(SECONDS_MAX)
    again = Server(tmp_path, **UNLIMITED)
    try:
        with again.plane() as plane:
            for key in sorted(answered)[:50]:
                agent = f"agent-{key.partition('-')[0]}"
                plane.ingress.push(agent, "t", key, idempotency_key=key, synced=True)
            stored = [key for thread in range(4) for key in keys_in(plane, f"agent-{thread}")]
        assert answered <= set(stored)
        assert len(stored) == len(set(stored))
    finally:
        again.kill()


def keys_in(plane: fastness.Plane, agent: str) -> list[str]:
    mailbox, keys, after = plane.mailbox(agent), [], -1
    while mails := mailbox.read(after=after, limit=256):
        keys += [mail.json()["idempotency_key"] for mail in mails]
        after = mails[-1].sequence
    return keys


def test_wrong_input_is_the_same_typed_error_through_a_server(server: Server) -> None:
    with server.plane() as plane:
        wrong: list[tuple[type[FastnessError], Callable[[], Any]]] = [
            (InvalidArgument, lambda: plane.ingress.push("bob", "", b"x")),
            (InvalidArgument, lambda: plane.ingress.push("bob", "chat.message", b"x")),
            (PayloadTooLarge, lambda: plane.ingress.push("bob", "t", bytes(131_073))),
            (BatchTooLarge, lambda: plane.ingress.push_many([NewDataPush("bob", "t", b"x")] * 257)),
            (InvalidArgument, lambda: plane.ingress.watch(after="x").read(0.0)),
            (InvalidArgument, lambda: plane.ingress.watch().read(21.0)),
        ]
        for error, call in wrong:
            with pytest.raises(error):
                call()
        assert plane.ingress.stats().accepted == 0
    for body, code in (
        ({"to": "bob"}, "missing_fields"),
        (http_push("k", payload="!"), "invalid_body"),
        (http_push("k", more=1), "invalid_body"),
        (http_push("k", durability="soon"), "invalid_body"),
        (http_push("k", to="a b"), "invalid_name"),
    ):
        status, _, problem = by_http(server, body)
        assert (status, problem["code"]) == (400, code)
    for query in ("limit=0", "wait_seconds=x", "after=x", "since=1"):
        assert server.get(f"/v1/pushes?{query}")[0] == 400
    assert server.get("/v1/pushes/watch?after=x")[0] == 400


def test_who_is_rate_limited_gets_to_know_the_limit_the_setting_and_the_wait(limited: Server) -> None:
    by_http(limited, http_push("1"))
    by_rpc(limited, "2")
    texts = []
    with limited.plane() as plane:
        with pytest.raises(RateLimited) as refused:
            plane.ingress.push("bob", "t", b"x")
        seconds = refused.value.retry_after_seconds
        assert seconds is not None
        assert 0 < seconds <= 30
        texts.append(str(refused.value))
        (outcome,) = plane.ingress.push_many([NewDataPush("bob", "t", b"x")])
        assert isinstance(outcome, RateLimited)
        assert 0 < (outcome.retry_after_seconds or 0) <= seconds
        texts.append(str(outcome))
        assert plane.ingress.stats().refused == {"rate_limited": 2}
    status, headers, problem = by_http(limited, http_push("3"))
    assert (status, problem["code"], problem["retry"]) == (429, "rate_limited", "later")
    assert 1 < problem["retry_after_seconds"] <= int(headers["retry-after"]) <= 30
    texts.append(problem["detail"])
    headers, answer = by_rpc(limited, "4")
    data = answer["error"]["data"]
    assert (answer["error"]["message"], data["code"]) == ("ERR_RATE_LIMITED", "rate_limited")
    assert 1 < data["retry_after_seconds"] <= int(headers["retry-after"]) <= 30
    texts.append(data["details"])
    for text in texts:
        assert "2 pushes per minute (ingress_pushes_per_minute)" in text


# Identity and permissions.


def test_a_token_pushes_under_its_name_and_watches_with_the_right_to_read_mail(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        create = plane.tokens.create
        ada = create("ada", universes=["main"], verbs=["mail:send"]).token
        reader = create("reader", universes=["main"], verbs=["mail:read"]).token
        other = create("other", universes=["other"], verbs=["mail:*"]).token
        admin = create("admin", universes=["*"], verbs=["*"]).token
    server = Server(tmp_path, tokens=True, **UNLIMITED)
    try:
        with server.plane(ada) as plane:
            plane.ingress.push("bob", "t", b"1", synced=True)
            plane.ingress.push("bob", "t", b"2", synced=True, sender="ada@main")
            with pytest.raises(SenderMismatch, match="The caller is ada, not 'eve'"):
                plane.ingress.push("bob", "t", b"3", sender="eve")
            with pytest.raises(SenderMismatch):
                plane.ingress.push_many([NewDataPush("bob", "t", b"3")], sender="eve")
            for refused in (plane.ingress.watch().start, plane.ingress.stats):
                with pytest.raises(NotAllowed):
                    refused()
        status, _, problem = by_http(server, http_push("k", sender="eve"), token=ada)
        assert (status, problem["code"]) == (403, "sender_mismatch")
        _, answer = by_rpc(server, "k", token=ada, **{"from": "eve"})
        assert (answer["error"]["message"], answer["error"]["data"]["code"]) == (
            "ERR_PEER_ID_MISMATCH",
            "sender_mismatch",
        )
        assert answer["error"]["data"]["details"] == problem["detail"]
        with server.plane(reader) as plane, plane.ingress.watch() as pushes:
            with pytest.raises(NotAllowed, match="mail:send"):
                plane.ingress.push("bob", "t", b"x")
            with server.plane(admin) as writer, server.plane(other, universe="other") as stranger:
                stranger.ingress.push("bob", "t", b"in another universe", synced=True)
                writer.ingress.push("bob", "t", b"seen", synced=True)
                assert writer.ingress.stats().accepted == 4
            assert [(push.sender, push.payload) for push in pushes.read()] == [("admin@main", b"seen")]
        with server.plane(other) as plane, pytest.raises(NotAllowed, match="not for main"):
            plane.ingress.watch().start()
        assert server.get("/v1/pushes/watch", token=ada)[0] == 403
        with server.plane(admin) as plane:
            assert [mail.sender for mail in plane.mailbox("bob").read()] == ["ada@main", "ada@main", "admin@main"]
    finally:
        server.kill()


# Watches and listeners.


def test_a_watch_goes_on_after_a_lost_connection_and_a_restart_of_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path, **UNLIMITED)
    with (
        Proxy(server.address[1]) as proxy,
        fastness.connect(proxy.url) as watching,
        watching.ingress.watch(to="bob") as pushes,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            with server.plane() as plane:
                waiting = threads.submit(next, pushes)
                eventually(lambda: plane.ingress.stats().watches == 1)
                proxy.refuses = True
                proxy.cut_all()
                eventually(lambda: plane.ingress.stats().watches == 0)
                for payload in (b"1", b"2"):
                    plane.ingress.push("bob", "t", payload)
                proxy.refuses = False
                assert waiting.result(SECONDS_MAX).payload == b"1"
                assert next(pushes).payload == b"2"
                assert (pushes.restarts, pushes.missed) == (0, 0)
                waiting = threads.submit(next, pushes)
                eventually(lambda: plane.ingress.stats().watches == 1)
            server.kill()
            server = Server(tmp_path, **UNLIMITED)
            proxy.target = server.address[1]
            with server.plane() as plane:
                eventually(lambda: plane.ingress.stats().watches == 1)  # It has noticed the restart, and waits again.
                plane.ingress.push("bob", "t", b"3")
            assert waiting.result(SECONDS_MAX).payload == b"3"
            assert (pushes.restarts, pushes.missed) == (1, 0)
        finally:
            server.kill()


def test_a_slow_watch_of_a_server_counts_what_it_has_missed(server: Server) -> None:
    with server.plane() as plane, plane.ingress.watch() as pushes:
        new = [NewDataPush(f"agent-{number % 4}", "t", str(number)) for number in range(250)]
        for _ in range(6):
            plane.ingress.push_many(new)
        seen = list(plane.ingress.watch(after=pushes.position, wait_seconds=0))
        assert len(pushes.read()) == 256, "one answer"
        assert (len(seen), pushes.missed) == (1_024, 6 * 250 - 1_024)
        assert [push.payload for push in seen[-3:]] == [b"247", b"248", b"249"]


def test_a_callback_gets_the_pushes_of_a_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []
    stopped = threading.Event()

    def hear(push: DataPush) -> None:
        heard.append(push.payload)
        if push.payload == b"last":
            listener.stop()
            stopped.set()
        raise RuntimeError("a callback's own fault")

    with server.plane() as plane:
        listener = plane.ingress.on_data_push(hear, topic="t")
        for topic, payload in (("t", b"first"), ("u", b"filtered"), ("t", b"last"), ("t", b"after")):
            plane.ingress.push("bob", topic, payload)
        assert stopped.wait(SECONDS_MAX)
    assert heard == [b"first", b"last"]
    assert "a callback's own fault" in caplog.text


async def test_a_callback_and_a_watch_on_an_event_loop(server: Server) -> None:
    heard: asyncio.Queue[DataPush] = asyncio.Queue()
    async with (
        asyncio.timeout(SECONDS_MAX),
        fastness.connect_async(server.url) as plane,
        await plane.ingress.on_data_push(heard.put_nowait),
        plane.ingress.watch() as pushes,
    ):
        first = await plane.ingress.push("bob", "t", {"n": 1})
        (second,) = await plane.ingress.push_many([NewDataPush("bob", "t", {"n": 2})], synced=True)
        assert isinstance(second, Pushed)
        assert [(await heard.get()).id for _ in range(2)] == [first.id, second.id]
        assert [(await anext(pushes)).json() for _ in range(2)] == [{"n": 1}, {"n": 2}]


def test_server_sent_events_continue_at_the_last_event(server: Server) -> None:
    with server.plane() as plane:
        with event_stream(server, "/v1/pushes/watch?to=bob") as events:
            assert next(events)[0] == "watching"
            for number in range(3):
                plane.ingress.push("bob", "t", {"n": number})
            plane.ingress.push("eve", "t", "not for bob")
            name, first, id = next(events)
            assert (name, first["to"], first["position"]) == ("push", "bob@main", id)
        with event_stream(server, "/v1/pushes/watch?to=bob", {"Last-Event-ID": id}) as events:
            name, begun, _ = next(events)
            assert (name, begun["missed"], begun["restarted"]) == ("watching", 0, False)
            rest = [next(events) for _ in range(2)]
            assert [each[1]["payload"] for each in rest] == [b64encode(b'{"n":%d}' % n).decode() for n in (1, 2)]


class event_stream:  # noqa: N801  # Used like a function.
    """The server-sent events of a path: name, data and id."""

    def __init__(self, server: Server, path: str, headers: dict[str, str] | None = None) -> None:
        host, port = server.address
        self._connection = http.client.HTTPConnection(host, port, timeout=SECONDS_MAX)
        self._connection.request("GET", path, headers={"Accept": "text/event-stream", **(headers or {})})
        self._response = self._connection.getresponse()
        assert self._response.status == 200

    def __enter__(self) -> Iterator[tuple[str, Any, str]]:
        return self._events()

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._response.close()

    def _events(self) -> Iterator[tuple[str, Any, str]]:
        fields: dict[str, str] = {}
        while True:
            name, _, value = self._response.readline().decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields:
                yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
                fields = {}


# The command line.


def test_push_on_the_command_line(server: Server, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    pipe = subprocess.PIPE

    def start(*args: str) -> "subprocess.Popen[bytes]":
        command = ["-m", "fastness.cli", "--url", server.url, "push", *args]
        return start_python(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)

    def run(*args: str, code: int = 0, given: bytes = b"") -> str:
        with start(*args) as process:
            output, errors = process.communicate(given)
        assert process.returncode == code, errors
        return (output if code == 0 else errors).decode()

    watching = start("watch", "--to", "bob", "-n", "3", "--json")
    with server.plane() as plane:
        eventually(lambda: plane.ingress.stats().watches == 1)
    (tmp_path / "body.bin").write_bytes(b"\xff")
    first = json.loads(run("bob", "build", '{"ok": true}', "--from", "ada", "--json"))
    assert (first["durability"], first["deduped"]) == ("accepted", False)
    assert json.loads(run("--synced", "bob", "build", "-", "--json", given=b"text"))["durability"] == "synced"
    run("send", "watch", "build", "for an agent called watch", "--key", "k")
    run("send", "bob", "build", "--file", str(tmp_path / "body.bin"), "--content-type", "image/png")
    output, _ = watching.communicate(timeout=SECONDS_MAX)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [each.get("payload", each.get("payload_base64")) for each in lines] == [{"ok": True}, "text", "/w=="]
    assert (lines[0]["id"], lines[0]["from"], lines[2]["content_type"]) == (first["id"], "ada@main", "image/png")
    assert "Missing argument 'TOPIC'" in run("bob", code=2)
    assert "topic is required" in run("bob", " ", "x", code=2)
    stats = json.loads(run("stats", "--json"))
    assert (stats["accepted"], stats["refused"]) == (4, {"invalid_argument": 1})
    assert "invalid_argument 1" in run("stats")
    assert "no limit" in run("stats")
