"""Whatever a server logs for a request says which one it was, and so does what the caller gets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import NotAllowed
from holdfast.plane.embedded import AsyncEmbeddedTransport
from holdfast.plane.services import Services
from holdfast.server.app import make_app
from holdfast.server.doors import Doors
from holdfast.server.health import Health
from holdfast.server.logs import correlation_id
from holdfast.server.metrics import MeasuredTransport, Metrics, metrics_route
from holdfast.wire.frames import PROTOCOL, Call, Hello, decode_hello, decode_replies, encode
from holdfast.wire.leases import AcquireLease
from holdfast.wire.problems import Problem
from holdfast.wire.queues import ReceiveMessages
from holdfast.wire.requests import Request
from holdfast.wire.states import GetState

LOG = logging.getLogger("holdfast.test")


class Talkative:
    """A port that says something about every call, on the event loop and on a thread, and breaks where it is told."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Any], once: Any = None) -> Any:
        LOG.info("on the loop")
        await asyncio.to_thread(LOG.info, "on a thread")
        if getattr(request, "key", "") == "boom":
            raise RuntimeError("on purpose")
        return await self._transport.call(request, once)


class Collector(logging.Handler):
    """What was logged, each line with the id that it had when it was."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), correlation_id.get()))

    def ids(self) -> set[str | None]:
        return {id for _, id in self.lines}


@pytest.fixture
def logged() -> Iterator[Collector]:
    collector, root = Collector(), logging.getLogger("holdfast")
    before = root.level
    root.addHandler(collector)
    root.setLevel(logging.DEBUG)
    yield collector
    root.removeHandler(collector)
    root.setLevel(before)


class Refusing:
    """Admits everybody, and lets nobody log a session."""

    name = "somebody"

    def admit(self, headers: Any, client: str) -> Any:
        if headers.get("authorization") == "nobody":
            LOG.warning("refused")
            raise NotAllowed("not you")
        return self

    def allow(self, request: Request[Any]) -> None:
        if isinstance(request, ReceiveMessages):
            LOG.warning("refused")
            raise NotAllowed("not this")


@pytest.fixture
async def doors() -> AsyncIterator[Doors]:
    transport = AsyncEmbeddedTransport(Services(MemoryDatabase()))
    yield Doors(MeasuredTransport(Talkative(transport), Metrics()), Refusing())
    await transport.close()


async def ask(app: Any, path: str, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The answer of an ASGI app to a GET."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    said = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": "GET", "headers": said, "query_string": b"", "client": ("::1", 1)}
    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, msgspec.json.decode(b"".join(each.get("body", b"") for each in sent[1:]))


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/state/k", {}, (404, 3)),
        ("/v1/state/boom", {}, (500, 4)),
        ("/v1/queues", {}, (200, 2)),
        ("/v1/nowhere", {}, (404, 1)),
        ("/v1/queues", {"authorization": "nobody"}, (401, 2)),
        ("/v1/queues", {"origin": "http://evil.example"}, (403, 1)),
    ],
)
async def test_every_line_of_a_request_has_its_id(
    doors: Doors, logged: Collector, path: str, headers: dict[str, str], expected: tuple[int, int]
) -> None:
    status, lines = expected
    app = make_app(doors)
    for given in ("mine-7", ""):
        logged.lines.clear()
        found, answered, body = await ask(app, path, x_correlation_id=given, **headers)
        assert found == status
        id = answered["x-correlation-id"]
        assert id == given or (not given and len(id) == 32)
        assert len(logged.lines) == lines, logged.lines
        assert logged.ids() == {id}
        if status != 200:
            assert body["correlation_id"] == id
    assert correlation_id.get() is None


async def test_requests_at_the_same_time_do_not_mix_their_ids(doors: Doors, logged: Collector) -> None:
    app = make_app(doors)
    await asyncio.gather(*(ask(app, f"/v1/state/k{n}", x_correlation_id=f"id-{n}") for n in range(20)))
    assert sorted(id or "" for message, id in logged.lines if message == "on the loop") == sorted(
        f"id-{n}" for n in range(20)
    )


class Connection:
    """The other end of a stream, without a network."""

    def __init__(self, doors: Doors, **headers: str) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put_nowait({"type": "websocket.connect"})
        said = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/v1/stream", "headers": said, "query_string": b"", "subprotocols": []}
        self.serving = asyncio.create_task(make_app(doors)(scope, self._inbox.get, self.sent.put))

    async def greet(self) -> str:
        """Say hello; what the server calls the connection."""
        accepted = await self.sent.get()
        self.send(Hello(PROTOCOL, "me"))
        assert decode_hello((await self.sent.get())["bytes"]).session == "me"
        return str(dict(accepted["headers"])[b"x-correlation-id"].decode())

    def send(self, value: Any) -> None:
        self._inbox.put_nowait({"type": "websocket.receive", "bytes": encode(value)})

    async def problems(self, count: int) -> dict[int, Problem | None]:
        found: dict[int, Problem | None] = {}
        while len(found) < count:
            replies = decode_replies((await asyncio.wait_for(self.sent.get(), 60))["bytes"])
            found |= {reply.number: reply.problem for reply in replies}
        return found

    async def close(self) -> None:
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await self.serving


async def test_calls_of_a_stream_have_ids_too(doors: Doors, logged: Collector) -> None:
    connection = Connection(doors, x_correlation_id="c-1")
    assert await connection.greet() == "c-1"
    connection.send([Call(7, GetState("no key!")), Call(8, GetState("k"))])
    problems = await connection.problems(2)
    assert problems[7] is not None
    assert (problems[7].code, problems[7].correlation_id) == ("invalid_name", "c-1/7-8")
    connection.send([Call(9, GetState("no key!"))])
    [problem] = (await connection.problems(1)).values()
    assert problem is not None
    assert problem.correlation_id == "c-1/9"
    connection.send([Call(10, ReceiveMessages("jobs", "ada"))])
    [problem] = (await connection.problems(1)).values()
    assert problem is not None
    assert (problem.code, problem.correlation_id) == ("not_allowed", "c-1")
    assert logged.lines == [("refused", "c-1")]
    connection.send("nonsense")
    assert (await connection.sent.get())["type"] == "websocket.close"
    assert logged.lines[-1][1] == "c-1"
    await connection.close()


async def test_what_a_call_by_itself_logs_has_its_number(doors: Doors, logged: Collector) -> None:
    connection = Connection(doors)
    id = await connection.greet()
    assert len(id) == 32
    connection.send([Call(3, AcquireLease("k", "ada")), Call(4, AcquireLease("boom", "ada"))])
    problems = await connection.problems(2)
    assert problems[3] is None
    assert problems[4] is not None
    assert problems[4].correlation_id == f"{id}/4"
    assert logged.ids() == {f"{id}/3", f"{id}/4"}
    [failed] = [line for line in logged.lines if "failed" in line[0]]
    assert failed[1] == f"{id}/4"
    await connection.close()


async def test_whoever_is_not_let_in_is_named_in_the_log(doors: Doors, logged: Collector) -> None:
    connection = Connection(doors, x_correlation_id="c-2", authorization="nobody")
    assert (await connection.sent.get())["type"] == "websocket.close"
    await connection.serving
    assert logged.lines == [("refused", "c-2")]


async def test_who_comes_too_late_is_told_an_id(doors: Doors) -> None:
    health = Health(doors.transport)
    asked = asyncio.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    answering = asyncio.create_task(ask(health.gate(never), "/v1/state/k", x_correlation_id="late"))
    await asked.wait()
    health.draining = True
    answering.cancel()
    status, headers, body = await answering
    assert (status, headers["x-correlation-id"], body["correlation_id"]) == (503, "late", "late")


async def test_who_may_not_read_metrics_is_told_an_id(doors: Doors) -> None:
    app = make_app(doors)
    app.router.routes[:0] = [metrics_route(Metrics(), doors.transport, doors.guards)]
    status, headers, body = await ask(app, "/metrics", x_correlation_id="m-1", authorization="nobody")
    assert (status, body["code"]) == (403, "not_allowed")
    assert (headers["x-correlation-id"], body["correlation_id"]) == ("m-1", "m-1")
