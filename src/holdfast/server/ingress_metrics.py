"""What the ingress tells of itself, as Prometheus wants it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.server.histograms import SECONDS, SIZES, Histogram


class IngressMetrics(Collector):
    """Counts of one ingress; register it where the server's metrics are."""

    def __init__(self, ingress: Any) -> None:
        self._ingress = ingress
        self._batch = Histogram(SIZES)
        self._flush = Histogram(SECONDS)
        ingress.on_flush(self._flushed)

    def collect(self) -> Iterator[Metric]:
        ingress, tallies = self._ingress, self._ingress.tallies
        yield GaugeMetricFamily("holdfast_ingress_depth", "Accepted pushes that wait to be stored.", ingress.depth)
        lag = "How long the first of them has waited."
        yield GaugeMetricFamily("holdfast_ingress_writer_lag_seconds", lag, ingress.lag_seconds)
        outcomes = Counter(accepted=tallies.accepted, deduped=tallies.deduped)
        yield _counted("holdfast_ingress_pushes", "Pushes that were accepted, or had been.", "outcome", outcomes)
        yield _counted("holdfast_ingress_rejects", "Pushes that were refused.", "reason", tallies.rejects)
        lost = "Pushes that were accepted, and are not stored."
        yield _counted("holdfast_ingress_lost", lost, "reason", tallies.lost)
        for name, text, histogram in (
            ("holdfast_ingress_batch_size", "Pushes of one commit.", self._batch),
            ("holdfast_ingress_flush_seconds", "How long commits of pushes took.", self._flush),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)

    def _flushed(self, pushes: int, seconds: float) -> None:
        self._batch.observe(pushes)
        self._flush.observe(seconds)


def _counted(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
