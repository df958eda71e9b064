"""Entities: versioned records, and the history of their changes.

    (u, universe, "entities", kind, id)                     ->  version, fields
    (u, universe, "entity-history", kind, id, version)      ->  the changes of that version

The version grows by one with every commit that changes any field, also across a deletion, so a version identifies one
state of an entity for ever. Values are canonical CBOR and are not decoded here.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.errors import InvalidName, ValueTooLarge, VersionConflict
from fastness.kv import Subspace, Transaction
from fastness.layers.worlds import first_elements
from fastness.limits import (
    ENTITY_BYTES_MAX,
    ENTITY_FIELDS_MAX,
    ENTITY_HISTORY_VERSIONS,
    KIND_SAMPLE,
    READ_ENTRIES_MAX,
)
from fastness.tiers import Tier
from fastness.wire.entities import Change, EntityRecord, Fields

_PAGE: Final = 64
_FIELD: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


class EntityKey(NamedTuple):
    """Identifies an entity."""

    universe: str
    kind: str
    id: str


class Entity(msgspec.Struct, frozen=True, array_like=True):
    """An entity as it is stored. A deleted one stays as an empty record, which keeps its version."""

    version: int
    fields: Fields
    created_ms: int
    updated_ms: int
    deleted: bool = False
    stamp: bytes = b""  # Distinguishes two versions with one number: a power loss may undo unsynced versions.


class _HistoryEntry(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one version."""

    at_ms: int
    tier: Tier
    fields: Fields
    removed: Sequence[str]
    deleted: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entity).decode
_decode_entry = msgspec.msgpack.Decoder(_HistoryEntry).decode
_ABSENT: Final = Entity(0, {}, 0, 0, deleted=True)


def get(tx: Transaction, key: EntityKey) -> Entity:
    """The entity; a deleted one with version 0 if it never existed."""
    stored = tx.get(_record(key))
    return _ABSENT if stored is None else _decode(stored)


def require_version(tx: Transaction, key: EntityKey, expected: int, stamp: bytes = b"") -> Entity:
    """The entity, if its version is `expected`, and its stamp is `stamp` if one is given.

    Raises:
        VersionConflict: it has another version.
    """
    current = get(tx, key)
    if current.version != expected or (stamp and current.stamp != stamp):
        raise VersionConflict(key.kind, key.id, expected=expected, actual=current.version)
    return current


def write(tx: Transaction, key: EntityKey, fields: Mapping[str, bytes], removed: Sequence[str], *, tier: Tier) -> int:
    """Set and remove fields, and keep the others; returns the new version.

    Raises:
        InvalidName, InvalidArgument, ValueTooLarge: a field name is invalid, or the entity would be too large.
    """
    current = get(tx, key)
    kept = current.fields
    if removed:
        kept = {name: value for name, value in kept.items() if name not in removed}
    entry = _HistoryEntry(tx.now_ms, tier, dict(fields), removed, deleted=False)
    return _commit(tx, key, current, {**kept, **fields}, entry)


def put(tx: Transaction, key: EntityKey, fields: Mapping[str, bytes], *, expected_version: int, tier: Tier) -> int:
    """Replace all fields if the version is `expected_version` (0 to create it); returns the new version.

    Raises:
        VersionConflict: it has another version.
    """
    current = require_version(tx, key, expected_version)
    removed = [name for name in current.fields if name not in fields]
    entry = _HistoryEntry(tx.now_ms, tier, dict(fields), removed, deleted=False)
    return _commit(tx, key, current, dict(fields), entry)


def delete(tx: Transaction, key: EntityKey, *, expected_version: int | None = None) -> int | None:
    """Delete the entity; returns the version of the deletion, or None if it did not exist.

    Raises:
        VersionConflict: it has another version than `expected_version`.
    """
    current = get(tx, key) if expected_version is None else require_version(tx, key, expected_version)
    if current.deleted:
        return None
    entry = _HistoryEntry(tx.now_ms, Tier.CRITICAL, {}, list(current.fields), deleted=True)
    return _commit(tx, key, current, {}, entry)


