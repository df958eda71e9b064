"""Merges small files into few large ones, and deletes files that are no longer used.

A compaction changes no row: readers keep reading the old files, and appends do not conflict with it.
"""

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from fastness.errors import TransactionConflict
from fastness.limits import LAKE_FILE_BYTES, LAKE_FILES_MIN, LAKE_KEEP_HOURS, LAKE_SMALL_FILE_BYTES
from fastness.pipeline import tasks
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import files, reading, watermark_files
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.lake.tables import LakeFile, LakeTable
from fastness.pipeline.lake.watermarks import Watermarks
from fastness.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_LOG_FILE: Final = re.compile(r"_delta_log/(\d{20})\.(json|checkpoint)")


class _Task(msgspec.Struct, frozen=True):
    table: str
    location: Location
    universe: str
    paths: list[str]


def compact(spark: "SparkSession | None", table: LakeTable, *, files_min: int = LAKE_FILES_MIN) -> tuple[int, int]:
    """Merge small files; returns the number of old and new ones. (0, 0) if another compaction committed first."""
    bins = list(_bins(table.entries(), files_min, table.table.time))
    work = [
        msgspec.msgpack.encode(_Task(table.table.name, table.location, bin[0].universe, [file.path for file in bin]))
        for bin in bins
    ]
    new: list[AddedFile] = []
    for result in tasks.execute(spark, _merge, work):
        new += msgspec.msgpack.decode(result, type=list[AddedFile])
    old = [file for bin in bins for file in bin]
    try:
        table.replace(old, new, is_same_data=True)
    except TransactionConflict:
        return 0, 0
    return len(old), len(new)


def vacuum(table: LakeTable, *, keep_hours: int = LAKE_KEEP_HOURS) -> list[str]:
    """Delete files older than `keep_hours` that the table does not use: orphans, and files that were replaced.

    Fewer hours than a run or a reader takes would delete their files too; use that only if none is running.
    """
    if not table.exists:
        return []
    deleted: list[str] = table.delta().vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
    table.refresh()
    table.log_hashes.delete_stale()
    return deleted + _delete_watermark_files(table, keep_hours)


def _delete_watermark_files(table: LakeTable, keep_hours: int) -> list[str]:
    """Delete the files of watermarks that no version of the last hours names. A file is used by the files after it."""
    before_ms = time.time_ns() // 1_000_000 - keep_hours * 3_600_000 if keep_hours else None
    newest = {table.newest_watermark_file()}
    if before_ms is not None:
        newest.add(Watermarks(table.location).newest_file(_version_at(table.location, before_ms)))
    used = {file.fingerprint for each in newest for file in watermark_files.chain(table.location, each)}
    return watermark_files.delete_unused(table.location, used, before_ms)


def _version_at(location: Location, at_ms: int) -> int:
    """The version that the table had at a time, or the first one that its log still has."""
    commits: dict[int, int] = {}
    checkpoints: list[int] = []
    for meta, written_ms in Stores(location.storage)(location.store_url).times("_delta_log"):
        if found := _LOG_FILE.search(meta.path):
            version = int(found[1])
            if found[2] == "json":
                commits[version] = written_ms
            else:
                checkpoints.append(version)
    first = 0 if 0 in commits else min(checkpoints, default=-1)
    return max([first, *(version for version, written_ms in commits.items() if written_ms < at_ms)])


def _bins(entries: Sequence[LakeFile], files_min: int, time: str | None) -> Iterator[list[LakeFile]]:
    """Groups of small files of one partition that are worth merging.

    They are in the order of their times, so that retention can drop whole files; without a time, of their paths.
    """
    by_partition: dict[tuple[str | None, ...], list[LakeFile]] = {}
    for file in entries:
        if file.size < LAKE_SMALL_FILE_BYTES:
            by_partition.setdefault((file.universe, *file.partitions.values()), []).append(file)
    for small in by_partition.values():
        bin: list[LakeFile] = []
        size = 0
        for file in sorted(small, key=lambda file: (str(file.low.get(time or "", "")), file.path)):
            if bin and size + file.size > LAKE_FILE_BYTES:
                if len(bin) >= files_min:
                    yield bin
                bin, size = [], 0
            bin.append(file)
            size += file.size
        if len(bin) >= files_min:
            yield bin


def _merge(task: bytes) -> bytes:
    """Merge the files of an encoded task; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=_Task)
    table = TABLES[task_input.table]
    rows = pa.concat_tables(
        reading.rows(table, task_input.location, path, task_input.universe) for path in task_input.paths
    )
    return msgspec.msgpack.encode(files.write(table, task_input.location, files.sorted_batches(table, rows)))
