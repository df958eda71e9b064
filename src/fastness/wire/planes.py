"""The identity of a plane."""

import msgspec

from fastness.wire.requests import Operation, Request, Route


class PlaneParent(msgspec.Struct, frozen=True):
    """A lineage that a plane descends from, and the time up to which it shares that history."""

    lineage: str
    until_ms: int


class PlaneStatus(msgspec.Struct, frozen=True):
    """The version that serves a plane, and the plane's identity.

    `plane` never changes. A restore begins another `lineage`, whose parents are the lineages before it, the latest
    first.
    """

    version: str
    data_format: int
    plane: str
    lineage: str
    since_ms: int  # When this lineage began.
    cause: str  # created, restored, salvaged, imported or copied
    parents: list[PlaneParent] = []


class ShowPlane(Request[PlaneStatus], frozen=True, tag="planes.show"):
    """The version and identity of the plane."""

    operation = Operation(reads=True, http=(Route("GET", "/v1/plane", "Show the plane's version and identity."),))


class RaiseFormat(Request[PlaneStatus], frozen=True, tag="planes.upgrade"):
    """Raise the data format of the plane to the newest one of this version, once every node supports it."""

    operation = Operation(audited=True, network=False, repeatable="a format that was raised stays raised")


class MarkRestored(Request[PlaneStatus], frozen=True, tag="planes.mark_restored"):
    """Begin another lineage, because the data was copied or restored by other tools."""

    operation = Operation(network=False)

    until_ms: int | None = None  # The time of the copy; None: now.
