"""Generated from handles/worlds.py by tools/make_twins.py; change that file instead."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import cbor2
import msgspec

from fastness.errors import HashMismatch, MissingEntry
from fastness.handles.arguments import Program, checked_items, program_name
from fastness.limits import INBOX_INLINE_BYTES_MAX, READ_ENTRIES_MAX, SEGMENT_ENTRIES, SEGMENT_MARGIN
from fastness.names import checked_name
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.blobs import GetBlob, PutBlob
from fastness.wire.canonical import canonical
from fastness.wire.hosting import (
    AsideItem,
    DescribeHosting,
    HostingInfo,
    ListAside,
    ResumeWorld,
    RetryAside,
    SetProgram,
)
from fastness.wire.inboxes import DomainEvent, InboxItem
from fastness.wire.json_values import encode_json
from fastness.wire.restores import Entry, Restored, Verdict
from fastness.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    Checked,
    CheckRestore,
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
    PromoteSnapshot,
    PutItem,
    ReadInbox,
    ReadJournal,
    Record,
    Segment,
    SetManifest,
    Snapshot,
)

Reducer = Callable[[Any, Entry], Any]


class HostedProgram(Protocol):
    """A program: its reducer also folds what the host has recorded, and `state_of` leaves that out."""

    @property
    def reducer(self) -> Reducer: ...

    def state_of(self, folded: Any) -> Any: ...


class _OfIncarnation(Protocol):
    @property
    def incarnation(self) -> int: ...


Answer = TypeVar("Answer", bound=_OfIncarnation)


class World:
    """One world. Its journal is its history; input from outside arrives in its inbox.

    A handle works on one incarnation of the world: the given one, or else the one of its first answer. After the world
    was deleted and created again, every call of the handle raises WorldNotFound; get a new handle from the plane.
    """

    def __init__(self, transport: Transport, universe: str, name: str, *, incarnation: int | None = None) -> None:
        self.name = checked_name("world", name)
        self._current = Incarnation(incarnation)
        self.inbox = Inbox(transport, universe, self.name, self._current)
        self.snapshots = Snapshots(transport, universe, self.name, self._current)
        self._transport = transport
        self._universe = universe

    @property
    def incarnation(self) -> int | None:
        """The incarnation that this handle works on; None before its first answer."""
        return self._current.number

    def create(self, *, manifest_hash: str | None = None, program: str | Program | None = None) -> Described:
        """Create the world, with the empty state as its first baseline; this handle works on it from now on.

        If a deleted world had this name, the new one is its next incarnation.

        Args:
            manifest_hash: the hash of the manifest that defines the world.
            program: what hosts run the world with: the name of a program, or the program itself.

        Raises:
            WorldExists: it exists already, or its deletion is not finished.
        """
        request = CreateWorld(self.name, self._universe, manifest_hash, program_name(program))
        made = self._transport.call(request)
        self._current.number = made.incarnation
        return made

    def describe(self) -> Described:
        """Its state, creation time, head and incarnation.

        Raises:
            WorldNotFound: it does not exist, or was deleted.
        """
        request = DescribeWorld(self.name, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request))

    def pause(self) -> Described:
        """Refuse appends and drains; the inbox still accepts items."""
        return self._change("paused")

    def resume(self) -> Described:
        """Activate a paused or archived world again."""
        return self._change("active")

    def archive(self) -> Described:
        """Refuse all writes; everything stays readable."""
        return self._change("archived")

    def delete(self) -> Described:
        """Remove an archived world permanently. If it was interrupted, calling it again finishes the deletion.

        Its name can be used again: `create` makes the next incarnation.
        """
        request = DeleteWorld(self.name, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request))

    def fork(self, target: str, *, height: int) -> "World":
        """A new world that shares this one's history below `height`, with an empty inbox and nothing pending."""
        request = ForkWorld(self.name, target, height, self._universe, self.incarnation)
        made = self._transport.call(request)
        return World(self._transport, self._universe, target, incarnation=made.incarnation)

    def head(self) -> int:
        """The next height of the journal."""
        return (self.describe()).head

    def append(self, entries: Iterable[Any], *, expected_head: int, tier: Tier = Tier.CRITICAL) -> int:
        """Append values (text, numbers, bytes, lists, maps) as one batch; the height of the first.

        Raises:
            HeadAdvanced: another writer appended first; read the new entries, then decide.
            WorldHeld: a host holds the world. It has folded the journal up to its own last turn, so entries of others
                would be missing from its state; put an item into the inbox instead.
            EmptyBatch, BatchTooLarge: a batch has 1 to 256 entries and at most 256 KiB.
        """
        encoded = [canonical(entry) for entry in checked_items(entries, "wrap it in a list: append([entry], …)")]
        request = AppendEntries(self.name, encoded, expected_head, self._universe, self.incarnation, tier=tier)
        return self._current.learn(self._transport.call(request)).height

    def read(self, start: int = 0, *, limit: int = 1_000) -> list[Record]:
        """At most `limit` records from the height `start` on; `cbor2.loads(record.value)` is what was appended."""
        request = ReadJournal(self.name, start, limit, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request)).records

    def check(self) -> Checked:
        """Read and check all records, segments and snapshots; counts, and the first fault if there is one.

        `verify` also checks that snapshots agree with the records, which takes a reducer.
        """
        height: int | None = 0
        counts = (0, 0, 0)
        while True:
            request = CheckWorld(self.name, height or 0, universe=self._universe, incarnation=self.incarnation)
            found = self._current.learn(self._transport.call(request))
            counts = (counts[0] + found.records, counts[1] + found.segments, counts[2] + found.snapshots)
            height = found.next
            if height is None:
                return Checked(None, *counts, found.fault, found.incarnation)

    def drain(self, *, limit: int = 256) -> list[int]:
        """Move the next inbox items into the journal, each exactly once; their heights.

        Raises:
            WorldHeld: a host holds the world, and only that host writes its journal.
        """
        request = DrainInbox(self.name, limit, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request)).heights

    def send(self, schema: str, body: Any = None, *, key: str | bytes | None = None) -> int:
        """Put a domain event into the inbox, with a body as JSON; its sequence.

        Args:
            schema: names the type of the event.
            body: a value that JSON has; bytes are sent as they are.
            key: names what the event is about.

        Raises:
            InvalidValue: the body is neither bytes nor a value that JSON has.
        """
        payload = body if isinstance(body, bytes) else encode_json(body)
        named = key.encode() if isinstance(key, str) else key
        return self.inbox.put(DomainEvent(schema=schema, key=named, payload=payload))

    def set_program(self, program: str | Program | None) -> HostingInfo:
        """Have the world run by the hosts that have this program; with None, by no host. Another program ends a claim.

        The program sees the items that are still in the inbox, and those that arrive.
        """
        return self._transport.call(SetProgram(self.name, program_name(program), self._universe))

    def hosting(self) -> HostingInfo:
        """How the world is run: its program, the host that holds it, and the error of its last failed turn."""
        return self._transport.call(DescribeHosting(self.name, self._universe))

    def resume_program(self) -> HostingInfo:
        """Let hosts run the world again after an error stopped it. Does nothing if it is not stopped."""
        return self._transport.call(ResumeWorld(self.name, self._universe))

    def aside(self, *, after: int | None = None, limit: int = 100) -> list[AsideItem]:
        """At most `limit` items that were set aside because the program failed to handle them, in order."""
        return (self._transport.call(ListAside(self.name, after, limit, self._universe))).items

    def retry_aside(self, sequence: int) -> None:
        """Put an item that was set aside back at the end of the inbox.

        Raises:
            ItemNotFound: no such item is set aside.
        """
        self._transport.call(RetryAside(self.name, sequence, universe=self._universe))

    def drop_aside(self, sequence: int) -> None:
        """Remove an item that was set aside.

        Raises:
            ItemNotFound: no such item is set aside.
        """
        self._transport.call(RetryAside(self.name, sequence, drop=True, universe=self._universe))

    def set_manifest(self, manifest_hash: str, *, expected_head: int) -> int:
        """Record that another manifest defines the world from here on; the height of the record."""
        request = SetManifest(self.name, manifest_hash, expected_head, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request)).height

    def compact(self, *, entries: int = SEGMENT_ENTRIES, margin: int = SEGMENT_MARGIN) -> Compacted:
        """Move records well below the baseline into cold segments; reads are not affected."""
        return self._transport.call(CompactWorld(self.name, entries, margin, self._universe, self.incarnation))

    def segments(self, *, after: int = -1, limit: int = 100) -> list[Segment]:
        """At most `limit` cold segments that end after the height `after`, in order."""
        request = ListSegments(self.name, after, limit, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request)).segments

    def restore(self, reducer: Reducer | HostedProgram) -> Restored:
        """The current state: the baseline, with every later record applied by `reducer(state, entry)`.

        Of a world that hosts run, pass the program itself: the result has the state that it returned last.

        The reducer must be pure: its result depends only on its arguments, and can be encoded as CBOR. Before anything
        is folded, the baseline and all records after it are checked to be present.

        Raises:
            WorldNotFound: the world does not exist, or was deleted meanwhile.
            Corrupt: something is missing or damaged; the message says what to do.
        """
        request = CheckRestore(self.name, self._universe, self.incarnation)
        point = self._current.learn(self._transport.call(request))
        baseline = point.baseline
        data = (self._transport.call(GetBlob(baseline.snapshot_ref, self._universe))).data
        if hashlib.sha256(data).hexdigest() != baseline.snapshot_ref:
            raise HashMismatch(
                f"The baseline of world {self.name} at height {baseline.height} does not match its hash; "
                "restore a backup, or compute the state from the first record with replay"
            )
        restored = self._fold(_reducer_of(reducer), cbor2.loads(data), baseline.height)
        if restored.height < point.head:
            raise MissingEntry(
                f"The journal of world {self.name} ends at {restored.height}, below its head {point.head}; "
                "restore a backup"
            )
        return _seen(reducer, restored)

    def replay(self, reducer: Reducer | HostedProgram) -> Restored:
        """The current state, computed from the first record without snapshots."""
        return _seen(reducer, self._fold(_reducer_of(reducer), None, 0))

    def verify(self, reducer: Reducer | HostedProgram) -> Verdict:
        """Compare every snapshot and the result of `restore` with a full replay, byte for byte."""
        reducer = _reducer_of(reducer)
        state, height, checked = None, 0, 0
        start = 0
        while page := self.snapshots.list(start=start):
            for snapshot in page:
                state, height = self._fold_to(reducer, state, height, snapshot.height)
                stored = (self._transport.call(GetBlob(snapshot.snapshot_ref, self._universe))).data
                checked += 1
                if canonical(state) != stored:
                    return Verdict(False, checked, snapshot.height)
            start = page[-1].height + 1
        replayed = self._fold(reducer, state, height)
        restored = self.restore(reducer)
        # Others may have appended records since they were replayed.
        state, height = self._fold_to(reducer, replayed.state, replayed.height, restored.height)
        if canonical(restored.state) != canonical(state):
            return Verdict(False, checked, height)
        return Verdict(True, checked, None)

    def _fold(self, reducer: Reducer, state: Any, height: int) -> Restored:
        start = height
        while records := self.read(height, limit=READ_ENTRIES_MAX):
            for record in records:
                state = reducer(state, self._entry(reducer, record))
            height = records[-1].height + 1
        return Restored(state, height, height - start, start)

    def _fold_to(self, reducer: Reducer, state: Any, height: int, end: int) -> tuple[Any, int]:
        while height < end:
            records = self.read(height, limit=min(READ_ENTRIES_MAX, end - height))
            for record in records:
                state = reducer(state, self._entry(reducer, record))
            height = records[-1].height + 1
        return state, height

    def _entry(self, reducer: Reducer, record: Record) -> Entry:
        """A record as the reducer sees it. One that `reads_payloads` also gets the bytes of payloads that are blobs."""
        value = cbor2.loads(record.value)
        if record.kind == "ingress" and getattr(reducer, "reads_payloads", False):
            blob = value.get("payload_blob")
            if blob is not None:
                value["payload"] = (self._transport.call(GetBlob(blob, self._universe))).data
        return Entry(record.height, record.kind, value)

    def _change(self, state: str) -> Described:
        request = ChangeWorld(self.name, state, self._universe, self.incarnation)
        return self._current.learn(self._transport.call(request))


