"""Work for executors: a function that makes an answer of a task, both bytes. The driver gets the answers.

Without Spark the same tasks are done in this process, one after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from holdfast.errors import HoldfastError, rebuild

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASK: Final = pa.schema([("task", pa.binary())])
_ANSWER: Final = pa.schema([("answer", pa.binary()), ("code", pa.string()), ("message", pa.string())])
_UNKNOWN: Final = 8  # Tasks for a cluster that does not tell its size: behind Spark Connect there is no such question.


def parallelism(spark: "SparkSession | None") -> int:
    """How many tasks run at a time, as far as that can be told."""
    if spark is None:
        return 1
    from pyspark.sql.utils import is_remote

    return _UNKNOWN if is_remote() else spark.sparkContext.defaultParallelism


def answers(spark: "SparkSession | None", work: Callable[[bytes], bytes], tasks: Sequence[bytes]) -> Iterator[bytes]:
    """The answer of each task, in any order.

    Spark cuts a small table into as many partitions as it has room for, so with that many tasks of the same size each
    core does one. `work` travels by its name: executors have Holdfast installed.

    Raises:
        HoldfastError: what `work` raised, wherever it did.
    """
    if spark is None or not tasks:
        yield from map(work, tasks)
        return

    def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column("task").to_pylist():
                yield pa.RecordBatch.from_pylist([_answered(work, task)], _ANSWER)

    frame = spark.createDataFrame(pa.table({"task": list(tasks)}, _TASK))
    for row in frame.mapInArrow(each, "answer binary, code string, message string").collect():
        if row["code"] is not None:
            raise rebuild(row["code"], row["message"])
        yield bytes(row["answer"])


def _answered(work: Callable[[bytes], bytes], task: bytes) -> dict[str, bytes | str]:
    """The answer, or the error in words: one that leaves an executor by itself is a page of Java."""
    try:
        return {"answer": work(task)}
    except HoldfastError as error:
        return {"code": error.code, "message": str(error)}


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Which of the sizes go together so that at most `count` groups are about equally large, each in its order."""
    groups: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    loads = [0] * len(groups)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        lightest = loads.index(min(loads))
        groups[lightest].append(n)
        loads[lightest] += sizes[n]
    return [sorted(group) for group in groups]
