"""A server's metrics and logs in OpenTelemetry, read with the in-memory exporters of its SDK."""

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from fastness.errors import FastnessError
from fastness.handles.plane import AsyncPlane
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.open import open_plane_async
from fastness.server import telemetry
from fastness.server.logs import correlation_scope
from fastness.server.serving import Serving
from fastness.server.settings import Settings
from fastness.wire.frames import Call
from fastness.wire.queues import NewMessage, PutMessages

SETTINGS = Settings(data="memory:")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async(SETTINGS.data, SETTINGS.options)
    await transport.ingress.start()
    yield transport
    await transport.close()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Reads what a meter provider has got, which looks as if it were configured for the process."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(telemetry.metrics, "get_meter_provider", lambda: provider)
    yield reader
    provider.shutdown()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryLogRecordExporter]:
    """Has the records that a logger provider has got, as above."""
    exporter, provider = InMemoryLogRecordExporter(), LoggerProvider()  # type: ignore[no-untyped-call]
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    monkeypatch.setattr(telemetry._logs, "get_logger_provider", lambda: provider)
    yield exporter
    provider.shutdown()


async def work(serving: Serving) -> None:
    """Calls of several kinds, alone and in batches: some succeed, one fails."""
    plane = AsyncPlane(serving.context.transport)  # type: ignore[arg-type]
    await plane.queue("jobs").put_many([{"n": number} for number in range(5)])
    message = await plane.queue("jobs").receive()
    assert message is not None
    await message.ack()
    await plane.lease("deploy").acquire("ada", wait_seconds=1)
    with pytest.raises(FastnessError):
        await plane.state("no key!").get()
    put = PutMessages("jobs", [NewMessage(b"1")])
    serving.metrics.count_batch([Call(0, put), Call(1, put), Call(2, put)], [True, True, True], 0.002)
    await plane.ingress.push("bob", "cpu", 0.7, synced=True)


def exported(reader: InMemoryMetricReader) -> Samples:
    """What the SDK exports, with the names that a Prometheus gives it."""
    data: Any = reader.get_metrics_data()
    samples: Samples = {}
    [resource] = data.resource_metrics
    [scope] = resource.scope_metrics
    assert scope.scope.name == "fastness"
    for metric in scope.metrics:
        name = metric.name.replace(".", "_")
        assert metric.unit == {"seconds": "s", "bytes": "By"}.get(name.rpartition("_")[2], "1")
        for point in metric.data.data_points:
            labels = tuple(sorted(point.attributes.items()))
            if hasattr(point, "bucket_counts"):
                total = 0
                for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
                    total += count
                    le = "+Inf" if bound == float("inf") else str(float(bound))
                    samples[f"{name}_bucket", tuple(sorted((*labels, ("le", le))))] = total
                samples[f"{name}_count", labels] = point.count
                samples[f"{name}_sum", labels] = point.sum
            else:
                is_counter = getattr(metric.data, "is_monotonic", False)
                samples[f"{name}_total" if is_counter else name, labels] = point.value
    return samples


def scraped(serving: Serving) -> Samples:
    """What `/metrics` has. Histograms without a value are left out: OpenTelemetry does not export them."""
    samples: Samples = {}
    for family in serving.metrics.registry.collect():
        counts = {
            tuple(sorted(sample.labels.items())): sample.value
            for sample in family.samples
            if sample.name.endswith("_count")
        }
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            if family.name.startswith("fastness_") and (family.type != "histogram" or counts[labels]):
                samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def test_metrics_equal_those_of_prometheus(
    transport: AsyncEmbeddedTransport, reader: InMemoryMetricReader
) -> None:
    serving = Serving(SETTINGS, transport)
    await work(serving)
    await serving.telemetry.read(serving.metrics, transport)
    sent, expected = exported(reader), scraped(serving)
    assert sent.keys() == expected.keys()
    assert sent == pytest.approx(expected)
    assert sent["fastness_requests_total", (("code", "ok"), ("op", "queues.put"))] == 4
    assert sent["fastness_request_seconds_count", (("op", "queues.put"),)] == 4
    assert ("fastness_lock_wait_seconds_count", (("level", "lease"),)) in sent
    assert ("fastness_queue_dwell_seconds_count", (("queue", "jobs"), ("universe", "main"))) in sent
    # A later export has the later values, and no series of what a scrape does not show.
    await work(serving)
    await serving.telemetry.read(serving.metrics, transport)
    assert exported(reader)["fastness_request_seconds_count", (("op", "queues.put"),)] == 8


