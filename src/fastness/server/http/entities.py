"""Entities over HTTP. The ETag of an entity is its version."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from fastness.names import UNIVERSE
from fastness.server.http.conditions import (
    IF_MATCH,
    IF_NONE_MATCH,
    if_absent,
    if_match,
    is_not_modified,
    quoted,
    version_of,
)
from fastness.server.http.endpoints import Endpoint, json_response, operation
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import HttpError
from fastness.tiers import Tier
from fastness.wire.entities import (
    DeleteEntity,
    EntityRecord,
    FoundEntity,
    GetEntity,
    PutEntity,
    WriteEntities,
    Written,
)

_PATH: Final = "/v1/entities/{kind}/{id}"


class PatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields to set and to remove; other fields stay as they are."""

    fields: dict[str, Any] = {}
    removed: list[str] = []
    session: str | None = None
    tier: Tier = Tier.CRITICAL
    universe: str = UNIVERSE


def _found(context: RequestContext, answer: FoundEntity) -> Response:
    if answer.entity is None:
        raise HttpError(
            404, "not_found", "The entity does not exist; create it with PUT", current_version=answer.version
        )
    headers = {"ETag": quoted(answer.version), "Cache-Control": "no-cache"}
    # The version does not count BEST_EFFORT values, so a caller that asked for them gets them every time.
    wants_best_effort = context.request.query_params.get("best_effort", "false") != "false"
    if not wants_best_effort and is_not_modified(context.request.headers, answer.version):
        return Response(status_code=304, headers=headers)
    return json_response(answer.entity, headers=headers)


def _written(context: RequestContext, answer: Written) -> Response:
    del context
    version = answer.versions[0] if answer.versions else None
    return json_response(answer, headers=None if version is None else {"ETag": quoted(version)})


def _patch(context: RequestContext, given: dict[str, Any]) -> None:
    """Make a transaction of one write from a change of one entity."""
    target = {"kind": given.pop("kind"), "id": given.pop("id")}
    change = {name: given.pop(name) for name in ("fields", "removed") if name in given}
    given["writes"] = [target | change]
    version = version_of(if_match(context.request.headers))
    if version is not None:
        given["seen"] = [{**target, "version": version}]


def _replace(context: RequestContext, given: dict[str, Any]) -> None:
    version = version_of(if_match(context.request.headers))
    if version is None and if_absent(context.request.headers):
        version = 0
    _expect(given, version)
    if type(given.get("version")) is int:  # The body is an entity as GET returns it.
        _expect(given, given.pop("version"))
    if "expected_version" not in given:
        raise HttpError(
            428,
            "precondition_required",
            'Send the version to replace as If-Match: "3", or If-None-Match: * to create the entity',
        )


def _delete(context: RequestContext, given: dict[str, Any]) -> None:
    _expect(given, version_of(if_match(context.request.headers)))


def _expect(given: dict[str, Any], version: int | None) -> None:
    """Set the expected version; the body and the header must not disagree."""
    if version is not None and given.setdefault("expected_version", version) != version:
        raise HttpError(
            400, "invalid_etag", "The versions in the body and in the header's ETag differ; send one of them"
        )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    operation(
        "GET",
        _PATH,
        GetEntity,
        "Read an entity.",
        tag="entities",
        headers=(IF_NONE_MATCH,),
        render=_found,
        response_type=EntityRecord,
        other_statuses={304: "The caller already has the current version."},
    ),
    operation(
        "PATCH",
        _PATH,
        WriteEntities,
        "Set and remove fields of an entity.",
        tag="entities",
        headers=(IF_MATCH,),
        prepare=_patch,
        prepared=("writes", "seen"),
        render=_written,
        body_type=PatchBody,
    ),
    operation(
        "PUT",
        _PATH,
        PutEntity,
        "Replace the version of an entity that If-Match names, or create the entity.",
        tag="entities",
        headers=(IF_MATCH, IF_NONE_MATCH),
        prepare=_replace,
        optional=("expected_version",),
        read_only=("created_ms", "updated_ms", "best_effort"),
        render=_written,
    ),
    operation(
        "DELETE",
        _PATH,
        DeleteEntity,
        "Delete an entity.",
        tag="entities",
        headers=(IF_MATCH,),
        prepare=_delete,
        render=_written,
    ),
)
