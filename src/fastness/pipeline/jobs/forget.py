"""`forget`: remove a world, a queue, a kind of entity, a session or a person's rows from every table of the lake.

    tombstones ──► rows and watermarks of all tables ──► reports ──► with `vacuum`: old files and commits, then a search

The tombstones come first: from then on no job brings the rows back. Each step can be repeated, so a run that was killed
is continued by running it again. Nothing else may use the lake meanwhile.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import InvalidArgument, WorldNotFound
from fastness.layers import worlds as world_layer
from fastness.layers.worlds import World, WorldState
from fastness.pipeline import ownership, tombstones
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import known_sources
from fastness.pipeline.jobs.folds import lease_owners
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake, LakeTable, Move, purging, removal, retries, searching, staging
from fastness.pipeline.lake.watermarks import REWRITES
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import (
    ACTIVITY,
    ENTITY_CHANGES,
    JOURNAL,
    LEASES,
    MAIL,
    QUARANTINE,
    QUEUE_EVENTS,
    RECEIPTS,
    ROLLUP_LEASES,
    ROLLUP_MAILBOXES,
    ROLLUP_TALK,
    STATE_CHANGES,
    STATES,
    STORED_MAIL,
    SUPERSEDED,
    TABLES,
    TOMBSTONES,
    Table,
)
from fastness.pipeline.tombstones import LOG_FIELDS, MATCHES
from fastness.pipeline.views import View, open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CACHES: Final = ("reports/", "runs/")
# The columns that have the value of a match, by target.
_MATCHED: Final = {
    "mail.sender": ((MAIL, "sender"), (STORED_MAIL, "sender"), (RECEIPTS, "sender"), (ROLLUP_TALK, "sender")),
    "mail.recipient": (
        (MAIL, "recipient"),
        (STORED_MAIL, "recipient"),
        (RECEIPTS, "recipient"),
        (ROLLUP_TALK, "recipient"),
        (ROLLUP_MAILBOXES, "recipient"),
    ),
    "leases.owner": ((LEASES, "owner"),),
    "entity_changes.id": ((ENTITY_CHANGES, "id"),),
    "states.key": ((STATES, "key"), (STATE_CHANGES, "key")),
}
_SOURCE_COLUMNS: Final = {"world": "world", "kind": "kind", "queue": "queue", "session": "session"}
# Tables that have a column of that name with another meaning.
_KINDS_OF_OTHER_THINGS: Final = {"kind": (ENTITY_CHANGES.name,)}


class _Forgotten(NamedTuple):
    """A source or value of one universe."""

    universe: str
    target: str
    name: str
    incarnation: int | None = None


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    worlds: Sequence[str] = (),
    kinds: Sequence[str] = (),
    queues: Sequence[str] = (),
    sessions: Sequence[str] = (),
    matches: Sequence[str] = (),
    deleted: bool = False,
    reason: str | None = None,
    vacuum: bool = False,
) -> JobResult:
    """Remove sources, and rows that match TABLE.COLUMN=VALUE, from every table.

    With `deleted`, all worlds that the plane has deleted.
    With `vacuum`, delete old files and commits of all tables, and search every file of the lake for the names. `ok`
    means that none was found.

    Raises:
        NotFound: neither the plane nor the lake has a source of that name.
        InvalidArgument: nothing is named, a match is invalid, or the lake's tombstones have another key.
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        TransactionConflict: other runs committed first, too often.
    """
    del spark, progress
    started = time.monotonic()
    key = tombstones.read_key(config.key_file)
    lake = Lake(config.lake, config.storage)
    named = [("world", name) for name in worlds] + [("kind", name) for name in kinds]
    named += [("queue", name) for name in queues] + [("session", name) for name in sessions]
    named += [_parse_match(match) for match in matches]
    if not (named or deleted):
        raise InvalidArgument(
            "Nothing to forget: name it with --world, --kind, --queue, --session or --match TABLE.COLUMN=VALUE, or "
            "give --deleted"
        )
    with open_view(config) as view:
        ownership.check(lake, view)
        universes = ownership.universes_of(lake, view, config.universes)
        known_sources.check(lake, view, config, universes, named)
        forgotten = list(_forgotten(lake, view, universes, named, deleted=deleted))
    retries.retry_until_committed(
        f"the table {TOMBSTONES.name}", lambda: _write_tombstones(lake, key, forgotten, reason)
    )
    counts = dict.fromkeys(TABLES, 0)
    for table in TABLES.values():
        if table is not TOMBSTONES:
            remove = partial(_remove, lake, table, forgotten)
            counts[table.name] = retries.retry_until_committed(f"the table {table.name}", remove)
    removed = {name: count for name, count in counts.items() if count}
    _delete_caches(lake, forgotten)
    retries.retry_until_committed(
        f"the table {TOMBSTONES.name}", lambda: _write_tombstones(lake, key, forgotten, reason, removed)
    )
    found = _vacuum(lake, forgotten) if vacuum else None
    return JobResult(
        job="forget",
        ok=found is None or not (found.found or found.unreadable),
        rows={f"{name} removed": count for name, count in removed.items()},
        seconds=time.monotonic() - started,
        findings=[] if found is None else [*_findings(found)],
        notes=[*_notes(forgotten, found)],
    )


def _parse_match(match: str) -> tuple[str, str]:
    target, equals, value = match.partition("=")
    if target not in MATCHES or not (equals and value):
        raise InvalidArgument(f"--match {match!r} is invalid; use COLUMN=VALUE with one of: {', '.join(MATCHES)}")
    return target, value


def _forgotten(
    lake: Lake, view: View, universes: Sequence[str], named: Sequence[tuple[str, str]], *, deleted: bool
) -> Iterator[_Forgotten]:
    for universe in universes:
        every = [*named, *(("world", name) for name in _deleted_worlds(lake, view, universe))] if deleted else named
        for target, name in dict.fromkeys(every):
            incarnation = view.incarnation(universe, name) if target == "world" else None
            yield _Forgotten(universe, target, name, incarnation)


def _deleted_worlds(lake: Lake, view: View, universe: str) -> Iterator[str]:
    """The worlds of the lake that the plane has deleted."""
    names = set[str]()
    for rows in lake.table(JOURNAL).scan(["world"], universe=universe):
        names.update(pc.unique(rows.column("world")).to_pylist())
    for name in sorted(names):
        try:
            meta = view.database.read(world_layer.last_meta, World(universe, name))
        except WorldNotFound:
            continue  # The plane never had it: it was restored, and `accept` decides.
        if meta.state in (WorldState.DELETING, WorldState.DELETED):
            yield name


def _write_tombstones(
    lake: Lake,
    key: bytes,
    forgotten: Sequence[_Forgotten],
    reason: str | None,
    removed: Mapping[str, int] | None = None,
) -> None:
    """Add tombstones; with `removed`, record in the new ones how many rows they removed."""
    table = lake.table(TOMBSTONES)
    rows = table.rows().to_pylist()
    tombstones.check_key(key, {row["key_id"] for row in rows})
    by_key = {(row["name_digest"], row["incarnation"]): row for row in rows}
    now_ms = time.time_ns() // 1_000_000
    for each in forgotten:
        digest = tombstones.digest(key, each.universe, each.target, each.name)
        row = by_key.setdefault(
            (digest, each.incarnation),
            {
                "universe": each.universe,
                "target": each.target,
                "name_digest": digest,
                "key_id": tombstones.key_id(key),
                "incarnation": each.incarnation,
                "reason": reason,
                "forgotten_at": now_ms,
                "removed_rows": None,
            },
        )
        if removed is not None and row["removed_rows"] is None:
            row["removed_rows"] = msgspec.json.encode(removed).decode()
    watermark = table.watermark(REWRITES)
    new = pa.Table.from_pylist(list(by_key.values()), TOMBSTONES.schema)
    if new.num_rows:
        rewritten = removal.written(table, new)
        table.replace(table.entries(), rewritten, {REWRITES: Move(watermark, watermark + 1)})


def _remove(lake: Lake, table: Table, forgotten: Sequence[_Forgotten]) -> int:
    target, count = lake.table(table), 0
    for universe in {each.universe for each in forgotten}:
        masks = [mask for each in forgotten if each.universe == universe for mask in _masks(table, each)]
        moves = _moves(target, universe, [each for each in forgotten if each.universe == universe])
        if masks or moves:
            count += removal.remove_where(target, partial(_any, masks), moves, universe=universe)
    return count


def _any(masks: Sequence[Callable[[pa.Table], pa.Array]], rows: pa.Table) -> pa.Array:
    found = pa.repeat(pa.scalar(False), rows.num_rows)
    for mask in masks:
        found = pc.or_(found, mask(rows))
    return found


def _masks(table: Table, each: _Forgotten) -> Iterator[Callable[[pa.Table], pa.Array]]:
    """Masks of the rows of a table that belong to a forgotten source or value."""
    names = tombstones.names_of(each.target, each.universe, each.name)
    if each.target in _MATCHED:
        yield from (partial(_equal, column, names) for owner, column in _MATCHED[each.target] if owner is table)
    else:
        column = _SOURCE_COLUMNS[each.target]
        if column in table.schema.names and table.name in _KINDS_OF_OTHER_THINGS.get(column, TABLES):
            yield partial(_equal, column, names)
        if each.target == "queue" and "origin" in table.schema.names:
            yield partial(_equal, "origin", names)
    if table is ROLLUP_LEASES and each.target == "leases.owner":
        yield partial(_has_owner, names)
    if table is ACTIVITY and each.target in LOG_FIELDS:
        yield partial(_logged, *LOG_FIELDS[each.target], names)
    if table in (SUPERSEDED, QUARANTINE):
        yield partial(_about, each, names)


def _equal(column: str, names: Sequence[str], rows: pa.Table) -> pa.Array:
    return pc.is_in(rows.column(column), pa.array(names, pa.string())).combine_chunks()


def _has_owner(names: Sequence[str], rows: pa.Table) -> pa.Array:
    """Hours of leases with a forgotten owner. `rollup` writes those again whose events the lake still has."""
    return pa.array(
        [not lease_owners(waits).isdisjoint(names) for waits in rows.column("waits").to_pylist()], pa.bool_()
    )


def _logged(kind: str, field: str, names: Sequence[str], rows: pa.Table) -> pa.Array:
    pairs = zip(rows.column("kind").to_pylist(), rows.column("record").to_pylist(), strict=True)
    return pa.array(
        [each == kind and tombstones.field_of(record, field) in names for each, record in pairs], pa.bool_()
    )


def _about(each: _Forgotten, names: Sequence[str], rows: pa.Table) -> pa.Array:
    """Rows of `superseded` and `quarantine` about a source; superseded log lines also by their content."""
    found = []
    for row in rows.to_pylist():
        table, source, text = row["table_name"], row["source"], row.get("row")
        kind, _, id = source.partition("/")
        is_about = {
            "world": table == JOURNAL.name and source in names,
            "queue": table == QUEUE_EVENTS.name and source in names,
            "kind": table == ENTITY_CHANGES.name and kind in names,
            "entity_changes.id": table == ENTITY_CHANGES.name and id in names,
        }.get(each.target, False)
        if table == ACTIVITY.name and text is not None:
            line: dict[str, Any] = msgspec.json.decode(text)
            if each.target == "session":
                is_about = line["session"] in names
            elif each.target in LOG_FIELDS:
                log_kind, field = LOG_FIELDS[each.target]
                is_about = line["kind"] == log_kind and tombstones.field_of(line["record"], field) in names
        found.append(is_about)
    return pa.array(found, pa.bool_())


def _moves(table: LakeTable, universe: str, forgotten: Sequence[_Forgotten]) -> dict[str, Move]:
    """Watermarks of forgotten sources go back to zero: a later world of the same name is ingested from the start."""
    return {
        name: Move(value, 0)
        for name, value in table.watermarks().items()
        if value and any(_names_source(name, each) for each in forgotten if each.universe == universe)
    }


def _names_source(watermark: str, each: _Forgotten) -> bool:
    """Whether a watermark is the position of a forgotten source. Those of log files do not name the session."""
    area, _, rest = watermark.partition("/")
    universe, _, source = rest.partition("/")
    kind, _, id = source.partition("/")
    areas = {
        "world": ("journal", "tip", "segments", "holes"),
        "kind": ("entity", "entity-tip"),
        "entity_changes.id": ("entity", "entity-tip"),
        "queue": ("history", "events", "unlogged"),
    }
    if universe != each.universe or area not in areas.get(each.target, ()):
        return False
    named = {"kind": kind, "entity_changes.id": id}.get(each.target, source)
    return named == each.name


def _delete_caches(lake: Lake, forgotten: Sequence[_Forgotten]) -> None:
    """Delete reports, which may show any name, and records of runs that have a forgotten one. Jobs write them again."""
    store = Stores(lake.location.storage)(lake.location.store_url)
    found = searching.search(lake.location, _texts(forgotten), only=_CACHES).found
    for path in [*found, *searching.paths(lake.location, "reports/")]:
        store.delete(path)


def _vacuum(lake: Lake, forgotten: Sequence[_Forgotten]) -> searching.Search:
    for table in TABLES.values():
        purging.purge(lake.table(table), lambda name: any(_names_source(name, each) for each in forgotten))
    staging.delete_stale(lake.location, keep_hours=0)
    return searching.search(lake.location, _texts(forgotten))


def _texts(forgotten: Sequence[_Forgotten]) -> list[str]:
    return sorted({tombstones.names_of(each.target, each.universe, each.name)[0] for each in forgotten})


def _findings(found: searching.Search) -> Iterator[dict[str, object]]:
    details = {
        path: f"{path} has {count} values with a forgotten name; they belong to other rows, which were not named"
        for path, count in found.found.items()
    } | {path: f"{path} cannot be decoded, so it may have a forgotten name" for path in found.unreadable}
    for path, detail in details.items():
        yield {"table": path.partition("/")[0], "reason": "left", "detail": detail}


def _notes(forgotten: Sequence[_Forgotten], found: searching.Search | None) -> Iterator[str]:
    yield f"{len(forgotten)} names are forgotten; `rollup` and `report` write the aggregates again"
    if found is None:
        yield "Old files and commits of the lake still have the rows; delete them by running this again with --vacuum"
    else:
        count = sum(found.found.values())
        yield f"Searched {found.files:,} files with {found.bytes:,} bytes of the lake: {count} matches"
