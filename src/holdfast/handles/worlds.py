"""Worlds: event-sourced agents with a journal and an inbox."""

from collections.abc import Callable, Sequence
from typing import Any

import cbor2
import msgspec

from holdfast.limits import INBOX_INLINE_BYTES_MAX, READ_ENTRIES_MAX, SEGMENT_ENTRIES, SEGMENT_MARGIN
from holdfast.names import checked_name
from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.blobs import GetBlob, PutBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.restores import Entry, Restored, Verdict
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    Checked,
    CheckWorld,
    CommitSnapshot,
    Compacted,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    Described,
    DescribeWorld,
    DrainInbox,
    ForkWorld,
    GetBaseline,
    GetCursor,
    ListSegments,
    ListSnapshots,
    PutItem,
    ReadInbox,
    ReadJournal,
    Record,
    Segment,
    SetManifest,
    Snapshot,
)

Reducer = Callable[[Any, Entry], Any]


class AsyncWorld:
    """One world. Its journal is its history; input from outside arrives in its inbox."""

    def __init__(self, transport: AsyncTransport, universe: str, name: str) -> None:
        self.name = checked_name("world", name)
        self.inbox = AsyncInbox(transport, universe, self.name)
        self.snapshots = AsyncSnapshots(transport, universe, self.name)
        self._transport = transport
        self._universe = universe

    async def create(self, *, manifest_hash: str | None = None) -> Described:
        """Create the world, with the empty state as its first baseline.

        Raises:
            WorldExists: it exists already.
        """
        return await self._transport.call(CreateWorld(self.name, self._universe, manifest_hash))

    async def describe(self) -> Described:
        """Its state, creation time and head.

        Raises:
            WorldNotFound: it does not exist.
        """
        return await self._transport.call(DescribeWorld(self.name, self._universe))

    async def pause(self) -> Described:
        """Refuse appends and drains; the inbox still accepts items."""
        return await self._transport.call(ChangeWorld(self.name, "paused", self._universe))

    async def resume(self) -> Described:
        """Activate a paused or archived world again."""
        return await self._transport.call(ChangeWorld(self.name, "active", self._universe))

    async def archive(self) -> Described:
        """Refuse all writes; everything stays readable."""
        return await self._transport.call(ChangeWorld(self.name, "archived", self._universe))

    async def delete(self) -> Described:
        """Remove an archived world permanently. Its name stays reserved."""
        return await self._transport.call(DeleteWorld(self.name, self._universe))

    async def fork(self, target: str, *, height: int) -> "AsyncWorld":
        """A new world that shares this one's history below `height`, with an empty inbox and nothing pending."""
        await self._transport.call(ForkWorld(self.name, target, height, self._universe))
        return AsyncWorld(self._transport, self._universe, target)

    async def head(self) -> int:
        """The next height of the journal."""
        return (await self.describe()).head

    async def append(self, entries: Sequence[Any], *, expected_head: int, tier: Tier = Tier.CRITICAL) -> int:
        """Append values (text, numbers, bytes, lists, maps) as one batch; the height of the first.

        Raises:
            HeadAdvanced: another writer appended first; read the new entries, then decide.
            EmptyBatch, BatchTooLarge: a batch has 1 to 256 entries and at most 256 KiB.
        """
        encoded = [canonical(entry) for entry in entries]
        request = AppendEntries(self.name, encoded, expected_head, self._universe, tier=tier)
        return (await self._transport.call(request)).height

    async def read(self, start: int = 0, *, limit: int = 1_000) -> list[Record]:
        """At most `limit` records from the height `start` on; `cbor2.loads(record.value)` is what was appended."""
        return (await self._transport.call(ReadJournal(self.name, start, limit, self._universe))).records

    async def check(self) -> Checked:
        """Read and check all records, segments and snapshots; counts, and the first fault if there is one.

        `verify` also checks that snapshots agree with the records, which takes a reducer.
        """
        height: int | None = 0
        counts = (0, 0, 0)
        while True:
            found = await self._transport.call(CheckWorld(self.name, height or 0, universe=self._universe))
            counts = (counts[0] + found.records, counts[1] + found.segments, counts[2] + found.snapshots)
            height = found.next
            if height is None:
                return Checked(None, *counts, found.fault)

    async def drain(self, *, limit: int = 256) -> list[int]:
        """Move the next inbox items into the journal, each exactly once; their heights."""
        return (await self._transport.call(DrainInbox(self.name, limit, self._universe))).heights

    async def set_manifest(self, manifest_hash: str, *, expected_head: int) -> int:
        """Record that another manifest defines the world from here on; the height of the record."""
        request = SetManifest(self.name, manifest_hash, expected_head, self._universe)
        return (await self._transport.call(request)).height

    async def compact(self, *, entries: int = SEGMENT_ENTRIES, margin: int = SEGMENT_MARGIN) -> Compacted:
        """Move records well below the baseline into cold segments; reads are not affected."""
        return await self._transport.call(CompactWorld(self.name, entries, margin, self._universe))

    async def segments(self, *, after: int = -1, limit: int = 100) -> list[Segment]:
        """At most `limit` cold segments that end after the height `after`, in order."""
        return (await self._transport.call(ListSegments(self.name, after, limit, self._universe))).segments

    async def restore(self, reducer: Reducer) -> Restored:
        """The current state: the baseline, with every later record applied by `reducer(state, entry)`.

        The reducer must be pure: its result depends only on its arguments, and can be encoded as CBOR.
        """
        baseline = await self.snapshots.baseline()
        data = (await self._transport.call(GetBlob(baseline.snapshot_ref, self._universe))).data
        return await self._fold(reducer, cbor2.loads(data), baseline.height)

    async def replay(self, reducer: Reducer) -> Restored:
        """The current state, computed from the first record without snapshots."""
        return await self._fold(reducer, None, 0)

    async def verify(self, reducer: Reducer) -> Verdict:
        """Compare every snapshot and the result of `restore` with a full replay, byte for byte."""
        state, height, checked = None, 0, 0
        start = 0
        while page := await self.snapshots.list(start=start):
            for snapshot in page:
                state, height = await self._fold_to(reducer, state, height, snapshot.height)
                stored = (await self._transport.call(GetBlob(snapshot.snapshot_ref, self._universe))).data
                checked += 1
                if canonical(state) != stored:
                    return Verdict(False, checked, snapshot.height)
            start = page[-1].height + 1
        replayed = await self._fold(reducer, state, height)
        restored = await self.restore(reducer)
        if canonical(restored.state) != canonical(replayed.state):
            return Verdict(False, checked, replayed.height)
        return Verdict(True, checked, None)

    async def _fold(self, reducer: Reducer, state: Any, height: int) -> Restored:
        while records := await self.read(height, limit=READ_ENTRIES_MAX):
            for record in records:
                state = reducer(state, Entry(record.height, record.kind, cbor2.loads(record.value)))
            height = records[-1].height + 1
        return Restored(state, height)

    async def _fold_to(self, reducer: Reducer, state: Any, height: int, end: int) -> tuple[Any, int]:
        while height < end:
            records = await self.read(height, limit=min(READ_ENTRIES_MAX, end - height))
            for record in records:
                state = reducer(state, Entry(record.height, record.kind, cbor2.loads(record.value)))
            height = records[-1].height + 1
        return state, height


