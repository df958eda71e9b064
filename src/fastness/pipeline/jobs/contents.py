"""`contents`: copy what the plane holds at one moment: messages, mail, receipts, states, leases, schedules and tokens.

Each run replaces the rows of the one before. The exception is `state_changes`: it gets a row for every state document
that is new, changed or removed since the last run. A plane keeps only the latest version of a document, so versions
between two runs are not seen.

    1  state_changes    appended, and the watermark `contents` moves: two runs at once conflict, and one repeats
    2  states           replaced; if a run ends before this, the next one finds the last versions in `state_changes`
"""

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import cbor2
import pyarrow as pa

from fastness.limits import ROWS_BATCH
from fastness.pipeline import codec, ownership, redactions
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake import Lake, LakeTable, Move, files, retries
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.redactions import Redaction
from fastness.pipeline.schemas import (
    LEASES,
    QUEUED_MESSAGES,
    RECEIPTS,
    SCHEDULES,
    STATE_CHANGES,
    STATES,
    STORED_MAIL,
    TOKENS,
    Table,
)
from fastness.pipeline.views import View, shared_view
from fastness.pipeline.views.rows import StateRow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLANE: Final = "(plane)"  # The universe of rows that belong to none. It is not a valid name of one.
_WATERMARK: Final = "contents"
_COLUMNS: Final = ["key", "etag", "version", "seen_at"]
_NOTHING: Final = STATE_CHANGES.schema.empty_table().select([*_COLUMNS, "removed"])

Row = dict[str, Any]
T = TypeVar("T")


