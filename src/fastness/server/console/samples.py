"""Samples for the console's charts, from the registry behind `/metrics`.

Counters are sent as absolute values. A page computes differences, so a missed sample does not distort a chart.
"""

import asyncio
import time
from collections import defaultdict, deque
from typing import Any, Final

from prometheus_client.core import Metric

from fastness.limits import CONSOLE_SAMPLE_SECONDS, CONSOLE_SAMPLES
from fastness.server.metrics import Metrics
from fastness.server.transport import ServerTransport

DEAD_LETTERS: Final = ".dlq"
_TOTALS: Final = {
    "fastness_queue_put": "put",
    "fastness_queue_delivered": "delivered",
    "fastness_queue_acked": "acked",
    "fastness_queue_failed": "failed",
    "fastness_queue_dead": "died",
}
_GAUGES: Final = {
    "fastness_calls_in_flight": "in_flight",
    "fastness_calls_waiting": "waiting",
    "fastness_open_streams": "streams",
    "fastness_relay_sessions": "agents",
    "fastness_ingress_depth": "ingress",
    "fastness_journal_compaction_lag_records": "lag",
    "process_resident_memory_bytes": "memory",
}
_HISTOGRAMS: Final = {
    "fastness_sync_seconds": "sync",
    "fastness_commit_group_size": "group",
    "fastness_lock_wait_seconds": "lock_wait",
}

Sample = dict[str, Any]
QueueNumbers = dict[tuple[str, str], dict[str, float]]  # By universe and queue.


class Samples:
    """Takes a sample every second while a page is open, and keeps those of the last few minutes."""

    def __init__(self, metrics: Metrics, transport: ServerTransport) -> None:
        self._metrics = metrics
        self._transport = transport
        self._history: deque[Sample] = deque(maxlen=CONSOLE_SAMPLES)
        self._latest: Sample = {}  # The last sample, with the numbers of each operation.
        self._queues: QueueNumbers = {}  # Those of the last sample.
        self._sampled_at = float("-inf")
        self._lock = asyncio.Lock()
        self.started_ms = round(
            time.time() * 1_000
        )  # Counters restart with the server, so a page must not compare across a restart.

    @property
    def history(self) -> list[Sample]:
        """The stored samples in order, without the numbers of each operation."""
        since = time.time() * 1_000 - CONSOLE_SAMPLES * CONSOLE_SAMPLE_SECONDS * 1_000
        return [sample for sample in self._history if sample["at_ms"] >= since]

    async def latest(self) -> Sample:
        """A sample of the last second; all callers within that second get the same object."""
        async with self._lock:
            now = time.monotonic()
            if now - self._sampled_at >= CONSOLE_SAMPLE_SECONDS:
                await self._metrics.refresh(self._transport)
                self._sampled_at = now
                sample, operations, self._queues = self._collect()
                self._history.append(sample)
                self._latest = {**sample, "operations": operations}
        return self._latest

    async def full(self) -> tuple[Sample, QueueNumbers]:
        """A sample of the last second, and the numbers of each queue."""
        return await self.latest(), self._queues

    def _collect(self) -> tuple[Sample, Sample, QueueNumbers]:
        sample: Sample = {"at_ms": round(time.time() * 1_000), "started_ms": self.started_ms, "rejects": {}}
        sample.update(calls=0, errors=0, fenced=0)
        universes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        queues: QueueNumbers = defaultdict(lambda: defaultdict(float))
        operations: dict[str, dict[str, Any]] = defaultdict(lambda: {"calls": 0, "errors": 0, "buckets": []})
        dead_letter_queues: set[tuple[str, str]] = set()
        for family in self._metrics.registry.collect():
            if family.name == "fastness_queue_messages":
                names = {(each.labels["universe"], each.labels["queue"]) for each in family.samples}
                dead_letter_queues = {
                    (of, name) for of, name in names if (of, name.removesuffix(DEAD_LETTERS)) in names - {(of, name)}
                }
            if family.name in _HISTOGRAMS:
                _add_histogram(sample, _HISTOGRAMS[family.name], family)
                continue
            for point in family.samples:
                labels, value = point.labels, point.value
                if family.name == "fastness_requests":
                    failed = labels["code"] not in ("ok", "cancelled")
                    sample["calls"] += value
                    sample["errors"] += value * failed
                    operations[labels["op"]]["calls"] += value
                    operations[labels["op"]]["errors"] += value * failed
                elif family.name == "fastness_request_seconds":
                    if point.name.endswith("_bucket"):
                        operations[labels["op"]]["buckets"].append(value)
                elif family.name == "fastness_rejects":
                    sample["rejects"][labels["reason"]] = value
                elif family.name == "fastness_fenced":
                    sample["fenced"] = value
                elif family.name in _GAUGES:
                    sample[_GAUGES[family.name]] = value
                elif "queue" in labels:
                    queue = labels["universe"], labels["queue"]
                    _add_queue(queues[queue], family.name, labels, value)
                    if queue not in dead_letter_queues:
                        _add_queue(universes[labels["universe"]], family.name, labels, value)
        sample["queues"] = universes
        return sample, dict(operations), queues


def _add_histogram(sample: Sample, name: str, family: Metric) -> None:
    """Add a histogram, over all of its labels, as cumulative buckets; the last one is the count."""
    buckets: dict[str, float] = defaultdict(float)
    for point in family.samples:
        if point.name.endswith("_bucket"):
            buckets[point.labels["le"]] += point.value
        elif point.name.endswith("_sum"):
            sample[f"{name}_sum"] = sample.get(f"{name}_sum", 0.0) + point.value
    sample[name] = list(buckets.values())


def _add_queue(queues: dict[str, float], family: str, labels: dict[str, str], value: float) -> None:
    """Add a number of a queue to its own, or to the totals of its universe. Dead-letter queues are excluded from the
    totals: their messages count as dead in their original queues."""
    if family == "fastness_queue_messages":
        queues[labels["state"]] += value
    elif family == "fastness_queue_oldest_age_seconds":
        queues["oldest"] = max(queues["oldest"], value)
    elif family in _TOTALS:
        queues[_TOTALS[family]] += value
