"""Adds new events to the rows of `messages`, `mail` and `rollup_leases`. No Spark here.

    new events ──┐
    rows ────────┴──► rows of the messages that changed ──► new files, which replace those that had these messages

Each row has what is needed to add events to it. Only the files with a changed row are written again. Messages whose
row depends on the state of the plane are in files of their own, as they are compared with every new measurement.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.limits import ROLLUP_FILE_ROWS, ROLLUP_SMALL_FILE_ROWS, ROLLUP_SMALL_FILES, ROWS_BATCH
from fastness.pipeline import events, lifecycles
from fastness.pipeline.jobs.aggregates import PERCENTS, percentiles
from fastness.pipeline.lake import AddedFile, LakeFile, LakeTable, files
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.lifecycles import MailGroup, Measured, PresentMessage
from fastness.pipeline.schemas import ACTIVITY, MAIL, MESSAGES, QUEUE_EVENTS, ROLLUP_LEASES, Table

_HOUR_MS: Final = 3_600_000
_SETTLED: Final = "settled"

# The tables that are folded from the events of a source.
FOLDED_FROM: Final = {ACTIVITY.name: (MESSAGES, MAIL, ROLLUP_LEASES), QUEUE_EVENTS.name: (MESSAGES,)}


class Fold(Protocol):
    """New events of one universe, and how rows are made of them."""

    @property
    def table(self) -> Table: ...

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of a key without the universe. The last one has the most values."""

    def add_records(self, batch: pa.RecordBatch) -> None:
        """Add the events in (universe, record) of session logs."""

    def keep(self, old: pa.Table, before_ms: int) -> None:
        """Add what rows have from before a time: its events are no longer in the sources. Called after all others."""

    def touched(self) -> Collection[tuple[Any, ...]]:
        """The keys whose rows may change."""

    def rows(self, old: Sequence[pa.Table]) -> list[pa.Table]:
        """The new rows in place of each table of old ones, and last those that replace none."""


def folded_watermark(source: str, universe: str) -> str:
    """The watermark with the version, plus one, of a source whose events are in the rows of a universe."""
    return f"folded/{source}/{universe}"


def lease_owners(waits: bytes) -> set[str]:
    """The owners in the column `waits` of `rollup_leases`."""
    return msgspec.msgpack.decode(waits, type=_Waits).owners


class Replacement(NamedTuple):
    """Files of a table, and those that replace them."""

    old: list[LakeFile]
    new: list[AddedFile]


def replacement(fold: Fold, target: LakeTable, entries: Sequence[LakeFile]) -> Replacement:
    """Write the rows that change; `entries` are the files of the universe."""
    affected = [(file, mask) for file in entries if (mask := _mask(fold, target, file)) is not None]
    before = [target.rows_of(file).filter(mask) for file, mask in affected]
    *refolded, added = fold.rows(before)
    changed = {
        file.path: (mask, new)
        for (file, mask), old, new in zip(affected, before, refolded, strict=True)
        if not new.equals(old)
    }
    unchanged = {file.path for file, _ in affected} - changed.keys()
    small = [file for file in entries if file.rows < ROLLUP_SMALL_FILE_ROWS and file.path not in unchanged]
    merged = {file.path for file in small} if len(small) >= ROLLUP_SMALL_FILES else set()
    replaced = [file for file in entries if file.path in changed or file.path in merged]
    written: list[AddedFile] = []
    pending = [added]
    for file in replaced:
        mask, new = changed.get(file.path, (None, None))
        kept = target.rows_of(file) if mask is None else target.rows_of(file).filter(pc.invert(mask))
        if new is not None:
            pending.append(new)
        if kept.num_rows >= ROLLUP_SMALL_FILE_ROWS:
            written += write(fold.table, target.location, kept)
        else:
            pending.append(kept)
    return Replacement(replaced, [*written, *write(fold.table, target.location, pa.concat_tables(pending))])


def write(table: Table, location: Location, rows: pa.Table) -> list[AddedFile]:
    """Write rows of a table into files of bounded size, those that depend on the plane into other files."""
    parts = [rows]
    if _SETTLED in rows.column_names:
        parts = [rows.filter(rows.column(_SETTLED)), rows.filter(pc.invert(rows.column(_SETTLED)))]
    written: list[AddedFile] = []
    for part in parts:
        for batches in _slices(table, part):
            written += files.write(table, location, batches)
    return written


