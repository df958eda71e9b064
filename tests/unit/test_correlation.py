"""Correlation ids: every log line and response of a request carries one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import NotAllowed
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.server.app import make_app
from fastness.server.authorization import Authorizer
from fastness.server.context import ServerContext
from fastness.server.health import Health
from fastness.server.logs import correlation_id
from fastness.server.metrics import MeasuredTransport, Metrics, metrics_route
from fastness.wire.frames import PROTOCOL, Call, Hello, decode_hello, decode_replies, encode
from fastness.wire.leases import AcquireLease
from fastness.wire.problems import Problem
from fastness.wire.queues import ReceiveMessages
from fastness.wire.requests import Request
from fastness.wire.states import GetState
from fastness.wire.worlds import AppendEntries

LOG = logging.getLogger("fastness.test")


class LoggingTransport:
    """Logs every call, on the event loop and in a thread; fails for the key `boom`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Any], call: Any = None) -> Any:
        LOG.info("on the loop")
        await asyncio.to_thread(LOG.info, "on a thread")
        if getattr(request, "key", "") == "boom":
            raise RuntimeError("on purpose")
        return await self._transport.call(request, call)


class Collector(logging.Handler):
    """Log lines with their correlation ids."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), correlation_id.get()))

    def ids(self) -> set[str | None]:
        return {id for _, id in self.lines}


@pytest.fixture
def logged() -> Iterator[Collector]:
    collector, root = Collector(), logging.getLogger("fastness")
    before = root.level
    root.addHandler(collector)
    root.setLevel(logging.DEBUG)
    yield collector
    root.removeHandler(collector)
    root.setLevel(before)


class Refusing(Authorizer):
    """Accepts every caller but one, and refuses ReceiveMessages."""

    name = "caller"

    def authenticate(self, headers: Any, client: str) -> Any:
        if headers.get("authorization") == "refused":
            LOG.warning("refused")
            raise NotAllowed("not you")
        return self

    def authorize(self, request: Request[Any]) -> None:
        if isinstance(request, ReceiveMessages):
            LOG.warning("refused")
            raise NotAllowed("not this")


@pytest.fixture
async def context() -> AsyncIterator[ServerContext]:
    transport = AsyncEmbeddedTransport(Services(MemoryDatabase()))
    yield ServerContext(MeasuredTransport(LoggingTransport(transport), Metrics()), Refusing())
    await transport.close()


async def get(app: Any, path: str, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The response of an ASGI app to a GET."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": "GET", "headers": pairs, "query_string": b"", "client": ("::1", 1)}
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
        ("/v1/queues", {"authorization": "refused"}, (401, 2)),
        ("/v1/queues", {"origin": "http://evil.example"}, (403, 1)),
    ],
)
async def test_log_lines_and_response_of_a_request_have_its_id(
    context: ServerContext, logged: Collector, path: str, headers: dict[str, str], expected: tuple[int, int]
) -> None:
    status, lines = expected
    app = make_app(context)
    for given in ("mine-7", ""):
        logged.lines.clear()
        found, answered, body = await get(app, path, x_correlation_id=given, **headers)
        assert found == status
        id = answered["x-correlation-id"]
        assert id == given or (not given and len(id) == 32)
        assert len(logged.lines) == lines, logged.lines
        assert logged.ids() == {id}
        if status != 200:
            assert body["correlation_id"] == id
    assert correlation_id.get() is None


async def test_concurrent_requests_keep_their_ids_apart(context: ServerContext, logged: Collector) -> None:
    app = make_app(context)
    await asyncio.gather(*(get(app, f"/v1/state/k{n}", x_correlation_id=f"id-{n}") for n in range(20)))
    assert sorted(id or "" for message, id in logged.lines if message == "on the loop") == sorted(
        f"id-{n}" for n in range(20)
    )


class Connection:
    """The client of a stream, without a network."""

    def __init__(self, context: ServerContext, **headers: str) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put_nowait({"type": "websocket.connect"})
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/v1/stream", "headers": pairs, "query_string": b"", "subprotocols": []}
        self.serving = asyncio.create_task(make_app(context)(scope, self._inbox.get, self.sent.put))

    async def handshake(self) -> str:
        """Send hello; return the correlation id of the connection."""
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


async def test_batches_of_a_stream_have_ids(context: ServerContext, logged: Collector) -> None:
    connection = Connection(context, x_correlation_id="c-1")
    assert await connection.handshake() == "c-1"
    connection.send([Call(7, AppendEntries("missing", [b"\x01"], 0)), Call(8, GetState("k"))])
    problems = await connection.problems(2)
    assert problems[7] is not None
    assert (problems[7].code, problems[7].correlation_id) == ("world_not_found", "c-1/7-8")
    connection.send([Call(9, AppendEntries("missing", [b"\x01"], 0))])
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


async def test_single_call_of_a_stream_logs_its_number(context: ServerContext, logged: Collector) -> None:
    connection = Connection(context)
    id = await connection.handshake()
    assert len(id) == 32
    connection.send([Call(3, AcquireLease("k", "ada")), Call(4, AcquireLease("boom", "ada"))])
    problems = await connection.problems(2)
    assert problems[3] is None
    assert problems[4] is not None
    assert problems[4].correlation_id == f"{id}/4"
    assert logged.ids() == {f"{id}/3", f"{id}/4"}
    [error] = [line for line in logged.lines if "unexpected error" in line[0]]
    assert error[1] == f"{id}/4"
    await connection.close()


async def test_refused_stream_is_logged_with_its_id(context: ServerContext, logged: Collector) -> None:
    connection = Connection(context, x_correlation_id="c-2", authorization="refused")
    assert (await connection.sent.get())["type"] == "websocket.close"
    await connection.serving
    assert logged.lines == [("refused", "c-2")]


async def test_request_refused_by_draining_has_its_id(context: ServerContext) -> None:
    health = Health(context.transport)
    started = asyncio.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    answering = asyncio.create_task(get(health.wrap(never), "/v1/state/k", x_correlation_id="late"))
    await started.wait()
    health.draining = True
    answering.cancel()
    status, headers, body = await answering
    assert (status, headers["x-correlation-id"], body["correlation_id"]) == (503, "late", "late")


async def test_refused_metrics_request_has_its_id(context: ServerContext) -> None:
    app = make_app(context)
    app.router.routes[:0] = [metrics_route(Metrics(), context.transport, context.authenticator)]
    status, headers, body = await get(app, "/metrics", x_correlation_id="m-1", authorization="refused")
    assert (status, body["code"]) == (403, "not_allowed")
    assert (headers["x-correlation-id"], body["correlation_id"]) == ("m-1", "m-1")
