"""Renamed columns: reads files that have the old names, and rewrites them with the new ones.

A table keeps its old names until the next run that writes to it: then all of its files are replaced in one commit.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from fastness.pipeline import tasks
from fastness.pipeline.lake import files, reading
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Task(msgspec.Struct, frozen=True):
    table: str
    location: Location
    path: str
    universe: str


def rewrite(
    spark: "SparkSession | None", table: str, location: Location, old: Sequence[tuple[str, str]]
) -> Iterator[AddedFile]:
    """Write the rows of the (path, universe) files into new files, without committing them; on executors, if any."""
    work = [msgspec.msgpack.encode(_Task(table, location, path, universe)) for path, universe in old]
    for result in tasks.execute(spark, _rewrite, work):
        yield from msgspec.msgpack.decode(result, type=list[AddedFile])


def _rewrite(task: bytes) -> bytes:
    task_input = msgspec.msgpack.decode(task, type=_Task)
    table = TABLES[task_input.table]
    batches: Iterator[pa.RecordBatch] = reading.batches_of(
        table, task_input.location, task_input.path, task_input.universe
    )
    return msgspec.msgpack.encode(files.write(table, task_input.location, batches))
