"""Which part of a write is durable: entities taken apart by the tiers of their fields, and put down in one commit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cbor2

from holdfast.errors import BatchTooLarge, EmptyBatch
from holdfast.kv import Transaction
from holdfast.layers import entities
from holdfast.layers.entities import EntityKey
from holdfast.limits import ENTITY_WRITES_MAX
from holdfast.names import checked_name
from holdfast.tiers import Tier, TierPolicy
from holdfast.wire.entities import EntityWrite, SeenEntity

LOOSE = "loose"  # The note of BEST_EFFORT fields, for the session log.
LOG_KIND = "entities"  # What that log is called.


class Part(NamedTuple):
    """What one write asks of an entity, apart by tier."""

    key: EntityKey
    durable: dict[str, bytes]
    removed: list[str]
    loose: dict[str, bytes]  # BEST_EFFORT: for the session log.
    tier: Tier  # The strongest of what it touches.


class CriticalFieldRemoved(Exception):
    """A put at a weaker promise would remove a CRITICAL field: it must be made again, as CRITICAL."""


def part_of(policy: TierPolicy, key: EntityKey, fields: Mapping[str, bytes], removed: Iterable[str] = ()) -> Part:
    """A write, apart by tier."""
    durable, loose, gone = {}, {}, []
    highest, classify = Tier.BEST_EFFORT, policy.classify
    for field, value in fields.items():
        entities.check_field(field)
        tier = classify(key.kind, field)
        if tier is Tier.BEST_EFFORT:
            loose[field] = value
        else:
            durable[field] = value
            highest = tier if highest is not Tier.CRITICAL else highest
    for field in removed:
        tier = classify(key.kind, field)
        if tier is not Tier.BEST_EFFORT:
            gone.append(field)
            highest = tier if highest is not Tier.CRITICAL else highest
    return Part(key, durable, gone, loose, highest)


def parts_of(policy: TierPolicy, universe: str, writes: Sequence[EntityWrite]) -> list[Part]:
    """The writes of a transaction, apart by tier.

    Raises:
        EmptyBatch, BatchTooLarge: there are none, or more than one transaction may have.
    """
    if not writes:
        raise EmptyBatch("There is nothing to write; an empty transaction is a mistake of its caller")
    if len(writes) > ENTITY_WRITES_MAX:
        raise BatchTooLarge(f"A transaction changes at most {ENTITY_WRITES_MAX} entities, not {len(writes)}; split it")
    if not any(write.fields or write.removed for write in writes):
        raise EmptyBatch("The writes set and remove nothing; name at least one field")
    return [part_of(policy, entity_key(universe, each.kind, each.id), each.fields, each.removed) for each in writes]


def write(
    tx: Transaction, parts: Sequence[Part], seen: Sequence[SeenEntity], universe: str, *, tier: Tier
) -> list[int | None]:
    """Put down the durable side of the parts; the new version of each entity, or None where it has no durable side.

    Raises:
        VersionConflict: one of `seen` has another version by now.
    """
    if len(seen) > ENTITY_WRITES_MAX:
        raise BatchTooLarge(f"A transaction looks at {ENTITY_WRITES_MAX} versions at most, not {len(seen)}; split it")
    for each in seen:
        entities.require_version(tx, entity_key(universe, each.kind, each.id), each.version, each.stamp)
    return [
        entities.write(tx, part.key, part.durable, part.removed, tier=tier) if part.durable or part.removed else None
        for part in parts
    ]


def put(tx: Transaction, part: Part, policy: TierPolicy, *, expected_version: int, tier: Tier) -> int:
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


def loose_record(part: Part) -> dict[str, Any]:
    """What the session log says of the BEST_EFFORT side of a write."""
    fields = {field: cbor2.loads(value) for field, value in part.loose.items()}
    return {"kind": part.key.kind, "id": part.key.id, "fields": fields}


def entity_key(universe: str, kind: str, id: str) -> EntityKey:
    """Which entity, by names as people wrote them."""
    return EntityKey(universe, checked_name("kind of entity", kind), checked_name("entity", id))
