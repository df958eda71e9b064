"""Every universe, world and queue of a key space, a page of names per transaction."""

from collections.abc import Callable, Iterator
from typing import Final

from fastness.kv import Database
from fastness.layers import queues, worlds
from fastness.layers.queues import QueueKey
from fastness.layers.worlds import World
from fastness.tiers import Tier

PAGE: Final = 100


def every_universe(database: Database) -> Iterator[str]:
    after = ""
    while found := database.read(worlds.universes, after=after, limit=PAGE, tier=Tier.IMPORTANT):
        after = found[-1]
        yield from found


def every_world(database: Database) -> Iterator[World]:
    return (World(*each) for each in _names(database, worlds.names))


def every_queue(database: Database) -> Iterator[QueueKey]:
    return (QueueKey(*each) for each in _names(database, queues.names))


def _names(database: Database, read_page: Callable[..., list[str]]) -> Iterator[tuple[str, str]]:
    for universe in every_universe(database):
        after = ""
        while found := database.read(read_page, universe, after=after, limit=PAGE, tier=Tier.IMPORTANT):
            after = found[-1]
            yield from ((universe, name) for name in found)
