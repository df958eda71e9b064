"""Plans of reads: what each executor is to read. No Spark in it.

journal     pieces: cold segments where they are, hot tails staged; as many to a partition as make a good load
activity    files of session logs, each from an offset on
the others  rows of the key space, staged as Arrow files
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa

from holdfast.backends.objects import ObjectStore
from holdfast.errors import Corrupt, MissingObject, ObjectNotFound
from holdfast.limits import SOURCE_FILE_BYTES, SOURCE_STAGED_SECONDS
from holdfast.pipeline.codec import Damaged, journal_rows
from holdfast.pipeline.journal_chunks import Piece, Stores, not_staged
from holdfast.pipeline.logs import DamagedLines, LogPiece, Reached, activity_rows
from holdfast.pipeline.source import tables
from holdfast.pipeline.source.filters import Conditions
from holdfast.pipeline.source.options import Options
from holdfast.pipeline.views import View
from holdfast.runtime.activity.format import LogFile

Part = TypeVar("Part")


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Pieces of journals."""

    pieces: list[Piece]


class Logs(msgspec.Struct, frozen=True, tag=True):
    """Files of session logs."""

    pieces: list[LogPiece]


class Staged(msgspec.Struct, frozen=True, tag=True):
    """Rows in an Arrow file."""

    store: str
    path: str


Share = Pieces | Logs | Staged  # What one executor reads.


def shares(view: View, options: Options, conditions: Conditions) -> list[Share]:
    """Everything that a batch read of a table takes."""
    sweep(options.staging)
    universes = [universe for universe in view.universes() if conditions.allow(universe=universe)]
    if options.table == "journal":
        located = (piece for universe in universes for piece in _journal(view, universe, options, conditions))
        return _of_pieces(view, located, options)
    if options.table == "activity":
        files = (
            _log(view, file, options)
            for universe in universes
            for file in view.logs(universe)
            if conditions.allow(universe=universe, session=file.session, kind=file.kind, file=file.id)
        )
        return [Logs(part) for part in packed(files, lambda piece: piece.size - piece.start, SOURCE_FILE_BYTES)]
    store = view.stores.staging(options.staging)
    found_rows = (batch for universe in universes for batch in tables.batches(view, options.table, universe))
    wanted = (batch for batch in map(conditions.apply, found_rows) if batch.num_rows)
    return [_stage(store, options.staging, batch) for batch in wanted]


def read(share: Share, options: Options, conditions: Conditions) -> Iterator[pa.RecordBatch]:
    """The rows of a share; on an executor.

    Raises:
        Corrupt: something of it is damaged, unless damage is to be passed over.
    """
    stores = Stores(options.config.storage)
    for batch in _batches(share, stores, skips_damage=options.skips_damage):
        wanted = conditions.apply(batch)
        if wanted.num_rows:
            yield wanted


def packed(parts: Iterable[Part], weight: Callable[[Part], int], target: int) -> Iterator[list[Part]]:
    """The parts in order, as many together as weigh about `target`."""
    load: list[Part] = []
    weighs = 0
    for part in parts:
        load.append(part)
        weighs += weight(part)
        if weighs >= target:
            yield load
            load, weighs = [], 0
    if load:
        yield load


def sweep(staging: str) -> None:
    """Remove what earlier reads have staged in a local folder and nobody can be reading any more."""
    folder = Path(staging.removeprefix("dir:"))
    if not staging.startswith("dir:") or not folder.is_dir():
        return
    before = time.time() - SOURCE_STAGED_SECONDS
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if file.is_file() and file.stat().st_mtime < before:
                file.unlink()


def heads(view: View) -> dict[str, int]:
    """How far every journal has come, by universe and world."""
    return {
        f"{universe}/{name}": view.head(universe, name)
        for universe in view.universes()
        for name in view.world_names(universe)
    }


def ends(view: View) -> dict[str, int]:
    """How far every session log has come, in bytes up to its last whole line, by universe and file."""
    return {
        f"{universe}/{file.id}": view.log_end(file) for universe in view.universes() for file in view.logs(universe)
    }


def onward(options: Options, start: dict[str, int], found: dict[str, int]) -> dict[str, int]:
    """Where a stream that has read up to `start` goes: an offset never goes back, and what was deleted stays.

    Raises:
        Corrupt: a journal ends before what was read of it, so other records will get the same heights.
    """
    for key, place in found.items():
        # The journal of a deleted world ends at 0. A session log loses bad lines at its end when it is rotated.
        if options.table == "journal" and 0 < place < start.get(key, 0) and not options.skips_damage:
            raise Corrupt(
                f"The stream has read {key} up to {start[key]}, and it ends at {place}: the plane was restored from an "
                'older backup. Begin without the checkpoint, or give option("damage", "skip") to pass over new records '
                "below"
            )
    return {**start, **{key: max(place, start.get(key, 0)) for key, place in found.items()}}


