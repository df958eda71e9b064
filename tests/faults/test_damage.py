"""Damaged files and power loss on RocksDB: a truncated tail is dropped, any other damage is reported."""

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from rocksdict import Rdict

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.backends.rocksdb.database import table_options
from holdfast.backends.rocksdb.log_gaps import find_gap
from holdfast.errors import Corrupt, DamagedDatabase, PathUnusable
from holdfast.kv import Transaction
from holdfast.tiers import Tier


def put_numbers(tx: Transaction, numbers: range) -> None:
    for number in numbers:
        tx.put(b"key %06d" % number, b"value %06d" % number * 20)


def count(database: RocksDatabase) -> int:
    return database.read(lambda tx: len(tx.scan(b"key", b"kez", limit=10_000)))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A copy of a live database, as a crash would leave it: 300 commits in the log, nothing in tables."""
    with RocksDatabase(tmp_path / "live") as database:
        for number in range(300):
            database.transact(put_numbers, range(number, number + 1))
        shutil.copytree(tmp_path / "live", tmp_path / "image")
    return tmp_path / "image"


def newest_log(image: Path) -> Path:
    return max(image.glob("*.log"))


def test_an_undamaged_log_is_replayed_completely(image: Path) -> None:
    with RocksDatabase(image) as database:
        assert count(database) == 300


@pytest.mark.parametrize("cut", [1, 7, 60, 1_000])
def test_a_truncated_tail_is_dropped_and_the_rest_is_kept(image: Path, cut: int) -> None:
    log = newest_log(image)
    log.write_bytes(log.read_bytes()[:-cut])
    with RocksDatabase(image) as database:
        assert 290 <= count(database) < 300
        database.transact(put_numbers, range(1_000, 1_001))
    with RocksDatabase(image) as database:
        assert database.read(lambda tx: tx.get(b"key 001000")) is not None


@pytest.mark.parametrize("where", [0.01, 0.25, 0.5, 0.75, 0.95])
def test_a_flipped_byte_inside_the_log_is_reported(image: Path, where: float) -> None:
    log = newest_log(image)
    data = bytearray(log.read_bytes())
    data[int(len(data) * where)] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(DamagedDatabase, match="restore it from a backup"):
        RocksDatabase(image)


@pytest.mark.parametrize("where", [0.1, 0.5])
def test_a_zeroed_region_inside_the_log_is_reported(image: Path, where: float) -> None:
    log = newest_log(image)
    data = bytearray(log.read_bytes())
    begin = int(len(data) * where)
    data[begin : begin + 512] = bytes(512)
    log.write_bytes(data)
    with pytest.raises(DamagedDatabase):
        RocksDatabase(image)


@pytest.fixture
def image_of_many_logs(tmp_path: Path) -> Path:
    """A copy of a database whose writes are in several logs, and not in tables yet.

    18 full buffers would be merged into a table, in the background during the copy; these writes fill fewer.
    """
    options = table_options()
    options.set_write_buffer_size(70_000)
    options.set_max_write_buffer_number(20)
    options.set_min_write_buffer_number_to_merge(18)
    rocks = Rdict(str(tmp_path / "live"), options)
    for number in range(3_000):
        rocks[b"key %06d" % number] = b"v" * (100 if number % 300 else 40_000)  # Some span several blocks of a log.
    shutil.copytree(tmp_path / "live", tmp_path / "image")
    rocks.close()
    assert len(list((tmp_path / "image").glob("*.log"))) > 3
    return tmp_path / "image"


def test_many_logs_are_replayed_completely(image_of_many_logs: Path) -> None:
    assert find_gap(image_of_many_logs) is None
    with RocksDatabase(image_of_many_logs) as database:
        assert count(database) == 3_000


def test_a_truncated_older_log_is_reported(image_of_many_logs: Path) -> None:
    """RocksDB itself would silently replay the later logs."""
    older = sorted(image_of_many_logs.glob("*.log"))[1]
    older.write_bytes(older.read_bytes()[: older.stat().st_size // 2])
    with pytest.raises(DamagedDatabase, match="is missing commits"):
        RocksDatabase(image_of_many_logs)


def test_a_missing_older_log_is_reported(image_of_many_logs: Path) -> None:
    sorted(image_of_many_logs.glob("*.log"))[1].unlink()
    with pytest.raises(DamagedDatabase, match="is missing commits"):
        RocksDatabase(image_of_many_logs)


def test_a_flipped_byte_inside_a_table_is_reported(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        for begin in range(0, 9_000, 1_000):
            database.transact(put_numbers, range(begin, begin + 1_000))
        database.flush_tables()
    table = max((tmp_path / "kv").glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 3] ^= 0xFF
    table.write_bytes(data)

    def open_and_read() -> None:
        with RocksDatabase(tmp_path / "kv") as database:
            count(database)

    with pytest.raises(Corrupt):
        open_and_read()


def test_a_missing_table_is_reported(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(put_numbers, range(1_000))
        database.flush_tables()
    for table in (tmp_path / "kv").glob("*.sst"):
        table.unlink()
    with pytest.raises(Corrupt):
        RocksDatabase(tmp_path / "kv")


def test_a_power_loss_reverts_only_unsynced_commits(tmp_path: Path) -> None:
    """Commits are synced before they are acknowledged.

    The log is truncated anywhere after its last acknowledged sync, as by an operating system that lost its cache.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    live = tmp_path / "live"
    with RocksDatabase(live) as database:
        synced_bytes, synced = 0, 0
        for number in range(400):
            tier = rng.choice((Tier.CRITICAL, Tier.IMPORTANT, Tier.IMPORTANT))
            database.transact(put_numbers, range(number, number + 1), tier=tier)
            written = number + 1
            if tier is Tier.CRITICAL:
                synced_bytes, synced = newest_log(live).stat().st_size, written
            if number % 20 == 19:
                image = tmp_path / f"image-{number}"
                shutil.copytree(live, image)
                log = newest_log(image)
                size = log.stat().st_size
                log.write_bytes(log.read_bytes()[: rng.randint(synced_bytes, size)])
                with RocksDatabase(image) as survivor:
                    assert synced <= count(survivor) <= written


