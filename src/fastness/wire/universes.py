"""Universes: tenants, isolated from each other."""

import msgspec

from fastness.wire.fields import Limit, NameAfter
from fastness.wire.requests import Operation, Request, Route


class UniverseNames(msgspec.Struct, frozen=True):
    """Names of universes, in order."""

    names: list[str]


class ListUniverses(Request[UniverseNames], frozen=True, tag="universes.list"):
    """The universes that contain data."""

    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/universes", "List the universes that hold any data."),)
    )

    after: NameAfter = ""
    limit: Limit = 100
