"""OpenTelemetry metrics and logs of a server, if providers for them are configured before it starts; otherwise nothing.

Metrics are those of `/metrics`, and have the same labels. `fastness_queue_messages` is `fastness.queue.messages`; a
Prometheus that gets them from a collector names them as `/metrics` does. Counters and gauges are read on the event loop
every few seconds, and an exporter's thread takes the last values. Values of histograms are recorded as they are seen.

Logs are the lines of the loggers `fastness.*`, redacted as in the log, with the trace and the correlation id of their
request. Spans are in `tracing.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from fastness.server.histograms import Record
from fastness.server.logs import LineFormatter, RateLimitFilter, redact_secrets
from fastness.server.metrics import Metrics
from fastness.server.transport import ServerTransport
from fastness.version import __version__

_logs: Any = None
metrics: Any = None
with suppress(ImportError):
    from opentelemetry import _logs, metrics

_log = logging.getLogger("fastness.telemetry")
_log.addFilter(RateLimitFilter(per_second=1))
_READ_SECONDS: Final = 5.0  # Exporters send once a minute by default.
_UNITS: Final = {"seconds": "s", "bytes": "By"}  # By the last word of a name.
_SEVERITIES: Final = {"CRITICAL": "FATAL", "ERROR": "ERROR", "WARNING": "WARN", "INFO": "INFO", "DEBUG": "DEBUG"}

_Labels = Mapping[str, str]


class Telemetry:
    """The metrics and logs that one server sends to OpenTelemetry."""

    def __init__(self) -> None:
        self._meter: Any = None
        self._handler: logging.Handler | None = None
        if metrics is not None and _is_configured(provider := metrics.get_meter_provider()):
            self._meter = provider.get_meter("fastness", __version__)
        if _logs is not None and _is_configured(provider := _logs.get_logger_provider()):
            self._handler = LogHandler(provider)
        self._instruments: dict[str, Any] = {}
        self._values: dict[str, tuple[tuple[float, _Labels], ...]] = {}

    def recorder(self, name: str, bounds: Sequence[float], labels: _Labels) -> Record | None:
        """The function that records values of a histogram; None if metrics are not sent."""
        if self._meter is None:
            return None
        histogram = self._instruments.get(name)
        if histogram is None:
            histogram = self._instruments[name] = self._meter.create_histogram(
                _dotted(name), unit=_unit(name), explicit_bucket_boundaries_advisory=list(bounds)
            )
        return partial(_record, histogram, dict(labels))

    @asynccontextmanager
    async def running(self, server_metrics: Metrics, transport: ServerTransport) -> AsyncIterator[None]:
        """Send metrics and logs inside the `async with` block. The last values are sent after it, too."""
        reading = asyncio.create_task(self._read_often(server_metrics, transport)) if self._meter is not None else None
        logger = logging.getLogger("fastness")
        if self._handler is not None:
            logger.addHandler(self._handler)
        try:
            yield
        finally:
            if self._handler is not None:
                logger.removeHandler(self._handler)
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
                self._read(server_metrics)

    async def read(self, server_metrics: Metrics, transport: ServerTransport) -> None:
        """Read the counters and gauges that the next export sends."""
        await server_metrics.refresh(transport)
        self._read(server_metrics)

    async def _read_often(self, server_metrics: Metrics, transport: ServerTransport) -> None:
        while True:
            try:
                await self.read(server_metrics, transport)
            except Exception:
                _log.exception("metrics could not be read for OpenTelemetry")
            await asyncio.sleep(_READ_SECONDS)

    def _read(self, server_metrics: Metrics) -> None:
        for family in server_metrics.registry.collect():
            if not family.name.startswith("fastness_") or family.type not in ("counter", "gauge"):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            samples = [sample for sample in family.samples if sample.name == name]
            self._values[family.name] = tuple((sample.value, sample.labels) for sample in samples)
            if family.name not in self._instruments:
                create = f"create_observable_{family.type}"
                self._instruments[family.name] = getattr(self._meter, create)(
                    _dotted(family.name),
                    callbacks=[partial(self._observe, family.name)],
                    unit=_unit(family.name),
                    description=family.documentation,
                )

    def _observe(self, name: str, options: object) -> Iterable[Any]:
        """Called by exporters, in threads of their own."""
        del options
        return [metrics.Observation(value, labels) for value, labels in self._values.get(name, ())]


class LogHandler(logging.Handler):
    """Sends log records to a logger provider of OpenTelemetry."""

    def __init__(self, provider: Any) -> None:
        super().__init__()
        self._provider = provider
        self._loggers: dict[str, Any] = {}
        self._lines = LineFormatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            logger = self._loggers.get(record.name)
            if logger is None:
                logger = self._loggers[record.name] = self._provider.get_logger(record.name, __version__)
            fields = self._lines.fields(record)
            severity = _SEVERITIES.get(record.levelname, "UNSPECIFIED")
            logger.emit(
                _logs.LogRecord(  # Takes the trace from the current context.
                    timestamp=int(record.created * 1e9),
                    observed_timestamp=time.time_ns(),
                    severity_text=severity,
                    severity_number=_logs.SeverityNumber[severity],
                    body=fields.pop("message"),
                    attributes=_attributes(record, fields),
                )
            )
        except Exception:
            self.handleError(record)


def _attributes(record: logging.LogRecord, fields: dict[str, Any]) -> dict[str, Any]:
    """The other fields of a line. An exception has the names of OpenTelemetry's conventions."""
    for name in ("at", "level", "logger"):
        del fields[name]
    trace = fields.pop("error", None) if record.exc_info else None
    attributes = {f"fastness.{name}": value for name, value in fields.items() if value is not None}
    if trace is not None and record.exc_info is not None and (kind := record.exc_info[0]) is not None:
        attributes["exception.type"] = f"{kind.__module__}.{kind.__qualname__}"
        attributes["exception.message"] = redact_secrets(str(record.exc_info[1]))
        attributes["exception.stacktrace"] = trace
    return attributes


def _record(histogram: Any, labels: dict[str, str], value: float, times: int) -> None:
    """Record a value. Errors are logged: they must not fail a request that may be committed."""
    try:
        for _ in range(times):  # OpenTelemetry has no way to record a value several times at once.
            histogram.record(value, labels)
    except Exception:
        _log.exception("a value could not be recorded for OpenTelemetry")


def _is_configured(provider: Any) -> bool:
    """Whether this is a provider of an SDK, not one of the API package, which drops everything."""
    return not type(provider).__module__.startswith(("opentelemetry.metrics.", "opentelemetry._logs."))


def _dotted(name: str) -> str:
    return name.replace("_", ".")


def _unit(name: str) -> str:
    return _UNITS.get(name.rpartition("_")[2], "1")
