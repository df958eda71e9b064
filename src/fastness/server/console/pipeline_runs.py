"""The last run of each job of the pipeline, from the records that the jobs keep in their lake.

`fastness pipeline status` shows the same records. They are small JSON files, `<lake>/runs/<job>.json`, so a server
reads them without the packages of the pipeline.
"""

import asyncio
import os
import stat
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import Backend
from fastness.limits import CONSOLE_JOB_RECORD_BYTES_MAX, CONSOLE_JOBS_MAX
from fastness.server.context import ServerContext
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import JSON
from fastness.wire.permissions import METRICS

FOLDER: Final = "runs"


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of a job, as it is recorded."""

    job: str
    state: Literal["running", "ok", "findings", "failed"]
    started_at: datetime
    ended_at: datetime | None = None  # None: it runs, or was killed.
    completed_at: datetime | None = None  # The end of the last run that did not fail.
    seconds: float = 0.0
    rows: dict[str, int] = {}  # By table.
    findings: int = 0
    error: str | None = None


class JobRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The last runs of all jobs."""

    lake: bool  # Whether the server knows the folder of a lake.
    runs: list[JobRun] = []  # The newest first.
    unreadable: list[str] = []  # Files that are no records.


class PipelineRuns:
    """Serves the records of a lake in a local folder."""

    def __init__(self, context: ServerContext, lake: Path | None) -> None:
        self._context = context
        self._lake = lake

    def route(self) -> Route:
        """`/console/pipeline`."""
        return Route("/console/pipeline", self._answer, methods=["GET"])

    async def _answer(self, request: HttpRequest) -> Response:
        authorizer = authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        authorizer.authorize_verb(METRICS)
        if self._lake is None:
            found = JobRuns(lake=False)
        else:
            found = await asyncio.to_thread(read_runs, self._lake / FOLDER)
        return Response(msgspec.json.encode(found), headers={"Cache-Control": "no-store"}, media_type=JSON)


def read_runs(folder: Path) -> JobRuns:
    """The records in a folder.

    Raises:
        Backend: the folder cannot be read.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")[:CONSOLE_JOBS_MAX]
    except FileNotFoundError:  # No job has run yet.
        return JobRuns(lake=True)
    except OSError as error:
        raise Backend(f"The folder {folder} cannot be read ({error.strerror}); check its permissions") from error
    runs, unreadable = [], []
    for path in paths:
        try:
            runs.append(msgspec.json.decode(_read(path), type=JobRun))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            unreadable.append(path.name)
    return JobRuns(lake=True, runs=sorted(runs, key=_started, reverse=True), unreadable=unreadable)


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > CONSOLE_JOB_RECORD_BYTES_MAX:
            raise OSError(f"{path} is no record")
        return file.read()


def _started(run: JobRun) -> float:
    return run.started_at.timestamp()