class AsyncInbox:
    """A world's input from outside, in the order of arrival."""

    def __init__(self, transport: AsyncTransport, universe: str, world: str) -> None:
        self._transport = transport
        self._universe = universe
        self._world = world

    async def put(self, item: InboxItem) -> int:
        """Add an item at the end; its sequence. A payload over 4 KiB is stored as a blob."""
        payload = getattr(item, "payload", b"")
        if isinstance(payload, bytes) and len(payload) > INBOX_INLINE_BYTES_MAX and item.payload_blob is None:
            stored = await self._transport.call(PutBlob(payload, self._universe))
            item = msgspec.structs.replace(item, payload=b"", payload_blob=stored.hash)
        sequence = (await self._transport.call(PutItem(self._world, item, self._universe))).sequence
        assert sequence is not None
        return sequence

    async def read(self, *, after: int | None = None, limit: int = 1_000) -> list[tuple[int, InboxItem]]:
        """At most `limit` items after the sequence `after`, including drained ones."""
        return (await self._transport.call(ReadInbox(self._world, after, limit, self._universe))).items

    async def cursor(self) -> int | None:
        """The sequence of the last drained item, or None."""
        return (await self._transport.call(GetCursor(self._world, self._universe))).sequence


class AsyncSnapshots:
    """Snapshots of a world's state; one of them is the baseline that a restore starts from."""

    def __init__(self, transport: AsyncTransport, universe: str, world: str) -> None:
        self._transport = transport
        self._universe = universe
        self._world = world

    async def commit(
        self,
        state: Any,
        *,
        height: int,
        promote: bool = False,
        receipt_horizon_height: int | None = None,
        manifest_hash: str | None = None,
        logical_time_ns: int | None = None,
    ) -> Snapshot:
        """Store the state after all records below `height`; `promote` makes it the baseline.

        Raises:
            SnapshotExists: a different snapshot exists at that height.
            PromotionRefused: its receipt horizon is not its height, or its manifest is not the journal's.
            BaselineRegressed: the baseline is already above that height.
        """
        request = CommitSnapshot(
            self._world,
            canonical(state),
            height,
            promote,
            receipt_horizon_height,
            manifest_hash,
            logical_time_ns,
            self._universe,
        )
        return await self._transport.call(request)

    async def baseline(self) -> Snapshot:
        """The snapshot that a restore starts from."""
        return await self._transport.call(GetBaseline(self._world, self._universe))

    async def list(self, *, start: int = 0, limit: int = 100) -> list[Snapshot]:
        """At most `limit` snapshots from the height `start` on, in order."""
        return (await self._transport.call(ListSnapshots(self._world, start, limit, self._universe))).snapshots
