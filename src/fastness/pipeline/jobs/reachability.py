"""`reachability`: find unreferenced blobs and their size. It deletes nothing.

    key space ─┐
    segments  ─┼──► hashes of blobs ──► marked ──► and the hashes in their bytes, until nothing new is found
    logs      ─┘

Anything that looks like a blob's hash counts as a reference, wherever it is: callers keep hashes in their own entries,
states and messages. Hashes inside encrypted or compressed data are not seen, so the result shows where to look, and not
what to delete. A young blob is listed but not counted as reclaimable: a reference to it may be about to be written.
If damage hides references, nothing in its universe counts as reclaimable."""

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from fastness.errors import MissingObject
from fastness.kv import Subspace, prefix_range
from fastness.layers import blobs
from fastness.layers.blobs import hashes_in
from fastness.limits import BLOB_GRACE_SECONDS, SCAN_TASK_BYTES
from fastness.pipeline import blob_references, ownership, tasks
from fastness.pipeline.blob_references import HashIndex, Search, SearchResult, Source
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake import Lake, retries, staging
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import UNREACHABLE
from fastness.pipeline.views import View, shared_view
from fastness.pipeline.views.rows import BlobRow
from fastness.runtime.maintenance.scan import scan_range


def run(
    spark: SparkSession | None,
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    grace_seconds: float = BLOB_GRACE_SECONDS,
    now: datetime | None = None,
    view: View | None = None,
) -> JobResult:
    """Find the unreferenced blobs of each universe, in `view` if one is given.

    `ok` means that everything could be searched.

    Raises:
        TransactionConflict: other runs committed the table first, too often.
    """
    started, now = time.monotonic(), now or datetime.now(UTC)
    lake = Lake(config.lake, config.storage)
    table = lake.table(UNREACHABLE)
    before = {
        (row["universe"], row["hash"]): row["since"] for row in table.rows(["universe", "hash", "since"]).to_pylist()
    }
    counts = dict.fromkeys(
        ("blobs", "bytes", "unreachable", "unreachable_bytes", "reclaimable", "reclaimable_bytes"), 0
    )
    batches: list[pa.RecordBatch] = []
    findings: list[dict[str, Any]] = []
    notes: list[str] = []
    with shared_view(config, view, with_forgotten=True) as plane, staging.temporary_folder(lake.location) as staged:
        ownership.check(lake, plane)
        for n, universe in enumerate(plane.universes()):
            marker = _BlobMarker(spark, config, plane, universe, staged.child(f"universe-{n}"))
            marker.run()
            findings += [
                {"universe": universe, "reason": "missing", "detail": description} for description in marker.missing
            ]
            found = list(_unreachable(plane, universe, marker))
            rows = _rows(found, before, now, timedelta(seconds=grace_seconds), is_certain=not marker.missing)
            batches.append(pa.RecordBatch.from_pylist(rows, UNREACHABLE.schema))
            notes.append(_add_counts(counts, universe, marker, rows))
            if progress is not None:
                progress("universes", n + 1, n + 1)

    def put() -> None:
        table.refresh()
        table.overwrite(batches, universes=config.universes or None)

    retries.retry_until_committed(f"the table {UNREACHABLE.name}", put)
    counts[UNREACHABLE.name] = sum(batch.num_rows for batch in batches)
    seconds = time.monotonic() - started
    return JobResult(job="reachability", ok=not findings, rows=counts, seconds=seconds, findings=findings, notes=notes)


