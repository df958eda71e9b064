"""Prometheus metrics of `/mcp`. The calls of tools are among those of every entry point, by operation."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Measured(Protocol):
    """What is measured of an endpoint."""

    @property
    def requests(self) -> Mapping[str, int]:
        """The number of requests, by method."""
        ...

    @property
    def sessions(self) -> int: ...

    @property
    def streams(self) -> int: ...


class McpMetrics(Collector):
    """Collects the metrics of one endpoint; register it with the server's registry."""

    def __init__(self, endpoint: Measured) -> None:
        self._endpoint = endpoint

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fastness_mcp_requests", "Requests to /mcp, by method.", labels=("method",))
        for method, count in sorted(self._endpoint.requests.items()):
            requests.add_metric((method,), count)
        yield requests
        sessions = "Open MCP sessions, of clients of revision 2025-11-25."
        yield GaugeMetricFamily("fastness_mcp_sessions", sessions, value=self._endpoint.sessions)
        streams = "Open streams of notifications to MCP clients."
        yield GaugeMetricFamily("fastness_mcp_streams", streams, value=self._endpoint.streams)
