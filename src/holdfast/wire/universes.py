"""Universes: tenants, isolated from each other."""

import msgspec

from holdfast.wire.requests import Operation, Request


class UniverseNames(msgspec.Struct, frozen=True):
    """Names of universes, in order."""

    names: list[str]


class ListUniverses(Request[UniverseNames], frozen=True, tag="universes.list"):
    """The universes that contain data."""

    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
