"""Periodic compaction of all worlds. Off by default."""

import logging
import threading
from collections.abc import Iterator
from typing import Protocol

from fastness import limits
from fastness.errors import Closed, FastnessError
from fastness.kv import Database
from fastness.layers import worlds
from fastness.layers.worlds import World
from fastness.runtime.maintenance.duty import Duty
from fastness.runtime.maintenance.scan import walk
from fastness.wire.worlds import Compacted

_log = logging.getLogger("fastness.upkeep")


class Compactor(Protocol):
    """The world store, as the loop uses it."""

    def compact(self, world: World, *, entries: int, margin: int) -> Compacted: ...


class CompactionLoop:
    """A thread that compacts every world at an interval; an error in one world is logged, and the others continue."""

    def __init__(self, database: Database, store: Compactor, every_seconds: float, *, duty: Duty | None = None) -> None:
        self._database = database
        self._store = store
        self._every_seconds = every_seconds
        self._duty = duty or Duty()
        self._stopping = threading.Event()
        self.passes = 0
        self._thread = threading.Thread(target=self._run, name="fastness-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current world, then end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_seconds):
            if not self._duty.is_ours():
                continue
            try:
                for world in self._worlds():
                    if self._stopping.is_set():
                        return
                    self._compact(world)
            except Closed:
                return
            except FastnessError as error:
                _log.warning("compaction was interrupted; retrying in %s s: %s", self._every_seconds, error)
            except Exception:
                _log.exception("compaction was interrupted; retrying in %s s", self._every_seconds)
            self.passes += 1

    def _compact(self, world: World) -> None:
        try:
            done = self._store.compact(world, entries=limits.SEGMENT_ENTRIES, margin=limits.SEGMENT_MARGIN)
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

    def _worlds(self) -> Iterator[World]:
        for universe in walk(self._database, worlds.universes):
            for name in walk(self._database, worlds.names, universe):
                yield World(universe, name)
