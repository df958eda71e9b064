"""Metrics, health, logs and spans of a server."""

import asyncio
import io
import logging
import re
from collections.abc import AsyncIterator, Iterator
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

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.errors import Closed, FastnessError, Fenced, NotAllowed, Unreachable
from fastness.handles.plane import AsyncPlane
from fastness.kv import ReplayedPosition
from fastness.kv.contention import Contention
from fastness.layers.snapshots import NO_MANIFEST
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.runtime.maintenance.disk_space import DiskSpaceMonitor
from fastness.server import logs, tracing
from fastness.server.authorization import NoAuthentication
from fastness.server.encryption_metrics import EncryptionMetrics
from fastness.server.health import Health
from fastness.server.histograms import Histogram
from fastness.server.ingress_metrics import IngressMetrics
from fastness.server.mcp.metrics import McpMetrics
from fastness.server.metrics import MeasuredTransport, Metrics, metrics_route
from fastness.server.node_metrics import NodeMetrics
from fastness.server.queue_metrics import ConsumerMetrics
from fastness.server.quota_metrics import QuotaMetrics
from fastness.server.recovery import Recovery
from fastness.server.space_metrics import SpaceMetrics
from fastness.server.sqs.metrics import SqsMetrics
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, faulty_objects
from fastness.wire.frames import Call
from fastness.wire.leases import AcquireLease
from fastness.wire.queues import AckMessages, MessageLease, NewMessage, PutMessages, ReceiveMessages
from fastness.wire.requests import Request
from fastness.wire.states import GetState
from tests.support.waiting import eventually_async

PUT = PutMessages("jobs", [NewMessage(b"1")])


class Server:
    """A measured plane in memory."""

    def __init__(self, queues_max: int = 100, clock: ManualClock | None = None) -> None:
        self.transport = AsyncEmbeddedTransport(
            Services(MemoryDatabase(clock=clock), open_objects("memory:"), clock=clock)
        )
        self.metrics = Metrics(queues_max=queues_max, streams=lambda: 7)
        self.measured = MeasuredTransport(self.transport, self.metrics)
        self.plane = self.plane_of("main")

    def plane_of(self, universe: str) -> AsyncPlane:
        return AsyncPlane(self.measured, universe)  # type: ignore[arg-type]

    async def samples(self) -> dict[str, float]:
        self.metrics._queues_at = self.metrics._lag_at = float("-inf")  # Force a fresh read.
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
    with pytest.raises(FastnessError):
        await server.measured.call(GetState("no key!"))
    samples = await server.samples()
    assert samples["fastness_requests_total code=ok op=queues.put"] == 2
    assert samples["fastness_requests_total code=invalid_name op=states.get"] == 1
    assert samples["fastness_request_seconds_count op=queues.put"] == 2
    assert samples["fastness_request_seconds_bucket le=+Inf op=queues.put"] == 2
    assert samples["fastness_request_seconds_sum op=queues.put"] > 0
    assert samples["fastness_calls_in_flight"] == 0


async def test_calls_of_a_batch_are_counted_singly(server: Server) -> None:
    calls = [Call(0, PUT), Call(1, PUT), Call(2, AckMessages("jobs", [])), Call(3, GetState("a"))]
    outcomes = await server.measured.call_all(calls)
    assert isinstance(outcomes[2], FastnessError)
    samples = await server.samples()
    assert samples["fastness_requests_total code=ok op=queues.put"] == 2
    assert samples["fastness_requests_total code=empty_batch op=queues.ack"] == 1
    assert samples["fastness_requests_total code=ok op=states.get"] == 1
    assert samples["fastness_request_seconds_count op=queues.put"] == 2
    assert samples["fastness_commit_group_size_count"] == 1
    assert samples["fastness_commit_group_size_sum"] == 4
    assert samples["fastness_commit_group_size_bucket le=4.0"] == 1
    assert samples["fastness_commit_group_size_bucket le=2.0"] == 0


async def test_answers_do_not_wait_for_counting_and_publishing(server: Server) -> None:
    published: list[Any] = []
    server.transport.services.database.publish = published.extend
    await server.measured.call_all([Call(0, PUT)])
    assert (server.metrics.requests["queues.put", "ok"], len(published)) == (0, 0)
    await asyncio.sleep(0)
    assert (server.metrics.requests["queues.put", "ok"], len(published)) == (1, 1)


