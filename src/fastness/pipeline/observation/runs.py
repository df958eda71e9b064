"""A record of the last run of each job, in the lake:

    <lake>/runs/ingest.json      {"job": "ingest", "state": "ok", "started_at": …, "rows": {"journal": 512}, …}

A run that was killed stays `running`. Of two runs at the same time, the last one to write wins.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from fastness.errors import FastnessError, ObjectNotFound
from fastness.limits import RUN_ERROR_CHARACTERS, RUN_RECORD_SECONDS
from fastness.pipeline.config import JobResult
from fastness.pipeline.lake.atomic_files import replace_file
from fastness.pipeline.lake.locations import Location

FOLDER: Final = "runs"
_log = logging.getLogger("fastness.pipeline")
State: TypeAlias = Literal["running", "ok", "findings", "failed"]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of a job."""

    job: str
    state: State
    started_at: datetime
    ended_at: datetime | None = None  # None: it runs, or was killed. With `follow`: the end of the last round.
    completed_at: datetime | None = None  # The end of the last run, this or an earlier one, that did not fail.
    seconds: float = 0.0
    rows: dict[str, int] = {}
    findings: int = 0
    error: str | None = None


class RunRecorder:
    """An observer that keeps the records of a lake."""

    def __init__(self, location: Location, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._location = location
        self._now = now
        self._written_at: datetime | None = None
        try:
            self.records = read_records(location)
        except FastnessError as error:  # The job itself will say what is wrong with the lake.
            _log.warning("The records of earlier runs cannot be read: %s", error)
            self.records = {}

    def started(self, job: str) -> None:
        self._set(RunRecord(job=job, state="running", started_at=self._now(), completed_at=self._completed_at(job)))

    def completed(self, result: JobResult) -> None:
        self._set(self._record_of(result))

    def failed(self, job: str, error: BaseException) -> None:
        now, text = self._now(), str(error) or type(error).__name__
        self._set(
            RunRecord(
                job=job,
                state="failed",
                started_at=self._started_at(job),
                ended_at=now,
                completed_at=self._completed_at(job),
                seconds=(now - self._started_at(job)).total_seconds(),
                error=text[:RUN_ERROR_CHARACTERS],
            )
        )

    def round_ended(self, result: JobResult) -> None:
        """Record a round of a job that repeats. The lake gets a record only now and then, because rounds are short."""
        record = self._record_of(result)
        self.records[result.job] = record
        since = None if self._written_at is None else (self._now() - self._written_at).total_seconds()
        if since is None or since >= RUN_RECORD_SECONDS:
            self._set(record)

    def _record_of(self, result: JobResult) -> RunRecord:
        now = self._now()
        return RunRecord(
            job=result.job,
            state="ok" if result.ok else "findings",
            started_at=self._started_at(result.job),
            ended_at=now,
            completed_at=now,
            seconds=result.seconds,
            rows=result.rows,
            findings=len(result.findings),
        )

    def _set(self, record: RunRecord) -> None:
        self.records[record.job] = record
        # A job that only starts or fails does not create a lake.
        if record.state in ("ok", "findings") or not self._location.is_local or Path(self._location.url).is_dir():
            body = msgspec.json.format(msgspec.json.encode(record)) + b"\n"
            replace_file(self._location.child(FOLDER), f"{record.job}.json", body)
            self._written_at = self._now()

    def _started_at(self, job: str) -> datetime:
        known = self.records.get(job)
        return self._now() if known is None else known.started_at

    def _completed_at(self, job: str) -> datetime | None:
        known = self.records.get(job)
        return None if known is None else known.completed_at


def read_records(location: Location) -> dict[str, RunRecord]:
    """The records of a lake by job; records that cannot be read are left out."""
    found = {}
    for job in ("ingest", "audit", "reachability", "rollup", "report", "live", "load", "vacuum"):
        try:
            body = bytes(location.child(FOLDER).read(f"{job}.json"))
            found[job] = msgspec.json.decode(body, type=RunRecord)
        except (ObjectNotFound, msgspec.MsgspecError):
            continue
    return found
