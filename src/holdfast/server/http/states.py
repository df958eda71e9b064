"""State documents over HTTP: as requests, and as resources whose body is the value."""

from email.utils import formatdate
from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.errors import InvalidArgument
from holdfast.server.http.conditions import IF_MATCH, IF_NONE_MATCH, if_absent, if_match, is_known, quoted
from holdfast.server.http.endpoints import Endpoint, Parameter, noun, rendered
from holdfast.server.http.json_codec import decoded
from holdfast.server.http.problems import JSON, Refusal
from holdfast.server.http.request_context import Visit
from holdfast.server.http.values import from_cbor
from holdfast.wire.canonical import canonical
from holdfast.wire.leases import LeaseProof
from holdfast.wire.states import FoundState, GetState, RemoveState, UpdatedState, UpdateState

_LEASE: Final = (
    Parameter("X-Lease-Id", "header", about="The lease on this key, if somebody holds one."),
    Parameter("X-Fencing-Token", "header", int, about="Its fence."),
    Parameter("X-Txn-Id", "header", about="Its transaction, if it has one."),
)
_PATH: Final = "/v1/state/{key:path}"


def _found(visit: Visit, answer: FoundState) -> Response:
    state = answer.state
    if state is None:
        raise Refusal(404, "not_found", "There is no state of that key; PUT one")
    headers = {
        "ETag": quoted(state.etag),
        "Last-Modified": formatdate(state.updated_ms // 1_000, usegmt=True),
        "X-State-Version": str(state.version),
        "Cache-Control": "no-cache",
    }
    if is_known(visit.http.headers, state.etag):
        return Response(status_code=304, headers=headers)
    return rendered(from_cbor(state.value), headers=headers)


def _updated(visit: Visit, answer: UpdatedState) -> Response:
    del visit
    return rendered(answer, 201 if answer.version == 1 else 200, {"ETag": quoted(answer.etag)})


def _conditions(visit: Visit, given: dict[str, Any]) -> None:
    asked = visit.http.headers
    etag = if_match(asked)
    if etag is not None:
        given["if_match"] = etag
    lease_id = asked.get("x-lease-id")
    if lease_id is None and ("x-fencing-token" in asked or "x-txn-id" in asked):
        raise InvalidArgument("X-Fencing-Token and X-Txn-Id are parts of a lease; give X-Lease-Id too")
    if lease_id is not None:
        fence = asked.get("x-fencing-token", "")
        if not fence.isdecimal() or len(fence) > 18:
            raise InvalidArgument("X-Fencing-Token is missing or no number; give the fence of the lease")
        given["lease"] = {"key": given["key"], "lease_id": lease_id, "fencing_token": int(fence)}
        if "x-txn-id" in asked:
            given["lease"]["txn_id"] = asked["x-txn-id"]


async def _put(visit: Visit) -> Response:
    """The whole body is the value, so it cannot be one of the fields of an object."""
    key = visit.http.path_params["key"]
    given: dict[str, Any] = {"key": key}
    _conditions(visit, given)
    lease = given.get("lease")
    request = UpdateState(
        key,
        canonical(await visit.json()),
        if_match=given.get("if_match"),
        if_absent=if_absent(visit.http.headers),
        universe=visit.universe,
        lease=None if lease is None else decoded(LeaseProof, lease, universe=visit.universe),
    )
    known = msgspec.structs.replace(request, correlation_id=visit.correlation_id)
    return _updated(visit, await visit.ask(known, like=request))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("POST", "/v1/state/get", GetState, "The document of a key, with its ETag", of="states"),
    noun("POST", "/v1/state/update", UpdateState, "Write a document, under a lease or an ETag", of="states"),
    noun("POST", "/v1/state/remove", RemoveState, "Remove a document", of="states"),
    noun(
        "GET",
        _PATH,
        GetState,
        "The value of a key",
        of="states",
        headers=(IF_NONE_MATCH,),
        answered=_found,
        shows=Any,
        others={304: "It is still the version that the caller has."},
    ),
    Endpoint(
        method="PUT",
        path=_PATH,
        noun="states",
        summary="Write the value of a key; the body is the value",
        handle=_put,
        parameters=(Parameter("key", "path", required=True), IF_MATCH, IF_NONE_MATCH, *_LEASE),
        takes={JSON: Any},
        answers={JSON: UpdatedState},
        others={201: "It is the first version."},
        keyed=True,
    ),
    noun(
        "DELETE",
        _PATH,
        RemoveState,
        "Remove the value of a key",
        of="states",
        headers=(IF_MATCH, *_LEASE),
        fill=_conditions,
        filled=("if_match", "lease"),
    ),
)
