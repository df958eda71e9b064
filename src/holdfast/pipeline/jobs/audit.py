"""`audit`: whether every world is what its journal says, and the lake what the plane says; a verdict for each world.

Worlds go to executors whole, in waves of a bounded size: a fold has one order. What is in the lake was read before the
plane was, so the lake can only be behind. Nothing is repaired. Of two audits at the same time, the table has the
verdicts of the one that ended last; each tells its own.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.errors import HashMismatch, MissingObject
from holdfast.layers import blobs
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.limits import AUDIT_TASK_BYTES, AUDIT_WORLDS_MAX, FINDINGS_MAX
from holdfast.pipeline import audit_rules, replays, tasks
from holdfast.pipeline.audit_rules import Body, Case, Finding, Verdict
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.intake.plans import journal_mark
from holdfast.pipeline.intake.quarantines import Quarantine
from holdfast.pipeline.journal_chunks import Stores, WorldView
from holdfast.pipeline.lake import Lake, LakeTable, Writer, attempts, reading, staging
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.schemas import JOURNAL, WORLD_STATE
from holdfast.pipeline.views import View, open_view


def run(
    spark: SparkSession,
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> JobResult:
    """Judge every world. `ok` says that nothing is wrong with any of them; findings say where and what.

    Raises:
        InvalidArgument: there is no such reducer.
        TransactionConflict: others always wrote the table at the same moment.
    """
    begun = time.monotonic()
    replays.reducer_of(config.reducer)
    lake = Lake(config.lake, config.storage)
    table = lake.table(WORLD_STATE)
    history = _History(spark, lake, config)
    writer = Writer(WORLD_STATE, table.place, is_sorted=False)
    counts = {"worlds": 0, "records": 0, "snapshots": 0}
    notes: list[str] = []
    findings: list[dict[str, Any]] = []
    wrong = 0
    with open_view(config) as view, staging.staged(lake.place) as staged:
        waves = _waves(view, staged.store_url, history, AUDIT_TASK_BYTES * tasks.parallelism(spark))
        for wave in waves:
            judged = list(_judged(spark, config, view, wave.cases, history))
            staging.clear(staged.below(wave.folder))
            writer.write(_rows(judged))
            for each in judged:
                counts["worlds"] += 1
                counts["records"] += each.records
                counts["snapshots"] += each.snapshots
                wrong += bool(each.findings)
                findings += [_told(each, finding) for finding in each.findings]
            del findings[FINDINGS_MAX:]
            if progress is not None:
                progress("worlds", counts["worlds"], counts["worlds"])
    files = writer.close()

    def put() -> None:
        table.refresh()
        table.overwrite(files, universes=config.universes or None)

    attempts.until_committed(f"the table {WORLD_STATE.name}", put)
    if wrong:
        notes.append(f"{wrong} of {counts['worlds']} worlds are not what they should be")
    if config.reducer is None:
        notes.append("Without a reducer, what snapshots hold was not compared with what the records lead to")
    rows = {**counts, WORLD_STATE.name: sum(file.rows for file in files)}
    return JobResult(
        job="audit", ok=not wrong, rows=rows, seconds=time.monotonic() - begun, findings=findings, notes=notes
    )


class _Kept(msgspec.Struct):
    """What the lake has of a world."""

    rows: int = 0
    total: int = 0  # The sum of `place_value`.
    highest: int = -1
    damaged: int = 0  # Rows whose hash is not that of their record.


class _History:
    """What the lake has, at the moment when it was looked at."""

    def __init__(self, spark: SparkSession, lake: Lake, config: Config) -> None:
        journal = lake.table(JOURNAL)
        self.is_there = journal.exists
        self._marks = journal.marks()
        self._holes: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._kept: dict[tuple[str, str], _Kept] = {}
        if not self.is_there:
            return
        for hole in Quarantine(lake).rows():
            if hole.table == JOURNAL.name:
                self._holes.setdefault((hole.universe, hole.source), []).append((hole.start, hole.end))
        for seen in _seen(spark, journal, config.universes):
            kept = self._kept.setdefault((seen.universe, seen.world), _Kept())
            kept.rows += seen.rows
            kept.total += int(seen.total)
            kept.highest = max(kept.highest, seen.highest)
            kept.damaged += seen.damaged

    def expected(self, universe: str, world: str) -> tuple[int, list[tuple[int, int]]]:
        """Up to which height the lake has a world's records, and which of them it lacks."""
        return self._marks.get(journal_mark(universe, world), 0), self._holes.get((universe, world), [])

    def compare(self, case: Case, verdict: Verdict) -> Iterator[Finding]:
        """Whether the lake has what the plane has."""
        kept = self._kept.get((case.universe, case.world), _Kept())
        if kept.damaged:
            yield Finding(0, "lake", f"{kept.damaged} rows of the lake have another hash than their record")
        if kept.highest >= case.head:
            yield Finding(case.head, "lake", f"the lake has records up to {kept.highest}, beyond the head {case.head}")
        elif any(finding.reason in _UNREADABLE for finding in verdict.findings):
            return  # The plane itself cannot say what the lake should have.
        elif (kept.rows, kept.total) != (verdict.lake_count, int(verdict.lake_sum)):
            said = f"the lake has {kept.rows} records below {case.lake_next}, and the plane has {verdict.lake_count}"
            yield Finding(0, "lake", said if kept.rows != verdict.lake_count else "the lake has other records")


