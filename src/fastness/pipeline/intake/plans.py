"""Plans which records to ingest next: batches of bounded size, each for one commit."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from fastness.limits import INGEST_CHUNK_BYTES, INGEST_WORLD_ROWS, INGEST_WORLDS_MAX
from fastness.pipeline.intake.journal_tasks import Item
from fastness.pipeline.intake.quarantine import REWOUND, Quarantined
from fastness.pipeline.intake.task_payloads import PayloadPacker, TaskPayload
from fastness.pipeline.journal_chunks import JournalChunk, WorldView
from fastness.pipeline.lake.tables import Move
from fastness.pipeline.views import View
from fastness.pipeline.views.view import WorldSummary

JOURNAL = "journal"


class WorldRange(msgspec.Struct, frozen=True):
    """The range of a world that a commit ingests: its watermarks before and after."""

    universe: str
    world: str
    heights: Move
    segment_checks: Move  # All segments below this height are checked.
    fingerprint: int | None  # Fingerprint of the lake's last record; None: an earlier range of this plan has it.


class Batch(msgspec.Struct):
    """The content of one commit."""

    staging: str
    payload: TaskPayload
    ranges: list[WorldRange] = []
    items: list[Item] = []
    found: list[Quarantined] = []  # Damage that is known without reading a record.
    size: int = 0


def journal_watermark(universe: str, world: str) -> str:
    return f"journal/{universe}/{world}"


def tip_watermark(universe: str, world: str) -> str:
    return f"tip/{universe}/{world}"


def segment_watermark(universe: str, world: str) -> str:
    return f"segments/{universe}/{world}"


class Plan:
    """Plans the worlds of a view, from their watermarks on."""

    def __init__(
        self,
        view: View,
        staging: str,
        *,
        heights: Callable[[str], int],
        segment_checks: Callable[[str], int],
        rewound_sources: set[tuple[str, str, str]],
        diverged_worlds: set[tuple[str, str]],
        batch_bytes: int,
        packer: PayloadPacker | None,
    ) -> None:
        """Create a plan; `heights` and `segment_checks` look up watermarks of the tables.

        `rewound_sources` were rewound in an earlier run. `diverged_worlds` have another history than the lake; they
        are skipped.
        """
        self._view = view
        self._staging = staging
        self._heights = heights
        self._check_segments = segment_checks
        self._rewound_sources = rewound_sources
        self._diverged_worlds = diverged_worlds
        self._batch_bytes = batch_bytes
        self._packer = packer
        self._count = 0

    def batches(self) -> Iterator[Batch]:
        """The batches, to be committed in order: if one is not committed, none after it may be."""
        batch = self._new_batch()
        for universe in self._view.universes():
            for world in self._worlds_with_news(universe):
                last: WorldRange | None = None
                is_done = False
                while not is_done:
                    last = self._add_range(batch, world, last)
                    is_done = last is None or last.heights.target >= world.head
                    is_full = batch.size >= self._batch_bytes or len(batch.ranges) >= INGEST_WORLDS_MAX
                    if is_full or not is_done:  # A commit moves a watermark once, so a world continues in the next.
                        yield self._make_readable(batch)
                        batch = self._new_batch()
        if batch.ranges or batch.found:
            yield self._make_readable(batch)

    def _worlds_with_news(self, universe: str) -> Iterator[WorldView]:
        """The worlds for which `_add_range` may have something to do. Only these are read completely."""
        for summary in self._view.world_summaries(universe):
            if (universe, summary.name) in self._diverged_worlds or self._is_ingested(universe, summary):
                continue
            world = self._view.world(universe, summary.name)
            if world is not None:
                yield world

    def _is_ingested(self, universe: str, world: WorldSummary) -> bool:
        return (
            world.incarnation == 1
            and world.head == self._heights(journal_watermark(universe, world.name))
            and world.cold_below <= self._check_segments(segment_watermark(universe, world.name))
            and (universe, JOURNAL, world.name) not in self._rewound_sources
        )

    def _add_range(self, batch: Batch, world: WorldView, last: WorldRange | None) -> WorldRange | None:
        """Add the next range of a world, after the last one of this plan; None if there is nothing to do."""
        universe, name = world.universe, world.name
        if last is None:
            start = self._heights(journal_watermark(universe, name))
            checked_below = self._check_segments(segment_watermark(universe, name))
            fingerprint: int | None = self._heights(tip_watermark(universe, name)) if start else 0
        else:
            start, checked_below, fingerprint = last.heights.target, last.segment_checks.target, None
        if world.head < start:
            batch.found.append(_rewound(world, start))
            return None
        was_rewound = last is None and (universe, JOURNAL, name) in self._rewound_sources
        is_checked = all(segment.end < checked_below for segment in world.segments)
        # A world that was created again may have as many records as the one before.
        must_compare = was_rewound or (last is None and world.incarnation > 1)
        if start == world.head and is_checked and not must_compare:
            return None
        chunks, before = self._range_chunks(
            batch, world, start, with_preceding=bool(fingerprint) and (start < world.head or must_compare)
        )
        end = max(start, chunks[-1].end + 1) if chunks else start
        unchecked = self._unchecked_segments(batch, world, checked_below, start)
        verified = max((chunk.end + 1 for chunk in (*chunks, *unchecked) if not chunk.hot), default=checked_below)
        for n, group in enumerate(_group_chunks(chunks) or [[]]):
            item = Item(universe, name, group, checked_below=checked_below)
            if n == 0:
                item = msgspec.structs.replace(
                    item, segment_checks=unchecked, before=before, height=start, fingerprint=fingerprint or 0
                )
            batch.items.append(item)
            batch.size += item.size
        world_range = WorldRange(universe, name, Move(start, end), Move(checked_below, verified), fingerprint)
        batch.ranges.append(world_range)
        return world_range

    def _locate_chunks(self, batch: Batch, world: WorldView, start: int) -> list[JournalChunk]:
        if self._packer is None:
            return self._view.locate_chunks(world, start, batch.staging)
        chunks = self._view.locate_chunks(world, start, self._packer.staging)
        return self._packer.pack(chunks, batch.staging, batch.payload)

    def _make_readable(self, batch: Batch) -> Batch:
        """The batch with all of its segments in stores that executors can read."""
        if self._view.objects_url is not None:
            return batch
        cold = {chunk.path: chunk for item in batch.items for chunk in item.all_chunks if not chunk.hot}
        staging = batch.staging if self._packer is None else self._packer.staging
        readable = self._view.make_readable(cold.values(), staging)
        if self._packer is not None:  # One at a time: packing removes the local copy.
            packer = self._packer
            readable = (packed for chunk in readable for packed in packer.pack([chunk], batch.staging, batch.payload))
        locations = {chunk.path: chunk for chunk in readable}
        batch.items = [item.with_locations(locations) for item in batch.items]
        return batch

    def _new_batch(self) -> Batch:
        self._count += 1
        return Batch(f"{self._staging}/{self._count}", TaskPayload())

    def _range_chunks(
        self, batch: Batch, world: WorldView, start: int, *, with_preceding: bool
    ) -> tuple[list[JournalChunk], JournalChunk | None]:
        """The chunks of the next range, and the one with the record before it."""
        begin = start - 1 if with_preceding else start
        window = msgspec.structs.replace(world, head=min(world.head, start + INGEST_WORLD_ROWS))
        chunks = self._locate_chunks(batch, window, begin)
        before = chunks[0] if with_preceding and chunks and chunks[0].path else None
        # A segment that extends beyond the window is ingested whole, because it is read whole.
        wanted = [msgspec.structs.replace(chunk, first=max(chunk.first, start), last=None) for chunk in chunks]
        return [chunk for chunk in wanted if chunk.end >= start], before

    def _unchecked_segments(self, batch: Batch, world: WorldView, checked_below: int, start: int) -> list[JournalChunk]:
        """Unchecked segments whose records are in the lake: they were ingested while they were hot."""
        child = [segment for segment in world.segments if checked_below <= segment.end < start]
        if not child:
            return []
        cut = msgspec.structs.replace(world, head=child[-1].end + 1)
        chunks = self._locate_chunks(batch, cut, child[0].start)
        return [chunk for chunk in chunks if not chunk.hot and chunk.end < start]


def _group_chunks(chunks: Sequence[JournalChunk]) -> list[list[JournalChunk]]:
    groups: list[list[JournalChunk]] = []
    size = 0
    for chunk in chunks:
        if not groups or size + chunk.size > INGEST_CHUNK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.size
    return groups


def _rewound(world: WorldView, start: int) -> Quarantined:
    return Quarantined(
        world.universe,
        JOURNAL,
        world.name,
        world.head,
        start - 1,
        REWOUND,
        f"the plane has {world.head} records, the lake {start}: the plane was restored from an older backup, "
        "or the world was deleted and created again",
    )