class _BlobMarker:
    """The blobs of one universe, and which of them are referenced. Takes about 200 bytes of memory per blob."""

    def __init__(self, spark: SparkSession | None, config: Config, view: View, universe: str, staged: Location) -> None:
        self.blobs = {blob.hash: blob for blob in view.blobs(universe)}
        self.marked: set[str] = set()
        self.missing: list[str] = []  # Sources that could not be searched.
        self._spark = spark
        self._storage = config.storage
        self._view = view
        self._universe = universe
        self._staged = staged

    def run(self) -> None:
        """Mark every blob that can be reached."""
        if not self.blobs:
            return
        HashIndex.of(self.blobs).save(self._view.stores.staging(self._staged.store_url), _INDEX_PATH)
        new = self._add(reference.hash for reference in self._view.references(self._universe))
        new |= self._add(_hashes_outside_universes(self._view))
        new |= self._search(self._journal_and_log_sources())
        while new:  # Blobs may refer to other blobs.
            small = [hash for hash in new if self.blobs[hash].inline]
            large = [self.blobs[hash] for hash in new if not self.blobs[hash].inline]
            new = self._add(found for hash in small for found in hashes_in(self._inline(hash)))
            new |= self._search(self._blob_sources(large))
        staging.clear(self._staged)

    def _add(self, hashes: Iterable[str]) -> set[str]:
        """Mark those hashes that are blobs; returns the newly marked ones."""
        new = {hash for hash in hashes if hash in self.blobs and hash not in self.marked}
        self.marked |= new
        return new

    def _search(self, sources: Iterator[Source]) -> set[str]:
        """Search the sources on executors, a bounded number of bytes at a time; returns the newly marked blobs."""
        new: set[str] = set()
        for wave in _batches(sources, SCAN_TASK_BYTES * tasks.parallelism(self._spark)):
            groups = tasks.balanced([source.size for source in wave], tasks.parallelism(self._spark))
            work = [
                msgspec.msgpack.encode(
                    Search(self._storage, self._staged.store_url, _INDEX_PATH, [wave[n] for n in group])
                )
                for group in groups
            ]
            for result in tasks.execute(self._spark, blob_references.search_encoded, work):
                found = msgspec.msgpack.decode(result, type=SearchResult)
                new |= self._add(found.hashes)
                self.missing += found.missing
        return new

    def _inline(self, hash: str) -> bytes:
        blob = self._view.database.read(blobs.find, self._universe, bytes.fromhex(hash))
        return b"" if blob is None or blob.inline is None else blob.inline

    def _journal_and_log_sources(self) -> Iterator[Source]:
        """Journal segments and session log files. Hot records are in the key space."""
        view = self._view
        yield from self._segment_sources()
        for file in view.logs(self._universe):
            try:
                chunk = view.log_chunk(file, self._staged.store_url)
            except MissingObject:
                self.missing.append(f"the session log {file.name}")
                continue
            yield Source(f"the session log {file.name}", chunk.store, chunk.path, file.size, chunk.staged)

    def _segment_sources(self) -> Iterator[Source]:
        view, staged = self._view, self._staged.store_url
        worlds = view.worlds(self._universe)
        if view.objects_url is not None:
            for each in (segment for world in worlds for segment in world.segments):
                yield Source(f"the segment {each.object_path}", view.objects_url, each.object_path, each.size, False)
            return
        cold = (chunk for world in worlds for chunk in view.locate_chunks(world, 0, staged) if not chunk.hot)
        for chunk in view.make_readable(cold, staged):
            yield Source(f"the segment {chunk.path}", chunk.store, chunk.path, chunk.size, chunk.staged)

    def _blob_sources(self, large: list[BlobRow]) -> Iterator[Source]:
        for blob in large:
            path = blobs.object_path(self._universe, bytes.fromhex(blob.hash), blob.upload)
            description, url = f"the blob {blob.hash}", self._view.objects_url
            is_staged = url is None
            if url is None:
                url = self._staged.store_url
                try:
                    self._view.stores.staging(url).put(path, self._view.blob(self._universe, blob.hash))
                except MissingObject:
                    self.missing.append(description)
                    continue
            yield Source(description, url, path, blob.size, is_staged)


def _hashes_outside_universes(view: View) -> Iterator[str]:
    """Possible hashes in key-value pairs outside of all universes: callers may write anything there."""
    begin, end = Subspace("u").range()
    first, last = prefix_range(b"")
    for low, high in ((first, begin), (end, last)):
        for _, value in scan_range(view.database, low, high):
            yield from hashes_in(value)


def _batches(sources: Iterator[Source], batch_bytes: int) -> Iterator[list[Source]]:
    wave: list[Source] = []
    size = 0
    for source in sources:
        wave.append(source)
        size += source.size
        if size >= batch_bytes or len(wave) >= _BATCH_SOURCES:
            yield wave
            wave, size = [], 0
    if wave:
        yield wave


def _unreachable(view: View, universe: str, marker: _BlobMarker) -> Iterator[dict[str, Any]]:
    """Unreferenced blobs and unrecorded objects, with the time they were stored, if the store knows it."""
    modified: dict[str, datetime] = {}
    for meta, at_ms in view.objects.times(blobs.folder(universe)) if view.objects is not None else ():
        hash, at = blobs.parse_path(meta.path)[0], datetime.fromtimestamp(at_ms / 1_000, UTC)
        if hash in marker.blobs:
            if hash not in marker.marked:
                modified[hash] = at
        else:
            yield {"universe": universe, "hash": hash, "size": meta.size, "place": "unrecorded", "modified_at": at}
    for hash, blob in marker.blobs.items():
        if hash not in marker.marked:
            place = "keys" if blob.inline else "objects"
            at_or_none = modified.get(hash)
            yield {"universe": universe, "hash": hash, "size": blob.size, "place": place, "modified_at": at_or_none}


def _rows(
    found: list[dict[str, Any]],
    before: dict[tuple[str, str], datetime],
    now: datetime,
    grace: timedelta,
    *,
    is_certain: bool,
) -> list[dict[str, Any]]:
    rows = []
    for row in found:
        since = before.get((row["universe"], row["hash"]), now)
        is_old = now - (row["modified_at"] or since) >= grace
        rows.append({**row, "since": since, "seen_at": now, "reclaimable": is_old and is_certain})
    return rows


def _add_counts(counts: dict[str, int], universe: str, marker: _BlobMarker, rows: list[dict[str, Any]]) -> str:
    """Add the counts of a universe; returns them as a sentence."""
    reclaimable = [row["size"] for row in rows if row["reclaimable"]]
    size = sum(blob.size for blob in marker.blobs.values())
    lost = sum(row["size"] for row in rows)
    for name, number in (
        ("blobs", len(marker.blobs)),
        ("bytes", size),
        ("unreachable", len(rows)),
        ("unreachable_bytes", lost),
        ("reclaimable", len(reclaimable)),
        ("reclaimable_bytes", sum(reclaimable)),
    ):
        counts[name] += number
    summary = f"{universe}: {len(rows):,} of {len(marker.blobs):,} blobs are unreferenced ({lost:,} of {size:,} bytes)"
    return f"{summary}; {sum(reclaimable):,} bytes are reclaimable"


_INDEX_PATH: Final = "wanted"
_BATCH_SOURCES: Final = 10_000