async def test_last_values_are_sent_when_the_server_stops(
    transport: AsyncEmbeddedTransport, reader: InMemoryMetricReader
) -> None:
    serving = Serving(SETTINGS, transport)
    async with serving.telemetry.running(serving.metrics, transport):
        await work(serving)
    calls = exported(reader)["fastness_requests_total", (("code", "ok"), ("op", "queues.receive"))]
    assert calls == 1


async def test_logs_have_severity_trace_and_correlation_id(
    transport: AsyncEmbeddedTransport, exporter: InMemoryLogRecordExporter
) -> None:
    serving = Serving(SETTINGS, transport)
    log = logging.getLogger("fastness.tokens")
    tracer = TracerProvider().get_tracer("caller")
    async with serving.telemetry.running(serving.metrics, transport):
        with tracer.start_as_current_span("request") as span, correlation_scope("c-7"):
            log.warning("refused: Bearer %s", "fnt_0123_secret", extra={"client": "::1", "reason": None, "times": 2})
        try:
            raise ValueError("no such file: Bearer secret")
        except ValueError:
            log.exception("unexpected error")
        logging.getLogger("elsewhere").error("not ours")
    log.error("after the server stopped")
    refused, failed = [each.log_record for each in exporter.get_finished_logs()]
    assert (refused.body, refused.severity_text, refused.severity_number.value) == (
        "refused: Bearer fnt_0123_…",
        "WARN",
        13,
    )
    assert dict(refused.attributes or {}) == {
        "fastness.correlation_id": "c-7",
        "fastness.client": "::1",
        "fastness.times": 2,
    }
    assert refused.trace_id == span.get_span_context().trace_id
    assert refused.span_id == span.get_span_context().span_id
    raised: dict[str, Any] = dict(failed.attributes or {})
    assert (failed.severity_text, raised["exception.type"]) == ("ERROR", "builtins.ValueError")
    assert raised["exception.message"] == "no such file: Bearer …"
    assert "secret" not in raised["exception.stacktrace"]
    assert 'raise ValueError("no such file' in raised["exception.stacktrace"]


@pytest.mark.parametrize("installed", [True, False])
async def test_nothing_is_sent_without_providers(
    transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(telemetry, "metrics", None)
        monkeypatch.setattr(telemetry, "_logs", None)
    serving = Serving(SETTINGS, transport)
    handlers = list(logging.getLogger("fastness").handlers)
    async with serving.telemetry.running(serving.metrics, transport):
        assert logging.getLogger("fastness").handlers == handlers
        await work(serving)
    assert serving.telemetry.recorder("fastness_sync_seconds", (1.0,), {}) is None
    assert serving.metrics.sync.record is None
    assert serving.telemetry._values == {}


@pytest.mark.usefixtures("exporter")
async def test_failing_telemetry_does_not_fail_a_call(
    transport: AsyncEmbeddedTransport,
    reader: InMemoryMetricReader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving = Serving(SETTINGS, transport)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no collector")

    monkeypatch.setattr("opentelemetry.sdk.metrics.Histogram.record", fail)
    monkeypatch.setattr(telemetry._logs, "LogRecord", fail)
    async with serving.telemetry.running(serving.metrics, transport):
        await work(serving)
        logging.getLogger("fastness.server").warning("still logged")
    assert "no collector" in capsys.readouterr().err
    assert "still logged" in caplog.text
    assert exported(reader)["fastness_requests_total", (("code", "ok"), ("op", "queues.put"))] == 4
