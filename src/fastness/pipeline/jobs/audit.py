"""`audit`: check everything that has a hash, every world against its journal, and the lake against the plane.

An executor audits whole worlds, because a fold is sequential; worlds are sent in batches of bounded size. The lake is
read before the plane, so the lake can only be behind. Nothing is repaired. If two audits run at the same time, the
table has the rows of the one that ended last; each returns its own findings.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import cbor2
import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Corrupt, HashMismatch, MissingObject
from fastness.kv import Transaction
from fastness.layers import blobs, hosting
from fastness.layers.journal_records import Kind
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.worlds import World
from fastness.limits import AUDIT_TASK_BYTES, AUDIT_WORLDS_MAX, FINDINGS_MAX, SCAN_TASK_BYTES
from fastness.pipeline import audit_rules, codec, hash_checks, ownership, redactions, replays, tasks
from fastness.pipeline.audit_rules import AuditInput, AuditResult, Finding, PayloadBody, SnapshotBody
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.hash_checks import Check, Problem
from fastness.pipeline.intake.plans import journal_watermark
from fastness.pipeline.intake.quarantine import Quarantine
from fastness.pipeline.journal_chunks import Stores, WorldView
from fastness.pipeline.lake import AddedFile, Lake, LakeTable, Writer, reading, retries, staging
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.redactions import Redaction
from fastness.pipeline.schemas import JOURNAL, PLANES, QUARANTINE, TABLES, WORLD_STATE
from fastness.pipeline.views import View, shared_view


def run(
    spark: SparkSession | None,
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    view: View | None = None,
) -> JobResult:
    """Audit everything that has a hash, of `view` if one is given. `ok` means that there are no findings.

    Raises:
        InvalidArgument: the reducer does not exist.
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        TransactionConflict: other runs committed the table first, too often.
    """
    started = time.monotonic()
    replays.reducer_of(config.reducer)
    lake = Lake(config.lake, config.storage)
    redaction = redactions.load(config)
    counts = dict.fromkeys(("worlds", "records", "snapshots", "blobs", "logs", "lake_files"), 0)
    hashes = _HashAudit(spark, config, counts)
    problems, tables = hashes.check_lake(lake)
    notes, findings = list[str](), list[dict[str, Any]]()
    lake_journal = _LakeJournal(spark, lake, config, is_comparable=not {JOURNAL.name, QUARANTINE.name} & tables)
    if not lake_journal.is_comparable:
        notes.append("The journal of the lake was not compared with the plane, because the lake is damaged")
    checked_blobs: dict[str, set[str]] = {}
    wrong = 0
    with shared_view(config, view) as plane, staging.temporary_folder(lake.location) as staged:
        if PLANES.name in tables:
            notes.append(f"Whether the lake follows this plane was not checked: the table {PLANES.name} is damaged")
        else:
            ownership.check(lake, plane)
        if isinstance(plane.database, RocksDatabase):
            problems += hash_checks.key_space(plane)
        if any(problem.reason == "keys" for problem in problems):
            notes.append("Worlds, blobs and logs were not audited, because the key space is damaged")
            return _result(counts, [_problem_row(problem) for problem in problems], notes, started)
        writer = Writer(WORLD_STATE, lake.location.child(WORLD_STATE.name), is_sorted=False)
        batches = _batches(
            plane, staged.store_url, lake_journal, AUDIT_TASK_BYTES * tasks.parallelism(spark), config.reducer
        )
        for audit_batch in batches:
            results = list(_audit_batch(spark, config, plane, audit_batch.audit_inputs, lake_journal))
            staging.clear(staged.child(audit_batch.folder))
            writer.write(_rows(results, redaction))
            for audit_input in audit_batch.audit_inputs:
                refs = {body.record.snapshot_ref for body in audit_input.snapshots}
                checked_blobs.setdefault(audit_input.universe, set()).update(refs)
            for each in results:
                counts["worlds"] += 1
                counts["records"] += each.records
                counts["snapshots"] += each.snapshots
                wrong += bool(each.findings)
                findings += [_finding_row(each, finding) for finding in each.findings]
            del findings[FINDINGS_MAX:]
            if progress is not None:
                progress("worlds", counts["worlds"], counts["worlds"])
        for universe in plane.universes():
            problems += hashes.check_objects(plane, universe, checked_blobs.get(universe, set()))
    files = writer.close()
    if WORLD_STATE.name in tables:
        notes.append(f"The table {WORLD_STATE.name} is damaged and was not written")
    else:
        _write_states(lake, files, config)
    counts[WORLD_STATE.name] = sum(file.rows for file in files)
    if wrong:
        notes.append(f"{wrong} of {counts['worlds']} worlds have findings")
    if config.reducer is None:
        notes.append("Without a reducer, snapshots were not compared with the fold of their records")
    findings += [_problem_row(problem) for problem in problems]
    return _result(counts, findings, notes, started)


def _result(counts: dict[str, int], findings: list[dict[str, Any]], notes: list[str], started: float) -> JobResult:
    seconds = time.monotonic() - started
    return JobResult(
        job="audit", ok=not findings, rows=counts, seconds=seconds, findings=findings[:FINDINGS_MAX], notes=notes
    )


def _write_states(lake: Lake, files: Sequence[AddedFile], config: Config) -> None:
    table = lake.table(WORLD_STATE)

    def put() -> None:
        table.refresh()
        table.overwrite(files, universes=config.universes or None)

    retries.retry_until_committed(f"the table {WORLD_STATE.name}", put)


class _HashAudit:
    """Checks files and objects against their recorded hashes, on executors."""

    def __init__(self, spark: SparkSession | None, config: Config, counts: dict[str, int]) -> None:
        self._spark = spark
        self._config = config
        self._counts = counts

    def check_lake(self, lake: Lake) -> tuple[list[Problem], set[str]]:
        """The problems of the lake's files, and the names of the tables with problems."""
        problems, damaged = list[Problem](), set[str]()
        for name in TABLES:
            found = hash_checks.table_checks(lake, name, self._config.universes)
            store = lake.location.child(name).store_url
            problems_here = [*found.problems, *self._execute(store, found.checks)]
            if problems_here:
                damaged.add(name)
            problems += problems_here
            self._counts["lake_files"] += len(found.checks) + found.watermark_files
        return problems, damaged

    def check_objects(self, view: View, universe: str, skipped: set[str]) -> list[Problem]:
        """The problems of a universe's rotated session logs, and of its blobs except the `skipped` ones."""
        bad_blobs = self._check(view, "blobs", hash_checks.blob_checks(view, universe, skipped))
        named = hash_checks.named_in(view, universe, {problem.blob for problem in bad_blobs if problem.blob})
        return [
            *self._check(view, "logs", hash_checks.log_checks(view, universe)),
            *(msgspec.structs.replace(each, detail=f"{each.detail}{named[each.blob or '']}") for each in bad_blobs),
        ]

    def _check(self, view: View, noun: str, found: Iterator[Check | Problem]) -> list[Problem]:
        problems: list[Problem] = []
        while items := list(islice(found, _CHECKS_AT_A_TIME)):
            self._counts[noun] += len(items)
            checks = [item for item in items if isinstance(item, Check)]
            problems += [item for item in items if isinstance(item, Problem)]
            if view.objects_url is not None:
                problems += self._execute(view.objects_url, checks)
            elif view.objects is not None:  # Executors cannot reach the objects.
                verified = [hash_checks.verify(check, view.objects) for check in checks]
                problems += [problem for problem in verified if problem is not None]
        return problems

    def _execute(self, store: str, checks: Sequence[Check]) -> Iterator[Problem]:
        parallelism = tasks.parallelism(self._spark)
        for wave in _waves(checks, SCAN_TASK_BYTES * parallelism):
            groups = tasks.balanced([check.size for check in wave], parallelism)
            work = [
                msgspec.msgpack.encode(hash_checks.CheckTask(self._config.storage, store, [wave[n] for n in group]))
                for group in groups
            ]
            for result in tasks.execute(self._spark, hash_checks.run_task, work):
                yield from msgspec.msgpack.decode(result, type=list[Problem])