def test_a_critical_read_makes_what_it_read_durable(tmp_path: Path) -> None:
    live = tmp_path / "live"
    with RocksDatabase(live) as database:
        database.transact(put_numbers, range(1), tier=Tier.IMPORTANT)
        assert database.has_unsynced
        assert database.read(lambda tx: tx.get(b"key 000000"), tier=Tier.IMPORTANT) is not None
        assert database.has_unsynced
        assert database.read(lambda tx: tx.get(b"key 000000")) is not None
        assert not database.has_unsynced


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reading", [False, True])
def test_an_error_makes_what_it_read_durable(tmp_path: Path, asynchronous: bool, reading: bool) -> None:
    """An error is an answer too: a power loss must not revert what it is based on."""

    def refuse(tx: Transaction) -> None:
        raise LookupError(f"taken by {tx.get(b'key 000000')!r}")

    with RocksDatabase(tmp_path / "kv") as database:
        for tier, unsynced in ((Tier.IMPORTANT, True), (Tier.CRITICAL, False)):
            database.transact(put_numbers, range(1), tier=Tier.IMPORTANT)
            with pytest.raises(LookupError, match="taken by"):
                if asynchronous:
                    call = database.read_async if reading else database.transact_async
                    asyncio.run(call(refuse, tier=tier))
                else:
                    (database.read if reading else database.transact)(refuse, tier=tier)
            assert database.has_unsynced is unsynced


def test_important_writes_are_synced_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.limits.IMPORTANT_SYNC_SECONDS_MAX", 0.02)
    with RocksDatabase(tmp_path / "kv") as database:
        for step in range(3):
            database.transact(put_numbers, range(step, step + 1), tier=Tier.IMPORTANT)
            while database.has_unsynced:  # Ends with the background sync.
                pass


def test_a_checkpoint_is_a_database_as_of_its_creation(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(put_numbers, range(100), tier=Tier.IMPORTANT)
        database.checkpoint(tmp_path / "backups" / "first")
        database.transact(put_numbers, range(100, 200))
        with pytest.raises(PathUnusable, match="already exists"):
            database.checkpoint(tmp_path / "backups" / "first")
        with RocksDatabase(tmp_path / "backups" / "first") as copy:
            assert count(copy) == 100
            copy.transact(put_numbers, range(500, 600))
        assert count(database) == 200