class Inbox:
    """A world's input from outside, in the order of arrival."""

    def __init__(self, transport: Transport, universe: str, world: str, current: "Incarnation") -> None:
        self._transport = transport
        self._universe = universe
        self._world = world
        self._current = current

    def put(self, item: InboxItem) -> int:
        """Add an item at the end; its sequence. A payload over 4 KiB is stored as a blob."""
        payload = getattr(item, "payload", b"")
        if isinstance(payload, bytes) and len(payload) > INBOX_INLINE_BYTES_MAX and item.payload_blob is None:
            stored = self._transport.call(PutBlob(payload, self._universe, pinned=False))
            item = msgspec.structs.replace(item, payload=b"", payload_blob=stored.hash)
        request = PutItem(self._world, item, self._universe, self._current.number)
        sequence = (self._transport.call(request)).sequence
        assert sequence is not None
        return sequence

    def read(self, *, after: int | None = None, limit: int = 1_000) -> list[tuple[int, InboxItem]]:
        """At most `limit` items after the sequence `after`, including drained ones."""
        request = ReadInbox(self._world, after, limit, self._universe, self._current.number)
        return self._current.learn(self._transport.call(request)).items

    def cursor(self) -> int | None:
        """The sequence of the last drained item, or None."""
        return (self._transport.call(GetCursor(self._world, self._universe, self._current.number))).sequence


