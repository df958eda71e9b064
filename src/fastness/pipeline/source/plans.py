"""Plans reads: what each partition reads. No Spark here.

journal     chunks: cold segments where they are, hot records staged; packed into partitions of about equal size
activity    session log files, each from an offset on
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

from fastness.backends.objects import ObjectStore
from fastness.errors import Corrupt, MissingObject, ObjectNotFound
from fastness.limits import SOURCE_FILE_BYTES, SOURCE_STAGED_SECONDS
from fastness.pipeline.codec import Damaged, journal_rows
from fastness.pipeline.journal_chunks import JournalChunk, Stores, staged_object_missing
from fastness.pipeline.logs import DamagedLines, LogChunk, ReadPosition, activity_rows
from fastness.pipeline.source import tables
from fastness.pipeline.source.options import Options
from fastness.pipeline.views import View
from fastness.runtime.activity.format import LogFile

Part = TypeVar("Part")


class JournalPartition(msgspec.Struct, frozen=True, tag=True):
    """Chunks of journals."""

    chunks: list[JournalChunk]


class LogPartition(msgspec.Struct, frozen=True, tag=True):
    """Chunks of session log files."""

    chunks: list[LogChunk]


class StagedPartition(msgspec.Struct, frozen=True, tag=True):
    """Rows in an Arrow file."""

    store: str
    path: str


Partition = JournalPartition | LogPartition | StagedPartition  # What one task reads.


def plan_partitions(view: View, options: Options) -> list[Partition]:
    """The partitions of a batch read."""
    delete_stale(options.staging)
    selection, universes = options.selection, list(view.universes())
    if options.table == "journal":
        located = (chunk for universe in universes for chunk in _selected_chunks(view, universe, options))
        return _journal_partitions(view, located, options)
    if options.table == "activity":
        files = (
            _log_chunk(view, file, options)
            for universe in universes
            for file in view.logs(universe)
            if selection.has_kind(file.kind)
        )
        return [
            LogPartition(part)
            for part in pack_by_weight(files, lambda chunk: chunk.size - chunk.start, SOURCE_FILE_BYTES)
        ]
    store = view.stores.staging(options.staging)
    found_rows = (batch for universe in universes for batch in tables.batches(view, options.table, universe))
    wanted = (batch for batch in map(selection.apply, found_rows) if batch.num_rows)
    return [_stage(store, options.staging, batch) for batch in wanted]


def read(partition: Partition, options: Options) -> Iterator[pa.RecordBatch]:
    """The rows of a partition; runs on an executor.

    Raises:
        Corrupt: some of it is damaged, and the option `damage` is not `skip`.
    """
    stores = Stores(options.config.storage)
    for batch in _batches(partition, stores, skips_damage=options.skips_damage):
        wanted = options.selection.apply(batch)
        if wanted.num_rows:
            yield wanted


def pack_by_weight(parts: Iterable[Part], weight: Callable[[Part], int], target: int) -> Iterator[list[Part]]:
    """The items in order, grouped to a total weight of about `target`."""
    load: list[Part] = []
    total = 0
    for part in parts:
        load.append(part)
        total += weight(part)
        if total >= target:
            yield load
            load, total = [], 0
    if load:
        yield load


def delete_stale(staging: str) -> None:
    """Delete old staged files in a local folder that no read uses any more."""
    folder = Path(staging.removeprefix("dir:"))
    if not staging.startswith("dir:") or not folder.is_dir():
        return
    cutoff = time.time() - SOURCE_STAGED_SECONDS
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if file.is_file() and file.stat().st_mtime < cutoff:
                file.unlink()


def heads(view: View) -> dict[str, int]:
    """The head of every journal, by universe and world."""
    return {
        f"{universe}/{name}": view.head(universe, name)
        for universe in view.universes()
        for name in view.world_names(universe)
    }


def log_ends(view: View) -> dict[str, int]:
    """The end of the last complete line of every session log in bytes, by universe and file."""
    return {
        f"{universe}/{file.id}": view.log_end(file) for universe in view.universes() for file in view.logs(universe)
    }


def advance_offset(options: Options, start: dict[str, int], found: dict[str, int]) -> dict[str, int]:
    """The next offset of a stream that has read up to `start`: offsets never decrease, and keys of deleted data stay.

    Raises:
        Corrupt: a journal is shorter than what was read of it, so new records will reuse heights.
    """
    for key, position in found.items():
        # A deleted world's journal ends at 0. Rotation may cut bad lines off the end of a session log.
        if options.table == "journal" and 0 < position < start.get(key, 0) and not options.skips_damage:
            raise Corrupt(
                f"The stream has read {key} up to {start[key]}, but it ends at {position}: the plane was restored from "
                'an older backup. Start without the checkpoint, or set option("damage", "skip") to skip new records '
                "below that height"
            )
    return {**start, **{key: max(position, start.get(key, 0)) for key, position in found.items()}}


def partitions_between(view: View, options: Options, start: dict[str, int], end: dict[str, int]) -> list[Partition]:
    """The partitions between two offsets of a stream. Equal offsets give equal rows, even if more was appended."""
    delete_stale(options.staging)
    grown = {key: (start.get(key, 0), until) for key, until in end.items() if until > start.get(key, 0)}
    if options.table == "journal":
        located = (chunk for key, span in grown.items() for chunk in _chunks_between(view, key, span, options))
        return _journal_partitions(view, located, options)
    files = (
        msgspec.structs.replace(_log_chunk(view, file, options, start=span[0]), size=span[1])
        for universe in sorted({key.partition("/")[0] for key in grown})
        for file in view.logs(universe)
        if (span := grown.get(f"{universe}/{file.id}")) is not None and options.selection.has_kind(file.kind)
    )
    return [
        LogPartition(part) for part in pack_by_weight(files, lambda chunk: chunk.size - chunk.start, SOURCE_FILE_BYTES)
    ]


def limit_offset(start: dict[str, int], end: dict[str, int], rows: int) -> dict[str, int]:
    """An offset at most `rows` after `start`, and not after `end`; the keys with the most unread rows go first."""
    left, offset = rows, dict(start)
    for key in sorted(end, key=lambda key: start.get(key, 0) - end[key]):
        step = min(max(end[key] - start.get(key, 0), 0), left)
        if step:
            offset[key] = start.get(key, 0) + step
            left -= step
    return offset


def _journal_partitions(view: View, located: Iterable[JournalChunk], options: Options) -> list[Partition]:
    found = view.make_readable(located, options.staging)
    return [JournalPartition(part) for part in pack_by_weight(found, lambda chunk: chunk.rows, options.partition_rows)]


def _selected_chunks(view: View, universe: str, options: Options) -> Iterator[JournalChunk]:
    for name in view.world_names(universe):
        if options.selection.has_world(name) and (world := view.world(universe, name)) is not None:
            yield from view.locate_chunks(world, options.selection.from_height, options.staging)


def _chunks_between(view: View, key: str, span: tuple[int, int], options: Options) -> Iterator[JournalChunk]:
    universe, _, name = key.partition("/")
    world = view.world(universe, name) if options.selection.has_world(name) else None
    if world is not None:  # None: not wanted, or deleted since, so it has no journal any more.
        start = max(span[0], options.selection.from_height)
        yield from view.locate_chunks(msgspec.structs.replace(world, head=span[1]), start, options.staging)


def _log_chunk(view: View, file: LogFile, options: Options, *, start: int = 0) -> LogChunk:
    try:
        return view.log_chunk(file, options.staging, start=start)
    except MissingObject:
        # In no store: reading it reports the damage, or skips it.
        return LogChunk(file.universe, file.session, file.kind, file.id, "", file.path, start, file.size)


def _stage(store: ObjectStore, url: str, batch: pa.RecordBatch) -> StagedPartition:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    path = f"rows/{hashlib.sha256(data).hexdigest()}.arrow"
    store.put(path, data)
    return StagedPartition(url, path)


def _batches(partition: Partition, stores: Stores, *, skips_damage: bool) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, StagedPartition):
        try:
            data = stores(partition.store).get(partition.path)
        except ObjectNotFound as error:
            raise staged_object_missing(partition.path, partition.store) from error
        with pa.ipc.open_file(data) as file:
            yield from (file.get_batch(n) for n in range(file.num_record_batches))
        return
    rows = (
        journal_rows(partition.chunks, stores)
        if isinstance(partition, JournalPartition)
        else activity_rows(partition.chunks, stores)
    )
    for found in rows:
        if isinstance(found, pa.RecordBatch):
            yield found
        elif not skips_damage and not _is_harmless(found):
            raise Corrupt(_damage_message(found))


def _is_harmless(found: Damaged | DamagedLines | ReadPosition) -> bool:
    """Whether damage can be ignored: a torn line is still being written, or was never acknowledged."""
    return isinstance(found, ReadPosition) or (isinstance(found, DamagedLines) and found.reason == "torn")


def _damage_message(found: Damaged | DamagedLines | ReadPosition) -> str:
    if isinstance(found, Damaged):
        description = f"World {found.world} of {found.universe}, heights {found.start} to {found.end}: {found.detail}"
    elif isinstance(found, DamagedLines):
        description = (
            f"Session log {found.file} of {found.universe}, lines {found.start} to {found.end}: {found.detail}"
        )
    else:
        description = ""
    return f'{description}. To read the rest, set option("damage", "skip")'
