"""Metrics of the quotas of universes."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.limits import QUOTAS_METRICS_MAX
from fastness.runtime.quotas import BYTES, CONNECTIONS, MESSAGES, RATE, Quotas

_LABELS = ("universe", "kind")


class QuotaMetrics(Collector):
    """Collects limits, use and refusals of universes with quotas. Reads no stored data."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        limits = GaugeMetricFamily("fastness_quota_limit", "What a universe may have.", labels=_LABELS)
        used = GaugeMetricFamily("fastness_quota_used", "What a universe with a quota has.", labels=_LABELS)
        refusals = CounterMetricFamily("fastness_quota_refusals", "Refusals because of a quota.", labels=_LABELS)
        found = self._quotas.all()
        for each in found[:QUOTAS_METRICS_MAX]:
            quota = each.quota
            for kind, limit, use in (
                (MESSAGES, quota.messages, each.messages.used),
                (BYTES, quota.bytes, each.bytes.used),
                (CONNECTIONS, quota.connections, self._quotas.connections(each.universe)),
                (RATE, quota.rate_per_second, each.rate.per_second()),
            ):
                if limit is not None:
                    limits.add_metric((each.universe, kind), limit)
                if use is not None:
                    used.add_metric((each.universe, kind), use)
                refusals.add_metric((each.universe, kind), each.refusals[kind])
        yield limits
        yield used
        yield refusals
        yield GaugeMetricFamily("fastness_quotas", "Universes that have a quota.", len(found))
