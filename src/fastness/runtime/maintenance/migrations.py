"""Migration of a plane from one pair of stores to another, with a comparison at the end.

    objects and session logs ──► keys, one batch per transaction ──► ranges of keys, compared by digest ──► done

Each step can be interrupted and repeated: existing objects are hashed instead of copied, and keys continue at the
position recorded in the target (`layers/migrations.py`). A comparison always starts from the beginning: it is valid
only if nothing could write to the source while it ran. Nothing is ever written to the source. An object of the target
with different bytes belongs to another plane, and is not overwritten.

Changes in the source between two runs are found by the comparison, and copied again.

Values and objects of encrypted universes are read with the keys of the source, and encrypted again in the target with
the same data keys. So their wrapped keys are copied first, in one transaction. Both sides are compared as they were
before encryption. How far a rewrite is, is not copied: everything in the target has the newest key.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.backends.objects.encrypted import EncryptedObjects
from fastness.errors import (
    DecryptionFailed,
    HashMismatch,
    InvalidArgument,
    MissingObject,
    ObjectExists,
    ObjectNotFound,
    TargetNotEmpty,
)
from fastness.kv import Database, Pair, fence_floor, formats
from fastness.kv.value_cipher import RECORDS
from fastness.layers import encryption, migrations, nodes
from fastness.layers.migrations import BEGIN, END, KEY, Migration, State
from fastness.limits import MIGRATION_BATCH_BYTES, MIGRATION_BATCH_PAIRS, MIGRATION_PAGE_PAIRS, MIGRATION_RANGE_PAIRS
from fastness.runtime.activity import rotation
from fastness.runtime.activity.format import SUFFIX
from fastness.runtime.maintenance.checkpoints import referenced_contents, rotated_logs
from fastness.tiers import Tier
from fastness.wire.backups import BackupFile

_replace: Final = msgspec.structs.replace
_lengths: Final = struct.Struct("!II").pack

Advance = Callable[[int], None]


class PlaneStores(msgspec.Struct, frozen=True):
    """The stores of a plane: its key space, its objects, and local session logs."""

    database: Database
    objects: ObjectStore | None = None
    logs: Path | None = None
    keys: int = 0  # An estimate for the progress display.


class Migrator:
    """Migrates one plane. Call `begin`, then each step in order; after an interruption, all of them again."""

    def __init__(self, source: PlaneStores, target: PlaneStores, name: str, *, with_logs: bool = True) -> None:
        """`name` identifies the source in the target; without `with_logs`, session logs are not migrated."""
        self._source = source
        self._target = target
        self._name = name
        self._with_logs = with_logs
        self._objects = self._object_bytes = self._logs = 0
        self.copied = 0  # The number of keys, once all are copied.
        self.progress: Migration

    def begin(self) -> bool:
        """Start or continue; whether anything is left to do.

        Raises:
            TargetNotEmpty: the target contains other data.
            MigrationUnfinished: the source is itself the target of a migration that is not complete.
            SchemaMismatch: the source has a format that this version does not know.
            InvalidArgument: the source has objects, and the target has no object store.
        """
        database = self._source.database
        database.read(migrations.check_complete, tier=Tier.IMPORTANT)
        found = database.read(formats.format_of, tier=Tier.IMPORTANT)
        formats.check_supported("The source", found, oldest=formats.OLDEST_FORMAT)
        if self._target.objects is None:
            first = next(chain((file.path for file in self._files()), map(str, self._local_logs())), None)
            if first is not None:
                raise InvalidArgument(
                    f"The source has objects or session logs ({first}), but the target has no store; give --objects"
                )
        self.progress = self._target.database.transact(migrations.begin, self._name)
        return self.progress.state is not State.DONE

    def withdraw(self) -> None:
        """Restore the target to its empty state, if nothing was copied yet."""
        self._target.database.transact(migrations.withdraw, self.progress)

    def copy_objects(self, advance: Advance) -> None:
        """Copy every object to the target's store, each read back and hashed.

        Raises:
            MissingObject, HashMismatch: the source is damaged.
            TargetNotEmpty: the target's store has different bytes at the path of an object.
        """
        self._copy_wrapped_keys()
        objects = self._target.objects
        if objects is None:
            return
        for file in self._files():
            self._objects += 1
            self._object_bytes += _copy_verified(file, self._source.objects, objects)
            advance(1)
        for path in self._local_logs():
            if (kept := rotation.copy(path, objects)) is not None:
                if _stored_hash(objects, kept.path) != (kept.sha256, kept.bytes):
                    raise HashMismatch(
                        f"{kept.path} differs in the target after it was written; run the migration again"
                    )
                self._logs += 1
                advance(1)

    def copy_keys(self, advance: Advance) -> None:
        """Copy every key to the target."""
        if self.progress.state is not State.COPYING:
            return
        for batch, at in _batches(_migrated(self._source.database, self.progress.at, END)):
            self._record_progress(_replace(self.progress, at=at, keys=self.progress.keys + len(batch)), batch)
            advance(len(batch))
        self.copied = self.progress.keys
        self._record_progress(_replace(self.progress, state=State.CHECKING, at=BEGIN, keys=0))

    def compare_keys(self, advance: Advance) -> None:
        """Compare all ranges of the two key spaces, and copy those again that differ.

        Raises:
            HashMismatch: a range still differs after it was copied again.
        """
        self._record_progress(_replace(self.progress, at=BEGIN, keys=0, ranges=0, digest=b""))
        while self.progress.at < END:
            at, end, count, digest = _next_range(self._source.database, self.progress.at)
            again = self._target_digest(at, end) != (count, digest)
            if again:
                self._copy_again(at, end)
                if self._target_digest(at, end) != (count, digest):
                    raise HashMismatch(
                        f"The keys from {at.hex() or 'the first'} to {end[:64].hex()} differ after they were copied "
                        "twice; stop whatever writes to the source or the target, and run the migration again"
                    )
            chain_of = hashlib.sha256(self.progress.digest + digest).digest()
            counted = {
                "keys": self.progress.keys + count,
                "ranges": self.progress.ranges + 1,
                "again": self.progress.again + again,
            }
            self._record_progress(_replace(self.progress, at=end, digest=chain_of, **counted))
            advance(count)

    def finish(self) -> Migration:
        """Mark the migration as complete, so that the target can be opened; its record."""
        counted = {"objects": self._objects, "object_bytes": self._object_bytes, "logs": self._logs}
        floors = [stores.database.read(fence_floor.load) for stores in (self._source, self._target)]
        now_ms = self._target.database.read(lambda tx: tx.now_ms)
        floor = fence_floor.KEY, fence_floor.encode(fence_floor.floor_of_copy(max(floors), now_ms))
        self._record_progress(_replace(self.progress, state=State.DONE, **counted), [floor], tier=Tier.CRITICAL)
        return self.progress

    def _files(self) -> Iterator[BackupFile]:
        """Every object of the source."""
        referenced = (file for file in referenced_contents(self._source.database) if file is not None)
        objects = self._source.objects
        return chain(referenced, rotated_logs(objects) if objects is not None and self._with_logs else ())

    def _local_logs(self) -> list[Path]:
        folder = self._source.logs
        return sorted(folder.glob(f"*/*{SUFFIX}")) if folder is not None and self._with_logs else []

    def _copy_again(self, begin: bytes, end: bytes) -> None:
        for cleared in ((begin, min(end, RECORDS[0])), (max(begin, RECORDS[1]), end)):  # The target needs its keys.
            if cleared[0] < cleared[1]:
                self._record_progress(self.progress, cleared=cleared)
        for batch, _ in _batches(_migrated(self._source.database, begin, end)):
            self._record_progress(self.progress, batch)

    def _copy_wrapped_keys(self) -> None:
        """Let the target encrypt what the source does. If keys are new since the last run, copy everything again."""
        pairs = self._source.database.read(encryption.key_records, tier=Tier.IMPORTANT)
        if pairs != self._target.database.read(encryption.key_records, tier=Tier.IMPORTANT):
            again = _replace(self.progress, state=State.COPYING, at=BEGIN, keys=0)
            self._record_progress(again, pairs, tier=Tier.CRITICAL)
            self._target.database.read(encryption.key_records)  # Loads the keys, where a commit does not.

    def _target_digest(self, begin: bytes, end: bytes) -> tuple[int, bytes] | None:
        """The number of pairs in a range of the target, and their digest; None if one cannot be decrypted."""
        try:
            return _digest(_pairs_of(self._target.database, begin, end))
        except DecryptionFailed:
            return None

    def _record_progress(
        self,
        after: Migration,
        pairs: list[Pair] | None = None,
        *,
        cleared: tuple[bytes, bytes] | None = None,
        # A power loss undoes copied keys together with the recorded position, so they are copied again.
        tier: Tier = Tier.IMPORTANT,
    ) -> None:
        self.progress = self._target.database.transact(
            migrations.save_progress, self.progress, after, pairs or (), cleared=cleared, tier=tier
        )


def _pairs_of(database: Database, begin: bytes, end: bytes) -> Iterator[Pair]:
    """Every pair of a range except the records of a migration, the format, the fence floor, nodes and encryption."""
    while page := database.read(
        lambda tx, begin=begin: tx.scan(begin, end, limit=MIGRATION_PAGE_PAIRS), tier=Tier.IMPORTANT
    ):
        yield from (
            pair
            for pair in page
            if pair[0] not in (KEY, formats.KEY, fence_floor.KEY)
            and not pair[0].startswith(nodes.ALL)
            and not RECORDS[0] <= pair[0] < RECORDS[1]
        )
        begin = page[-1][0] + b"\x00"


def _migrated(database: Database, begin: bytes, end: bytes) -> Iterator[tuple[Pair, bytes]]:
    """Every pair of a range as it is stored in the target, and the position after it."""
    at = begin
    for key, value in _pairs_of(database, begin, end):
        if key < at:
            continue  # One of the counters that were merged into one.
        keys = migrations.queue_of_counters_key(key)
        if keys is None:
            at = key + b"\x00"
            yield (key, value), at
        else:
            at = keys.all_counters.range()[1]
            yield database.read(migrations.merged_counters, keys, tier=Tier.IMPORTANT), at


def _batches(pairs: Iterator[tuple[Pair, bytes]]) -> Iterator[tuple[list[Pair], bytes]]:
    """Pairs in batches for one transaction each, and the position after each batch."""
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


def _next_range(source: Database, begin: bytes) -> tuple[bytes, bytes, int, bytes]:
    """The next range of a source: its begin and end, the number of its pairs, and their digest."""
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


def _copy_verified(file: BackupFile, source: ObjectStore | None, target: ObjectStore) -> int:
    """Copy one object unless the target has it, and verify it; its size in bytes."""
    expected = None if file.sha256 is None else (file.sha256, file.size)
    if expected is None and source is not None:
        expected = _stored_hash(source, file.path)
    target_hash = _stored_hash(target, file.path)
    if was_copied := target_hash is None:
        was_copied = _copy(file.path, expected, source, target)
        target_hash = _stored_hash(target, file.path)
    if target_hash != expected:
        if was_copied:
            raise HashMismatch(f"{file.path} differs in the target after it was written; run the migration again")
        raise TargetNotEmpty(
            f"The target's object store has different bytes at {file.path}; use an empty bucket or prefix"
        )
    if not was_copied and isinstance(target, EncryptedObjects):
        target.encrypt_again(file.path)  # It may be from before the universe was encrypted.
    return 0 if expected is None else expected[1]


def _copy(path: str, expected: tuple[str, int] | None, source: ObjectStore | None, target: ObjectStore) -> bool:
    """Copy one object; False if it already exists."""

    def checked() -> Iterator[bytes]:
        if source is None:
            raise ObjectNotFound(path)
        sha, size = hashlib.sha256(), 0
        for part in source.open(path):
            sha.update(part)
            size += len(part)
            yield part
        if (sha.hexdigest(), size) != expected:
            raise HashMismatch(f"{path} of the source is damaged; run `fastness doctor` on it")

    try:
        target.write(path, checked(), create_only=True)
    except ObjectExists:
        return False
    except ObjectNotFound:
        raise MissingObject(
            f"{path} is missing in the source's object store; give the store that contains it, or run `fastness doctor`"
        ) from None
    return True


def _stored_hash(store: ObjectStore, path: str) -> tuple[str, int] | None:
    sha, size = hashlib.sha256(), 0
    try:
        for part in store.open(path):
            sha.update(part)
            size += len(part)
    except ObjectNotFound:
        return None
    return sha.hexdigest(), size
