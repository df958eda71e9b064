"""Journal records: canonical CBOR, so that equal records have equal bytes.

[0, value]      an entry that a caller appended
[1, ingress]    an inbox item: {"seq", "type", its fields}
[2, snapshot]   a snapshot was indexed
[3, baseline]   a snapshot was promoted to the baseline
[4, hash]       the manifest changed: the hash of the world's definition from here on
"""

from enum import IntEnum

import msgspec

from fastness.wire.canonical import canonical
from fastness.wire.inboxes import InboxItem


class Kind(IntEnum):
    """The kind of a journal record."""

    ENTRY = 0
    INGRESS = 1
    SNAPSHOT = 2
    BASELINE = 3
    MANIFEST = 4


_NAME_OF = [kind.name.lower() for kind in Kind]  # An enum lookup would cost more than the rest of a read.
_PAIR_OF = [bytes((0x82, kind)) for kind in Kind]  # CBOR: an array of two, and a small number.


def entry(value: bytes) -> bytes:
    """The record of a caller's entry; `value` is canonical CBOR already."""
    return _PAIR_OF[Kind.ENTRY] + value


def ingress(sequence: int, item: InboxItem) -> bytes:
    """The record of an inbox item."""
    return _PAIR_OF[Kind.INGRESS] + canonical({"seq": sequence, **msgspec.to_builtins(item, builtin_types=(bytes,))})


def of(kind: Kind, value: object) -> bytes:
    """The record of a snapshot, a baseline or a manifest."""
    return _PAIR_OF[kind] + canonical(value)


def join(kind: Kind, value: bytes) -> bytes:
    """The record of a kind and a value; the inverse of `split`."""
    return _PAIR_OF[kind] + value


def split(record: bytes) -> tuple[str, bytes]:
    """The name of a journal record's kind, and its value as CBOR."""
    return _NAME_OF[record[1]], record[2:]
