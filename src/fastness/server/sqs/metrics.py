"""Prometheus metrics of the SQS endpoint. Its calls are among those of every entry point, by operation."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.server.sqs.endpoint import SqsEndpoint


class SqsMetrics(Collector):
    """Collects the metrics of one endpoint; register it with the server's registry."""

    def __init__(self, endpoint: SqsEndpoint) -> None:
        self._endpoint = endpoint

    def collect(self) -> Iterator[Metric]:
        text = "SQS requests, by action and by the code of the error or ok."
        requests = CounterMetricFamily("fastness_sqs_requests", text, labels=("action", "code"))
        for labels, count in sorted(self._endpoint.requests.items()):
            requests.add_metric(labels, count)
        yield requests
