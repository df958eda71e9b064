"""The tables of the lake. `docs/lake.md` documents them, and a test compares the two.

A table's version is stored in its metadata. A table of another version is refused, so any change of a table's columns,
partitions or order needs a new version. No column is named like a reserved word of SQL.
"""

from typing import Final

import msgspec
import pyarrow as pa

_UTC: Final = pa.timestamp("ms", tz="UTC")


def decoded(table: "Table") -> pa.Schema:
    """The columns of a table that come from the plane; redaction adds one when rows are stored."""
    return pa.schema([field for field in table.schema if field.name != "redacted"])


class Table(msgspec.Struct, frozen=True):
    """A table: its columns, the sort order of its files, and its partition columns."""

    name: str
    version: int
    schema: pa.Schema
    order: tuple[str, ...]
    folders: tuple[str, ...] = ("universe",)
    time: str | None = None  # When a row happened: retention removes rows by it. None: rows are not removed by age.


def _table(name: str, version: int, order: tuple[str, ...], /, **columns: pa.DataType) -> Table:
    schema = pa.schema([("universe", pa.string()), *columns.items()])
    return Table(name, version, schema, order, _FOLDERS.get(name, ("universe",)), _TIMES.get(name))


# Tables whose partitions are more than the universe.
_FOLDERS: Final = {"activity": ("universe", "day")}

# Append-only history, and measurements by time. Other tables are of the current state, or are computed again.
_TIMES: Final = {
    "activity": "logged_at",
    "queue_events": "changed_at",
    "entity_changes": "changed_at",
    "state_changes": "seen_at",
    "superseded": "seen_at",
    "rollup_storage": "measured_at",
    "live_queue_minutes": "minute",
}


def _percentiles(measure: str) -> dict[str, pa.DataType]:
    """Percentile columns: half of the messages took no longer than `p50`."""
    return {f"{measure}_p{percent}_ms": pa.float64() for percent in (50, 90, 99)}


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
    segment=pa.string(),  # The segment's object path; None: a hot record.
    redacted=pa.bool_(),  # `payload` and `raw` lack fields; `hash` is that of the whole record.
)

SEGMENTS: Final = _table(
    "segments",
    1,
    ("world", "start"),
    world=pa.string(),
    start=pa.int64(),
    last=pa.int64(),  # Inclusive.
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
    file=pa.string(),  # Identifies the file, rotated or not.
    n=pa.int64(),  # The line number in its file.
    logged_at=_UTC,
    day=pa.date32(),
    record=pa.string(),  # JSON.
    redacted=pa.bool_(),  # `record` lacks fields.
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
    expiries=pa.int32(),  # Leases that expired.
    redrives=pa.int32(),
    outcome=pa.string(),  # acked, dead, outlived, purged or cancelled, waiting, leased, unknown
    error=pa.string(),  # The last error of a dead letter.
    wait_ms=pa.int64(),  # From enqueue to the first lease.
    service_ms=pa.int64(),  # From the last lease to the end.
    logged=pa.bool_(),  # False: only the plane knows it.
    settled=pa.bool_(),  # Only new events can change the row; a state of the plane cannot.
    events=pa.binary(),  # Its events, MessagePack: the next roll-up adds new ones.
)

QUEUE_COUNTERS: Final = _table(
    "queue_counters",
    1,
    ("queue",),
    queue=pa.string(),
    put=pa.int64(),
    delivered=pa.int64(),
    acked=pa.int64(),
    dead_lettered=pa.int64(),
    measured_at=_UTC,
)

QUEUE_EVENTS: Final = _table(
    "queue_events",
    1,
    ("queue", "changed_at"),
    queue=pa.string(),
    id=pa.string(),
    event=pa.string(),  # put, leased, acked, nacked, deferred, expired, dead-lettered, redriven, …
    changed_at=_UTC,
    attempt=pa.int32(),  # Deliveries so far.
    correlation_id=pa.string(),  # Of a put.
    error=pa.string(),  # Of a dead letter.
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
    events=pa.binary(),  # Its events, MessagePack: the next roll-up adds new ones.
)

