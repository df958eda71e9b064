"""Flipped bits in every kind of file of a RocksDB directory: reported or harmless, never silent, never a hang."""

import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.kv import Transaction

CHILD = Path(__file__).parent / "flip_child.py"
PAIRS = 120
FLIPS = 200  # Of each kind of file.
DEADLINE_SECONDS = 30  # Far above the usual few milliseconds; a hang inside RocksDB never ends.
KINDS = ("*.log", "MANIFEST-*", "CURRENT", "IDENTITY", "OPTIONS-*", "*.sst", "WATERMARK", "rocksdict-config.json")


def put_number(tx: Transaction, number: int) -> None:
    tx.put(b"key %06d" % number, b"value %06d" % number * 20)


@pytest.fixture(scope="module")
def plane() -> Iterator[Path]:
    """A small directory as a crash leaves it: a half in a table, and a half in the log, all synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        with RocksDatabase(Path(folder) / "live") as database:
            for number in range(PAIRS):
                database.transact(put_number, number)
                if number == PAIRS // 2:
                    database.flush_tables()
            shutil.copytree(Path(folder) / "live", Path(folder) / "image")
        yield Path(folder) / "image"


class Examiner:
    """A child process that opens damaged directories. It is replaced when it does not answer in time."""

    def __init__(self) -> None:
        self._child = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, str(CHILD), str(PAIRS)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def examine(self, path: Path) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{path}\n")
        self._child.stdin.flush()
        ready, _, _ = select.select([self._child.stdout], [], [], DEADLINE_SECONDS)
        answer = self._child.stdout.readline().strip() if ready else "hang"
        if not answer or answer == "hang":
            self.close()
            self._child = self._start()
        return answer or "crash"

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def flip_and_examine(plane: Path, flips: list[tuple[str, int]]) -> None:
    """Open a copy of the directory for each flip of one bit of one file."""
    found: Counter[str] = Counter()
    failures = []
    examiner = Examiner()
    try:
        for name, bit in flips:
            copy = plane.with_name("copy")
            shutil.copytree(plane, copy)
            data = bytearray((copy / name).read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            (copy / name).write_bytes(data)
            answer = examiner.examine(copy)
            found[answer.split(" ")[0]] += 1
            if answer.split(" ")[0] not in ("same", "refused"):
                failures.append(f"bit {bit % 8} of byte {bit // 8} of {name}: {answer}")
            shutil.rmtree(copy)
    finally:
        examiner.close()
    print(dict(found))
    assert not failures, failures[:20]


def files_of(plane: Path, kind: str) -> list[Path]:
    found = [file for file in plane.glob(kind) if file.stat().st_size]
    assert found, kind
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_reported_or_harmless(plane: Path, kind: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    files = files_of(plane, kind)
    flips = [(file.name, rng.randrange(file.stat().st_size * 8)) for file in files for _ in range(FLIPS // len(files))]
    flip_and_examine(plane, flips)


def test_no_flipped_bit_of_a_record_header_is_silent(plane: Path) -> None:
    """Of the first, a middle and the last record of the log: checksum, length, type, sequence and count."""
    from holdfast.backends.rocksdb.log_records import LogWalk

    log = max(plane.glob("*.log"))
    records = list(LogWalk(log.read_bytes()))
    flips = [
        (log.name, record.offset * 8 + bit)
        for record in (records[0], records[len(records) // 2], records[-1])
        for bit in range(32, 56)
    ]
    flip_and_examine(plane, flips)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_reported_or_harmless(plane: Path, kind: str) -> None:
    flip_and_examine(
        plane, [(file.name, bit) for file in files_of(plane, kind) for bit in range(file.stat().st_size * 8)]
    )