def _waves(checks: Sequence[Check], wave_bytes: int) -> Iterator[list[Check]]:
    wave: list[Check] = []
    size = 0
    for check in checks:
        wave.append(check)
        size += check.size
        if size >= wave_bytes:
            yield wave
            wave, size = [], 0
    if wave:
        yield wave


def _problem_row(problem: Problem) -> dict[str, Any]:
    universe = problem.universe or None
    return {"universe": universe, "world": None, "height": None, "reason": problem.reason, "detail": problem.detail}


class _LakeSummary(msgspec.Struct):
    """A summary of a world's rows in the lake."""

    rows: int = 0
    total: int = 0  # The sum of `record_checksum`.
    highest: int = -1
    damaged: int = 0  # Rows whose `hash` does not match their record.


class _LakeJournal:
    """The journal table of the lake, as of the start of the audit."""

    def __init__(self, spark: SparkSession | None, lake: Lake, config: Config, *, is_comparable: bool) -> None:
        """`is_comparable`: the table is undamaged."""
        self.is_comparable = is_comparable
        self.exists = False
        self._watermarks: Mapping[str, int] = {}
        self._gaps: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._summaries: dict[tuple[str, str], _LakeSummary] = {}
        if not is_comparable:
            return
        journal = lake.table(JOURNAL)
        self.exists = journal.exists
        self._watermarks = journal.watermarks()
        if not self.exists:
            return
        for gap in Quarantine(lake).rows():
            if gap.table == JOURNAL.name:
                self._gaps.setdefault((gap.universe, gap.source), []).append((gap.start, gap.end))
        for part in _summarize_lake(spark, journal, config.universes):
            summary = self._summaries.setdefault((part.universe, part.world), _LakeSummary())
            summary.rows += part.rows
            summary.total += int(part.total)
            summary.highest = max(summary.highest, part.highest)
            summary.damaged += part.damaged

    def expected(self, universe: str, world: str) -> tuple[int, list[tuple[int, int]]]:
        """The height below which the lake has a world's records, and the ranges it lacks."""
        return self._watermarks.get(journal_watermark(universe, world), 0), self._gaps.get((universe, world), [])

    def compare(self, audit_input: AuditInput, verdict: AuditResult) -> Iterator[Finding]:
        """The differences between the lake and the plane."""
        summary = self._summaries.get((audit_input.universe, audit_input.world), _LakeSummary())
        if summary.damaged:
            yield Finding(0, "lake", f"{summary.damaged} rows of the lake do not match their hash")
        if summary.highest >= audit_input.head:
            yield Finding(
                audit_input.head,
                "lake",
                f"the lake has records up to {summary.highest}, above the head {audit_input.head}",
            )
        elif any(finding.reason in _UNREADABLE for finding in verdict.findings):
            return  # Without the plane's records there is nothing to compare with.
        elif (summary.rows, summary.total) != (verdict.lake_count, int(verdict.lake_sum)):
            message = (
                f"the lake has {summary.rows} records below {audit_input.lake_next}, the plane {verdict.lake_count}"
            )
            yield Finding(
                0,
                "lake",
                message if summary.rows != verdict.lake_count else "the lake's records differ from the plane's",
            )


