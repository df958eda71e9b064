"""Entity writes by durability tier: durable fields are committed, BEST_EFFORT fields go to the session log."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cbor2

from fastness.errors import EmptyBatch
from fastness.kv import Event, Transaction
from fastness.layers import entities
from fastness.layers.entities import EntityKey
from fastness.tiers import Tier, TierPolicy
from fastness.wire.entities import EntityWrite, SeenEntity

LOG_KIND = "entities"  # The kind of the session log of BEST_EFFORT fields.


class BestEffortWritten(Event, frozen=True, gc=False):
    """The BEST_EFFORT fields of a write, for the session log."""

    universe: str
    session: str | None
    record: bytes


class TieredWrite(NamedTuple):
    """One entity's write, split by tier."""

    key: EntityKey
    durable: dict[str, bytes]
    removed: list[str]
    best_effort: dict[str, bytes]  # For the session log.
    tier: Tier  # The strongest tier of the fields it touches.
    best_effort_removed: Sequence[str] = ()  # For the session log.


class CriticalFieldRemoved(Exception):
    """A put at a weaker tier would remove a CRITICAL field. Repeat it as CRITICAL."""


def tiered_write(
    policy: TierPolicy, key: EntityKey, fields: Mapping[str, bytes], removed: Sequence[str] = ()
) -> TieredWrite:
    """Split a write by the tiers of its fields."""
    durable, best_effort = {}, {}
    gone: list[str] = []
    highest, classify = Tier.BEST_EFFORT, policy.classify
    for field, value in fields.items():
        entities.check_field(field)
        tier = classify(key.kind, field)
        if tier is Tier.BEST_EFFORT:
            best_effort[field] = value
        else:
            durable[field] = value
            highest = tier if highest is not Tier.CRITICAL else highest
    if not removed:
        return TieredWrite(key, durable, gone, best_effort, highest)
    best_effort_gone: list[str] = []
    for field in removed:
        tier = classify(key.kind, field)
        if tier is Tier.BEST_EFFORT:
            best_effort_gone.append(field)
        else:
            gone.append(field)
            highest = tier if highest is not Tier.CRITICAL else highest
    return TieredWrite(key, durable, gone, best_effort, highest, best_effort_gone)


def tiered_writes(policy: TierPolicy, universe: str, writes: Sequence[EntityWrite]) -> list[TieredWrite]:
    """The writes of a transaction, each split by tier.

    Raises:
        EmptyBatch: they set and remove nothing.
    """
    if not any(write.fields or write.removed for write in writes):
        raise EmptyBatch("The writes set and remove nothing; name at least one field")
    return [tiered_write(policy, EntityKey(universe, each.kind, each.id), each.fields, each.removed) for each in writes]


def write(
    tx: Transaction, parts: Sequence[TieredWrite], seen: Sequence[SeenEntity], universe: str, *, tier: Tier
) -> list[int | None]:
    """Put down the durable side of the parts; the new version of each entity, or None where it has no durable side.

    Raises:
        VersionConflict: one of `seen` has another version by now.
    """
    for each in seen:
        entities.require_version(tx, EntityKey(universe, each.kind, each.id), each.version, each.stamp)
    return [
        entities.write(tx, part.key, part.durable, part.removed, tier=tier) if part.durable or part.removed else None
        for part in parts
    ]


def put(tx: Transaction, part: TieredWrite, policy: TierPolicy, *, expected_version: int, tier: Tier) -> int:
    """Replace an entity if it has the version `expected_version`; its new version.

    Raises:
        VersionConflict: it has another one.
        CriticalFieldRemoved: it would lose a CRITICAL field at a weaker promise.
    """
    if tier is not Tier.CRITICAL:
        lost = entities.require_version(tx, part.key, expected_version).fields.keys() - part.durable.keys()
        if any(policy.classify(part.key.kind, field) is Tier.CRITICAL for field in lost):
            raise CriticalFieldRemoved
    return entities.put(tx, part.key, part.durable, expected_version=expected_version, tier=tier)


def best_effort_record(part: TieredWrite) -> dict[str, object]:
    """The session log record of a write's BEST_EFFORT fields."""
    fields = {field: cbor2.loads(value) for field, value in part.best_effort.items()}
    record: dict[str, object] = {"kind": part.key.kind, "id": part.key.id, "fields": fields}
    return record if not part.best_effort_removed else record | {"removed": list(part.best_effort_removed)}
