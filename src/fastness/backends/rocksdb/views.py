"""Views of the committed pairs of a RocksDB: the latest, and as of a point in time.

A reader needs one point in time for everything it reads. Most readers finish before another commit, so they read the
latest pairs and only check that nothing was committed meanwhile. The rare reader that meets a commit runs again on an
iterator, which RocksDB pins to the time of its creation.

Three bugs of rocksdict 0.3.29 are avoided here: iterators of a Snapshot show later commits, `items()` ends silently
where a table is damaged, and `set_iterate_lower_bound` sets the upper bound.
"""

from collections.abc import Callable
from pathlib import Path

from rocksdict import DbClosedError, Rdict, RdictIter, ReadOptions

from fastness.backends.rocksdb.failures import translate_error
from fastness.errors import Closed, DatabaseFailed, FastnessError
from fastness.kv import Pair, Transaction
from fastness.kv.value_cipher import MARK, ValueCipher, open_all
from fastness.limits import PAIR_CACHE_BYTES, PAIR_CACHE_VALUE_BYTES_MAX, WRITE_COST_BYTES


class CurrentPairs:
    """The latest committed pairs."""

    __slots__ = ("_cipher", "_get", "_iterate", "_path")

    def __init__(self, rocks: Rdict, path: Path, cipher: ValueCipher) -> None:
        self._get: Callable[[bytes], bytes | None] = rocks.get
        self._iterate = rocks.iter
        self._path = path
        self._cipher = cipher

    def get(self, key: bytes) -> bytes | None:
        cipher = self._cipher
        generation = cipher.generation  # Before the read: a rewrite may end meanwhile.
        try:
            stored = self._get(key)
        except Exception as error:
            raise _read_error(error, self._path) from error
        if stored is None or (stored[:1] != MARK and not cipher.is_on):
            return stored
        return cipher.open(key, stored, generation)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        # The bound keeps the iterator from scanning deleted keys beyond the range.
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        generation = self._cipher.generation
        try:
            stored = _scan(self._iterate(options), begin, end, limit, reverse)
        except Exception as error:
            raise _read_error(error, self._path) from error
        return open_all(self._cipher, stored, generation)


class FailedPairs:
    """The pairs of a database that failed and is closed until it is reopened: reading raises DatabaseFailed."""

    __slots__ = ("_failure",)

    def __init__(self, failure: FastnessError) -> None:
        self._failure = failure

    def get(self, key: bytes) -> bytes | None:
        del key
        raise failed_error(self._failure)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        del begin, end, limit, reverse
        raise failed_error(self._failure)


def failed_error(failure: FastnessError) -> DatabaseFailed:
    """The error of a call after an earlier failure."""
    error = DatabaseFailed(
        f"An earlier write failed ({failure}); nothing was written. A server opens its key space again by itself: try "
        "again later. An embedded plane has plane.reopen()"
    )
    error.__cause__ = failure
    return error


