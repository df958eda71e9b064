"""Gives the disk space of deleted pairs back while a plane is open, also when nothing more is written."""

from typing import Protocol, runtime_checkable

from fastness.limits import COMPACT_TIGHT_SECONDS
from fastness.runtime.background import Job, Steps


@runtime_checkable
class Compactable(Protocol):
    """A key space whose files keep deleted pairs until they are compacted."""

    @property
    def is_tight(self) -> bool:
        """Whether the disk has too little space, so that it is freed sooner."""

    def compact_deleted(self) -> bool:
        """Free the space of deleted pairs in one range of keys; returns whether there may be more."""


def table_compaction(database: Compactable, every_seconds: float) -> Job:
    """A job that compacts tables with many deletions at an interval, and often while the disk has little space."""
    waited_seconds, pause_seconds = 0.0, min(every_seconds, COMPACT_TIGHT_SECONDS)

    def run() -> Steps:
        nonlocal waited_seconds
        while True:
            waited_seconds += pause_seconds
            if waited_seconds >= every_seconds or database.is_tight:
                while database.compact_deleted():
                    yield 0.0
                waited_seconds = 0.0  # After an error it is tried again soon.
            yield pause_seconds

    return Job("the compaction of tables", run, thread="tables", first_seconds=pause_seconds)
