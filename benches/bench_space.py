"""Collections of unreferenced blobs: what they free, and the processor time of each."""

import tempfile
import time
from pathlib import Path

import fastness
from benches.comparison import echo
from fastness import Plane
from fastness.kv import Transaction
from fastness.limits import BLOB_TOUCH_SECONDS, GC_GRACE_SECONDS
from fastness.testing.clock import ManualClock

MESSAGES = 10_000
PAYLOAD_BYTES = 20_480
KEYS = 100_000
BATCH = 100


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        free_payloads(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        search_keys(Path(folder))


def free_payloads(folder: Path) -> None:
    """Put and acknowledge messages whose payloads are blobs, then collect after each grace period."""
    clock = ManualClock()
    with fastness.open(f"dir:{folder}", clock=clock) as plane:
        jobs = plane.queue("jobs")
        for number in range(MESSAGES):
            jobs.put(number.to_bytes(8, "big") + bytes(PAYLOAD_BYTES - 8))
        for _ in range(MESSAGES // BATCH):
            jobs.ack_many(jobs.receive_many(BATCH, extend_for_seconds=0))
        for step in ("mark", "delete the records", "delete the bodies"):
            started = time.process_time()
            plane.gc()
            seconds = time.process_time() - started
            echo(f"{step}: {seconds:.2f} s of processor time; {size_of_objects(folder):,} bytes in the object store")
            clock.advance_ms(round(GC_GRACE_SECONDS + BLOB_TOUCH_SECONDS) * 1_000)


def search_keys(folder: Path) -> None:
    with fastness.open(f"dir:{folder}") as plane:
        plane.blobs.put(bytes(PAYLOAD_BYTES), pinned=False)
        fill(plane)
        started = time.process_time()
        plane.gc(dry_run=True)
        echo(f"search {KEYS:,} keys: {time.process_time() - started:.2f} s of processor time")


def fill(plane: Plane) -> None:
    def put(tx: Transaction, first: int) -> None:
        for number in range(first, first + BATCH):
            tx.put(b"pair-%08d" % number, b"v" * 200)

    for first in range(0, KEYS, BATCH):
        plane.transact(put, first)


def size_of_objects(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "objects").rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
