"""Generated from runtime/leases.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from holdfast.clock import Clock, SystemClock, when_moved
from holdfast.errors import LeaseHeld, LockTimeout
from holdfast.kv import Database, Transaction
from holdfast.layers import leases
from holdfast.layers.idempotency import KeyedCall
from holdfast.layers.leases import LEASE_EVENTS, Grant, LeaseKey
from holdfast.runtime.cancellation import finish_or_undo
from holdfast.runtime.locks.table import HolderInfo, LockTable
from holdfast.runtime.sync.dispatcher import Publish
from holdfast.wire.leases import Described, Granted, LeaseLine, LeaseProof, LockPlace, Waits


class LeaseWaiter:
    """Grants leases, now or after a wait."""

    def __init__(self, database: Database, clock: Clock | None = None, publish: Publish | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._publish = publish
        self._lines = LockTable(("lease",), nested=False)

    def acquire(
        self,
        lease: LeaseKey,
        *,
        owner: str,
        ttl_ms: int,
        wait_ms: int,
        txn_id: str | None = None,
        call: KeyedCall | None = None,
    ) -> Granted:
        """The lease, once it is free and everybody who came before has had it, or `wait_ms` have passed.

        Always CRITICAL: a fence must be durable before its holder hears of it. A `call` that was granted the lease
        before has it still. Whoever is cancelled has not acquired it.

        Raises:
            LeaseHeld: others had it all the time.
            LeaseExpired: the call was granted it before, and that has ended.
        """
        began_ms = self._clock.now_ms()
        attempt = partial(self._try, lease, call, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
        line = ["lease", "/".join(lease)]
        try:
            place = self._lines.acquire(line, timeout_seconds=0)
        except LockTimeout:
            # Others are before us. Whoever renews what they hold need not stand behind those who wait for it.
            if call is not None and not call.fresh():
                before = self._database.transact(leases.granted_before, lease, call)
                if before is not None:
                    return leases.granted(lease.key, before)
            holder, holds = self._database.read(leases.look, lease)
            if holder is not None and holds and holder.owner == owner:
                with suppress(LeaseHeld):  # It was lost just now: stand in line like everybody else.
                    return attempt()
            with self._told(lease, owner, began_ms):
                try:
                    place = self._lines.acquire(line, timeout_seconds=wait_ms / 1_000)
                except LockTimeout:
                    raise _held(lease, holder, self._clock.now_ms()) from None
                with place:
                    return self._first_in_line(lease, began_ms + wait_ms, attempt)
        with place:
            try:
                return attempt()
            except LeaseHeld as error:
                held = error
            with self._told(lease, owner, began_ms):
                if not wait_ms:
                    raise held
                return self._first_in_line(lease, began_ms + wait_ms, attempt)

    def describe(self, lease: LeaseKey) -> Described:
        """Who has the lease, and how many wait here for it."""
        last, held = self._database.read(leases.look, lease)
        # Whoever is first in line holds the line itself while waiting for the lease.
        line = self._lines.line(["lease", "/".join(lease)])
        return Described(None if last is None else leases.granted(lease.key, last), held, line)

    @contextmanager
    def _told(self, lease: LeaseKey, owner: str, began_ms: int) -> Iterator[None]:
        """Tell of somebody who did not get a lease at once, when it is known how that ends."""
        outcome = "gone"
        try:
            yield
            outcome = "granted"
        except LeaseHeld:
            outcome = "refused"
            raise
        finally:
            if self._publish is not None:
                now_ms = self._clock.now_ms()
                self._publish([(LEASE_EVENTS + outcome, lease, owner, now_ms - began_ms, now_ms)])

    def waits(self, universe: str, locks: Sequence[HolderInfo], *, limit: int) -> Waits:
        """Who waits for leases of a universe here, beside who holds and waits for its locks."""
        lines: dict[str, list[float]] = {}
        for place in self._lines.holders():
            of, _, key = place.path[-1].partition("/")
            if of == universe:
                # Whoever is first in line holds the line itself while waiting for the lease.
                lines.setdefault(key, []).append(place.held_seconds or place.waiting_seconds or 0.0)
        longest = sorted(lines.items(), key=lambda line: max(line[1]), reverse=True)
        return Waits(
            [LeaseLine(key, len(waited), max(waited)) for key, waited in longest[:limit]],
            [
                LockPlace(list(each.path), str(each.mode), each.owner, each.held_seconds, each.waiting_seconds)
                for each in locks[:limit]
            ],
        )

    def _first_in_line(self, lease: LeaseKey, until_ms: int, attempt: Callable[[], Any]) -> Granted:
        with self._database.watch(leases.record_prefix(lease)) as watch:
            stop_listening = when_moved(self._clock, watch.fire)
            try:
                while True:
                    try:
                        granted: Granted = attempt()
                        return granted
                    except LeaseHeld as held:
                        left_ms = until_ms - self._clock.now_ms()
                        if left_ms <= 0:
                            raise
                        watch.wait(min(left_ms, held.expires_ms - held.now_ms) / 1_000)
            finally:
                stop_listening()

    def _try(self, lease: LeaseKey, call: KeyedCall | None, **wishes: Any) -> Granted:
        grant, _ = finish_or_undo(
            self._database.transact(_acquire, lease, call, **wishes), partial(self._give_back, lease, call)
        )
        return leases.granted(lease.key, grant)

    def _give_back(self, lease: LeaseKey, call: KeyedCall | None, outcome: tuple[Grant, bool]) -> None:
        """Nobody has heard of this grant, and nobody will."""
        grant, is_new = outcome
        proof = LeaseProof(lease.key, grant.lease_id, grant.fence, grant.txn_id, lease.universe)
        if call is None:
            self._database.transact(leases.release, proof)
        elif is_new:
            self._database.transact(leases.release_once, proof, call)


def _acquire(tx: Transaction, lease: LeaseKey, call: KeyedCall | None, **wishes: Any) -> tuple[Grant, bool]:
    if call is None:
        return leases.acquire(tx, lease, **wishes), True
    return leases.acquire_once(tx, lease, call, **wishes)


def _held(lease: LeaseKey, holder: Grant | None, now_ms: int) -> LeaseHeld:
    """The lease is somebody's, or will be: there is a line for it."""
    owner, expires_ms = ("Somebody in line", now_ms) if holder is None else (holder.owner, holder.expires_ms)
    return LeaseHeld(lease.key, owner=owner, expires_ms=expires_ms, now_ms=now_ms)
