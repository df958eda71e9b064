"""What a plane has stored, apart from what describes the plane itself."""

from fastness import Plane
from fastness.kv import Pair, Subspace


def everything(plane: Plane) -> list[Pair]:
    """Every pair of a plane, without its identity, format and fence floor."""
    begin, end = Subspace("fastness").range()
    found = plane.transact(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))
    return [pair for pair in found if not begin <= pair[0] < end]
