"""Blobs: bytes named by their SHA-256, immutable, shared by a universe.

    (u, universe, "cas", hash)  ->  size, and the bytes themselves if they are few

A larger body is in the object store, at `cas/<universe>/sha256/<hash>`, and is written there before it is recorded
here: a body without a record is harmless and is found again by a retry, a record without a body is damage.
"""

from enum import StrEnum
from typing import Final

import msgspec

from holdfast.errors import InvalidArgument, SizeMismatch
from holdfast.kv import Subspace, Transaction


class Verify(StrEnum):
    """How often a body that is read is hashed again."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """What is recorded of a blob; `inline` is None where the object store has the body."""

    size: int
    inline: bytes | None = None


SHA256_BYTES: Final = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Blob).decode


def find(tx: Transaction, universe: str, digest: bytes) -> Blob | None:
    """What is recorded of the blob with this SHA-256."""
    stored = tx.get(_key(universe, digest))
    return None if stored is None else _decode(stored)


def record(tx: Transaction, universe: str, digest: bytes, blob: Blob) -> None:
    """Record a blob whose body is stored, or inline. Recording it again changes nothing.

    Raises:
        SizeMismatch: it is recorded with another size.
    """
    known = find(tx, universe, digest)
    if known is None:
        tx.put(_key(universe, digest), _encode(blob))
    elif known.size != blob.size:
        raise SizeMismatch(
            f"Blob {digest.hex()} is recorded with {known.size} bytes and has {blob.size}; restore it from a backup"
        )


def digest_of(hash: str) -> bytes:
    """The SHA-256 that a blob's name is.

    Raises:
        InvalidArgument: it is no blob's name.
    """
    try:
        digest = bytes.fromhex(hash)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != SHA256_BYTES:
        raise InvalidArgument(f"{hash!r} is no blob's name; use the 64 hex digits that put returned")
    return digest


def object_path(universe: str, digest: bytes) -> str:
    """Where the object store keeps the body of a large blob."""
    return f"cas/{universe}/sha256/{digest.hex()}"


def _key(universe: str, digest: bytes) -> bytes:
    return Subspace("u", universe, "cas").key(digest)
