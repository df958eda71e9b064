"""Generated from handles/entities.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import cbor2
import msgspec

from fastness.errors import InvalidArgument, VersionConflict
from fastness.handles.arguments import checked_map
from fastness.handles.sync.handle import Handle
from fastness.limits import ENTITY_ATTEMPTS
from fastness.names import checked_name
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.canonical import canonical
from fastness.wire.entities import (
    DeleteEntity,
    EntityKind,
    EntityRecord,
    EntityWrite,
    GetEntity,
    ListKinds,
    PutEntity,
    ReadChanges,
    ScanEntities,
    SeenEntity,
    WriteEntities,
    Written,
)
from fastness.wire.type_checks import check_argument, refused


class Entity(msgspec.Struct, frozen=True):
    """An entity: its durable fields, and a version that grows with every change of any of them.

    Read with `best_effort=True`, `fields` also has the newest BEST_EFFORT values, and `best_effort` names them, each
    with the time at which it was accepted, in milliseconds.
    """

    kind: str
    id: str
    version: int
    fields: dict[str, Any]
    created_ms: int
    updated_ms: int
    best_effort: dict[str, int] = msgspec.field(default_factory=dict)

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field, or `default`."""
        return self.fields.get(field, default)


class EntityChange(msgspec.Struct, frozen=True):
    """One version of an entity: what it changed, when, and its durability."""

    version: int
    at_ms: int
    durability: Tier
    fields: dict[str, Any]
    removed: list[str]
    deleted: bool


class Entities(Handle):
    """Entities of every kind. The plane's tier policy gives each field its tier."""

    def get(self, kind: str, id: str, *, tier: Tier = Tier.CRITICAL, best_effort: bool = False) -> Entity | None:
        """The entity, or None.

        With `best_effort`, its fields include the newest BEST_EFFORT values of the session logs, within a second of
        being written. An entity that has only such fields is then found, with version 0.
        """
        request = GetEntity(kind, id, self._universe, best_effort, tier=tier)
        found = (self._transport.call(request)).entity
        return None if found is None else _decoded(found)

    def scan(self, kind: str, *, after: str = "", limit: int = 100, best_effort: bool = False) -> list[Entity]:
        """At most `limit` entities of a kind, in the order of their ids, starting after `after`.

        `best_effort` is that of `get`.
        """
        found = self._transport.call(ScanEntities(kind, after, limit, self._universe, best_effort))
        return [_decoded(each) for each in found.entities]

    def kinds(self, *, after: str = "", limit: int = 100) -> list[EntityKind]:
        """At most `limit` kinds of entities with the tiers of their fields, in order, starting after `after`."""
        return (self._transport.call(ListKinds(after, limit, self._universe))).kinds

    def history(self, kind: str, id: str, *, after: int = 0, limit: int = 100) -> list[EntityChange]:
        """At most `limit` changes after the version `after`, in order. The latest 1,000 are kept."""
        changes = (self._transport.call(ReadChanges(kind, id, after, limit, self._universe))).changes
        return [
            EntityChange(each.version, each.at_ms, each.durability, _values(each.fields), each.removed, each.deleted)
            for each in changes
        ]

    def transaction(self, *, session: str | None = None) -> "TieredTransaction":
        """A tiered transaction: use it in a `with` block, which commits at its end, or `commit` it."""
        return TieredTransaction(self._transport, self._universe, session)

    def write(self, kind: str, id: str, fields: Mapping[str, Any], *, session: str | None = None) -> Written:
        """Set fields of one entity, each at its tier; the others stay as they are.

        Like every durable write of an entity, it waits while another caller has locked the entity, its kind or the
        database with `plane.locks`.

        Raises:
            LockTimeout: the lock was not released within 5 seconds; nothing was written.
            LockOrderViolation: waiting for the lock could deadlock with locks that the caller holds.
            Fenced: the caller is in a block of locks that it has lost; nothing was written.
        """
        write = EntityWrite(kind, id, _encoded(fields))
        return self._transport.call(
            WriteEntities([write], [], session, self._universe, self._transport.lock_sessions.find_id(self._universe))
        )

    def update(
        self,
        kind: str,
        id: str,
        change: Callable[[Entity | None], Mapping[str, Any]],
        *,
        attempts: int = ENTITY_ATTEMPTS,
    ) -> Written:
        """Set the fields that `change(entity)` returns; retried up to `attempts` times if the entity changed meanwhile.

        `change` is a plain function without side effects: it runs again for each attempt.

        Raises:
            VersionConflict: the entity changed during every attempt.
        """
        check_argument("attempts", attempts, int)
        if attempts < 1:
            raise refused("attempts", attempts, "a whole number of at least 1")
        while True:
            attempts -= 1
            found = self._transport.call(GetEntity(kind, id, self._universe, tier=Tier.IMPORTANT))
            fields = change(None if found.entity is None else _decoded(found.entity))
            write, seen = EntityWrite(kind, id, _encoded(fields)), SeenEntity(kind, id, found.version, found.stamp)
            try:
                lock_session = self._transport.lock_sessions.find_id(self._universe)
                return self._transport.call(WriteEntities([write], [seen], None, self._universe, lock_session))
            except VersionConflict:
                if not attempts:
                    raise

    def put_if_version(
        self, kind: str, id: str, fields: Mapping[str, Any], *, expected_version: int, session: str | None = None
    ) -> Written:
        """Replace all fields of the entity if it has that version (0: if it does not exist); an atomic compare-and-set.

        Raises:
            VersionConflict: it has another version.
        """
        lock_session = self._transport.lock_sessions.find_id(self._universe)
        encoded = _encoded(fields)
        request = PutEntity(kind, id, encoded, expected_version, session, self._universe, lock_session)
        return self._transport.call(request)

    def delete(self, kind: str, id: str, *, expected_version: int | None = None) -> bool:
        """Delete the entity; whether it existed. Its history stays, and its version continues if it is created again.

        Raises:
            VersionConflict: it does not have the expected version.
        """
        lock_session = self._transport.lock_sessions.find_id(self._universe)
        request = DeleteEntity(kind, id, expected_version, self._universe, lock_session)
        written = self._transport.call(request)
        return written.versions[0] is not None


