"""Worlds: journals with snapshots, compaction, and restores that equal a full replay."""

import hashlib
import random
from typing import Any, Final

from fastness.demo.chapters.mail import AGENTS
from fastness.demo.context import DemoContext
from fastness.handles.sync.worlds import World
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.restores import Entry

_ENTRIES: Final = 3_000  # Per world.
_BATCH: Final = 250
_SNAPSHOT_EVERY: Final = 1_000
_SEGMENT_ENTRIES: Final = 512
_TOPICS: Final = ("billing", "delivery", "login", "returns")
_PAGE: Final = 1_000


def fold(state: dict[str, Any] | None, entry: Entry) -> dict[str, Any]:
    """The reducer of a world: counts topics, stars and events. It is pure, so it can be replayed."""
    current = state or {"topics": {}, "stars": 0, "events": 0}
    if entry.kind == "entry":
        topic = entry.value["topic"]
        topics = {**current["topics"], topic: current["topics"].get(topic, 0) + 1}
        return {**current, "topics": topics, "stars": current["stars"] + entry.value["stars"]}
    if entry.kind == "ingress":
        return {**current, "events": current["events"] + 1}
    return current


def run(context: DemoContext) -> None:
    output = context.output
    output.chapter("Worlds: journals, snapshots and restores")
    output.say(
        "An agent's memory is a journal. Its state is a fold over the journal, so any state can be recomputed from the "
        "first record. Snapshots make that fast, and compaction moves old records into files with checksums."
    )
    worlds = [context.plane.world(f"memory-of-{agent}") for agent in AGENTS]
    _append(context, worlds)
    before = [_journal_hash(world) for world in worlds]
    compacted = [world.compact(entries=_SEGMENT_ENTRIES) for world in worlds]
    moved = sum(each.records for each in compacted)
    output.claim(
        "compaction moved old records of every journal, and reads return the same records",
        moved > 0 and [_journal_hash(world) for world in worlds] == before,
        checked="hash over every record, before and after",
        figure=f"{moved:,} records in {sum(each.segments for each in compacted)} files",
    )
    restored = [world.restore(fold) for world in worlds]
    replayed = [world.replay(fold) for world in worlds]
    output.claim(
        "every restore equals a full replay, byte for byte",
        [canonical(each.state) for each in restored] == [canonical(each.state) for each in replayed]
        and all(world.verify(fold).agrees for world in worlds),
        checked="states as canonical bytes; every snapshot too",
        figure=f"{sum(each.folded for each in restored):,} records folded, not "
        f"{sum(each.folded for each in replayed):,}",
    )


def digests(context: DemoContext) -> dict[str, str]:
    """The state hash of each world, by a full replay through the server."""
    return {
        name: hashlib.sha256(canonical(context.plane.world(name).replay(fold).state)).hexdigest()
        for name in context.plane.worlds()
    }


def _append(context: DemoContext, worlds: list[World]) -> None:
    chance = random.Random(9_440)
    snapshots = 0
    with context.output.bar("agents append", len(worlds) * _ENTRIES) as done:
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
    # A journal also records each drained item, each snapshot and each baseline.
    expected = len(worlds) * (_ENTRIES + _ENTRIES // _BATCH) + 2 * snapshots
    context.output.claim(
        f"the journals of {len(worlds)} agents have every item exactly once",
        heads == expected and all(not world.drain() for world in worlds),
        checked="heads of the journals against the number of appends",
        figure=f"{heads:,} records, {snapshots} snapshots",
    )


def _snapshot(world: World) -> None:
    """Store the current state as the baseline that restores start from."""
    now = world.restore(fold)
    world.snapshots.commit(now.state, height=now.height, promote=True)


def _journal_hash(world: World) -> str:
    """A hash over all records of a world."""
    digest, height = hashlib.sha256(), 0
    while records := world.read(height, limit=_PAGE):
        for record in records:
            digest.update(b"%d %s " % (record.height, record.kind.encode()) + record.value)
        height = records[-1].height + 1
    return digest.hexdigest()
