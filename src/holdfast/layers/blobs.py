"""Blobs: immutable bytes named by their SHA-256, shared by a universe.

    (u, universe, "cas", hash)  ->  size, and the bytes themselves if they are small

A larger body is in the object store, at `cas/<universe>/sha256/<hash>`. It is written there before it is recorded here:
a body without a record is harmless, because a retry reuses it; a record without a body would be data loss.
"""

from enum import StrEnum
from typing import Final

import msgspec

from holdfast.errors import InvalidArgument, SizeMismatch
from holdfast.kv import Subspace, Transaction


class Verify(StrEnum):
    """How often a body's hash is verified when it is read."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """The record of a blob; `inline` is None if the body is in the object store."""

    size: int
    inline: bytes | None = None


SHA256_BYTES: Final = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Blob).decode


def find(tx: Transaction, universe: str, digest: bytes) -> Blob | None:
    """The record of the blob with this SHA-256; None if there is none."""
    stored = tx.get(_key(universe, digest))
    return None if stored is None else _decode(stored)


def record(tx: Transaction, universe: str, digest: bytes, blob: Blob) -> None:
    """Record a blob whose body is stored or inline. Repeating it changes nothing.

    Raises:
        SizeMismatch: it is recorded with another size.
    """
    known = find(tx, universe, digest)
    if known is None:
        tx.put(_key(universe, digest), _encode(blob))
    elif known.size != blob.size:
        raise SizeMismatch(
            f"Blob {digest.hex()} is recorded with {known.size} bytes but has {blob.size}; restore it from a backup"
        )


def digest_of(hash: str) -> bytes:
    """The SHA-256 digest that a blob hash encodes.

    Raises:
        InvalidArgument: it is not a blob hash.
    """
    try:
        digest = bytes.fromhex(hash)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != SHA256_BYTES:
        raise InvalidArgument(f"{hash!r} is not a blob hash; use the 64 hex digits that put returned")
    return digest


def object_path(universe: str, digest: bytes) -> str:
    """The object store path of a large blob's body."""
    return f"cas/{universe}/sha256/{digest.hex()}"


def _key(universe: str, digest: bytes) -> bytes:
    return Subspace("u", universe, "cas").key(digest)
