"""Checks stored bytes against their recorded hashes and counts. No Spark here; executors check objects in groups.

    blobs           SHA-256 in their key
    session logs    SHA-256 in their name; the manifest entry is a function of the bytes
    lake files      SHA-256 in their name, which is in the commit; the number of rows too
    Delta logs      SHA-256 in `_hashes` of the lake
    watermarks      the start of the SHA-256 in their name, which is in the commit

Segments and snapshots are checked with their world, by `audit_rules`.
"""

import hashlib
from collections.abc import Collection, Iterator

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fastness.backends.objects import ObjectStore
from fastness.errors import Corrupt, DamagedDatabase, DecryptionFailed, HashMismatch, ObjectNotFound, Unreachable
from fastness.kv import prefix_range
from fastness.layers import blobs
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake, LakeFile, LakeTable, files, watermark_files
from fastness.pipeline.lake.log_hashes import LogHashes
from fastness.pipeline.schemas import TABLES
from fastness.pipeline.views import View
from fastness.runtime.activity import rotation
from fastness.runtime.activity.rotation import Manifest
from fastness.runtime.maintenance.scan import scan_range

_AREAS = {"q": "queues", "w": "worlds", "agents": "agents", "mail": "mailboxes"}


class Problem(msgspec.Struct, frozen=True):
    """Damage, and what it affects."""

    universe: str
    reason: str  # A short code: missing, checksum, manifest, count, log, watermarks, keys
    detail: str
    blob: str | None = None  # The hash of the affected blob.


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Stored bytes with a recorded hash."""

    universe: str
    subject: str  # What it is, for messages.
    affects: str
    path: str
    size: int
    sha256: str
    entry: str = ""  # The path of a session log's manifest entry, and the entry.
    manifest: Manifest | None = None
    rows: int | None = None  # Of a lake file.
    blob: str | None = None


class CheckTask(msgspec.Struct, frozen=True):
    """Checks of objects in one store."""

    storage: dict[str, str]
    store: str
    checks: list[Check]


def run_task(task: bytes) -> bytes:
    """Check the objects of an encoded task; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=CheckTask)
    store = Stores(task_input.storage)(task_input.store)
    found = (verify(check, store) for check in task_input.checks)
    return msgspec.msgpack.encode([problem for problem in found if problem is not None])


def verify(check: Check, store: ObjectStore) -> Problem | None:
    """The problem of one object, if it has one."""
    try:
        data = store.get(check.path)
    except ObjectNotFound:
        return _problem(check, "missing", "is missing")
    except DecryptionFailed:
        return _problem(check, "checksum", "cannot be decrypted")
    if hashlib.sha256(data).hexdigest() != check.sha256:
        return _problem(check, "checksum", "does not match its hash")
    if len(data) != check.size:
        return _problem(check, "checksum", f"has {len(data):,} bytes, not {check.size:,}")
    if check.manifest is not None and rotation.expected_manifest(check.entry, data) != check.manifest:
        return _problem(check, "manifest", f"has a manifest entry, {check.entry}, that differs from it")
    return _verify_rows(check, data) if check.rows is not None else None


def _verify_rows(check: Check, data: bytes) -> Problem | None:
    try:
        rows = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        return _problem(check, "checksum", f"cannot be decoded ({str(error).partition(chr(10))[0]})")
    return None if rows == check.rows else _problem(check, "count", f"has {rows:,} rows, and its commit {check.rows:,}")


def _problem(check: Check, reason: str, fault: str) -> Problem:
    return Problem(check.universe, reason, f"{check.subject} {fault}; {check.affects}", check.blob)


def key_space(view: View) -> Iterator[Problem]:
    """Read every pair: the database verifies the checksum of each block."""
    try:
        for _ in scan_range(view.database, *prefix_range(b"")):
            pass
    except Corrupt as error:
        yield Problem("", "keys", f"the key space is damaged: {error}")


def blob_checks(view: View, universe: str, skipped: Collection[str]) -> Iterator[Check | Problem]:
    """The blobs of a universe, except those that were checked before. Inline ones are checked here."""
    for blob in view.blobs(universe):
        if blob.hash in skipped:
            continue
        subject = f"the blob {blob.hash}"
        if not blob.inline:
            path = blobs.object_path(universe, bytes.fromhex(blob.hash), blob.upload)
            yield Check(
                universe=universe,
                subject=subject,
                affects="",
                path=path,
                size=blob.size,
                sha256=blob.hash,
                blob=blob.hash,
            )
            continue
        try:
            view.blob(universe, blob.hash)
        except HashMismatch:
            yield Problem(universe, "checksum", f"{subject} does not match its hash; ", blob.hash)


