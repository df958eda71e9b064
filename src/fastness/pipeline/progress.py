"""Progress of a job: polls Spark's task counts while it runs.

A job also reports its own progress, by the same callback: `progress(what, done, total)`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

ProgressCallback: TypeAlias = Callable[[str, int, int], None]

TASKS: Final = "Spark tasks"
_POLL_SECONDS: Final = 0.25


@contextmanager
def report_progress(spark: "SparkSession | None", callback: ProgressCallback | None) -> Iterator[None]:
    """While the context is open, call `callback("Spark tasks", done, total)` with Spark's task counts."""
    if callback is None or spark is None:
        yield
    elif ".connect." in type(spark).__module__:  # Spark Connect pushes progress.
        handler = _connect_handler(callback)
        spark.registerProgressHandler(handler)
        try:
            yield
        finally:
            spark.removeProgressHandler(handler)
    else:
        stopped = threading.Event()
        poller = threading.Thread(
            target=_poll,
            args=(spark.sparkContext.statusTracker(), callback, stopped),
            name="fastness-progress",
            daemon=True,
        )
        poller.start()
        try:
            yield
        finally:
            stopped.set()
            poller.join()


def _poll(tracker: "StatusTracker", callback: ProgressCallback, stopped: threading.Event) -> None:
    while not stopped.wait(_POLL_SECONDS):
        try:
            done, total = _task_counts(tracker)
        except Exception:  # Spark is stopping, which raises many kinds of errors; the job itself raises one.
            return
        if total:
            callback(TASKS, done, total)


def _task_counts(tracker: "StatusTracker") -> tuple[int, int]:
    """The completed tasks and all tasks of the running jobs."""
    jobs = [job for each in tracker.getActiveJobsIds() if (job := tracker.getJobInfo(each)) is not None]
    known = {stage: tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds}
    stages = [stage for stage in known.values() if stage is not None]
    return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)


def _connect_handler(callback: ProgressCallback) -> Any:
    def handle(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        del inflight_tasks, operation_id, done
        if found := list(stages or ()):
            callback(TASKS, sum(each.num_completed_tasks for each in found), sum(each.num_tasks for each in found))

    return handle
