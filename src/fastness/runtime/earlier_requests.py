"""Indexing of the effects and timers that an earlier version wrote.

Earlier versions wrote effects without an entry in the due index, and timers without a key below their world. Nodes of
such a version may still write them while a plane is upgraded node by node, so there is no moment after which none can
appear, and no mark that says so. What is missing is added when a plane is opened, and where nodes share one, again
every minute by the node on duty. A deletion of a world does it first, for the timers that must go with the world.
"""

from fastness.kv import Database
from fastness.layers import effects, timers
from fastness.limits import TRIM_ENTRIES
from fastness.tiers import Tier


async def index_requests_async(database: Database, universe: str) -> None:
    """Add the entries in the due index that effects of a universe miss, and the keys that its timers miss."""
    await index_timers_async(database, universe)
    begin: bytes | None = b""
    while begin is not None:
        found = await database.read_async(effects.earlier, universe, begin, TRIM_ENTRIES, tier=Tier.IMPORTANT)
        for start in range(0, len(found.keys), _BATCH):
            await database.transact_async(effects.index_earlier, universe, found.keys[start : start + _BATCH])
        begin = found.begin


async def index_timers_async(database: Database, universe: str) -> None:
    """Add the keys below their worlds that timers of a universe miss."""
    begin: bytes | None = b""
    while begin is not None:
        found = await database.read_async(timers.earlier, universe, begin, TRIM_ENTRIES, tier=Tier.IMPORTANT)
        for start in range(0, len(found.timers), _BATCH):
            await database.transact_async(timers.index_earlier, universe, found.timers[start : start + _BATCH])
        begin = found.begin


_BATCH = 64  # Each may be of another world, and a transaction locks the worlds that it writes to.
