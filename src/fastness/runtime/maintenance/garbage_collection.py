"""Deletes blobs that nothing names any more.

    search one snapshot ──► mark ──a grace period──► search again ──► delete the record
                                                                        └──a grace period──► delete the body

A blob is named by its hash, anywhere in its universe: in a message, an inbox, a journal, a snapshot, a state, an
entity, a row, a mail, or in the content of another blob that is kept; and in any pair outside of universes. Anything
that looks like the hash counts. Session logs do not count: they record what happened, and name what is gone. Values are
searched in one snapshot of the key space, so a name that moves during the search is not missed. Segments and large
blobs are immutable and are searched after it. If any of them cannot be read, nothing is deleted.

Each step is one transaction or can be repeated, so a collection that was interrupted is continued by the next one, and
several processes may collect at once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.errors import FastnessError, WorldNotFound
from fastness.kv import Database, Subspace, Transaction
from fastness.kv.keys import pack, prefix_range
from fastness.layers import blobs, idempotency
from fastness.layers.blobs import AREAS, Blob, Mark
from fastness.layers.queues import dead_letters
from fastness.layers.worlds import World, WorldState, first_elements, last_meta
from fastness.limits import BLOB_ABANDONED_SECONDS, GC_BATCH, PAGE_ITEMS
from fastness.wire.space import Collected
from fastness.wire.worlds import Segment

PINNED: Final = "pinned"
ARCHIVED: Final = "archived worlds"
DEAD_LETTERS: Final = "dead letters"
RESULTS: Final = "results"
_RESULTS_OF_QUEUES: Final = (pack(("i",)), pack(("a",)))  # Idempotency keys and ack records.
_UNIVERSES: Final = Subspace("u")
Item = TypeVar("Item")


def go_on() -> None:
    """Neither wait nor end."""


class FoundBlob(NamedTuple):
    """A recorded blob, as a search saw it."""

    universe: str
    hash: str
    blob: Blob  # Without its body.
    mark: Mark | None
    named: frozenset[str] | None  # The hashes in its content; None: not known.

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash)

    @property
    def path(self) -> str:
        return blobs.object_path(self.universe, self.digest, self.blob.upload)


class KeyKinds:
    """Finds what a key of a universe belongs to, where that is finer than its area."""

    def __init__(self, tx: Transaction, universe: str) -> None:
        self._areas = {area: Subspace("u", universe, area).prefix for area in ("q", "w")}
        queues = list(_names(tx, Subspace("u", universe, "q")))
        self._dead_letter_queues = dead_letters.queues_of(tx, universe, queues)
        self._archived = {name for name in _names(tx, Subspace("u", universe, "w")) if _is_archived(tx, universe, name)}

    def of(self, area: str, key: bytes) -> str:
        """The area of a key, or a kind within it."""
        prefix = self._areas.get(area)
        if prefix is None:
            return area
        start = len(prefix) + 1
        end = key.index(b"\x00", start)
        name = key[start:end].decode()
        if area == "w":
            return ARCHIVED if name in self._archived else area
        if key.startswith(_RESULTS_OF_QUEUES, end + 1):
            return RESULTS
        return DEAD_LETTERS if name in self._dead_letter_queues else area


class Search:
    """What names each blob, in one snapshot of a plane. Takes about 500 bytes of memory per blob."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None,
        *,
        measures: bool = False,
        between_pages: Callable[[], None] = go_on,
    ) -> None:
        """With `measures`, also what each area of the key space takes, which reads all of it.

        `between_pages` is called between pages of keys and parts of objects; it may wait, or end the search by raising.
        """
        self._objects = objects
        self._between_pages = between_pages
        self._measures = measures
        self.blobs: list[FoundBlob] = []
        self.reasons: dict[tuple[str, str], str] = {}  # Why each blob is kept, by universe and hash.
        self.unsearched: list[str] = []
        self.universes: list[str] = []
        self.sizes: dict[tuple[str, str], tuple[int, int]] = {}  # Pairs and bytes by universe and area.
        self.segments: dict[str, list[Segment]] = {}
        self.now_ms = 0
        self._by_hash: dict[str, dict[str, FoundBlob]] = {}  # And by universe.
        database.read(self._read_snapshot)
        if self.unreferenced:
            for universe, records in self.segments.items():
                for segment in records:
                    self._note(self._hashes_in(segment.object_path), universe, "worlds")
            self._follow()

    @property
    def unreferenced(self) -> list[FoundBlob]:
        """The blobs that nothing keeps."""
        return [found for found in self.blobs if self.reason_of(found) is None]

    def reason_of(self, found: FoundBlob) -> str | None:
        """Why a blob is kept; None if nothing keeps it."""
        return PINNED if found.blob.pinned else self.reasons.get((found.universe, found.hash))

    def _read_snapshot(self, tx: Transaction) -> None:
        # A transaction may be repeated.
        self.blobs, self.reasons, self.sizes, self.segments, self._by_hash = [], {}, {}, {}, {}
        self.now_ms = tx.now_ms
        self.universes = list(_names(tx, _UNIVERSES))
        for universe in self.universes:
            for found in _blobs_of(tx, universe):
                self.blobs.append(found)
                self._by_hash.setdefault(found.hash, {})[universe] = found
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
        kinds = KeyKinds(tx, universe) if self._measures else None
        for area in _names(tx, everything):
            if area in AREAS:
                if self._measures and area != AREAS[0]:
                    self._measure(tx, *everything.range(area), (universe, area))
                continue
            self._read_area(tx, *everything.range(area), (universe, area), kinds)

    def _measure(self, tx: Transaction, begin: bytes, end: bytes, place: tuple[str, str]) -> None:
        for key, value in _pairs(tx, begin, end, self._between_pages):
            self._add_size(place, key, value)

    def _read_area(
        self, tx: Transaction, begin: bytes, end: bytes, place: tuple[str, str], kinds: "KeyKinds | None" = None
    ) -> None:
        universe, area = place
        for key, value in _pairs(tx, begin, end, self._between_pages):
            self._note(blobs.hashes_in(value), universe or None, _REASONS.get(area, area))
            if area == "segments":
                self.segments.setdefault(universe, []).append(msgspec.msgpack.decode(value, type=Segment))
            if kinds is not None:
                self._add_size((universe, kinds.of(area, key)), key, value)
            elif self._measures:
                self._add_size((universe, RESULTS if key.startswith(idempotency.PREFIX) else area), key, value)

    def _add_size(self, place: tuple[str, str], key: bytes, value: bytes) -> None:
        count, size = self.sizes.get(place, (0, 0))
        self.sizes[place] = count + 1, size + len(key) + len(value)

    def _note(self, hashes: set[str] | frozenset[str], universe: str | None, reason: str) -> list[FoundBlob]:
        """Note that these hashes are named in a universe, or in all; returns the blobs that had no reason before."""
        new = []
        for hash in hashes & self._by_hash.keys():
            for found in self._by_hash[hash].values():
                if universe in (None, found.universe) and (found.universe, hash) not in self.reasons:
                    self.reasons[found.universe, hash] = reason
                    new.append(found)
        return new

    def _follow(self) -> None:
        """Note what the content of kept blobs names, until nothing new is found."""
        waiting = [found for found in self.blobs if self.reason_of(found) is not None]
        while waiting:
            found = waiting.pop()
            named = found.named
            if named is None:
                named = frozenset(self._hashes_in(found.path))
            waiting += self._note(named - {found.hash}, found.universe, "the content of a blob")

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
                self._between_pages()
        except FastnessError as error:
            self.unsearched.append(f"{path}: {error}")
        return search.found


