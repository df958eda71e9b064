"""The committed pairs of a RocksDB: as they are now, and as they were at one moment.

A reader needs one moment for everything it reads. Most readers are done before anybody commits, so they read what is
current and only check that nothing moved meanwhile; the rare one that was overtaken runs again on a pinned iterator,
which RocksDB keeps at the moment of its creation.

Three things of rocksdict 0.3.29 are avoided here because tests showed them wrong: iterators of a Snapshot show later
commits, `items()` ends in silence where a table is damaged, and `set_iterate_lower_bound` sets the upper bound.
"""

from collections.abc import Callable
from pathlib import Path

from rocksdict import DbClosedError, Rdict, RdictIter, ReadOptions

from holdfast.backends.rocksdb.failures import translated
from holdfast.errors import Closed, HoldfastError
from holdfast.kv import Pair, Transaction
from holdfast.limits import REMEMBERED_BYTES, REMEMBERED_VALUE_BYTES_MAX, WRITE_COST_BYTES


class CurrentPairs:
    """What is committed now."""

    __slots__ = ("_get", "_iterate", "_path")

    def __init__(self, rocks: Rdict, path: Path) -> None:
        self._get: Callable[[bytes], bytes | None] = rocks.get
        self._iterate = rocks.iter
        self._path = path

    def get(self, key: bytes) -> bytes | None:
        try:
            return self._get(key)
        except Exception as error:
            raise _failure(error, self._path) from error

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        # The bound keeps the iterator from walking over deleted keys behind the range.
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        try:
            return _walk(self._iterate(options), begin, end, limit, reverse)
        except Exception as error:
            raise _failure(error, self._path) from error


class RememberedPairs:
    """What is committed now, for whoever has the turn. What was read or written lately is remembered.

    The same few keys (a head, a tally, a policy) are read by one transaction after the other, and a look into RocksDB
    costs more than all else that is done with them. Only the turn's holder reads and writes here, so it is never stale.

    There are two generations: when the younger one is full it becomes the older one, which is forgotten. What is read
    again before that moves on, so keys that are written once and not read do not drive out those that are. A pair that
    is written again counts again: to find out that it was there would cost more than it saves.
    """

    __slots__ = ("_before", "_bytes", "_lately", "_look", "scan")

    def __init__(self, pairs: CurrentPairs) -> None:
        self._look = pairs.get
        self.scan = pairs.scan
        self._lately: dict[bytes, bytes | None] = {}
        self._before: dict[bytes, bytes | None] = {}  # What is in both is older here, and not looked at.
        self._bytes = 0  # Of the younger one, at most.

    def get(self, key: bytes) -> bytes | None:
        lately = self._lately
        if key in lately:
            return lately[key]
        if key in self._before:
            value = self._before[key]
        else:
            value = self._look(key)
            if value is not None and len(value) > REMEMBERED_VALUE_BYTES_MAX:
                return value
        lately[key] = value
        self._count(len(key) + (0 if value is None else len(value)) + WRITE_COST_BYTES)
        return value

    def committed(self, tx: Transaction) -> None:
        """Learn what a transaction has changed."""
        if tx.cleared or tx.size_bytes > REMEMBERED_BYTES:
            self.forget()
            return
        lately = self._lately
        if tx.size_bytes <= REMEMBERED_VALUE_BYTES_MAX:  # Then none of its values is longer than that.
            lately |= tx.writes
            self._count(tx.size_bytes)
            return
        for key, value in tx.writes.items():
            if value is not None and len(value) > REMEMBERED_VALUE_BYTES_MAX:
                lately.pop(key, None)
                self._before.pop(key, None)
            else:
                lately[key] = value
        self._count(tx.size_bytes)

    def forget(self) -> None:
        """Nobody knows what is committed."""
        self._lately, self._before, self._bytes = {}, {}, 0

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= REMEMBERED_BYTES:
            self._before, self._lately, self._bytes = self._lately, {}, 0


class Moved(Exception):
    """Somebody committed between two reads that have to see the same moment."""


class UnmovedPairs:
    """What is committed now, for as long as nobody commits: a second read after a commit raises Moved."""

    __slots__ = ("_commit", "_last_commit", "_pairs")

    def __init__(self, pairs: CurrentPairs, last_commit: Callable[[], int]) -> None:
        self._pairs = pairs
        self._last_commit = last_commit
        self._commit: int | None = None  # What every read so far has seen; -1 once they may not have seen the same.

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
            raise Moved
        return before

    def _end(self, before: int) -> None:
        # A single read is of one moment whatever happens around it, so a commit during the first one is no failure yet.
        if self._last_commit() == before:
            self._commit = before
        elif self._commit is None:
            self._commit = -1
        else:
            raise Moved


class PinnedPairs:
    """What was committed when this was made, however much is committed since."""

    __slots__ = ("_iterator", "_path")

    def __init__(self, rocks: Rdict, path: Path) -> None:
        self._path = path
        try:
            self._iterator = rocks.iter()
        except Exception as error:
            raise _failure(error, path) from error

    def get(self, key: bytes) -> bytes | None:
        found = self.scan(key, key + b"\x00", 1, reverse=False)
        return found[0][1] if found else None

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        try:
            return _walk(self._iterator, begin, end, limit, reverse)
        except Exception as error:
            raise _failure(error, self._path) from error


def _walk(iterator: RdictIter, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
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
    iterator.status()  # An iterator that meets damage ends as if there were no more pairs; only this tells.
    return found


def _failure(error: Exception, path: Path) -> HoldfastError:
    if isinstance(error, DbClosedError):
        return Closed("The database was closed; open it again")
    return translated(error, path)
