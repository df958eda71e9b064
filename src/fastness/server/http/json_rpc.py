"""JSON-RPC over HTTP. A failed call is also answered with status 200; the JSON-RPC response contains the error."""

import math
from typing import Any, Final

from starlette.responses import Response

from fastness.server.http.endpoints import Endpoint
from fastness.server.http.media import is_json, media_type_of
from fastness.server.http.request_context import RequestContext, unsupported_media_type
from fastness.server.problems import JSON
from fastness.server.rpc import caller_of, encode
from fastness.wire.rpc import RpcFailure


async def _rpc(context: RequestContext) -> Response:
    media = media_type_of(context.request.headers)
    if not is_json(media):
        raise unsupported_media_type(media, JSON)
    reply = await context.http_context.server.rpc.respond(
        caller_of(context.authorizer, context.universe), await context.body()
    )
    if reply is None:
        return Response(status_code=204)
    headers = {}
    if isinstance(reply, RpcFailure) and (seconds := reply.error.data.retry_after_seconds) is not None:
        headers["Retry-After"] = str(math.ceil(seconds))
    return Response(encode(reply), 200, headers, JSON)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/rpc",
        tag="mail",
        summary="Make a JSON-RPC 2.0 call or a batch: agent.ping, agent.capabilities.get, agent.data.push.",
        handle=_rpc,
        accepts={JSON: Any},
        response_types={JSON: Any},
        other_statuses={204: "The body had only notifications, which have no response."},
    ),
)
