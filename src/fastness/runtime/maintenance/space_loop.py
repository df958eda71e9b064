"""Periodic deletion of what is not needed any more: unreferenced blobs, and data past its retention."""

import logging
import threading
from collections.abc import Callable
from random import Random
from typing import Final

from fastness.backends.objects import ObjectStore
from fastness.errors import Closed, FastnessError
from fastness.kv import Database, Transaction
from fastness.limits import SEARCH_PAUSE_SECONDS
from fastness.runtime.activity import retention as log_retention
from fastness.runtime.maintenance import retention
from fastness.runtime.maintenance.duty import Duty
from fastness.runtime.maintenance.garbage_collection import is_collection_due
from fastness.runtime.maintenance.space_counters import SpaceCounters
from fastness.runtime.maintenance.space_options import SpaceOptions

_log = logging.getLogger("fastness.upkeep")
_STEPS: Final = {
    "_collect": "the deletion of unreferenced blobs",
    "_trim_logs": "the retention of session logs",
    "_trim_worlds": "the retention of archived worlds",
    "_trim_dead_letters": "the retention of dead letters",
    "_trim_results": "the deletion of expired results",
    "_delete_expired_rows": "the deletion of expired rows",
    "_end_lock_sessions": "the end of expired lock sessions",
    "_trim_audit": "the retention of the audit log",
}


class SpaceLoop:
    """A thread that deletes at an interval. An error is logged, and the next pass continues."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None,
        options: SpaceOptions,
        every_seconds: float,
        *,
        worlds: retention.Deleter,
        counters: SpaceCounters | None = None,
        duty: Duty | None = None,
    ) -> None:
        self._database = database
        self._objects = objects
        self._worlds = worlds
        self._options = options
        self._every_seconds = every_seconds
        self._duty = duty or Duty()
        self._counters = counters or SpaceCounters()
        self._jitter = Random()
        self._stopping = threading.Event()
        self._searched_ms: int | None = None
        self.passes = 0
        self._thread = threading.Thread(target=self._run, name="fastness-space", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; a search that is running is not finished."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        # Spread, so that the nodes of a PostgreSQL do not search all at once.
        while not self._stopping.wait(self._every_seconds * (0.9 + 0.2 * self._jitter.random())):
            if not self._duty.is_ours():
                continue
            for step in (
                self._collect,
                self._trim_logs,
                self._trim_worlds,
                self._trim_dead_letters,
                self._trim_results,
                self._delete_expired_rows,
                self._end_lock_sessions,
                self._trim_audit,
            ):
                if self._stopping.is_set() or not self._run_guarded(step):
                    return
            self.passes += 1

    def _run_guarded(self, step: Callable[[], None]) -> bool:
        """Run one step. An error does not stop the others. Whether the key space is still open."""
        try:
            with self._counters.count_failures():
                step()
        except Closed:
            return False
        except FastnessError as error:
            _log.warning("%s was interrupted; trying again later: %s", _STEPS[step.__name__], error)
        except Exception:
            _log.exception("%s was interrupted; trying again later", _STEPS[step.__name__])
        return True

    def _pause(self) -> None:
        """Let other threads run between two pages of a search; raises Closed once the loop is to end."""
        if self._stopping.wait(SEARCH_PAUSE_SECONDS):
            raise Closed("The plane is closing")

    def _trim_logs(self) -> None:
        self._counters.count_session_logs(*trim_logs(self._database, self._objects, self._options))

    def _trim_worlds(self) -> None:
        retention.trim_worlds(self._database, self._worlds, self._options)

    def _trim_dead_letters(self) -> None:
        retention.trim_dead_letters(self._database, self._options)

    def _trim_results(self) -> None:
        retention.delete_results(self._database)

    def _delete_expired_rows(self) -> None:
        retention.delete_expired_rows(self._database)

    def _end_lock_sessions(self) -> None:
        retention.end_lock_sessions(self._database)

    def _trim_audit(self) -> None:
        retention.trim_audit(self._database, self._options)

    def _collect(self) -> None:
        """Collect if anything is due, and otherwise once per grace period: worlds and states leave no marks."""
        grace_ms = self._options.grace_ms
        now_ms, is_due = self._database.read(_check_due, grace_ms)
        if not is_due and self._searched_ms is not None and now_ms - self._searched_ms < grace_ms:
            self._counters.count_nothing_due()
            return
        done = self._counters.collect(
            self._database, self._objects, self._options, grace_ms=grace_ms, between_pages=self._pause
        )
        self._searched_ms = now_ms
        if done.unsearched:
            _log.warning("no blob was deleted, because %s could not be searched", done.unsearched[0])
        elif done.deleted or done.freed:
            _log.info("%s blobs (%s bytes) and %s bodies deleted", done.deleted, done.deleted_bytes, done.freed)


def trim_logs(database: Database, objects: ObjectStore | None, options: SpaceOptions) -> tuple[int, int]:
    """Delete the session logs of all universes that are past their retention; how many files and bytes."""
    if objects is None or (options.log_keep_seconds is None and options.log_bytes_max is None):
        return 0, 0
    now_ms = database.read(_now_ms)
    deleted = deleted_bytes = 0
    for universe in log_retention.universes(objects):
        files, size = log_retention.trim(
            objects,
            universe,
            now_ms=now_ms,
            keep_seconds=options.log_keep_seconds,
            bytes_max=options.log_bytes_max,
        )
        if files:
            _log.info("%s session logs (%s bytes) of %s deleted", files, size, universe)
        deleted, deleted_bytes = deleted + files, deleted_bytes + size
    return deleted, deleted_bytes


def _check_due(tx: Transaction, grace_ms: int) -> tuple[int, bool]:
    return tx.now_ms, is_collection_due(tx, grace_ms)


def _now_ms(tx: Transaction) -> int:
    return tx.now_ms
