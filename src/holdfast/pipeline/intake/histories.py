"""Records of worlds into `journal`, and a verdict on each segment into `segments`.

    damage ──► quarantine     verdicts ──► segments     files ──► journal     what is well again ◄── quarantine

Each table keeps its own marks, so a run may be killed between any two of these commits.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from holdfast.pipeline import tasks
from holdfast.pipeline.codec import Damaged
from holdfast.pipeline.intake import journals, plans
from holdfast.pipeline.intake.journals import Answer, Item, Tip, Verdict
from holdfast.pipeline.intake.plans import Batch, Plan, Stretch
from holdfast.pipeline.intake.quarantines import REWOUND, Quarantined, Scope
from holdfast.pipeline.intake.runs import Again, Run, require_staged
from holdfast.pipeline.lake import LakeTable, Move
from holdfast.pipeline.schemas import JOURNAL, SEGMENTS


def take_in(run: Run) -> None:
    """Bring every world in the lake to where the view has it."""
    held: set[tuple[str, str]] = set()
    run.until_done("the journal", lambda: _pass(run, held))


def executed(run: Run, items: Sequence[Item], bodies: Mapping[str, bytes] | None = None) -> Iterator[Answer]:
    """Have executors work on items, which are in order; a task makes files of its own, and has the bodies it needs."""
    place, storage = run.table(JOURNAL).place, run.config.storage
    groups = tasks.balanced([item.size for item in items], tasks.parallelism(run.spark))
    work = [
        msgspec.msgpack.encode(journals.task(place, storage, [items[n] for n in group], bodies or {}))
        for group in groups
    ]
    for answer in run.answers(journals.take, work, sum(item.size for item in items)):
        yield msgspec.msgpack.decode(answer, type=Answer)


def quarantined(damaged: Damaged) -> Quarantined:
    return Quarantined(
        damaged.universe, JOURNAL.name, damaged.world, damaged.start, damaged.end, damaged.reason, damaged.detail
    )


def verdict_rows(verdicts: Sequence[Verdict]) -> pa.Table:
    """Verdicts as rows of `segments`."""
    now_ms = time.time_ns() // 1_000_000
    rows = [
        {
            "universe": each.universe,
            "world": each.world,
            **{name: getattr(each.segment, name) for name in each.segment.__struct_fields__},
            "verdict": each.verdict,
            "reason": each.reason,
            "seen_at": now_ms,
        }
        for each in verdicts
    ]
    return pa.Table.from_pylist(rows, SEGMENTS.schema)


def _pass(run: Run, held: set[tuple[str, str]]) -> None:
    journal, segments = run.table(JOURNAL), run.table(SEGMENTS)
    plan = Plan(
        run.view,
        run.staging,
        heights=run.table(JOURNAL).mark,  # A look of its own: it plans while others commit.
        verdicts=run.table(SEGMENTS).mark,
        suspects=run.quarantine.rewound(),
        held=held,
        batch_bytes=run.batch_bytes,
        courier=run.courier,
    )
    with run.ahead(plan.batches()) as batches:
        for batch in batches:
            try:
                _take_batch(run, batch, journal, segments, held)
            finally:
                run.clear(batch.staging)


def _take_batch(run: Run, batch: Batch, journal: LakeTable, segments: LakeTable, held: set[tuple[str, str]]) -> None:
    answers = list(executed(run, batch.items, batch.load.bodies)) if batch.items else []
    diverged = {world for answer in answers for world in answer.diverged}
    if diverged:
        held |= diverged
        found = [_diverged(stretch) for stretch in batch.stretches if _world(stretch) in diverged]
        run.quarantine.settle(_forgiving(found), found)
        raise Again
    require_staged(answer.lost for answer in answers)
    found = [quarantined(each) for answer in answers for each in answer.damaged] + batch.found
    run.quarantine.add(found)
    _commit_verdicts(run, batch, segments, [each for answer in answers for each in answer.verdicts])
    files = [file for answer in answers for file in answer.files]
    tips = {(tip.universe, tip.world): tip for answer in answers for tip in _ends(answer.tips, batch.stretches)}
    moves = _moves(journal, batch.stretches, tips)
    if moves:
        journal.append(files, moves)
        run.committed(JOURNAL, sum(file.rows for file in files))
    run.quarantine.settle([*_scopes(batch.stretches), *_forgiving(batch.found)], found)


def _commit_verdicts(run: Run, batch: Batch, segments: LakeTable, verdicts: list[Verdict]) -> None:
    moves = {
        plans.segment_mark(stretch.universe, stretch.world): stretch.verdicts
        for stretch in batch.stretches
        if stretch.verdicts.target > stretch.verdicts.origin
    }
    if moves:
        segments.append_rows(verdict_rows(verdicts), moves)
        run.committed(SEGMENTS, len(verdicts))


def _ends(tips: Sequence[Tip], stretches: Sequence[Stretch]) -> Iterator[Tip]:
    """Those of the last records of stretches; chunks in the middle have last records, too."""
    last = {_world(stretch): stretch.heights.target - 1 for stretch in stretches}
    return (tip for tip in tips if last.get((tip.universe, tip.world)) == tip.height)


def _moves(journal: LakeTable, stretches: Sequence[Stretch], tips: dict[tuple[str, str], Tip]) -> dict[str, Move]:
    moves: dict[str, Move] = {}
    for stretch in stretches:
        if stretch.heights.target > stretch.heights.origin:
            moves[plans.journal_mark(*_world(stretch))] = stretch.heights
            mark, tip = plans.tip_mark(*_world(stretch)), tips.get(_world(stretch))
            before = journal.mark(mark) if stretch.tip is None else stretch.tip
            # A last record that could not be read leaves nothing to compare with.
            moves[mark] = Move(before, 0 if tip is None else tip.tip)
    return moves


def _scopes(stretches: Sequence[Stretch]) -> Iterator[Scope]:
    for stretch in stretches:
        low, high = stretch.heights.origin, stretch.heights.target - 1
        yield Scope(stretch.universe, JOURNAL.name, stretch.world, low, high)


def _forgiving(found: Sequence[Quarantined]) -> list[Scope]:
    """In the place of what was said before of worlds that are rewound."""
    return [Scope(row.universe, row.table, row.source, 0, -1) for row in found]


def _diverged(stretch: Stretch) -> Quarantined:
    height = stretch.heights.origin
    return Quarantined(
        stretch.universe,
        JOURNAL.name,
        stretch.world,
        height,
        max(height, stretch.heights.target - 1),
        REWOUND,
        f"record {height - 1} is another one than the lake has: the plane was restored from an older backup, and went "
        "on differently",
    )


def _world(stretch: Stretch) -> tuple[str, str]:
    return stretch.universe, stretch.world
