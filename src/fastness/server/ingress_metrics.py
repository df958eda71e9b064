"""Prometheus metrics of the ingress."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.runtime.ingress.ingress import Ingress
from fastness.server.histograms import SECONDS, SIZES, Histogram, Recorder, no_recorder


class IngressMetrics(Collector):
    """Collects the metrics of one ingress; register it with the server's registry."""

    def __init__(self, ingress: Ingress, recorder: Recorder = no_recorder) -> None:
        self._ingress = ingress
        self._batch = Histogram(SIZES, recorder("fastness_ingress_batch_size", SIZES, {}))
        self._flush = Histogram(SECONDS, recorder("fastness_ingress_flush_seconds", SECONDS, {}))
        ingress.on_flush(self._on_flush)

    def collect(self) -> Iterator[Metric]:
        ingress, counters = self._ingress, self._ingress.counters
        yield GaugeMetricFamily("fastness_ingress_depth", "Accepted pushes that wait to be stored.", ingress.depth)
        lag = "How long the oldest push has waited to be stored."
        yield GaugeMetricFamily("fastness_ingress_writer_lag_seconds", lag, ingress.lag_seconds)
        outcomes = Counter(accepted=counters.accepted, deduped=counters.deduped)
        yield _counter(
            "fastness_ingress_pushes",
            "Pushes that were accepted, or were duplicates of accepted ones.",
            "outcome",
            outcomes,
        )
        yield _counter("fastness_ingress_rejects", "Pushes that were refused, by reason.", "reason", counters.rejects)
        lost = "Accepted pushes that could not be stored, by reason."
        yield _counter("fastness_ingress_lost", lost, "reason", counters.lost)
        for name, text, histogram in (
            ("fastness_ingress_batch_size", "Pushes per commit.", self._batch),
            ("fastness_ingress_flush_seconds", "Duration of commits of pushes.", self._flush),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)

    def _on_flush(self, pushes: int, seconds: float) -> None:
        self._batch.observe(pushes)
        self._flush.observe(seconds)


def _counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