def _slices(table: Table, rows: pa.Table) -> Iterator[Iterator[pa.RecordBatch]]:
    ordered = rows.sort_by([(name, "ascending") for name in ("universe", *table.order)])
    for begin in range(0, len(ordered), ROLLUP_FILE_ROWS):
        yield iter(ordered.slice(begin, ROLLUP_FILE_ROWS).to_batches())


def _mask(fold: Fold, target: LakeTable, file: LakeFile) -> pa.ChunkedArray | None:
    """Which rows of a file may change; None if none can."""
    touched, has_settled = fold.touched(), _SETTLED in fold.table.schema.names
    rows = target.rows_of(file, [*fold.key, *([_SETTLED] if has_settled else [])])
    last = rows.column(fold.key[-1])
    candidates = pc.is_in(last, value_set=pa.array({key[-1] for key in touched}, last.type))
    mask = pc.and_(candidates, _has_key(rows.select(fold.key), candidates, touched))
    if has_settled:
        mask = pc.or_(mask, pc.invert(rows.column(_SETTLED)))
    return mask if pc.any(mask).as_py() else None


def _has_key(keys: pa.Table, candidates: pa.ChunkedArray, touched: Collection[tuple[Any, ...]]) -> pa.ChunkedArray:
    """Which rows have one of the keys; only the candidates are compared."""
    found = keys.filter(candidates)
    values = zip(*(column.to_pylist() for column in found.columns), strict=True)
    is_touched = pa.array([key in touched for key in values], pa.bool_())
    return pc.replace_with_mask(pa.repeat(pa.scalar(False), len(keys)), candidates.combine_chunks(), is_touched)


class MessageFold:
    """Events of messages. Without a measurement, rows state what the events say."""

    table: Final = MESSAGES
    key: Final = ("queue", "id")

    def __init__(self, universe: str, present: Iterable[PresentMessage], measured: Measured | None) -> None:
        self._universe = universe
        self._measured = measured
        self._collected = events.MessageCollector()
        self._collected.add_present(present)

    def add_records(self, batch: pa.RecordBatch) -> None:
        """Add the events in (universe, record) of session logs."""
        self._collected.add(events.message_events(batch))

    def add_history(self, batch: pa.RecordBatch) -> None:
        """Add rows of `queue_events`."""
        self._collected.add(event for event in events.history_events(batch) if event[3] in lifecycles.MESSAGE_EVENTS)

    def keep(self, old: pa.Table, before_ms: int) -> None:
        for queue, id, stored, correlation_id in _values(old, (*self.key, "events", "correlation_id")):
            if known := lifecycles.events_before(stored, before_ms):
                self._collected.add_known((self._universe, queue, id), known, correlation_id)

    def touched(self) -> Collection[tuple[Any, ...]]:
        return {key[1:] for key in (*self._collected.events, *self._collected.present)}

    def rows(self, old: Sequence[pa.Table]) -> list[pa.Table]:
        collected, found = self._collected, list[list[events.MessageKey]]()
        for table in old:
            keys = [(self._universe, *key) for key in _values(table, self.key)]
            for key, (stored, correlation_id) in zip(keys, _values(table, ("events", "correlation_id")), strict=True):
                if known := lifecycles.decode_events(stored):
                    collected.add_known(key, known, correlation_id)
            found.append(keys)
        existing = dict.fromkeys(collected.keys())
        replaced = {key for keys in found for key in keys}
        return [
            *(self._fold([key for key in keys if key in existing]) for keys in found),
            self._fold([key for key in existing if key not in replaced]),
        ]

    def _fold(self, keys: Sequence[events.MessageKey]) -> pa.Table:
        batches = [
            lifecycles.message_rows([self._collected.group(key) for key in keys[n : n + ROWS_BATCH]], self._measured)
            for n in range(0, len(keys), ROWS_BATCH)
        ]
        return pa.Table.from_batches(batches, MESSAGES.schema)


class MailFold:
    """Events of mails. One key may have several mails, in any files."""

    table: Final = MAIL
    key: Final = ("recipient", "sender", "id")

    def __init__(self, universe: str) -> None:
        self._universe = universe
        self._events: dict[tuple[str, str, str], list[lifecycles.Event]] = {}

    def add_records(self, batch: pa.RecordBatch) -> None:
        """Add the events in (universe, record) of session logs."""
        for _, recipient, sender, id, event, at_ms in events.mail_events(batch):
            self._events.setdefault((recipient, sender, id), []).append(lifecycles.Event(event, at_ms))

    def keep(self, old: pa.Table, before_ms: int) -> None:
        for recipient, sender, id, stored in _values(old, (*self.key, "events")):
            if known := lifecycles.events_before(stored, before_ms):
                self._events.setdefault((recipient, sender, id), []).extend(known)

    def touched(self) -> Collection[tuple[Any, ...]]:
        return self._events.keys()

    def rows(self, old: Sequence[pa.Table]) -> list[pa.Table]:
        for table in old:
            for recipient, sender, id, stored in _values(table, (*self.key, "events")):
                self._events[recipient, sender, id] += lifecycles.decode_events(stored)
        groups = [MailGroup(self._universe, *key, own) for key, own in self._events.items()]
        batches = [lifecycles.mail_rows(groups[n : n + ROWS_BATCH]) for n in range(0, len(groups), ROWS_BATCH)]
        return [*([MAIL.schema.empty_table()] * len(old)), pa.Table.from_batches(batches, MAIL.schema)]


