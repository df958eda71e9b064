"""Generated from runtime/leases.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from time import monotonic

from fastness.clock import Clock, SystemClock
from fastness.errors import LeaseHeld, LockTimeout
from fastness.kv import Database, Transaction
from fastness.layers import leases
from fastness.layers.idempotency import KeyedCall
from fastness.layers.leases import Grant, LeaseEvent, LeaseKey
from fastness.limits import LEASE_CALLERS_SHOWN
from fastness.runtime.cancellation import finish_or_undo
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.locks.table import LockTable
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.wire.leases import Described, Granted, LeaseCaller, LeaseLine, LeaseProof, LockPlace, Waits


class LeaseWaiter:
    """Grants leases, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._waits = CommitWaits(database, clock, options)
        self._lines = LockTable(("lease",), nested=False)
        self._callers: dict[int, tuple[LeaseKey, str, float]] = {}  # Those that wait: key, owner, since when.
        self._numbers = count()

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
        """The lease, granted in FIFO order within `wait_ms`.

        Always CRITICAL: a fence must be durable before its holder learns it. A repeated `call` gets the lease that it
        was granted before. A caller that is cancelled does not hold the lease.

        Raises:
            LeaseHeld: other owners held it for all of `wait_ms`.
            LeaseExpired: the lease that was granted to this call before has expired.
        """
        began_ms = self._clock.now_ms()
        attempt = partial(self._try_acquire, lease, call, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
        line = ["lease", "/".join(lease)]
        try:
            front = self._lines.acquire(line, timeout_seconds=0)
        except LockTimeout:
            # Other callers are in line. A renewal of a lease that the owner holds need not wait behind them.
            if call is not None and not call.is_new_call():
                before = self._database.transact(leases.stored_grant, lease, call)
                if before is not None:
                    return leases.wire_grant(lease.key, before)
            holder, holds = self._database.read(leases.inspect, lease)
            if holder is not None and holds and holder.owner == owner:
                with suppress(LeaseHeld):  # The lease was lost meanwhile: wait in line.
                    return attempt()
            with self._publish_outcome(lease, owner, began_ms):
                try:
                    front = self._lines.acquire(line, timeout_seconds=wait_ms / 1_000)
                except LockTimeout:
                    raise _lease_held(lease, holder, self._clock.now_ms()) from None
                with front:
                    return self._wait_at_front(lease, began_ms + wait_ms, attempt)
        with front:
            try:
                return attempt()
            except LeaseHeld as error:
                held = error
            with self._publish_outcome(lease, owner, began_ms):
                if not wait_ms:
                    raise held
                return self._wait_at_front(lease, began_ms + wait_ms, attempt)

    def describe(self, lease: LeaseKey) -> Described:
        """The holder of the lease, and how many callers wait for it in this process."""
        last, held = self._database.read(leases.inspect, lease)
        # The caller at the front holds the line itself while it waits for the lease.
        line = self._lines.line_length(["lease", "/".join(lease)])
        return Described(None if last is None else leases.wire_grant(lease.key, last), held, line)

    @contextmanager
    def _publish_outcome(self, lease: LeaseKey, owner: str, began_ms: int) -> Iterator[None]:
        """List a caller while it waits, and publish the outcome of its wait: granted, refused, or gone (cancelled)."""
        outcome = "gone"
        number = next(self._numbers)
        self._callers[number] = lease, owner, monotonic()
        try:
            yield
            outcome = "granted"
        except LeaseHeld:
            outcome = "refused"
            raise
        finally:
            del self._callers[number]
            now_ms = self._clock.now_ms()
            self._database.publish([LeaseEvent(outcome, lease, owner, now_ms - began_ms, now_ms)])

    def waits(self, universe: str, locks: Sequence[LockPlace], *, limit: int) -> Waits:
        """The lease lines of a universe in this process, with the holders and waiters of its locks."""
        lines: dict[str, list[LeaseCaller]] = {}
        now = monotonic()
        for lease, owner, since in list(self._callers.values()):
            if lease.universe == universe:
                lines.setdefault(lease.key, []).append(LeaseCaller(owner, now - since))
        longest = sorted(lines.items(), key=lambda line: line[1][0].waited_seconds, reverse=True)
        return Waits(
            [
                LeaseLine(key, len(callers), callers[0].waited_seconds, callers[:LEASE_CALLERS_SHOWN])
                for key, callers in longest[:limit]
            ],
            list(locks[:limit]),
        )

    def _wait_at_front(self, lease: LeaseKey, until_ms: int, attempt: Callable[[], Granted]) -> Granted:
        with self._waits.open(leases.watch_prefix(lease), until_ms=until_ms) as wait:
            while True:
                try:
                    return attempt()
                except LeaseHeld as held:
                    if wait.is_over:
                        raise
                    wait.pause(held.expires_ms - held.now_ms)

    def _try_acquire(
        self, lease: LeaseKey, call: KeyedCall | None, *, owner: str, ttl_ms: int, txn_id: str | None
    ) -> Granted:
        outcome = finish_or_undo(
            self._database.transact(_acquire, lease, call, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id),
            partial(self._release_undelivered, lease, call),
        )
        if isinstance(outcome, LeaseHeld):
            raise outcome
        return leases.wire_grant(lease.key, outcome[0])

    def _release_undelivered(
        self, lease: LeaseKey, call: KeyedCall | None, outcome: tuple[Grant, bool] | LeaseHeld
    ) -> None:
        """Release a grant whose caller was cancelled before it received the grant."""
        if isinstance(outcome, LeaseHeld):
            return
        grant, is_new = outcome
        proof = LeaseProof(lease.key, grant.lease_id, grant.fence, grant.txn_id, lease.universe)
        if call is None:
            self._database.transact(leases.release, proof)
        elif is_new:
            self._database.transact(leases.release_undelivered, proof, call)


def _acquire(
    tx: Transaction, lease: LeaseKey, call: KeyedCall | None, *, owner: str, ttl_ms: int, txn_id: str | None
) -> tuple[Grant, bool] | LeaseHeld:
    """The grant, and whether it is a new one. Returns LeaseHeld instead of raising it if there is a write to commit."""
    is_shortened = leases.shorten(tx, lease)
    try:
        if call is None:
            return leases.acquire(tx, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id), True
        return leases.acquire_keyed(tx, lease, call, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
    except LeaseHeld as held:
        if not is_shortened:
            raise
        return held


def _lease_held(lease: LeaseKey, holder: Grant | None, now_ms: int) -> LeaseHeld:
    """The error for a caller that did not reach the front of the line in time."""
    owner, expires_ms = ("Another caller in line", now_ms) if holder is None else (holder.owner, holder.expires_ms)
    return LeaseHeld(lease.key, owner=owner, expires_ms=expires_ms, now_ms=now_ms)
