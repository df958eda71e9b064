"""Searches for the names of blobs in whatever executors can read. No Spark in it.

A name is 64 hexadecimal digits, wherever they stand. Most digits that look so name nothing, so a search is given what
there is to be found: the blobs of a universe, as an object of sorted prefixes that is small and searched fast.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy

from holdfast.backends.objects import ObjectStore
from holdfast.errors import ObjectNotFound
from holdfast.pipeline.pieces import OpenStore, Stores
from holdfast.pipeline.views.rows import hashes_in


class Source(msgspec.Struct, frozen=True):
    """An object to be searched."""

    what: str  # For people: a segment, a session log, a blob.
    store: str
    path: str
    size: int


class Search(msgspec.Struct, frozen=True):
    """What one executor searches, and what for."""

    storage: dict[str, str]
    store: str  # Where the prefixes are.
    path: str
    sources: list[Source]


class Found(msgspec.Struct, frozen=True):
    """Hashes that are very likely names of blobs, and sources that are not there."""

    hashes: list[str]
    missing: list[str]


def search(search: Search) -> Found:
    """Search all sources in bounded memory. Stores that do not answer raise their errors."""
    stores = Stores(search.storage)
    wanted = Wanted.load(stores(search.store), search.path)
    hashes: set[str] = set()
    missing: list[str] = []
    for source in search.sources:
        try:
            hashes |= wanted.among(_hashes(stores, source))
        except ObjectNotFound:
            missing.append(source.what)
    return Found(sorted(hashes), missing)


def search_encoded(task: bytes) -> bytes:
    """`search`, for executors."""
    return msgspec.msgpack.encode(search(msgspec.msgpack.decode(task, type=Search)))


class Wanted:
    """Prefixes of the hashes that are looked for."""

    def __init__(self, prefixes: "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]") -> None:
        self._prefixes = prefixes

    @staticmethod
    def of(hashes: Iterable[str]) -> "Wanted":
        found = numpy.fromiter((int(hash[:_DIGITS], 16) for hash in hashes), numpy.uint64)
        found.sort()
        return Wanted(found)

    @staticmethod
    def load(store: ObjectStore, path: str) -> "Wanted":
        return Wanted(numpy.frombuffer(store.get(path), numpy.uint64))

    def save(self, store: ObjectStore, path: str) -> None:
        store.put(path, self._prefixes.tobytes())

    def among(self, hashes: Iterable[str]) -> set[str]:
        """Those of the hashes that are wanted; very rarely one that is not."""
        asked = list(hashes)
        if not asked or not len(self._prefixes):
            return set()
        numbers = numpy.fromiter((int(hash[:_DIGITS], 16) for hash in asked), numpy.uint64, len(asked))
        places = numpy.searchsorted(self._prefixes, numbers).clip(max=len(self._prefixes) - 1)
        return {asked[n] for n in numpy.flatnonzero(self._prefixes[places] == numbers)}


def _hashes(open_store: OpenStore, source: Source) -> Iterator[str]:
    """What looks like a hash in an object, also where it lies across two parts of it."""
    seen: set[str] = set()
    before = b""
    for part in open_store(source.store).open(source.path):
        found = hashes_in(before + part)
        yield from found - seen
        seen = found
        before = (before + part)[-_OVERLAP:]


_DIGITS: Final = 16  # 64 bits: of a billion blobs and a billion other hashes, hardly one is mistaken.
_OVERLAP: Final = 63
