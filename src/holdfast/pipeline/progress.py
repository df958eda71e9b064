"""How far a job is: what Spark knows of its tasks, told while they run.

A job also tells of itself, by the same callback: `progress(what, done, total)`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

Tell: TypeAlias = Callable[[str, int, int], None]

TASKS: Final = "Spark tasks"
_LOOK_SECONDS: Final = 0.25


@contextmanager
def watched(spark: "SparkSession | None", tell: Tell | None) -> Iterator[None]:
    """While it lasts, `tell("Spark tasks", done, total)` is called with the tasks of whatever Spark is doing."""
    if tell is None or spark is None:
        yield
    elif ".connect." in type(spark).__module__:  # There, it is the server that tells.
        heard = _heard(tell)
        spark.registerProgressHandler(heard)
        try:
            yield
        finally:
            spark.removeProgressHandler(heard)
    else:
        over = threading.Event()
        looker = threading.Thread(
            target=_look, args=(spark.sparkContext.statusTracker(), tell, over), name="holdfast-progress", daemon=True
        )
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()


def _look(tracker: "StatusTracker", tell: Tell, over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        try:
            done, total = _tasks(tracker)
        except Exception:  # Spark is being stopped, and says so in many ways; whoever runs the job hears of it.
            return
        if total:
            tell(TASKS, done, total)


def _tasks(tracker: "StatusTracker") -> tuple[int, int]:
    """Tasks that are done, and all of them, of the jobs that run."""
    jobs = [job for each in tracker.getActiveJobsIds() if (job := tracker.getJobInfo(each)) is not None]
    known = {stage: tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds}
    stages = [stage for stage in known.values() if stage is not None]
    return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)


def _heard(tell: Tell) -> Any:
    def handle(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        del inflight_tasks, operation_id, done
        if found := list(stages or ()):
            tell(TASKS, sum(each.num_completed_tasks for each in found), sum(each.num_tasks for each in found))

    return handle
