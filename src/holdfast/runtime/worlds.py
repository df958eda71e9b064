"""World operations that use the object store: it keeps snapshots, and the cold end of the journal.

    read        hot records from the key space, cold ones from segments; the caller sees no difference
    snapshot    bytes to a blob ──► index, journal record, baseline: one transaction
    compact     body to the object store ──► index ──► remove the hot records, a bounded number per transaction
    fork        copy the records below a height, batch by batch, then activate the copy
    delete      remove segments, then keys, a bounded number per transaction; the name stays reserved

Compaction blocks no other caller: its transactions are short, and records are removed only after their segment is
indexed. A crash leaves a body without an index entry, or hot records that are no longer read; the next run continues
from there.
"""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import cbor2
import msgspec

from holdfast import limits
from holdfast.backends.objects import ObjectStore
from holdfast.errors import BlobNotFound, Corrupt, InvalidArgument, MissingObject, ObjectNotFound, Unsupported
from holdfast.kv import Database, Transaction
from holdfast.layers import inboxes, journal_records, journals, segments, snapshots, world_forks, worlds
from holdfast.layers.idempotency import KeyedCall, run_idempotent, stored_result
from holdfast.layers.journal_records import Kind, split
from holdfast.layers.segments import SegmentRecord
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.layers.worlds import World, WorldState
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.tiers import Tier
from holdfast.wire.worlds import Checked, Compacted, Described, Record, Records, Snapshot

_decode_snapshot = msgspec.msgpack.Decoder(SnapshotRecord).decode
_decode_described = msgspec.msgpack.Decoder(Described).decode


_SNAPSHOTS_PAGE: Final = 100