def log_checks(view: View, universe: str) -> Iterator[Check | Problem]:
    """The session logs of a universe in the object store, and their manifest entries."""
    for path, entry in view.rotated_logs(universe).items():
        subject = f"the session log {path}"
        if entry is None:
            lines, session = _lines(view, path)
            yield Problem(
                universe,
                "manifest",
                f"{subject} has no manifest entry; {lines:,} lines of {session} are read without it",
            )
            continue
        try:
            manifest = rotation.read_manifest(_objects(view), entry)
        except ObjectNotFound:
            continue  # Deleted since the listing.
        except HashMismatch as error:
            yield Problem(universe, "manifest", f"{error}; the session log is read without it, if it exists")
            continue
        yield Check(
            universe=universe,
            subject=f"the session log {manifest.path}",
            affects=f"affects {manifest.records:,} lines of session {manifest.session}, kind {manifest.kind}",
            path=manifest.path,
            size=manifest.bytes,
            sha256=manifest.sha256,
            entry=entry,
            manifest=manifest,
        )


def _lines(view: View, path: str) -> tuple[int, str]:
    try:
        data = _objects(view).get(path)
    except ObjectNotFound:
        data = b""
    return max(data.count(b"\n") - 1, 0), path.rpartition("/")[2].rpartition("_")[0]


def _objects(view: View) -> ObjectStore:
    assert view.objects is not None
    return view.objects


def named_in(view: View, universe: str, hashes: Collection[str]) -> dict[str, str]:
    """Where the key space names each of these blobs, as text."""
    areas: dict[str, set[str]] = {hash: set() for hash in hashes}
    for reference in view.references(universe) if hashes else ():
        if reference.hash in areas:
            areas[reference.hash].add(_AREAS.get(reference.area, reference.area))
    return {
        hash: f"it is named in: {', '.join(sorted(found))}" if found else "nothing in the key space names it"
        for hash, found in areas.items()
    }


class TableChecks(msgspec.Struct):
    """The checks of one table's files, and the damage of its log."""

    table: LakeTable | None  # None: it cannot be opened.
    checks: list[Check]
    problems: list[Problem]
    watermark_files: int = 0  # They are checked already.


def table_checks(lake: Lake, name: str, universes: Collection[str]) -> TableChecks:
    """The checks of a table: its log is checked here, its files later."""
    location = lake.location.child(name)
    found = TableChecks(None, [], [])
    for path, fault in LogHashes(location).damage():
        found.problems.append(
            Problem("", "log", f"{location.url}/{path}: {fault}; affects all rows of the table {name}")
        )
    if found.problems:
        return found  # Nothing that a damaged log says can be trusted.
    try:
        table = lake.table(TABLES[name])
        if table.exists:
            entries = [file for file in table.entries() if not universes or file.universe in universes]
            found.checks += [_file_check(table, file) for file in entries]
            _check_watermarks(table, found)
        found.table = table
    except Unreachable:
        raise
    except Exception as error:  # Without recorded hashes, a damaged log may raise anything.
        found.problems.append(
            Problem("", "log", f"the table {name} cannot be opened ({error}); affects all of its rows")
        )
    return found


def _check_watermarks(table: LakeTable, found: TableChecks) -> None:
    """Read every file with watermarks of this version: each names the one before it."""
    try:
        for _ in watermark_files.chain(table.location, table.newest_watermark_file()):
            found.watermark_files += 1
    except DamagedDatabase as error:
        detail = f"{error}; affects the positions of all sources of the table {table.table.name}"
        found.problems.append(Problem("", "watermarks", detail))


def _file_check(table: LakeTable, file: LakeFile) -> Check:
    return Check(
        universe=file.universe,
        subject=f"{table.location.url}/{file.path}",
        affects=f"affects {file.rows:,} rows of the table {table.table.name}",
        path=file.path,
        size=file.size,
        sha256=files.hash_in_name(file.path),
        rows=file.rows,
    )