class _Look(msgspec.Struct, frozen=True):
    """Files of the journal, by path and universe."""

    place: Place
    files: list[tuple[str, str]]


class _Seen(msgspec.Struct, frozen=True):
    """What some files have of a world."""

    universe: str
    world: str
    rows: int
    total: str  # JSON and msgpack end at 64 bits.
    highest: int
    damaged: int


def _seen(spark: SparkSession, journal: LakeTable, universes: Sequence[str]) -> Iterator[_Seen]:
    files = [file for file in journal.entries() if not universes or file.universe in universes]
    groups = tasks.balanced([file.size for file in files], tasks.parallelism(spark))
    looks = [_Look(journal.place, [(files[n].path, files[n].universe) for n in group]) for group in groups]
    for answer in tasks.answers(spark, _look, [msgspec.msgpack.encode(look) for look in looks]):
        yield from msgspec.msgpack.decode(answer, type=list[_Seen])


def _look(task: bytes) -> bytes:
    """Sum up what files have, and whether it is what it was: what an executor does."""
    given = msgspec.msgpack.decode(task, type=_Look)
    found: dict[tuple[str, str], _Kept] = {}
    for path, universe in given.files:
        for batch in reading.batches_of(JOURNAL, given.place, path, universe, _LOOKED_AT):
            for world, height, raw, hash in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if (kept := found.get((universe, world))) is None:
                    kept = found[universe, world] = _Kept()
                digest = hashlib.sha256(raw).hexdigest()
                kept.rows += 1
                kept.total += audit_rules.place_value(height, digest)
                kept.highest = max(kept.highest, height)
                kept.damaged += digest != hash
    return msgspec.msgpack.encode(
        [_Seen(*key, kept.rows, str(kept.total), kept.highest, kept.damaged) for key, kept in found.items()]
    )


class _Wave(msgspec.Struct):
    """Worlds that are judged at the same time."""

    folder: str  # Below the staging place.
    cases: list[Case]
    size: int = 0


class _Task(msgspec.Struct, frozen=True):
    storage: dict[str, str]
    reducer: str | None
    cases: list[Case]


def _waves(view: View, url: str, history: _History, wave_bytes: int) -> Iterator[_Wave]:
    count = 0
    wave = _Wave(f"wave-{count}", [])
    for universe in view.universes():
        for world in view.worlds(universe):
            case = _case(view, world, f"{url}/{wave.folder}", history)
            wave.cases.append(case)
            wave.size += case.size
            if wave.size >= wave_bytes or len(wave.cases) >= AUDIT_WORLDS_MAX:
                yield _reached(view, wave, url)
                count += 1
                wave = _Wave(f"wave-{count}", [])
    if wave.cases:
        yield _reached(view, wave, url)


