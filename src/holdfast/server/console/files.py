"""The files of the console, as they are in the package."""

import hashlib
from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

PAGE: Final = "console.html"
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing but our own files, no inline script or style, no markup made from text; nobody frames us.
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
    """A file with its strong ETag."""

    __slots__ = ("body", "etag", "media")

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self.media = _MEDIA[name[name.rindex(".") :]]

    def answer(self, request: HttpRequest) -> Response:
        """The file, or nothing if the caller has it."""
        # A browser asks each time, so that a page never runs with a part of another version.
        headers = {**HEADERS, "ETag": self.etag, "Cache-Control": "no-cache"}
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media)


def routes() -> list[Route]:
    """The page and its parts. None of them asks the plane for anything, so none asks for a token."""
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

    async def without_slash(request: HttpRequest) -> Response:
        del request
        return RedirectResponse("../console", 308, HEADERS)

    return [
        route("/console", known[PAGE]),
        Route("/console/", without_slash, methods=["GET"]),
        *(route(f"/console/{name}", file) for name, file in sorted(known.items()) if name != PAGE),
    ]
