"""Opening a directory with a log of 256 MiB, with and without Fastness's own check of the log.

Every open is a process of its own, and the two take turns. The time of the processor counts that of all threads,
RocksDB's included.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rocksdict import Rdict, WriteBatch

from fastness.backends.rocksdb import RocksDatabase, database
from fastness.backends.rocksdb.database import table_options
from fastness.backends.rocksdb.log_check import Repairs
from fastness.backends.rocksdb.watermark import Watermark

_LOG_BYTES = 256 << 20
_ROUNDS = 5
_COMMITS = {"three small values (100, 20 and 20 bytes)": (100, 20, 20), "one value of 4 KiB": (4_096,)}


def main() -> None:
    for name, sizes in _COMMITS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # The disk would hide the difference.
            image = Path(folder) / "image"
            commits = make_image(image, sizes)
            found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
            for round in range(_ROUNDS + 1):
                for how, times in found.items():
                    copy = Path(shutil.copytree(image, Path(folder) / "copy"))
                    times.append(open_in_process(copy, how))
                    shutil.rmtree(copy)
                if round == 0:
                    found = {"with": [], "without": []}  # A warm-up.
        print(f"{name}: {commits:,} commits in a log of {_LOG_BYTES >> 20} MiB")
        for part, label in enumerate(("processor", "wall")):
            checked, bare = (statistics.median(times[part] for times in found[how]) for how in ("with", "without"))
            print(f"  {label}: {checked:.2f} s with the check, {bare:.2f} s without, {checked / bare:.2f} times")


def make_image(path: Path, sizes: tuple[int, ...]) -> int:
    """A directory as a crash leaves it, whose only data is in one log."""
    live = path.with_name("live")
    options = table_options()
    options.set_write_buffer_size(4 * _LOG_BYTES)
    options.set_max_total_wal_size(4 * _LOG_BYTES)
    rocks = Rdict(str(live), options)
    commits = size = 0
    while size < _LOG_BYTES:
        batch = WriteBatch(raw_mode=True)
        for index, value_bytes in enumerate(sizes):
            batch.put(b"%c%010d" % (97 + index, commits), b"x" * value_bytes)
            size += value_bytes + 14
        rocks.write(batch)
        size += 19
        commits += 1
    rocks.flush_wal(True)
    Watermark(live, rocks.latest_sequence_number()).close()
    shutil.copytree(live, path)
    rocks.close()
    shutil.rmtree(live)
    return commits


def open_in_process(path: Path, how: str) -> tuple[float, float]:
    """Seconds of the processor and of the wall clock for one open."""
    done = subprocess.run(
        [sys.executable, "-m", "benches.bench_open", how, str(path)], capture_output=True, text=True, check=True
    )
    processor, wall = json.loads(done.stdout)
    return processor, wall


def measure_open(how: str, path: Path) -> None:
    if how == "without":
        database.check_files = lambda _: Repairs()  # type: ignore[attr-defined, assignment]
    processor, wall = time.process_time(), time.perf_counter()
    opened = RocksDatabase(path)
    print(json.dumps([time.process_time() - processor, time.perf_counter() - wall]))
    opened.close()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure_open(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
