"""Walks over a key space that nobody else writes to: a copy of it, or one that is open here alone."""

from collections.abc import Iterator

from holdfast.kv import Database, Pair, Subspace
from holdfast.layers.worlds import first_elements
from holdfast.limits import PAGE_ITEMS


def walk(database: Database, begin: bytes, end: bytes) -> Iterator[Pair]:
    """Every pair of a range, in bounded memory."""
    while page := database.read(lambda tx, begin=begin: tx.scan(begin, end, limit=PAGE_ITEMS)):
        yield from page
        begin = page[-1][0] + b"\x00"


def universes(database: Database) -> Iterator[str]:
    """The names of all universes."""
    return names(database, Subspace("u"))


def names(database: Database, rooms: Subspace) -> Iterator[str]:
    """The names of what has rooms of its own in a subspace, as worlds and queues do."""
    after = ""
    while page := database.read(lambda tx, after=after: first_elements(tx, rooms, after, PAGE_ITEMS)):
        yield from page
        after = page[-1]