ENTITY_CHANGES: Final = _table(
    "entity_changes",
    1,
    ("kind", "id", "version"),
    kind=pa.string(),
    id=pa.string(),
    version=pa.int64(),
    changed_at=_UTC,
    durability=pa.string(),
    fields=pa.string(),  # JSON.
    removed=pa.list_(pa.string()),
    deleted=pa.bool_(),
    redacted=pa.bool_(),  # `fields` lacks values.
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
    folded_at=_UTC,
)

PLANES: Final = _table(
    "planes",
    1,
    ("since",),
    plane=pa.string(),  # The id of the plane; it never changes.
    lineage=pa.string(),  # The history of the plane that the universe follows, or followed.
    parent=pa.string(),  # The lineage that it was restored from.
    shared_until=_UTC,  # The time of the backup: both lineages have the history before it.
    cause=pa.string(),  # created, restored, salvaged, imported, copied
    since=_UTC,  # When the lake began to follow it.
    until=_UTC,  # When the lake followed another lineage; None: the current one.
)

SUPERSEDED: Final = _table(
    "superseded",
    1,
    ("table_name", "source", "number"),
    table_name=pa.string(),  # The table that had the row.
    source=pa.string(),  # A world, a log file or an entity.
    number=pa.int64(),  # The height, line or version.
    row=pa.string(),  # The whole row as JSON; bytes as base64.
    lineage=pa.string(),  # The lineage that the row was ingested from; None: unknown.
    superseded_by=pa.string(),  # The lineage that the lake follows instead.
    seen_at=_UTC,
)

QUARANTINE: Final = _table(
    "quarantine",
    1,
    ("table_name", "source", "start"),
    table_name=pa.string(),  # The table that lacks the rows.
    source=pa.string(),  # A world, a log file or an entity.
    start=pa.int64(),  # The first affected height, line or version.
    last=pa.int64(),  # The last one, inclusive.
    reason=pa.string(),  # A short code: missing, checksum, malformed, torn, schema, …
    detail=pa.string(),
    seen_at=_UTC,
    accepted_at=_UTC,  # When `accept` confirmed that the rows are lost; None: not yet.
)

TOMBSTONES: Final = _table(
    "tombstones",
    1,
    ("target", "name_digest"),
    target=pa.string(),  # world, kind, queue, session, or a column such as mail.sender
    name_digest=pa.string(),  # HMAC-SHA-256 of the forgotten name, hex.
    key_id=pa.string(),  # Identifies the key of the digest; None: the lake has no key.
    incarnation=pa.int64(),  # Of a world: later ones are not forgotten.
    reason=pa.string(),
    forgotten_at=_UTC,
    removed_rows=pa.string(),  # The number of removed rows by table, as JSON; None: the removal has not finished.
)

UNREACHABLE: Final = _table(
    "unreachable",
    1,
    ("hash",),
    hash=pa.string(),
    size=pa.int64(),
    place=pa.string(),  # keys: stored inline; objects: in the object store; unrecorded: an object without a record.
    since=_UTC,  # The first of the consecutive runs that found it unreachable.
    modified_at=_UTC,  # When it was stored, if the store knows.
    reclaimable=pa.bool_(),  # Old enough that no reference to it is about to be written.
    seen_at=_UTC,
)

QUEUED_MESSAGES: Final = _table(
    "queued_messages",
    1,
    ("queue", "put_at"),
    queue=pa.string(),
    id=pa.string(),
    state=pa.string(),  # ready, leased, delayed, or blocked: behind another message of its group
    priority=pa.int32(),
    group_name=pa.string(),
    put_at=_UTC,
    due_at=_UTC,  # The end of its lease or delay.
    expires_at=_UTC,
    attempts=pa.int32(),
    failures=pa.int32(),
    max_attempts=pa.int32(),
    correlation_id=pa.string(),
    content_type=pa.string(),
    attributes=pa.string(),  # JSON.
    size=pa.int64(),
    blob=pa.string(),  # The hash of its payload, if that is a blob.
    payload=pa.string(),  # Only if the run was asked for payloads.
    last_error=pa.string(),
    origin=pa.string(),  # The queue that a dead letter comes from.
    died_at=_UTC,
    seen_at=_UTC,
)

