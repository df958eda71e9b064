"""Metrics of the nodes that share a plane, and of the background work of this one."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.plane.services import Services


class NodeMetrics(Collector):
    """Collects what the last heartbeat saw, and what jobs did; register it with the server's registry.

    Reads no stored data.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        heartbeat = self._services.heartbeat
        alive = "Nodes that share the plane and are alive, as of this node's last heartbeat."
        yield GaugeMetricFamily("fastness_nodes", alive, value=1 if heartbeat is None else heartbeat.alive)
        holder = "1 if this node does the periodic work of the plane, such as sweeps and schedules."
        yield GaugeMetricFamily("fastness_maintenance_holder", holder, value=self._services.duty.is_ours())
        revived = "Runs that nothing would have continued, made ready again by claims at this node."
        yield CounterMetricFamily("fastness_runs_revived", revived, value=sum(self._services.revived_runs.values()))
        passes = CounterMetricFamily("fastness_background_passes", "Passes of background work.", labels=["work"])
        failures = CounterMetricFamily("fastness_background_failures", "Failures of background work.", labels=["work"])
        for job in list(self._services.background.jobs):
            passes.add_metric([job.name], job.passes)
            failures.add_metric([job.name], job.failures)
        yield from (passes, failures)