def scan(tx: Transaction, universe: str, kind: str, *, after: str, limit: int) -> list[EntityRecord]:
    """At most `limit` entities of a kind after the id `after`, ordered by id."""
    subspace = _subspace(universe, kind)
    begin, end = subspace.range()
    if after:
        begin = subspace.key(after) + b"\x00"
    found: list[EntityRecord] = []
    page = min(max(limit, _PAGE), READ_ENTRIES_MAX)  # Reads over deleted ones without a scan for each.
    while len(found) < limit and (pairs := tx.scan(begin, end, limit=page)):
        for stored_key, value in pairs:
            entity = _decode(value)
            if not entity.deleted and len(found) < limit:
                found.append(record(EntityKey(universe, kind, subspace.unpack(stored_key)[0]), entity))
        begin = pairs[-1][0] + b"\x00"
    return found


def kinds(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, list[str]]]:
    """At most `limit` kinds after `after`, in order, each with the field names of its first entities."""
    found = []
    for kind in first_elements(tx, Subspace("u", universe, "entities"), after, limit):
        sample = tx.scan(*_subspace(universe, kind).range(), limit=KIND_SAMPLE)
        found.append((kind, sorted({name for _, value in sample for name in _decode(value).fields})))
    return found


def history(tx: Transaction, key: EntityKey, *, after: int, limit: int) -> list[Change]:
    """At most `limit` changes after the version `after`, in order. Only the latest changes are kept."""
    subspace = _history(key)
    _, end = subspace.range()
    pairs = tx.scan(subspace.key(max(after, 0) + 1), end, limit=limit)
    changes = []
    for stored_key, value in pairs:
        entry = _decode_entry(value)
        version = subspace.unpack(stored_key)[0]
        changes.append(Change(version, entry.at_ms, entry.tier, entry.fields, list(entry.removed), entry.deleted))
    return changes


def was_changed_after(tx: Transaction, key: EntityKey, field: str, at_ms: int) -> bool:
    """Whether the field was set or removed, or the entity deleted, later than `at_ms`."""
    begin, end = _history(key).range()
    while pairs := tx.scan(begin, end, limit=_PAGE, reverse=True):
        for _, value in pairs:
            entry = _decode_entry(value)
            if entry.at_ms <= at_ms:
                return False
            if entry.deleted or field in entry.fields or field in entry.removed:
                return True
        end = pairs[-1][0]
    return False


def record(key: EntityKey, entity: Entity) -> EntityRecord:
    """The wire form of an entity."""
    return EntityRecord(key.kind, key.id, entity.version, entity.fields, entity.created_ms, entity.updated_ms)


def _commit(tx: Transaction, key: EntityKey, current: Entity, fields: Fields, entry: _HistoryEntry) -> int:
    _check_fields(fields, entry)
    version = current.version + 1
    created_ms = entry.at_ms if current.deleted else current.created_ms
    stamp = tx.new_id_bytes()
    tx.put(_record(key), _encode(Entity(version, fields, created_ms, entry.at_ms, entry.deleted, stamp)))
    changes = _history(key)
    tx.put(changes.key(version), _encode(entry))
    if version > ENTITY_HISTORY_VERSIONS:
        tx.delete(changes.key(version - ENTITY_HISTORY_VERSIONS))
    return version


def _check_fields(fields: Fields, entry: _HistoryEntry) -> None:
    for name in entry.fields:
        check_field(name)
    size = sum(map(len, fields)) + sum(map(len, fields.values()))
    if len(fields) > ENTITY_FIELDS_MAX or size > ENTITY_BYTES_MAX:
        raise ValueTooLarge(
            f"The entity would have {len(fields)} fields and {size} bytes; the maximum is {ENTITY_FIELDS_MAX} fields "
            f"and {ENTITY_BYTES_MAX} bytes. Store large values as blobs"
        )


@lru_cache(maxsize=4_096)
def check_field(name: object) -> None:
    """Check a field name.

    Raises:
        InvalidName: it is not a valid name.
    """
    if not isinstance(name, str) or not _FIELD.match(name):
        raise InvalidName(f"{name!r} is not a field name; use 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'")


@lru_cache(maxsize=4_096)
def _record(key: EntityKey) -> bytes:
    return _subspace(key.universe, key.kind).key(key.id)


@lru_cache(maxsize=1_024)
def _subspace(universe: str, kind: str) -> Subspace:
    return Subspace("u", universe, "entities", kind)


@lru_cache(maxsize=4_096)
def _history(key: EntityKey) -> Subspace:
    return Subspace("u", key.universe, "entity-history", key.kind, key.id)
