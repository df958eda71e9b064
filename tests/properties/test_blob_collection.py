"""Puts, names, crashes and collections in any order: no named blob is deleted, and every other one is in the end.

Two nodes share the key space: on PostgreSQL two connections, elsewhere one database. What happens between the steps of
a collection or of a put happens at the other node.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import BlobNotFound, SnapshotExists
from fastness.kv import Database, Subspace
from fastness.layers import blobs, inboxes, journals, queues, snapshots, states, worlds
from fastness.layers.queues import QueueKey
from fastness.layers.worlds import World, WorldState
from fastness.limits import BLOB_ABANDONED_SECONDS, BLOB_INLINE_BYTES_MAX, BLOB_TOUCH_SECONDS
from fastness.runtime.maintenance.garbage_collection import collect
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, Faults, FaultyDatabase, faulty_objects
from fastness.wire.inboxes import DomainEvent
from fastness.wire.queues import MessageLease, NewMessage

U = "main"
OTHER = "other"  # A universe that has the same blobs, and names none.
JOBS = QueueKey(U, "jobs")
TIMED = QueueKey(U, "timed")  # Messages of schedules.
DEAD = QueueKey(U, "jobs.dlq")
GRACE_MS = 600_000
TOUCH_MS = BLOB_TOUCH_SECONDS * 1_000

# Two small contents, two large ones, and two that name the first of each.
_PLAIN = [b"small", b"x" * (BLOB_INLINE_BYTES_MAX + 1)]
_HASHES = [hashlib.sha256(data).hexdigest() for data in _PLAIN]
CONTENTS = [*_PLAIN, _HASHES[1].encode(), b"y" * BLOB_INLINE_BYTES_MAX + _HASHES[0].encode() + b"."]
HASHES = [hashlib.sha256(data).hexdigest() for data in CONTENTS]
LARGE = {1, 3}  # In the object store.
NAMED_BY = {2: {1}, 3: {0}}  # By the content of each.

contents = st.integers(0, len(CONTENTS) - 1)
places = st.sampled_from(("message", "schedule", "state", "pair", "inbox", "journal", "snapshot"))
checked_places = st.sampled_from(("message", "schedule", "inbox", "snapshot"))  # Remove the mark of the blob.
fail_at = st.none() | st.integers(0, 40)
steps = st.integers(0, 30)


class BlobCollection(RuleBasedStateMachine):
    """The model: which data names which content, and which contents are pinned."""

    openers: Iterator[Callable[..., Database]] = repeat(MemoryDatabase)
    has_two_nodes = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        opener = next(self.openers)
        self.database = opener(clock=self.clock)
        self.other_node = opener(clock=self.clock) if self.has_two_nodes else self.database
        self.database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
        self.objects = open_objects("memory:")
        self.worlds = 0
        self.forks = 0
        self.named = 0
        self.names: dict[tuple[str, Any], int] = {}  # Where a content is named.
        self.pinned: set[int] = set()
        self.world = World(U, "w0")
        self.database.transact(snapshots.create_world, self.world)

    # What names a blob.

    @rule(content=contents, place=places, pinned=st.booleans(), fail=fail_at)
    def put_and_name(self, content: int, place: str, pinned: bool, fail: int | None) -> None:
        if not self.put(content, pinned, fail):
            return
        self.name(content, place)

    @rule(content=contents, pinned=st.booleans(), fail=fail_at)
    def only_put(self, content: int, pinned: bool, fail: int | None) -> None:
        self.put(content, pinned, fail)

    @rule(content=contents)
    def put_in_another_universe(self, content: int) -> None:
        BlobStore(self.database, self.objects).put(OTHER, CONTENTS[content], pinned=False)

    @rule(content=contents, place=checked_places)
    def name_what_may_be_deleted(self, content: int, place: str) -> None:
        """A message, a schedule or an inbox item never names a blob that is not stored."""
        try:
            self.name(content, place)
        except BlobNotFound:
            assert content not in self.pinned | set(self.names.values())

    @rule()
    def fork_the_world(self) -> None:
        self.forks += 1
        target = World(U, f"f{self.forks}")
        self.world_store().fork(self.world, target, self.database.read(journals.head, self.world))
        for (place, key), content in list(self.names.items()):
            if place in ("journal", "snapshot") and key[0] == self.world.name:
                self.names[place, (target.name, key[1])] = content

    @rule()
    def compact_the_world(self) -> None:
        """Move the journal into segments."""
        store, head = self.world_store(), self.database.read(journals.head, self.world)
        if head:
            draft = snapshots.SnapshotRecord("", head, snapshots.NOW, None, None)
            store.snapshot(self.world, b"state %d" % head, draft, promote=True)
            store.compact(self.world, entries=1, margin=0)

    @rule(minutes=st.integers(1, 3))
    def fire_the_schedules(self, minutes: int) -> None:
        """Each schedule puts a message that names its blob too."""
        self.clock.advance_ms(minutes * 60_000)
        self.database.transact(queues.sweep, TIMED)
        for message in self.database.read(queues.peek, TIMED, limit=1_000):
            assert message.blob is not None
            self.names["timed", queues.format_id(message.id)] = HASHES.index(message.blob)

    # What stops to name it.

    @precondition(lambda self: any(place == "message" for place, _ in self.names))
    @rule()
    def acknowledge_a_message(self) -> None:
        self.settle(JOBS, "message", queues.ack)

    @precondition(lambda self: any(place == "timed" for place, _ in self.names))
    @rule()
    def acknowledge_a_message_of_a_schedule(self) -> None:
        self.settle(TIMED, "timed", queues.ack)

    @precondition(lambda self: any(place == "message" for place, _ in self.names))
    @rule()
    def make_a_dead_letter(self) -> None:
        """It names its blob as before."""
        id, content = self.settle(JOBS, "message", queues.reject)
        self.names["dead letter", id] = content

    @precondition(lambda self: any(place == "dead letter" for place, _ in self.names))
    @rule()
    def acknowledge_a_dead_letter(self) -> None:
        self.settle(DEAD, "dead letter", queues.ack)

    def settle(self, queue: QueueKey, place: str, how: Callable[..., object]) -> tuple[str, int]:
        (message,) = self.database.transact(queues.lease, queue, owner="ada", limit=1)
        id = queues.format_id(message.id)
        self.database.transact(how, queue, MessageLease(id, message.lease_id, message.fence))
        return id, self.names.pop((place, id))

    @precondition(lambda self: any(place == "schedule" for place, _ in self.names))
    @rule(data=st.data())
    def remove_a_schedule(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for place, key in self.names if place == "schedule")))
        assert self.database.transact(queues.remove_schedule, TIMED, key)
        del self.names["schedule", key]

    @precondition(lambda self: any(place == "pair" for place, _ in self.names))
    @rule(data=st.data())
    def remove_a_pair(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for place, key in self.names if place == "pair")))
        self.database.transact(lambda tx: tx.delete(key))
        del self.names["pair", key]

    @precondition(lambda self: any(place == "state" for place, _ in self.names))
    @rule(data=st.data())
    def remove_a_state(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for place, key in self.names if place == "state")))
        self.database.transact(states.remove, U, key)
        del self.names["state", key]

    @rule()
    def delete_the_world(self) -> None:
        self.database.transact(worlds.change_state, self.world, WorldState.ARCHIVED)
        self.world_store().delete(self.world)
        self.names = {
            (place, key): content
            for (place, key), content in self.names.items()
            if not (isinstance(key, tuple) and key[0] == self.world.name)
        }
        self.worlds += 1
        self.world = World(U, f"w{self.worlds}")
        self.database.transact(snapshots.create_world, self.world)

    @rule(content=contents, pinned=st.booleans())
    def pin_or_unpin(self, content: int, pinned: bool) -> None:
        try:
            self.database.transact(blobs.set_pinned, U, HASHES[content], pinned=pinned)
        except BlobNotFound:
            assert content not in self.pinned | set(self.names.values())
        else:
            (self.pinned.add if pinned else self.pinned.discard)(content)

    # Time and collections.

    @rule(ms=st.sampled_from((1, 1_000, TOUCH_MS, GRACE_MS, 2 * GRACE_MS)))
    def pass_time(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule(fail=fail_at)
    def collect(self, fail: int | None) -> None:
        """A collection, which may crash at any step."""
        with self.keeps_what_is_named(), suppress(Crash):
            self.collect_with(ChosenFault(fail))

    @rule(content=contents, place=places, step=steps, pinned=st.booleans())
    def put_during_a_collection(self, content: int, place: str, step: int, pinned: bool) -> None:
        """Another process puts and names a content between two steps of a collection."""

        def put_and_name() -> None:
            with self.at_the_other_node():
                assert self.put(content, pinned, None)
                self.name(content, place)

        between = CallAt(step, put_and_name)
        with self.keeps_what_is_named():
            self.collect_with(between)
        if between.is_called:
            assert self.is_readable(content)

    @rule(content=contents, place=checked_places, step=steps)
    def name_during_a_collection(self, content: int, place: str, step: int) -> None:
        """Another process names a content that is due, without another put, between two steps of a collection."""
        self.put_with(content, False, ChosenFault())
        self.collect_with(ChosenFault())
        self.clock.advance_ms(GRACE_MS + TOUCH_MS)

        def name() -> None:
            with suppress(BlobNotFound), self.at_the_other_node():
                self.name(content, place)

        with self.keeps_what_is_named():
            self.collect_with(CallAt(step, name))
        assert self.is_readable(content) or content not in self.names.values()

    @rule(content=contents, step=st.integers(0, 12), ms=st.sampled_from((0, GRACE_MS, GRACE_MS + TOUCH_MS)))
    def collect_during_a_put(self, content: int, step: int, ms: int) -> None:
        """Another process collects between two steps of a put, which may take long."""

        def collect() -> None:
            self.clock.advance_ms(ms)
            with self.at_the_other_node():
                self.collect_with(ChosenFault())

        with self.keeps_what_is_named():
            self.put_with(content, False, CallAt(step, collect))
        if self.is_readable(content):
            self.name(content, "state")
        else:
            assert ms, "a put counts for a grace period"

    @rule(step=steps)
    def collect_during_a_collection(self, step: int) -> None:
        """Two processes collect at once."""

        def collect() -> None:
            with self.at_the_other_node():
                self.collect_with(ChosenFault())

        with self.keeps_what_is_named():
            self.collect_with(CallAt(step, collect))

    @precondition(lambda self: any(place == "state" for place, _ in self.names))
    @rule(data=st.data())
    def name_again_after_a_collection(self, data: st.DataObject) -> None:
        """What was named when a search ran can be named again within the grace period, without another put."""
        self.collect_with(ChosenFault())
        content = data.draw(
            st.sampled_from(sorted(each for (place, _), each in self.names.items() if place == "state"))
        )
        for place, key in [named for named, each in self.names.items() if each == content and named[0] == "state"]:
            self.database.transact(states.remove, U, key)
            del self.names[place, key]
        self.collect_with(ChosenFault())
        self.clock.advance_ms(GRACE_MS - 1)
        self.name(content, "state")

    @contextmanager
    def at_the_other_node(self) -> Iterator[None]:
        self.database, self.other_node = self.other_node, self.database
        try:
            yield
        finally:
            self.database, self.other_node = self.other_node, self.database

    @invariant()
    def what_is_named_can_be_read(self) -> None:
        for content in self.pinned | set(self.names.values()):
            assert self.is_readable(content), content

    def collect_with(self, faults: Faults) -> None:
        done = collect(FaultyDatabase(self.database, faults), faulty_objects(self.objects, faults), grace_ms=GRACE_MS)
        assert done.unsearched == []

    @contextmanager
    def keeps_what_is_named(self) -> Iterator[None]:
        needed = [content for content in range(len(CONTENTS)) if self.is_kept(content) and self.is_readable(content)]
        yield
        assert all(self.is_readable(content) for content in needed)

    def teardown(self) -> None:
        """In the end, after the grace periods, only what is named is left."""
        for _ in range(4):
            self.clock.advance_ms(GRACE_MS + TOUCH_MS)
            self.collect_with(ChosenFault())
        self.clock.advance_ms(BLOB_ABANDONED_SECONDS * 1_000 + 1)
        self.collect_with(ChosenFault())
        for content in range(len(CONTENTS)):
            assert self.exists(content) == self.is_readable(content)
            if not self.is_kept(content):
                assert not self.exists(content)
        large = sum(self.exists(content) for content in LARGE)
        assert len(self.objects.list(blobs.folder(U))) == large
        if not any(place == "pair" for place, _ in self.names):  # It is outside of universes, and counts in all.
            assert self.database.read(lambda tx: tx.scan(*Subspace("u", OTHER, "cas").range(), limit=1)) == []
            assert self.objects.list(blobs.folder(OTHER)) == []
        for area in (blobs.UNREFERENCED, blobs.DELETED):
            assert self.database.read(lambda tx, area=area: tx.scan(*Subspace("u", U, area).range(), limit=1)) == []
        self.database.close()
        self.other_node.close()

    def put(self, content: int, pinned: bool, fail: int | None) -> bool:
        """Put a content; whether that did not crash."""
        try:
            self.put_with(content, pinned, ChosenFault(fail))
        except Crash:
            found = self.database.read(blobs.find, U, bytes.fromhex(HASHES[content]))
            if found is not None and found.pinned:
                self.pinned.add(content)
            return False
        if pinned:
            self.pinned.add(content)
        return True

    def put_with(self, content: int, pinned: bool, faults: Faults) -> None:
        store = BlobStore(FaultyDatabase(self.database, faults), faulty_objects(self.objects, faults))
        assert store.put(U, CONTENTS[content], pinned=pinned).hash == HASHES[content]

    def name(self, content: int, place: str) -> None:
        hash, transact = HASHES[content], self.database.transact
        self.named += 1
        if place == "message":
            new = NewMessage(b"", blob=hash, blob_size=len(CONTENTS[content]))
            (receipt,) = transact(queues.put, JOBS, [new])
            key: Any = receipt.id
        elif place == "schedule":
            key = f"every-{self.named % 8}"
            new = NewMessage(b"", blob=hash, blob_size=len(CONTENTS[content]))
            transact(queues.set_schedule, TIMED, key, cron="* * * * *", timezone="UTC", message=new)
        elif place == "pair":
            key = b"mine-%d" % self.named
            transact(lambda tx: tx.put(key, hash.upper().encode()))
        elif place == "state":
            key = f"s{self.named}"
            transact(states.update, U, key, b'{"report":"' + hash.encode() + b'"}')
        elif place == "inbox":
            key = (self.world.name, transact(inboxes.enqueue, self.world, DomainEvent(schema="s", payload_blob=hash)))
        elif place == "journal":
            key = (self.world.name, self.database.read(journals.head, self.world))
            transact(journals.append, self.world, [b"\x82\x00\x78\x40" + hash.encode()], expected_head=key[1])
        else:
            if not self.exists(content):  # It can be indexed, but keeps nothing.
                raise BlobNotFound("a snapshot without its bytes")
            key = (self.world.name, self.database.read(journals.head, self.world))
            draft = snapshots.SnapshotRecord(hash, key[1], snapshots.NOW, None, None)
            try:
                transact(snapshots.commit, self.world, draft, promote=False)
            except SnapshotExists:
                return
        self.names[place, key] = content

    def world_store(self) -> WorldStore:
        return WorldStore(self.database, self.objects, BlobStore(self.database, self.objects))

    # What must hold.

    def is_kept(self, content: int) -> bool:
        kept = self.pinned | set(self.names.values())
        while more := {each for holder in kept for each in NAMED_BY.get(holder, set()) if self.exists(holder)} - kept:
            kept |= more
        return content in kept

    def exists(self, content: int) -> bool:
        return self.database.read(blobs.find, U, bytes.fromhex(HASHES[content])) is not None

    def is_readable(self, content: int) -> bool:
        try:
            return BlobStore(self.database, self.objects).get(U, HASHES[content]).data == CONTENTS[content]
        except BlobNotFound:
            return False


class CallAt:
    """Calls a function at the point with this number, outside of transactions."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self._left = step
        self._call = call
        self.is_called = False

    def at(self, point: str) -> None:
        if point not in ("transact: commit", "put: tear") and not self.is_called:
            self._left -= 1
            if self._left < 0:
                self.is_called = True
                self._call()


@pytest.mark.examples(60)
def test_no_named_blob_is_deleted_and_every_other_one_is(run_machine: Callable[..., None]) -> None:
    run_machine(BlobCollection, steps=30)


@pytest.mark.examples(4)
def test_collections_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    openers = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(BlobCollection, steps=20, openers=openers)


@pytest.mark.examples(4)
def test_collections_of_two_nodes_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    openers = repeat(open_postgres)
    run_machine(BlobCollection, steps=20, openers=openers, has_two_nodes=True)