class _ScanTask(msgspec.Struct, frozen=True):
    """The input of one scan task: journal files, by path and universe."""

    location: Location
    files: list[tuple[str, str]]


class _WorldSummary(msgspec.Struct, frozen=True):
    """A summary of a world's rows in some files."""

    universe: str
    world: str
    rows: int
    total: str  # A string: JSON and msgpack integers end at 64 bits.
    highest: int
    damaged: int


def _summarize_lake(
    spark: SparkSession | None, journal: LakeTable, universes: Sequence[str]
) -> Iterator[_WorldSummary]:
    files = [file for file in journal.entries() if not universes or file.universe in universes]
    groups = tasks.balanced([file.size for file in files], tasks.parallelism(spark))
    scans = [_ScanTask(journal.location, [(files[n].path, files[n].universe) for n in group]) for group in groups]
    for result in tasks.execute(spark, _scan_files, [msgspec.msgpack.encode(scan) for scan in scans]):
        yield from msgspec.msgpack.decode(result, type=list[_WorldSummary])


def _scan_files(task: bytes) -> bytes:
    """Summarise files, and compare their rows with their hashes; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=_ScanTask)
    found: dict[tuple[str, str], _LakeSummary] = {}
    for path, universe in task_input.files:
        for batch in reading.batches_of(JOURNAL, task_input.location, path, universe, _SCANNED_COLUMNS):
            values = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            for world, height, raw, hash, redacted in values:
                if (summary := found.get((universe, world))) is None:
                    summary = found[universe, world] = _LakeSummary()
                digest = hash if redacted else hashlib.sha256(raw).hexdigest()
                summary.rows += 1
                summary.total += audit_rules.record_checksum(height, digest)
                summary.highest = max(summary.highest, height)
                summary.damaged += digest != hash
    return msgspec.msgpack.encode(
        [
            _WorldSummary(*key, summary.rows, str(summary.total), summary.highest, summary.damaged)
            for key, summary in found.items()
        ]
    )


class _Batch(msgspec.Struct):
    """Worlds that are audited at the same time."""

    folder: str  # Below the staging location.
    audit_inputs: list[AuditInput]
    size: int = 0


class _Task(msgspec.Struct, frozen=True):
    storage: dict[str, str]
    reducer: str | None
    audit_inputs: list[AuditInput]


def _batches(
    view: View, url: str, lake_journal: _LakeJournal, batch_bytes: int, reducer: str | None
) -> Iterator[_Batch]:
    count = 0
    audit_batch = _Batch(f"batch-{count}", [])
    for universe in view.universes():
        for world in view.worlds(universe):
            audit_input = _audit_input(view, world, f"{url}/{audit_batch.folder}", lake_journal)
            audit_batch.audit_inputs.append(audit_input)
            audit_batch.size += audit_input.size
            if audit_batch.size >= batch_bytes or len(audit_batch.audit_inputs) >= AUDIT_WORLDS_MAX:
                yield _make_readable(view, audit_batch, url, reducer)
                count += 1
                audit_batch = _Batch(f"batch-{count}", [])
    if audit_batch.audit_inputs:
        yield _make_readable(view, audit_batch, url, reducer)


def _make_readable(view: View, audit_batch: _Batch, url: str, reducer: str | None) -> _Batch:
    """The batch with all of its segments in stores that executors can read."""
    chunks = view.make_readable(
        (chunk for audit_input in audit_batch.audit_inputs for chunk in audit_input.chunks),
        f"{url}/{audit_batch.folder}",
    )
    audit_inputs = [
        msgspec.structs.replace(audit_input, chunks=list(islice(chunks, len(audit_input.chunks))))
        for audit_input in audit_batch.audit_inputs
    ]
    audit_inputs = [_with_payloads(view, each, reducer, f"{url}/{audit_batch.folder}") for each in audit_inputs]
    return _Batch(audit_batch.folder, audit_inputs, audit_batch.size)


def _with_payloads(view: View, audit_input: AuditInput, reducer: str | None, url: str) -> AuditInput:
    """The same input with the payloads of its items that are blobs, if its reducer reads them."""
    found = replays.reducer_of(reducer, audit_input.world, audit_input.program)
    if not getattr(found, "reads_payloads", False):
        return audit_input
    hashes: dict[str, None] = {}
    for chunk in audit_input.chunks:
        with suppress(Corrupt):  # The audit itself reports it.
            for record in codec.read_chunk(chunk, view.stores(chunk.store)):
                hash = _payload_blob(record) if _PAYLOAD_BLOB in record else None
                if hash is not None:
                    hashes[hash] = None
    bodies = [_payload_body(view, audit_input.universe, hash, url) for hash in hashes]
    return msgspec.structs.replace(audit_input, payloads=bodies)


def _payload_blob(record: bytes) -> str | None:
    """The blob that is the payload of an item; None if the record is none, or is damaged."""
    try:
        number, value = cbor2.loads(record)
        found = value.get("payload_blob") if number == Kind.INGRESS else None
    except Exception:  # A decoder may raise anything on bytes it does not understand.
        return None
    return found if isinstance(found, str) else None


def _payload_body(view: View, universe: str, hash: str, url: str) -> PayloadBody:
    body = _snapshot_body(view, universe, SnapshotRecord(hash, 0, 0, None, None), url)
    return PayloadBody(hash, body.inline, body.store, body.path)


def _audit_input(view: View, world: WorldView, url: str, lake_journal: _LakeJournal) -> AuditInput:
    lake_next, gaps = lake_journal.expected(world.universe, world.name)
    return AuditInput(
        world.universe,
        world.name,
        world.head,
        world.baseline,
        [_snapshot_body(view, world.universe, record, url) for record in world.snapshots],
        view.locate_chunks(world, 0, url),
        min(lake_next, world.head),
        gaps,
        view.database.read(_program_of, World(world.universe, world.name)),
    )


def _program_of(tx: Transaction, world: World) -> str | None:
    found = hosting.find(tx, world)
    return None if found is None else found.program


def _snapshot_body(view: View, universe: str, record: SnapshotRecord, url: str) -> SnapshotBody:
    """The location of a snapshot's bytes. Large ones are staged if executors cannot reach the object store."""
    digest = blobs.digest_of(record.snapshot_ref)
    blob = view.database.read(blobs.find, universe, digest)
    if blob is None:
        return SnapshotBody(record)
    if blob.inline is not None:
        return SnapshotBody(record, blob.size, blob.inline)
    path = blobs.object_path(universe, digest, blob.upload)
    if view.objects_url is not None:
        return SnapshotBody(record, blob.size, None, view.objects_url, path)
    try:
        view.stores.staging(url).put(path, view.blob(universe, record.snapshot_ref))
    except MissingObject:
        return SnapshotBody(record, blob.size)
    except HashMismatch:
        return SnapshotBody(record, blob.size, b"")
    return SnapshotBody(record, blob.size, None, url, path, staged=True)


