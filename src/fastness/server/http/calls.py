"""Generic endpoints: any wire request, and lists of operations that are committed atomically."""

from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.responses import Response

from fastness.errors import FastnessError
from fastness.server.http import json_codec
from fastness.server.http.endpoints import Endpoint, json_response
from fastness.server.http.media import is_json, media_type_of, sends_msgpack
from fastness.server.http.request_context import RequestContext, unsupported_media_type
from fastness.server.problems import JSON, MSGPACK
from fastness.wire.atomic import Answers, CommitAtomic, Step
from fastness.wire.frames import AnyRequest
from fastness.wire.requests import Request
from fastness.wire.type_checks import refusal_of

_decode = msgspec.msgpack.Decoder(AnyRequest).decode
_encode = msgspec.msgpack.Encoder().encode


async def _call(context: RequestContext) -> Response:
    """The response has the media type of the request."""
    if sends_msgpack(context.request.headers):
        return Response(_encode(await context.call(_unpack(await context.body()))), media_type=MSGPACK)
    media = media_type_of(context.request.headers)
    if not is_json(media):
        raise unsupported_media_type(media, f"{JSON} or {MSGPACK}")
    return json_response(
        await context.call(json_codec.decode(AnyRequest, await context.json(), universe=context.universe))
    )


def _unpack(data: bytes) -> Request[Any]:
    try:
        request: Request[Any] = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise json_codec.invalid_body(f"The body is not a wire request: {error}", _refusal(data)) from None
    return request


def _refusal(data: bytes) -> FastnessError | None:
    """The error of the field that is wrong, if the rest can be decoded."""
    with suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return refusal_of(AnyRequest, msgspec.msgpack.decode(data), plain=True)
    return None


async def _atomic(context: RequestContext) -> Response:
    """The body is a list of operations, or an object with `operations`."""
    given = await context.json()
    if isinstance(given, list):
        given = {"operations": given}
    return json_response(await context.call(json_codec.decode(CommitAtomic, given, universe=context.universe)))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/call",
        tag="calls",
        summary="Make any request; `op` selects it. The response has the media type of the request.",
        handle=_call,
        accepts={JSON: AnyRequest, MSGPACK: AnyRequest},
        response_types={JSON: Any, MSGPACK: Any},
        keyed=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/atomic",
        tag="calls",
        summary="Execute a list of operations in one atomic commit.",
        handle=_atomic,
        accepts={JSON: list[Step]},
        response_types={JSON: Answers},
        keyed=True,
    ),
)
