"""Search for blob hashes in objects that executors can read. No Spark here.

A blob is referred to by its hash: 64 hexadecimal digits, anywhere in the data. Most such digits are no blob's hash, so
a search gets an index of a universe's blobs: a small object of sorted hash prefixes that is fast to search.
"""

import string
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy

from fastness.backends.objects import ObjectStore
from fastness.errors import ObjectNotFound
from fastness.layers.blobs import HASH_CHARACTERS, digit_runs
from fastness.pipeline.journal_chunks import OpenStore, Stores, staged_object_missing


class Source(msgspec.Struct, frozen=True):
    """An object to search."""

    description: str  # For messages: a segment, a session log, a blob.
    store: str
    path: str
    size: int
    staged: bool = False  # Written for this search only; if it is missing, the plane is not damaged.


class Search(msgspec.Struct, frozen=True):
    """The task of one executor: the objects to search, and the hash index."""

    storage: dict[str, str]
    store: str  # Of the hash index.
    path: str
    sources: list[Source]


class SearchResult(msgspec.Struct, frozen=True):
    """The hashes found (very likely blobs), and the sources that are missing."""

    hashes: list[str]
    missing: list[str]


def search(search: Search) -> SearchResult:
    """Search all sources in bounded memory. Errors of unreachable stores are raised."""
    stores = Stores(search.storage)
    index = HashIndex.load(stores(search.store), search.path)
    hashes: set[str] = set()
    missing: list[str] = []
    for source in search.sources:
        try:
            for part in _overlapping_parts(stores, source):
                hashes |= index.find_in(part)
        except ObjectNotFound as error:
            if source.staged:
                raise staged_object_missing(source.path, source.store) from error
            missing.append(source.description)
    return SearchResult(sorted(hashes), missing)


def search_encoded(task: bytes) -> bytes:
    """`search` with encoded arguments, for executors."""
    return msgspec.msgpack.encode(search(msgspec.msgpack.decode(task, type=Search)))


class HashIndex:
    """A sorted index of hash prefixes."""

    def __init__(self, prefixes: "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]") -> None:
        self._prefixes = prefixes

    @staticmethod
    def of(hashes: Iterable[str]) -> "HashIndex":
        found = numpy.fromiter((int(hash[:_DIGITS], 16) for hash in hashes), numpy.uint64)
        found.sort()
        return HashIndex(found)

    @staticmethod
    def load(store: ObjectStore, path: str) -> "HashIndex":
        return HashIndex(numpy.frombuffer(store.get(path), numpy.uint64))

    def save(self, store: ObjectStore, path: str) -> None:
        store.put(path, self._prefixes.tobytes())

    def find_in(self, data: bytes) -> set[str]:
        """The indexed hashes in these bytes; a false positive is extremely rare.

        Long runs of digits are searched in slices, to bound memory: a hash may begin at every digit.
        """
        found: set[str] = set()
        for run in digit_runs(data):
            for begin in range(0, len(run) - HASH_CHARACTERS + 1, _POSITIONS):
                found |= self._match_positions(run[begin : begin + _POSITIONS + HASH_CHARACTERS - 1])
        return found

    def _match_positions(self, run: bytes) -> set[str]:
        if not len(self._prefixes):
            return set()
        digits = _VALUES[numpy.frombuffer(run, numpy.uint8)]
        count = len(run) - HASH_CHARACTERS + 1
        numbers = numpy.zeros(count, numpy.uint64)
        for n in range(_DIGITS):
            numbers = (numbers << numpy.uint64(4)) | digits[n : n + count]
        positions = numpy.searchsorted(self._prefixes, numbers).clip(max=len(self._prefixes) - 1)
        hits = numpy.flatnonzero(self._prefixes[positions] == numbers).tolist()
        return {run[n : n + HASH_CHARACTERS].decode().lower() for n in hits}


def _overlapping_parts(open_store: OpenStore, source: Source) -> Iterator[bytes]:
    """The bytes of an object in bounded parts, each with the end of the part before it, where a hash may begin."""
    before = b""
    for part in open_store(source.store).open(source.path):
        data = before + part
        yield data
        before = data[-(HASH_CHARACTERS - 1) :]


_DIGITS: Final = 16  # Of a prefix: 64 bits, so collisions are negligible even with a billion blobs.
_POSITIONS: Final = 1 << 18  # Start positions that are checked at a time.
_VALUES: Final = numpy.array([int(chr(n), 16) if chr(n) in string.hexdigits else 0 for n in range(256)], numpy.uint64)
