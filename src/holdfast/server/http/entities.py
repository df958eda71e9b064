"""Entities over HTTP: the version is the ETag."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.names import UNIVERSE
from holdfast.server.http.conditions import (
    IF_MATCH,
    IF_NONE_MATCH,
    if_absent,
    if_match,
    is_known,
    quoted,
    version_of,
)
from holdfast.server.http.endpoints import Endpoint, noun, rendered
from holdfast.server.http.problems import Refusal
from holdfast.server.http.request_context import Visit
from holdfast.tiers import Tier
from holdfast.wire.entities import (
    DeleteEntity,
    EntityRecord,
    FoundEntity,
    GetEntity,
    PutEntity,
    ReadChanges,
    ScanEntities,
    WriteEntities,
    Written,
)

_PATH: Final = "/v1/entities/{kind}/{id}"


class PatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields to set and to remove; the others stay."""

    fields: dict[str, Any] = {}
    removed: list[str] = []
    session: str | None = None
    tier: Tier = Tier.CRITICAL
    universe: str = UNIVERSE


def _found(visit: Visit, answer: FoundEntity) -> Response:
    if answer.entity is None:
        raise Refusal(404, "not_found", "There is no such entity; PUT it", current_version=answer.version)
    headers = {"ETag": quoted(answer.version), "Cache-Control": "no-cache"}
    if is_known(visit.http.headers, answer.version):
        return Response(status_code=304, headers=headers)
    return rendered(answer.entity, headers=headers)


def _written(visit: Visit, answer: Written) -> Response:
    del visit
    version = answer.versions[0] if answer.versions else None
    return rendered(answer, headers=None if version is None else {"ETag": quoted(version)})


def _patch(visit: Visit, given: dict[str, Any]) -> None:
    """A change of one entity is a transaction of one write."""
    target = {"kind": given.pop("kind"), "id": given.pop("id")}
    change = {name: given.pop(name) for name in ("fields", "removed") if name in given}
    given["writes"] = [target | change]
    version = version_of(if_match(visit.http.headers))
    if version is not None:
        given["seen"] = [{**target, "version": version}]


def _replace(visit: Visit, given: dict[str, Any]) -> None:
    version = version_of(if_match(visit.http.headers))
    if version is None and if_absent(visit.http.headers):
        version = 0
    _expect(given, version)
    if "expected_version" not in given:
        raise Refusal(
            428, "precondition_required", 'Say which version this replaces: If-Match: "3", or If-None-Match: * for none'
        )


def _delete(visit: Visit, given: dict[str, Any]) -> None:
    _expect(given, version_of(if_match(visit.http.headers)))


def _expect(given: dict[str, Any], version: int | None) -> None:
    """Whoever names two versions has not made up their mind which one to replace."""
    if version is not None and given.setdefault("expected_version", version) != version:
        raise Refusal(400, "invalid_etag", "expected_version is another one than that of the header; give one of them")


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("POST", "/v1/entities/transaction", WriteEntities, "Change several entities as one commit", of="entities"),
    noun("GET", "/v1/entities/{kind}", ScanEntities, "Entities of a kind, in the order of their ids", of="entities"),
    noun(
        "GET",
        _PATH,
        GetEntity,
        "An entity",
        of="entities",
        headers=(IF_NONE_MATCH,),
        answered=_found,
        shows=EntityRecord,
        others={304: "It is still the version that the caller has."},
    ),
    noun(
        "PATCH",
        _PATH,
        WriteEntities,
        "Set and remove fields of an entity",
        of="entities",
        headers=(IF_MATCH,),
        fill=_patch,
        filled=("writes", "seen"),
        answered=_written,
        takes=PatchBody,
    ),
    noun(
        "PUT",
        _PATH,
        PutEntity,
        "Replace an entity of the version that If-Match names",
        of="entities",
        headers=(IF_MATCH, IF_NONE_MATCH),
        fill=_replace,
        optional=("expected_version",),
        answered=_written,
    ),
    noun(
        "DELETE",
        _PATH,
        DeleteEntity,
        "Delete an entity",
        of="entities",
        headers=(IF_MATCH,),
        fill=_delete,
        answered=_written,
    ),
    noun("GET", _PATH + "/history", ReadChanges, "The latest changes of an entity", of="entities"),
)
