"""Samples: the numbers behind the charts, from the registry that `/metrics` is made from.

Counters come as they stand. A page takes the difference of two of them, so whatever point it missed it is right.
"""

import asyncio
import time
from collections import defaultdict, deque
from typing import Any, Final

from holdfast.limits import CONSOLE_SAMPLE_SECONDS, CONSOLE_SAMPLES
from holdfast.server.metrics import Metrics

DEAD_LETTERS: Final = ".dlq"
_TOTALS: Final = {
    "holdfast_queue_put": "put",
    "holdfast_queue_delivered": "delivered",
    "holdfast_queue_acked": "acked",
    "holdfast_queue_failed": "failed",
    "holdfast_queue_dead": "died",
}
_GAUGES: Final = {
    "holdfast_calls_in_flight": "in_flight",
    "holdfast_calls_waiting": "waiting",
    "holdfast_open_streams": "streams",
    "holdfast_relay_sessions": "agents",
    "holdfast_ingress_depth": "ingress",
    "holdfast_journal_compaction_lag_records": "lag",
    "process_resident_memory_bytes": "memory",
}
_HISTOGRAMS: Final = {
    "holdfast_sync_seconds": "sync",
    "holdfast_commit_group_size": "group",
    "holdfast_lock_wait_seconds": "lock_wait",
}

Sample = dict[str, Any]


class Samples:
    """Takes a sample every second while somebody watches, and keeps the last few minutes of them."""

    def __init__(self, metrics: Metrics, transport: Any) -> None:
        self._metrics = metrics
        self._transport = transport
        self._kept: deque[Sample] = deque(maxlen=CONSOLE_SAMPLES)
        self._latest: Sample = {}  # The last one, with what is told of each operation.
        self._taken_at = float("-inf")
        self._turn = asyncio.Lock()
        self.started_ms = round(time.time() * 1_000)  # Counters of another start have nothing to do with these.

    @property
    def history(self) -> list[Sample]:
        """The samples that are there, in order, without what is told of each operation."""
        since = time.time() * 1_000 - CONSOLE_SAMPLES * CONSOLE_SAMPLE_SECONDS * 1_000
        return [sample for sample in self._kept if sample["at_ms"] >= since]

    async def latest(self) -> Sample:
        """A sample that was begun within the last second; all who ask within it get the same object."""
        async with self._turn:
            now = time.monotonic()
            if now - self._taken_at >= CONSOLE_SAMPLE_SECONDS:
                await self._metrics.refresh(self._transport)
                self._taken_at = now
                sample, operations = self._take()
                self._kept.append(sample)
                self._latest = {**sample, "operations": operations}
        return self._latest

    def _take(self) -> tuple[Sample, Sample]:
        sample: Sample = {"at_ms": round(time.time() * 1_000), "started_ms": self.started_ms, "rejects": {}}
        sample.update(calls=0, errors=0, fenced=0)
        universes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        operations: dict[str, dict[str, Any]] = defaultdict(lambda: {"calls": 0, "errors": 0, "buckets": []})
        graves: set[tuple[str, str]] = set()
        for family in self._metrics.registry.collect():
            if family.name == "holdfast_queue_messages":
                names = {(each.labels["universe"], each.labels["queue"]) for each in family.samples}
                graves = {
                    (of, name) for of, name in names if (of, name.removesuffix(DEAD_LETTERS)) in names - {(of, name)}
                }
            for point in family.samples:
                labels, value = point.labels, point.value
                if family.name == "holdfast_requests":
                    failed = labels["code"] not in ("ok", "cancelled")
                    sample["calls"] += value
                    sample["errors"] += value * failed
                    operations[labels["op"]]["calls"] += value
                    operations[labels["op"]]["errors"] += value * failed
                elif family.name == "holdfast_request_seconds":
                    if point.name.endswith("_bucket"):
                        operations[labels["op"]]["buckets"].append(value)
                elif family.name == "holdfast_rejects":
                    sample["rejects"][labels["reason"]] = value
                elif family.name == "holdfast_fenced":
                    sample["fenced"] = value
                elif family.name in _GAUGES:
                    sample[_GAUGES[family.name]] = value
                elif family.name in _HISTOGRAMS:
                    _fill(sample, _HISTOGRAMS[family.name], point.name, value)
                elif "queue" in labels and (labels["universe"], labels["queue"]) not in graves:
                    _count(universes[labels["universe"]], family.name, labels, value)
        sample["queues"] = universes
        return sample, dict(operations)


def _fill(sample: Sample, name: str, point: str, value: float) -> None:
    """A histogram as its running totals; the last of them is the count."""
    if point.endswith("_bucket"):
        sample.setdefault(name, []).append(value)
    elif point.endswith("_sum"):
        sample[f"{name}_sum"] = value


def _count(queues: dict[str, float], family: str, labels: dict[str, str], value: float) -> None:
    """What queues of one universe come to, without those of dead letters, which count as dead where they died."""
    if family == "holdfast_queue_messages":
        queues[labels["state"]] += value
    elif family == "holdfast_queue_oldest_age_seconds":
        queues["oldest"] = max(queues["oldest"], value)
    elif family in _TOTALS:
        queues[_TOTALS[family]] += value
