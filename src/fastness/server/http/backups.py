"""Backups and health checks over HTTP: files as raw bytes, lists as lines of JSON."""

from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from fastness.server.http.endpoints import BYTES, Endpoint, Parameter
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import HttpError
from fastness.wire.backups import Line, ListBackup, OpenBackup
from fastness.wire.health_checks import RunCheckups
from fastness.wire.requests import Request

LINES: Final = "application/x-ndjson"
OCTETS: Final = "application/octet-stream"


async def _list_files(context: RequestContext) -> Response:
    _check_query(context)
    return await _stream_response(context, ListBackup(context.request.path_params["id"]), LINES)


async def _read_file(context: RequestContext) -> Response:
    _check_query(context, "start", "length")
    path_params = context.request.path_params
    start, length = _number(context, "start"), _number(context, "length")
    return await _stream_response(
        context, OpenBackup(path_params["id"], path_params["path"], start or 0, length), OCTETS
    )


async def _run_checks(context: RequestContext) -> Response:
    _check_query(context, "deep")
    deep = context.request.query_params.get("deep", "false")
    if deep not in ("true", "false"):
        raise HttpError(400, "invalid_query", f"deep is {deep[:80]!r}; use true or false")
    return await _stream_response(context, RunCheckups(deep == "true"), LINES)


async def _stream_response(context: RequestContext, request: Request[Any], media: str) -> Response:
    context.authorizer.authorize(request)
    chunks: AsyncIterator[bytes] = await context.http_context.transport.receive(request)
    return StreamingResponse(chunks, headers={"Cache-Control": "no-store"}, media_type=media)


def _check_query(context: RequestContext, *known: str) -> None:
    for name in context.request.query_params:
        if name not in known:
            raise HttpError(
                400, "invalid_query", f"Unknown query parameter {name[:80]!r}; known: {', '.join(known) or 'none'}"
            )


def _number(context: RequestContext, name: str) -> int | None:
    text = context.request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise HttpError(400, "invalid_query", f"{name} is {text[:80]!r}; use a number of bytes")
    return int(text)


_ID: Final = Parameter("id", "path", required=True, description="The id of the backup.")

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/v1/backups/{id}/files",
        tag="backups",
        summary="List the files of a checkpoint, one line each; the last line marks the end.",
        handle=_list_files,
        parameters=(_ID,),
        response_types={LINES: Line},
    ),
    Endpoint(
        method="GET",
        path="/v1/backups/{id}/files/{path:path}",
        tag="backups",
        summary="Read the bytes of a file of a checkpoint.",
        handle=_read_file,
        parameters=(
            _ID,
            Parameter("path", "path", required=True, description="The path from the list of files."),
            Parameter("start", "query", int, description="The offset of the first byte."),
            Parameter("length", "query", int, description="The maximum number of bytes."),
        ),
        response_types={OCTETS: BYTES},
    ),
    Endpoint(
        method="GET",
        path="/v1/checkups",
        tag="backups",
        summary="Check the stored data and stream the findings, one line each.",
        handle=_run_checks,
        parameters=(
            Parameter("deep", "query", bool, description="Hash every blob instead of a sample of the large ones."),
        ),
        response_types={LINES: Line},
    ),
)
