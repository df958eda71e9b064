"""Generated from runtime/earlier_requests.py by tools/make_twins.py; change that file instead."""

from fastness.kv import Database
from fastness.layers import effects, timers
from fastness.limits import TRIM_ENTRIES
from fastness.tiers import Tier


def index_requests(database: Database, universe: str) -> None:
    """Add the entries in the due index that effects of a universe miss, and the keys that its timers miss."""
    index_timers(database, universe)
    begin: bytes | None = b""
    while begin is not None:
        found = database.read(effects.earlier, universe, begin, TRIM_ENTRIES, tier=Tier.IMPORTANT)
        for start in range(0, len(found.keys), _BATCH):
            database.transact(effects.index_earlier, universe, found.keys[start : start + _BATCH])
        begin = found.begin


def index_timers(database: Database, universe: str) -> None:
    """Add the keys below their worlds that timers of a universe miss."""
    begin: bytes | None = b""
    while begin is not None:
        found = database.read(timers.earlier, universe, begin, TRIM_ENTRIES, tier=Tier.IMPORTANT)
        for start in range(0, len(found.timers), _BATCH):
            database.transact(timers.index_earlier, universe, found.timers[start : start + _BATCH])
        begin = found.begin


_BATCH = 64  # Each may be of another world, and a transaction locks the worlds that it writes to.
