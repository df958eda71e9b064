"""The format of the data of a plane: how its keys and values are encoded.

    ("holdfast", "format")  ->  the number of the format; a plane without it has format 1

A plane in an older format is not opened. `holdfast migrate` copies it to a new one in this format.
"""

from typing import Final

import msgspec

from holdfast.kv import Subspace, Transaction, fence_floor, prefix_range

FORMAT: Final = 2  # The newest format of this version,
OLDEST_FORMAT: Final = 2  # and the oldest one that it reads and writes.
KEY: Final = Subspace("holdfast").key("format")
# The last version that writes each older format.
_LAST_VERSIONS: Final = {1: "0.1"}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(int).decode


def format_of(tx: Transaction) -> int:
    """The format of the plane; this version's if it is empty."""
    stored = tx.get(KEY)
    if stored is not None:
        return _decode(stored)
    # A key space may have a fence floor before it is a plane.
    return 1 if any(key != fence_floor.KEY for key, _ in tx.scan(*prefix_range(b""), limit=2)) else FORMAT


def record(tx: Transaction) -> None:
    """Record that the plane has this version's format."""
    tx.put(KEY, _encode(FORMAT))


def other_format(place: str, found: int) -> str:
    """What to do about a plane in another format, for an error message."""
    if found > FORMAT:
        return f"{place} has format {found}, and this version supports {FORMAT}; upgrade Holdfast"
    return (
        f"{place} has format {found}, which Holdfast {_LAST_VERSIONS.get(found, '?')} writes; this version supports "
        f"{FORMAT}; copy it to a new plane with `holdfast migrate SOURCE TARGET`"
    )
