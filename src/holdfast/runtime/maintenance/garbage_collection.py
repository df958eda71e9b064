"""Deletes blobs that nothing names any more.

    search one snapshot ──► mark, or delete the record after the grace period ──► delete the body after another one

A blob is named by its hash, anywhere: in a message, an inbox, a journal, a snapshot, a state, an entity, a mail, a
pair, or in the content of another blob that is kept. Anything that looks like the hash counts. Values are searched in
one snapshot of the key space, so a name that moves during the search is not missed. Segments and large blobs are
immutable and are searched after it. If any of them cannot be read, nothing is deleted.

Each step is one transaction or can be repeated, so a collection that was interrupted is continued by the next one, and
several processes may collect at once.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.errors import HoldfastError
from holdfast.kv import Database, Subspace, Transaction
from holdfast.kv.keys import prefix_range
from holdfast.layers import blobs
from holdfast.layers.blobs import AREAS, Blob
from holdfast.layers.segments import SegmentRecord
from holdfast.layers.worlds import first_elements
from holdfast.limits import BLOB_ABANDONED_SECONDS, PAGE_ITEMS
from holdfast.wire.space import Collected

PINNED: Final = "pinned"
OLD: Final = "stored by an older version"
_UNIVERSES: Final = Subspace("u")


class FoundBlob(NamedTuple):
    """A recorded blob, as a search saw it."""

    universe: str
    hash: str
    blob: Blob  # Without its body.
    since_ms: int | None  # Since when it is marked as unreferenced.
    named: frozenset[str] | None  # The hashes in its content; None: not known.

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash)

    @property
    def path(self) -> str:
        return blobs.object_path(self.universe, self.digest, self.blob.upload)


class Search:
    """What names each blob, in one snapshot of a plane. Takes about 500 bytes of memory per blob."""

    def __init__(
        self, database: Database, objects: ObjectStore | None, *, with_old: bool = False, measures: bool = False
    ) -> None:
        """With `measures`, also what each area of the key space takes, which reads all of it."""
        self._objects = objects
        self._measures = measures
        self._with_old = with_old
        self.blobs: list[FoundBlob] = []
        self.reasons: dict[str, str] = {}  # Why each hash is kept; only those of recorded blobs.
        self.unsearched: list[str] = []
        self.universes: list[str] = []
        self.sizes: dict[tuple[str, str], tuple[int, int]] = {}  # Pairs and bytes by universe and area.
        self.segments: dict[str, list[SegmentRecord]] = {}
        self.now_ms = 0
        self._by_hash: dict[str, list[FoundBlob]] = {}
        database.read(self._read_snapshot)
        if self.unreferenced:
            for segment in (each for records in self.segments.values() for each in records):
                self._note(self._hashes_in(segment.object_path), "worlds")
            self._follow()

    @property
    def unreferenced(self) -> list[FoundBlob]:
        """The blobs that nothing keeps."""
        return [found for found in self.blobs if self.reason_of(found) is None]

    def reason_of(self, found: FoundBlob) -> str | None:
        """Why a blob is kept; None if nothing keeps it."""
        if found.blob.pinned and (found.blob.put_ms or not self._with_old):
            return PINNED if found.blob.put_ms else OLD
        return self.reasons.get(found.hash)

    def _read_snapshot(self, tx: Transaction) -> None:
        # A transaction may be repeated.
        self.blobs, self.reasons, self.sizes, self.segments, self._by_hash = [], {}, {}, {}, {}
        self.now_ms = tx.now_ms
        self.universes = list(_names(tx, _UNIVERSES))
        for universe in self.universes:
            for found in _blobs_of(tx, universe):
                self.blobs.append(found)
                self._by_hash.setdefault(found.hash, []).append(found)
        if not self.blobs and not self._measures:
            return
        for universe in self.universes:
            self._read_universe(tx, universe)
        begin, end = _UNIVERSES.range()
        first, last = prefix_range(b"")
        for low, high in ((first, begin), (end, last)):
            self._read_area(tx, low, high, ("", "pairs"))

    def _read_universe(self, tx: Transaction, universe: str) -> None:
        everything = Subspace("u", universe)
        for area in _names(tx, everything):
            if area in AREAS:
                continue
            self._read_area(tx, *everything.range(area), (universe, area))

    def _read_area(self, tx: Transaction, begin: bytes, end: bytes, place: tuple[str, str]) -> None:
        universe, area = place
        count = size = 0
        for key, value in _pairs(tx, begin, end):
            self._note(blobs.hashes_in(value), _REASONS.get(area, area))
            if area == "segments":
                self.segments.setdefault(universe, []).append(msgspec.msgpack.decode(value, type=SegmentRecord))
            count, size = count + 1, size + len(key) + len(value)
        before = self.sizes.get(place, (0, 0))
        self.sizes[place] = before[0] + count, before[1] + size

    def _note(self, hashes: set[str] | frozenset[str], reason: str) -> list[FoundBlob]:
        """Note that these hashes are named; returns the blobs that were not known to be named."""
        new = []
        for hash in hashes:
            if hash in self._by_hash and hash not in self.reasons:
                self.reasons[hash] = reason
                new += self._by_hash[hash]
        return new

    def _follow(self) -> None:
        """Note what the content of kept blobs names, until nothing new is found."""
        waiting = [found for found in self.blobs if self.reason_of(found) is not None]
        while waiting:
            found = waiting.pop()
            named = found.named
            if named is None:
                named = frozenset(self._hashes_in(found.path))
            waiting += self._note(named - {found.hash}, "the content of a blob")

    def _hashes_in(self, path: str) -> set[str]:
        """The hashes in an object, of those that blobs have."""
        search, known = blobs.HashSearch(), self._by_hash.keys()
        try:
            if self._objects is None:
                self.unsearched.append(path)
                return set()
            for part in self._objects.open(path):
                search.feed(part)
                search.found &= known
        except HoldfastError as error:
            self.unsearched.append(f"{path}: {error}")
        return search.found


def collect(
    database: Database,
    objects: ObjectStore | None,
    *,
    grace_ms: int,
    dry_run: bool = False,
    with_old: bool = False,
) -> Collected:
    """Delete blobs that nothing has named for `grace_ms`, and bodies whose blobs were deleted that long ago."""
    search = Search(database, objects, with_old=with_old)
    unreferenced = search.unreferenced
    deleted: list[FoundBlob] = []
    if not search.unsearched:
        for found in unreferenced:
            if dry_run:
                is_deleted = blobs.is_due(found.blob, found.since_ms, now_ms=search.now_ms, grace_ms=grace_ms)
            else:
                is_deleted = database.transact(
                    blobs.mark_or_delete,
                    found.universe,
                    found.digest,
                    seen=found.blob,
                    since_ms=found.since_ms,
                    grace_ms=grace_ms,
                )
            if is_deleted:
                deleted.append(found)
    if not dry_run:
        for found in search.blobs:
            if found.since_ms is not None and search.reason_of(found) is not None:
                database.transact(blobs.unmark, found.universe, found.digest, found.since_ms)
        _drop_stray_marks(database, search)
    freed = 0
    for universe in search.universes:
        freed += _free_bodies(database, objects, universe, grace_ms, dry_run=dry_run)
        freed += _free_abandoned(database, objects, universe, dry_run=dry_run)
    size = sum(found.blob.size for found in search.blobs)
    waiting_bytes = sum(found.blob.size for found in unreferenced)
    deleted_bytes = sum(found.blob.size for found in deleted)
    return Collected(
        dry_run=dry_run,
        deleted=len(deleted),
        deleted_bytes=deleted_bytes,
        freed=freed,
        waiting=len(unreferenced) - len(deleted),
        waiting_bytes=waiting_bytes - deleted_bytes,
        kept=len(search.blobs) - len(unreferenced),
        kept_bytes=size - waiting_bytes,
        unsearched=search.unsearched,
    )


def is_collection_due(tx: Transaction, grace_ms: int) -> bool:
    """Whether a mark, or a body without a record, is older than the grace period."""
    for universe in _names(tx, _UNIVERSES):
        for area in (blobs.UNREFERENCED, blobs.DELETED):
            for _, value in _pairs(tx, *Subspace("u", universe, area).range()):
                if int.from_bytes(value, "big") + grace_ms <= tx.now_ms:
                    return True
    return False


def _drop_stray_marks(database: Database, search: Search) -> None:
    """Remove the marks of blobs that are not recorded: a message may name a blob that was never stored."""
    known = {(found.universe, found.digest) for found in search.blobs}
    for universe in search.universes:
        for digest in database.read(_marked_digests, universe):
            if (universe, digest) not in known:
                database.transact(blobs.drop_mark, universe, digest)


def _marked_digests(tx: Transaction, universe: str) -> list[bytes]:
    keys = Subspace("u", universe, blobs.UNREFERENCED)
    return [keys.unpack(key)[0] for key, _ in _pairs(tx, *keys.range())]


def _free_bodies(
    database: Database, objects: ObjectStore | None, universe: str, grace_ms: int, *, dry_run: bool
) -> int:
    """Delete the bodies of deleted blobs; how many."""
    if objects is None:
        return 0
    freed, after = 0, b""
    while page := database.read(blobs.deleted_bodies, universe, after=after, limit=PAGE_ITEMS):
        now_ms = database.read(_now_ms)
        for key, body in page:
            if body.deleted_ms + grace_ms > now_ms:
                continue
            if not dry_run:
                # The key stays until the object is gone, so an interrupted deletion is repeated.
                objects.delete(blobs.object_path(universe, body.digest, body.upload))
                database.transact(blobs.forget_body, key)
            freed += 1
        after = page[-1][0] + b"\x00"
    return freed


def _free_abandoned(database: Database, objects: ObjectStore | None, universe: str, *, dry_run: bool) -> int:
    """Delete bodies that were uploaded and never recorded, a week after that; how many."""
    if objects is None:
        return 0
    now_ms, freed = database.read(_now_ms), 0
    for meta, _ in objects.times(blobs.folder(universe)):
        hash, upload = blobs.parse_path(meta.path)
        if not blobs.is_abandoned(upload, now_ms=now_ms, after_ms=BLOB_ABANDONED_SECONDS * 1_000):
            continue
        if database.read(blobs.is_known_body, universe, blobs.digest_of(hash), upload):
            continue
        if not dry_run:
            objects.delete(meta.path)
        freed += 1
    return freed


def _blobs_of(tx: Transaction, universe: str) -> Iterator[FoundBlob]:
    keys = Subspace("u", universe, "cas")
    for key, value in _pairs(tx, *keys.range()):
        digest, blob = keys.unpack(key)[0], msgspec.msgpack.decode(value, type=Blob)
        if blob.inline is not None:
            named: frozenset[str] | None = frozenset(blobs.hashes_in(blob.inline))
        else:
            named = None if blob.named is None else frozenset(each.hex() for each in blob.named)
        since_ms = blobs.marked_ms(tx, universe, digest)
        yield FoundBlob(universe, digest.hex(), blobs.without_body(blob), since_ms, named)


def _names(tx: Transaction, subspace: Subspace) -> Iterator[str]:
    after = ""
    while page := first_elements(tx, subspace, after, PAGE_ITEMS):
        yield from page
        after = page[-1]


def _pairs(tx: Transaction, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    while page := tx.scan(begin, end, limit=PAGE_ITEMS):
        yield from page
        begin = page[-1][0] + b"\x00"


def _now_ms(tx: Transaction) -> int:
    return tx.now_ms


_REASONS: Final = {"q": "messages", "w": "worlds", "segments": "worlds", "states": "states"}
