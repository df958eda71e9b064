"""Journal records: canonical CBOR, so that the same record has the same bytes for everybody, for ever.

[0, value]      an entry that a caller appended
[1, ingress]    an item of the inbox: {"seq", "type", its fields}
[2, snapshot]   a snapshot was indexed
[3, baseline]   a snapshot was promoted to the baseline
[4, hash]       the manifest changed: the hash of what defines the world from here on
"""

from enum import IntEnum
from typing import Any

import msgspec

from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import InboxItem


class Kind(IntEnum):
    """What a journal record is."""

    ENTRY = 0
    INGRESS = 1
    SNAPSHOT = 2
    BASELINE = 3
    MANIFEST = 4


_NAME_OF = [kind.name.lower() for kind in Kind]  # Looking a member up would cost more than the rest of a read.
_PAIR_OF = [bytes((0x82, kind)) for kind in Kind]  # CBOR: an array of two, and a small number.


def entry(value: bytes) -> bytes:
    """The record of a caller's entry; `value` is canonical CBOR already, and is not copied apart."""
    return _PAIR_OF[Kind.ENTRY] + value


def ingress(sequence: int, item: InboxItem) -> bytes:
    """The record of an inbox item, normalised once and for all."""
    return _PAIR_OF[Kind.INGRESS] + canonical({"seq": sequence, **msgspec.to_builtins(item, builtin_types=(bytes,))})


def of(kind: Kind, value: Any) -> bytes:
    """The record of a snapshot, a baseline or a manifest."""
    return _PAIR_OF[kind] + canonical(value)


def join(kind: Kind, value: bytes) -> bytes:
    """What `split` took apart."""
    return _PAIR_OF[kind] + value


def split(record: bytes) -> tuple[str, bytes]:
    """The kind of a journal record, in words, and its value as CBOR."""
    return _NAME_OF[record[1]], record[2:]
