"""Blobs over HTTP: streamed uploads and downloads, with byte ranges."""

import re
from contextlib import aclosing
from typing import Final

from starlette.responses import Response, StreamingResponse

from fastness.errors import BlobNotFound
from fastness.server.http.conditions import IF_NONE_MATCH, is_not_modified, quoted
from fastness.server.http.endpoints import BYTES, Endpoint, Parameter, json_response
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, HttpError
from fastness.wire.blobs import FindBlob, OpenBlob, Stored, WriteBlob

OCTETS: Final = "application/octet-stream"
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


async def _put(context: RequestContext) -> Response:
    pinned = context.request.query_params.get("pinned", "true")
    if pinned not in ("true", "false"):
        raise HttpError(400, "invalid_query", f"pinned is {pinned[:80]!r}; use true or false")
    request = WriteBlob(context.universe, pinned == "true")
    context.authorizer.authorize(request)
    async with aclosing(context.stream()) as chunks:
        stored: Stored = await context.http_context.transport.send(request, chunks)
    return json_response(stored, 201, {"ETag": quoted(stored.hash), "Location": f"/v1/blobs/{stored.hash}"})


async def _get(context: RequestContext) -> Response:
    hash = str(context.request.path_params["hash"]).lower()
    context.authorizer.authorize(OpenBlob(hash, context.universe))
    size = (await context.call(FindBlob(hash, context.universe), authorized=True)).size
    if size is None:
        raise BlobNotFound(f"No blob {hash} is stored in {context.universe}; put it first")
    headers = {
        "ETag": quoted(hash),
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=31536000, immutable",  # The name is the hash of the bytes.
        "Content-Disposition": "attachment",
    }
    if is_not_modified(context.request.headers, hash):
        return Response(status_code=304, headers=headers)
    begin, end = _requested_range(context, hash, size)
    headers["Content-Length"] = str(end - begin)
    status = 200
    if (begin, end) != (0, size):
        status = 206
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    if context.request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=OCTETS)
    request = OpenBlob(hash, context.universe, begin, None if status == 200 else end - begin)
    return StreamingResponse(await context.http_context.transport.receive(request), status, headers, OCTETS)


def _requested_range(context: RequestContext, hash: str, size: int) -> tuple[int, int]:
    """The requested range, end excluded. An invalid `Range` header is ignored (RFC 9110)."""
    match = _RANGE.match(context.request.headers.get("range", "").strip())
    condition = context.request.headers.get("if-range")
    if match is None or match[0] == "bytes=-" or (condition is not None and condition.strip() != quoted(hash)):
        return 0, size
    first, last = match[1], match[2]
    if not first:
        begin, end = max(size - int(last), 0), size
    else:
        begin, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < begin:
            return 0, size
    if begin >= size or begin == end:
        raise HttpError(
            416,
            "range_not_satisfiable",
            f"The blob has {size} bytes; request a range within them",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return begin, end


_PINNED: Final = Parameter(
    "pinned", "query", bool, description="false: deleted some time after nothing names the blob any more."
)
_PUT_SUMMARY: Final = "Store the body as a blob, named by the SHA-256 of its bytes."
_UNIVERSE: Final = Parameter("universe", "query")
_GET_PARAMETERS: Final = (
    Parameter("hash", "path", required=True),
    _UNIVERSE,
    Parameter("Range", "header", description="One byte range, as in bytes=0-99 or bytes=-100."),
    Parameter("If-Range", "header"),
    IF_NONE_MATCH,
)

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *(
        Endpoint(
            method=method,
            path="/v1/blobs",
            tag="blobs",
            summary=_PUT_SUMMARY,
            handle=_put,
            parameters=(_UNIVERSE, _PINNED),
            accepts={OCTETS: BYTES},
            body_required=False,  # An empty blob is valid.
            response_types={JSON: Stored},
            status=201,
        )
        for method in ("POST", "PUT")
    ),
    Endpoint(
        method="GET",
        path="/v1/blobs/{hash}",
        tag="blobs",
        summary="Read a blob or a range of its bytes; HEAD returns its size.",
        handle=_get,
        parameters=_GET_PARAMETERS,
        response_types={OCTETS: BYTES},
        other_statuses={206: "The requested range.", 304: "The caller already has the blob."},
    ),
)
