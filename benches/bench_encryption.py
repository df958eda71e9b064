"""What encryption at rest costs: the same work on a plane whose universe is encrypted, and on one where it is not.

Messages are put, received and acked in batches, and blobs are written and read. The two planes take turns in one
process, in /dev/shm, where the disk does not hide the difference. The time is that of the processor.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fastness
from fastness import FileKeys, Plane
from fastness.encryption_keys import new_master_key

_BATCH = 100
_BLOB_BYTES = 8 << 20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--messages", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--json", type=Path, help="also write the figures to this file")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        keys = folder / "keys"
        keys.write_text(new_master_key("bench"))
        keys.chmod(0o600)
        plain = fastness.open(f"dir:{folder / 'plain'}")
        encrypted = fastness.open(f"dir:{folder / 'encrypted'}", encryption=FileKeys(keys))
        with plain, encrypted:
            encrypted.encryption.enable("main")
            works: dict[str, Callable[[Plane], int]] = {
                f"messages of {size:,} bytes, in batches of {_BATCH}": _messages(given.messages, size)
                for size in (100, 1_000, 10_000)
            }
            works[f"blobs of {_BLOB_BYTES >> 20} MiB, written and read"] = _blobs
            lines = [_measure(title, work, plain, encrypted, given.rounds) for title, work in works.items()]
    for line in lines:
        print("{work}: {encrypted_us:.1f} µs encrypted, {plain_us:.1f} µs plain, {ratio:.2f} times".format(**line))
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=2))


def _measure(
    title: str, work: Callable[[Plane], int], plain: Plane, encrypted: Plane, rounds: int
) -> dict[str, str | float]:
    """The median processor time of one message or blob on each plane."""
    seconds: dict[str, list[float]] = {"plain": [], "encrypted": []}
    for _ in range(rounds + 1):
        for name, plane in (("plain", plain), ("encrypted", encrypted)):
            began = time.process_time()
            count = work(plane)
            seconds[name].append((time.process_time() - began) / count)
    medians = {name: statistics.median(found[1:]) * 1e6 for name, found in seconds.items()}  # The first is a warm-up.
    return {
        "work": title,
        "plain_us": medians["plain"],
        "encrypted_us": medians["encrypted"],
        "ratio": medians["encrypted"] / medians["plain"],
    }


def _messages(count: int, size: int) -> Callable[[Plane], int]:
    payloads = [os.urandom(size) for _ in range(_BATCH)]

    def work(plane: Plane) -> int:
        queue = plane.queue("bench")
        for _ in range(count // _BATCH):
            queue.put_many(payloads)
        done = 0
        while found := queue.receive_many(_BATCH):
            queue.ack_many(found)
            done += len(found)
        return done

    return work


def _blobs(plane: Plane) -> int:
    content = os.urandom(_BLOB_BYTES)
    assert plane.blobs.get(plane.blobs.put(content)) == content
    return 1


if __name__ == "__main__":
    main()
