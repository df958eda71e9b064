"""Periodic compaction of all worlds. Off by default."""

import logging
from typing import Protocol

from fastness import limits
from fastness.errors import Closed, FastnessError
from fastness.kv import Database
from fastness.layers.worlds import World
from fastness.runtime.background import Job, Steps
from fastness.runtime.maintenance.every import every_world
from fastness.wire.worlds import Compacted

_log = logging.getLogger("fastness.upkeep")


class Compactor(Protocol):
    """The world store, as the job uses it."""

    def compact(self, world: World, *, entries: int, margin: int) -> Compacted: ...


def world_compaction(database: Database, store: Compactor, every_seconds: float) -> Job:
    """A job that compacts every world at an interval; an error in one world is logged, and the others continue."""

    def run() -> Steps:
        while True:
            for world in every_world(database):
                _compact(store, world)
                yield 0.0
            yield every_seconds

    return Job("the compaction of worlds", run, thread="space", first_seconds=every_seconds, only_on_duty=True)


def _compact(store: Compactor, world: World) -> None:
    try:
        done = store.compact(world, entries=limits.SEGMENT_ENTRIES, margin=limits.SEGMENT_MARGIN)
    except Closed:
        raise
    except FastnessError as error:
        _log.warning("world %s/%s could not be compacted: %s", world.universe, world.name, error)
    except Exception:  # An error in one world must not stop the compaction of the others.
        _log.exception(
            "unexpected error while compacting world %s/%s; continuing with the others", world.universe, world.name
        )
    else:
        if done.segments:
            _log.info("world %s/%s: %s segments exported", world.universe, world.name, done.segments)
