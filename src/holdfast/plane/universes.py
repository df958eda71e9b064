"""Universes: which there are."""

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers import worlds
from holdfast.limits import READ_ENTRIES_MAX
from holdfast.names import checked_name
from holdfast.wire.universes import ListUniverses, UniverseNames


def names(tx: Transaction, request: ListUniverses) -> UniverseNames:
    if not 0 < request.limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A page has 1 to {READ_ENTRIES_MAX} names, not {request.limit}")
    after = checked_name("universe", request.after) if request.after else ""
    return UniverseNames(worlds.universes(tx, after=after, limit=request.limit))
