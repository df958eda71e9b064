"""Small files become few large ones, sorted anew; what no table needs any more goes.

A compaction changes no row: readers of the old files go on with them, and appends do not conflict with it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from holdfast.errors import TransactionConflict
from holdfast.limits import LAKE_FILE_BYTES, LAKE_FILES_MIN, LAKE_KEEP_HOURS, LAKE_SMALL_FILE_BYTES
from holdfast.pipeline import tasks
from holdfast.pipeline.lake import files, reading
from holdfast.pipeline.lake.files import AddedFile
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.lake.tables import LakeFile, LakeTable
from holdfast.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Task(msgspec.Struct, frozen=True):
    table: str
    place: Place
    universe: str
    paths: list[str]


def compact(spark: "SparkSession | None", table: LakeTable, *, files_min: int = LAKE_FILES_MIN) -> tuple[int, int]:
    """Make fewer files of small ones: how many went, and how many came. Somebody else's compaction counts as none."""
    bins = list(_bins(table.entries(), files_min))
    work = [
        msgspec.msgpack.encode(_Task(table.table.name, table.place, bin[0].universe, [file.path for file in bin]))
        for bin in bins
    ]
    new: list[AddedFile] = []
    for answer in tasks.answers(spark, _merge, work):
        new += msgspec.msgpack.decode(answer, type=list[AddedFile])
    old = [file for bin in bins for file in bin]
    try:
        table.replace(old, new, is_same_data=True)
    except TransactionConflict:
        return 0, 0
    return len(old), len(new)


def vacuum(table: LakeTable, *, keep_hours: int = LAKE_KEEP_HOURS) -> list[str]:
    """Remove files that are older and that no table needs: orphans, and those that were compacted or overwritten.

    With fewer hours than a run or a reader may take, their files go too: it is for whoever knows that there are none.
    """
    if not table.exists:
        return []
    gone: list[str] = table.delta().vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
    table.refresh()
    return gone


def _bins(entries: Sequence[LakeFile], files_min: int) -> Iterator[list[LakeFile]]:
    """Small files of one universe that are worth becoming one, those with near values together."""
    by_universe: dict[str, list[LakeFile]] = {}
    for file in entries:
        if file.size < LAKE_SMALL_FILE_BYTES:
            by_universe.setdefault(file.universe, []).append(file)
    for small in by_universe.values():
        bin: list[LakeFile] = []
        size = 0
        for file in sorted(small, key=lambda file: file.path):
            if bin and size + file.size > LAKE_FILE_BYTES:
                if len(bin) >= files_min:
                    yield bin
                bin, size = [], 0
            bin.append(file)
            size += file.size
        if len(bin) >= files_min:
            yield bin


def _merge(task: bytes) -> bytes:
    """One new file out of the old ones: what an executor does."""
    given = msgspec.msgpack.decode(task, type=_Task)
    table = TABLES[given.table]
    rows = pa.concat_tables(reading.rows(table, given.place, path, given.universe) for path in given.paths)
    return msgspec.msgpack.encode(files.write(table, given.place, files.in_order(table, rows)))
