"""Entities: records whose fields have tiers."""

from typing import Annotated

import msgspec

from fastness import limits
from fastness.names import UNIVERSE
from fastness.tiers import Tier
from fastness.wire.canonical import check_canonical
from fastness.wire.fields import Count, Limit, LockSessionId, Name, NameAfter, SummaryLimit, batch_of
from fastness.wire.requests import Operation, Request, Route

Fields = dict[str, bytes]  # Each value as canonical CBOR.


class BestEffortValue(msgspec.Struct, frozen=True):
    """The newest BEST_EFFORT value of a field as canonical CBOR, and when a session log accepted it."""

    value: bytes
    at_ms: int


class EntityRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entity: its durable fields, and a version that grows with every change of any of them.

    `best_effort` has the newest BEST_EFFORT values, if they were asked for. An entity that has nothing else is found
    only then; its version is 0, or that of its deletion, and its times are those of these values.
    """

    kind: str
    id: str
    version: int
    fields: Fields
    created_ms: int
    updated_ms: int
    best_effort: dict[str, BestEffortValue] = msgspec.field(default_factory=dict)


class FoundEntity(msgspec.Struct, frozen=True):
    """The entity, if it exists, and its version: 0 if it never existed; a deleted entity keeps its version."""

    entity: EntityRecord | None
    version: int
    stamp: bytes = b""  # Distinguishes this version from others with the same number.


class Entities(msgspec.Struct, frozen=True):
    """Entities in the order of their ids."""

    entities: list[EntityRecord]


class Change(msgspec.Struct, frozen=True):
    """One version of an entity: the fields it set and removed, its time, and its durability."""

    version: int
    at_ms: int
    durability: Tier
    fields: Fields
    removed: list[str]
    deleted: bool


class Changes(msgspec.Struct, frozen=True):
    """Changes in the order of their versions."""

    changes: list[Change]


class EntityWrite(msgspec.Struct, frozen=True):
    """Fields to set and to remove; the others stay."""

    kind: Name
    id: Name
    fields: dict[Name, bytes] = msgspec.field(default_factory=dict)
    removed: list[str] = msgspec.field(default_factory=list)


class SeenEntity(msgspec.Struct, frozen=True):
    """A version that must still be current when the transaction commits; 0: the entity must not exist."""

    kind: Name
    id: Name
    version: Count
    stamp: bytes = b""


class Written(msgspec.Struct, frozen=True):
    """The new version of each entity, in the order of the writes (None: written to a session log only)."""

    versions: list[int | None]
    durability: Tier


class EntityKind(msgspec.Struct, frozen=True):
    """A kind of entities, and the tiers of its fields: those in the policy, and those of the first entities."""

    kind: str
    tiers: dict[str, Tier]


class EntityKinds(msgspec.Struct, frozen=True):
    """Kinds of entities, in order, and the policy's patterns for other fields."""

    kinds: list[EntityKind]
    patterns: dict[str, Tier]


class GetEntity(Request[FoundEntity], frozen=True, tag="entities.get"):
    """Read an entity; with `best_effort`, also the newest BEST_EFFORT values of its fields."""

    operation = Operation(reads=True, stale=True)

    kind: Name
    id: Name
    universe: Name = UNIVERSE
    best_effort: bool = False


class ScanEntities(Request[Entities], frozen=True, tag="entities.scan"):
    """A page of entities; with `best_effort`, also their newest BEST_EFFORT values, and entities with only such."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/entities/{kind}", "List the entities of a kind, in the order of their ids."),),
    )

    kind: Name
    after: NameAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE
    best_effort: bool = False


class ListKinds(Request[EntityKinds], frozen=True, tag="entities.kinds"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/surveys/kinds", "List the kinds of entities, with the tiers of their fields."),),
    )

    after: NameAfter = ""
    limit: SummaryLimit = 100
    universe: Name = UNIVERSE


class ReadChanges(Request[Changes], frozen=True, tag="entities.history"):
    """Changes after the version `after`; only the latest ones are kept."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/entities/{kind}/{id}/history", "Read the latest changes of an entity."),),
    )

    kind: Name
    id: Name
    after: int = 0
    limit: Limit = 100
    universe: Name = UNIVERSE


class WriteEntities(Request[Written], frozen=True, tag="entities.write"):
    """Change entities in one commit, at the strongest tier of the fields that it writes.

    BEST_EFFORT fields go to the session log once the others are committed. `tier` is not looked at: the policy decides.
    """

    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/entities/transaction", "Change several entities in one commit."),),
    )

    writes: Annotated[list[EntityWrite], batch_of(limits.ENTITY_WRITES_MAX, "entities")]
    seen: Annotated[list[SeenEntity], batch_of(limits.ENTITY_WRITES_MAX, "versions", least=0)] = msgspec.field(
        default_factory=list
    )
    session: Name | None = None
    universe: Name = UNIVERSE
    # The id of the caller's lock session: its own locks do not exclude the write, which is refused once it has ended.
    lock_session: LockSessionId | None = None

    def check(self) -> None:
        for write in self.writes:
            for value in write.fields.values():
                check_canonical(value)


class PutEntity(Request[Written], frozen=True, tag="entities.put"):
    """Replace all durable fields of an entity if its version is `expected_version`."""

    operation = Operation(stores=True)

    kind: Name
    id: Name
    fields: dict[Name, bytes]
    expected_version: int
    session: Name | None = None
    universe: Name = UNIVERSE
    # The id of the caller's lock session: its own locks do not exclude the write, which is refused once it has ended.
    lock_session: LockSessionId | None = None

    def check(self) -> None:
        for value in self.fields.values():
            check_canonical(value)


class DeleteEntity(Request[Written], frozen=True, tag="entities.delete"):
    """Delete an entity; its version continues if it is created again."""

    kind: Name
    id: Name
    expected_version: int | None = None
    universe: Name = UNIVERSE
    lock_session: LockSessionId | None = None
