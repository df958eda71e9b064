"""Worlds: agents with a history that snapshots, compacts, and restores to the byte."""

import hashlib
import random
from typing import Any, Final

from holdfast.demo.chapters.mail import AGENTS
from holdfast.demo.context import DemoContext
from holdfast.handles.sync.worlds import World
from holdfast.layers.snapshots import NO_MANIFEST
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.restores import Entry

_ENTRIES: Final = 3_000  # Of each world.
_BATCH: Final = 250
_SNAPSHOT_EVERY: Final = 1_000
_SEGMENT_ENTRIES: Final = 512
_TOPICS: Final = ("billing", "delivery", "login", "returns")
_PAGE: Final = 1_000


def fold(state: dict[str, Any] | None, entry: Entry) -> dict[str, Any]:
    """What an agent remembers: which topics came up, and what customers gave. Pure, so that it can be replayed."""
    known = state or {"topics": {}, "stars": 0, "told": 0}
    if entry.kind == "entry":
        topic = entry.value["topic"]
        topics = {**known["topics"], topic: known["topics"].get(topic, 0) + 1}
        return {**known, "topics": topics, "stars": known["stars"] + entry.value["stars"]}
    if entry.kind == "ingress":
        return {**known, "told": known["told"] + 1}
    return known


def tell(night: DemoContext) -> None:
    stage = night.stage
    stage.chapter("Agents with a memory")
    stage.say(
        "An agent's memory is a journal, and its state is the fold of it, so any state can be computed again from the "
        "first record. A snapshot now and then makes that quick, and compaction moves what is cold into files, each "
        "with a checksum."
    )
    worlds = [night.plane.world(f"memory-of-{agent}") for agent in AGENTS]
    _live(night, worlds)
    before = [_read(world) for world in worlds]
    compacted = [world.compact(entries=_SEGMENT_ENTRIES) for world in worlds]
    moved = sum(each.records for each in compacted)
    stage.claim(
        "compaction moved the cold part of every journal, and reading did not change",
        moved > 0 and [_read(world) for world in worlds] == before,
        checked="hash over every record, before and after",
        figure=f"{moved:,} records in {sum(each.segments for each in compacted)} files",
    )
    restored = [world.restore(fold) for world in worlds]
    replayed = [world.replay(fold) for world in worlds]
    folded = sum(world.head() - world.snapshots.baseline().height for world in worlds)
    stage.claim(
        "every restore equals a full replay, byte for byte",
        [canonical(each.state) for each in restored] == [canonical(each.state) for each in replayed]
        and all(world.verify(fold).agrees for world in worlds),
        checked="states as canonical bytes; every snapshot, too",
        figure=f"{folded:,} folded, not {sum(each.height for each in replayed):,}",
    )


def digests(night: DemoContext) -> dict[str, str]:
    """The hash of the state that each world has, by a full replay through the server."""
    return {
        name: hashlib.sha256(canonical(night.plane.world(name).replay(fold).state)).hexdigest()
        for name in night.plane.worlds()
    }


def _live(night: DemoContext, worlds: list[World]) -> None:
    chance = random.Random(9_440)
    snapshots = 0
    with night.stage.bar("agents remember", len(worlds) * _ENTRIES) as done:
        for n, world in enumerate(worlds):
            world.create()
            head = 0
            for entries in range(_BATCH, _ENTRIES + 1, _BATCH):
                batch = [{"topic": chance.choice(_TOPICS), "stars": chance.randint(1, 5)} for _ in range(_BATCH)]
                world.append(batch, expected_head=head)
                world.inbox.put(DomainEvent(schema="shift@1", payload=b"an hour has passed"))
                world.drain()
                if entries % _SNAPSHOT_EVERY == 0 and entries < _ENTRIES:
                    _snapshot(world)
                    snapshots += 1
                head = world.head()
                done(n * _ENTRIES + entries)
    heads = sum(world.head() for world in worlds)
    # Beside what it appended a world notes each item that it drained, each snapshot and each baseline.
    expected = len(worlds) * (_ENTRIES + _ENTRIES // _BATCH) + 2 * snapshots
    night.stage.claim(
        f"{len(worlds)} agents remember everything, item by item and once",
        heads == expected and all(not world.drain() for world in worlds),
        checked="heads of the journals against what was appended",
        figure=f"{heads:,} records, {snapshots} snapshots",
    )


def _snapshot(world: World) -> None:
    """Keep the state as it is now, and let restores start from it."""
    now = world.restore(fold)
    world.snapshots.commit(
        now.state, height=now.height, promote=True, receipt_horizon_height=now.height, manifest_hash=NO_MANIFEST
    )


def _read(world: World) -> str:
    """A hash over every record."""
    hashed, height = hashlib.sha256(), 0
    while records := world.read(height, limit=_PAGE):
        for record in records:
            hashed.update(b"%d %s " % (record.height, record.kind.encode()) + record.value)
        height = records[-1].height + 1
    return hashed.hexdigest()
