"""What the pipeline has written, read-only.

A report is a document of its own, and a browser cannot show a token for it. So whoever may read the metrics asks for a
pass: an address that nobody guesses, and that is gone after five minutes, or with the token. What is shown there runs
no script, belongs to no origin and asks nobody for anything.
"""

import asyncio
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast.errors import NotAllowed
from holdfast.limits import (
    CONSOLE_PASS_SECONDS,
    CONSOLE_PASSES_MAX,
    CONSOLE_REPORT_BYTES_MAX,
    CONSOLE_REPORTS_MAX,
)
from holdfast.server.authorization import Guard
from holdfast.server.console.sessions import may
from holdfast.server.doors import Doors
from holdfast.server.http.middleware import admitted
from holdfast.server.http.problems import JSON, Refusal
from holdfast.wire.tokens import METRICS

_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".css": "text/css; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
}
_POLICY: Final = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; frame-ancestors 'self'"
)


class ReportFile(msgspec.Struct, frozen=True):
    """A file that the pipeline has written."""

    name: str
    size: int
    modified_ms: int


class Reports:
    """The reports in one folder, and the passes to them that are known."""

    def __init__(self, doors: Doors, folder: str) -> None:
        self._doors = doors
        self._folder = Path(folder)
        self._passes: dict[str, tuple[float, Guard]] = {}  # Until when and for whom, the oldest first.

    def routes(self) -> list[Route]:
        """`/console/reports`, and the files behind a pass."""
        return [
            Route("/console/reports", self._list, methods=["POST"]),
            Route("/console/reports/{pass_}/{name}", self._file, methods=["GET"]),
        ]

    async def _list(self, request: HttpRequest) -> Response:
        guard: Any = admitted(self._doors, request.headers, request.client.host if request.client else "")
        if hasattr(guard, "permit"):
            guard.permit(METRICS)
        found = await asyncio.to_thread(self._found)
        answer = {"files": found, "at": f"console/reports/{self._new_pass(guard)}/", "seconds": CONSOLE_PASS_SECONDS}
        return Response(msgspec.json.encode(answer), headers={"Cache-Control": "no-store"}, media_type=JSON)

    async def _file(self, request: HttpRequest) -> Response:
        if not self._is_good(request.path_params["pass_"]):
            raise Refusal(
                403, "pass_expired", "This address of a report is not good any more; open it from the console"
            )
        path = self._folder / request.path_params["name"]
        body = await asyncio.to_thread(self._read, path)
        if body is None:
            raise HTTPException(404)
        headers = {
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        return Response(body, headers=headers, media_type=_MEDIA[path.suffix])

    def _found(self) -> list[ReportFile]:
        """The newest files that can be shown, the newest first."""
        found = []
        try:
            paths = list(self._folder.iterdir())
        except OSError:  # The pipeline has not run yet.
            return []
        for path in paths:
            try:
                seen = path.lstat()
            except OSError:  # The pipeline has removed it, or put another in its place, just now.
                continue
            if path.suffix in _MEDIA and path.name.isprintable() and _can_be_shown(seen):
                found.append(ReportFile(path.name, seen.st_size, seen.st_mtime_ns // 1_000_000))
        return sorted(found, key=lambda each: each.modified_ms, reverse=True)[:CONSOLE_REPORTS_MAX]

    def _read(self, path: Path) -> bytes | None:
        """A file that is listed; None if there is none, or not any more."""
        if path.name not in {each.name for each in self._found()}:  # No other path leads anywhere.
            return None
        try:
            # What was listed may be a link or a pipe by now.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read() if _can_be_shown(os.fstat(file.fileno())) else None
        except OSError:
            return None

    def _is_good(self, shown: str) -> bool:
        """Whether a pass is known, and whoever it is for may still have one."""
        until, guard = self._passes.get(shown, (float("-inf"), None))
        try:
            return guard is not None and time.monotonic() <= until and may(guard, METRICS)
        except NotAllowed:  # The token was revoked, or its time is over.
            return False

    def _new_pass(self, guard: Guard) -> str:
        now = time.monotonic()
        for old in [each for each, (until, _) in self._passes.items() if until < now]:
            del self._passes[old]
        while len(self._passes) >= CONSOLE_PASSES_MAX:
            del self._passes[next(iter(self._passes))]
        made = secrets.token_urlsafe(24)
        self._passes[made] = (now + CONSOLE_PASS_SECONDS, guard)
        return made


def _can_be_shown(seen: os.stat_result) -> bool:
    return stat.S_ISREG(seen.st_mode) and seen.st_size <= CONSOLE_REPORT_BYTES_MAX
