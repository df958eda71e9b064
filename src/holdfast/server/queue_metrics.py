"""What metrics look up in the key space: how full queues are, and how far journals are behind their compaction."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from holdfast.plane import worlds
from holdfast.tiers import Tier
from holdfast.wire.queues import GetQueueStats, ListQueues, QueueStats
from holdfast.wire.universes import ListUniverses

_PAGE: Final = 100
_WORLDS_PAGE: Final = 20  # One look at a world is several reads, and the event loop waits for a page.


async def read_queues(transport: Any, most: int) -> tuple[list[tuple[str, QueueStats]], bool]:
    """The counts of at most `most` queues, in order, and whether there are more."""
    found: list[tuple[str, QueueStats]] = []
    async for universe, queue in _queues(transport):
        if len(found) >= most:
            return found, True
        found.append((universe, await transport.call(GetQueueStats(queue, universe, tier=Tier.IMPORTANT))))
        await asyncio.sleep(0)  # A scrape holds up nobody's calls.
    return found, False


async def read_lag(transport: Any, most: int) -> tuple[int, bool]:
    """How many records of at most `most` worlds a compaction would move, and whether there are more worlds."""
    looked_at, behind = 0, 0
    async for universe in _universes(transport):
        after = ""
        while True:
            limit = min(_WORLDS_PAGE, most - looked_at + 1)
            names, records = await transport.services.database.read_async(
                worlds.lag, universe, after=after, limit=limit, tier=Tier.IMPORTANT
            )
            looked_at += len(names)
            behind += records
            if looked_at > most:  # By one, which shows that there are more.
                return behind, True
            if len(names) < limit:
                break
            after = names[-1]
            await asyncio.sleep(0)  # A scrape holds up nobody's calls.
    return behind, False


async def _queues(transport: Any) -> AsyncIterator[tuple[str, str]]:
    async for universe in _universes(transport):
        after = ""
        while names := (await transport.call(ListQueues(after, _PAGE, universe, tier=Tier.IMPORTANT))).names:
            after = names[-1]
            for name in names:
                yield universe, name


async def _universes(transport: Any) -> AsyncIterator[str]:
    after = ""
    while names := (await transport.call(ListUniverses(after, _PAGE, tier=Tier.IMPORTANT))).names:
        after = names[-1]
        for name in names:
            yield name
