"""Serves the API page and its files. They contain no data, so they need no token."""

from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fastness.server.console.files import HEADERS, File

PAGE: Final = "docs.html"
FILES: Final = (
    "docs.css",
    "start.js",
    "swagger-ui-bundle.js",
    "swagger-ui-bundle.js.LICENSE.txt",
    "swagger-ui-license.txt",
    "swagger-ui-notice.txt",
    "swagger-ui.css",
)
# As strict as that of the console, except that Swagger UI creates markup from text (which it sanitizes), and has images
# in its style sheet.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {**HEADERS, "Content-Security-Policy": POLICY}


def routes() -> list[Route]:
    """`/docs` and the files that it loads."""

    async def without_slash(request: HttpRequest) -> Response:
        del request
        return RedirectResponse("../docs", 308, _HEADERS)

    return [
        _route("/docs", PAGE),
        Route("/docs/", without_slash, methods=["GET"]),
        *(_route(f"/docs/{name}", name) for name in FILES),
    ]


def _route(path: str, name: str) -> Route:
    async def answer(request: HttpRequest) -> Response:
        return _file(name).answer(request)

    return Route(path, answer, methods=["GET"])


@cache
def _file(name: str) -> File:
    """A file of this package. It is read when it is first asked for: most servers never show the page."""
    return File(name, (files(__package__) / "static" / name).read_bytes(), headers=_HEADERS)