def collect(
    database: Database,
    objects: ObjectStore | None,
    *,
    grace_ms: int,
    dry_run: bool = False,
    searched: Callable[[Search], None] | None = None,
    between_pages: Callable[[], None] = go_on,
) -> Collected:
    """Delete blobs that nothing has named for `grace_ms`, and bodies whose blobs were deleted that long ago.

    `searched` is called with the search, which then also measures, before anything is deleted. `between_pages` is as
    for `Search`.
    """
    search = Search(database, objects, measures=searched is not None, between_pages=between_pages)
    if searched is not None:
        searched(search)
    unreferenced = search.unreferenced
    deleted: list[FoundBlob] = []
    if dry_run and not search.unsearched:
        deleted = [each for each in unreferenced if blobs.is_due(*each[2:4], now_ms=search.now_ms, grace_ms=grace_ms)]
    elif not search.unsearched:
        for batch in _batches(unreferenced):
            deleted += database.transact(_mark_or_delete, batch, grace_ms)
    if not dry_run:
        _drop_needless_marks(database, search)
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
    """Whether a message with a blob is gone since the last search, or a mark or deletion is as old as `grace_ms`."""
    for universe in _names(tx, _UNIVERSES):
        for _, value in _pairs(tx, *Subspace("u", universe, blobs.UNREFERENCED).range()):
            mark = blobs.decode_mark(value)
            if not mark.is_found or mark.at_ms + grace_ms <= tx.now_ms:
                return True
        for _, value in _pairs(tx, *Subspace("u", universe, blobs.DELETED).range()):
            if int.from_bytes(value, "big") + grace_ms <= tx.now_ms:
                return True
    return False