STORED_MAIL: Final = _table(
    "stored_mail",
    1,
    ("recipient", "sequence"),
    recipient=pa.string(),
    sequence=pa.int64(),
    id=pa.string(),
    sender=pa.string(),
    sent_at=_UTC,
    expires_at=_UTC,
    delivered=pa.bool_(),
    correlation_id=pa.string(),
    content_type=pa.string(),
    size=pa.int64(),
    body=pa.string(),  # Only if the run was asked for payloads.
    seen_at=_UTC,
)

RECEIPTS: Final = _table(
    "receipts",
    1,
    ("sender", "sequence"),
    sender=pa.string(),
    sequence=pa.int64(),
    mail_id=pa.string(),
    recipient=pa.string(),
    state=pa.string(),  # stored, delivered or confirmed
    changed_at=_UTC,
    seen_at=_UTC,
)

STATES: Final = _table(
    "states",
    1,
    ("key",),
    key=pa.string(),
    version=pa.int64(),
    etag=pa.string(),
    updated_at=_UTC,
    correlation_id=pa.string(),
    size=pa.int64(),
    value=pa.string(),
    seen_at=_UTC,
)

STATE_CHANGES: Final = _table(
    "state_changes",
    1,
    ("key", "seen_at"),
    key=pa.string(),
    version=pa.int64(),
    etag=pa.string(),
    updated_at=_UTC,
    correlation_id=pa.string(),
    value=pa.string(),
    removed=pa.bool_(),
    seen_at=_UTC,
)

LEASES: Final = _table(
    "leases",
    1,
    ("key",),
    key=pa.string(),
    owner=pa.string(),
    fence=pa.int64(),
    held=pa.bool_(),
    acquired_at=_UTC,
    expires_at=_UTC,
    seen_at=_UTC,
)

SCHEDULES: Final = _table(
    "schedules",
    1,
    ("queue", "name"),
    queue=pa.string(),
    name=pa.string(),
    cron=pa.string(),
    timezone=pa.string(),
    next_at=_UTC,
    seen_at=_UTC,
)

TOKENS: Final = _table(
    "tokens",
    1,
    ("id",),
    id=pa.string(),
    name=pa.string(),
    universes=pa.list_(pa.string()),
    verbs=pa.list_(pa.string()),
    made_by=pa.string(),  # The token that created it.
    created_at=_UTC,
    expires_at=_UTC,
    revoked_at=_UTC,
    rate_per_second=pa.float64(),
    body_bytes_max=pa.int64(),
    seen_at=_UTC,
)

# Rewritten by `contents`, except for STATE_CHANGES.
CONTENTS: Final = (QUEUED_MESSAGES, STORED_MAIL, RECEIPTS, STATES, STATE_CHANGES, LEASES, SCHEDULES, TOKENS)

ROLLUP_QUEUES: Final = _table(
    "rollup_queues",
    1,
    ("queue",),
    queue=pa.string(),
    backlog=pa.int64(),  # Messages in the queue when the plane was measured; None: it could not be.
    messages=pa.int64(),  # Messages in the plane's counters or in the logs, and their outcomes:
    waiting=pa.int64(),
    leased=pa.int64(),
    acked=pa.int64(),
    dead=pa.int64(),
    outlived=pa.int64(),
    purged=pa.int64(),
    unknown=pa.int64(),
    retries=pa.int64(),  # Deliveries after the first.
    redrives=pa.int64(),
    **_percentiles("wait"),
    **_percentiles("service"),
    first_at=_UTC,
    last_at=_UTC,
    logged_put=pa.int64(),  # Messages whose put is in the logs.
    logged_acked=pa.int64(),  # Messages whose acknowledgement is in the logs.
)

ROLLUP_QUEUE_HOURS: Final = _table(
    "rollup_queue_hours",
    1,
    ("queue", "hour"),
    queue=pa.string(),
    hour=_UTC,
    put=pa.int64(),
    started=pa.int64(),  # Leased for the first time.
    acked=pa.int64(),
    dead=pa.int64(),
    outlived=pa.int64(),
    retries=pa.int64(),  # Of messages that ended in this hour.
    **_percentiles("wait"),  # Of those that started in this hour.
    **_percentiles("service"),  # Of those that ended in this hour.
)

