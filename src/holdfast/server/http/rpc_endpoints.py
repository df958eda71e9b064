"""The generic doors: any request as it is, and lists of them that are committed as one."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.server.http import json_codec
from holdfast.server.http.endpoints import Endpoint, rendered
from holdfast.server.http.media import is_json, media_type_of, speaks_msgpack
from holdfast.server.http.problems import JSON, MSGPACK, Refusal
from holdfast.server.http.request_context import Visit, wrong_media
from holdfast.wire.atomic import Answers, CommitAtomic, Step
from holdfast.wire.frames import AnyRequest
from holdfast.wire.requests import Request

_decode = msgspec.msgpack.Decoder(AnyRequest).decode
_encode = msgspec.msgpack.Encoder().encode


async def _call(visit: Visit) -> Response:
    """Answered in the media type of the request."""
    if speaks_msgpack(visit.http.headers):
        return Response(_encode(await visit.ask(_unpacked(await visit.body()))), media_type=MSGPACK)
    media = media_type_of(visit.http.headers)
    if not is_json(media):
        raise wrong_media(media or "nothing", f"{JSON} or {MSGPACK}")
    return rendered(await visit.ask(json_codec.decoded(AnyRequest, await visit.json(), universe=visit.universe)))


def _unpacked(data: bytes) -> Request[Any]:
    try:
        request: Request[Any] = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_body", f"The body is no request ({error}); send one of holdfast.wire") from None
    return request


async def _atomic(visit: Visit) -> Response:
    """A list of operations, or an object that has them as `operations`."""
    given = await visit.json()
    if isinstance(given, list):
        given = {"operations": given}
    return rendered(await visit.ask(json_codec.decoded(CommitAtomic, given, universe=visit.universe)))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/call",
        noun="calls",
        summary="Any request; its `op` says which. Answered in the media type that it came in",
        handle=_call,
        takes={JSON: AnyRequest, MSGPACK: AnyRequest},
        answers={JSON: Any, MSGPACK: Any},
        keyed=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/atomic",
        noun="calls",
        summary="Operations that are committed as one, or not at all",
        handle=_atomic,
        takes={JSON: list[Step]},
        answers={JSON: Answers},
        keyed=True,
    ),
)
