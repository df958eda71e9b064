"""What a server tells of itself: metrics, health, logs and spans."""

import asyncio
import io
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.objects import open_objects
from holdfast.errors import Closed, Fenced, HoldfastError, NotAllowed
from holdfast.handles.plane import AsyncPlane
from holdfast.layers.snapshots import NO_MANIFEST
from holdfast.plane.embedded import AsyncEmbeddedTransport
from holdfast.plane.services import Services
from holdfast.server import logs, tracing
from holdfast.server.authorization import Open
from holdfast.server.health import Health
from holdfast.server.histograms import Histogram
from holdfast.server.ingress_metrics import IngressMetrics
from holdfast.server.metrics import MeasuredTransport, Metrics, metrics_route
from holdfast.testing.clock import ManualClock
from holdfast.wire.frames import Call
from holdfast.wire.leases import AcquireLease
from holdfast.wire.queues import AckMessages, MessageLease, NewMessage, PutMessages, ReceiveMessages
from holdfast.wire.states import GetState

PUT = PutMessages("jobs", [NewMessage(b"1")])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Server:
    """A plane in memory, measured."""

    def __init__(self, queues_max: int = 100, clock: ManualClock | None = None) -> None:
        self.transport = AsyncEmbeddedTransport(
            Services(MemoryDatabase(clock=clock), open_objects("memory:"), clock=clock)
        )
        self.metrics = Metrics(queues_max=queues_max, streams=lambda: 7)
        self.measured = MeasuredTransport(self.transport, self.metrics)
        self.plane = AsyncPlane(self.measured)

    async def samples(self) -> dict[str, float]:
        self.metrics._queues_at = self.metrics._lag_at = float("-inf")  # Whoever moves on in no time wants to see it.
        text = (await self.metrics.body(self.transport)).decode()
        return {
            sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await server.transport.close()


async def test_calls_are_counted_by_operation_and_outcome(server: Server) -> None:
    await server.measured.call(PUT)
    await server.measured.call(PUT)
    with pytest.raises(HoldfastError):
        await server.measured.call(GetState("no key!"))
    samples = await server.samples()
    assert samples["holdfast_requests_total code=ok op=queues.put"] == 2
    assert samples["holdfast_requests_total code=invalid_name op=states.get"] == 1
    assert samples["holdfast_request_seconds_count op=queues.put"] == 2
    assert samples["holdfast_request_seconds_bucket le=+Inf op=queues.put"] == 2
    assert 0 < samples["holdfast_request_seconds_sum op=queues.put"] < 1
    assert samples["holdfast_calls_in_flight"] == 0


async def test_calls_of_one_group_are_counted_one_by_one(server: Server) -> None:
    calls = [Call(0, PUT), Call(1, PUT), Call(2, AckMessages("jobs", [])), Call(3, GetState("a"))]
    outcomes = await server.measured.call_batch(calls)
    assert isinstance(outcomes[2], HoldfastError)
    samples = await server.samples()
    assert samples["holdfast_requests_total code=ok op=queues.put"] == 2
    assert samples["holdfast_requests_total code=empty_batch op=queues.ack"] == 1
    assert samples["holdfast_requests_total code=ok op=states.get"] == 1
    assert samples["holdfast_request_seconds_count op=queues.put"] == 2
    assert samples["holdfast_commit_group_size_count"] == 1
    assert samples["holdfast_commit_group_size_sum"] == 4
    assert samples["holdfast_commit_group_size_bucket le=4.0"] == 1
    assert samples["holdfast_commit_group_size_bucket le=2.0"] == 0


async def test_nobody_waits_for_an_answer_until_it_is_counted_and_told_of(server: Server) -> None:
    told: list[Any] = []
    server.transport.services.publish = told.extend  # type: ignore[method-assign]
    await server.measured.call_batch([Call(0, PUT)])
    assert (server.metrics.requests["queues.put", "ok"], len(told)) == (0, 0)
    await asyncio.sleep(0)
    assert (server.metrics.requests["queues.put", "ok"], len(told)) == (1, 1)


async def test_what_the_answers_of_a_group_tell_is_counted_too(server: Server) -> None:
    lost = MessageLease("01" * 16, "nobody's", 1)
    calls = [PUT, AckMessages("jobs", [lost, lost]), PUT, AckMessages("jobs", [lost]), GetState("no key!")]
    await server.measured.call_batch([Call(number, request) for number, request in enumerate(calls)])
    samples = await server.samples()
    assert samples["holdfast_fenced_total"] == 3
    assert samples["holdfast_requests_total code=ok op=queues.ack"] == 2
    assert samples["holdfast_requests_total code=ok op=queues.put"] == 2
    assert samples["holdfast_requests_total code=invalid_name op=states.get"] == 1


async def test_writes_that_a_lease_did_not_entitle_to_are_counted(server: Server) -> None:
    lost = MessageLease("01" * 16, "nobody's", 1)
    await server.measured.call(AckMessages("jobs", [lost, lost]))
    lease = await server.plane.lease("k").acquire("ada")
    await server.plane.lease("k").acquire("ada")
    with pytest.raises(Fenced):
        await server.plane.state("k").update(1, lease=lease)
    assert (await server.samples())["holdfast_fenced_total"] == 3


async def test_waiting_for_a_lease_is_timed(server: Server) -> None:
    await server.measured.call(AcquireLease("k", "ada"))
    with pytest.raises(HoldfastError):
        await server.measured.call(AcquireLease("k", "bob", wait_seconds=0.03))
    samples = await server.samples()
    assert samples["holdfast_lock_wait_seconds_count"] == 1
    assert samples["holdfast_lock_wait_seconds_sum"] >= 0.02


async def test_a_call_that_waits_is_in_flight_and_waiting(server: Server) -> None:
    waiting = asyncio.create_task(server.measured.call(ReceiveMessages("jobs", "ada", wait_seconds=60)))
    await until(lambda: server.metrics.waiting == 1)
    assert server.metrics.in_flight == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    samples = await server.samples()
    assert samples["holdfast_calls_in_flight"] == samples["holdfast_calls_waiting"] == 0
    assert samples["holdfast_requests_total code=cancelled op=queues.receive"] == 1


async def test_queues_are_told_of_by_state(server: Server) -> None:
    queue = server.plane.queue("jobs")
    for _ in range(3):
        await queue.put(b"1")
    await queue.put(b"1", delay_seconds=60)
    await queue.receive()
    await AsyncPlane(server.measured, "beta").queue("mail").put(b"1")
    samples = await server.samples()
    depth = {state: samples[f"holdfast_queue_messages queue=jobs state={state} universe=main"] for state in STATES}
    assert depth == {"ready": 2, "delayed": 1, "leased": 1, "dead": 0}
    assert samples["holdfast_queue_messages queue=mail state=ready universe=beta"] == 1
    assert samples["holdfast_queue_oldest_age_seconds queue=jobs universe=main"] >= 0
    assert samples["holdfast_queue_put_total queue=jobs universe=main"] == 4
    assert samples["holdfast_lease_expired_total queue=jobs universe=main"] == 0
    assert samples["holdfast_queues_cut"] == 0


STATES = ("ready", "delayed", "leased", "dead")


async def test_how_long_messages_wait_for_their_first_delivery_is_told() -> None:
    clock = ManualClock()
    server = Server(queues_max=2, clock=clock)
    jobs, at = server.plane.queue("jobs"), "queue=jobs universe=main"
    await jobs.put_many([b"1", b"2"])
    clock.advance_ms(2_000)
    message = await jobs.receive(visibility_seconds=7, extend_for_seconds=0)
    clock.advance_ms(1_000)
    await server.measured.call(ReceiveMessages("JOBS", "ada", universe="MAIN"))
    await message.nack()
    for _ in range(2):
        message = await jobs.receive(extend_for_seconds=0)
        assert message is not None
        await message.nack(intent="defer")
    samples = await server.samples()
    assert samples[f"holdfast_queue_dwell_seconds_count {at}"] == 2
    assert samples[f"holdfast_queue_dwell_seconds_sum {at}"] == 5
    assert samples[f"holdfast_queue_dwell_seconds_bucket le=1.0 {at}"] == 0
    assert samples[f"holdfast_queue_dwell_seconds_bucket le=5.0 {at}"] == 2
    assert samples[f"holdfast_queue_redelivered_total {at}"] == 2
    assert await jobs.receive() is not None
    assert (await server.samples())[f"holdfast_queue_delivered_total {at}"] == 5
    await server.transport.close()


async def test_only_so_many_queues_have_a_histogram() -> None:
    server = Server(queues_max=2)
    for name in ("a", "b", "c", "d"):
        await server.plane.queue(name).put(b"1")
        assert await server.plane.queue(name).receive(extend_for_seconds=0) is not None
    samples = await server.samples()
    counts = {name.partition(" ")[2]: value for name, value in samples.items() if "dwell_seconds_count" in name}
    assert counts == {"queue=a universe=main": 1, "queue=b universe=main": 1, "queue= universe=": 2}
    await server.transport.close()


async def test_journals_that_nobody_compacts_are_told_of() -> None:
    server = Server()
    for name, universe in (("ada", "main"), ("bob", "beta"), ("gone", "main")):
        world = AsyncPlane(server.measured, universe).world(name)
        await world.create()
        for start in range(0, 1_100, 220):
            await world.append(list(range(220)), expected_head=start)
        whole = {"receipt_horizon_height": 1_100, "manifest_hash": NO_MANIFEST}
        await world.snapshots.commit({}, height=1_100, promote=True, **whole)
    gone = server.plane.world("gone")
    await gone.archive()
    await gone.delete()
    samples = await server.samples()
    assert (samples["holdfast_journal_compaction_lag_records"], samples["holdfast_worlds_cut"]) == (2_048, 0)
    await server.plane.world("ada").compact()
    assert (await server.samples())["holdfast_journal_compaction_lag_records"] == 1_024
    server.metrics._worlds_max = 1
    assert (await server.samples())["holdfast_worlds_cut"] == 1
    await server.transport.close()


async def test_worlds_are_looked_at_more_rarely(server: Server) -> None:
    await server.metrics.body(server.transport)
    looked_at = server.metrics._lag_at
    server.metrics._queues_at = float("-inf")
    await server.metrics.body(server.transport)
    assert server.metrics._lag_at == looked_at


async def test_every_metric_is_documented(server: Server) -> None:
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    collectors = (server.metrics, IngressMetrics(server.transport.ingress))
    told = {family.name: family.type for collector in collectors for family in collector.collect()}
    listed = dict(re.findall(r"^\| `(holdfast_\w+)` \| (\w+)", document, re.MULTILINE))
    assert listed == {f"{name}_total" if kind == "counter" else name: kind for name, kind in told.items()}


async def test_only_so_many_queues_are_told_of() -> None:
    server = Server(queues_max=3)
    for number in range(5):
        await server.plane.queue(f"q{number}").put(b"1")
    await server.plane.world("w").create()
    samples = await server.samples()
    assert {f"q{n}" for n in range(5) if f"holdfast_queue_put_total queue=q{n} universe=main" in samples} == {
        "q0",
        "q1",
        "q2",
    }
    assert samples["holdfast_queues_cut"] == 1
    await server.transport.close()


async def test_depths_are_read_at_most_once_a_second(server: Server) -> None:
    await server.plane.queue("jobs").put(b"1")
    assert b'queue="jobs"' in await server.metrics.body(server.transport)
    await server.plane.queue("mail").put(b"1")
    assert b'queue="mail"' not in await server.metrics.body(server.transport)


async def test_whoever_goes_away_while_depths_are_read_takes_none_with_them(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.plane.queue("jobs").put(b"x")
    await server.samples()
    with monkeypatch.context() as slow:
        slow.setattr("holdfast.server.metrics.read_queues", lambda *_: asyncio.Event().wait())
        server.metrics._queues_at = float("-inf")
        reading = asyncio.create_task(server.metrics.refresh(server.transport))
        await until(server.metrics._reading.locked)
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    assert [stats.queue for _, stats in server.metrics._queues] == ["jobs"]


async def test_metrics_are_told_although_the_key_space_is_gone(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.transport.services.database.close()
    assert b"holdfast_requests_total" in await server.metrics.body(server.transport)
    assert "cannot be read" in caplog.text


async def test_everything_else_of_a_server_is_told_too(server: Server) -> None:
    server.metrics.rejected("token")
    server.metrics.synced(0.002)
    samples = await server.samples()
    assert samples["holdfast_rejects_total reason=token"] == 1
    assert samples["holdfast_open_streams"] == 7
    assert samples["holdfast_sync_seconds_bucket le=0.0025"] == 1
    assert samples["holdfast_sync_seconds_bucket le=0.001"] == 0
    assert samples["process_resident_memory_bytes"] > 0


async def test_no_label_names_a_message_or_a_key(server: Server) -> None:
    await server.plane.queue("jobs").put(b"1", correlation_id="very-secret")
    await server.plane.lease("key-of-mine").acquire("owner-of-mine")
    text = (await server.metrics.body(server.transport)).decode()
    assert not [word for word in ("very-secret", "key-of-mine", "owner-of-mine") if word in text]


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((1, 2, 4))
    for value, times in ((1, 1), (1.5, 1), (4, 2), (9, 1)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 1), ("2.0", 2), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 1 + 1.5 + 8 + 9


async def test_a_fault_of_ours_is_logged_and_not_shown(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the secret of our fault")

    server.transport.call = broken  # type: ignore[method-assign]
    server.transport.services.database.transact_async = broken  # type: ignore[method-assign]
    with pytest.raises(HoldfastError) as raised:
        await server.measured.call(PUT)
    [outcome] = await server.measured.call_batch([Call(0, PUT)])
    assert "secret" not in f"{raised.value} {outcome}"
    assert len(caplog.records) == 2
    assert "the secret of our fault" in caplog.text
    await asyncio.sleep(0)
    assert server.metrics.requests["queues.put", "error"] == 2


async def test_a_measured_port_is_the_port_in_everything_else(server: Server) -> None:
    assert server.measured.services is server.transport.services
    assert (await server.plane.blobs.put(b"x" * 1_000)) is not None
    assert await server.measured.transact(lambda tx: tx.get(b"a"), tier=PUT.tier) is None


# Doors.


async def ask(app: Any, path: str, kind: str = "http") -> tuple[int, dict[str, str], bytes]:
    """The answer of an ASGI app to a GET."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "path": path,
        "method": "GET",
        "headers": [],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0].get("headers", [])}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


async def test_a_server_is_ready_while_the_key_space_answers(server: Server) -> None:
    health = Health(server.transport)
    app = Starlette(routes=health.routes())
    assert (await ask(app, "/readyz"))[0] == 200
    server.transport.services.database.close()
    status, headers, body = await ask(app, "/readyz")
    assert (status, headers["retry-after"]) == (503, "2")
    assert b"closed" in body
    assert (await ask(app, "/healthz"))[0] == 200


async def test_a_server_that_drains_is_alive_but_not_ready(server: Server) -> None:
    health = Health(server.transport)
    app = health.gate(Starlette(routes=health.routes()))
    health.draining = True
    assert (await ask(app, "/healthz"))[0] == 200
    status, _, body = await ask(app, "/readyz")
    assert (status, b"shutting down" in body) == (503, True)
    status, headers, _ = await ask(app, "/v1/stream", "websocket")
    assert (status, headers["retry-after"]) == (503, "2")


async def test_requests_are_under_way_until_answered_unless_they_only_wait(server: Server) -> None:
    health = Health(server.transport)
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> PlainTextResponse:
        begun.set()
        await go.wait()
        return PlainTextResponse("done")

    async def long_poll(request: HttpRequest) -> PlainTextResponse:
        begun.set()
        await server.measured.call(ReceiveMessages("jobs", "ada", wait_seconds=60))
        return PlainTextResponse("done")

    app = health.gate(Starlette(routes=[Route("/slow", slow), Route("/poll", long_poll)]))
    answering = asyncio.create_task(ask(app, "/slow"))
    await begun.wait()
    assert health.under_way == 1
    go.set()
    assert (await answering)[2] == b"done"
    assert health.under_way == 0
    begun.clear()
    polling = asyncio.create_task(ask(app, "/poll"))
    await begun.wait()
    await until(lambda: health.under_way == 0)
    await server.transport.call(PUT)
    await polling


async def test_metrics_are_for_whoever_may_read_them(server: Server) -> None:
    app = Starlette(routes=[metrics_route(server.metrics, server.transport, Open())])
    status, headers, body = await ask(app, "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert b"holdfast_open_streams 7.0" in body

    def refuse(*_: Any) -> Any:
        raise NotAllowed("not you")

    app = Starlette(routes=[metrics_route(server.metrics, server.transport, SimpleNamespace(admit=refuse))])
    assert (await ask(app, "/metrics"))[0] == 403
    with_guard = SimpleNamespace(admit=lambda *_: SimpleNamespace(permit=refuse))
    app = Starlette(routes=[metrics_route(server.metrics, server.transport, with_guard)])  # type: ignore[arg-type]
    assert (await ask(app, "/metrics"))[0] == 403


# Logs.


@pytest.fixture
def lines() -> Iterator[Any]:
    """Configures logs to go to memory, and puts everything back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    quiet = {name: logging.getLogger(name).level for name in logs._QUIET}

    def begin(format: str, level: str = "info") -> io.StringIO:
        stream = io.StringIO()
        logs.configure(format, level, stream)
        return stream

    yield begin
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name, number in quiet.items():
        logging.getLogger(name).setLevel(number)


SECRET = "hft_" + "0" * 32 + "_" + "5ec4e7" * 8
log = logging.getLogger("holdfast.test")


def test_a_line_of_json_has_everything_that_is_known(lines: Any) -> None:
    stream = lines("json")
    with logs.correlated("c-1"):
        log.warning("refused: %s", "why", extra={"token": "t", "count": 3})
    log.debug("not said")
    [line] = map(msgspec.json.decode, stream.getvalue().splitlines())
    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "holdfast.test",
        "message": "refused: why",
        "correlation_id": "c-1",
        "token": "t",
        "count": 3,
    }


def test_a_line_of_text_cannot_be_broken_by_what_is_in_it(lines: Any) -> None:
    stream = lines("text")
    log.error("one\nline\r", extra={"client": "a\nb"})
    [line] = stream.getvalue().splitlines()
    assert line.endswith("error holdfast.test one\\nline\\r client=a\\nb")


@pytest.mark.parametrize("format", ["json", "text"])
def test_no_line_has_a_secret(lines: Any, format: str) -> None:
    stream = lines(format)
    url = "postgresql://ada:hunter22@db/x"
    log.error("%s and Authorization: Bearer %s", SECRET, "other-s3cret", extra={"headers": {"a": SECRET}, "data": url})
    with logs.correlated(SECRET):
        try:
            raise ValueError(SECRET)
        except ValueError:
            log.exception("it failed")
    said = stream.getvalue()
    assert "it failed" in said
    assert "ValueError" in said
    assert not [secret for secret in ("5ec4e7", "other-s3cret", "hunter22") if secret in said]
    assert "hft_" + "0" * 32 in said  # Whose it was helps, and is no secret.


def test_what_carries_messages_is_silent_even_when_everything_is_logged(lines: Any) -> None:
    stream = lines("text", "debug")
    log.debug("ours")
    logging.getLogger("uvicorn.error").debug("a frame with everybody's messages")
    assert "ours" in stream.getvalue()
    assert "messages" not in stream.getvalue()


def test_a_flood_of_lines_is_counted_instead(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("holdfast.server.logs.monotonic", lambda: now)
    stream = lines("json")
    flooded = logging.getLogger("holdfast.test.flood")
    flooded.addFilter(logs.Sparing(per_second=3))
    for _ in range(10):
        flooded.warning("again")
    now += 1
    flooded.warning("later")
    said = [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in said] == ["again"] * 3 + ["later"]
    assert said[-1]["kept_back"] == 7


# Spans.


@pytest.mark.parametrize(
    ("request_", "name", "attributes"),
    [
        (PUT, "send jobs", {"messaging.operation.type": "send", "messaging.operation.name": "put"}),
        (ReceiveMessages("jobs", "a"), "receive jobs", {"messaging.operation.type": "receive"}),
        (AckMessages("jobs", []), "settle jobs", {"messaging.operation.name": "ack"}),
        (
            PutMessages("jobs", [NewMessage(), NewMessage()]),
            "send jobs",
            {"messaging.batch.message_count": 2, "messaging.destination.name": "jobs", "messaging.system": "holdfast"},
        ),
        (GetState("k", "beta"), "states.get", {"holdfast.universe": "beta", "holdfast.operation": "states.get"}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_spans_have_the_names_of_messaging(request_: Any, name: str, attributes: dict[str, Any]) -> None:
    found, told = tracing.names_of(request_)
    assert found == name
    assert attributes.items() <= told.items()


async def test_calls_are_spans_if_there_is_somebody_to_tell(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_is_set_up", tracing._is_set_up.__wrapped__)
    await server.measured.call(PUT)
    await server.measured.call_batch([Call(0, PUT)])
    await server.measured.call_batch([Call(0, PUT), Call(1, PUT)])
    with pytest.raises(HoldfastError):
        await server.measured.call(GetState("no key!"))
    spans = memory.get_finished_spans()
    assert [span.name for span in spans] == ["send jobs", "send jobs", "commit", "states.get"]
    assert spans[-1].attributes is not None
    assert spans[-1].attributes["error.type"] == "invalid_name"


def test_without_opentelemetry_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    assert not tracing.is_on()
    with tracing.caused_by({"traceparent": "00-1-2-01"}), tracing.span(PUT), pytest.raises(Closed):
        raise Closed("as always")


async def test_metrics_are_told_although_a_queue_is_damaged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as damaged:
        damaged.setattr("holdfast.server.metrics.read_queues", fail)
        assert b"holdfast_requests_total" in await server.metrics.body(server.transport)
    assert "ZeroDivisionError" in caplog.text
    await server.plane.queue("jobs").put(b"1")
    server.metrics._queues_at = float("-inf")
    assert b'queue="jobs"' in await server.metrics.body(server.transport)
