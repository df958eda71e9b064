"""Worlds: append and replay, against a bare loop on the engine, and against the `eventsourcing` library on SQLite.

Events have about 100 bytes. "Synced" means that an append returns when its batch survives a power loss.
"""

import random
import tempfile
import threading
import time
import tracemalloc
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import cbor2
from eventsourcing.persistence import StoredEvent
from eventsourcing.sqlite import SQLiteAggregateRecorder, SQLiteDatastore
from rocksdict import Options, Rdict, WriteBatch

import fastness
from benches.comparison import compare, echo
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Transaction
from fastness.layers import inboxes, journal_records, journals, snapshots
from fastness.layers.worlds import World
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control

ADA = World("main", "ada")
BATCH = 256
EVENT = canonical({"type": "deposit", "account": "account-0000007", "amount": 12, "note": "x" * 48})
RECORD = journal_records.entry(EVENT)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        append_and_replay(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        many_worlds(Path(folder))
    for benchmark in (busy_worlds, export_under_appends, long_replay):
        with tempfile.TemporaryDirectory() as folder:
            benchmark(Path(folder))


def append_and_replay(folder: Path) -> None:
    bare = Rdict(str(folder / "bare"), Options(raw_mode=True))
    heights = count()

    def bare_append(batches: int) -> int:
        for _ in range(batches):
            batch = WriteBatch(raw_mode=True)
            for _ in range(BATCH):
                batch.put(b"journal/e/" + next(heights).to_bytes(8, "big"), RECORD)
            bare.write(batch)
            bare.flush_wal(True)
        return batches * BATCH

    database = RocksDatabase(folder / "layer")
    database.transact(snapshots.create_world, ADA)
    head = 0

    def layer_append(batches: int) -> int:
        nonlocal head
        for _ in range(batches):
            database.transact(journals.append, ADA, [RECORD] * BATCH, expected_head=head)
            head += BATCH
        return batches * BATCH

    plane = fastness.open(f"dir:{folder / 'plane'}")
    world = plane.world("ada")
    world.create()
    plane_head = 0
    event = cbor2.loads(EVENT)

    def handle_append(batches: int) -> int:
        nonlocal plane_head
        for _ in range(batches):
            world.append([event] * BATCH, expected_head=plane_head)
            plane_head += BATCH
        return batches * BATCH

    recorder = Recorder(folder / "events.sqlite")
    candidates: dict[str, Any] = {
        "bare rocksdict, a batch and a sync": lambda: bare_append(40),
        "journal layer": lambda: layer_append(40),
        "world.append, with canonical CBOR": lambda: handle_append(40),
    }
    candidates["eventsourcing on SQLite, recorder"] = lambda: recorder.append(40)
    compare(f"Append events of {len(RECORD)} bytes in batches of {BATCH}, every batch synced", candidates)

    def bare_replay() -> int:
        iterator = bare.iter()
        iterator.seek(b"journal/e/")
        total = 0
        for _ in range(head):
            total += cbor2.loads(iterator.value())[1]["amount"]
            iterator.next()
        return head

    def replay() -> int:
        return world.replay(lambda state, entry: (state or 0) + entry.value["amount"]).height

    candidates = {"bare iterator and CBOR": bare_replay, "world.replay with a trivial reducer": replay}
    candidates["eventsourcing on SQLite, recorder and CBOR"] = lambda: recorder.replay(decode=True)
    compare("Replay every event through a trivial reducer", candidates)

    def read_all() -> int:
        height = 0
        while page := database.read(journals.read_hot, ADA, height, 10_000):
            height += len(page)
        return height

    compare(
        "Read every event as it is stored, in order",
        {"eventsourcing on SQLite, recorder": lambda: recorder.replay(decode=False), "journal layer": read_all},
    )
    plane.close()
    database.close()


class Recorder:
    """The peer: `eventsourcing` on SQLite with a write-ahead log, which syncs every transaction."""

    def __init__(self, path: Path) -> None:
        self.recorder = SQLiteAggregateRecorder(SQLiteDatastore(str(path)))
        self.recorder.create_table()
        self.origin = uuid4()
        self.version = 0

    def append(self, batches: int) -> int:
        for _ in range(batches):
            first = self.version
            self.recorder.insert_events(
                [StoredEvent(self.origin, first + offset, "Deposited", EVENT) for offset in range(BATCH)]
            )
            self.version += BATCH
        return batches * BATCH

    def replay(self, *, decode: bool) -> int:
        total = 0
        for event in self.recorder.select_events(self.origin):
            total += cbor2.loads(event.state)["amount"] if decode else len(event.state)
        return self.version


def many_worlds(folder: Path) -> None:
    """The cost of an append in a database of ten worlds and of ten thousand."""
    databases = {size: RocksDatabase(folder / str(size)) for size in (10, 10_000)}
    for worlds, database in databases.items():
        for start in range(0, worlds, 100):
            database.transact(create_many, range(start, min(start + 100, worlds)))
        database.flush_tables()
    numbers = count()

    def touch(worlds: int) -> int:
        database = databases[worlds]
        for _ in range(300):
            database.transact(append_one, World("main", f"world-{next(numbers) * 7 % worlds}"))
        return 300

    compare("Append one entry to one of many worlds, synced", {
        f"{worlds:,} worlds": (lambda worlds=worlds: touch(worlds)) for worlds in databases
    })  # fmt: skip
    for database in databases.values():
        database.close()


def create_many(tx: Transaction, numbers: range) -> None:
    for number in numbers:
        snapshots.create_world(tx, World("main", f"world-{number}"))


def append_one(tx: Transaction, world: World) -> int:
    return journals.append(tx, world, [RECORD], expected_head=journals.head(tx, world))


def busy_worlds(folder: Path) -> None:
    """How long inbox items wait until they are drained, with a thousand active worlds."""
    database = RocksDatabase(folder / "kv")
    names = [World("main", f"world-{number}") for number in range(1_000)]
    for start in range(0, 1_000, 100):
        database.transact(create_many, range(start, start + 100))
    put_at: dict[tuple[World, int], float] = {}
    waits: dict[World, list[float]] = {world: [] for world in names}
    done = threading.Event()

    def ingest() -> None:
        chance = random.Random(1)
        for _ in range(20_000):
            world = chance.choice(names)
            started = time.perf_counter()
            sequence = database.transact(inboxes.enqueue, world, Control(command="go"), tier=fastness.Tier.IMPORTANT)
            put_at[world, sequence] = started
        done.set()

    writer = threading.Thread(target=ingest)
    writer.start()
    finished = False
    while not finished:
        finished = done.is_set()
        for world in names:
            before = database.read(inboxes.cursor, world, tier=fastness.Tier.IMPORTANT)
            heights = database.transact(inboxes.drain, world, tier=fastness.Tier.IMPORTANT)
            now = time.perf_counter()
            first = 0 if before is None else before + 1
            waits[world] += [now - put_at.get((world, first + n), now) for n in range(len(heights))]
    writer.join()
    worst = sorted(max(times) for times in waits.values() if times)
    echo(
        f"1,000 active worlds, {sum(map(len, waits.values())):,} items: the longest wait of a world is "
        f"{worst[len(worst) // 2] * 1e3:.0f} ms in the median and {worst[-1] * 1e3:.0f} ms at most "
        f"({worst[-1] / worst[len(worst) // 2]:.1f} times)."
    )
    database.close()


def export_under_appends(folder: Path) -> None:
    """The latency of appends while another world is compacted."""
    with fastness.open(f"dir:{folder}") as plane:
        cold = plane.world("cold")
        cold.create()
        for head in range(0, 200_000, BATCH):
            cold.append([1] * BATCH, expected_head=head, tier=fastness.Tier.IMPORTANT)
        height = cold.head()
        cold.snapshots.commit(1, height=height, promote=True)
        hot = plane.world("hot")
        hot.create()
        head = 0

        def appends(until: threading.Event | None) -> list[float]:
            nonlocal head
            times: list[float] = []
            while len(times) < 20_000 and not (until is not None and until.is_set()):
                started = time.perf_counter()
                hot.append([head], expected_head=head)
                times.append(time.perf_counter() - started)
                head += 1
            return sorted(times)

        appends(None)
        quiet = appends(None)
        done = threading.Event()

        def compact() -> None:
            cold.compact()
            done.set()

        compactor = threading.Thread(target=compact)
        compactor.start()
        busy = appends(done)
        compactor.join()
        p99 = [times[len(times) * 99 // 100] * 1e3 for times in (quiet, busy)]
        echo(
            f"Append p99 {p99[0]:.2f} ms, and {p99[1]:.2f} ms during an export of {len(cold.segments(limit=1_000))} "
            f"segments, {len(busy)} appends ({p99[1] / p99[0]:.1f} times)."
        )


def long_replay(folder: Path) -> None:
    """The memory used while a million entries are replayed."""
    with fastness.open(f"dir:{folder}") as plane:
        world = plane.world("ada")
        world.create()
        small = [1] * BATCH
        for head in range(0, 1_000_000, BATCH):
            world.append(small, expected_head=head, tier=fastness.Tier.IMPORTANT)
        peaks = []
        for end in (100_000, 1_000_000):
            tracemalloc.start()
            height, total = 0, 0
            while height < end:
                page = world.read(height, limit=10_000)
                total += sum(cbor2.loads(record.value) for record in page)
                height = page[-1].height + 1
            peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
            tracemalloc.stop()
        echo(f"Memory at most while replaying 100,000 entries {peaks[0]:.1f} MB, 1,000,000 entries {peaks[1]:.1f} MB.")


if __name__ == "__main__":
    main()
