"""Walks over a key space, a bounded part of it per transaction."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from fastness.kv import Database, Pair, Subspace
from fastness.layers.worlds import first_elements
from fastness.limits import PAGE_ITEMS
from fastness.tiers import Tier

_PAGE: Final = 100  # Names. A transaction makes a scan for each.


def scan_range(database: Database, begin: bytes, end: bytes) -> Iterator[Pair]:
    """Every pair of a range, in bounded memory, where none is written at the same time."""
    while page := database.read(lambda tx, begin=begin: tx.scan(begin, end, limit=PAGE_ITEMS)):
        yield from page
        begin = page[-1][0] + b"\x00"


def walk(database: Database, page: Callable[..., list[str]], *subject: Any) -> Iterator[str]:
    """Every name in the pages of a layer's function, as of `worlds.universes`, or of `queues.names` in a universe."""
    after = ""
    while names := database.read(page, *subject, after=after, limit=_PAGE, tier=Tier.IMPORTANT):
        yield from names
        after = names[-1]


def universes(database: Database) -> Iterator[str]:
    """The names of all universes, also those with nothing but an audit log."""
    return names(database, Subspace("u"))


def names(database: Database, subspace: Subspace) -> Iterator[str]:
    """The distinct first elements of the keys in a subspace: the names of its worlds or queues."""
    return walk(database, first_elements, subspace)