async def test_outcomes_in_the_answers_of_a_batch_are_counted(server: Server) -> None:
    lost = MessageLease("01" * 16, "unknown", 1)
    calls: list[Request[Any]] = [
        PUT,
        AckMessages("jobs", [lost, lost]),
        PUT,
        AckMessages("jobs", [lost]),
        GetState("no key!"),
    ]
    await server.measured.call_all([Call(number, request) for number, request in enumerate(calls)])
    samples = await server.samples()
    assert samples["fastness_fenced_total"] == 3
    assert samples["fastness_requests_total code=ok op=queues.ack"] == 2
    assert samples["fastness_requests_total code=ok op=queues.put"] == 2
    assert samples["fastness_requests_total code=invalid_name op=states.get"] == 1


async def test_fenced_writes_are_counted(server: Server) -> None:
    lost = MessageLease("01" * 16, "unknown", 1)
    await server.measured.call(AckMessages("jobs", [lost, lost]))
    lease = await server.plane.lease("k").acquire("ada")
    await server.plane.lease("k").acquire("ada")
    with pytest.raises(Fenced):
        await server.plane.state("k").update(1, lease=lease)
    assert (await server.samples())["fastness_fenced_total"] == 3


async def test_waiting_for_a_lease_is_timed(server: Server) -> None:
    await server.measured.call(AcquireLease("k", "ada"))
    with pytest.raises(FastnessError):
        await server.measured.call(AcquireLease("k", "bob", wait_seconds=0.03))
    samples = await server.samples()
    assert samples["fastness_lock_wait_seconds_count level=lease"] == 1
    assert samples["fastness_lock_wait_seconds_sum level=lease"] >= 0.02


async def test_a_call_that_waits_is_in_flight_and_waiting(server: Server) -> None:
    waiting = asyncio.create_task(server.measured.call(ReceiveMessages("jobs", "ada", wait_seconds=60)))
    await eventually_async(lambda: server.metrics.waiting == 1)
    assert server.metrics.in_flight == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    samples = await server.samples()
    assert samples["fastness_calls_in_flight"] == samples["fastness_calls_waiting"] == 0
    assert samples["fastness_requests_total code=cancelled op=queues.receive"] == 1


async def test_queue_depth_is_reported_by_state(server: Server) -> None:
    queue = server.plane.queue("jobs")
    for _ in range(3):
        await queue.put(b"1")
    await queue.put(b"1", delay_seconds=60)
    await queue.receive()
    await server.plane_of("beta").queue("mail").put(b"1")
    samples = await server.samples()
    depth = {state: samples[f"fastness_queue_messages queue=jobs state={state} universe=main"] for state in STATES}
    assert depth == {"ready": 2, "delayed": 1, "leased": 1, "dead": 0}
    assert samples["fastness_queue_messages queue=mail state=ready universe=beta"] == 1
    assert samples["fastness_queue_oldest_age_seconds queue=jobs universe=main"] >= 0
    assert samples["fastness_queue_put_total queue=jobs universe=main"] == 4
    assert samples["fastness_lease_expired_total queue=jobs universe=main"] == 0
    assert samples["fastness_queues_cut"] == 0


STATES = ("ready", "delayed", "leased", "dead")


async def test_dwell_time_until_the_first_delivery_is_measured() -> None:
    clock = ManualClock()
    server = Server(queues_max=2, clock=clock)
    jobs, at = server.plane.queue("jobs"), "queue=jobs universe=main"
    await jobs.put_many([b"1", b"2"])
    clock.advance_ms(2_000)
    message = await jobs.receive(visibility_seconds=7, extend_for_seconds=0)
    clock.advance_ms(1_000)
    await server.measured.call(ReceiveMessages("jobs", "ada"))
    await message.nack(delay_seconds=0)
    for _ in range(2):
        message = await jobs.receive(extend_for_seconds=0)
        assert message is not None
        await message.nack(intent="defer")
    samples = await server.samples()
    assert samples[f"fastness_queue_dwell_seconds_count {at}"] == 2
    assert samples[f"fastness_queue_dwell_seconds_sum {at}"] == 5
    assert samples[f"fastness_queue_dwell_seconds_bucket le=1.0 {at}"] == 0
    assert samples[f"fastness_queue_dwell_seconds_bucket le=5.0 {at}"] == 2
    assert samples[f"fastness_queue_redelivered_total {at}"] == 2
    assert await jobs.receive() is not None
    assert (await server.samples())[f"fastness_queue_delivered_total {at}"] == 5
    await server.transport.close()


