"""Puts, names, crashes and collections in any order: no named blob is deleted, and every other one is in the end."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.objects import open_objects
from holdfast.errors import BlobNotFound
from holdfast.kv import Database
from holdfast.layers import blobs, inboxes, journals, queues, snapshots, states, worlds
from holdfast.layers.queues import QueueKey
from holdfast.layers.worlds import World, WorldState
from holdfast.limits import BLOB_ABANDONED_SECONDS, BLOB_INLINE_BYTES_MAX, BLOB_TOUCH_SECONDS
from holdfast.runtime.maintenance.garbage_collection import collect
from holdfast.runtime.sync.blobs import BlobStore
from holdfast.runtime.sync.worlds import WorldStore
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import ChosenFault, Crash, Faults, FaultyDatabase, faulty_objects
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.queues import MessageLease, NewMessage

U = "main"
JOBS = QueueKey(U, "jobs")
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
places = st.sampled_from(("message", "state", "inbox", "journal", "snapshot"))
fail_at = st.none() | st.integers(0, 24)


class BlobCollection(RuleBasedStateMachine):
    """The model: which data names which content, and which contents are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.database: Database = MemoryDatabase(clock=self.clock)
        self.objects = open_objects("memory:")
        self.worlds = 0
        self.forks = 0
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

    @rule(content=contents, place=st.sampled_from(("message", "inbox")))
    def name_what_may_be_deleted(self, content: int, place: str) -> None:
        """A message or an inbox item never names a blob that is not stored."""
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

    # What stops to name it.

    @precondition(lambda self: any(place == "message" for place, _ in self.names))
    @rule()
    def acknowledge_a_message(self) -> None:
        (message,) = self.database.transact(queues.lease, JOBS, owner="ada", limit=1)
        lease = MessageLease(queues.format_id(message.id), message.lease_id, message.fence)
        self.database.transact(queues.ack, JOBS, lease)
        del self.names["message", queues.format_id(message.id)]

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

    @rule(content=contents, place=places, step=st.integers(0, 12), pinned=st.booleans())
    def put_during_a_collection(self, content: int, place: str, step: int, pinned: bool) -> None:
        """Another process puts and names a content between two steps of a collection."""

        def put_and_name() -> None:
            assert self.put(content, pinned, None)
            self.name(content, place)

        between = CallAt(step, put_and_name)
        with self.keeps_what_is_named():
            self.collect_with(between)
        if between.is_called:
            assert self.is_readable(content)

    @rule(content=contents, place=st.sampled_from(("message", "inbox")), step=st.integers(0, 12))
    def name_during_a_collection(self, content: int, place: str, step: int) -> None:
        """Another process names a content that is due, without another put, between two steps of a collection."""
        self.put_with(content, False, ChosenFault())
        self.collect_with(ChosenFault())
        self.clock.advance_ms(GRACE_MS + TOUCH_MS)

        def name() -> None:
            with suppress(BlobNotFound):
                self.name(content, place)

        with self.keeps_what_is_named():
            self.collect_with(CallAt(step, name))
        assert self.is_readable(content) or content not in self.names.values()

    @rule(content=contents, step=st.integers(0, 12))
    def collect_during_a_put(self, content: int, step: int) -> None:
        """Another process collects between two steps of a put."""
        with self.keeps_what_is_named():
            self.put_with(content, False, CallAt(step, lambda: self.collect_with(ChosenFault())))
        self.name(content, "state")
        assert self.is_readable(content)

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
        large = sum(self.exists(content) for content in range(len(CONTENTS)) if content in LARGE)
        assert len(self.objects.list("cas")) == large

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
        if place == "message":
            new = NewMessage(b"", blob=hash, blob_size=len(CONTENTS[content]))
            (receipt,) = transact(queues.put, JOBS, [new])
            key: Any = receipt.id
        elif place == "state":
            key = f"s{len(self.names)}"
            transact(states.update, U, key, b'{"report":"' + hash.encode() + b'"}')
        elif place == "inbox":
            key = (self.world.name, transact(inboxes.enqueue, self.world, DomainEvent(schema="s", payload_blob=hash)))
        elif place == "journal":
            key = (self.world.name, self.database.read(journals.head, self.world))
            transact(journals.append, self.world, [b"\x82\x00\x78\x40" + hash.encode()], expected_head=key[1])
        else:
            key = (self.world.name, self.database.read(journals.head, self.world))
            draft = snapshots.SnapshotRecord(hash, key[1], snapshots.NOW, None, None)
            try:
                transact(snapshots.commit, self.world, draft, promote=False)
            except Exception:
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
