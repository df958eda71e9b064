"""Every universe, world and queue of a key space, a page of names per transaction."""

from collections.abc import Iterator

from fastness.kv import Database
from fastness.layers import queues, worlds
from fastness.layers.queues import QueueKey
from fastness.layers.worlds import World
from fastness.runtime.maintenance.scan import walk


def every_universe(database: Database) -> Iterator[str]:
    return walk(database, worlds.universes)


def every_world(database: Database) -> Iterator[World]:
    return (World(each, name) for each in every_universe(database) for name in walk(database, worlds.names, each))


def every_queue(database: Database) -> Iterator[QueueKey]:
    return (QueueKey(each, name) for each in every_universe(database) for name in walk(database, queues.names, each))
