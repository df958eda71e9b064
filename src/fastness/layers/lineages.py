"""The identity of a plane, and its lineage: which history its data belongs to.

    ("fastness", "plane")  ->  the plane's id, its lineage, and the lineages before it

    created ──► restored ──► restored …      the id stays; every restore begins another lineage

Two copies of a plane that both continue have the same id and different lineages, and share the history up to the
moment of the backup. Readers that keep a position in a plane's history compare the lineage with the one they know. A
copy that was not made by Fastness (a copied directory, a dump of PostgreSQL) keeps its lineage until `begin` is called.
"""

from typing import Final

import msgspec

from fastness.kv import Subspace, Transaction, fence_floor
from fastness.limits import LINEAGE_PARENTS_MAX
from fastness.wire.planes import PlaneParent

KEY: Final = Subspace("fastness").key("plane")


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a plane."""

    plane: str
    lineage: str
    since_ms: int
    cause: str  # created, restored, salvaged, imported or copied
    parents: list[PlaneParent] = []  # The latest first.

    def parent(self, lineage: str) -> PlaneParent | None:
        """The parent with this lineage; None if this plane does not descend from it."""
        return next((parent for parent in self.parents if parent.lineage == lineage), None)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Identity).decode


def load(tx: Transaction) -> Identity | None:
    """The identity of the plane; None if the key space was not opened as a plane."""
    stored = tx.get(KEY)
    return None if stored is None else _decode(stored)


def ensure(tx: Transaction) -> Identity:
    """The identity of the plane, which gets one if it has none."""
    found = load(tx)
    if found is not None:
        return found
    created = Identity(tx.new_id_bytes().hex(), tx.new_id_bytes().hex(), tx.now_ms, "created")
    tx.put(KEY, _encode(created))
    return created


def begin(tx: Transaction, cause: str, *, until_ms: int | None = None) -> Identity:
    """Begin another lineage: the data was restored, and shares the history of its parent up to `until_ms`."""
    before = ensure(tx)
    until_ms = tx.now_ms if until_ms is None else until_ms
    parents = [PlaneParent(before.lineage, until_ms), *before.parents][:LINEAGE_PARENTS_MAX]
    after = Identity(before.plane, tx.new_id_bytes().hex(), tx.now_ms, cause, parents)
    tx.put(KEY, _encode(after))
    fence_floor.raise_for_copy(tx)  # The parent may have issued fences since then.
    return after
