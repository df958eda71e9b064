"""Entities: reading is a snapshot, writing goes through the store that knows the tiers."""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers import entities, field_tiers
from holdfast.layers.idempotency import Once
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


def kinds(parts: Any, request: ListKinds) -> Any:
    universe = checked_name("universe", request.universe)
    after = checked_name("kind of entity", request.after) if request.after else ""
    return parts.entities.kinds(universe, after=after, limit=request.limit, tier=request.tier)


def history(tx: Transaction, request: ReadChanges) -> Changes:
    key = field_tiers.entity_key(checked_name("universe", request.universe), request.kind, request.id)
    return Changes(entities.history(tx, key, after=request.after, limit=request.limit))


def write(parts: Any, request: WriteEntities, call: Once | None = None) -> Any:
    return parts.entities.write(request, call)


def write_in(tx: Transaction, request: WriteEntities, policy: TierPolicy) -> Written:
    """`write` as part of a larger commit, at the promise of that one; its locks are not needed, its log comes after."""
    universe = checked_name("universe", request.universe)
    parts = field_tiers.parts_of(policy, universe, request.writes)
    versions = field_tiers.write(tx, parts, request.seen, universe, tier=request.tier)
    for part in parts:
        if part.loose:
            # Refused here, where nothing is written yet, rather than when it is told of.
            record = log_format.encoded(field_tiers.loose_record(part))
            session = None if request.session is None else checked_name("session", request.session)
            tx.note(field_tiers.LOOSE, universe, session, record)
    return Written(versions, request.tier)


def put(parts: Any, request: PutEntity, call: Once | None = None) -> Any:
    return parts.entities.put(request, call)


def delete(parts: Any, request: DeleteEntity, call: Once | None = None) -> Any:
    return parts.entities.delete(request, call)