def between(view: View, options: Options, start: dict[str, int], end: dict[str, int]) -> list[Share]:
    """What came between two offsets of a stream. The same two give the same rows, whatever was added since."""
    sweep(options.staging)
    grown = {key: (start.get(key, 0), until) for key, until in end.items() if until > start.get(key, 0)}
    if options.table == "journal":
        located = (piece for key, span in grown.items() for piece in _span(view, key, span, options))
        return _of_pieces(view, located, options)
    files = (
        msgspec.structs.replace(_log(view, file, options, start=span[0]), size=span[1])
        for universe in sorted({key.partition("/")[0] for key in grown})
        for file in view.logs(universe)
        if (span := grown.get(f"{universe}/{file.id}")) is not None
    )
    return [Logs(part) for part in packed(files, lambda piece: piece.size - piece.start, SOURCE_FILE_BYTES)]


def limited(start: dict[str, int], end: dict[str, int], rows: int) -> dict[str, int]:
    """An offset between the two that is at most `rows` behind `start`; whoever is furthest behind goes first."""
    left, reached = rows, dict(start)
    for key in sorted(end, key=lambda key: start.get(key, 0) - end[key]):
        step = min(max(end[key] - start.get(key, 0), 0), left)
        if step:
            reached[key] = start.get(key, 0) + step
            left -= step
    return reached


def _of_pieces(view: View, located: Iterable[Piece], options: Options) -> list[Share]:
    found = view.reached(located, options.staging)
    return [Pieces(part) for part in packed(found, lambda piece: piece.rows, options.partition_rows)]


def _journal(view: View, universe: str, options: Options, conditions: Conditions) -> Iterator[Piece]:
    low, high = conditions.bounds("height")
    for name in view.world_names(universe):
        if conditions.allow(world=name) and (world := view.world(universe, name)) is not None:
            head = world.head if high is None else min(world.head, high + 1)
            yield from view.located(msgspec.structs.replace(world, head=head), max(low or 0, 0), options.staging)


def _span(view: View, key: str, span: tuple[int, int], options: Options) -> Iterator[Piece]:
    universe, _, name = key.partition("/")
    world = view.world(universe, name)
    if world is not None:  # Else it was deleted since, and has no history any more.
        yield from view.located(msgspec.structs.replace(world, head=span[1]), span[0], options.staging)


def _log(view: View, file: LogFile, options: Options, *, start: int = 0) -> LogPiece:
    try:
        return view.log_piece(file, options.staging, start=start)
    except MissingObject:
        # It stays missing, in no store: whoever reads it tells of damage, or passes it over.
        return LogPiece(file.universe, file.session, file.kind, file.id, "", file.path, start, file.size)


def _stage(store: ObjectStore, url: str, batch: pa.RecordBatch) -> Staged:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    path = f"rows/{hashlib.sha256(data).hexdigest()}.arrow"
    store.put(path, data)
    return Staged(url, path)


def _batches(share: Share, stores: Stores, *, skips_damage: bool) -> Iterator[pa.RecordBatch]:
    if isinstance(share, Staged):
        try:
            data = stores(share.store).get(share.path)
        except ObjectNotFound as error:
            raise not_staged(share.path, share.store) from error
        with pa.ipc.open_file(data) as file:
            yield from (file.get_batch(n) for n in range(file.num_record_batches))
        return
    rows = journal_rows(share.pieces, stores) if isinstance(share, Pieces) else activity_rows(share.pieces, stores)
    for found in rows:
        if isinstance(found, pa.RecordBatch):
            yield found
        elif not skips_damage and not _is_fine(found):
            raise Corrupt(_told(found))


def _is_fine(found: Damaged | DamagedLines | Reached) -> bool:
    """A torn line is about to be written, or never was: it hides nothing that anybody was promised."""
    return isinstance(found, Reached) or (isinstance(found, DamagedLines) and found.reason == "torn")


def _told(found: Damaged | DamagedLines | Reached) -> str:
    if isinstance(found, Damaged):
        what = f"World {found.world} of {found.universe}, heights {found.start} to {found.end}: {found.detail}"
    elif isinstance(found, DamagedLines):
        what = f"Session log {found.file} of {found.universe}, lines {found.start} to {found.end}: {found.detail}"
    else:
        what = ""
    return f'{what}. To read the rest, give option("damage", "skip")'
