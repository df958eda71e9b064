"""Aggregates of queue events by minute, added batch by batch. No Spark here.

    session log lines ──► aggregate: rows of one batch ──► LiveMinutes.add: merged into the table, in one commit

Every line is in exactly one batch, and sums and maxima can be merged in any order. So the rows are exact however late a
line is read. A commit carries these watermarks, where NAME is `live/<lineage>/<number>`:

    NAME            the number of committed batches: a batch that is repeated after a crash is recognised
    NAME/offset     a digest of the last batch's offset: a checkpoint that was lost or set back is recognised
    NAME/logged_ms  the time of the newest line, which decides which minutes are final

The rows of a day are in one file, which every batch with events of that day replaces.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import Corrupt
from fastness.pipeline import events
from fastness.pipeline.lake import AddedFile, Lake, LakeFile, LakeTable, Move, files, retries
from fastness.pipeline.lifecycles import MESSAGE_EVENTS
from fastness.pipeline.schemas import LIVE_QUEUE_MINUTES
from fastness.pipeline.tombstones import Hidden

_MINUTE_MS: Final = 60_000
_MINUTE: Final = timedelta(minutes=1)
_DAY: Final = timedelta(days=1)
# As in the other tables, cancelled messages count as purged.
_EVENT_COLUMNS: Final = {event: event.replace("-", "_") for event in MESSAGE_EVENTS} | {
    "cancelled": "purged",
    "moved": "purged",
}
_COUNTS: Final = tuple(dict.fromkeys(_EVENT_COLUMNS.values()))
_SUMS: Final = (*_COUNTS, "retries", "waits", "wait_sum_ms")
_ID_CHARACTERS: Final = 36

AGGREGATES: Final = pa.schema(
    [
        ("universe", pa.string()),
        ("queue", pa.string()),
        ("minute_ms", pa.int64()),
        *((name, pa.int64()) for name in _SUMS),
        ("wait_max_ms", pa.int64()),
        ("logged_ms", pa.int64()),  # Of the newest line.
    ]
)


class Added(NamedTuple):
    """What a batch has changed."""

    rows: int = 0
    events: int = 0
    late: int = 0

    def __add__(self, other: "Added") -> "Added":  # type: ignore[override]
        return Added(*(a + b for a, b in zip(self, other, strict=True)))


def aggregate(batches: Iterable[pa.RecordBatch], hidden: Hidden) -> pa.RecordBatch:
    """The aggregates of batches of (universe, session, record, logged_at), one row for each queue and minute.

    Forgotten queues and sessions are left out.
    """
    found: dict[tuple[str, str, int], dict[str, int]] = {}
    newest_ms = 0
    for batch in batches:
        newest = pc.max(batch.column("logged_at")).as_py()
        newest_ms = max(newest_ms, 0 if newest is None else round(newest.timestamp() * 1_000))
        shown = _without_sessions(batch, hidden)
        for universe, queue, id, event, at_ms, _, attempt, _ in events.message_events(shown):
            if event not in _EVENT_COLUMNS:
                continue
            row = found.setdefault((universe, queue, at_ms // _MINUTE_MS * _MINUTE_MS), dict.fromkeys(_SUMS, 0))
            _add(row, _EVENT_COLUMNS[event])
            if event == "leased":
                _add_lease(row, attempt, at_ms, id)
    rows = [
        {"universe": universe, "queue": queue, "minute_ms": minute_ms, **row, "logged_ms": newest_ms}
        for (universe, queue, minute_ms), row in found.items()
        if not hidden.hides("queue", universe, queue)
    ]
    return pa.RecordBatch.from_pylist(rows, AGGREGATES)


def _without_sessions(batch: pa.RecordBatch, hidden: Hidden) -> pa.RecordBatch:
    """The rows that are not of forgotten sessions."""
    if not hidden.targets:
        return batch
    named = list(zip(batch.column("universe").to_pylist(), batch.column("session").to_pylist(), strict=True))
    hides = {each: hidden.hides("session", *each) for each in set(named)}
    return batch.filter(pa.array([not hides[each] for each in named], pa.bool_()))


class LiveMinutes:
    """The table `live_queue_minutes`, as one query writes it."""

    def __init__(self, lake: Lake, name: str, *, late_ms: int) -> None:
        self._lake = lake
        self._name = name
        self._late_ms = late_ms

    def committed(self) -> int:
        """The number of committed batches."""
        return self._table().watermark(self._name)

    def add(
        self, batch: int, offsets: tuple[int | None, int], rows: pa.Table, universes: Collection[str]
    ) -> Added | None:
        """Merge the aggregates of a batch into the table; None if that was done before.

        `offsets` has the digests of the batch before, if there is one, and of this batch. The first batch of a query
        replaces all rows of the `universes`.

        Raises:
            Corrupt: the batch does not follow the last committed one.
            TransactionConflict: other runs committed first, too often.
        """
        return retries.retry_until_committed(
            LIVE_QUEUE_MINUTES.name, lambda: self._add(batch, offsets, rows, universes)
        )

    def _add(
        self, batch: int, offsets: tuple[int | None, int], rows: pa.Table, universes: Collection[str]
    ) -> Added | None:
        table = self._table()
        if self._is_committed(table, batch, offsets):
            return None
        before_ms = table.watermark(f"{self._name}/logged_ms")
        newest_ms = max([before_ms, *rows.column("logged_ms").to_pylist()])
        old_final = _time(before_ms - self._late_ms)
        new = _with_late(rows, old_final)
        if batch == 0:
            old, kept = [file for file in table.entries() if file.universe in universes], list[pa.Table]()
        else:
            old = [file for file in table.entries() if _is_affected(file, new, old_final)]
            kept = [table.rows_of(file) for file in old]
        merged = _merge(pa.concat_tables([new, *kept]), _time(newest_ms - self._late_ms))
        moves = {
            self._name: Move(batch, batch + 1),
            f"{self._name}/offset": Move(table.watermark(f"{self._name}/offset"), offsets[1]),
            f"{self._name}/logged_ms": Move(before_ms, newest_ms),
        }
        table.replace(old, self._write(table, merged, new), moves)
        counted = sum(pc.sum(rows.column(name)).as_py() or 0 for name in _COUNTS)
        changed = new.group_by(["universe", "queue", "minute"]).aggregate([]).num_rows
        return Added(changed, counted, pc.sum(new.column("late")).as_py() or 0)

    def _is_committed(self, table: LakeTable, batch: int, offsets: tuple[int | None, int]) -> bool:
        committed, last = table.watermark(self._name), table.watermark(f"{self._name}/offset")
        if batch == committed and (batch == 0 or offsets[0] == last):
            return False
        if batch == committed - 1 and offsets[1] == last:
            return True
        raise Corrupt(
            f"The checkpoint of the live query does not continue the table {LIVE_QUEUE_MINUTES.name}: it is at batch "
            f"{batch}, and the table has {committed} batches. One of them was restored, edited or deleted. Aggregate "
            "all session logs again with: fastness pipeline live --rebuild"
        )

    def _write(self, table: LakeTable, rows: pa.Table, new: pa.Table) -> list[AddedFile]:
        """One file for each day that has new events or open minutes, and one for the rest."""
        days = pc.floor_temporal(rows.column("minute"), unit="day")
        new_days = pc.unique(pc.floor_temporal(new.column("minute"), unit="day"))
        open_days = pc.unique(days.filter(pc.invert(rows.column("final"))))
        current = pa.array(sorted({*new_days.to_pylist(), *open_days.to_pylist()}), days.type)
        parts = [rows.filter(pc.equal(days, day)) for day in current]
        parts.append(rows.filter(pc.invert(pc.is_in(days, current))))
        batches = (files.sorted_batches(table.table, part) for part in parts if part.num_rows)
        return [file for each in batches for file in files.write(table.table, table.location, each)]

    def _table(self) -> LakeTable:
        return self._lake.table(LIVE_QUEUE_MINUTES)


def _add(row: dict[str, int], name: str, amount: int = 1) -> None:
    row[name] += amount


def _add_lease(row: dict[str, int], attempt: int, at_ms: int, id: str) -> None:
    if attempt > 1:
        _add(row, "retries")
    put_ms = _put_ms(id) if attempt == 1 else None
    if put_ms is not None and put_ms <= at_ms:
        waited_ms = at_ms - put_ms
        _add(row, "waits")
        _add(row, "wait_sum_ms", waited_ms)
        row["wait_max_ms"] = max(row.get("wait_max_ms", 0), waited_ms)


def _put_ms(id: str) -> int | None:
    """When a message was put: its id is a UUIDv7, which starts with the time."""
    if len(id) != _ID_CHARACTERS or id[14] != "7":
        return None
    try:
        return int(id[:8] + id[9:13], 16)
    except ValueError:
        return None


def _with_late(rows: pa.Table, final_before: datetime) -> pa.Table:
    """Rows of the table, with the number of late events; those of several tasks are not merged yet."""
    minutes = pc.cast(rows.column("minute_ms"), pa.timestamp("ms", tz="UTC"))
    counted = rows.column(_COUNTS[0])
    for name in _COUNTS[1:]:
        counted = pc.add(counted, rows.column(name))
    is_late = pc.less_equal(minutes, pa.scalar(final_before - _MINUTE, minutes.type))
    columns = {
        **{name: rows.column(name) for name in ("universe", "queue", *_SUMS, "wait_max_ms")},
        "minute": minutes,
        "late": pc.if_else(is_late, counted, 0),
        "final": pa.repeat(False, rows.num_rows),
    }
    return pa.table({name: columns[name] for name in LIVE_QUEUE_MINUTES.schema.names}).cast(LIVE_QUEUE_MINUTES.schema)


def _merge(rows: pa.Table, final_before: datetime) -> pa.Table:
    sums = [*_SUMS, "late"]
    merged = rows.group_by(["universe", "queue", "minute"]).aggregate(
        [*((name, "sum") for name in sums), ("wait_max_ms", "max")]
    )
    named = merged.rename_columns([name.removesuffix("_sum").removesuffix("_max") for name in merged.column_names])
    minutes = named.column("minute")
    is_final = pc.less_equal(minutes, pa.scalar(final_before - _MINUTE, minutes.type))
    return (
        named.append_column("final", is_final).select(LIVE_QUEUE_MINUTES.schema.names).cast(LIVE_QUEUE_MINUTES.schema)
    )


def _is_affected(file: LakeFile, new: pa.Table, old_final: datetime) -> bool:
    """Whether a file has rows that were not final, or is of a day with new events."""
    low, high = _utc(file.low["minute"]), _utc(file.high["minute"])
    if high > old_final - _MINUTE:
        return True
    return any(day <= high and low < day + _DAY for day in _days(new, file.universe))


def _days(new: pa.Table, universe: str) -> Iterator[datetime]:
    """The days of the new rows of a universe."""
    minutes = new.filter(pc.equal(new.column("universe"), universe)).column("minute")
    yield from pc.unique(pc.floor_temporal(minutes, unit="day")).to_pylist()


def _utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(max(at_ms, 0) / 1_000, UTC)
