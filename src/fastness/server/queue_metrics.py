"""Metrics that are read from the key space: queue depths, and the compaction lag of journals; and waiting consumers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness.plane import worlds
from fastness.runtime.waiting_consumers import WaitingConsumers
from fastness.server.transport import ServerTransport
from fastness.tiers import Tier
from fastness.wire.queues import GetQueueStats, ListQueues, QueueStats
from fastness.wire.universes import ListUniverses

_PAGE: Final = 100
_WORLDS_PAGE: Final = 20  # A world takes several reads, and a page blocks the event loop.


class ConsumerMetrics(Collector):
    """Collects how many consumers wait at a server; register it with the server's registry."""

    def __init__(self, waiting: WaitingConsumers) -> None:
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        waiting = self._waiting
        yield GaugeMetricFamily("fastness_consumers_waiting", "Consumers that wait, over all queues.", waiting.count)
        yield GaugeMetricFamily(
            "fastness_consumers_waiting_max", "Consumers that may wait (queue_max_consumers).", waiting.limit
        )
        refused = "Consumers that were refused because the maximum number was waiting."
        yield CounterMetricFamily("fastness_consumers_refused", refused, value=waiting.refused)


async def read_queues(transport: ServerTransport, most: int) -> tuple[list[tuple[str, QueueStats]], bool]:
    """The counts of the first `most` queues by name, and whether there are more."""
    found: list[tuple[str, QueueStats]] = []
    async for universe, queue in _queues(transport):
        if len(found) >= most:
            return found, True
        found.append((universe, await transport.call(GetQueueStats(queue, universe, tier=Tier.IMPORTANT))))
        await asyncio.sleep(0)  # A scrape must not delay calls.
    return found, False


async def read_lag(transport: ServerTransport, most: int) -> tuple[int, bool]:
    """The records that a compaction would move, of at most `most` worlds; and whether there are more worlds."""
    checked, behind = 0, 0
    async for universe in _universes(transport):
        after = ""
        while True:
            limit = min(_WORLDS_PAGE, most - checked + 1)
            names, records = await transport.services.database.read_async(
                worlds.lag, universe, after=after, limit=limit, tier=Tier.IMPORTANT
            )
            checked += len(names)
            behind += records
            if checked > most:  # By one, which proves that there are more.
                return behind, True
            if len(names) < limit:
                break
            after = names[-1]
            await asyncio.sleep(0)  # A scrape must not delay calls.
    return behind, False


async def _queues(transport: ServerTransport) -> AsyncIterator[tuple[str, str]]:
    async for universe in _universes(transport):
        after = ""
        while names := (await transport.call(ListQueues(after, _PAGE, universe, tier=Tier.IMPORTANT))).names:
            after = names[-1]
            for name in names:
                yield universe, name


async def _universes(transport: ServerTransport) -> AsyncIterator[str]:
    after = ""
    while names := (await transport.call(ListUniverses(after, _PAGE, tier=Tier.IMPORTANT))).names:
        after = names[-1]
        for name in names:
            yield name