class Snapshots:
    """Snapshots of a world's state; one of them is the baseline that a restore starts from."""

    def __init__(self, transport: Transport, universe: str, world: str, current: "Incarnation") -> None:
        self._transport = transport
        self._universe = universe
        self._world = world
        self._current = current

    def commit(
        self,
        state: Any,
        *,
        height: int,
        promote: bool | None = None,
        receipt_horizon_height: int | None = None,
        manifest_hash: str | None = None,
        logical_time_ns: int | None = None,
    ) -> Snapshot:
        """Store the state after all records below `height`, and make it the baseline if it qualifies.

        It qualifies unless the baseline is already above that height, an effect below it is pending, or the given
        horizon or manifest is not the journal's at that height; `is_baseline` of the answer says so. With
        `promote=True` it must qualify, and with `promote=False` it is only stored. Repeating it changes nothing.

        Args:
            receipt_horizon_height: the height below which all receipts have arrived; inferred from pending effects.
            manifest_hash: the hash of the world's manifest at that height; inferred from the journal.
            logical_time_ns: the time of the state; the time of this commit if None.

        Raises:
            SnapshotExists: a different snapshot exists at that height.
            PromotionRefused: `promote=True`, and it does not qualify.
            BaselineRegressed: `promote=True`, and the baseline is already above that height.
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
            self._current.number,
        )
        return self._transport.call(request)

    def promote(self, height: int) -> Snapshot:
        """Make the stored snapshot at that height the baseline. Repeating it changes nothing.

        Raises:
            SnapshotNotFound: there is no snapshot at that height.
            PromotionRefused: it does not qualify; the message names the condition.
            BaselineRegressed: the baseline is already above that height.
        """
        return self._transport.call(PromoteSnapshot(self._world, height, self._universe, self._current.number))

    def baseline(self) -> Snapshot:
        """The snapshot that a restore starts from."""
        return self._transport.call(GetBaseline(self._world, self._universe, self._current.number))

    def list(self, *, start: int = 0, limit: int = 100) -> list[Snapshot]:
        """At most `limit` snapshots from the height `start` on, in order."""
        request = ListSnapshots(self._world, start, limit, self._universe, self._current.number)
        return self._current.learn(self._transport.call(request)).snapshots


class Incarnation:
    """The incarnation that the handles of a world work on, shared by them; None until an answer names it."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def learn(self, answer: Answer) -> Answer:
        """The answer, unchanged; the incarnation of the first one is remembered."""
        if self.number is None:
            self.number = answer.incarnation
        return answer


def _reducer_of(folding: Reducer | HostedProgram) -> Reducer:
    found: Any = folding
    reducer: Reducer = getattr(found, "reducer", found)
    return reducer


def _seen(folding: Reducer | HostedProgram, restored: Restored) -> Restored:
    """The result as the caller's program or reducer knows the state."""
    state_of = getattr(folding, "state_of", None)
    return restored if state_of is None else msgspec.structs.replace(restored, state=state_of(restored.state))
