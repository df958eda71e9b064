"""The format of the data of a plane: how its keys and values are encoded.

    ("fastness", "format")  ->  the number of the format; a plane without it has format 1

A version reads and writes the formats from `OLDEST_FORMAT` to `FORMAT`. A plane that several nodes share stays in its
format while they are upgraded one by one: a new version reads both encodings of a record, and writes that of
`written_format`. Once every node knows the next format, `fastness upgrade` raises it.

A change that cannot be read beside the old one raises `OLDEST_FORMAT` too. Then an older plane is not opened, and
`fastness migrate` copies it to a new one. A data directory, which has one process, is opened in `FORMAT` only.
"""

from typing import Final

import msgspec

from fastness.errors import SchemaMismatch
from fastness.kv import fence_floor
from fastness.kv.keys import Subspace, prefix_range
from fastness.kv.transactions import Transaction

FORMAT: Final = 2  # The newest format of this version,
OLDEST_FORMAT: Final = 2  # and the oldest one that it reads and writes.
KEY: Final = Subspace("fastness").key("format")
# The last version that writes each older format.
_LAST_VERSIONS: Final = {1: "0.1"}
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(int).decode


def format_of(tx: Transaction) -> int:
    """The format of the plane; this version's newest if it is empty."""
    stored = tx.get(KEY)
    if stored is not None:
        return decode(stored)
    # A key space may have a fence floor before it is a plane.
    return 1 if any(key != fence_floor.KEY for key, _ in tx.scan(*prefix_range(b""), limit=2)) else FORMAT


def written_format(tx: Transaction) -> int:
    """The format that this transaction writes. It may lag behind the plane's for some seconds, and never leads."""
    return tx.data_format or FORMAT


def record(tx: Transaction) -> None:
    """Record that the plane has this version's newest format."""
    tx.put(KEY, encode(FORMAT))


def check_supported(place: str, found: int, *, oldest: int = FORMAT) -> None:
    """Raise SchemaMismatch unless the format is one from `oldest` to `FORMAT`."""
    if not oldest <= found <= FORMAT:
        raise SchemaMismatch(other_format(place, found))


def other_format(place: str, found: int) -> str:
    """What to do about a plane in another format, for an error message."""
    if found > FORMAT:
        return f"{place} has format {found}, and this version supports {FORMAT}; upgrade Fastness"
    return (
        f"{place} has format {found}, which Fastness {_LAST_VERSIONS.get(found, '?')} writes; this version supports "
        f"{FORMAT}; copy it to a new plane with `fastness migrate SOURCE TARGET`"
    )