def _audit_batch(
    spark: SparkSession | None, config: Config, view: View, audit_inputs: list[AuditInput], lake_journal: _LakeJournal
) -> Iterator[AuditResult]:
    groups = tasks.balanced([audit_input.size for audit_input in audit_inputs], tasks.parallelism(spark))
    work = [
        msgspec.msgpack.encode(_Task(config.storage, config.reducer, [audit_inputs[n] for n in group]))
        for group in groups
    ]
    by_world = {(audit_input.universe, audit_input.world): audit_input for audit_input in audit_inputs}
    for result in tasks.execute(spark, _execute, work):
        for verdict in msgspec.msgpack.decode(result, type=list[AuditResult]):
            audit_input = by_world[verdict.universe, verdict.world]
            found = [*verdict.findings, *(lake_journal.compare(audit_input, verdict) if lake_journal.exists else ())]
            if found and view.world(audit_input.universe, audit_input.world) is None:
                continue  # The world was deleted during the audit.
            yield msgspec.structs.replace(verdict, findings=found)


def _execute(task: bytes) -> bytes:
    """Audit the worlds of an encoded task; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=_Task)
    stores = Stores(task_input.storage)
    return msgspec.msgpack.encode(
        [audit_rules.audit_world(audit_input, stores, task_input.reducer) for audit_input in task_input.audit_inputs]
    )


def _rows(results: Iterable[AuditResult], redaction: Redaction) -> pa.RecordBatch:
    now = datetime.now(UTC)
    rows = [
        {
            "universe": each.universe,
            "world": each.world,
            "height": each.height,
            "state": None if redaction.covers_world(each.world) else each.state,
            "digest": each.digest,
            "verdict": each.verdict,
            "reason": _reason(each.findings[0]) if each.findings else None,
            "folded_at": now,
        }
        for each in results
    ]
    return pa.RecordBatch.from_pylist(rows, WORLD_STATE.schema)


def _reason(finding: Finding) -> str:
    return f"{finding.reason} at {finding.height}: {finding.detail}"


def _finding_row(verdict: AuditResult, finding: Finding) -> dict[str, Any]:
    named = {"universe": verdict.universe, "world": verdict.world, "verdict": verdict.verdict}
    return {**named, **msgspec.structs.asdict(finding)}


_CHECKS_AT_A_TIME: Final = 10_000
_SCANNED_COLUMNS: Final = ("world", "height", "raw", "hash", "redacted")
_UNREADABLE: Final = frozenset(("missing", "checksum", "malformed", "schema"))
_PAYLOAD_BLOB: Final = b"payload_blob"  # In every record of an item whose payload is a blob.
