"""Health checks: whether the stored data of a plane is intact, and what is wrong if not."""

import msgspec

from fastness.wire.requests import Operation, Request


class Finding(msgspec.Struct, frozen=True):
    """A fault, and what to do about it."""

    where: str
    what: str
    advice: str = "restore it from a backup"


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of one check: how many items were checked, and a fault if one was found."""

    name: str
    looked_at: int
    finding: Finding | None = None


class RunCheckups(Request[Seen], frozen=True, tag="checkups.run"):
    """Check everything that the plane stores, in one snapshot; streamed. Nothing is repaired.

    `deep` hashes every blob instead of a sample of the large ones.
    """

    operation = Operation(reads=True, network=False, permission="doctor:run")

    deep: bool = False
