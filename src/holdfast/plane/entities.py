"""Entities: reading is a snapshot, writing goes through the store that knows the tiers."""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers import entities, field_tiers
from holdfast.layers.idempotency import KeyedCall
from holdfast.names import checked_name
from holdfast.runtime.activity import format as log_format
from holdfast.tiers import TierPolicy
from holdfast.wire.entities import (
    Changes,
    DeleteEntity,
    Entities,
    FoundEntity,
    GetEntity,
    ListKinds,
    PutEntity,
    ReadChanges,
    ScanEntities,
    WriteEntities,
    Written,
)


def get(tx: Transaction, request: GetEntity) -> FoundEntity:
    key = field_tiers.entity_key(checked_name("universe", request.universe), request.kind, request.id)
    entity = entities.get(tx, key)
    return FoundEntity(None if entity.deleted else entities.record(key, entity), entity.version, entity.stamp)


def scan(tx: Transaction, request: ScanEntities) -> Entities:
    universe, kind = checked_name("universe", request.universe), checked_name("kind of entity", request.kind)
    after = checked_name("entity", request.after) if request.after else ""
    return Entities(entities.scan(tx, universe, kind, after=after, limit=request.limit))


def kinds(services: Any, request: ListKinds) -> Any:
    universe = checked_name("universe", request.universe)
    after = checked_name("kind of entity", request.after) if request.after else ""
    return services.entities.kinds(universe, after=after, limit=request.limit, tier=request.tier)


def history(tx: Transaction, request: ReadChanges) -> Changes:
    key = field_tiers.entity_key(checked_name("universe", request.universe), request.kind, request.id)
    return Changes(entities.history(tx, key, after=request.after, limit=request.limit))


def write(services: Any, request: WriteEntities, call: KeyedCall | None = None) -> Any:
    return services.entities.write(request, call)


def write_in(tx: Transaction, request: WriteEntities, policy: TierPolicy) -> Written:
    """`write` as part of a larger commit, at the promise of that one; its locks are not needed, its log comes after."""
    universe = checked_name("universe", request.universe)
    services = field_tiers.parts_of(policy, universe, request.writes)
    versions = field_tiers.write(tx, services, request.seen, universe, tier=request.tier)
    for part in services:
        if part.loose:
            # Refused here, where nothing is written yet, rather than when it is told of.
            record = log_format.encoded(field_tiers.loose_record(part))
            session = None if request.session is None else checked_name("session", request.session)
            tx.emit(field_tiers.LOOSE, universe, session, record)
    return Written(versions, request.tier)


def put(services: Any, request: PutEntity, call: KeyedCall | None = None) -> Any:
    return services.entities.put(request, call)


def delete(services: Any, request: DeleteEntity, call: KeyedCall | None = None) -> Any:
    return services.entities.delete(request, call)
