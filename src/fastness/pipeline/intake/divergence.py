"""Finds where the history in the lake ends to be that of the plane: a cut for each world, entity and log file.

    lake    0 1 2 3 4 5 6          a plane that was restored from a backup with 0 1 2 3, and continued
    plane   0 1 2 3 a b            the cut is 4: the lake's rows from 4 on are of another history

Every row that may differ is compared, not only the last one: two histories can have an equal record at one height.
Rows that were ingested before the backup was made are in it, so their files are not read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow.compute as pc

from fastness.errors import Corrupt, WorldNotFound
from fastness.layers import entities, worlds
from fastness.layers.entities import EntityKey
from fastness.layers.worlds import World
from fastness.limits import PAGE_ITEMS, RESTORE_CLOCK_SKEW_MS
from fastness.pipeline import codec
from fastness.pipeline.intake import entity_ingest, log_ingest, plans
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import LakeFile, LakeTable, Move, fingerprints
from fastness.pipeline.views import View
from fastness.runtime.activity import format as log_format


class Cuts(NamedTuple):
    """For each source of a table the number from which on its rows are of another history, and the new watermarks."""

    numbers: dict[str, int]
    moves: dict[str, Move]


Wanted = Callable[[str], bool]  # Whether a source is compared.
_FAR: Final = 1 << 62


def journal_cuts(view: View, table: LakeTable, universe: str, wanted: Wanted, *, since_ms: int, staging: str) -> Cuts:
    """The cuts of worlds. Worlds that the plane has deleted keep their rows."""
    prefix = f"journal/{universe}/"
    ends = {name.removeprefix(prefix): end for name, end in table.watermarks().items() if name.startswith(prefix)}
    hashes: dict[str, dict[int, str]] = {world: {} for world in ends if wanted(world)}
    for file in _files(table, universe, since_ms):
        rows = table.rows_of(file, ["world", "height", "hash"], pc.field("world").isin(list(hashes)))
        for row in rows.to_pylist():
            hashes[row["world"]][row["height"]] = row["hash"]
    cuts = Cuts({}, {})
    for world, known in hashes.items():
        cut = _journal_cut(view, universe, world, known, staging)
        if cut < ends[world]:
            cuts.numbers[world] = cut
            cuts.moves[plans.journal_watermark(universe, world)] = Move(ends[world], cut)
            watermark = plans.tip_watermark(universe, world)
            before = _hash_at(table, universe, world, cut - 1)
            tip = 0 if before is None else fingerprints.of_hash(before)
            cuts.moves[watermark] = Move(table.watermark(watermark), tip)
    return cuts


def segment_cuts(view: View, table: LakeTable, universe: str, wanted: Wanted) -> dict[str, int]:
    """For each world the first segment that the plane does not have. Worlds that it has deleted keep theirs."""
    checked: dict[str, dict[int, str]] = {}  # Checksums of segments by their start.
    for rows in table.scan(["world", "start", "checksum"], universe=universe):
        for row in rows.to_pylist():
            if wanted(row["world"]):
                checked.setdefault(row["world"], {})[row["start"]] = row["checksum"]
    cuts = {}
    for name, segments in checked.items():
        world = view.world(universe, name)
        if world is not None or _never_existed(view, World(universe, name)):
            present = {each.start: each.checksum for each in world.segments} if world is not None else {}
            cut = min((start for start, checksum in segments.items() if present.get(start) != checksum), default=_FAR)
            if cut < _FAR:
                cuts[name] = cut
    return cuts


def entity_cuts(view: View, table: LakeTable, universe: str, wanted: Wanted, *, since_ms: int) -> Cuts:
    """The cuts of entities, named KIND/ID."""
    known: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for file in _files(table, universe, since_ms):
        for row in table.rows_of(file).to_pylist():
            if wanted(f"{row['kind']}/{row['id']}"):
                known.setdefault((row["kind"], row["id"]), {})[row["version"]] = with_milliseconds(row)
    cuts = Cuts({}, {})
    for (kind, id), rows in known.items():
        watermark = entity_ingest.watermark(universe, kind, id)
        end = table.watermark(watermark)
        cut = _entity_cut(view, EntityKey(universe, kind, id), rows, since_ms)
        if cut <= end:
            cuts.numbers[f"{kind}/{id}"] = cut
            cuts.moves[watermark] = Move(end, cut - 1)
            tip = entity_ingest.tip_watermark(universe, kind, id)
            before = rows.get(cut - 1)
            is_known = before is not None and not before["redacted"]
            fingerprint = entity_ingest.change_fingerprint(before) if before is not None and is_known else 0
            cuts.moves[tip] = Move(table.watermark(tip), fingerprint)
    return cuts


def log_cuts(view: View, table: LakeTable, universe: str, wanted: Wanted, *, since_ms: int) -> Cuts:
    """The cuts of session logs. Files that the plane has deleted keep their lines up to `since_ms`."""
    present = {file.id: file for file in view.logs(universe)}
    last: dict[str, int] = {}
    first_after: dict[str, int] = {}  # The first line that was logged after the backup.
    for file in _files(table, universe, since_ms):
        for row in table.rows_of(file, ["file", "n", "logged_at"]).to_pylist():
            name, n = row["file"], row["n"]
            if wanted(name):
                last[name] = max(last.get(name, -1), n)
                if since_ms and row["logged_at"] is not None and row["logged_at"].timestamp() * 1_000 >= since_ms:
                    first_after[name] = min(first_after.get(name, _FAR), n)
    cuts = Cuts({}, {})
    for name, end in last.items():
        offset = table.watermark(log_ingest.offset_watermark(universe, name))
        log = present.get(name)
        if log is None:
            if name in first_after:
                cuts.numbers[name] = first_after[name]
        elif log.size < offset:
            kept = max((line.n for _, line in log_format.lines(view.log_body(log)) if line is not None), default=-1)
            if kept < end:
                cuts.numbers[name] = kept + 1
                cuts.moves[log_ingest.offset_watermark(universe, name)] = Move(offset, log.size)
                lines = log_ingest.line_watermark(universe, name)
                cuts.moves[lines] = Move(table.watermark(lines), kept + 1)
    if cuts.moves:
        cuts.moves.update(log_ingest.read_all_again(table, universe))
    return cuts


def _journal_cut(view: View, universe: str, name: str, known: Mapping[int, str], staging: str) -> int:
    world = view.world(universe, name)
    if world is None:
        return 0 if _never_existed(view, World(universe, name)) else _FAR
    cut = world.head
    below = [height for height in known if height < world.head]
    if below:
        window = msgspec.structs.replace(world, head=max(below) + 1)
        for height, hash in plane_hashes(view, view.chunks(window, min(below), staging)):
            if height in known and known[height] != hash:
                return min(cut, height)
    return cut


def plane_hashes(view: View, chunks: Collection[Any]) -> Iterator[tuple[int, str]]:
    """The height and hash of each record of these chunks that can be read."""
    stores: Stores = view.stores
    for chunk in chunks:
        try:
            records = codec.read_chunk(chunk, stores(chunk.store))
        except Corrupt:
            continue  # Nothing to compare with; an audit reports the damage.
        first, last = chunk.span
        for height in range(first, last + 1):
            yield height, sha256(records[height - chunk.start]).hexdigest()


def _never_existed(view: View, world: World) -> bool:
    try:
        view.database.read(worlds.last_meta, world)
    except WorldNotFound:
        return True
    return False


def _entity_cut(view: View, key: EntityKey, rows: Mapping[int, dict[str, Any]], since_ms: int) -> int:
    version = view.database.read(entities.get, key).version
    changes = {row["version"]: row for row in plane_changes(view, key, min(rows))}
    cut = version + 1
    for number, row in rows.items():
        if number in changes:
            differs = not entity_ingest.is_same_change(row, changes[number])
        else:  # The plane's history no longer has it.
            differs = bool(since_ms) and row["changed_at"] >= since_ms
        if differs:
            cut = min(cut, number)
    return cut


def plane_changes(view: View, key: EntityKey, first: int) -> Iterator[dict[str, Any]]:
    """The changes that an entity's history has from version `first` on, as rows of `entity_changes`."""
    after = max(first - 1, 0)
    while page := view.database.read(entities.history, key, after=after, limit=PAGE_ITEMS):
        yield from (entity_ingest.row_of(key, change) for change in page)
        after = page[-1].version


def with_milliseconds(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `entity_changes` as `row_of` returns it, from one that was read."""
    return {**row, "changed_at": round(row["changed_at"].timestamp() * 1_000)}


def _hash_at(table: LakeTable, universe: str, world: str, height: int) -> str | None:
    if height < 0:
        return None
    where = (pc.field("world") == world) & (pc.field("height") == height)
    found = table.scan(["hash"], where, universe=universe, world=world, height=height)
    return next((str(hash) for rows in found for hash in rows.column("hash").to_pylist()), None)


def _files(table: LakeTable, universe: str, since_ms: int) -> list[LakeFile]:
    """The files of a universe that may have rows from after `since_ms`."""
    written_since = since_ms - RESTORE_CLOCK_SKEW_MS
    return [file for file in table.entries() if file.universe == universe and file.modified_ms >= written_since]