def _reached(view: View, wave: _Wave, url: str) -> _Wave:
    """The wave with the segments of all of its worlds where executors can read them."""
    pieces = view.reached((piece for case in wave.cases for piece in case.pieces), f"{url}/{wave.folder}")
    cases = [msgspec.structs.replace(case, pieces=list(islice(pieces, len(case.pieces)))) for case in wave.cases]
    return _Wave(wave.folder, cases, wave.size)


def _case(view: View, world: WorldView, url: str, history: _History) -> Case:
    lake_next, lacks = history.expected(world.universe, world.name)
    return Case(
        world.universe,
        world.name,
        world.head,
        world.baseline,
        [_body(view, world.universe, record, url) for record in world.snapshots],
        view.located(world, 0, url),
        min(lake_next, world.head),
        lacks,
    )


def _body(view: View, universe: str, record: SnapshotRecord, url: str) -> Body:
    """Where executors find the bytes of a snapshot. Large ones are staged if they cannot reach the object store."""
    digest = blobs.digest_of(record.snapshot_ref)
    blob = view.database.read(blobs.find, universe, digest)
    if blob is None:
        return Body(record)
    if blob.inline is not None:
        return Body(record, blob.size, blob.inline)
    path = blobs.object_path(universe, digest)
    if view.objects_url is not None:
        return Body(record, blob.size, None, view.objects_url, path)
    try:
        view.stores.staging(url).put(path, view.blob(universe, record.snapshot_ref))
    except MissingObject:
        return Body(record, blob.size)
    except HashMismatch:
        return Body(record, blob.size, b"")
    return Body(record, blob.size, None, url, path, staged=True)


def _judged(spark: SparkSession, config: Config, view: View, cases: list[Case], history: _History) -> Iterator[Verdict]:
    groups = tasks.balanced([case.size for case in cases], tasks.parallelism(spark))
    work = [
        msgspec.msgpack.encode(_Task(config.storage, config.reducer, [cases[n] for n in group])) for group in groups
    ]
    by_world = {(case.universe, case.world): case for case in cases}
    for answer in tasks.answers(spark, _judge, work):
        for verdict in msgspec.msgpack.decode(answer, type=list[Verdict]):
            case = by_world[verdict.universe, verdict.world]
            found = [*verdict.findings, *(history.compare(case, verdict) if history.is_there else ())]
            if found and view.world(case.universe, case.world) is None:
                continue  # It was deleted meanwhile, and its records with it.
            yield msgspec.structs.replace(verdict, findings=found)


def _judge(task: bytes) -> bytes:
    """What an executor does."""
    given = msgspec.msgpack.decode(task, type=_Task)
    stores = Stores(given.storage)
    return msgspec.msgpack.encode([audit_rules.judge(case, stores, given.reducer) for case in given.cases])


def _rows(judged: Iterable[Verdict]) -> pa.RecordBatch:
    now = datetime.now(UTC)
    rows = [
        {
            "universe": each.universe,
            "world": each.world,
            "height": each.height,
            "state": each.state,
            "digest": each.digest,
            "verdict": each.verdict,
            "reason": _reason(each.findings[0]) if each.findings else None,
            "at": now,
        }
        for each in judged
    ]
    return pa.RecordBatch.from_pylist(rows, WORLD_STATE.schema)


def _reason(finding: Finding) -> str:
    return f"{finding.reason} at {finding.height}: {finding.detail}"


def _told(verdict: Verdict, finding: Finding) -> dict[str, Any]:
    named = {"universe": verdict.universe, "world": verdict.world, "verdict": verdict.verdict}
    return {**named, **msgspec.structs.asdict(finding)}


_LOOKED_AT: Final = ("world", "height", "raw", "hash")
_UNREADABLE: Final = frozenset(("missing", "checksum", "malformed", "schema"))
