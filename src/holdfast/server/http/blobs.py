"""Blobs over HTTP: streamed in, streamed out, in ranges if asked for."""

import re
from contextlib import aclosing
from typing import Final

from starlette.responses import Response, StreamingResponse

from holdfast.errors import BlobNotFound
from holdfast.server.http.conditions import IF_NONE_MATCH, is_known, quoted
from holdfast.server.http.endpoints import BYTES, Endpoint, Parameter, rendered
from holdfast.server.http.problems import JSON, Refusal
from holdfast.server.http.request_context import Visit
from holdfast.wire.blobs import FindBlob, OpenBlob, Stored, WriteBlob

OCTETS: Final = "application/octet-stream"
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


async def _put(visit: Visit) -> Response:
    request = WriteBlob(visit.universe)
    visit.guard.allow(request)
    async with aclosing(visit.stream()) as chunks:
        stored: Stored = await visit.hall.transport.send(request, chunks)
    return rendered(stored, 201, {"ETag": quoted(stored.hash), "Location": f"/v1/blobs/{stored.hash}"})


async def _get(visit: Visit) -> Response:
    hash = str(visit.http.path_params["hash"]).lower()
    visit.guard.allow(OpenBlob(hash, visit.universe))
    size = (await visit.ask(FindBlob(hash, visit.universe), allowed=True)).size
    if size is None:
        raise BlobNotFound(f"No blob {hash} is stored in {visit.universe}; put it first")
    headers = {
        "ETag": quoted(hash),
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=31536000, immutable",  # Other bytes would have another name.
        "Content-Disposition": "attachment",
    }
    if is_known(visit.http.headers, hash):
        return Response(status_code=304, headers=headers)
    begin, end = _wanted(visit, hash, size)
    headers["Content-Length"] = str(end - begin)
    status = 200
    if (begin, end) != (0, size):
        status = 206
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    if visit.http.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=OCTETS)
    request = OpenBlob(hash, visit.universe, begin, None if status == 200 else end - begin)
    return StreamingResponse(await visit.hall.transport.receive(request), status, headers, OCTETS)


def _wanted(visit: Visit, hash: str, size: int) -> tuple[int, int]:
    """The bytes that are asked for, the end not included. What we do not understand means everything (RFC 9110)."""
    match = _RANGE.match(visit.http.headers.get("range", "").strip())
    condition = visit.http.headers.get("if-range")
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
        raise Refusal(
            416,
            "range_not_satisfiable",
            f"The blob has {size} bytes; ask for some of them",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return begin, end


_STORED: Final = "Store the body as a blob; its name is the SHA-256 of its bytes"
_UNIVERSE: Final = Parameter("universe", "query")
_RANGES: Final = (
    Parameter("hash", "path", required=True),
    _UNIVERSE,
    Parameter("Range", "header", about="One range of bytes, as in bytes=0-99 or bytes=-100."),
    Parameter("If-Range", "header"),
    IF_NONE_MATCH,
)

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *(
        Endpoint(
            method=method,
            path="/v1/blobs",
            noun="blobs",
            summary=_STORED,
            handle=_put,
            parameters=(_UNIVERSE,),
            takes={OCTETS: BYTES},
            body_required=False,  # No bytes are a blob too.
            answers={JSON: Stored},
            status=201,
        )
        for method in ("POST", "PUT")
    ),
    Endpoint(
        method="GET",
        path="/v1/blobs/{hash}",
        noun="blobs",
        summary="The bytes of a blob, or a range of them; HEAD tells its size",
        handle=_get,
        parameters=_RANGES,
        answers={OCTETS: BYTES},
        others={206: "The range that was asked for.", 304: "The caller has it already."},
    ),
)
