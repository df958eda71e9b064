"""Handlers of lease requests, and the fence check for transactions."""

from typing import Protocol, overload

from fastness.kv import Transaction
from fastness.layers import leases, locks
from fastness.layers.idempotency import KeyedCall
from fastness.layers.leases import LeaseKey
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.leases import (
    AcquireLease,
    BreakLease,
    CheckLease,
    Described,
    DescribeLease,
    Granted,
    KeepLease,
    LeaseProof,
    Leases,
    ListLeases,
    ListWaits,
    Released,
    ReleaseLease,
    Waits,
)
from fastness.wire.requests import Committed
from fastness.wire.transport import ProvenLock


class _OfKey(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def universe(self) -> str: ...


class Proven(Protocol):
    """A lease, as its holder has it."""

    @property
    def proof(self) -> LeaseProof: ...


class Fence:
    """Makes a transaction fail unless a lease holds: call it with the transaction, before or after the writes."""

    def __init__(self, proof: LeaseProof) -> None:
        self.proof = proof

    def __call__(self, tx: Transaction) -> int:
        """The fence, if the lease still holds.

        Raises:
            Fenced: it does not hold. Let the error end the transaction, so that nothing is written.
        """
        return leases.check(tx, self.proof).fence


class LockFence:
    """Makes a transaction fail unless locks are held: call it with the transaction, before or after the writes."""

    def __init__(self, held: ProvenLock) -> None:
        self._held = held

    def __call__(self, tx: Transaction) -> int | None:
        """The fence of the first lock, if the locks are still held; None for locks of this process.

        Raises:
            Fenced: they are not. Let the error end the transaction, so that nothing is written.
        """
        self._held.check()
        proof = self._held.proof
        return None if proof is None else locks.check(tx, proof)


@overload
def fenced(held: ProvenLock) -> LockFence: ...


@overload
def fenced(held: Proven) -> Fence: ...


def fenced(held: ProvenLock | Proven) -> LockFence | Fence:
    """A check for transactions: they commit only if `held`, a lease or locks, is still held.

    def work(tx):
        fence(tx)
        tx.put(...)

    fence = fastness.fenced(lease)
    plane.transact(work)
    """
    return Fence(held.proof) if isinstance(held.proof, LeaseProof) else LockFence(held)


@service
def acquire(stores: AnyStores, request: AcquireLease, call: KeyedCall | None = None) -> Served[Granted]:
    return stores.leases.acquire(
        _lease(request),
        owner=request.owner,
        ttl_ms=round(request.ttl_seconds * 1_000),
        wait_ms=round(request.wait_seconds * 1_000),
        txn_id=request.txn_id,
        call=call,
    )


@transaction
def keepalive(tx: Transaction, request: KeepLease) -> Granted:
    proof = request.lease
    return leases.wire_grant(proof.key, leases.keepalive(tx, proof, ttl_ms=round(request.ttl_seconds * 1_000)))


@transaction
def release(tx: Transaction, request: ReleaseLease) -> Released:
    return Released(leases.release(tx, request.lease))


@transaction
def break_lease(tx: Transaction, request: BreakLease) -> Released:
    return Released(leases.break_lease(tx, _lease(request), fence=request.fence))


@transaction
def check(tx: Transaction, request: CheckLease) -> Committed:
    leases.check(tx, request.lease)
    return Committed(request.tier)


@service
def describe(stores: AnyStores, request: DescribeLease) -> Served[Described]:
    return stores.leases.describe(_lease(request))


@transaction
def page(tx: Transaction, request: ListLeases) -> Leases:
    found = leases.page(tx, request.universe, after=request.after, limit=request.limit)
    held = [leases.wire_grant(key, grant) for key, grant in found if grant.holds_at(tx.now_ms)]
    return Leases(held, found[-1][0] if len(found) == request.limit else None)


@service
def waits(stores: AnyStores, request: ListWaits) -> Served[Waits]:
    return stores.leases.waits(request.universe, stores.services.holders(request.universe), limit=request.limit)


def _lease(request: _OfKey) -> LeaseKey:
    return LeaseKey(request.universe, request.key)
