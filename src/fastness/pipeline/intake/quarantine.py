"""The quarantine: a row for each range that could not be read, until it can be.

It is small, and rewritten one universe at a time. Every commit moves one watermark, so writers are serialised.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from fastness.errors import TransactionConflict
from fastness.limits import LAKE_ATTEMPTS
from fastness.pipeline.lake import Lake, LakeTable, Move, files
from fastness.pipeline.lake.retries import pause
from fastness.pipeline.lake.watermarks import REWRITES
from fastness.pipeline.schemas import QUARANTINE

REWOUND: Final = "rewound"  # The plane is behind the lake, or diverged: it was restored from a backup.
UNBOUNDED: Final = (1 << 63) - 1

_FIELDS: Final = {"table_name": "table", "last": "end"}  # Fields by columns; these names are reserved in SQL.

Key: TypeAlias = tuple[str, str, str, int]  # universe, table, source, start


class Quarantined(msgspec.Struct, frozen=True):
    """A range of rows that a table lacks, or should not have."""

    universe: str
    table: str
    source: str  # A world, a log file, or an entity.
    start: int
    end: int  # Inclusive.
    reason: str
    detail: str
    accepted_at: datetime | None = None  # When `accept` confirmed that the rows are lost.

    @property
    def key(self) -> Key:
        return self.universe, self.table, self.source, self.start


class Scope(msgspec.Struct, frozen=True):
    """A range that was read again: quarantine rows in it are obsolete unless they were found again."""

    universe: str
    table: str
    source: str
    low: int
    high: int = UNBOUNDED
    clears_rewound: bool = True  # Also drop the source's `rewound` row.

    def covers(self, row: Quarantined) -> bool:
        """Whether a quarantine row of the same source is in this range."""
        return self.clears_rewound if row.reason == REWOUND else self.low <= row.start <= self.high


_Rows: TypeAlias = dict[Key, tuple[Quarantined, Any]]  # With the time since when it exists.


class Quarantine:
    """The rows, as of the last refresh."""

    def __init__(self, lake: Lake) -> None:
        self._table: LakeTable = lake.table(QUARANTINE)
        self._rows = _load(self._table)

    def refresh(self) -> None:
        self._table.refresh()
        self._rows = _load(self._table)

    def rows(self) -> list[Quarantined]:
        return [row for row, _ in self._rows.values()]

    def rewound(self) -> set[tuple[str, str, str]]:
        """The sources whose plane was behind the lake, or diverged."""
        return {row.key[:3] for row in self.rows() if row.reason == REWOUND}

    def add(self, found: Sequence[Quarantined]) -> None:
        """Add rows. An existing row becomes longer, never shorter: another run may depend on it."""
        self._commit(lambda rows: _with_rows(rows, [_extend(rows, row) for row in found]))

    def resolve(self, scopes: Iterable[Scope], found: Sequence[Quarantined] = ()) -> None:
        """Replace all rows in these scopes by what was found."""
        by_source: dict[tuple[str, str, str], list[Scope]] = {}
        for scope in scopes:
            by_source.setdefault((scope.universe, scope.table, scope.source), []).append(scope)
        kept = {row.key for row in found}

        def settled(rows: _Rows) -> _Rows:
            left = {key: row for key, row in rows.items() if key in kept or not _is_resolved(by_source, row[0])}
            return _with_rows(left, found)

        self._commit(settled)

    def accept(self, is_accepted: Callable[[Quarantined], bool]) -> int:
        """Confirm that the rows of these ranges are lost; returns the number of ranges."""
        now = datetime.fromtimestamp(time.time_ns() // 1_000_000 / 1_000, UTC)
        count = sum(row.accepted_at is None and is_accepted(row) for row in self.rows())
        self._commit(
            lambda rows: {
                key: (msgspec.structs.replace(row, accepted_at=now), seen_at)
                if row.accepted_at is None and is_accepted(row)
                else (row, seen_at)
                for key, (row, seen_at) in rows.items()
            }
        )
        return count

    def _commit(self, change: Callable[[_Rows], _Rows]) -> None:
        for attempt in range(LAKE_ATTEMPTS):
            wanted = change(self._rows)
            changed = {key[0] for key in {*wanted, *self._rows} if wanted.get(key) != self._rows.get(key)}
            if not changed:
                return
            old = [file for file in self._table.entries() if file.universe in changed]
            rows = _to_table([row for key, row in wanted.items() if key[0] in changed])
            new = files.write(QUARANTINE, self._table.location, files.sorted_batches(QUARANTINE, rows))
            watermark = self._table.watermark(REWRITES)
            try:
                self._table.replace(old, new, {REWRITES: Move(watermark, watermark + 1)})
            except TransactionConflict:
                pause(attempt)
                self.refresh()
                continue
            self._rows = wanted
            return
        raise TransactionConflict(
            f"Other runs committed to the quarantine {LAKE_ATTEMPTS} times in a row; try again later"
        )


def _is_resolved(scopes: Mapping[tuple[str, str, str], list[Scope]], row: Quarantined) -> bool:
    return any(scope.covers(row) for scope in scopes.get(row.key[:3], ()))


def _with_rows(rows: _Rows, found: Sequence[Quarantined]) -> _Rows:
    now = pa.scalar(time.time_ns() // 1_000_000, pa.timestamp("ms", tz="UTC")).as_py()
    new: _Rows = {row.key: (row, now) for row in found if row.key not in rows or not _is_same(rows[row.key][0], row)}
    return {**rows, **new}


def _is_same(known: Quarantined, found: Quarantined) -> bool:
    """Whether a range was found again as it was, accepted or not."""
    return msgspec.structs.replace(known, accepted_at=found.accepted_at) == found


def _extend(rows: _Rows, row: Quarantined) -> Quarantined:
    if row.key not in rows or rows[row.key][0].end <= row.end:
        return row
    return msgspec.structs.replace(row, end=rows[row.key][0].end)


def _load(table: LakeTable) -> _Rows:
    found: _Rows = {}
    for row in table.rows().to_pylist():
        seen_at = row.pop("seen_at")
        quarantined = Quarantined(**{_FIELDS.get(name, name): value for name, value in row.items()})
        found[quarantined.key] = (quarantined, seen_at)
    return found


def _to_table(rows: Sequence[tuple[Quarantined, Any]]) -> pa.Table:
    columns = {
        name: [seen_at if name == "seen_at" else getattr(row, _FIELDS.get(name, name)) for row, seen_at in rows]
        for name in QUARANTINE.schema.names
    }
    return pa.table(columns, QUARANTINE.schema)
