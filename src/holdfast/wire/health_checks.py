"""Checkups: is what a plane keeps sound, and if not, what is wrong with it."""

import msgspec

from holdfast.wire.requests import Operation, Request


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be, and what to do about it."""

    where: str
    what: str
    advice: str = "restore it from a backup"


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many things of one kind were looked at so far, and what was found, if that is why this is told."""

    name: str
    looked_at: int
    finding: Finding | None = None


class RunCheckups(Request[Seen], frozen=True, tag="checkups.run"):
    """Look at everything that the plane keeps, as it is at one moment; streamed. Nothing is repaired.

    `deep` hashes every blob, not a sample of the large ones.
    """

    operation = Operation(reads=True, network=False, permission="doctor:run")

    deep: bool = False