class _Known(NamedTuple):
    """The last version of a state document that the lake has."""

    etag: str
    version: int


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    payloads: bool = False,
    view: View | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Replace the tables by what the plane holds now. With `payloads`, also the content of messages and mail.

    Raises:
        AnotherHistory: the lake has the history of another plane, or of another lineage.
        InvalidArgument: earlier runs had rules of redaction, and this one has none.
        TransactionConflict: other runs committed first, too often.
    """
    del spark
    started, now = time.monotonic(), now or datetime.now(UTC)
    lake = Lake(config.lake, config.storage)
    rows: dict[str, int] = {}
    with shared_view(config, view) as opened:
        ownership.check(lake, opened)
        redactions.claim(lake, config)
        reader = _Reader(opened, now, redactions.load(config), payloads=payloads)
        sources: list[tuple[Table, Callable[[], Iterator[Row]]]] = [
            (QUEUED_MESSAGES, reader.messages),
            (STORED_MAIL, reader.mails),
            (RECEIPTS, reader.receipts),
            (LEASES, reader.leases),
            (SCHEDULES, reader.schedules),
        ]
        if not config.universes:
            sources.append((TOKENS, reader.tokens))
        for n, (table, source) in enumerate(sources, 1):
            rows[table.name] = _overwrite(lake.table(table), source(), config.universes)
            if progress is not None:
                progress("tables", n, len(sources) + 2)
        rows |= _write_states(lake, reader, config.universes, now)
    return JobResult(job="contents", ok=True, rows=rows, seconds=time.monotonic() - started)


class _Reader:
    """The rows of a view."""

    def __init__(self, view: View, now: datetime, redaction: Redaction, *, payloads: bool) -> None:
        self._view = view
        self._now = now
        self._redaction = redaction
        self._payloads = payloads

    def messages(self) -> Iterator[Row]:
        for universe in self._view.universes():
            for each in self._view.messages(universe):
                yield self._row(
                    universe,
                    queue=each.queue,
                    id=each.id,
                    state=each.state,
                    priority=each.priority,
                    group_name=each.group,
                    put_at=each.created_ms,
                    due_at=each.due_ms or None,
                    expires_at=each.ttl_at_ms or None,
                    attempts=each.attempts,
                    failures=each.failures,
                    max_attempts=each.max_attempts,
                    correlation_id=each.correlation_id,
                    content_type=each.content_type,
                    attributes=codec.payload_of(each.attributes),
                    size=each.size,
                    blob=each.blob,
                    payload=self._text(each.payload, "queued_messages", each.queue, each.origin),
                    last_error=each.last_error,
                    origin=each.origin,
                    died_at=each.died_ms or None,
                )

    def mails(self) -> Iterator[Row]:
        for universe in self._view.universes():
            for each in self._view.mails(universe):
                yield self._row(
                    universe,
                    recipient=each.recipient,
                    sequence=each.sequence,
                    id=each.id,
                    sender=each.sender,
                    sent_at=each.sent_ms,
                    expires_at=each.expires_ms,
                    delivered=each.delivered,
                    correlation_id=each.correlation_id,
                    content_type=each.content_type,
                    size=len(each.body),
                    body=self._text(each.body, "stored_mail", each.recipient),
                )

    def receipts(self) -> Iterator[Row]:
        for universe in self._view.universes():
            for each in self._view.receipts(universe):
                yield self._row(
                    universe,
                    sender=each.sender,
                    sequence=each.sequence,
                    mail_id=each.mail_id,
                    recipient=each.recipient,
                    state=each.state,
                    changed_at=each.at_ms,
                )

    def states(self) -> Iterator[StateRow]:
        for universe in self._view.universes():
            yield from self._view.states(universe)

    def state_row(self, state: StateRow, **columns: Any) -> Row:
        return self._row(
            state.universe,
            key=state.key,
            version=state.version,
            etag=state.etag,
            updated_at=state.updated_ms,
            correlation_id=state.correlation_id,
            value=self._redaction.content("states", codec.payload_of(cbor2.loads(state.value)), state.key),
            **columns,
        )

    def leases(self) -> Iterator[Row]:
        for universe in self._view.universes():
            for each in self._view.leases(universe):
                yield self._row(
                    universe,
                    key=each.key,
                    owner=each.owner,
                    fence=each.fence,
                    held=each.held,
                    acquired_at=each.acquired_ms,
                    expires_at=each.expires_ms,
                )

    def schedules(self) -> Iterator[Row]:
        for universe in self._view.universes():
            for queue, each in self._view.schedules(universe):
                yield self._row(
                    universe,
                    queue=queue,
                    name=each.name,
                    cron=each.cron,
                    timezone=each.timezone,
                    next_at=each.next_ms,
                )

    def tokens(self) -> Iterator[Row]:
        for each in self._view.tokens():
            yield self._row(
                PLANE,
                id=each.id,
                name=each.name,
                universes=each.universes,
                verbs=each.verbs,
                made_by=each.maker or None,
                created_at=each.created_ms,
                expires_at=each.expires_ms,
                revoked_at=each.revoked_ms,
                rate_per_second=each.rate_per_second,
                body_bytes_max=each.body_bytes_max,
            )

    def _row(self, universe: str, **columns: Any) -> Row:
        return {"universe": universe, "seen_at": self._now, **columns}

    def _text(self, content: bytes | None, table: str, *sources: str | None) -> str | None:
        """Content as text, if payloads were asked for: bytes that are not UTF-8 as {"$bytes": base64}."""
        if not self._payloads or content is None:
            return None
        try:
            text: str | None = content.decode()
        except UnicodeDecodeError:
            text = codec.payload_of(content)
        return self._redaction.content(table, text, *filter(None, sources))


def _write_states(lake: Lake, reader: _Reader, universes: tuple[str, ...], now: datetime) -> dict[str, int]:
    """Append the changes since the last run to `state_changes`, then replace `states`; the rows of both."""

    def write() -> tuple[int, int]:
        changes, current = lake.table(STATE_CHANGES), lake.table(STATES)
        number = changes.watermark(_WATERMARK)
        known = _known_states(changes, current, universes)
        states = files.Writer(STATES, current.location, is_sorted=False)
        changed = files.Writer(STATE_CHANGES, changes.location, is_sorted=False)
        found, total = 0, 0
        for batch in _batches(reader.states()):
            new = [each for each in batch if _key(each) not in known or known[_key(each)].etag != each.etag]
            for each in batch:
                known.pop(_key(each), None)
            _write(states, STATES, (reader.state_row(each, size=len(each.value)) for each in batch))
            _write(changed, STATE_CHANGES, (reader.state_row(each, removed=False) for each in new))
            found, total = found + len(new), total + len(batch)
        _write(changed, STATE_CHANGES, (_removed_row(key, last, now) for key, last in known.items()))
        changes.append(changed.close(), {_WATERMARK: Move(number, number + 1)})
        current.overwrite(states.close(), universes=universes or None)
        return total, found + len(known)

    total, changed = retries.retry_until_committed("state documents", write)
    return {STATES.name: total, STATE_CHANGES.name: changed}


def _known_states(changes: LakeTable, current: LakeTable, universes: tuple[str, ...]) -> dict[tuple[str, str], _Known]:
    """The last version of every document that the lake has, by universe and key.

    `states` has those of a universe, unless a run ended before it replaced that table, or the universe has none; then
    later ones are searched in the history. That may lack old versions, which were removed by their age.
    """
    known: dict[tuple[str, str], _Known] = {}
    changed_at, current_at = _last_seen(changes), _last_seen(current)
    for universe in universes or {**changed_at, **current_at}:
        history = [*current.scan(_COLUMNS, universe=universe)]
        if not (universe in current_at and current_at[universe] >= changed_at.get(universe, current_at[universe])):
            history += changes.scan([*_COLUMNS, "removed"], universe=universe)
        for row in pa.concat_tables([_NOTHING, *history], promote_options="default").sort_by("seen_at").to_pylist():
            if row["removed"]:
                known.pop((universe, row["key"]), None)
            else:
                known[universe, row["key"]] = _Known(row["etag"], row["version"])
    return known


def _last_seen(table: LakeTable) -> dict[str, datetime]:
    """The latest `seen_at` of each universe, from the statistics of the files."""
    found: dict[str, datetime] = {}
    for file in table.entries():
        found[file.universe] = max(found.get(file.universe, file.high["seen_at"]), file.high["seen_at"])
    return found


def _key(state: StateRow) -> tuple[str, str]:
    return state.universe, state.key


def _removed_row(key: tuple[str, str], last: _Known, now: datetime) -> Row:
    universe, name = key
    return {
        "universe": universe,
        "key": name,
        "version": last.version,
        "etag": last.etag,
        "removed": True,
        "seen_at": now,
    }


def _overwrite(table: LakeTable, rows: Iterator[Row], universes: tuple[str, ...]) -> int:
    """Replace the rows of a table; how many there are now."""
    writer = files.Writer(table.table, table.location, is_sorted=False)
    for batch in _batches(rows):
        _write(writer, table.table, batch)
    written: list[AddedFile] = writer.close()

    def put() -> None:
        table.refresh()
        table.overwrite(written, universes=universes or None)

    retries.retry_until_committed(f"the table {table.table.name}", put)
    return sum(file.rows for file in written)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, ROWS_BATCH)):
        yield batch


def _write(writer: files.Writer, table: Table, rows: Iterable[Row]) -> None:
    if listed := list(rows):
        writer.write(pa.RecordBatch.from_pylist(listed, table.schema))