async def test_number_of_dwell_histograms_is_bounded() -> None:
    server = Server(queues_max=2)
    for name in ("a", "b", "c", "d"):
        await server.plane.queue(name).put(b"1")
        assert await server.plane.queue(name).receive(extend_for_seconds=0) is not None
    samples = await server.samples()
    counts = {name.partition(" ")[2]: value for name, value in samples.items() if "dwell_seconds_count" in name}
    assert counts == {"queue=a universe=main": 1, "queue=b universe=main": 1, "queue= universe=": 2}
    await server.transport.close()


async def test_compaction_lag_of_journals_is_measured() -> None:
    server = Server()
    for name, universe in (("ada", "main"), ("bob", "beta"), ("gone", "main")):
        world = server.plane_of(universe).world(name)
        await world.create()
        for start in range(0, 1_100, 220):
            await world.append(list(range(220)), expected_head=start)
        whole: dict[str, Any] = {"receipt_horizon_height": 1_100, "manifest_hash": NO_MANIFEST}
        await world.snapshots.commit({}, height=1_100, promote=True, **whole)
    gone = server.plane.world("gone")
    await gone.archive()
    await gone.delete()
    samples = await server.samples()
    assert (samples["fastness_journal_compaction_lag_records"], samples["fastness_worlds_cut"]) == (2_048, 0)
    await server.plane.world("ada").compact()
    assert (await server.samples())["fastness_journal_compaction_lag_records"] == 1_024
    server.metrics._worlds_max = 1
    assert (await server.samples())["fastness_worlds_cut"] == 1
    await server.transport.close()


async def test_worlds_are_read_less_often_than_queues(server: Server) -> None:
    await server.metrics.body(server.transport)
    read_at = server.metrics._lag_at
    server.metrics._queues_at = float("-inf")
    await server.metrics.body(server.transport)
    assert server.metrics._lag_at == read_at


