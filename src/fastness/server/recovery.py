"""Recovery of a server whose key space has failed, for example because the disk was full.

failed ──► one ERROR line with the cause; /readyz is 503 ──► reopen, with back-off ──► works again
                                                        └──► or exit with code 12, for a supervisor to restart it
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastness import limits
from fastness.errors import FastnessError
from fastness.kv import ReplayedPosition
from fastness.kv.contention import Contention
from fastness.plane.services import Services
from fastness.threads import run_in_thread

_log = logging.getLogger("fastness.recovery")

EXIT_FAILED: Final = 12  # The exit code of a server whose key space failed, with on_database_failure = "exit".
_POLL_SECONDS: Final = 0.2


class Recovery(Collector):
    """Watches the key space of a server, and reopens it when it has failed."""

    def __init__(self, services: Services, *, stop: Callable[[], None] | None = None) -> None:
        """With `stop`, a failure calls it once, instead of reopening the key space."""
        self.has_stopped = False
        self._services = services
        self._stop = stop
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch from now on."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> None:
        """Stop watching; an attempt to reopen is finished first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def collect(self) -> Iterator[Metric]:
        failed = "1 while the key space has failed: writes are refused until it is reopened."
        database, disk = self._services.database, self._services.disk_space
        yield GaugeMetricFamily("fastness_database_failed", failed, int(database.failure is not None))
        failures = "How often the key space has failed."
        yield CounterMetricFamily("fastness_database_failures", failures, value=self._failures)
        if database.contention is not None:
            yield from _contention(database.contention)
        if database.replayed_position is not None:
            yield from _standby(database.replayed_position)
        if disk is not None:
            yield GaugeMetricFamily("fastness_disk_free_bytes", "Free bytes of the disk.", disk.free_bytes)
            reserve = "New data is refused while fewer bytes are free."
            yield GaugeMetricFamily("fastness_disk_reserve_bytes", reserve, disk.reserve_bytes)
            low = "1 while new data is refused because the disk is nearly full."
            yield GaugeMetricFamily("fastness_disk_low", low, int(database.low_space))

    async def _watch(self) -> None:
        database = self._services.database
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            failure = database.failure
            if failure is None:
                continue
            self._failures += 1
            action = "the server reopens it" if self._stop is None else "the server stops (on_database_failure)"
            _log.error("the key space has failed and writes are refused: %s; %s", _reason(failure), action)
            if self._stop is not None:
                self.has_stopped = True
                self._stop()
                return
            await self._reopen()

    async def _reopen(self) -> None:
        pause_seconds, logged = limits.REOPEN_SECONDS_MIN, ""
        while self._services.database.failure is not None:
            try:
                # Shielded: a thread cannot be cancelled, and must end before the key space is closed.
                await asyncio.shield(run_in_thread(self._services.database.reopen))
            except Exception as error:  # Whatever it is: a server that stops trying stays broken.
                if str(error) != logged:
                    logged = str(error)
                    _log.warning(
                        "the key space cannot be reopened yet: %s", error, exc_info=not isinstance(error, FastnessError)
                    )
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, limits.REOPEN_SECONDS_MAX)
        _log.warning("the key space was reopened; writes work again")


def _reason(failure: FastnessError) -> str:
    """The failure and what caused it."""
    cause = "" if failure.__cause__ is None else f" ({failure.__cause__})"
    return f"{failure.code}: {failure}{cause}"


def _standby(replayed: ReplayedPosition) -> Iterator[Metric]:
    answers = "1 if a standby served a recent read that may be stale, 0 if the primary did."
    yield GaugeMetricFamily("fastness_standby_answers", answers, int(replayed.is_standby))
    if replayed.lag_ms is not None:
        lag = "How far the standby was behind at a recent read."
        yield GaugeMetricFamily("fastness_standby_lag_seconds", lag, replayed.lag_ms / 1_000)


def _contention(contention: Contention) -> Iterator[Metric]:
    conflicts = "Transactions that PostgreSQL aborted because of another one."
    yield CounterMetricFamily("fastness_transaction_conflicts", conflicts, value=contention.conflicts)
    retries = "Transactions that were run again."
    yield CounterMetricFamily("fastness_transaction_retries", retries, value=contention.retries)
    waits = "Calls that waited for a lock of another process."
    yield CounterMetricFamily("fastness_transaction_lock_waits", waits, value=contention.lock_waits)
