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
    return every_name(database, worlds.universes)


def every_world(database: Database) -> Iterator[World]:
    return (World(each, name) for each in every_universe(database) for name in every_name(database, worlds.names, each))


def every_queue(database: Database) -> Iterator[QueueKey]:
    return (
        QueueKey(each, name) for each in every_universe(database) for name in every_name(database, queues.names, each)
    )


def every_name(database: Database, read_page: Callable[..., list[str]], *of: str) -> Iterator[str]:
    """Every name that `read_page` reads: of universes, or of what a universe has."""
    after = ""
    while found := database.read(read_page, *of, after=after, limit=PAGE, tier=Tier.IMPORTANT):
        after = found[-1]
        yield from found
