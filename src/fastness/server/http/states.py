"""State documents over HTTP: as plain requests, and as resources whose body is the value."""

from email.utils import formatdate
from typing import Any, Final

import msgspec
from starlette.responses import Response

from fastness.errors import InvalidArgument
from fastness.server.http.conditions import IF_MATCH, IF_NONE_MATCH, if_absent, if_match, is_not_modified, quoted
from fastness.server.http.endpoints import Endpoint, Parameter, json_response, operation
from fastness.server.http.json_codec import decode
from fastness.server.http.request_context import RequestContext
from fastness.server.http.values import from_cbor
from fastness.server.problems import JSON, HttpError
from fastness.wire.canonical import canonical
from fastness.wire.fields import Count, Key
from fastness.wire.leases import LeaseProof
from fastness.wire.states import FoundState, GetState, RemoveState, UpdatedState, UpdateState

_LEASE: Final = (
    Parameter("X-Lease-Id", "header", description="The id of the lease on this key, if there is one."),
    Parameter("X-Fence", "header", Count, description="The fence of the lease."),
    Parameter("X-Txn-Id", "header", description="The transaction of the lease, if it has one."),
)
_PATH: Final = "/v1/state/{key:path}"


def _found(context: RequestContext, answer: FoundState) -> Response:
    state = answer.state
    if state is None:
        raise HttpError(404, "not_found", "The key has no state document; create one with PUT")
    headers = {
        "ETag": quoted(state.etag),
        "Last-Modified": formatdate(state.updated_ms // 1_000, usegmt=True),
        "X-State-Version": str(state.version),
        "Cache-Control": "no-cache",
    }
    if is_not_modified(context.request.headers, state.etag):
        return Response(status_code=304, headers=headers)
    return json_response(from_cbor(state.value), headers=headers)


def _updated(context: RequestContext, answer: UpdatedState) -> Response:
    del context
    return json_response(answer, 201 if answer.version == 1 else 200, {"ETag": quoted(answer.etag)})


def _conditions(context: RequestContext, given: dict[str, Any]) -> None:
    headers = context.request.headers
    etag = if_match(headers)
    if etag is not None:
        given["if_match"] = etag
    lease_id = headers.get("x-lease-id")
    if lease_id is None and ("x-fence" in headers or "x-txn-id" in headers):
        raise InvalidArgument("X-Fence and X-Txn-Id belong to a lease; send X-Lease-Id too")
    if lease_id is not None:
        fence = headers.get("x-fence", "")
        if not fence.isdecimal() or len(fence) > 18:
            raise InvalidArgument("X-Fence is missing or not a number; send the fence of the lease")
        given["lease"] = {"key": given["key"], "lease_id": lease_id, "fence": int(fence)}
        if "x-txn-id" in headers:
            given["lease"]["txn_id"] = headers["x-txn-id"]


async def _put(context: RequestContext) -> Response:
    """The whole body is the value, so the other fields come from headers."""
    key = context.request.path_params["key"]
    given: dict[str, Any] = {"key": key}
    _conditions(context, given)
    lease = given.get("lease")
    request = UpdateState(
        key,
        canonical(await context.json()),
        if_match=given.get("if_match"),
        if_absent=if_absent(context.request.headers),
        universe=context.universe,
        lease=None if lease is None else decode(LeaseProof, lease, universe=context.universe),
    )
    # A document keeps the correlation id that it has, for example that of a message, unless the caller sends another.
    known = msgspec.structs.replace(request, correlation_id=context.given_correlation_id)
    return _updated(context, await context.call(known, as_sent=request))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    operation(
        "GET",
        _PATH,
        GetState,
        "Read the value of a key.",
        tag="states",
        headers=(IF_NONE_MATCH,),
        render=_found,
        response_type=Any,
        other_statuses={304: "The caller already has the current version."},
    ),
    Endpoint(
        method="PUT",
        path=_PATH,
        tag="states",
        summary="Write the value of a key; the body is the value.",
        handle=_put,
        parameters=(Parameter("key", "path", Key, required=True), IF_MATCH, IF_NONE_MATCH, *_LEASE),
        accepts={JSON: Any},
        response_types={JSON: UpdatedState},
        other_statuses={201: "The document was created."},
        keyed=True,
    ),
    operation(
        "DELETE",
        _PATH,
        RemoveState,
        "Remove the value of a key.",
        tag="states",
        headers=(IF_MATCH, *_LEASE),
        prepare=_conditions,
        prepared=("if_match", "lease"),
    ),
)
