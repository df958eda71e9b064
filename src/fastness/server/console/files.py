"""Serves the static files of the console from this package."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

PAGE: Final = "console.html"
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Only files of this server, no inline script or style, no markup from text, no embedding in frames.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class File:
    """A static file with its strong ETag."""

    __slots__ = ("_headers", "body", "etag", "media")

    def __init__(self, name: str, body: bytes, *, headers: Mapping[str, str] = HEADERS) -> None:
        self.body = body
        self._headers = headers
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self.media = _MEDIA[name[name.rindex(".") :]]

    def answer(self, request: HttpRequest) -> Response:
        """The file, or 304 if the caller already has it."""
        # The browser revalidates each time, so that a page never mixes files of two versions.
        headers = {**self._headers, "ETag": self.etag, "Cache-Control": "no-cache"}
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media)


class _HomeRoute(Route):
    """Matches browsers only: other clients of `/` get the problem of an unknown path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_browser = scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", "")
        if not is_browser or scope["method"] not in ("GET", "HEAD"):
            return Match.NONE, {}
        return super().matches(scope)


def routes() -> list[Route]:
    """The page, its scripts and its styles. They contain no data, so they need no token."""
    folder = files(__package__) / "static"
    known = {
        each.name: File(each.name, each.read_bytes())
        for each in folder.iterdir()
        if each.name[each.name.rfind(".") :] in _MEDIA
    }

    def route(path: str, file: File) -> Route:
        async def answer(request: HttpRequest) -> Response:
            return file.answer(request)

        return Route(path, answer, methods=["GET"])

    async def to_console(request: HttpRequest) -> Response:
        del request
        return RedirectResponse("console", 307, {**HEADERS, "Vary": "Accept"})

    async def without_slash(request: HttpRequest) -> Response:
        del request
        return RedirectResponse("../console", 308, HEADERS)

    return [
        _HomeRoute("/", to_console, methods=["GET"]),
        route("/console", known[PAGE]),
        Route("/console/", without_slash, methods=["GET"]),
        *(route(f"/console/{name}", file) for name, file in sorted(known.items()) if name != PAGE),
    ]