class TieredTransaction:
    """Writes in one commit: CRITICAL and IMPORTANT fields together, at the stronger tier.

    The commit fails if an entity that was read with `get` has changed. BEST_EFFORT fields go to the session log
    afterwards.
    """

    def __init__(self, transport: Transport, universe: str, session: str | None) -> None:
        self._transport = transport
        self._universe = universe
        self._session = session
        self._seen: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._fields: dict[tuple[str, str], dict[str, bytes]] = {}
        self._removed: dict[tuple[str, str], dict[str, None]] = {}
        self._done = False

    def get(self, kind: str, id: str) -> Entity | None:
        """The entity; the commit fails if it changes before."""
        key = _key(kind, id)
        found = self._transport.call(GetEntity(*key, self._universe, tier=Tier.IMPORTANT))
        self._seen.setdefault(key, (found.version, found.stamp))
        return None if found.entity is None else _decoded(found.entity)

    def write(self, kind: str, id: str, field: str, value: Any) -> None:
        """Set a field when the transaction commits."""
        key = _key(kind, id)
        self._fields.setdefault(key, {})[field] = canonical(value)
        self._removed.get(key, {}).pop(field, None)

    def remove(self, kind: str, id: str, field: str) -> None:
        """Remove a field when the transaction commits."""
        key = _key(kind, id)
        self._removed.setdefault(key, {})[field] = None
        self._fields.get(key, {}).pop(field, None)

    def commit(self) -> Written | None:
        """Write everything, all or nothing; None if there was nothing to write.

        Raises:
            VersionConflict: an entity that was read has changed; start again.
        """
        if self._done:
            raise InvalidArgument("This transaction has ended; start another one")
        self._done = True
        keys = list(dict.fromkeys((*self._fields, *self._removed)))
        writes = [EntityWrite(*key, self._fields.get(key, {}), list(self._removed.get(key, ()))) for key in keys]
        if not writes:
            return None
        seen = [SeenEntity(*key, *seen) for key, seen in self._seen.items()]
        lock_session = self._transport.lock_sessions.find_id(self._universe)
        return self._transport.call(WriteEntities(writes, seen, self._session, self._universe, lock_session))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._done:
            self.commit()
        self._done = True


def _key(kind: str, id: str) -> tuple[str, str]:
    return checked_name("entity kind", kind), checked_name("entity", id)


def _encoded(fields: Mapping[str, Any]) -> dict[str, bytes]:
    return {field: canonical(value) for field, value in checked_map("fields", fields).items()}


def _decoded(record: EntityRecord) -> Entity:
    values = {field: cbor2.loads(each.value) for field, each in record.best_effort.items()}
    return Entity(
        record.kind,
        record.id,
        record.version,
        _values(record.fields) | values,
        record.created_ms,
        record.updated_ms,
        {field: each.at_ms for field, each in record.best_effort.items()},
    )


def _values(fields: Mapping[str, bytes]) -> dict[str, Any]:
    return {field: cbor2.loads(value) for field, value in fields.items()}
