"""World operations that use the object store: it keeps snapshots, and the cold end of the journal.

    read        hot records from the key space, cold ones from segments; the caller sees no difference
    snapshot    bytes to a blob ──► index, journal record, baseline: one transaction
    compact     body to the object store ──► index ──► remove the hot records, a bounded number per transaction
    fork        copy the records below a height, batch by batch, then activate the copy
    delete      remove segments, then keys, a bounded number per transaction; the lifecycle record stays

An operation of several transactions stays in the incarnation in which it began: each of them checks it, so that none
continues in a world that was created under the same name meanwhile.

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

from fastness import limits
from fastness.backends.objects import ObjectStore
from fastness.errors import (
    BlobNotFound,
    Corrupt,
    MissingObject,
    ObjectNotFound,
    Unsupported,
)
from fastness.kv import Database, Transaction
from fastness.layers import (
    effects,
    hosting,
    inboxes,
    journal_records,
    journals,
    segments,
    snapshots,
    timers,
    world_forks,
    worlds,
)
from fastness.layers.idempotency import KeyedCall, run_idempotent, stored_result
from fastness.layers.journal_records import Kind, split
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.world_forks import Incarnations
from fastness.layers.worlds import World, WorldState
from fastness.runtime.blobs import AsyncBlobStore
from fastness.tiers import Tier
from fastness.wire.worlds import Checked, Compacted, Described, Record, Records, RestorePoint, Segment, Snapshot

_decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
_decode_described = msgspec.msgpack.Decoder(Described).decode
_SNAPSHOTS_PAGE: Final = 100


class AsyncWorldStore:
    """Reads, snapshots and compacts the worlds of a plane."""

    def __init__(self, database: Database, objects: ObjectStore | None, blobs: AsyncBlobStore) -> None:
        self._database = database
        self._objects = objects
        self._blobs = blobs
        self._cached: OrderedDict[str, list[bytes]] = OrderedDict()  # By checksum.
        self._cache_lock = threading.Lock()

    async def read(self, world: World, start: int, limit: int, incarnation: int | None = None) -> Records:
        """At most `limit` records from the height `start` on, without a gap.

        Raises:
            WorldNotFound: the world does not exist, or has another incarnation.
            MissingEntry, MissingObject, ChecksumMismatch, MalformedSegment: the journal is damaged.
        """
        found: list[Record] = []
        while True:
            count = limit - len(found)
            seen, hot, segment = await self._database.read_async(_read_page, world, incarnation, start, count)
            if segment is not None:
                cold = await self._records_of(world, seen, segment)
                offset = start - segment.start
                hot = list(enumerate(cold[offset : offset + count], start))
            found += [Record(height, *split(record)) for height, record in hot]
            if segment is None or len(found) == limit:
                return Records(found, seen)
            start, incarnation = hot[-1][0] + 1, seen

    async def check(self, world: World, start: int, limit: int, incarnation: int | None = None) -> Checked:
        """Verify a segment, or `limit` hot records, and the snapshots at the same heights."""
        incarnation = await self._database.read_async(worlds.require_readable, world, incarnation)
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
        # What was found is of this incarnation only if it still exists.
        await self._database.read_async(worlds.require_readable, world, incarnation)
        return Checked(following, len(found), int(segment is not None), snapshots_checked, fault, incarnation)

    async def check_restore(self, world: World, incarnation: int | None = None) -> RestorePoint:
        """Where a restore starts, after checking that the baseline and all later records are present.

        Raises:
            WorldNotFound: the world does not exist, or has another incarnation.
            Corrupt: something is missing, or a segment is damaged.
        """
        point: RestorePoint = await self._database.read_async(_restore_point, world, incarnation)
        start = point.baseline.height
        while start < point.head:
            count = min(limits.RESTORE_CHECK_PAGE, point.head - start)
            _, hot, segment = await self._database.read_async(_read_page, world, point.incarnation, start, count)
            if segment is not None:
                await self._records_of(world, point.incarnation, segment)
            start = hot[-1][0] + 1 if segment is None else segment.end + 1
        return point

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
        self,
        world: World,
        data: bytes,
        draft: SnapshotRecord,
        *,
        promote: bool | None = None,
        incarnation: int | None = None,
        claim: tuple[str, int] | None = None,
        call: KeyedCall | None = None,
    ) -> Snapshot:
        """Store and index a snapshot, and make it the baseline if it qualifies, unless `promote` is False.

        `draft` is the index record; its `snapshot_ref`, and what else is missing, are filled in. `claim` is the name of
        the host that holds the world, with its fence.
        """
        stored = await self._blobs.put(world.universe, data, pinned=False)
        draft = msgspec.structs.replace(draft, snapshot_ref=stored.hash)
        return await self._database.transact_async(
            _commit_snapshot, world, draft, promote=promote, incarnation=incarnation, claim=claim, call=call
        )

    async def compact(self, world: World, *, entries: int, margin: int, incarnation: int | None = None) -> Compacted:
        """Move records at least `margin` below the baseline into segments; how many segments and records."""
        exported = 0
        incarnation = await self._database.read_async(worlds.require_readable, world, incarnation)
        await self._trim(world, incarnation)
        while span := await self._database.read_async(segments.next_range, world, entries=entries, margin=margin):
            await self._export(world, incarnation, *span, margin)
            await self._trim(world, incarnation)
            await asyncio.sleep(limits.EXPORT_PAUSE_SECONDS_PER_RECORD * entries)
            exported += 1
        grace_ms = limits.INBOX_GRACE_SECONDS * 1_000
        while await self._database.transact_async(
            inboxes.remove_drained, world, grace_ms=grace_ms, limit=limits.TRIM_ENTRIES
        ):
            pass
        return Compacted(exported, exported * entries)

    async def fork(
        self,
        source: World,
        target: World,
        height: int,
        *,
        incarnation: int | None = None,
        call: KeyedCall | None = None,
    ) -> Described:
        """A new world with the records of `source` below `height`, and none of its pending effects and timers.

        After an interruption, calling it again continues. A repeated `call` returns the first result, and changes
        nothing.
        """
        begun = await self._database.transact_async(
            _begin_fork, source, target, height, incarnation=incarnation, call=call
        )
        if isinstance(begun, Described):
            return begun
        copied = await self._database.read_async(journals.head, target)
        while copied < height:
            count = min(limits.BATCH_ENTRIES_MAX, height - copied)
            page = (await self.read(source, copied, count, begun.source)).records
            batch = [journal_records.join(Kind[record.kind.upper()], record.value) for record in page]
            await self._database.transact_async(world_forks.copy, target, begun.target, batch, copied)
            copied += len(batch)
        return await self._database.transact_async(_end_fork, target, begun.target, call)

    async def delete(
        self, world: World, incarnation: int | None = None, *, archived_ms: int | None = None
    ) -> Described:
        """Remove everything of an archived world except its lifecycle record and shared blobs.

        With `archived_ms`, only if it is archived since then.
        """
        meta = await self._database.transact_async(worlds.begin_delete, world, incarnation, archived_ms)
        if meta.state is not WorldState.DELETED:
            await self._clear(world, meta.incarnation)
            await self._database.transact_async(worlds.end_delete, world, meta.incarnation)
        return Described(world.name, WorldState.DELETED, meta.created_ms, 0, incarnation=meta.incarnation)

    async def _clear(self, world: World, incarnation: int) -> None:
        while page := await self._database.read_async(_deleting_segments, world, incarnation):
            for segment in page:
                await self._store().delete_async(segment.object_path)
                await self._database.transact_async(segments.forget, world, segment, incarnation)
        for clear in (hosting.clear, effects.clear, timers.clear, worlds.clear):
            while not await self._database.transact_async(clear, world, incarnation, limits.TRIM_ENTRIES):
                pass

    async def _export(self, world: World, incarnation: int, start: int, end: int, margin: int) -> None:
        path = segments.object_path(world, start, end, incarnation)
        sha, size = hashlib.sha256(), 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal size
            height = start
            while height <= end:
                # Small chunks with a pause in between, so that other callers are not delayed.
                await asyncio.sleep(limits.EXPORT_PAUSE_SECONDS)
                count = min(limits.EXPORT_PAGE, end + 1 - height)
                _, hot, _ = await self._database.read_async(
                    _read_page, world, incarnation, height, count, tier=Tier.IMPORTANT
                )
                for chunk in segments.body(record for _, record in hot):
                    sha.update(chunk)
                    size += len(chunk)
                    yield chunk
                height += len(hot)

        await self._store().write_async(path, body())
        record = Segment(start, end, path, f"sha256:{sha.hexdigest()}", size)
        await self._database.transact_async(segments.index, world, record, margin=margin, incarnation=incarnation)

    async def _trim(self, world: World, incarnation: int) -> None:
        # Records that a power loss restores are trimmed again by the next run.
        while not await self._database.transact_async(
            segments.trim, world, limits.TRIM_ENTRIES, incarnation, tier=Tier.IMPORTANT
        ):
            pass

    async def _records_of(self, world: World, incarnation: int, segment: Segment) -> list[bytes]:
        with self._cache_lock:
            known = self._cached.get(segment.checksum)
            if known is not None:
                self._cached.move_to_end(segment.checksum)
                return known
        try:
            parsed = segments.parse(await self._body_of(segment), segment)
        except MissingObject:
            # Deleting a world removes its segments: then it is not found, and not damaged.
            await self._database.read_async(worlds.require_readable, world, incarnation)
            raise
        with self._cache_lock:
            self._cached[segment.checksum] = parsed
            while len(self._cached) > limits.SEGMENTS_CACHED:
                self._cached.popitem(last=False)
        return parsed

    async def _body_of(self, segment: Segment) -> bytes:
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


def _read_page(
    tx: Transaction, world: World, incarnation: int | None, start: int, limit: int
) -> tuple[int, list[tuple[int, bytes]], Segment | None]:
    """The incarnation, and the hot records from `start` on or the segment that holds it."""
    found = worlds.require_readable(tx, world, incarnation)
    return found, *segments.read(tx, world, start, limit)


def _restore_point(tx: Transaction, world: World, incarnation: int | None) -> RestorePoint:
    found = worlds.require_readable(tx, world, incarnation)
    baseline = snapshots.describe(snapshots.require_complete(tx, world), is_baseline=True)
    return RestorePoint(baseline, journals.head(tx, world), found)


def _deleting_segments(tx: Transaction, world: World, incarnation: int) -> list[Segment]:
    return segments.page(tx, world, limit=100) if worlds.is_deleting(tx, world, incarnation) else []


def _commit_snapshot(
    tx: Transaction,
    world: World,
    draft: SnapshotRecord,
    *,
    promote: bool | None,
    incarnation: int | None,
    claim: tuple[str, int] | None,
    call: KeyedCall | None,
) -> Snapshot:
    def commit(tx: Transaction) -> Snapshot:
        worlds.describe(tx, world, incarnation)
        if claim is None:
            hosting.require_unheld(tx, world)
        else:
            hosting.require_claim(tx, world, owner=claim[0], fence=claim[1])
        record, is_baseline = snapshots.commit(tx, world, draft, promote=promote)
        return snapshots.describe(record, is_baseline=is_baseline)

    return commit(tx) if call is None else run_idempotent(tx, call, _decode_snapshot, commit)


def _begin_fork(
    tx: Transaction, source: World, target: World, height: int, *, incarnation: int | None, call: KeyedCall | None
) -> Incarnations | Described:
    """Start the copy; the first result if the call is a repeat."""
    before = None if call is None else stored_result(tx, call)
    if before is not None:
        return _decode_described(before)
    return world_forks.begin(tx, source, target, height, incarnation)


def _end_fork(tx: Transaction, target: World, incarnation: int, call: KeyedCall | None) -> Described:
    def end(tx: Transaction) -> Described:
        world_forks.end(tx, target, incarnation)
        return segments.describe(tx, target)

    return end(tx) if call is None else run_idempotent(tx, call, _decode_described, end)
