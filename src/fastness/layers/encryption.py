"""The data keys of encrypted universes. Their records are described in `kv.value_cipher`.

    plain ── enable ──► new values are sealed ── rewrite ──► all values are sealed, plain ones are refused
                              ▲      │
                              └──────┘ rotate: a new key seals from now on; older ones open

Every change writes the generation, and has the whole key space to itself: a transaction of another process is either
committed before, or sees the new generation and uses the new keys.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Pair, Subspace, Transaction, prefix_range
from fastness.kv.value_cipher import (
    GENERATION,
    KEYRINGS,
    MANIFEST,
    OWN_RANGES,
    PLANE,
    RECORDS,
    RECORDS_MAX,
    REWRITES,
    Keyring,
    Records,
    encode,
    encode_generation,
    signed_manifest,
)
from fastness.limits import ENCRYPTION_KEYS_MAX, ENCRYPTION_UNIVERSES_MAX

_CHECKED: Final = b"fastness"


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rewrite is."""

    key: bytes  # The id of the newest key when it began.
    phase: Literal["values", "objects", "done"]
    position: bytes  # The first key, or the path after which it goes on.


_decode_progress = msgspec.msgpack.Decoder(Progress).decode


def load(tx: Transaction) -> Records:
    """The records of all keys."""
    return Records.of(tx.scan(*RECORDS, limit=RECORDS_MAX))


def key_records(tx: Transaction) -> list[Pair]:
    """The records of all keys as they are stored, without how far rewrites are."""
    return [pair for pair in tx.scan(*RECORDS, limit=RECORDS_MAX) if not pair[0].startswith(REWRITES.prefix)]


def change(tx: Transaction, keyrings: Mapping[str, Keyring], *, plane_key: bytes, generation: int) -> bool:
    """Replace these keyrings, if the generation is still the given one; whether it is.

    `plane_key` is the newest data key of the plane after the change.

    Raises:
        InvalidArgument: there are too many keys.
    """
    tx.scan(*prefix_range(b""), limit=1)  # Locks the whole key space, where several processes write.
    records = load(tx)
    if records.generation != generation:
        return False
    for keyring in keyrings.values():
        if len(keyring.keys) > ENCRYPTION_KEYS_MAX:
            raise InvalidArgument(f"A universe has at most {ENCRYPTION_KEYS_MAX} keys (ENCRYPTION_KEYS_MAX)")
    stored = records.keyrings | {universe: encode(keyring) for universe, keyring in keyrings.items()}
    if len(stored) > ENCRYPTION_UNIVERSES_MAX:
        raise InvalidArgument(
            f"{ENCRYPTION_UNIVERSES_MAX} universes are encrypted, which is the limit (ENCRYPTION_UNIVERSES_MAX)"
        )
    for universe in keyrings:
        tx.put(KEYRINGS.key(universe), stored[universe])
    manifest = signed_manifest(plane_key, generation + 1, stored)
    tx.put(MANIFEST, manifest)
    tx.put(GENERATION, encode_generation(generation + 1, manifest))
    return True


def ranges_of(universe: str) -> Sequence[tuple[bytes, bytes]]:
    """The bounds of the keys whose values the keys of a universe seal, in order."""
    return OWN_RANGES if universe == PLANE else (Subspace("u", universe).range(),)


def rewrite_values(tx: Transaction, keys: list[bytes]) -> None:
    """Write these values again as they are: the newest key seals them."""
    for key in keys:
        value = tx.get(key)
        if value is not None:
            tx.put(key, value)


def progress_of(tx: Transaction, universe: str) -> Progress | None:
    """How far the rewrite of a universe is; None if none began."""
    stored = tx.get(REWRITES.key(universe))
    return None if stored is None else _decode_progress(stored)


def keep_progress(tx: Transaction, universe: str, progress: Progress) -> None:
    """Record how far the rewrite of a universe is."""
    tx.put(REWRITES.key(universe), encode(progress))


def put_check(tx: Transaction, universe: str) -> None:
    """Write a value to check that it can be read."""
    tx.put(_check_key(universe), _CHECKED)


def has_check(tx: Transaction, universe: str) -> bool:
    """Whether the value can be read."""
    return tx.get(_check_key(universe)) == _CHECKED


def delete_check(tx: Transaction, universe: str) -> None:
    """Delete the value."""
    tx.delete(_check_key(universe))


def _check_key(universe: str) -> bytes:
    return Subspace("u", universe, "encryption").key("check")
