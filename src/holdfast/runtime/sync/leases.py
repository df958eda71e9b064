"""Generated from runtime/leases.py by tools/make_twins.py; change that file instead."""

from contextlib import suppress

from holdfast.clock import Clock, SystemClock, when_moved
from holdfast.errors import LeaseHeld, LockTimeout
from holdfast.kv import Database
from holdfast.layers import leases
from holdfast.layers.leases import Grant, LeaseKey
from holdfast.runtime.locktable import LockTable
from holdfast.wire.leases import Described, Granted


class LeaseDesk:
    """Grants leases, now or after a wait."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._lines = LockTable(("lease",), nested=False)

    def acquire(self, lease: LeaseKey, *, owner: str, ttl_ms: int, wait_ms: int, txn_id: str | None = None) -> Granted:
        """The lease, once it is free and everybody who came before has had it, or `wait_ms` have passed.

        Always CRITICAL: a fence must be durable before its holder hears of it.

        Raises:
            LeaseHeld: others had it all the time.
        """
        until_ms = self._clock.now_ms() + wait_ms
        line = ["lease", "/".join(lease)]
        try:
            place = self._lines.acquire(line, timeout_seconds=0)
        except LockTimeout:
            # Others are before us. Whoever renews what they hold need not stand behind those who wait for it.
            holder, holds = self._database.read(leases.look, lease)
            if holder is not None and holds and holder.owner == owner:
                with suppress(LeaseHeld):  # It was lost just now: stand in line like everybody else.
                    return self._try(lease, owner, ttl_ms, txn_id)
            try:
                place = self._lines.acquire(line, timeout_seconds=wait_ms / 1_000)
            except LockTimeout:
                raise _held(lease, holder, self._clock.now_ms()) from None
        with place:
            try:
                return self._try(lease, owner, ttl_ms, txn_id)
            except LeaseHeld:
                if not wait_ms:
                    raise
            return self._first_in_line(lease, owner, ttl_ms, until_ms, txn_id)

    def describe(self, lease: LeaseKey) -> Described:
        """Who has the lease, and how many wait here for it."""
        last, held = self._database.read(leases.look, lease)
        # Whoever is first in line holds the line itself while waiting for the lease.
        line = self._lines.line(["lease", "/".join(lease)])
        return Described(None if last is None else leases.granted(lease.key, last), held, line)

    def _first_in_line(self, lease: LeaseKey, owner: str, ttl_ms: int, until_ms: int, txn_id: str | None) -> Granted:
        with self._database.watch(leases.record_prefix(lease)) as watch:
            stop_listening = when_moved(self._clock, watch.fire)
            try:
                while True:
                    try:
                        return self._try(lease, owner, ttl_ms, txn_id)
                    except LeaseHeld as held:
                        left_ms = until_ms - self._clock.now_ms()
                        if left_ms <= 0:
                            raise
                        watch.wait(min(left_ms, held.expires_ms - held.now_ms) / 1_000)
            finally:
                stop_listening()

    def _try(self, lease: LeaseKey, owner: str, ttl_ms: int, txn_id: str | None) -> Granted:
        grant = self._database.transact(leases.acquire, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
        return leases.granted(lease.key, grant)


def _held(lease: LeaseKey, holder: Grant | None, now_ms: int) -> LeaseHeld:
    """The lease is somebody's, or will be: there is a line for it."""
    owner, expires_ms = ("Somebody in line", now_ms) if holder is None else (holder.owner, holder.expires_ms)
    return LeaseHeld(lease.key, owner=owner, expires_ms=expires_ms, now_ms=now_ms)
