"""Universes: the key spaces within the key space, which know nothing of each other."""

import msgspec

from holdfast.wire.requests import Operation, Request


class UniverseNames(msgspec.Struct, frozen=True):
    """Names of universes, in order."""

    names: list[str]


class ListUniverses(Request[UniverseNames], frozen=True, tag="universes.list"):
    """Universes in which there is anything."""

    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
