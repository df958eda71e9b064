"""The jobs: each is a module with `run(spark, config)`, which returns a JobResult."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from fastness.errors import FastnessError, InvalidArgument
from fastness.pipeline import sessions
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.observation.observers import Observer, observed
from fastness.pipeline.progress import ProgressCallback, report_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from fastness.pipeline.views import View

# Descriptions, for command-line help. The first six, in this order, are a full run.
JOBS: Final = {
    "ingest": "Copy new data of the plane into the lake, each row exactly once.",
    "audit": "Check every checksum of the plane and the lake, and the heights and restores of every world.",
    "reachability": "Find unreferenced blobs and their size. Nothing is deleted.",
    "contents": "Copy what queues, mailboxes, states, leases, schedules and tokens hold now.",
    "rollup": "Aggregate latency, throughput, retries, dead letters, mailboxes, leases and storage.",
    "report": "Write an HTML report with plots of the aggregates.",
    "live": "Aggregate new queue events by minute, as a stream.",
    "accept": "Continue the lake with a plane that was restored, and confirm losses.",
    "reset": "Drop the rows of sources, so that the next ingest reads them again from the start.",
    "backfill": "Ingest sources again from the start: add missing rows, and report what differs.",
    "forget": "Remove worlds, queues or a person's rows from every table, and prove that they are gone.",
    "load": "Load rows of a table or file into queues, mailboxes or inboxes.",
    "vacuum": "Remove rows by their age, compact small files of the lake, and delete files that no table uses.",
}
JOBS_WITHOUT_SPARK: Final = ("contents", "report", "accept", "reset", "forget")
JOBS_WITHOUT_PLANE: Final = ("report", "vacuum")  # They read only the lake.
JOBS_OF_A_LAKE: Final = ("rollup", "report", "accept", "reset", "backfill", "forget", "vacuum")  # It must exist.
FULL_RUN: Final = ("ingest", "audit", "reachability", "contents", "rollup", "report")
_JOBS_WITH_VIEW: Final = ("ingest", "audit", "reachability", "contents", "rollup")


class JobOptions(TypedDict, total=False):
    """The options of all jobs; each job accepts its own."""

    follow: bool  # ingest and live
    every_seconds: float
    stop: Event
    round_ended: Callable[[JobResult | FastnessError], None]
    late_seconds: float  # live
    checkpoint: str | None
    rebuild: bool
    grace_seconds: float  # reachability
    now: datetime  # reachability, contents, rollup, report and vacuum
    view: "View"  # ingest, audit, reachability, contents and rollup
    payloads: bool  # contents
    publish: bool  # report
    source: "DataFrame | str"  # load
    target: str
    load: str
    key: str
    queue: str | None
    format: str | None
    staging: str | None
    worlds: Sequence[str]  # accept, reset, backfill and forget
    kinds: Sequence[str]
    lost: bool  # accept and backfill
    queues: Sequence[str]  # reset, backfill and forget
    sessions: Sequence[str]
    everything: bool  # reset and backfill
    allow_loss: bool  # reset
    matches: Sequence[str]  # forget
    deleted: bool
    reason: str | None
    vacuum: bool
    keep_hours: int  # vacuum
    files_min: int
    retain: Mapping[str, float]


def run(
    name: str,
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    observers: Sequence[Observer] = (),
    **options: Unpack[JobOptions],
) -> JobResult:
    """Run a job by name, report its progress, and tell the observers. Jobs in `JOBS_WITHOUT_SPARK` need no Spark.

    Raises:
        InvalidArgument: there is no such job.
        Unreachable: the Java process of Spark ended.
    """
    if name not in JOBS:
        raise InvalidArgument(f"Unknown job {name!r}; the jobs are: {', '.join(JOBS)}")
    job = import_module(f"{__name__}.{name}")

    def work() -> JobResult:
        with sessions.report_end_of_java(spark, name), report_progress(spark, progress):
            result: JobResult = job.run(spark, config, progress=progress, **options)
        return result

    return observed(name, observers, work)


def run_all(
    spark: "SparkSession",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[JobResult]:
    """Run all jobs of a full run on one view; findings of one job do not stop the next."""
    with view_options(FULL_RUN, config) as options:
        for name in FULL_RUN:
            yield run(name, spark, config, progress=progress, observers=observers, **options[name])


@contextmanager
def view_options(names: Sequence[str], config: Config) -> Iterator[dict[str, JobOptions]]:
    """The options that make these jobs read one view of the plane, by job: their results are of the same time.

    A single job opens its own view.
    """
    options: dict[str, JobOptions] = {name: {} for name in names}
    if sum(name in _JOBS_WITH_VIEW for name in names) < 2:
        yield options
        return
    from fastness.pipeline.views import open_view

    with open_view(config) as view:
        view.pin()
        yield {name: {"view": view} if name in _JOBS_WITH_VIEW else {} for name in names}
