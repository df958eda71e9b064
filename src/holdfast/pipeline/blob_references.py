"""Searches for the names of blobs in whatever executors can read. No Spark in it.

A name is 64 hexadecimal digits, wherever they stand. Most digits that look so name nothing, so a search is given what
there is to be found: the blobs of a universe, as an object of sorted prefixes that is small and searched fast.
"""

import string
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy

from holdfast.backends.objects import ObjectStore
from holdfast.errors import ObjectNotFound
from holdfast.pipeline.journal_chunks import OpenStore, Stores, not_staged
from holdfast.pipeline.views.rows import HASH_CHARACTERS, digit_runs


class Source(msgspec.Struct, frozen=True):
    """An object to be searched."""

    what: str  # For people: a segment, a session log, a blob.
    store: str
    path: str
    size: int
    staged: bool = False  # It was written for this search alone; that it is not there says nothing of the plane.


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
            for part in _parts(stores, source):
                hashes |= wanted.found_in(part)
        except ObjectNotFound as error:
            if source.staged:
                raise not_staged(source.path, source.store) from error
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

    def found_in(self, data: bytes) -> set[str]:
        """The wanted hashes that stand in these bytes; very rarely one that is not wanted.

        Bytes that are nothing but digits have a hash at every place, so they are never all taken apart.
        """
        found: set[str] = set()
        for run in digit_runs(data):
            for begin in range(0, len(run) - HASH_CHARACTERS + 1, _PLACES):
                found |= self._at_any_place(run[begin : begin + _PLACES + HASH_CHARACTERS - 1])
        return found

    def _at_any_place(self, run: bytes) -> set[str]:
        if not len(self._prefixes):
            return set()
        digits = _VALUES[numpy.frombuffer(run, numpy.uint8)]
        count = len(run) - HASH_CHARACTERS + 1
        numbers = numpy.zeros(count, numpy.uint64)
        for n in range(_DIGITS):
            numbers = (numbers << numpy.uint64(4)) | digits[n : n + count]
        places = numpy.searchsorted(self._prefixes, numbers).clip(max=len(self._prefixes) - 1)
        hits = numpy.flatnonzero(self._prefixes[places] == numbers).tolist()
        return {run[n : n + HASH_CHARACTERS].decode().lower() for n in hits}


def _parts(open_store: OpenStore, source: Source) -> Iterator[bytes]:
    """The bytes of an object, a bounded number at a time, with those before them in which a hash could have begun."""
    before = b""
    for part in open_store(source.store).open(source.path):
        data = before + part
        yield data
        before = data[-(HASH_CHARACTERS - 1) :]


_DIGITS: Final = 16  # Of a prefix. 64 bits: of a billion blobs and a billion other hashes, hardly one is mistaken.
_PLACES: Final = 1 << 18  # At which a hash could begin that are looked at together.
_VALUES: Final = numpy.array([int(chr(n), 16) if chr(n) in string.hexdigits else 0 for n in range(256)], numpy.uint64)
