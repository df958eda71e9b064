"""Runs tasks on executors: a function from bytes to bytes. The driver gets the results.

Without Spark, tasks run in this process, one after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from fastness.errors import FastnessError, rebuild

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASK: Final = pa.schema([("task", pa.binary())])
_RESULT: Final = pa.schema([("answer", pa.binary()), ("code", pa.string()), ("message", pa.string())])
_DEFAULT_PARALLELISM: Final = 8  # Spark Connect does not report the cluster's size.


def parallelism(spark: "SparkSession | None") -> int:
    """How many tasks run at a time, as far as that is known."""
    if spark is None:
        return 1
    from pyspark.sql.utils import is_remote

    return _DEFAULT_PARALLELISM if is_remote() else spark.sparkContext.defaultParallelism


def execute(spark: "SparkSession | None", work: Callable[[bytes], bytes], tasks: Sequence[bytes]) -> Iterator[bytes]:
    """The result of each task, in any order.

    Spark splits a small table into as many partitions as it has cores, so with that many tasks of equal size each core
    runs one. `work` is pickled by name: executors need Fastness installed.

    Raises:
        FastnessError: raised by `work`, on an executor or here.
    """
    if spark is None or not tasks:
        yield from map(work, tasks)
        return

    def run_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column("task").to_pylist():
                yield pa.RecordBatch.from_pylist([_result_row(work, task)], _RESULT)

    frame = spark.createDataFrame(pa.table({"task": list(tasks)}, _TASK))
    for row in frame.mapInArrow(run_batches, "answer binary, code string, message string").collect():
        if row["code"] is not None:
            raise rebuild(row["code"], row["message"])
        yield bytes(row["answer"])


def _result_row(work: Callable[[bytes], bytes], task: bytes) -> dict[str, bytes | str]:
    """The result, or the error's code and message: an exception that leaves an executor becomes a Java stack trace."""
    try:
        return {"answer": work(task)}
    except FastnessError as error:
        return {"code": error.code, "message": str(error)}


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the sizes in at most `count` groups of about equal total size, each group in order."""
    groups: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    totals = [0] * len(groups)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        smallest = totals.index(min(totals))
        groups[smallest].append(n)
        totals[smallest] += sizes[n]
    return [sorted(group) for group in groups]
