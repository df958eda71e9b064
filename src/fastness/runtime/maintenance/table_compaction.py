"""Gives the disk space of deleted pairs back while a plane is open, also when nothing more is written."""

import logging
import threading
from typing import Protocol, runtime_checkable

from fastness.errors import Closed, FastnessError
from fastness.limits import COMPACT_TIGHT_SECONDS

_log = logging.getLogger("fastness.upkeep")


@runtime_checkable
class Compactable(Protocol):
    """A key space whose files keep deleted pairs until they are compacted."""

    @property
    def is_tight(self) -> bool:
        """Whether the disk has too little space, so that it is freed sooner."""

    def compact_deleted(self) -> bool:
        """Free the space of deleted pairs in one range of keys; returns whether there may be more."""


class TableCompaction:
    """A thread that compacts tables with many deletions at an interval, and often while the disk has little space.

    An error is logged, and tried again.
    """

    def __init__(self, database: Compactable, every_seconds: float) -> None:
        self._database = database
        self._every_seconds = every_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastness-tables", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current compaction, then end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        waited_seconds = 0.0
        pause_seconds = min(self._every_seconds, COMPACT_TIGHT_SECONDS)
        while not self._stopping.wait(pause_seconds):
            waited_seconds += pause_seconds
            if waited_seconds < self._every_seconds and not self._database.is_tight:
                continue
            waited_seconds = 0.0
            try:
                while self._database.compact_deleted() and not self._stopping.is_set():
                    pass
            except Closed:
                return
            except FastnessError as error:
                _log.warning("the space of deleted data could not be freed; trying again later: %s", error)
            except Exception:
                _log.exception("the space of deleted data could not be freed; trying again later")