class CachedPairs:
    """The latest committed pairs, with a cache of recently read and written ones. Used with the write lock held.

    Consecutive transactions read the same few keys (a head, counters, a policy), and a RocksDB read costs more than
    everything else they do with them. Only the holder of the write lock uses the cache, so it is never stale.

    There are two generations. When the young one is full it replaces the old one, which is dropped. A pair that is read
    again moves to the young one, so keys that are written once and never read do not evict the others. A pair that is
    written again counts again: checking for it would cost more than it saves.
    """

    __slots__ = ("_bytes", "_get_stored", "_old", "_young", "scan")

    def __init__(self, pairs: CurrentPairs | FailedPairs) -> None:
        self._get_stored = pairs.get
        self.scan = pairs.scan
        self._young: dict[bytes, bytes | None] = {}
        self._old: dict[bytes, bytes | None] = {}  # May have outdated values of keys in `_young`, which are never used.
        self._bytes = 0  # Upper bound of the size of `_young`.

    def get(self, key: bytes) -> bytes | None:
        young = self._young
        if key in young:
            return young[key]
        if key in self._old:
            value = self._old[key]
        else:
            value = self._get_stored(key)
            if value is not None and len(value) > PAIR_CACHE_VALUE_BYTES_MAX:
                return value
        young[key] = value
        self._count(len(key) + (0 if value is None else len(value)) + WRITE_COST_BYTES)
        return value

    def apply(self, tx: Transaction) -> None:
        """Cache what a committed transaction wrote."""
        if tx.cleared or tx.size_bytes > PAIR_CACHE_BYTES:
            self.clear()
            return
        young = self._young
        if tx.size_bytes <= PAIR_CACHE_VALUE_BYTES_MAX:  # Then all of its values are short enough.
            young |= tx.writes
            self._count(tx.size_bytes)
            return
        for key, value in tx.writes.items():
            if value is not None and len(value) > PAIR_CACHE_VALUE_BYTES_MAX:
                young.pop(key, None)
                self._old.pop(key, None)
            else:
                young[key] = value
        self._count(tx.size_bytes)

    def clear(self) -> None:
        """Drop the cache, when the committed pairs are unknown."""
        self._young, self._old, self._bytes = {}, {}, 0

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= PAIR_CACHE_BYTES:
            self._old, self._young, self._bytes = self._young, {}, 0


class ConcurrentCommit(Exception):
    """A commit happened between two reads that must see the same point in time."""


class OptimisticPairs:
    """The latest committed pairs until another commit: a second read after one raises ConcurrentCommit."""

    __slots__ = ("_commit", "_last_commit", "_pairs")

    def __init__(self, pairs: CurrentPairs | FailedPairs, last_commit: Callable[[], int]) -> None:
        self._pairs = pairs
        self._last_commit = last_commit
        self._commit: int | None = None  # The commit that all reads saw; -1 if unknown.

    def get(self, key: bytes) -> bytes | None:
        before = self._begin()
        value = self._pairs.get(key)
        self._end(before)
        return value

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        before = self._begin()
        pairs = self._pairs.scan(begin, end, limit, reverse)
        self._end(before)
        return pairs

    def _begin(self) -> int:
        before = self._last_commit()
        if self._commit is not None and before != self._commit:
            raise ConcurrentCommit
        return before

    def _end(self, before: int) -> None:
        # A single read is always consistent, so a commit during the first one is not a failure yet.
        if self._last_commit() == before:
            self._commit = before
        elif self._commit is None:
            self._commit = -1
        else:
            raise ConcurrentCommit


class PinnedPairs:
    """The pairs that were committed when this was created."""

    __slots__ = ("_cipher", "_generation", "_iterator", "_path")

    def __init__(self, rocks: Rdict, path: Path, cipher: ValueCipher) -> None:
        self._path = path
        self._cipher = cipher
        self._generation = cipher.generation
        try:
            self._iterator = rocks.iter()
        except Exception as error:
            raise _read_error(error, path) from error

    def get(self, key: bytes) -> bytes | None:
        found = self.scan(key, key + b"\x00", 1, reverse=False)
        return found[0][1] if found else None

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        try:
            stored = _scan(self._iterator, begin, end, limit, reverse)
        except Exception as error:
            raise _read_error(error, self._path) from error
        return open_all(self._cipher, stored, self._generation)


def _scan(iterator: RdictIter, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
    if reverse:
        iterator.seek_for_prev(end)
        if iterator.valid() and iterator.key() == end:
            iterator.prev()
    else:
        iterator.seek(begin)
    step, valid, key_of, value_of = (
        iterator.prev if reverse else iterator.next,
        iterator.valid,
        iterator.key,
        iterator.value,
    )
    found: list[Pair] = []
    while len(found) < limit and valid():
        key = key_of()
        if not begin <= key < end:
            break
        found.append((key, value_of()))
        step()
    iterator.status()  # An iterator that meets damage ends as if there were no more pairs. Only status() raises.
    return found


def _read_error(error: Exception, path: Path) -> FastnessError:
    if isinstance(error, DbClosedError):
        return Closed("The database was closed; open it again")
    return translate_error(error, path)
