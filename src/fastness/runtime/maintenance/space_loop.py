"""Periodic deletion of what is not needed any more: unreferenced blobs, and data past its retention."""

import logging
from collections.abc import Callable
from functools import partial
from random import Random

from fastness.backends.objects import ObjectStore
from fastness.errors import Closed, FastnessError
from fastness.kv import Database, Transaction
from fastness.limits import SEARCH_PAUSE_SECONDS
from fastness.runtime.activity import retention as log_retention
from fastness.runtime.background import Job, Steps
from fastness.runtime.maintenance import retention
from fastness.runtime.maintenance.garbage_collection import is_collection_due
from fastness.runtime.maintenance.space_counters import SpaceCounters
from fastness.runtime.maintenance.space_options import SpaceOptions

_log = logging.getLogger("fastness.upkeep")


class SpaceLoop:
    """A job that deletes at an interval. An error is logged, and the next step continues."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None,
        options: SpaceOptions,
        every_seconds: float,
        *,
        worlds: retention.Deleter,
        counters: SpaceCounters | None = None,
    ) -> None:
        self._database = database
        self._objects = objects
        self._options = options
        self._every_seconds = every_seconds
        self._counters = counters or SpaceCounters()
        self._jitter = Random()
        self._searched_ms: int | None = None
        self._steps: dict[str, Callable[[], object]] = {
            "the deletion of unreferenced blobs": self._collect,
            "the retention of session logs": self._trim_logs,
            "the retention of archived worlds": partial(retention.trim_worlds, database, worlds, options),
            "the retention of dead letters": partial(retention.trim_dead_letters, database, options),
            "the deletion of expired results": partial(retention.delete_results, database),
            "the deletion of expired rows": partial(retention.delete_expired_rows, database),
            "the end of expired lock sessions": partial(retention.end_lock_sessions, database),
            "the retention of the audit log": partial(retention.trim_audit, database, options),
        }
        self.job = Job(
            "the deletion of what is not needed",
            self._run,
            thread="space",
            first_seconds=self._pause_seconds(),
            only_on_duty=True,
        )

    def _pause_seconds(self) -> float:
        """Spread, so that the nodes of a PostgreSQL do not search all at once."""
        return self._every_seconds * (0.9 + 0.2 * self._jitter.random())

    def _run(self) -> Steps:
        while True:
            for name, step in self._steps.items():
                try:
                    with self._counters.count_failures():
                        step()
                except Closed:
                    raise
                except FastnessError as error:
                    _log.warning("%s was interrupted; trying again later: %s", name, error)
                except Exception:
                    _log.exception("%s was interrupted; trying again later", name)
                yield 0.0
            yield self._pause_seconds()

    def _trim_logs(self) -> None:
        self._counters.count_session_logs(*trim_logs(self._database, self._objects, self._options))

    def _collect(self) -> None:
        """Collect if anything is due, and otherwise once per grace period: worlds and states leave no marks."""
        grace_ms = self._options.grace_ms
        now_ms, is_due = self._database.read(_check_due, grace_ms)
        if not is_due and self._searched_ms is not None and now_ms - self._searched_ms < grace_ms:
            self._counters.count_nothing_due()
            return
        done = self._counters.collect(
            self._database,
            self._objects,
            self._options,
            grace_ms=grace_ms,
            between_pages=lambda: self.job.rest(SEARCH_PAUSE_SECONDS),
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
