"""What the pipeline has written, read-only.

A report is a document of its own, and a browser cannot show a token for it. So whoever may read the metrics asks for a
pass: an address that nobody guesses, and that is gone after five minutes. What is shown there runs no script, belongs
to no origin and asks nobody for anything.
"""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast.limits import (
    CONSOLE_PASS_SECONDS,
    CONSOLE_PASSES_MAX,
    CONSOLE_REPORT_BYTES_MAX,
    CONSOLE_REPORTS_MAX,
)
from holdfast.server.doors import Doors
from holdfast.server.http.edge import admitted
from holdfast.server.http.refusals import JSON, Refusal
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
    "sandbox; default-src 'none'; style-src 'unsafe-inline' 'self'; img-src 'self' data:; font-src data:; "
    "frame-ancestors 'self'"
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
        self._passes: dict[str, float] = {}  # Until when, in the order in which they were given out.

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
        answer = {"files": found, "at": f"console/reports/{self._new_pass()}/", "seconds": CONSOLE_PASS_SECONDS}
        return Response(msgspec.json.encode(answer), headers={"Cache-Control": "no-store"}, media_type=JSON)

    async def _file(self, request: HttpRequest) -> Response:
        if not self._is_known(request.path_params["pass_"]):
            raise Refusal(
                403, "pass_expired", "This address of a report was for five minutes; open it from the console"
            )
        name = request.path_params["name"]
        if name not in {each.name for each in await asyncio.to_thread(self._found)}:  # No other path leads anywhere.
            raise HTTPException(404)
        path = self._folder / name
        body = await asyncio.to_thread(path.read_bytes)
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
            for path in self._folder.iterdir():
                if path.suffix in _MEDIA and path.is_file() and not path.is_symlink():
                    seen = path.stat()
                    if seen.st_size <= CONSOLE_REPORT_BYTES_MAX:
                        found.append(ReportFile(path.name, seen.st_size, seen.st_mtime_ns // 1_000_000))
        except OSError:  # The pipeline has not run yet.
            return []
        return sorted(found, key=lambda each: each.modified_ms, reverse=True)[:CONSOLE_REPORTS_MAX]

    def _is_known(self, shown: str) -> bool:
        return time.monotonic() <= self._passes.get(shown, float("-inf"))

    def _new_pass(self) -> str:
        now = time.monotonic()
        for old in [each for each, until in self._passes.items() if until < now]:
            del self._passes[old]
        while len(self._passes) >= CONSOLE_PASSES_MAX:
            del self._passes[next(iter(self._passes))]
        made = secrets.token_urlsafe(24)
        self._passes[made] = now + CONSOLE_PASS_SECONDS
        return made
