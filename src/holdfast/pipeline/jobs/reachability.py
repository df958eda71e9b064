"""`reachability`: blobs that nothing refers to, and how many bytes they take. It marks, and deletes nothing.

    key space ─┐
    segments  ─┼──► hashes of blobs ──► marked ──► and what their bytes name, until nothing new is found
    logs      ─┘

Whatever looks like the name of a blob counts as a reference, wherever it stands: callers keep names in entries, states
and messages of their own. Names inside of what is sealed or compressed are not seen, so what this job tells is where to
look, and not what to delete. A blob that is young is told and does not count as reclaimable: whoever stored it may be
about to refer to it. Where damage hides references, nothing of its universe counts.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.errors import MissingObject
from holdfast.kv import Subspace, prefix_range
from holdfast.layers import blobs
from holdfast.limits import BLOB_GRACE_SECONDS, SCAN_TASK_BYTES
from holdfast.pipeline import blob_references, tasks
from holdfast.pipeline.blob_references import Found, Search, Source, Wanted
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.lake import Lake, attempts, staging
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.schemas import UNREACHABLE
from holdfast.pipeline.views import View, open_view
from holdfast.pipeline.views.rows import BlobRow, hashes_in
from holdfast.runtime.maintenance.scan import walk


def run(
    spark: SparkSession,
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    grace_seconds: float = BLOB_GRACE_SECONDS,
    now: datetime | None = None,
) -> JobResult:
    """Find the blobs of each universe that nothing refers to. `ok` says that everything could be searched.

    Raises:
        TransactionConflict: others always wrote the table at the same moment.
    """
    begun, now = time.monotonic(), now or datetime.now(UTC)
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
    with open_view(config) as view, staging.staged(lake.place) as staged:
        for n, universe in enumerate(view.universes()):
            mark = _Mark(spark, config, view, universe, staged.below(f"universe-{n}"))
            mark.run()
            findings += [{"universe": universe, "reason": "missing", "detail": what} for what in mark.missing]
            found = list(_unreachable(view, universe, mark))
            rows = _rows(found, before, now, timedelta(seconds=grace_seconds), is_certain=not mark.missing)
            batches.append(pa.RecordBatch.from_pylist(rows, UNREACHABLE.schema))
            notes.append(_count(counts, universe, mark, rows))
            if progress is not None:
                progress("universes", n + 1, n + 1)

    def put() -> None:
        table.refresh()
        table.overwrite(batches, universes=config.universes or None)

    attempts.until_committed(f"the table {UNREACHABLE.name}", put)
    counts[UNREACHABLE.name] = sum(batch.num_rows for batch in batches)
    seconds = time.monotonic() - begun
    return JobResult(job="reachability", ok=not findings, rows=counts, seconds=seconds, findings=findings, notes=notes)


class _Mark:
    """The blobs of one universe, and which of them something refers to. About 200 bytes of memory for each."""

    def __init__(self, spark: SparkSession, config: Config, view: View, universe: str, staged: Place) -> None:
        self.blobs = {blob.hash: blob for blob in view.blobs(universe)}
        self.marked: set[str] = set()
        self.missing: list[str] = []  # What could not be searched.
        self._spark = spark
        self._storage = config.storage
        self._view = view
        self._universe = universe
        self._staged = staged

    def run(self) -> None:
        """Mark everything that can be reached."""
        if not self.blobs:
            return
        Wanted.of(self.blobs).save(self._view.stores.staging(self._staged.store_url), _WANTED)
        new = self._add(reference.hash for reference in self._view.references(self._universe))
        new |= self._add(_elsewhere(self._view))
        new |= self._search(self._histories())
        while new:  # Blobs may name others.
            small = [hash for hash in new if self.blobs[hash].inline]
            large = [self.blobs[hash] for hash in new if not self.blobs[hash].inline]
            new = self._add(found for hash in small for found in hashes_in(self._inline(hash)))
            new |= self._search(self._bodies(large))
        staging.clear(self._staged)

    def _add(self, hashes: Iterable[str]) -> set[str]:
        """Mark those that are blobs; which of them were not marked before."""
        new = {hash for hash in hashes if hash in self.blobs and hash not in self.marked}
        self.marked |= new
        return new

    def _search(self, sources: Iterator[Source]) -> set[str]:
        """Have executors search the sources, a bounded number of bytes at a time."""
        new: set[str] = set()
        for wave in _waves(sources, SCAN_TASK_BYTES * tasks.parallelism(self._spark)):
            groups = tasks.balanced([source.size for source in wave], tasks.parallelism(self._spark))
            work = [
                msgspec.msgpack.encode(Search(self._storage, self._staged.store_url, _WANTED, [wave[n] for n in group]))
                for group in groups
            ]
            for answer in tasks.answers(self._spark, blob_references.search_encoded, work):
                found = msgspec.msgpack.decode(answer, type=Found)
                new |= self._add(found.hashes)
                self.missing += found.missing
        return new

    def _inline(self, hash: str) -> bytes:
        blob = self._view.database.read(blobs.find, self._universe, bytes.fromhex(hash))
        return b"" if blob is None or blob.inline is None else blob.inline

    def _histories(self) -> Iterator[Source]:
        """Segments of journals and files of session logs. Hot records are in the key space."""
        view = self._view
        yield from self._segments()
        for file in view.logs(self._universe):
            try:
                piece = view.log_piece(file, self._staged.store_url)
            except MissingObject:
                self.missing.append(f"the session log {file.name}")
                continue
            yield Source(f"the session log {file.name}", piece.store, piece.path, file.size, piece.staged)

    def _segments(self) -> Iterator[Source]:
        view, staged = self._view, self._staged.store_url
        worlds = view.worlds(self._universe)
        if view.objects_url is not None:
            for each in (segment for world in worlds for segment in world.segments):
                yield Source(f"the segment {each.object_path}", view.objects_url, each.object_path, each.size, False)
            return
        cold = (piece for world in worlds for piece in view.located(world, 0, staged) if not piece.hot)
        for piece in view.reached(cold, staged):
            yield Source(f"the segment {piece.path}", piece.store, piece.path, piece.size, piece.staged)

    def _bodies(self, large: list[BlobRow]) -> Iterator[Source]:
        for blob in large:
            path = blobs.object_path(self._universe, bytes.fromhex(blob.hash))
            what, url = f"the blob {blob.hash}", self._view.objects_url
            is_staged = url is None
            if url is None:
                url = self._staged.store_url
                try:
                    self._view.stores.staging(url).put(path, self._view.blob(self._universe, blob.hash))
                except MissingObject:
                    self.missing.append(what)
                    continue
            yield Source(what, url, path, blob.size, is_staged)


def _elsewhere(view: View) -> Iterator[str]:
    """What looks like a hash in pairs that belong to no universe: callers write what they want there."""
    begin, end = Subspace("u").range()
    first, last = prefix_range(b"")
    for low, high in ((first, begin), (end, last)):
        for _, value in walk(view.database, low, high):
            yield from hashes_in(value)


def _waves(sources: Iterator[Source], wave_bytes: int) -> Iterator[list[Source]]:
    wave: list[Source] = []
    size = 0
    for source in sources:
        wave.append(source)
        size += source.size
        if size >= wave_bytes or len(wave) >= _WAVE_SOURCES:
            yield wave
            wave, size = [], 0
    if wave:
        yield wave


def _unreachable(view: View, universe: str, mark: _Mark) -> Iterator[dict[str, Any]]:
    """What nothing refers to, recorded or not; with the moment at which it was stored, where its store tells."""
    modified: dict[str, datetime] = {}
    folder = blobs.object_path(universe, b"").rstrip("/")
    for meta, at_ms in view.objects.times(folder) if view.objects is not None else ():
        hash, at = meta.path.rpartition("/")[2], datetime.fromtimestamp(at_ms / 1_000, UTC)
        if hash in mark.blobs:
            if hash not in mark.marked:
                modified[hash] = at
        else:
            yield {"universe": universe, "hash": hash, "size": meta.size, "place": "unrecorded", "modified_at": at}
    for hash, blob in mark.blobs.items():
        if hash not in mark.marked:
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


def _count(counts: dict[str, int], universe: str, mark: _Mark, rows: list[dict[str, Any]]) -> str:
    """Add what was found in a universe; the same for people."""
    reclaimable = [row["size"] for row in rows if row["reclaimable"]]
    size = sum(blob.size for blob in mark.blobs.values())
    lost = sum(row["size"] for row in rows)
    for name, number in (
        ("blobs", len(mark.blobs)),
        ("bytes", size),
        ("unreachable", len(rows)),
        ("unreachable_bytes", lost),
        ("reclaimable", len(reclaimable)),
        ("reclaimable_bytes", sum(reclaimable)),
    ):
        counts[name] += number
    said = f"{universe}: nothing refers to {len(rows):,} of {len(mark.blobs):,} blobs ({lost:,} of {size:,} bytes)"
    return f"{said}; {sum(reclaimable):,} bytes are old enough to be reclaimed"


_WANTED: Final = "wanted"
_WAVE_SOURCES: Final = 10_000