def _mark_or_delete(tx: Transaction, batch: Sequence[FoundBlob], grace_ms: int) -> list[FoundBlob]:
    """Mark unreferenced blobs, or delete their records; those that it deleted."""
    return [
        found
        for found in batch
        if blobs.mark_or_delete(tx, found.universe, found.digest, seen=found.blob, mark=found.mark, grace_ms=grace_ms)
    ]


def _drop_needless_marks(database: Database, search: Search) -> None:
    """Remove the marks of blobs that are referenced, and of blobs that are not recorded."""
    named = [found for found in search.blobs if found.mark is not None and search.reason_of(found) is not None]
    for batch in _batches(named):
        database.transact(_unmark, batch)
    known = {(found.universe, found.digest) for found in search.blobs}
    for universe in search.universes:
        stray = [each for each in database.read(_marked_digests, universe) if (universe, each) not in known]
        for digests in _batches(stray):
            database.transact(_drop_marks, universe, digests)


def _unmark(tx: Transaction, batch: Sequence[FoundBlob]) -> None:
    for found in batch:
        if found.mark is not None:
            blobs.unmark(tx, found.universe, found.digest, found.mark)


def _drop_marks(tx: Transaction, universe: str, digests: Sequence[bytes]) -> None:
    for digest in digests:
        blobs.drop_mark(tx, universe, digest)


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
    while page := database.read(blobs.deleted_bodies, universe, after=after, limit=GC_BATCH):
        now_ms = database.read(_now_ms)
        due = [(key, body) for key, body in page if body.deleted_ms + grace_ms <= now_ms]
        if due and not dry_run:
            # The keys stay until the objects are gone, so an interrupted deletion is repeated.
            for _, body in due:
                objects.delete(blobs.object_path(universe, body.digest, body.upload))
            database.transact(blobs.forget_bodies, [key for key, _ in due])
        freed += len(due)
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
        mark = blobs.mark_of(tx, universe, digest)
        yield FoundBlob(universe, digest.hex(), blobs.without_body(blob), mark, named)


def _is_archived(tx: Transaction, universe: str, name: str) -> bool:
    try:
        return last_meta(tx, World(universe, name)).state in (WorldState.ARCHIVED, WorldState.DELETING)
    except WorldNotFound:
        return False


def _names(tx: Transaction, subspace: Subspace) -> Iterator[str]:
    after = ""
    while page := first_elements(tx, subspace, after, PAGE_ITEMS):
        yield from page
        after = page[-1]


def _pairs(
    tx: Transaction, begin: bytes, end: bytes, between_pages: Callable[[], None] = go_on
) -> Iterator[tuple[bytes, bytes]]:
    while page := tx.scan(begin, end, limit=PAGE_ITEMS):
        yield from page
        between_pages()
        begin = page[-1][0] + b"\x00"


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[at : at + GC_BATCH] for at in range(0, len(items), GC_BATCH))


def _now_ms(tx: Transaction) -> int:
    return tx.now_ms


_REASONS: Final = {"q": "messages", "w": "worlds", "segments": "worlds", "states": "states"}
