"""Which records of which worlds come next: batches of a bounded size, each for one commit."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from holdfast.limits import INGEST_CHUNK_BYTES, INGEST_WORLD_ROWS, INGEST_WORLDS_MAX
from holdfast.pipeline.intake.journals import Item
from holdfast.pipeline.intake.quarantines import REWOUND, Quarantined
from holdfast.pipeline.intake.task_payloads import Courier, Load
from holdfast.pipeline.journal_chunks import Piece, WorldView
from holdfast.pipeline.lake.tables import Move
from holdfast.pipeline.views import View

JOURNAL = "journal"


class Stretch(msgspec.Struct, frozen=True):
    """Where a world is in the lake, and where it will be."""

    universe: str
    world: str
    heights: Move
    verdicts: Move  # Below which height all segments have one.
    tip: int | None  # Of the last record that is in the lake; None: the stretch before it in this plan has it.


class Batch(msgspec.Struct):
    """What one commit takes in."""

    staging: str
    load: Load
    stretches: list[Stretch] = []
    items: list[Item] = []
    found: list[Quarantined] = []  # What is known to be wrong without a look into any record.
    size: int = 0


def journal_mark(universe: str, world: str) -> str:
    return f"journal/{universe}/{world}"


def tip_mark(universe: str, world: str) -> str:
    return f"tip/{universe}/{world}"


def segment_mark(universe: str, world: str) -> str:
    return f"segments/{universe}/{world}"


class Plan:
    """Goes through the worlds of a view, from where their marks are."""

    def __init__(
        self,
        view: View,
        staging: str,
        *,
        heights: Callable[[str], int],
        verdicts: Callable[[str], int],
        suspects: set[tuple[str, str, str]],
        held: set[tuple[str, str]],
        batch_bytes: int,
        courier: Courier | None,
    ) -> None:
        """`heights` and `verdicts` tell where marks are.

        `suspects` were rewound when they were last seen. `held` have another history, and nothing of them is taken.
        """
        self._view = view
        self._staging = staging
        self._heights = heights
        self._verdicts = verdicts
        self._suspects = suspects
        self._held = held
        self._batch_bytes = batch_bytes
        self._courier = courier
        self._count = 0

    def batches(self) -> Iterator[Batch]:
        """Each of them is committed, or none of those behind it is."""
        batch = self._new()
        for universe in self._view.universes():
            for world in self._view.worlds(universe):
                if (universe, world.name) in self._held:
                    continue
                last: Stretch | None = None
                is_over = False
                while not is_over:
                    last = self._add(batch, world, last)
                    is_over = last is None or last.heights.target >= world.head
                    is_full = batch.size >= self._batch_bytes or len(batch.stretches) >= INGEST_WORLDS_MAX
                    if is_full or not is_over:  # A mark moves once in a commit, so a world goes on in the next one.
                        yield self._reached(batch)
                        batch = self._new()
        if batch.stretches or batch.found:
            yield self._reached(batch)

    def _add(self, batch: Batch, world: WorldView, last: Stretch | None) -> Stretch | None:
        """Add the next stretch of a world, behind the last one of this plan; None if there is nothing to do."""
        universe, name = world.universe, world.name
        if last is None:
            start = self._heights(journal_mark(universe, name))
            verdicted = self._verdicts(segment_mark(universe, name))
            tip: int | None = self._heights(tip_mark(universe, name)) if start else 0
        else:
            start, verdicted, tip = last.heights.target, last.verdicts.target, None
        if world.head < start:
            batch.found.append(_rewound(world, start))
            return None
        is_suspect = last is None and (universe, JOURNAL, name) in self._suspects
        is_judged = all(segment.end < verdicted for segment in world.segments)
        if start == world.head and is_judged and not is_suspect:
            return None
        pieces, before = self._pieces(batch, world, start, look_back=bool(tip) and (start < world.head or is_suspect))
        end = max(start, pieces[-1].end + 1) if pieces else start
        only = self._only_verdicts(batch, world, verdicted, start)
        reached = max((piece.end + 1 for piece in (*pieces, *only) if not piece.hot), default=verdicted)
        for n, chunk in enumerate(_chunks(pieces) or [[]]):
            item = Item(universe, name, chunk, verdicted=verdicted)
            if n == 0:
                item = msgspec.structs.replace(item, verdicts=only, before=before, height=start, tip=tip or 0)
            batch.items.append(item)
            batch.size += item.size
        stretch = Stretch(universe, name, Move(start, end), Move(verdicted, reached), tip)
        batch.stretches.append(stretch)
        return stretch

    def _located(self, batch: Batch, world: WorldView, start: int) -> list[Piece]:
        if self._courier is None:
            return self._view.located(world, start, batch.staging)
        pieces = self._view.located(world, start, self._courier.staging)
        return self._courier.carry(pieces, batch.staging, batch.load)

    def _reached(self, batch: Batch) -> Batch:
        """The batch with the segments of all of its worlds where executors can read them."""
        if self._view.objects_url is not None:
            return batch
        cold = {piece.path: piece for item in batch.items for piece in item.all_pieces if not piece.hot}
        staging = batch.staging if self._courier is None else self._courier.staging
        reached = self._view.reached(cold.values(), staging)
        if self._courier is not None:  # One at a time, because what it has carried is removed from this machine.
            courier = self._courier
            reached = (carried for piece in reached for carried in courier.carry([piece], batch.staging, batch.load))
        places = {piece.path: piece for piece in reached}
        batch.items = [item.moved(places) for item in batch.items]
        return batch

    def _new(self) -> Batch:
        self._count += 1
        return Batch(f"{self._staging}/{self._count}", Load())

    def _pieces(
        self, batch: Batch, world: WorldView, start: int, *, look_back: bool
    ) -> tuple[list[Piece], Piece | None]:
        """The pieces of the next stretch, and the one that holds the record before it."""
        begin = start - 1 if look_back else start
        window = msgspec.structs.replace(world, head=min(world.head, start + INGEST_WORLD_ROWS))
        pieces = self._located(batch, window, begin)
        before = pieces[0] if look_back and pieces and pieces[0].path else None
        # A segment that reaches beyond the window is taken whole: it is read whole, too.
        wanted = [msgspec.structs.replace(piece, first=max(piece.first, start), last=None) for piece in pieces]
        return [piece for piece in wanted if piece.end >= start], before

    def _only_verdicts(self, batch: Batch, world: WorldView, verdicted: int, start: int) -> list[Piece]:
        """Segments without a verdict whose records are in the lake: they came while they were hot."""
        below = [segment for segment in world.segments if verdicted <= segment.end < start]
        if not below:
            return []
        cut = msgspec.structs.replace(world, head=below[-1].end + 1)
        pieces = self._located(batch, cut, below[0].start)
        return [piece for piece in pieces if not piece.hot and piece.end < start]


def _chunks(pieces: Sequence[Piece]) -> list[list[Piece]]:
    chunks: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not chunks or size + piece.size > INGEST_CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(piece)
        size += piece.size
    return chunks


def _rewound(world: WorldView, start: int) -> Quarantined:
    return Quarantined(
        world.universe,
        JOURNAL,
        world.name,
        world.head,
        start - 1,
        REWOUND,
        f"the plane has {world.head} records and the lake {start}: it was restored from an older backup",
    )
