"""Which plane, and which lineage of it, a universe of the lake follows.

    watermark lineage/<universe>   a fingerprint of the lineage, in the table `planes`

A universe of a lake has the history of one plane. The first ingest claims it. A job of another plane is refused, and
so is one of another lineage of the same plane: it was restored, so its history differs from the lake's from some point
on, and only `accept` may replace that part. Planes with different universes can share a lake.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa

from fastness.errors import AnotherHistory
from fastness.layers.lineages import Identity
from fastness.pipeline.lake import Lake, LakeTable, Move, files, fingerprints, retries
from fastness.pipeline.schemas import PLANES
from fastness.pipeline.views import View


class Owner(msgspec.Struct, frozen=True):
    """The lineage that a universe of the lake follows, or followed: a row of `planes`."""

    universe: str
    plane: str
    lineage: str
    parent: str | None
    shared_until: datetime | None
    cause: str
    since: datetime
    until: datetime | None


def owners(lake: Lake) -> dict[str, Owner]:
    """The lineage that each universe of the lake follows."""
    return {owner.universe: owner for owner in _rows(lake.table(PLANES)) if owner.until is None}


def claim(lake: Lake, view: View) -> None:
    """Check that the lake follows the view's plane, and record that for universes that are new to the lake.

    Raises:
        AnotherHistory: a universe of the lake follows another plane, or another lineage.
    """
    retries.retry_until_committed("the owners of the lake", lambda: _claim(lake, view))


def check(lake: Lake, view: View) -> None:
    """Check that the lake does not follow another history than the view's.

    Raises:
        AnotherHistory: a universe of the lake follows another plane, or another lineage.
    """
    known, identity = owners(lake), view.identity()
    for universe in view.universes():
        if universe in known:
            _check_owner(known[universe], identity)


def universes_of(lake: Lake, view: View, selected: Sequence[str] = ()) -> list[str]:
    """The universes of the view's plane, and those that the lake has of it and that it no longer has."""
    plane = view.identity().plane
    known = {owner.universe for owner in owners(lake).values() if owner.plane == plane}
    return sorted({*view.universes(), *(known & set(selected) if selected else known)})


def follow(lake: Lake, universes: Sequence[str], identity: Identity) -> None:
    """Make universes of the lake follow another lineage, after the rows of the old one were removed."""
    retries.retry_until_committed("the owners of the lake", lambda: _follow(lake, universes, identity))


def shared_until_ms(lake: Lake, owner: Owner, identity: Identity) -> int:
    """A time before which the lake and the plane certainly have the same history."""
    if (parent := identity.parent(owner.lineage)) is not None:
        return parent.until_ms
    recorded = [row.shared_until for row in _rows(lake.table(PLANES)) if row.plane == owner.plane]
    known = [round(at.timestamp() * 1_000) for at in recorded if at is not None]
    return min([*known, *(parent.until_ms for parent in identity.parents)], default=0)


def _claim(lake: Lake, view: View) -> None:
    table, identity = lake.table(PLANES), view.identity()
    known = {owner.universe: owner for owner in _rows(table) if owner.until is None}
    new = []
    for universe in view.universes():
        if universe in known:
            _check_owner(known[universe], identity)
        else:
            new.append(_owner(universe, identity))
    if new:
        moves = {_watermark(owner.universe): Move(0, fingerprints.of_bytes(owner.lineage.encode())) for owner in new}
        table.append_rows(_to_table(new), moves)


def _follow(lake: Lake, universes: Sequence[str], identity: Identity) -> None:
    table = lake.table(PLANES)
    old = [file for file in table.entries() if file.universe in universes]
    now = datetime.now(UTC)
    kept = [
        msgspec.structs.replace(owner, until=owner.until or now)
        for owner in _rows(table)
        if owner.universe in universes
    ]
    rows = _to_table([*kept, *(_owner(universe, identity) for universe in universes)])
    new = files.write(PLANES, table.location, files.sorted_batches(PLANES, rows))
    moves = {
        name: Move(table.watermark(name), fingerprints.of_bytes(identity.lineage.encode()))
        for name in map(_watermark, universes)
    }
    table.replace(old, new, moves)


def _check_owner(owner: Owner, identity: Identity) -> None:
    universe = owner.universe
    if identity.plane != owner.plane:
        raise AnotherHistory(
            f"Universe {universe} of the lake has the history of plane {owner.plane}, and this is plane "
            f"{identity.plane}; use another lake, or select universes that the lake does not have with --universe"
        )
    if identity.lineage == owner.lineage:
        return
    if identity.parent(owner.lineage) is not None:
        raise AnotherHistory(
            f"The plane was {identity.cause} after the last ingest: universe {universe} of the lake follows lineage "
            f"{owner.lineage}, and the plane is {identity.lineage}. Use another lake, or replace the rows that the "
            "plane no longer has with: fastness pipeline accept"
        )
    raise AnotherHistory(
        f"Universe {universe} of the lake follows lineage {owner.lineage} of plane {owner.plane}, and this is another "
        f"copy of it, with lineage {identity.lineage}; give the copy that the lake follows, use another lake, or "
        "replace the rows that this copy does not have with: fastness pipeline accept"
    )


def _owner(universe: str, identity: Identity) -> Owner:
    parent = identity.parents[0] if identity.parents else None
    return Owner(
        universe,
        identity.plane,
        identity.lineage,
        None if parent is None else parent.lineage,
        None if parent is None else datetime.fromtimestamp(parent.until_ms / 1_000, UTC),
        identity.cause,
        datetime.fromtimestamp(time.time_ns() // 1_000_000 / 1_000, UTC),
        None,
    )


def _rows(table: LakeTable) -> list[Owner]:
    return [Owner(**row) for row in table.rows().to_pylist()]


def _to_table(rows: Sequence[Owner]) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in PLANES.schema.names}
    return pa.table(columns, PLANES.schema)


def _watermark(universe: str) -> str:
    return f"lineage/{universe}"
