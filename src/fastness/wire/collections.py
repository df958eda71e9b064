"""Collections: rows in the order of their keys, in partitions, changed by commits of several rows."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.names import UNIVERSE
from fastness.wire.fields import Count, Name, NameAfter, batch_of, described
from fastness.wire.requests import Operation, Request, Route

RowKey: TypeAlias = tuple[str | int, ...]  # 1 to 8 texts or integers. Integers sort after texts.
# A commit counts the bytes of partitions and keys, so it checks these.
PartitionName = Annotated[str, described(minLength=1, maxLength=limits.COLLECTION_PARTITION_BYTES_MAX)]
PartitionPrefix = Annotated[str, described(maxLength=limits.COLLECTION_PARTITION_BYTES_MAX)]
WholeRowKey = Annotated[RowKey, described(minItems=1, maxItems=limits.COLLECTION_KEY_ELEMENTS_MAX)]
RowKeyPrefix = Annotated[RowKey, described(maxItems=limits.COLLECTION_KEY_ELEMENTS_MAX)]


class Row(msgspec.Struct, frozen=True):
    """A row: its key inside its partition, its value, and its version, which grows by one with every change."""

    key: RowKey
    value: bytes
    version: int
    expires_ms: int | None = None  # When it expires; None: never.


class _Change(msgspec.Struct, frozen=True, tag_field="change", omit_defaults=True, forbid_unknown_fields=True):
    """One change of a commit."""


class PutRow(_Change, frozen=True, tag="put"):
    """Write a row.

    Args:
        if_version: the version that the row must have; 0: it must not exist.
        keep_existing: leave a row that exists as it is, which is not an error.
        ttl_seconds: how long the row exists; None: until it is deleted.
    """

    partition: PartitionName
    key: WholeRowKey
    value: bytes
    if_version: Count | None = None
    keep_existing: bool = False
    ttl_seconds: Annotated[float, Meta(ge=0.001, le=limits.COLLECTION_TTL_SECONDS_MAX)] | None = None


class DeleteRow(_Change, frozen=True, tag="delete"):
    """Delete a row, if it exists. `if_version`: the version that it must have."""

    partition: PartitionName
    key: WholeRowKey
    if_version: Count | None = None


class DeleteRows(_Change, frozen=True, tag="delete_all"):
    """Delete all rows of a partition whose keys start with `prefix`."""

    partition: PartitionName
    prefix: RowKeyPrefix = ()


RowChange: TypeAlias = PutRow | DeleteRow | DeleteRows


class RowVersions(msgspec.Struct, frozen=True):
    """The version of the row that each change left, in order; None for deletions."""

    versions: list[int | None]


class FoundRows(msgspec.Struct, frozen=True):
    """The row of each key, in order, or None where there is none."""

    rows: list[Row | None]


class RowPage(msgspec.Struct, frozen=True):
    """Rows in scan order.

    `next` is the key to pass as `after` for the next page (as `before` in reverse); None if there are no more rows.
    """

    rows: list[Row]
    next: RowKey | None = None


class PartitionPage(msgspec.Struct, frozen=True):
    """Partitions in order. `next` is what to pass as `after` for the next page; None if there are no more."""

    partitions: list[str]
    next: str | None = None


class KnownRow(msgspec.Struct, frozen=True):
    """A row and the version of it that a waiting caller knows; 0: it knows of none."""

    partition: PartitionName
    key: WholeRowKey
    version: Count = 0


class ChangedRow(msgspec.Struct, frozen=True):
    """A row that has another version than the caller knows; None if it does not exist any more."""

    partition: str
    key: RowKey
    row: Row | None


class ChangedRows(msgspec.Struct, frozen=True):
    """The rows that have changed, in the order of the request. `more`: others did not fit; ask for them again."""

    rows: list[ChangedRow]
    more: bool = False


class CollectionNames(msgspec.Struct, frozen=True):
    """Names of collections, in order."""

    names: list[str]


class CommitRows(Request[RowVersions], frozen=True, tag="collections.commit"):
    """Apply changes in their order, all or none."""

    operation = Operation(
        atomic=True,
        http=(Route("POST", "/v1/collections/{collection}/commit", "Write and delete rows in one commit."),),
    )

    collection: Name
    changes: Annotated[list[RowChange], batch_of(limits.COLLECTION_CHANGES_MAX, "changes")]
    universe: Name = UNIVERSE


class GetRows(Request[FoundRows], frozen=True, tag="collections.get"):
    operation = Operation(
        reads=True,
        http=(Route("POST", "/v1/collections/{collection}/get", "Read rows by their keys."),),
    )

    collection: Name
    partition: PartitionName
    keys: Annotated[list[RowKey], batch_of(limits.COLLECTION_ROWS_MAX, "keys", least=0)]
    universe: Name = UNIVERSE


class ScanRows(Request[RowPage], frozen=True, tag="collections.scan"):
    """Rows whose keys start with `prefix`, after the key `after` and before the key `before`."""

    operation = Operation(
        reads=True,
        http=(Route("POST", "/v1/collections/{collection}/scan", "List rows of a partition, in the order of keys."),),
    )

    collection: Name
    partition: PartitionName
    prefix: RowKeyPrefix = ()
    after: WholeRowKey | None = None
    before: WholeRowKey | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.COLLECTION_ROWS_MAX)] = 1_000
    reverse: bool = False
    universe: Name = UNIVERSE


class WaitForRows(Request[ChangedRows], frozen=True, tag="collections.wait"):
    """Wait up to `wait_seconds` until one of these rows has another version than the caller knows."""

    operation = Operation(reads=True, permission="collection:get")  # What it answers, `get` can read.

    collection: Name
    rows: Annotated[list[KnownRow], batch_of(limits.COLLECTION_ROWS_MAX, "rows")]
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.COLLECTION_WAIT_SECONDS_MAX)] = 0.0
    universe: Name = UNIVERSE


class ListPartitions(Request[PartitionPage], frozen=True, tag="collections.partitions"):
    """Partitions that start with `prefix`, after the partition `after`."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/collections/{collection}/partitions", "List the partitions with rows."),),
    )

    collection: Name
    prefix: Annotated[PartitionPrefix, Meta(description="Only partitions that start with this text.")] = ""
    after: PartitionPrefix = ""
    limit: Annotated[int, Meta(ge=1, le=limits.COLLECTION_ROWS_MAX)] = 100
    universe: Name = UNIVERSE


class ListCollections(Request[CollectionNames], frozen=True, tag="collections.list"):
    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/collections", "List the collections with rows."),)
    )

    after: NameAfter = ""
    limit: Annotated[int, Meta(ge=1, le=limits.COLLECTION_ROWS_MAX)] = 100
    universe: Name = UNIVERSE
