"""A full disk raises a typed error, and the database can be reopened intact once there is space."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import Backend, CommitUnknown, DatabaseFailed, DiskFull
from holdfast.kv import Transaction

FILLING = """
import resource, signal, sys
from pathlib import Path
from holdfast.backends.rocksdb import RocksDatabase

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database = RocksDatabase(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
for number in range(1_000):
    database.transact(lambda tx: (tx.put(b"%06d a" % number, bytes(50_000)), tx.put(b"%06d b" % number, b"")))
    print(number, flush=True)
"""


def test_a_file_size_limit_is_reported_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """Simulates a full disk where a small file system cannot be mounted."""
    command = [sys.executable, "-c", FILLING, str(tmp_path / "kv")]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    acknowledged = len(child.stdout.splitlines())
    assert acknowledged > 10
    assert "holdfast.errors.DiskFull" in child.stderr
    check_nothing_acknowledged_is_lost(tmp_path / "kv", acknowledged)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def put(tx: Transaction, number: int) -> None:
    tx.put(b"%06d a" % number, os.urandom(50_000))
    tx.put(b"%06d b" % number, b"")


def test_a_full_disk_is_reported_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    acknowledged = 0
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(44 << 20))
    database = RocksDatabase(small_disk / "kv")
    with pytest.raises((DiskFull, CommitUnknown)) as caught:
        for number in range(1_000):
            database.transact(put, number)
            acknowledged += 1
    assert acknowledged > 10
    assert "space" in str(caught.value) or "full" in str(caught.value)

    with pytest.raises(Backend) as again:
        database.transact(put, 2_000)
    assert isinstance(again.value, DatabaseFailed | DiskFull)
    assert "again" in str(again.value)
    with suppress(Backend):  # It raises because it cannot sync, but releases the directory.
        database.close()

    ballast.unlink()
    check_nothing_acknowledged_is_lost(small_disk / "kv", acknowledged)


def check_nothing_acknowledged_is_lost(path: Path, acknowledged: int) -> None:
    with RocksDatabase(path) as reopened:
        keys = [key for key, _ in reopened.read(lambda tx: tx.scan(b"0", b"1", limit=10_000))]
        whole = {key[:6] for key in keys if key[:6] + b" a" in keys and key[:6] + b" b" in keys}
        assert {b"%06d" % number for number in range(acknowledged)} <= whole
        assert len(keys) == 2 * len(whole)
        reopened.transact(put, 3_000)
