"""Observers are told when a job starts, ends and fails. An error of an observer is logged, and never fails the job."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from fastness.pipeline.config import JobResult

_log = logging.getLogger("fastness.pipeline")


class Observer(Protocol):
    """Is told about the jobs of a run, in order."""

    def started(self, job: str) -> None: ...

    def completed(self, result: JobResult) -> None:
        """The job has ended, with or without findings."""

    def failed(self, job: str, error: BaseException) -> None:
        """The job has raised an error, or was interrupted."""


def observed(job: str, observers: Sequence[Observer], work: Callable[[], JobResult]) -> JobResult:
    """The result of `work`, which is the job; the observers are told about it."""
    _notify(observers, lambda each: each.started(job))
    try:
        result = work()
    except BaseException as error:
        failure = error
        _notify(observers, lambda each: each.failed(job, failure))
        raise
    _notify(observers, lambda each: each.completed(result))
    return result


def _notify(observers: Sequence[Observer], tell: Callable[[Observer], None]) -> None:
    for each in observers:
        try:
            tell(each)
        except Exception as error:
            _log.warning("%s failed, the job continues: %s", type(each).__name__, error)
