"""Metrics of encryption at rest."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.kv import Database
from fastness.kv.value_cipher import cipher_of


class EncryptionMetrics(Collector):
    """Collects how often maintenance skipped universes; register it with the server's registry."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def collect(self) -> Iterator[Metric]:
        cipher = cipher_of(self._database)
        counts: Counter[str] = Counter()
        for (universe, _), count in () if cipher is None else cipher.skipped.copy().items():
            counts[universe] += count
        text = "Periodic tasks that skipped a universe, because a value of it cannot be decrypted."
        skipped = CounterMetricFamily("fastness_undecryptable_skips", text, labels=("universe",))
        for universe, count in sorted(counts.items()):
            skipped.add_metric((universe,), count)
        yield skipped
