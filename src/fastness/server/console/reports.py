"""Read-only access to the files that the pipeline has written.

A browser cannot send a token when it opens a report as a document. So a caller that may read metrics gets a link: a URL
with a random secret that expires after five minutes, or with the token. Reports are sandboxed: they run no scripts but
those of `report_scripts.py`, have no origin and load nothing.
"""

import asyncio
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import NotAllowed
from fastness.limits import (
    CONSOLE_REPORT_BYTES_MAX,
    CONSOLE_REPORT_LINK_SECONDS,
    CONSOLE_REPORT_LINKS_MAX,
    CONSOLE_REPORTS_MAX,
)
from fastness.server.authorization import Authorizer
from fastness.server.console.report_scripts import script_sources
from fastness.server.context import ServerContext
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import JSON, HttpError
from fastness.wire.permissions import METRICS

_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".css": "text/css; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
}
# Inline styles can load nothing here. Reports of this version also carry a policy of their own that names their style.
_POLICY: Final = "; ".join(
    (
        "sandbox allow-scripts",
        "default-src 'none'",
        f"script-src {script_sources()}",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "font-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


class ReportFile(msgspec.Struct, frozen=True):
    """A file that the pipeline has written."""

    name: str
    size: int
    modified_ms: int


class Reports:
    """Serves the reports in one folder through expiring links."""

    def __init__(self, context: ServerContext, folder: str) -> None:
        self._context = context
        self._folder = Path(folder)
        self._links: dict[str, tuple[float, Authorizer]] = {}  # Expiry and authorizer by secret, oldest first.

    def routes(self) -> list[Route]:
        """`/console/reports`, and the files behind a link."""
        return [
            Route("/console/reports", self._list, methods=["POST"]),
            Route("/console/reports/{secret}/{name}", self._file, methods=["GET"]),
        ]

    async def _list(self, request: HttpRequest) -> Response:
        authorizer = authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        authorizer.authorize_verb(METRICS)
        found = await asyncio.to_thread(self._list_files)
        answer = {
            "files": found,
            "at": f"console/reports/{self._new_link(authorizer)}/",
            "seconds": CONSOLE_REPORT_LINK_SECONDS,
        }
        return Response(msgspec.json.encode(answer), headers={"Cache-Control": "no-store"}, media_type=JSON)

    async def _file(self, request: HttpRequest) -> Response:
        if not self._is_valid(request.path_params["secret"]):
            raise HttpError(403, "pass_expired", "This report link has expired; open the report from the console again")
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

    def _list_files(self) -> list[ReportFile]:
        """The newest files that can be displayed, newest first."""
        found = []
        try:
            paths = list(self._folder.iterdir())
        except OSError:  # The pipeline has not run yet.
            return []
        for path in paths:
            try:
                status = path.lstat()
            except OSError:  # The pipeline has just removed or replaced it.
                continue
            if path.suffix in _MEDIA and path.name.isprintable() and _can_be_shown(status):
                found.append(ReportFile(path.name, status.st_size, status.st_mtime_ns // 1_000_000))
        return sorted(found, key=lambda each: each.modified_ms, reverse=True)[:CONSOLE_REPORTS_MAX]

    def _read(self, path: Path) -> bytes | None:
        """The contents of a listed file; None if it is not listed or no longer exists."""
        if path.name not in {each.name for each in self._list_files()}:  # Prevents path traversal.
            return None
        try:
            # The listed file may since have been replaced by a link or a pipe.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read() if _can_be_shown(os.fstat(file.fileno())) else None
        except OSError:
            return None

    def _is_valid(self, secret: str) -> bool:
        """Whether a link exists, has not expired, and its token may still read metrics."""
        until, authorizer = self._links.get(secret, (float("-inf"), None))
        try:
            return authorizer is not None and time.monotonic() <= until and authorizer.is_allowed(METRICS)
        except NotAllowed:  # The token was revoked or has expired.
            return False

    def _new_link(self, authorizer: Authorizer) -> str:
        now = time.monotonic()
        for old in [each for each, (until, _) in self._links.items() if until < now]:
            del self._links[old]
        while len(self._links) >= CONSOLE_REPORT_LINKS_MAX:
            del self._links[next(iter(self._links))]
        secret = secrets.token_urlsafe(24)
        self._links[secret] = (now + CONSOLE_REPORT_LINK_SECONDS, authorizer)
        return secret


def _can_be_shown(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= CONSOLE_REPORT_BYTES_MAX
