"""Counts what collections delete, and remembers how the last one went, for metrics and for people."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from fastness.backends.objects import ObjectStore
from fastness.clock import Clock, SystemClock
from fastness.errors import Closed
from fastness.kv import Database
from fastness.runtime.maintenance.garbage_collection import Search, collect, go_on
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.runtime.maintenance.space_use import uses_of
from fastness.wire.space import Collected, LastCollection, SpaceUse

BLOBS: Final = "blobs"
BODIES: Final = "bodies"
SESSION_LOGS: Final = "session logs"


class SpaceCounters:
    """The counters of one process. They start at zero with it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self.deleted: Counter[str] = Counter({BLOBS: 0, BODIES: 0, SESSION_LOGS: 0})  # By kind.
        self.deleted_bytes: Counter[str] = Counter({BLOBS: 0, SESSION_LOGS: 0})
        self.stored_bytes: dict[str, int] = {}  # By kind, as of `measured_ms`.
        self.measured_ms: int | None = None
        self.last = LastCollection()

    def collect(
        self,
        database: Database,
        objects: ObjectStore | None,
        options: SpaceOptions,
        *,
        grace_ms: int,
        dry_run: bool = False,
        between_pages: Callable[[], None] = go_on,
    ) -> Collected:
        """Collect, and count what was deleted. A dry run does not count."""

        def measure(search: Search) -> None:
            self.set_uses(uses_of(search, objects, options))

        done = collect(
            database,
            objects,
            grace_ms=grace_ms,
            dry_run=dry_run,
            searched=measure,
            between_pages=between_pages,
        )
        if not dry_run:
            self._count(done)
        return done

    @contextmanager
    def count_failures(self) -> Iterator[None]:
        """Count a collection that raises inside."""
        try:
            yield
        except Closed:  # The process ends.
            raise
        except Exception as error:
            self._fail(str(error))
            raise

    def count_nothing_due(self) -> None:
        """Count a collection that found nothing due, and searched nothing."""
        with self._lock:
            self.last = LastCollection(self._clock.now_ms(), failures=self.last.failures)

    def count_session_logs(self, files: int, size: int) -> None:
        """Count session logs that were deleted."""
        with self._lock:
            self.deleted[SESSION_LOGS] += files
            self.deleted_bytes[SESSION_LOGS] += size

    def set_uses(self, uses: list[SpaceUse]) -> None:
        """Remember how much each kind of data takes."""
        stored: Counter[str] = Counter()
        for use in uses:
            stored[use.kind] += use.bytes
        with self._lock:
            self.stored_bytes, self.measured_ms = dict(stored), self._clock.now_ms()

    def _count(self, done: Collected) -> None:
        if done.unsearched:
            self._fail(f"{done.unsearched[0]} could not be searched, so no blob was deleted")
            return
        with self._lock:
            self.deleted[BLOBS] += done.deleted
            self.deleted[BODIES] += done.freed
            self.deleted_bytes[BLOBS] += done.deleted_bytes
            if self.measured_ms is not None:
                self.stored_bytes[BLOBS] = done.kept_bytes + done.waiting_bytes
            self.last = LastCollection(self._clock.now_ms(), done, failures=self.last.failures)

    def _fail(self, error: str) -> None:
        with self._lock:
            last = self.last
            self.last = LastCollection(last.succeeded_ms, last.result, error, last.failures + 1)
