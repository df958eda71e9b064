"""`/docs/errors` and `/docs/errors/{code}`: the cause and the remedy of each error code. They read no data."""

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from fastness.remedies import REMEDIES
from fastness.server.problems import HttpError

_STYLE: Final = "body{max-width:44rem;margin:2rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif}"
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CODE: Final = re.compile(r"`([^`]+)`")


def routes() -> list[Route]:
    """The two pages."""
    return [Route("/docs/errors", _all), Route("/docs/errors/{code}", _one)]


async def _all(request: Request) -> Response:
    del request
    links = (f'<li><a href="errors/{code}">{code}</a>: {_marked(found.cause)}</li>' for code, found in REMEDIES.items())
    return _page("Errors", ["<ul>", *links, "</ul>"])


async def _one(request: Request) -> Response:
    code = request.path_params["code"]
    if code not in REMEDIES:
        raise HttpError(404, "not_found", f"There is no error code {code[:80]!r}; /docs/errors lists all of them")
    found = REMEDIES[code]
    return _page(
        code,
        [
            f"<h2>Cause</h2><p>{_marked(found.cause)}</p>",
            f"<h2>Remedy</h2><p>{_marked(found.remedy)}</p>",
            f"<p>{_marked(f'In a terminal: `fastness explain {code}`.')} <a href='../errors'>All errors</a></p>",
        ],
    )


def _marked(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text, quote=False))


def _page(title: str, body: Iterable[str]) -> Response:
    html = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - Fastness</title>
<style>{_STYLE}</style>
<h1>{escape(title)}</h1>
{"".join(body)}
"""
    return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})
