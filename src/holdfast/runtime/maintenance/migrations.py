"""A migration: everything that a plane keeps, from one pair of stores to another, compared in the end.

    objects and session logs ──► keys, a batch a transaction ──► ranges of keys, compared by their digests ──► done

Each step can be interrupted and repeated: objects that are there are hashed instead of copied, and keys go on where the
record in the target says (`layers/migrations.py`). A comparison begins anew: only one that was made while nobody could
write to the source says anything about it as a whole. Nothing is ever written to the source. An object of the target
that has other bytes belongs to somebody else, and is not written over.

What changed in the source between two runs is found when ranges are compared, and copied again.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.errors import HashMismatch, InvalidArgument, MissingObject, ObjectExists, ObjectNotFound, TargetNotEmpty
from holdfast.kv import Database, Pair
from holdfast.layers import migrations
from holdfast.layers.migrations import BEGIN, END, KEY, Migration, State
from holdfast.limits import MIGRATION_BATCH_BYTES, MIGRATION_BATCH_PAIRS, MIGRATION_PAGE_PAIRS, MIGRATION_RANGE_PAIRS
from holdfast.runtime.activity import rotation
from holdfast.runtime.activity.format import SUFFIX
from holdfast.runtime.maintenance.checkpoints import needed, rotated_logs
from holdfast.tiers import Tier
from holdfast.wire.backups import BackupFile

_replace: Final = msgspec.structs.replace
_lengths: Final = struct.Struct("!II").pack

Advance = Callable[[int], None]


class Side(msgspec.Struct, frozen=True):
    """The stores of a plane: its key space, its objects, and session logs that are not among the objects yet."""

    database: Database
    objects: ObjectStore | None = None
    logs: Path | None = None
    keys: int = 0  # About how many there are, as far as anybody knows.


class Migrator:
    """Migrates one plane. `begin`, then each of the steps in order; all of them again after an interruption."""

    def __init__(self, source: Side, target: Side, name: str, *, with_logs: bool = True) -> None:
        """`name` is what the target remembers the source by; without logs, session logs stay where they are."""
        self._source = source
        self._target = target
        self._name = name
        self._with_logs = with_logs
        self._objects = self._object_bytes = self._logs = 0
        self.copied = 0  # Keys, if they were copied to the end by now.
        self.now: Migration

    def begin(self) -> bool:
        """Begin, or go on; whether there is anything left to do.

        Raises:
            TargetNotEmpty: the target holds something else.
            MigrationUnfinished: the source is itself the target of a migration that is not complete.
            InvalidArgument: there are objects, and the target has no place for them.
        """
        self._source.database.read(migrations.check_complete, tier=Tier.IMPORTANT)
        if self._target.objects is None:
            first = next(chain((file.path for file in self._files()), map(str, self._local_logs())), None)
            if first is not None:
                raise InvalidArgument(
                    f"The source has objects or session logs ({first}) and the target no store for them; give --objects"
                )
        self.now = self._target.database.transact(migrations.begin, self._name)
        return self.now.state is not State.DONE

    def withdraw(self) -> None:
        """Leave the target as it was, if nothing was copied yet."""
        self._target.database.transact(migrations.withdraw, self.now)

    def move_objects(self, advance: Advance) -> None:
        """Have every object in the target's store, each read back and hashed.

        Raises:
            MissingObject, HashMismatch: what the source has is damaged.
            TargetNotEmpty: the target's store has other bytes under the name of an object.
        """
        objects = self._target.objects
        if objects is None:
            return
        for file in self._files():
            self._objects += 1
            self._object_bytes += _bring(file, self._source.objects, objects)
            advance(1)
        for path in self._local_logs():
            if (kept := rotation.copy(path, objects)) is not None:
                if _hash_of(objects, kept.path) != (kept.sha256, kept.bytes):
                    raise HashMismatch(f"{kept.path} is not in the target as it was written; run this again")
                self._logs += 1
                advance(1)

    def copy_keys(self, advance: Advance) -> None:
        """Have every key in the target."""
        if self.now.state is not State.COPYING:
            return
        for batch, at in _batches(_migrated(self._source.database, self.now.at, END)):
            self._move_on(_replace(self.now, at=at, keys=self.now.keys + len(batch)), batch)
            advance(len(batch))
        self.copied = self.now.keys
        self._move_on(_replace(self.now, state=State.CHECKING, at=BEGIN, keys=0))

    def compare_keys(self, advance: Advance) -> None:
        """Compare all ranges of the two key spaces from the first one on, and copy those again that differ.

        Raises:
            HashMismatch: a range differs although it was copied again.
        """
        self._move_on(_replace(self.now, at=BEGIN, keys=0, ranges=0, digest=b""))
        while self.now.at < END:
            at, end, count, digest = _range_of(self._source.database, self.now.at)
            again = _digest(_plain(self._target.database, at, end)) != (count, digest)
            if again:
                self._copy_again(at, end)
                if _digest(_plain(self._target.database, at, end)) != (count, digest):
                    raise HashMismatch(
                        f"The keys from {at.hex() or 'the first'} to {end[:64].hex()} differ although they were copied "
                        "twice; look whether something writes to the source or the target, and run this again"
                    )
            chain_of = hashlib.sha256(self.now.digest + digest).digest()
            counted = {"keys": self.now.keys + count, "ranges": self.now.ranges + 1, "again": self.now.again + again}
            self._move_on(_replace(self.now, at=end, digest=chain_of, **counted))
            advance(count)

    def finish(self) -> Migration:
        """Open the target to everybody; what was migrated."""
        counted = {"objects": self._objects, "object_bytes": self._object_bytes, "logs": self._logs}
        self._move_on(_replace(self.now, state=State.DONE, **counted), tier=Tier.CRITICAL)
        return self.now

    def _files(self) -> Iterator[BackupFile]:
        """Every object that belongs to the source."""
        named = (file for file in needed(self._source.database) if file is not None)
        objects = self._source.objects
        return chain(named, rotated_logs(objects) if objects is not None and self._with_logs else ())

    def _local_logs(self) -> list[Path]:
        folder = self._source.logs
        return sorted(folder.glob(f"*/*{SUFFIX}")) if folder is not None and self._with_logs else []

    def _copy_again(self, begin: bytes, end: bytes) -> None:
        self._move_on(self.now, cleared=(begin, end))
        for batch, _ in _batches(_migrated(self._source.database, begin, end)):
            self._move_on(self.now, batch)

    def _move_on(
        self,
        after: Migration,
        pairs: list[Pair] | None = None,
        *,
        cleared: tuple[bytes, bytes] | None = None,
        # What a power loss takes back is copied again, since the record that says how far it came goes with it.
        tier: Tier = Tier.IMPORTANT,
    ) -> None:
        self.now = self._target.database.transact(
            migrations.move_on, self.now, after, pairs or (), cleared=cleared, tier=tier
        )


def _plain(database: Database, begin: bytes, end: bytes) -> Iterator[Pair]:
    """Every pair of a range but the record of a migration."""
    while page := database.read(
        lambda tx, begin=begin: tx.scan(begin, end, limit=MIGRATION_PAGE_PAIRS), tier=Tier.IMPORTANT
    ):
        yield from (pair for pair in page if pair[0] != KEY)
        begin = page[-1][0] + b"\x00"


def _migrated(database: Database, begin: bytes, end: bytes) -> Iterator[tuple[Pair, bytes]]:
    """Every pair of a range as it is to be in the target, and where to go on behind it."""
    at = begin
    for key, value in _plain(database, begin, end):
        if key < at:
            continue  # One of the tallies that are one by now.
        room = migrations.queue_of_tally(key)
        if room is None:
            at = key + b"\x00"
            yield (key, value), at
        else:
            at = room.all_counters.range()[1]
            yield database.read(migrations.united_tally, room, tier=Tier.IMPORTANT), at


def _batches(pairs: Iterator[tuple[Pair, bytes]]) -> Iterator[tuple[list[Pair], bytes]]:
    """Pairs by as many as go into one transaction, and where to go on behind each batch."""
    batch: list[Pair] = []
    size, at = 0, BEGIN
    for pair, at in pairs:
        batch.append(pair)
        size += len(pair[0]) + len(pair[1])
        if len(batch) >= MIGRATION_BATCH_PAIRS or size >= MIGRATION_BATCH_BYTES:
            yield batch, at
            batch, size = [], 0
    if batch:
        yield batch, at


def _range_of(source: Database, begin: bytes) -> tuple[bytes, bytes, int, bytes]:
    """The next range of a source: where it begins and ends, how many pairs it has, and their digest."""
    end, count, sha = END, 0, hashlib.sha256()
    for pair, at in _migrated(source, begin, END):
        _add(sha, pair)
        count += 1
        if count == MIGRATION_RANGE_PAIRS:
            end = at
            break
    return begin, end, count, sha.digest()


def _digest(pairs: Iterator[Pair]) -> tuple[int, bytes]:
    count, sha = 0, hashlib.sha256()
    for pair in pairs:
        _add(sha, pair)
        count += 1
    return count, sha.digest()


def _add(sha: "hashlib._Hash", pair: Pair) -> None:
    key, value = pair
    sha.update(_lengths(len(key), len(value)) + key + value)


def _bring(file: BackupFile, source: ObjectStore | None, target: ObjectStore) -> int:
    """Have one object in the target, as it is in the source; how many bytes it has."""
    expected = None if file.sha256 is None else (file.sha256, file.size)
    if expected is None and source is not None:
        expected = _hash_of(source, file.path)
    there = _hash_of(target, file.path)
    if is_ours := there is None:
        is_ours = _copy(file.path, expected, source, target)
        there = _hash_of(target, file.path)
    if there != expected:
        if is_ours:
            raise HashMismatch(f"{file.path} is not in the target as it was written; run this again")
        raise TargetNotEmpty(
            f"The target's object store has other bytes at {file.path}; choose a bucket or prefix of its own"
        )
    return 0 if expected is None else expected[1]


def _copy(path: str, expected: tuple[str, int] | None, source: ObjectStore | None, target: ObjectStore) -> bool:
    """Copy one object; whether nobody else was first."""

    def checked() -> Iterator[bytes]:
        if source is None:
            raise ObjectNotFound(path)
        sha, size = hashlib.sha256(), 0
        for part in source.open(path):
            sha.update(part)
            size += len(part)
            yield part
        if (sha.hexdigest(), size) != expected:
            raise HashMismatch(f"{path} of the source is damaged; holdfast doctor says what else is")

    try:
        target.write(path, checked(), create_only=True)
    except ObjectExists:
        return False
    except ObjectNotFound:
        raise MissingObject(
            f"{path} is not in the source's object store, so there is no whole plane to migrate; name the store that "
            "has it, or see what holdfast doctor says"
        ) from None
    return True


def _hash_of(store: ObjectStore, path: str) -> tuple[str, int] | None:
    sha, size = hashlib.sha256(), 0
    try:
        for part in store.open(path):
            sha.update(part)
            size += len(part)
    except ObjectNotFound:
        return None
    return sha.hexdigest(), size
