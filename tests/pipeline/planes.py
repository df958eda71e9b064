"""Builds planes in a data directory with all the data that the pipeline reads, and damages them.

    built = planes.build(tmp_path / "data", worlds=5, entries=300)

Snapshots hold the state that `fastness.pipeline.replays:chain` folds the records into, so an audit of an undamaged
plane with that reducer has no findings.
"""

import atexit
import contextlib
import functools
import hashlib
import itertools
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import fastness
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import FastnessError
from fastness.kv import Transaction
from fastness.layers import blobs, journal_records, journals, segments, snapshots, worlds
from fastness.layers.blobs import Blob
from fastness.layers.journal_records import Kind
from fastness.layers.worlds import World
from fastness.pipeline import replays
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.mail import NewMail
from fastness.wire.queues import AckMessages, MessageLease, NackMessages, QueuePolicy
from fastness.wire.worlds import Segment

T = TypeVar("T")
CHAIN = "fastness.pipeline.replays:chain"
SEGMENT = 64
MARGIN = 8
_DAY_MS = 86_400_000
# Midnight of the day before: opened with a real clock, the plane's dead letters are not too old.
START_MS = (int(time.time() * 1_000) // _DAY_MS - 1) * _DAY_MS
BATCH = 256
ERRORS = ("timeout after 30 s", "connection refused by 10.0.0.7:5432", "KeyError: 'order'")


class Built(msgspec.Struct, frozen=True):
    """The content of a plane."""

    path: str
    url: str
    universe: str
    worlds: list[str]
    entries: int  # Journal records of all worlds.
    messages: int
    mails: int
    activity: int  # Records logged by `build` itself; queue and mail events come on top.


def build(
    path: Path,
    *,
    worlds: int = 3,
    entries: int = 300,
    segment: int = SEGMENT,
    margin: int = MARGIN,
    messages: int = 0,
    mails: int = 0,
    entities: int = 0,
    activity: int = 0,
    universe: str = "main",
    seed: int = 1,
    url: str | None = None,
    objects: str | None = None,
) -> Built:
    """Build a plane in `path` (or at `url`) and close it.

    `entries` is the approximate number of records per world. The first world has only hot records, the others have most
    of them in segments of `segment` records; one more world, `empty`, has none.
    """
    url = url or f"dir:{path}"
    clock = ManualClock(START_MS)
    dice = random.Random(seed)
    names = [f"world-{n:04}" for n in range(worlds)]
    with opened(url, universe=universe, objects=objects, clock=clock) as plane:
        store = open_objects(objects or f"dir:{path / 'objects'}")
        plane.world("empty").create()
        for n, name in enumerate(names):
            grow(plane, store, name, entries=entries, segment=segment if n else 0, margin=margin, dice=dice)
        if messages:
            fill_queues(plane, clock, messages, dice)
        if mails:
            fill_mailboxes(plane, clock, mails, dice)
        if entities:
            fill_entities(plane, clock, entities, dice)
        for n in range(activity):
            clock.advance_ms(dice.randrange(2_000))
            plane.activity.log(f"session-{n % 3}", {"step": n, "cost": dice.random()}, kind="metrics")
        heads = sum(plane.world(name).head() for name in names)
    return Built(str(path), url, universe, names, heads, messages, mails, activity)


def copy(path: Path, **options: Any) -> Built:
    """A plane as `build` makes it with these options, copied from one that this process builds once.

    All copies are the same plane, with one identity: for two planes in one lake, build one of them.
    """
    template = _template(tuple(sorted(options.items())))
    shutil.copytree(template.path, path)
    return msgspec.structs.replace(template, path=str(path), url=f"dir:{path}")


@functools.cache
def _template(options: tuple[tuple[str, Any], ...]) -> Built:
    folder = Path(tempfile.mkdtemp(prefix="fastness-plane-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder / "data", **dict(options))


@contextlib.contextmanager
def opened(url: str, **options: Any) -> Iterator[fastness.Plane]:
    """Open the plane for changes by a test, without waiting for syncs."""
    with fastness.open(url, **options) as plane:
        yield plane


def extend(path: Path, names: list[str], entries: int, *, universe: str = "main", seed: int = 2) -> int:
    """Append entries to each of the worlds; returns the total number."""
    dice = random.Random(seed)
    with opened(f"dir:{path}", universe=universe, clock=ManualClock(START_MS + _DAY_MS)) as plane:
        for name in names:
            _append(plane, name, entries, dice)
    return entries * len(names)


def truth(path: Path, *, universe: str = "main") -> dict[str, list[bytes]]:
    """Every record of every world, read from the plane."""
    found: dict[str, list[bytes]] = {}
    with opened(f"dir:{path}", universe=universe) as plane:
        after = ""
        while page := plane.worlds(after=after):
            for name in page:
                found[name] = _records(plane, name)
            after = page[-1]
    return found


def digest(rows: dict[str, list[bytes]]) -> str:
    """A digest of journals, independent of the order of worlds."""
    sha = hashlib.sha256()
    for name in sorted(rows):
        for height, record in enumerate(rows[name]):
            sha.update(f"{name}/{height}/{hashlib.sha256(record).hexdigest()}\n".encode())
    return sha.hexdigest()


def grow(
    plane: fastness.Plane,
    store: ObjectStore,
    name: str,
    *,
    entries: int,
    segment: int,
    margin: int,
    dice: random.Random,
    baseline: Any = None,
) -> None:
    """Create a world with about `entries` records, a baseline at three quarters, and segments unless `segment` is 0.

    `baseline` replaces the state of the baseline: then it contradicts the journal.
    """
    world = plane.world(name)
    world.create()
    _append(plane, name, entries // 3, dice)
    for n in range(3):
        world.inbox.put(DomainEvent(schema="order.placed", payload=b"%d" % n))
    world.drain()
    world.set_manifest(hashlib.sha256(name.encode()).hexdigest(), expected_head=world.head())
    _append(plane, name, max(entries - entries // 3 - 6, 0), dice)
    height = world.head() * 3 // 4
    state = replays.replay(_records(plane, name)[:height], replays.chain)
    early = replays.replay(_records(plane, name)[: height // 2], replays.chain)
    world.snapshots.commit(early, height=height // 2, promote=False)
    world.snapshots.commit(state if baseline is None else baseline, height=height, promote=True)
    if segment:
        cut(plane, store, name, segment=segment, margin=margin)


def cut(plane: fastness.Plane, store: ObjectStore, name: str, *, segment: int, margin: int) -> int:
    """Move records below the baseline into segments, like a compaction without pauses; returns their number."""
    world, count = World(_universe(plane), name), 0
    while span := plane.transact(segments.next_range, world, entries=segment, margin=margin):
        start, end = span
        _, hot = plane.transact(journals.next_run, world, start, end + 1, segment)
        data = b"".join(segments.body(hot))
        path = segments.object_path(world, start, end)
        store.put(path, data)
        record = Segment(start, end, path, segments.checksum(data), len(data))
        plane.transact(segments.index, world, record, margin=margin)
        while not plane.transact(segments.trim, world, segment):
            pass
        count += 1
    return count


def fill_queues(plane: fastness.Plane, clock: ManualClock, messages: int, dice: random.Random) -> None:
    """Two queues with acknowledged, failed, dead, expired, leased and waiting messages."""
    for name in ("orders", "emails"):
        plane.queue(name).set_policy(QueuePolicy(max_attempts=2, visibility_seconds=30.0))
    left, names = messages - 1, itertools.cycle(("orders", "emails"))
    while left > 0:
        queue = plane.queue(next(names))
        count = min(left, BATCH)
        bodies = [{"n": left - n, "note": "x" * dice.randrange(50)} for n in range(count)]
        queue.put_many(bodies, tier=fastness.Tier.IMPORTANT)
        left -= count
        clock.advance_ms(dice.randrange(1, 5_000))
        taken = queue.receive_many(max(count - count // 8, 1), tier=fastness.Tier.IMPORTANT)
        for n in range(0, len(taken), 16):
            clock.advance_ms(dice.randrange(1_000))
            fates = [dice.randrange(10) for _ in taken[n : n + 16]]
            done = [message.lease for message, fate in zip(taken[n:], fates, strict=False) if fate < 7]
            failed = [message.lease for message, fate in zip(taken[n:], fates, strict=False) if 7 <= fate < 9]
            _settle(plane, AckMessages(queue.name, done, _universe(plane), tier=fastness.Tier.IMPORTANT))
            _fail(plane, queue.name, failed, dice.choice(ERRORS))
        clock.advance_ms(31_000)  # The other leases expire, which counts as a failure too.
        _fail(plane, queue.name, [message.lease for message in queue.receive_many(count // 8 + 1)], dice.choice(ERRORS))
    plane.queue("orders").put(b"z" * 20_000, attributes={"large": "yes"})


def fill_mailboxes(plane: fastness.Plane, clock: ManualClock, mails: int, dice: random.Random) -> None:
    """Five agents that exchange mail; most of it is confirmed."""
    agents = [f"agent-{n}" for n in range(5)]
    sent = 0
    while sent < mails:
        sender, to = dice.sample(agents, 2)
        count = min(mails - sent, 20)
        plane.mailbox(sender).send_many([NewMail(to, b"hello %d" % (sent + n)) for n in range(count)])
        sent += count
        clock.advance_ms(dice.randrange(1, 10_000))
        box = plane.mailbox(to)
        read = box.read(limit=50)
        clock.advance_ms(dice.randrange(1, 1_000))
        if read and dice.random() < 0.8:
            box.confirm(read[: len(read) * 3 // 4 + 1])


def fill_entities(plane: fastness.Plane, clock: ManualClock, entities: int, dice: random.Random) -> None:
    """Orders with a few changes each, and some that were deleted."""
    for n in range(entities):
        for version in range(dice.randrange(1, 4)):
            clock.advance_ms(dice.randrange(1_000))
            plane.entities.write("order", f"o-{n}", {"total": n, "version": version, "paid": dice.random() < 0.5})
        if n % 5 == 4:
            plane.entities.delete("order", f"o-{n}")


def segment_files(path: Path, world: str, *, universe: str = "main") -> list[Path]:
    """The files of a world's segments, in order."""
    folder = path / "objects" / "segments" / universe / world
    return sorted(folder.glob("*.log"), key=lambda file: int(file.name.partition("-")[0]))


def flip_byte(path: Path, world: str, n: int = 0, *, at: int = 40) -> tuple[int, int]:
    """Damage the n-th segment of a world; returns its heights, inclusive."""
    file = segment_files(path, world)[n]
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 0x01
    file.write_bytes(data)
    return _span(file)


def remove_segment(path: Path, world: str, n: int = 0) -> tuple[int, int]:
    """Delete the n-th segment of a world; returns its heights, inclusive."""
    file = segment_files(path, world)[n]
    file.unlink()
    return _span(file)


def append_unknown(path: Path, world: str, *, universe: str = "main", kind: int = 9) -> int:
    """Append a record of an unknown kind; returns its height."""
    return _work(path, universe, lambda tx: _append_raw(tx, World(universe, world), bytes((0x82, kind, 0x61, 0x3F))))


def remove_record(path: Path, world: str, height: int, *, universe: str = "main") -> None:
    """Delete one hot record."""

    def lose(tx: Transaction) -> None:
        key = worlds.subspace(World(universe, world)).key("journal", "e") + height.to_bytes(8, "big")
        assert tx.get(key) is not None
        tx.delete(key)

    _work(path, universe, lose)


def plant_baseline(path: Path, world: str, state: Any, *, universe: str = "main") -> int:
    """Replace the state of a world's baseline and of its snapshot; returns its height."""

    def plant(tx: Transaction) -> int:
        where = World(universe, world)
        data = canonical(state)
        digest = hashlib.sha256(data).digest()
        blobs.record(tx, universe, digest, Blob(len(data), data))
        record = msgspec.structs.replace(snapshots.baseline(tx, where), snapshot_ref=digest.hex())
        encoded = msgspec.msgpack.encode(record)
        tx.put(worlds.subspace(where).key("snapshot", record.height), encoded)
        tx.put(worlds.subspace(where).key("baseline"), encoded)
        return record.height

    return _work(path, universe, plant)


def leave_log(
    path: Path,
    lines: int = 5,
    *,
    universe: str = "main",
    session: str = "crashed",
    kind: str = "metrics",
    garbled: int | None = None,
    torn: bool = False,
) -> Path:
    """Write a session log as a killed process leaves it; returns the file. A plane rotates its own logs when it closes.

    One line may be malformed, and the last one may be torn.
    """
    header = Header(universe, session, kind, START_MS, str(uuid.uuid4()))
    data = log_format.header_line(header)
    for n in range(lines):
        line = log_format.line(n, START_MS + n, b'{"step":%d}' % n)
        data += line.replace(b":", b"#") if n == garbled else line
    file = path / "activity" / universe / log_format.file_name(header)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data[:-4] if torn else data)
    return file


def _fail(plane: fastness.Plane, queue: str, leases: list[MessageLease], error: str) -> None:
    _settle(
        plane,
        NackMessages(queue, leases, 0.0, "failure", error, _universe(plane), tier=fastness.Tier.IMPORTANT),
    )


def _settle(plane: fastness.Plane, request: AckMessages | NackMessages) -> None:
    if request.leases:
        plane.queue(request.queue)._transport.call(request)


def _append(plane: fastness.Plane, name: str, entries: int, dice: random.Random) -> None:
    world = plane.world(name)
    head = world.head()
    while entries > 0:
        count = min(entries, BATCH)
        world.append([_entry(head + n, dice) for n in range(count)], expected_head=head, tier=fastness.Tier.IMPORTANT)
        head += count
        entries -= count


def _entry(height: int, dice: random.Random) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": dice.choice(("move", "say", "buy")), "n": height, "cost": dice.random()}
    if height % 10 == 0:
        entry["token"] = dice.randbytes(8)
    return entry


def _records(plane: fastness.Plane, name: str) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(FastnessError):  # A damaged world is read up to the damage.
        while page := plane.world(name).read(len(found), limit=1_000):
            found += [journal_records.join(Kind[record.kind.upper()], record.value) for record in page]
    return found


def _append_raw(tx: Transaction, world: World, record: bytes) -> int:
    return journals.append(tx, world, [record], expected_head=journals.head(tx, world))


def _work(path: Path, universe: str, work: Callable[[Transaction], T]) -> T:
    with opened(f"dir:{path}", universe=universe) as plane:
        return plane.transact(work)


def _span(file: Path) -> tuple[int, int]:
    start, _, end = file.stem.partition("-")
    return int(start), int(end)


def _universe(plane: fastness.Plane) -> str:
    return plane.world("any")._universe
