"""A server's spans are children of its callers' spans."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fastness.backends.memory import MemoryDatabase
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.server import tracing
from fastness.server.app import make_app
from fastness.server.context import ServerContext
from fastness.server.metrics import MeasuredTransport, Metrics
from fastness.wire.queues import ListQueues

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def app() -> AsyncIterator[Any]:
    transport = AsyncEmbeddedTransport(Services(MemoryDatabase()))
    yield make_app(ServerContext(MeasuredTransport(transport, Metrics())))
    await transport.close()


async def send_request(app: Any, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    header_pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": header_pairs,
        "query_string": b"",
        "client": ("::1", 1),
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


class Telemetry:
    """Stands in for OpenTelemetry: the current span is a string, and each span records its parent."""

    SpanKind = SimpleNamespace(SERVER="server")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: ContextVar[str | None] = ContextVar("current", default=None)
        self.spans: list[tuple[str, str | None]] = []
        patch.setattr(tracing, "trace", self)
        patch.setattr(tracing, "_has_provider", lambda second: True)
        patch.setattr(tracing, "propagate", self)
        patch.setattr(tracing, "context", SimpleNamespace(attach=self.current.set, detach=self.current.reset))

    def extract(self, carrier: Mapping[str, str]) -> str | None:
        return carrier.get("traceparent")

    def get_tracer(self, name: str) -> "Telemetry":
        return self

    @contextmanager
    def start_as_current_span(self, name: str, **_: Any) -> Iterator[Any]:
        self.spans.append((name, self.current.get()))
        token = self.current.set(name)
        try:
            yield SimpleNamespace(set_attribute=lambda *_: None)
        finally:
            self.current.reset(token)


async def test_span_of_a_request_is_a_child_of_the_callers_span(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry(monkeypatch)
    assert await send_request(app, "GET", "/v1/queues", traceparent=PARENT) == 200
    assert await send_request(app, "GET", "/v1/queues") == 200
    put: dict[str, Any] = {"body": b'{"queue": "jobs", "payload": 1}', "content_type": "application/json"}
    assert await send_request(app, "POST", "/v1/queue/enqueue", traceparent=PARENT, idempotency_key="k", **put) == 200
    assert await send_request(app, "GET", "/v1/state/no%20key!", traceparent=PARENT) == 400
    assert await send_request(app, "POST", "/v1/blobs", b"bytes", traceparent=PARENT) == 201
    assert telemetry.spans == [
        ("queues.list", PARENT),
        ("queues.list", None),
        ("send jobs", PARENT),
        ("states.get", PARENT),
        ("blobs.write", PARENT),
    ]
    assert telemetry.current.get() is None


async def test_opentelemetry_records_the_same_parents(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_has_provider", tracing._has_provider.__wrapped__)
    assert tracing.is_on()
    await send_request(app, "GET", "/v1/queues", traceparent=PARENT)
    await send_request(app, "GET", "/v1/queues", traceparent="00-nonsense")
    first, second = memory.get_finished_spans()
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    assert second.parent is None


def test_api_package_without_provider_creates_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tracing.is_on()
    monkeypatch.setattr(tracing.trace, "get_tracer", None)  # Must not be called.
    with tracing.span(ListQueues()), tracing.caused_by({"traceparent": PARENT}):
        assert not tracing.trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("failing_at", ["start", "end", "error"])
async def test_failing_telemetry_does_not_fail_a_request(
    app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing_at: str
) -> None:
    telemetry = Telemetry(monkeypatch)
    start_span = telemetry.start_as_current_span
    monkeypatch.setattr(tracing._log, "filters", [])  # Without the rate limit.

    def fail(*_: Any) -> None:
        raise ConnectionError("no collector")

    @contextmanager
    def start(name: str, **options: Any) -> Iterator[Any]:
        if failing_at == "start":
            fail()
        with start_span(name, **options):
            yield SimpleNamespace(set_attribute=fail)
        if failing_at == "end":
            fail()

    monkeypatch.setattr(telemetry, "start_as_current_span", start)
    put: dict[str, Any] = {"body": b'{"queue": "jobs", "payload": 1}', "content_type": "application/json"}
    assert await send_request(app, "POST", "/v1/queue/enqueue", **put) == 200
    assert await send_request(app, "GET", "/v1/state/no%20key!") == 400
    assert "no collector" in caplog.text
    assert telemetry.current.get() is None