class AsyncWorldStore:
    """Reads, snapshots and compacts the worlds of a plane."""

    def __init__(self, database: Database, objects: ObjectStore | None, blobs: AsyncBlobStore) -> None:
        self._database = database
        self._objects = objects
        self._blobs = blobs
        self._cached: OrderedDict[tuple[World, int], list[bytes]] = OrderedDict()
        self._cache_lock = threading.Lock()

    async def read(self, world: World, start: int, limit: int) -> Records:
        """At most `limit` records from the height `start` on, without a gap.

        Raises:
            MissingEntry, MissingObject, ChecksumMismatch, MalformedSegment: the journal is damaged.
        """
        if start < 0 or not 0 < limit <= limits.READ_ENTRIES_MAX:
            raise InvalidArgument(f"A read starts at 0 or later and returns 1 to {limits.READ_ENTRIES_MAX} records")
        found: list[Record] = []
        while len(found) < limit:
            hot, segment = await self._database.read_async(segments.read, world, start, limit - len(found))
            if segment is not None:
                cold = await self._records_of(world, segment)
                offset = start - segment.start
                hot = list(enumerate(cold[offset : offset + limit - len(found)], start))
            if not hot:
                break
            found += [Record(height, *split(record)) for height, record in hot]
            start = hot[-1][0] + 1
            if segment is None:
                break
        return Records(found)

    async def check(self, world: World, start: int, limit: int) -> Checked:
        """Verify a segment, or `limit` hot records, and the snapshots at the same heights."""
        if start < 0 or not 0 < limit <= limits.READ_ENTRIES_MAX:
            raise InvalidArgument(f"A check starts at 0 or later and covers 1 to {limits.READ_ENTRIES_MAX} records")
        await self._database.read_async(worlds.require_readable, world)
        found: list[bytes] = []
        segment, snapshots_checked, fault, following = None, 0, None, None
        try:
            hot, segment = await self._database.read_async(segments.read, world, start, limit)
            if segment is None:
                found = [record for _, record in hot]
            else:  # From the object store, not from the cache.
                found = segments.parse(await self._body_of(segment), segment)[start - segment.start :]
            _check_records(world, start, found)
            end = start + len(found)
            head = await self._database.read_async(journals.head, world)
            following = end if end < head else None
            snapshots_checked = await self._check_snapshots(world, start, head + 1 if following is None else end)
        except (Corrupt, BlobNotFound) as error:
            following, fault = None, str(error)
        return Checked(following, len(found), int(segment is not None), snapshots_checked, fault)

    async def _check_snapshots(self, world: World, start: int, end: int) -> int:
        """Verify the bytes of the snapshots below the height `end`; how many there are."""
        checked = 0
        while page := await self._database.read_async(snapshots.page, world, start=start, limit=_SNAPSHOTS_PAGE):
            for snapshot in page:
                if snapshot.height >= end:
                    return checked
                sha = hashlib.sha256()
                async for part in await self._blobs.open(world.universe, snapshot.snapshot_ref):
                    sha.update(part)
                if sha.hexdigest() != snapshot.snapshot_ref:
                    raise Corrupt(
                        f"The snapshot at height {snapshot.height} does not match its hash; restore it from a backup"
                    )
                checked += 1
            start = page[-1].height + 1
        return checked

    async def snapshot(
        self, world: World, data: bytes, draft: SnapshotRecord, *, promote: bool, call: KeyedCall | None = None
    ) -> Snapshot:
        """Store and index a snapshot; with `promote`, make it the baseline if it qualifies.

        `draft` is the index record; its `snapshot_ref`, and its time if missing, are filled in.
        """
        stored = await self._blobs.put(world.universe, data)
        draft = msgspec.structs.replace(draft, snapshot_ref=stored.hash)
        record = await self._database.transact_async(_commit_snapshot, world, draft, promote, call)
        return Snapshot(*msgspec.structs.astuple(record))

    async def compact(self, world: World, *, entries: int, margin: int) -> Compacted:
        """Move records at least `margin` below the baseline into segments; how many segments and records."""
        exported = 0
        await self._trim(world)
        while span := await self._database.read_async(segments.next_range, world, entries=entries, margin=margin):
            await self._export(world, *span, margin)
            await self._trim(world)
            await asyncio.sleep(limits.EXPORT_PAUSE_SECONDS_PER_RECORD * entries)
            exported += 1
        grace_ms = limits.INBOX_GRACE_SECONDS * 1_000
        while await self._database.transact_async(
            inboxes.remove_drained, world, grace_ms=grace_ms, limit=limits.TRIM_ENTRIES
        ):
            pass
        return Compacted(exported, exported * entries)

    async def fork(self, source: World, target: World, height: int, call: KeyedCall | None = None) -> Described:
        """A new world with the records of `source` below `height`, and none of its pending effects and timers.

        After an interruption, calling it again continues. A repeated `call` returns the first result, and changes
        nothing.
        """
        before = await self._database.transact_async(_begin_fork, source, target, height, call)
        if before is not None:
            return before
        copied = await self._database.read_async(journals.head, target)
        while copied < height:
            page = (await self.read(source, copied, min(limits.BATCH_ENTRIES_MAX, height - copied))).records
            batch = [journal_records.join(Kind[record.kind.upper()], record.value) for record in page]
            await self._database.transact_async(journals.write_at, target, batch, copied)
            copied += len(batch)
        return await self._database.transact_async(_end_fork, target, call)

    async def delete(self, world: World) -> Described:
        """Remove everything of an archived world except its name and shared blobs."""
        if await self._database.transact_async(worlds.begin_delete, world):
            await self._clear(world)
        meta = await self._database.transact_async(worlds.change_state, world, WorldState.DELETED)
        return Described(world.name, meta.state, meta.created_ms, 0)

    async def _clear(self, world: World) -> None:
        while page := await self._database.read_async(segments.page, world, limit=100):
            for segment in page:
                await self._store().delete_async(segment.object_path)
                await self._database.transact_async(segments.forget, world, segment)
        while not await self._database.transact_async(worlds.clear, world, limits.TRIM_ENTRIES):
            pass

    async def _export(self, world: World, start: int, end: int, margin: int) -> None:
        path = segments.object_path(world, start, end)
        sha, size = hashlib.sha256(), 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal size
            height = start
            while height <= end:
                # Small chunks with a pause in between, so that other callers are not delayed.
                await asyncio.sleep(limits.EXPORT_PAUSE_SECONDS)
                count = min(limits.EXPORT_PAGE, end + 1 - height)
                hot, _ = await self._database.read_async(segments.read, world, height, count, tier=Tier.IMPORTANT)
                for chunk in segments.body(record for _, record in hot):
                    sha.update(chunk)
                    size += len(chunk)
                    yield chunk
                height += len(hot)

        await self._store().write_async(path, body())
        record = SegmentRecord(start, end, path, f"sha256:{sha.hexdigest()}", size)
        await self._database.transact_async(segments.index, world, record, margin=margin)

    async def _trim(self, world: World) -> None:
        # Records that a power loss restores are trimmed again by the next run.
        while not await self._database.transact_async(segments.trim, world, limits.TRIM_ENTRIES, tier=Tier.IMPORTANT):
            pass

    async def _records_of(self, world: World, segment: SegmentRecord) -> list[bytes]:
        with self._cache_lock:
            known = self._cached.get((world, segment.end))
            if known is not None:
                self._cached.move_to_end((world, segment.end))
                return known
        parsed = segments.parse(await self._body_of(segment), segment)
        with self._cache_lock:
            self._cached[world, segment.end] = parsed
            while len(self._cached) > limits.SEGMENTS_CACHED:
                self._cached.popitem(last=False)
        return parsed

    async def _body_of(self, segment: SegmentRecord) -> bytes:
        try:
            return await self._store().get_async(segment.object_path)
        except ObjectNotFound as error:
            raise MissingObject(
                f"The segment {segment.object_path} is not in the object store; restore it from a backup"
            ) from error

    def _store(self) -> ObjectStore:
        if self._objects is None:
            raise Unsupported("Segments need an object store that all nodes reach; configure one with objects=...")
        return self._objects


def _check_records(world: World, start: int, found: list[bytes]) -> None:
    for height, record in enumerate(found, start):
        try:
            cbor2.loads(split(record)[1])
        except (cbor2.CBORDecodeError, IndexError, ValueError):
            raise Corrupt(f"Record {height} of world {world.name} is damaged; restore a backup") from None


def _commit_snapshot(
    tx: Transaction, world: World, draft: SnapshotRecord, promote: bool, call: KeyedCall | None
) -> SnapshotRecord:
    def commit(tx: Transaction) -> SnapshotRecord:
        return snapshots.commit(tx, world, draft, promote=promote)

    return commit(tx) if call is None else run_idempotent(tx, call, _decode_snapshot, commit)


def _begin_fork(tx: Transaction, source: World, target: World, height: int, call: KeyedCall | None) -> Described | None:
    """Start the copy; the first result if the call is a repeat."""
    before = None if call is None else stored_result(tx, call)
    if before is not None:
        return _decode_described(before)
    world_forks.begin(tx, source, target, height)
    return None


def _end_fork(tx: Transaction, target: World, call: KeyedCall | None) -> Described:
    def end(tx: Transaction) -> Described:
        world_forks.end(tx, target)
        return segments.describe(tx, target)

    return end(tx) if call is None else run_idempotent(tx, call, _decode_described, end)
