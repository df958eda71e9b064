"""The jobs: each one is `run(spark, config)`, and tells what it did."""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import InvalidArgument
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.progress import Tell, watched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What each does, for the help of commands. The first ones, in this order, are a whole run.
JOBS: Final = {
    "ingest": "Take what is new in the plane into the lake, each row once.",
    "audit": "Check every checksum, height, baseline and restore; a verdict for each world.",
    "reachability": "Find blobs that nothing refers to, and how many bytes they take. Nothing is deleted.",
    "rollup": "Sum up: latency, throughput, retries, dead letters, mailboxes, locks, storage.",
    "report": "Write one HTML page with plots over the sums.",
    "load": "Put rows of a table or file into queues, mailboxes or inboxes.",
    "vacuum": "Remove files of the lake that no table has, and join small ones.",
}
SPARKLESS: Final = ("report",)
PLANELESS: Final = ("report", "vacuum")  # The lake has all that they need.
WHOLE: Final = ("ingest", "audit", "reachability", "rollup", "report")


def run(
    name: str, spark: "SparkSession | None", config: Config, *, progress: Tell | None = None, **options: Any
) -> JobResult:
    """Run a job by its name, and tell of Spark's tasks meanwhile. Those of `SPARKLESS` need no Spark.

    Raises:
        InvalidArgument: there is no such job.
    """
    if name not in JOBS:
        raise InvalidArgument(f"There is no job {name!r}; there are: {', '.join(JOBS)}")
    job = import_module(f"{__name__}.{name}")
    with watched(spark, progress):
        told: JobResult = job.run(spark, config, progress=progress, **options)
    return told


def run_whole(spark: "SparkSession", config: Config, *, progress: Tell | None = None) -> Iterator[JobResult]:
    """Run ingest, audit, reachability, rollup and report; findings of one do not keep the next from running."""
    for name in WHOLE:
        yield run(name, spark, config, progress=progress)