class _Waits(msgspec.Struct, array_like=True):
    """The acquires of a lease in one hour that were not granted at once."""

    owners: set[str] = msgspec.field(default_factory=set)
    durations_ms: dict[int, int] = msgspec.field(default_factory=dict)  # How often each occurred.
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # By event.

    def encode(self) -> bytes:
        """Equal waits have equal bytes."""
        ordered = (dict(sorted(self.durations_ms.items())), dict(sorted(self.counts.items())))
        return msgspec.msgpack.encode((sorted(self.owners), *ordered))

    def add(self, other: "_Waits") -> None:
        self.owners |= other.owners
        self.durations_ms = dict(Counter(self.durations_ms) + Counter(other.durations_ms))
        self.counts = dict(Counter(self.counts) + Counter(other.counts))


class LeaseFold:
    """Events of leases, by lease and hour."""

    table: Final = ROLLUP_LEASES
    key: Final = ("hour", "key")

    def __init__(self, universe: str) -> None:
        self._universe = universe
        self._waits: dict[tuple[datetime, str], _Waits] = {}

    def add_records(self, batch: pa.RecordBatch) -> None:
        """Add the events in (universe, record) of session logs."""
        for _, event in events.lease_events(batch):
            hour = datetime.fromtimestamp(event.at_ms // _HOUR_MS * _HOUR_MS // 1_000, UTC)
            waits = self._waits.setdefault((hour, event.key), _Waits())
            waits.owners.add(event.owner)
            waits.durations_ms[event.waited_ms] = waits.durations_ms.get(event.waited_ms, 0) + 1
            waits.counts[event.event] = waits.counts.get(event.event, 0) + 1

    def encode(self) -> bytes:
        """What was added, for `add_encoded` of another fold of the universe."""
        found = [(round(hour.timestamp()), key, waits) for (hour, key), waits in self._waits.items()]
        return msgspec.msgpack.encode(found)

    def add_encoded(self, encoded: bytes) -> None:
        for hour, key, waits in msgspec.msgpack.decode(encoded, type=list[tuple[int, str, _Waits]]):
            self._waits.setdefault((datetime.fromtimestamp(hour, UTC), key), _Waits()).add(waits)

    def keep(self, old: pa.Table, before_ms: int) -> None:
        for hour, key, stored in _values(old, (*self.key, "waits")):
            if hour.timestamp() * 1_000 < before_ms:  # Unlike events, waits cannot be recognised: the row has them all.
                self._waits[hour, key] = msgspec.msgpack.decode(stored, type=_Waits)

    def touched(self) -> Collection[tuple[Any, ...]]:
        return self._waits.keys()

    def rows(self, old: Sequence[pa.Table]) -> list[pa.Table]:
        for table in old:
            for hour, key, stored in _values(table, (*self.key, "waits")):
                self._waits[hour, key].add(msgspec.msgpack.decode(stored, type=_Waits))
        found = [self._row(hour, key, waits) for (hour, key), waits in self._waits.items()]
        return [*([self.table.schema.empty_table()] * len(old)), pa.Table.from_pylist(found, self.table.schema)]

    def _row(self, hour: datetime, key: str, waits: _Waits) -> dict[str, Any]:
        durations = sorted(waits.durations_ms)
        found = percentiles(durations, [waits.durations_ms[each] for each in durations])
        return {
            "universe": self._universe,
            "key": key,
            "hour": hour,
            "contended": sum(waits.counts.values()),
            **{event: waits.counts.get(event, 0) for event in ("granted", "refused", "gone")},
            "owners": len(waits.owners),
            **{f"waited_p{percent}_ms": value for percent, value in zip(PERCENTS, found, strict=True)},
            "waited_max_ms": durations[-1],
            "waits": waits.encode(),
        }


def _values(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in columns), strict=True)
