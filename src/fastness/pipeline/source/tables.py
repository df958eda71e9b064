"""The tables of the data source, and the rows of those that are in the key space."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import cbor2
import pyarrow as pa

from fastness.limits import ROWS_BATCH, ROWS_BATCH_BYTES
from fastness.pipeline.codec import payload_of
from fastness.pipeline.schemas import ACTIVITY, JOURNAL, decoded
from fastness.pipeline.views import View
from fastness.pipeline.views.rows import EntityRow, MailRow, MessageRow

_UTC: Final = pa.timestamp("ms", tz="UTC")
_STRINGS: Final = pa.map_(pa.string(), pa.string())

SCHEMAS: Final[dict[str, pa.Schema]] = {
    "journal": decoded(JOURNAL),
    "activity": decoded(ACTIVITY),
    "segments": pa.schema(
        [
            ("universe", pa.string()),
            ("world", pa.string()),
            ("start", pa.int64()),
            ("last", pa.int64()),  # Inclusive.
            ("object_path", pa.string()),
            ("checksum", pa.string()),
            ("size", pa.int64()),
        ]
    ),
    "queues": pa.schema(
        [
            ("universe", pa.string()),
            ("queue", pa.string()),
            ("id", pa.string()),
            ("state", pa.string()),  # ready, leased, delayed, blocked
            ("priority", pa.int32()),
            ("group", pa.string()),
            ("created_at", _UTC),
            ("due_at", _UTC),  # The end of its lease or delay.
            ("expires_at", _UTC),
            ("attempts", pa.int32()),
            ("failures", pa.int32()),
            ("max_attempts", pa.int32()),
            ("correlation_id", pa.string()),
            ("content_type", pa.string()),
            ("attributes", _STRINGS),
            ("payload", pa.binary()),  # None: in the blob.
            ("blob", pa.string()),
            ("size", pa.int64()),
            ("last_error", pa.string()),
            ("origin", pa.string()),  # The queue that a dead letter comes from.
            ("died_at", _UTC),
        ]
    ),
    "mail": pa.schema(
        [
            ("universe", pa.string()),
            ("recipient", pa.string()),
            ("sequence", pa.int64()),
            ("id", pa.string()),
            ("sender", pa.string()),
            ("sent_at", _UTC),
            ("expires_at", _UTC),
            ("delivered", pa.bool_()),
            ("content_type", pa.string()),
            ("correlation_id", pa.string()),
            ("body", pa.binary()),
        ]
    ),
    "entities": pa.schema(
        [
            ("universe", pa.string()),
            ("kind", pa.string()),
            ("id", pa.string()),
            ("version", pa.int64()),
            ("created_at", _UTC),
            ("updated_at", _UTC),
            ("deleted", pa.bool_()),
            ("fields", pa.string()),  # JSON.
        ]
    ),
}


def batches(view: View, table: str, universe: str) -> Iterator[pa.RecordBatch]:
    """The rows of a table in the key space."""
    schema = SCHEMAS[table]
    for page in _pages(_ROWS[table](view, universe)):
        columns = [pa.array(column, field.type) for column, field in zip(zip(*page, strict=True), schema, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _pages(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows in pages of bounded count and bytes: mail bodies and entity fields may be large."""
    page: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        page.append(row)
        size += sum(len(value) for value in row if isinstance(value, bytes | str))
        if len(page) >= ROWS_BATCH or size >= ROWS_BATCH_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _segments(view: View, universe: str) -> Iterator[tuple[Any, ...]]:
    for world in view.worlds(universe):
        for each in world.segments:
            yield universe, world.name, each.start, each.end, each.object_path, each.checksum, each.size


def _queues(view: View, universe: str) -> Iterator[tuple[Any, ...]]:
    return map(_message, view.messages(universe))


def _message(row: MessageRow) -> tuple[Any, ...]:
    return (
        row.universe,
        row.queue,
        row.id,
        row.state,
        row.priority,
        row.group,
        row.created_ms,
        row.due_ms or None,
        row.ttl_at_ms or None,
        row.attempts,
        row.failures,
        row.max_attempts,
        row.correlation_id,
        row.content_type,
        list(row.attributes.items()),
        row.payload,
        row.blob,
        row.size,
        row.last_error,
        row.origin,
        row.died_ms or None,
    )


def _mail(view: View, universe: str) -> Iterator[tuple[Any, ...]]:
    return map(_letter, view.mails(universe))


def _letter(row: MailRow) -> tuple[Any, ...]:
    return (
        row.universe,
        row.recipient,
        row.sequence,
        row.id,
        row.sender,
        row.sent_ms,
        row.expires_ms,
        row.delivered,
        row.content_type,
        row.correlation_id,
        row.body,
    )


def _entities(view: View, universe: str) -> Iterator[tuple[Any, ...]]:
    return map(_entity, view.entities(universe))


def _entity(row: EntityRow) -> tuple[Any, ...]:
    fields = payload_of({name: cbor2.loads(value) for name, value in row.fields.items()})
    return row.universe, row.kind, row.id, row.version, row.created_ms, row.updated_ms, row.deleted, fields


_ROWS: Final[dict[str, Callable[[View, str], Iterator[tuple[Any, ...]]]]] = {
    "segments": _segments,
    "queues": _queues,
    "mail": _mail,
    "entities": _entities,
}
