"""Encryption at rest: which universes are encrypted, and their keys."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import ENCRYPTION_REWRITE_CALL
from fastness.wire.fields import Name, NameAfter
from fastness.wire.requests import Operation, Request


class UniverseEncryption(msgspec.Struct, frozen=True):
    """The encryption of a universe."""

    universe: str  # Empty: what belongs to no universe, such as the answers of repeated calls.
    keys: int
    created_ms: int  # Of the newest key, which encrypts new values.
    all_encrypted: bool  # Whether values from before are rewritten, so that plain ones are refused.
    all_newest: bool  # Whether all values have the newest key.


class EncryptionStatus(msgspec.Struct, frozen=True):
    """The encryption of a plane."""

    available: bool  # Whether the plane was opened with a master key.
    universes: list[UniverseEncryption]


class Rewritten(msgspec.Struct, frozen=True):
    """What one call has rewritten."""

    values: int
    objects: int
    is_complete: bool


class ShowEncryption(Request[EncryptionStatus], frozen=True, tag="encryption.show"):
    """Which universes are encrypted."""

    operation = Operation(reads=True, permission="encryption:show")


class EnableEncryption(Request[UniverseEncryption], frozen=True, tag="encryption.enable"):
    """Encrypt the values and objects of a universe from now on."""

    operation = Operation(repeatable="a universe is encrypted once", permission="encryption:enable", audited=True)

    universe: Name


class RotateKey(Request[UniverseEncryption], frozen=True, tag="encryption.rotate"):
    """Encrypt new values of a universe with a new key. With `master`, wrap its keys with the newest master key."""

    operation = Operation(repeatable="another new key does no harm", permission="encryption:rotate", audited=True)

    universe: NameAfter  # Empty: the plane's own.
    master: bool = False


class RewriteValues(Request[Rewritten], frozen=True, tag="encryption.rewrite"):
    """Encrypt older values of a universe with the newest key, some at a time. It goes on where the last call ended."""

    operation = Operation(
        repeatable="it goes on where the last call ended", permission="encryption:rewrite", audited=True
    )

    universe: NameAfter  # Empty: the plane's own.
    limit: Annotated[int, Meta(ge=1, le=limits.ENCRYPTION_REWRITE_CALL)] = (
        ENCRYPTION_REWRITE_CALL  # How many values to look at.
    )
