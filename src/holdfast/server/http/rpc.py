"""JSON-RPC over HTTP. A call that fails is answered with 200 too: what went wrong is the answer's to say."""

import math
from typing import Any, Final

from starlette.responses import Response

from holdfast.server.http.endpoints import Endpoint
from holdfast.server.http.media import is_json, media_type_of
from holdfast.server.http.problems import JSON
from holdfast.server.http.request_context import Visit, wrong_media
from holdfast.server.rpc import caller_of, encode
from holdfast.wire.rpc import RpcFailure


async def _rpc(visit: Visit) -> Response:
    media = media_type_of(visit.http.headers)
    if not is_json(media):
        raise wrong_media(media or "nothing", JSON)
    reply = await visit.hall.doors.rpc.respond(caller_of(visit.guard, visit.universe), await visit.body())
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
        noun="mail",
        summary="JSON-RPC 2.0, one call or a batch: agent.ping, agent.capabilities.get, agent.data.push",
        handle=_rpc,
        takes={JSON: Any},
        answers={JSON: Any},
        others={204: "There were only notifications, which are not answered."},
    ),
)
