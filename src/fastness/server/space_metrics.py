"""Metrics of stored data and of the collections that delete it."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.runtime.maintenance.space_counters import SpaceCounters


class SpaceMetrics(Collector):
    """Collects how much is stored and deleted; register it with the server's registry. Reads no stored data."""

    def __init__(self, counters: SpaceCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        stored = GaugeMetricFamily("fastness_space_bytes", "Stored bytes, by kind of data.", labels=("kind",))
        for kind, size in sorted(counters.stored_bytes.items()):
            stored.add_metric((_label(kind),), size)
        yield stored
        yield _time("fastness_space_measured_timestamp_seconds", "When the bytes were measured.", counters.measured_ms)
        deleted = CounterMetricFamily("fastness_gc_deleted", "What was deleted, by kind of data.", labels=("kind",))
        for kind, count in sorted(counters.deleted.items()):
            deleted.add_metric((_label(kind),), count)
        yield deleted
        size_text = "Bytes that were deleted, by kind of data."
        deleted_bytes = CounterMetricFamily("fastness_gc_deleted_bytes", size_text, labels=("kind",))
        for kind, size in sorted(counters.deleted_bytes.items()):
            deleted_bytes.add_metric((_label(kind),), size)
        yield deleted_bytes
        success = "When the last successful collection ended."
        yield _time("fastness_gc_last_success_timestamp_seconds", success, counters.last.succeeded_ms)
        yield CounterMetricFamily("fastness_gc_failures", "Collections that failed.", value=counters.last.failures)


def _time(name: str, text: str, at_ms: int | None) -> Metric:
    """A time in seconds since 1970; without a sample if it is None."""
    return GaugeMetricFamily(name, text, value=None if at_ms is None else at_ms / 1_000)


def _label(kind: str) -> str:
    return kind.replace(" ", "_")
