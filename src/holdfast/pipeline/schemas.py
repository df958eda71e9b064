"""The tables of the lake. `docs/lake.md` says the same in words, and a test compares the two.

A table's version is written into its metadata. A new column is a new version that readers of the old one understand;
anything else is a new table.
"""

from typing import Final

import msgspec
import pyarrow as pa

_UTC: Final = pa.timestamp("ms", tz="UTC")


class Table(msgspec.Struct, frozen=True):
    """A table: its columns, what its files are sorted by, and the columns that its folders are named after."""

    name: str
    version: int
    schema: pa.Schema
    order: tuple[str, ...]
    folders: tuple[str, ...] = ("universe",)


def _table(name: str, version: int, order: tuple[str, ...], /, **columns: pa.DataType) -> Table:
    return Table(name, version, pa.schema([("universe", pa.string()), *columns.items()]), order)


JOURNAL: Final = _table(
    "journal",
    1,
    ("world", "height"),
    world=pa.string(),
    height=pa.int64(),
    kind=pa.string(),  # entry, ingress, snapshot, baseline, manifest
    payload=pa.string(),  # The value as JSON; bytes as {"$bytes": base64}. None where it has no JSON form.
    raw=pa.binary(),  # The record, canonical CBOR.
    hash=pa.string(),  # SHA-256 of `raw`, hex.
    segment=pa.string(),  # The object it was read from; None: it was hot.
)

SEGMENTS: Final = _table(
    "segments",
    1,
    ("world", "start"),
    world=pa.string(),
    start=pa.int64(),
    end=pa.int64(),  # Included.
    object_path=pa.string(),
    checksum=pa.string(),
    size=pa.int64(),
    verdict=pa.string(),  # ok, missing, checksum, malformed, contradicts
    reason=pa.string(),
    seen_at=_UTC,
)

ACTIVITY: Final = _table(
    "activity",
    1,
    ("kind", "file", "n"),
    session=pa.string(),
    kind=pa.string(),
    file=pa.string(),  # Names the file wherever it is.
    n=pa.int64(),  # The place in its file.
    at=_UTC,
    day=pa.date32(),
    record=pa.string(),  # JSON.
)

MESSAGES: Final = _table(
    "messages",
    1,
    ("queue", "put_at"),
    queue=pa.string(),
    id=pa.string(),
    correlation_id=pa.string(),
    put_at=_UTC,
    first_leased_at=_UTC,
    ended_at=_UTC,
    attempts=pa.int32(),  # Deliveries.
    nacks=pa.int32(),
    expiries=pa.int32(),  # Leases that ended by themselves.
    redrives=pa.int32(),
    outcome=pa.string(),  # acked, dead, outlived, waiting, leased, unknown
    error=pa.string(),  # The last error of a dead letter that is still there.
    wait_ms=pa.int64(),  # From put to first lease.
    service_ms=pa.int64(),  # From the last lease to the end.
)

MAIL: Final = _table(
    "mail",
    1,
    ("recipient", "stored_at"),
    recipient=pa.string(),
    sender=pa.string(),
    id=pa.string(),
    stored_at=_UTC,
    delivered_at=_UTC,
    ended_at=_UTC,
    outcome=pa.string(),  # confirmed, expired, rejected, delivered, waiting
    wait_ms=pa.int64(),  # From stored to delivered.
)

ENTITY_CHANGES: Final = _table(
    "entity_changes",
    1,
    ("kind", "id", "version"),
    kind=pa.string(),
    id=pa.string(),
    version=pa.int64(),
    at=_UTC,
    durability=pa.string(),
    fields=pa.string(),  # JSON.
    removed=pa.list_(pa.string()),
    deleted=pa.bool_(),
)

WORLD_STATE: Final = _table(
    "world_state",
    1,
    ("world", "height"),
    world=pa.string(),
    height=pa.int64(),  # Every record below it is applied.
    state=pa.binary(),  # Canonical CBOR.
    digest=pa.string(),  # SHA-256 of `state`, hex.
    verdict=pa.string(),  # ok, contradicts, incomplete
    reason=pa.string(),
    at=_UTC,
)

QUARANTINE: Final = _table(
    "quarantine",
    1,
    ("table", "source", "start"),
    table=pa.string(),  # The table that lacks the rows.
    source=pa.string(),  # A world, or a log file.
    start=pa.int64(),  # The first height or line that could not be read.
    end=pa.int64(),  # The last, included.
    reason=pa.string(),  # A short code: missing, checksum, malformed, torn, schema, …
    detail=pa.string(),
    seen_at=_UTC,
)

TABLES: Final = {
    table.name: table
    for table in (JOURNAL, SEGMENTS, ACTIVITY, MESSAGES, MAIL, ENTITY_CHANGES, WORLD_STATE, QUARANTINE)
}