async def test_every_metric_is_documented(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    waiting = ConsumerMetrics(server.transport.services.waiting_consumers)
    services = server.transport.services
    services.disk_space = DiskSpaceMonitor(services.database, tmp_path)
    services.database.contention = Contention()
    monkeypatch.setattr(type(services.database), "replayed_position", ReplayedPosition(True, "0/1", 5, 1))
    space = SpaceMetrics(services.space_counters)
    others = (
        IngressMetrics(server.transport.ingress),
        Recovery(services),
        NodeMetrics(services),
        McpMetrics(SimpleNamespace(requests={}, sessions=0, streams=0)),
        SqsMetrics(SimpleNamespace(requests={})),  # type: ignore[arg-type]
        QuotaMetrics(services.quotas),
        EncryptionMetrics(services.database),
    )
    collectors = (server.metrics, waiting, space, *others)
    collected = {family.name: family.type for collector in collectors for family in collector.collect()}
    listed = dict(re.findall(r"^\| `(fastness_(?!pipeline_)\w+)` \| (\w+)", document, re.MULTILINE))
    assert listed == {f"{name}_total" if kind == "counter" else name: kind for name, kind in collected.items()}


async def test_collections_and_what_is_stored_are_measured() -> None:
    clock = ManualClock()
    server = Server(clock=clock)
    server.metrics.registry.register(SpaceMetrics(server.transport.services.space_counters))
    large, pinned = bytes(range(256)) * 100, b"pinned" * 10_000
    assert not [name for name in await server.samples() if "space_" in name or "last_success" in name]
    await server.plane.queue("jobs").put(large)
    await server.plane.blobs.put(pinned)
    message = await server.plane.queue("jobs").receive()
    assert message is not None
    await message.ack()
    await server.plane.gc()
    clock.advance_ms(2 * 86_400_000)
    await server.plane.gc(dry_run=True)
    samples = await server.samples()
    assert samples["fastness_space_bytes kind=blobs"] == len(large) + len(pinned)
    assert samples["fastness_gc_deleted_total kind=blobs"] == 0
    assert clock.now_ms() / 1_000 - samples["fastness_gc_last_success_timestamp_seconds"] == 2 * 86_400
    await server.plane.gc()
    samples = await server.samples()
    assert samples["fastness_space_bytes kind=blobs"] == len(pinned)
    assert samples["fastness_space_bytes kind=queues"] > 0
    assert samples["fastness_space_measured_timestamp_seconds"] == clock.now_ms() / 1_000
    assert samples["fastness_gc_deleted_total kind=blobs"] == 1
    assert samples["fastness_gc_deleted_bytes_total kind=blobs"] == len(large)
    assert samples["fastness_gc_last_success_timestamp_seconds"] == clock.now_ms() / 1_000
    clock.advance_ms(2 * 86_400_000)
    await server.plane.gc()
    assert (await server.samples())["fastness_gc_deleted_total kind=bodies"] == 1
    success = clock.now_ms() / 1_000
    clock.advance_ms(1_000)
    services = server.transport.services
    assert services.objects is not None
    services.objects = faulty_objects(services.objects, ChosenFault(0, lambda: Unreachable("The store is away")))
    with pytest.raises(Unreachable):
        await server.plane.gc()
    samples = await server.samples()
    assert samples["fastness_gc_failures_total"] == 1
    assert samples["fastness_gc_last_success_timestamp_seconds"] == success
    status = (await server.plane.storage_status()).collection
    assert (status.error, status.failures, status.succeeded_ms) == ("The store is away", 1, success * 1_000)
    await server.transport.close()


async def test_number_of_measured_queues_is_bounded() -> None:
    server = Server(queues_max=3)
    for number in range(5):
        await server.plane.queue(f"q{number}").put(b"1")
    await server.plane.world("w").create()
    samples = await server.samples()
    assert {f"q{n}" for n in range(5) if f"fastness_queue_put_total queue=q{n} universe=main" in samples} == {
        "q0",
        "q1",
        "q2",
    }
    assert samples["fastness_queues_cut"] == 1
    await server.transport.close()


async def test_queue_depths_are_read_at_most_once_per_second(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("fastness.server.metrics.time.monotonic", lambda: now)
    await server.plane.queue("jobs").put(b"1")
    assert b'queue="jobs"' in await server.metrics.body(server.transport)
    await server.plane.queue("mail").put(b"1")
    assert b'queue="mail"' not in await server.metrics.body(server.transport)
    now += 1.1
    assert b'queue="mail"' in await server.metrics.body(server.transport)


async def test_cancelled_scrape_keeps_the_previous_depths(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.plane.queue("jobs").put(b"x")
    await server.samples()
    with monkeypatch.context() as slow:
        slow.setattr("fastness.server.metrics.read_queues", lambda *_: asyncio.Event().wait())
        server.metrics._queues_at = float("-inf")
        reading = asyncio.create_task(server.metrics.refresh(server.transport))
        await eventually_async(server.metrics._reading.locked)
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    assert [stats.queue for _, stats in server.metrics._queues] == ["jobs"]


async def test_metrics_are_reported_although_the_key_space_is_closed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.transport.services.database.close()
    assert b"fastness_requests_total" in await server.metrics.body(server.transport)
    assert "cannot be read" in caplog.text


async def test_rejects_streams_syncs_and_process_are_reported(server: Server) -> None:
    server.metrics.count_reject("token")
    server.metrics.observe_sync(0.002)
    samples = await server.samples()
    assert samples["fastness_rejects_total reason=token"] == 1
    assert samples["fastness_open_streams"] == 7
    assert samples["fastness_sync_seconds_bucket le=0.0025"] == 1
    assert samples["fastness_sync_seconds_bucket le=0.001"] == 0
    assert samples["process_resident_memory_bytes"] > 0


async def test_no_label_names_a_message_or_a_key(server: Server) -> None:
    await server.plane.queue("jobs").put(b"1", correlation_id="very-secret")
    await server.plane.lease("key-of-mine").acquire("owner-of-mine")
    text = (await server.metrics.body(server.transport)).decode()
    assert not [word for word in ("very-secret", "key-of-mine", "owner-of-mine") if word in text]


def test_histogram_buckets_include_their_upper_bound() -> None:
    histogram = Histogram((1, 2, 4))
    for value, times in ((1, 1), (1.5, 1), (4, 2), (9, 1)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 1), ("2.0", 2), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 1 + 1.5 + 8 + 9


async def test_unexpected_error_is_logged_and_not_sent_to_the_caller(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the secret details")

    server.transport.call = broken  # type: ignore[method-assign]
    server.transport.services.database.transact_async = broken  # type: ignore[method-assign]
    with pytest.raises(FastnessError) as raised:
        await server.measured.call(PUT)
    [outcome] = await server.measured.call_all([Call(0, PUT)])
    assert "secret" not in f"{raised.value} {outcome}"
    assert len(caplog.records) == 2
    assert "the secret details" in caplog.text
    await asyncio.sleep(0)
    assert server.metrics.requests["queues.put", "error"] == 2


async def test_measured_transport_has_the_services_of_its_transport(server: Server) -> None:
    assert server.measured.services is server.transport.services
    assert (await server.plane.blobs.put(b"x" * 1_000)) is not None
    assert await server.measured.transact(lambda tx: tx.get(b"a"), tier=PUT.tier) is None


# Endpoints.


async def get(app: Any, path: str, kind: str = "http") -> tuple[int, dict[str, str], bytes]:
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


async def test_server_is_ready_while_the_key_space_answers(server: Server) -> None:
    health = Health(server.transport)
    app = Starlette(routes=health.routes())
    assert (await get(app, "/readyz"))[0] == 200
    server.transport.services.database.close()
    status, headers, body = await get(app, "/readyz")
    assert (status, headers["retry-after"]) == (503, "2")
    assert b"closed" in body
    assert (await get(app, "/healthz"))[0] == 200


async def test_draining_server_is_alive_but_not_ready(server: Server) -> None:
    health = Health(server.transport)
    app = health.wrap(Starlette(routes=health.routes()))
    health.draining = True
    assert (await get(app, "/healthz"))[0] == 200
    status, _, body = await get(app, "/readyz")
    assert (status, b"shutting down" in body) == (503, True)
    status, headers, _ = await get(app, "/v1/stream", "websocket")
    assert (status, headers["retry-after"]) == (503, "2")


async def test_requests_are_in_flight_until_answered_unless_they_wait_for_messages(server: Server) -> None:
    health = Health(server.transport)
    started, proceed = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> PlainTextResponse:
        started.set()
        await proceed.wait()
        return PlainTextResponse("done")

    async def long_poll(request: HttpRequest) -> PlainTextResponse:
        started.set()
        await server.measured.call(ReceiveMessages("jobs", "ada", wait_seconds=60))
        return PlainTextResponse("done")

    app = health.wrap(Starlette(routes=[Route("/slow", slow), Route("/poll", long_poll)]))
    answering = asyncio.create_task(get(app, "/slow"))
    await started.wait()
    assert health.in_flight == 1
    proceed.set()
    assert (await answering)[2] == b"done"
    assert health.in_flight == 0
    started.clear()
    polling = asyncio.create_task(get(app, "/poll"))
    await started.wait()
    await eventually_async(lambda: health.in_flight == 0)
    await server.transport.call(PUT)
    await polling


async def test_metrics_need_permission(server: Server) -> None:
    app = Starlette(routes=[metrics_route(server.metrics, server.transport, NoAuthentication())])
    status, headers, body = await get(app, "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert b"fastness_open_streams 7.0" in body

    def refuse(*_: Any) -> Any:
        raise NotAllowed("not you")

    app = Starlette(routes=[metrics_route(server.metrics, server.transport, SimpleNamespace(authenticate=refuse))])
    assert (await get(app, "/metrics"))[0] == 403
    without_permission = SimpleNamespace(authenticate=lambda *_: SimpleNamespace(authorize_verb=refuse))
    app = Starlette(routes=[metrics_route(server.metrics, server.transport, without_permission)])
    assert (await get(app, "/metrics"))[0] == 403


# Logs.


@pytest.fixture
def lines() -> Iterator[Any]:
    """Configures logging to memory, and restores it afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    quiet = {name: logging.getLogger(name).level for name in logs._QUIET}

    def start(format: str, level: str = "info") -> io.StringIO:
        stream = io.StringIO()
        logs.configure(format, level, stream)
        return stream

    yield start
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name, number in quiet.items():
        logging.getLogger(name).setLevel(number)


SECRET = "fnt_" + "0" * 32 + "_" + "5ec4e7" * 8
log = logging.getLogger("fastness.test")


def test_json_line_has_all_fields(lines: Any) -> None:
    stream = lines("json")
    with logs.correlation_scope("c-1"):
        log.warning("refused: %s", "why", extra={"token": "t", "count": 3})
    log.debug("not logged")
    [line] = map(msgspec.json.decode, stream.getvalue().splitlines())
    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "fastness.test",
        "message": "refused: why",
        "correlation_id": "c-1",
        "token": "t",
        "count": 3,
    }


def test_text_line_escapes_line_breaks(lines: Any) -> None:
    stream = lines("text")
    log.error("one\nline\r", extra={"client": "a\nb"})
    [line] = stream.getvalue().splitlines()
    assert line.endswith('error fastness.test one\\nline\\r client="a\\nb"')


def test_text_line_has_no_forged_fields_or_lines(lines: Any) -> None:
    stream = lines("text")
    with logs.correlation_scope('c-1 token=root "quoted\\" \x1b[31m'):
        try:
            raise ValueError("one\n2026-11-15T06:00:00.000Z info fastness.tokens forged")
        except ValueError:
            log.exception("refused", extra={"count": 3, "key": "a=b", "agent": "ada@main"})
    first, *rest = stream.getvalue().splitlines()
    found = first.partition(" refused ")[2]
    assert found.startswith(
        'correlation_id="c-1 token=root \\"quoted\\\\\\" \\u001b[31m" count=3 key="a=b" agent=ada@main'
    )
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize("format", ["json", "text"])
def test_secrets_are_redacted(lines: Any, format: str) -> None:
    stream = lines(format)
    url = "postgresql://ada:hunter22@db/x"
    log.error("%s and Authorization: Bearer %s", SECRET, "other-s3cret", extra={"headers": {"a": SECRET}, "data": url})
    with logs.correlation_scope(SECRET):
        try:
            raise ValueError(SECRET)
        except ValueError:
            log.exception("it failed")
    logged = stream.getvalue()
    assert "it failed" in logged
    assert "ValueError" in logged
    assert not [secret for secret in ("5ec4e7", "other-s3cret", "hunter22") if secret in logged]
    assert "fnt_" + "0" * 32 in logged  # The id of the token is not secret.


def test_libraries_that_log_payloads_are_silent_at_debug_level(lines: Any) -> None:
    stream = lines("text", "debug")
    log.debug("ours")
    logging.getLogger("uvicorn.error").debug("a frame with messages")
    assert "ours" in stream.getvalue()
    assert "messages" not in stream.getvalue()


def test_rate_limited_lines_are_counted(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("fastness.server.logs.monotonic", lambda: now)
    stream = lines("json")
    flooded = logging.getLogger("fastness.test.flood")
    flooded.addFilter(logs.RateLimitFilter(per_second=3))
    for _ in range(10):
        flooded.warning("again")
    now += 1
    flooded.warning("later")
    logged = [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in logged] == ["again"] * 3 + ["later"]
    assert logged[-1]["kept_back"] == 7


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
            {"messaging.batch.message_count": 2, "messaging.destination.name": "jobs", "messaging.system": "fastness"},
        ),
        (GetState("k", "beta"), "states.get", {"fastness.universe": "beta", "fastness.operation": "states.get"}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_spans_follow_the_messaging_conventions(request_: Any, name: str, attributes: dict[str, Any]) -> None:
    found_name, found_attributes = tracing.names_of(request_)
    assert found_name == name
    assert attributes.items() <= found_attributes.items()


async def test_calls_are_spans_if_a_provider_is_configured(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_has_provider", tracing._has_provider.__wrapped__)
    await server.measured.call(PUT)
    await server.measured.call_all([Call(0, PUT)])
    await server.measured.call_all([Call(0, PUT), Call(1, PUT)])
    with pytest.raises(FastnessError):
        await server.measured.call(GetState("no key!"))
    spans = memory.get_finished_spans()
    assert [span.name for span in spans] == ["send jobs", "send jobs", "commit", "states.get"]
    assert spans[-1].attributes is not None
    assert spans[-1].attributes["error.type"] == "invalid_name"


def test_tracing_is_off_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    assert not tracing.is_on()
    with tracing.caused_by({"traceparent": "00-1-2-01"}), tracing.span(PUT), pytest.raises(Closed):
        raise Closed("as always")


async def test_metrics_are_reported_although_queues_cannot_be_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as damaged:
        damaged.setattr("fastness.server.metrics.read_queues", fail)
        assert b"fastness_requests_total" in await server.metrics.body(server.transport)
    assert "ZeroDivisionError" in caplog.text
    await server.plane.queue("jobs").put(b"1")
    server.metrics._queues_at = float("-inf")
    assert b'queue="jobs"' in await server.metrics.body(server.transport)
