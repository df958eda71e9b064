"""The format of the data of a plane: how its keys and values are encoded.

    ("fastness", "format")  ->  the number of the format

A version reads and writes the formats from `OLDEST_FORMAT` to `FORMAT`. A plane that several nodes share stays in its
format while they are upgraded one by one: a new version reads both encodings of a record, and writes that of
`written_format`. Once every node knows the next format, `fastness upgrade` raises it.

A data directory, which has one process, is opened in `FORMAT` only; `fastness migrate` copies an older one to a new
plane.
"""

from typing import Final

import msgspec

from fastness.errors import SchemaMismatch
from fastness.kv.keys import Subspace
from fastness.kv.transactions import Transaction

FORMAT: Final = 1  # The newest format of this version,
OLDEST_FORMAT: Final = 1  # and the oldest one that it reads and writes.
KEY: Final = Subspace("fastness").key("format")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(int).decode


def format_of(tx: Transaction) -> int:
    """The format of the plane; this version's newest if the key space is no plane yet."""
    stored = tx.get(KEY)
    return FORMAT if stored is None else decode(stored)


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
        remedy = "upgrade Fastness"
    elif found < OLDEST_FORMAT:
        remedy = "use the version of Fastness that wrote it"
    else:
        remedy = "copy it to a new plane with `fastness migrate SOURCE TARGET`"
    return f"{place} has format {found}, and this version supports {FORMAT}; {remedy}"
