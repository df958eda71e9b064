"""The quarantine: what could not be read, a row for each stretch, until it can be.

It is small, and rewritten a universe at a time. Every commit moves one mark, so writers take turns.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from holdfast.errors import TransactionConflict
from holdfast.limits import LAKE_ATTEMPTS
from holdfast.pipeline.lake import Lake, LakeTable, Move, files
from holdfast.pipeline.lake.attempts import pause
from holdfast.pipeline.lake.tables import REWRITES
from holdfast.pipeline.schemas import QUARANTINE

REWOUND: Final = "rewound"  # The plane is behind the lake, or has another history: it was restored from a backup.
ENDLESS: Final = (1 << 63) - 1

Key: TypeAlias = tuple[str, str, str, int]  # universe, table, source, start


class Quarantined(msgspec.Struct, frozen=True):
    """Rows that a table lacks, or should not have."""

    universe: str
    table: str
    source: str  # A world, a log file, or an entity.
    start: int
    end: int  # Included.
    reason: str
    detail: str

    @property
    def key(self) -> Key:
        return self.universe, self.table, self.source, self.start


class Scope(msgspec.Struct, frozen=True):
    """Where somebody has read everything anew: what is quarantined there, and not found any more, is well."""

    universe: str
    table: str
    source: str
    low: int
    high: int = ENDLESS
    forgives: bool = True  # What was said of the source being rewound is over, too.

    def covers(self, row: Quarantined) -> bool:
        """Whether a row of its source lies in it."""
        return self.forgives if row.reason == REWOUND else self.low <= row.start <= self.high


_Rows: TypeAlias = dict[Key, tuple[Quarantined, Any]]  # And since when it has been there.


class Quarantine:
    """The rows, as they were at the last look."""

    def __init__(self, lake: Lake) -> None:
        self._table: LakeTable = lake.table(QUARANTINE)
        self._rows = _loaded(self._table)

    def refresh(self) -> None:
        self._table.refresh()
        self._rows = _loaded(self._table)

    def rows(self) -> list[Quarantined]:
        return [row for row, _ in self._rows.values()]

    def rewound(self) -> set[tuple[str, str, str]]:
        """The sources that were behind the lake."""
        return {row.key[:3] for row in self.rows() if row.reason == REWOUND}

    def add(self, found: Sequence[Quarantined]) -> None:
        """Have these rows in it. One that is there already becomes longer, never shorter: another run may need it."""
        self._commit(lambda rows: _with(rows, [_longest(rows, row) for row in found]))

    def settle(self, scopes: Iterable[Scope], found: Sequence[Quarantined] = ()) -> None:
        """Put what was found in the place of everything that lies in these scopes."""
        by_source: dict[tuple[str, str, str], list[Scope]] = {}
        for scope in scopes:
            by_source.setdefault((scope.universe, scope.table, scope.source), []).append(scope)
        kept = {row.key for row in found}

        def settled(rows: _Rows) -> _Rows:
            left = {key: row for key, row in rows.items() if key in kept or not _is_over(by_source, row[0])}
            return _with(left, found)

        self._commit(settled)

    def _commit(self, change: Callable[[_Rows], _Rows]) -> None:
        for attempt in range(LAKE_ATTEMPTS):
            wanted = change(self._rows)
            changed = {key[0] for key in {*wanted, *self._rows} if wanted.get(key) != self._rows.get(key)}
            if not changed:
                return
            old = [file for file in self._table.entries() if file.universe in changed]
            rows = _table([row for key, row in wanted.items() if key[0] in changed])
            new = files.write(QUARANTINE, self._table.place, files.in_order(QUARANTINE, rows))
            mark = self._table.mark(REWRITES)
            try:
                self._table.replace(old, new, {REWRITES: Move(mark, mark + 1)})
            except TransactionConflict:
                pause(attempt)
                self.refresh()
                continue
            self._rows = wanted
            return
        raise TransactionConflict(f"Others wrote to the quarantine {LAKE_ATTEMPTS} times in a row; try again later")


def _is_over(scopes: Mapping[tuple[str, str, str], list[Scope]], row: Quarantined) -> bool:
    return any(scope.covers(row) for scope in scopes.get(row.key[:3], ()))


def _with(rows: _Rows, found: Sequence[Quarantined]) -> _Rows:
    now = pa.scalar(time.time_ns() // 1_000_000, pa.timestamp("ms", tz="UTC")).as_py()
    new: _Rows = {row.key: (row, now) for row in found if rows.get(row.key, (None,))[0] != row}
    return {**rows, **new}


def _longest(rows: _Rows, row: Quarantined) -> Quarantined:
    if row.key not in rows or rows[row.key][0].end <= row.end:
        return row
    return msgspec.structs.replace(row, end=rows[row.key][0].end)


def _loaded(table: LakeTable) -> _Rows:
    found: _Rows = {}
    for row in table.rows().to_pylist():
        seen_at = row.pop("seen_at")
        quarantined = Quarantined(**row)
        found[quarantined.key] = (quarantined, seen_at)
    return found


def _table(rows: Sequence[tuple[Quarantined, Any]]) -> pa.Table:
    columns = {
        name: [seen_at if name == "seen_at" else getattr(row, name) for row, seen_at in rows]
        for name in QUARANTINE.schema.names
    }
    return pa.table(columns, QUARANTINE.schema)
