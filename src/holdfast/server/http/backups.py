"""Backups and checkups over HTTP: files as they are, lists a line of JSON at a time."""

from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from holdfast.server.http.endpoints import BYTES, Endpoint, Parameter, noun
from holdfast.server.http.problems import Refusal
from holdfast.server.http.request_context import Visit
from holdfast.wire.backups import BeginBackup, EndBackup, Line, ListBackup, OpenBackup
from holdfast.wire.health_checks import RunCheckups
from holdfast.wire.requests import Request

LINES: Final = "application/x-ndjson"
OCTETS: Final = "application/octet-stream"


async def _files(visit: Visit) -> Response:
    _check_query(visit)
    return await _streamed(visit, ListBackup(visit.http.path_params["id"]), LINES)


async def _file(visit: Visit) -> Response:
    _check_query(visit, "start", "length")
    asked = visit.http.path_params
    start, length = _number(visit, "start"), _number(visit, "length")
    return await _streamed(visit, OpenBackup(asked["id"], asked["path"], start or 0, length), OCTETS)


async def _checkups(visit: Visit) -> Response:
    _check_query(visit, "deep")
    deep = visit.http.query_params.get("deep", "false")
    if deep not in ("true", "false"):
        raise Refusal(400, "invalid_query", f"deep is {deep[:80]!r}; say true or false")
    return await _streamed(visit, RunCheckups(deep == "true"), LINES)


async def _streamed(visit: Visit, request: Request[Any], media: str) -> Response:
    visit.guard.allow(request)
    chunks: AsyncIterator[bytes] = await visit.hall.transport.receive(request)
    return StreamingResponse(chunks, headers={"Cache-Control": "no-store"}, media_type=media)


def _check_query(visit: Visit, *known: str) -> None:
    for name in visit.http.query_params:
        if name not in known:
            raise Refusal(
                400, "invalid_query", f"There is no {name[:80]!r} here; it knows {', '.join(known) or 'none'}"
            )


def _number(visit: Visit, name: str) -> int | None:
    text = visit.http.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise Refusal(400, "invalid_query", f"{name} is {text[:80]!r}; give a number of bytes")
    return int(text)


_ID: Final = Parameter("id", "path", required=True, about="The id that the backup began with.")

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("POST", "/v1/backups", BeginBackup, "Make a checkpoint of everything, to be copied", of="backups", status=201),
    noun("DELETE", "/v1/backups/{id}", EndBackup, "Remove a checkpoint", of="backups"),
    Endpoint(
        method="GET",
        path="/v1/backups/{id}/files",
        noun="backups",
        summary="Every file that belongs to a checkpoint, a line each; the last line says that it is the last",
        handle=_files,
        parameters=(_ID,),
        answers={LINES: Line},
    ),
    Endpoint(
        method="GET",
        path="/v1/backups/{id}/files/{path:path}",
        noun="backups",
        summary="The bytes of a file that belongs to a checkpoint",
        handle=_file,
        parameters=(
            _ID,
            Parameter("path", "path", required=True, about="As the list of files has it."),
            Parameter("start", "query", int, about="Begin at this byte."),
            Parameter("length", "query", int, about="So many bytes, at most."),
        ),
        answers={OCTETS: BYTES},
    ),
    Endpoint(
        method="GET",
        path="/v1/checkups",
        noun="backups",
        summary="Look at everything that is kept, as it is now: what is seen, a line each",
        handle=_checkups,
        parameters=(Parameter("deep", "query", bool, about="Hash every blob, not a sample of the large ones."),),
        answers={LINES: Line},
    ),
)