ROLLUP_ERRORS: Final = _table(
    "rollup_errors",
    1,
    ("queue", "signature"),
    queue=pa.string(),
    signature=pa.string(),  # The error without numbers, ids, hexadecimals and paths.
    letters=pa.int64(),  # Dead letters.
    first_at=_UTC,
    last_at=_UTC,
    example=pa.string(),
    example_id=pa.string(),
)

ROLLUP_MAILBOXES: Final = _table(
    "rollup_mailboxes",
    1,
    ("recipient",),
    recipient=pa.string(),
    mails=pa.int64(),
    waiting=pa.int64(),  # Including delivered ones that are not confirmed.
    confirmed=pa.int64(),
    expired=pa.int64(),
    rejected=pa.int64(),
    oldest_at=_UTC,  # When the oldest waiting mail was stored.
    **_percentiles("wait"),
)

ROLLUP_TALK: Final = _table(
    "rollup_talk",
    1,
    ("sender", "recipient"),
    sender=pa.string(),
    recipient=pa.string(),
    mails=pa.int64(),
    rejected=pa.int64(),
    first_at=_UTC,
    last_at=_UTC,
)

ROLLUP_LEASES: Final = _table(
    "rollup_leases",
    1,
    ("key", "hour"),
    key=pa.string(),
    hour=_UTC,
    contended=pa.int64(),  # Acquires that were not granted at once, and their outcomes:
    granted=pa.int64(),
    refused=pa.int64(),
    gone=pa.int64(),
    owners=pa.int64(),  # Distinct owners.
    **_percentiles("waited"),
    waited_max_ms=pa.int64(),
    waits=pa.binary(),  # The owners, and how often each duration occurred, MessagePack: for the next roll-up.
)

ROLLUP_STORAGE: Final = _table(
    "rollup_storage",
    1,
    ("day", "source", "name"),
    day=pa.date32(),  # The day of the measurement; the last one of a day is kept.
    source=pa.string(),  # plane, or lake
    name=pa.string(),  # A table of the lake; or worlds, records, segments, blobs of the plane.
    rows=pa.int64(),
    bytes=pa.int64(),
    measured_at=_UTC,
)

LIVE_QUEUE_MINUTES: Final = _table(
    "live_queue_minutes",
    1,
    ("queue", "minute"),
    queue=pa.string(),
    minute=_UTC,
    put=pa.int64(),  # Events of this minute, by kind:
    leased=pa.int64(),
    acked=pa.int64(),
    nacked=pa.int64(),
    deferred=pa.int64(),
    expired=pa.int64(),
    dead_lettered=pa.int64(),
    redriven=pa.int64(),
    outlived=pa.int64(),
    purged=pa.int64(),
    retries=pa.int64(),  # Leases after the first of their message.
    waits=pa.int64(),  # First leases, and how long their messages have waited:
    wait_sum_ms=pa.int64(),
    wait_max_ms=pa.int64(),
    late=pa.int64(),  # Events that were read after the minute was final.
    final=pa.bool_(),  # The newest event is so much later that no other one is expected.
)

ROLLUPS: Final = (
    ROLLUP_QUEUES,
    ROLLUP_QUEUE_HOURS,
    ROLLUP_ERRORS,
    ROLLUP_MAILBOXES,
    ROLLUP_TALK,
    ROLLUP_LEASES,
    ROLLUP_STORAGE,
)

TABLES: Final = {
    table.name: table
    for table in (
        JOURNAL,
        SEGMENTS,
        ACTIVITY,
        MESSAGES,
        QUEUE_COUNTERS,
        QUEUE_EVENTS,
        MAIL,
        ENTITY_CHANGES,
        WORLD_STATE,
        PLANES,
        SUPERSEDED,
        QUARANTINE,
        TOMBSTONES,
        UNREACHABLE,
        *CONTENTS,
        *ROLLUPS,
        LIVE_QUEUE_MINUTES,
    )
}
