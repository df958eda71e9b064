"""Handlers of entity requests. Reads use a snapshot; writes go through the entity store, which applies the tiers.

A read with `best_effort` goes through the store, too, which adds values of the session logs.
"""

from collections.abc import Sequence

from fastness.errors import LockTimeout
from fastness.kv import Transaction
from fastness.layers import entities, field_tiers, locks
from fastness.layers.entities import EntityKey
from fastness.layers.field_tiers import TieredWrite
from fastness.layers.idempotency import KeyedCall
from fastness.layers.lock_records import LEVELS
from fastness.plane.handlers import best_effort_read, service, transaction
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.activity import format as log_format
from fastness.tiers import Tier
from fastness.wire.entities import (
    Changes,
    DeleteEntity,
    Entities,
    EntityKinds,
    FoundEntity,
    GetEntity,
    ListKinds,
    PutEntity,
    ReadChanges,
    ScanEntities,
    WriteEntities,
    Written,
)


@transaction
def get(tx: Transaction, request: GetEntity) -> FoundEntity:
    key = EntityKey(request.universe, request.kind, request.id)
    entity = entities.get(tx, key)
    return FoundEntity(None if entity.deleted else entities.record(key, entity), entity.version, entity.stamp)


@best_effort_read
def get_best_effort(stores: AnyStores, request: GetEntity) -> Served[FoundEntity]:
    return stores.entities.get(request)


@transaction
def scan(tx: Transaction, request: ScanEntities) -> Entities:
    return Entities(entities.scan(tx, request.universe, request.kind, after=request.after, limit=request.limit))


@best_effort_read
def scan_best_effort(stores: AnyStores, request: ScanEntities) -> Served[Entities]:
    return stores.entities.scan(request)


@service
def kinds(stores: AnyStores, request: ListKinds) -> Served[EntityKinds]:
    return stores.entities.kinds(request.universe, after=request.after, limit=request.limit, tier=request.tier)


@transaction
def history(tx: Transaction, request: ReadChanges) -> Changes:
    key = EntityKey(request.universe, request.kind, request.id)
    return Changes(entities.history(tx, key, after=request.after, limit=request.limit))


@service
def write(stores: AnyStores, request: WriteEntities, call: KeyedCall | None = None) -> Served[Written]:
    return stores.entities.write(request, call)


def write_in(tx: Transaction, request: WriteEntities, services: Services) -> Written:
    """`write` in a larger commit, at its tier. BEST_EFFORT fields are logged after the commit.

    It takes no locks and does not wait for those of others: the larger commit may hold up more than this write.

    Raises:
        LockTimeout: another session has locked a row, its type or the database.
        LeaseExpired: the caller's lock session has ended.
    """
    universe = request.universe
    writes = field_tiers.tiered_writes(services.policy, universe, request.writes)
    if services.shared_locks:
        _check_locks(tx, universe, writes, request.lock_session)
    versions = field_tiers.write(tx, writes, request.seen, universe, tier=request.tier)
    for part in writes:
        if part.best_effort or part.best_effort_removed:
            # Encoded here, so that an error fails the transaction and not the log write after the commit.
            record = log_format.encode_record(field_tiers.best_effort_record(part))
            session = request.session
            tx.emit(field_tiers.BestEffortWritten(universe, session, record))
    return Written(versions, request.tier)


def _check_locks(tx: Transaction, universe: str, writes: Sequence[TieredWrite], session: str | None) -> None:
    rows = [(part.key.kind, part.key.id) for part in writes if part.tier is not Tier.BEST_EFFORT]
    for found in locks.obstacles(tx, universe, rows, session=session) if rows else ():
        raise LockTimeout(
            f"{LEVELS.describe(found.key)} is locked by {found.owner} ({found.mode}), and a commit of several "
            "operations does not wait; nothing was written. Try again later, or acquire the lock first"
        )


@service
def put(stores: AnyStores, request: PutEntity, call: KeyedCall | None = None) -> Served[Written]:
    return stores.entities.put(request, call)


@service
def delete(stores: AnyStores, request: DeleteEntity, call: KeyedCall | None = None) -> Served[Written]:
    return stores.entities.delete(request, call)
