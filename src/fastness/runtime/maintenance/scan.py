"""Scans of a key space without concurrent writers: a copy, or one that only this process has open."""

from collections.abc import Iterator

from fastness.kv import Database, Pair, Subspace
from fastness.layers.worlds import first_elements
from fastness.limits import PAGE_ITEMS


def scan_range(database: Database, begin: bytes, end: bytes) -> Iterator[Pair]:
    """Every pair of a range, in bounded memory."""
    while page := database.read(lambda tx, begin=begin: tx.scan(begin, end, limit=PAGE_ITEMS)):
        yield from page
        begin = page[-1][0] + b"\x00"


def universes(database: Database) -> Iterator[str]:
    """The names of all universes."""
    return names(database, Subspace("u"))


def names(database: Database, subspace: Subspace) -> Iterator[str]:
    """The distinct first elements of the keys in a subspace: the names of its worlds or queues."""
    after = ""
    while page := database.read(lambda tx, after=after: first_elements(tx, subspace, after, PAGE_ITEMS)):
        yield from page
        after = page[-1]
