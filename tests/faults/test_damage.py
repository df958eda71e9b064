"""Damaged files and power loss on RocksDB: what a crash leaves is recovered, any other damage is reported."""

import asyncio
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rocksdict import Rdict

import fastness
from fastness import limits
from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.database import table_options
from fastness.backends.rocksdb.log_check import Repairs, check_files
from fastness.backends.rocksdb.log_records import LogWalk, Record, skip_records
from fastness.backends.rocksdb.readers import RocksReader
from fastness.backends.rocksdb.salvage import salvage
from fastness.backends.rocksdb.watermark import NAME, read_watermark
from fastness.cli.exit_codes import DAMAGED
from fastness.cli.main import root
from fastness.errors import Corrupt, DamagedDatabase, PathUnusable
from fastness.kv import Transaction
from fastness.tiers import Tier


def put_numbers(tx: Transaction, numbers: range) -> None:
    for number in numbers:
        tx.put(b"key %06d" % number, b"value %06d" % number * 20)


def count(database: RocksDatabase) -> int:
    return database.read(lambda tx: len(tx.scan(b"key", b"kez", limit=10_000)))


def make_image(folder: Path, *, synced: int) -> Path:
    """A copy of a live database, as a crash would leave it: 300 commits in the log, nothing in tables."""
    with pytest.MonkeyPatch.context() as patch, RocksDatabase(folder / "live") as database:
        patch.setattr(limits, "WATERMARK_WRITE_SECONDS", 0)  # A fast disk syncs all commits in less.
        for number in range(300):
            tier = Tier.CRITICAL if number == synced - 1 else Tier.IMPORTANT
            database.transact(put_numbers, range(number, number + 1), tier=tier)
        shutil.copytree(folder / "live", folder / "image")
    return folder / "image"


@pytest.fixture(scope="module")
def original_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image(tmp_path_factory.mktemp("synced"), synced=300)


@pytest.fixture(scope="module")
def original_unsynced_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image(tmp_path_factory.mktemp("unsynced"), synced=100)


@pytest.fixture
def image(original_image: Path, tmp_path: Path) -> Path:
    """An image with all its commits synced."""
    return Path(shutil.copytree(original_image, tmp_path / "image"))


@pytest.fixture
def unsynced_image(original_unsynced_image: Path, tmp_path: Path) -> Path:
    """An image with only its first 100 commits synced."""
    return Path(shutil.copytree(original_unsynced_image, tmp_path / "image"))


def newest_log(image: Path) -> Path:
    return max(image.glob("*.log"))


def records(log: Path) -> list[Record]:
    return list(LogWalk(log.read_bytes()))


def change(file: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with file.open("rb+") as opened:
        opened.seek(offset)
        opened.write(data)


def test_an_undamaged_log_is_replayed_completely(image: Path) -> None:
    with RocksDatabase(image) as database:
        assert count(database) == 300


def test_the_fast_walk_passes_over_the_records_that_the_plain_walk_finds(original_image: Path) -> None:
    """Also where a byte is changed: then it ends before the first record that the plain walk does not accept."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = newest_log(original_image).read_bytes()
    numbers = [record.offset for record in LogWalk(data)]
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.choice(numbers) + rng.randrange(19)] ^= 1 << rng.randrange(8)
        below = rng.choice([1 << 64, rng.randrange(400)])
        expected, last, end = None, None, 0
        for record in LogWalk(bytes(damaged)):
            if expected not in (None, record.sequence) or record.sequence + record.writes > below:
                break
            expected, last, end = record.sequence + record.writes, record, record.end
        assert skip_records(bytes(damaged), None, below) == (end, expected, last)
    assert skip_records(data, 2, 1 << 64) == (0, 2, None)


@pytest.mark.parametrize("cut", [1, 7, 60, 1_000])
def test_a_truncated_tail_is_dropped_and_the_rest_is_kept(unsynced_image: Path, cut: int) -> None:
    log = newest_log(unsynced_image)
    log.write_bytes(log.read_bytes()[:-cut])
    with RocksReader(unsynced_image) as reader:
        assert 290 <= reader.read(lambda tx: len(tx.scan(b"key", b"kez", limit=10_000))) < 300
    with RocksDatabase(unsynced_image) as database:
        assert 290 <= count(database) < 300
        database.transact(put_numbers, range(1_000, 1_001))
    with RocksDatabase(unsynced_image) as database:
        assert database.read(lambda tx: tx.get(b"key 001000")) is not None


def test_a_torn_record_before_zeros_is_dropped(unsynced_image: Path) -> None:
    """The size of a file may reach the disk before its content does."""
    log = newest_log(unsynced_image)
    data, torn = log.read_bytes(), records(log)[250]
    for kept in (torn.offset, torn.offset + 3, torn.offset + 7, torn.offset + 100):
        log.write_bytes(data[:kept] + bytes(len(data) - kept))
        copy = unsynced_image.with_name(f"copy-{kept}")
        shutil.copytree(unsynced_image, copy)
        with RocksDatabase(copy) as database:
            assert count(database) == 250


def test_the_part_of_a_write_in_one_sector_may_be_lost(unsynced_image: Path) -> None:
    """It has few bytes if the write begins or ends shortly before or after the border of a sector."""
    log = newest_log(unsynced_image)
    data = log.read_bytes()
    crossing = [
        (number, record) for number, record in enumerate(records(log)) if record.offset // 512 != record.end // 512
    ]
    for number, record in crossing:
        if number >= 100:
            for begin, end in (
                (record.offset, (record.offset // 512 + 1) * 512),
                (record.end // 512 * 512, record.end),
            ):
                log.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
                repairs = check_files(unsynced_image)
                assert [cut.offset for cut in repairs.cuts] in ([record.offset], []), (number, begin, end)
    assert min(512 - record.offset % 512 for _, record in crossing) < 16


def test_unsynced_pages_may_reach_the_disk_out_of_order(unsynced_image: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    log = newest_log(unsynced_image)
    data, synced = log.read_bytes(), records(log)[99].end
    for step in range(10):
        image = bytearray(data)
        for page in range(synced // 4096 + 1, len(data) // 4096 + 1):
            if rng.random() < 0.3:
                image[page * 4096 : page * 4096 + 4096] = bytes(len(image[page * 4096 : page * 4096 + 4096]))
        log.write_bytes(image)
        copy = unsynced_image.with_name(f"copy-{step}")
        shutil.copytree(unsynced_image, copy)
        with RocksDatabase(copy) as database:
            stored = count(database)
            assert 100 <= stored <= 300
            assert database.read(lambda tx, last=stored - 1: tx.get(b"key %06d" % last)) is not None  # No gaps.


def test_a_zeroed_synced_record_is_reported(image: Path) -> None:
    log = newest_log(image)
    lost = records(log)[150]
    change(log, lost.offset, bytes(lost.end - lost.offset))
    with pytest.raises(DamagedDatabase, match=rf"{log.name} is damaged: the record at byte {lost.offset:,}"):
        RocksDatabase(image)


@pytest.mark.parametrize("watermark", [True, False])
def test_a_changed_length_is_reported(image: Path, watermark: bool) -> None:
    """RocksDB takes it for the torn end of the log, and drops all that follows."""
    if not watermark:
        (image / NAME).unlink()
    log = newest_log(image)
    data = log.read_bytes()
    for record in (records(log)[place] for place in (3, 150, -2, -1)):
        for bit in range(8):
            for header in (record.offset + 4, record.offset + 5):
                change(log, header, bytes([data[header] ^ 1 << bit]))
                with pytest.raises(DamagedDatabase):
                    check_files(image)
                change(log, header, data[header : header + 1])
    fourth = records(log)[3].offset
    change(log, fourth + 5, b"\x40")
    with pytest.raises(DamagedDatabase, match=f"byte {fourth:,} .* a later commit follows"):
        RocksDatabase(image)


def test_a_changed_record_type_is_reported_before_rocksdb_opens_the_log(image: Path) -> None:
    """RocksDB loops forever on some of them."""
    log = newest_log(image)
    all_records = records(log)
    for kind in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 130, 131, 255):
        for record in (all_records[3], all_records[-1]):
            change(log, record.offset + 6, bytes([kind]))
            with pytest.raises(DamagedDatabase):
                check_files(image)
            change(log, record.offset + 6, b"\x01")
    change(log, all_records[3].offset + 6, b"\x05")
    with pytest.raises(DamagedDatabase):
        RocksDatabase(image)
    with pytest.raises(DamagedDatabase):
        RocksReader(image)


@pytest.mark.parametrize("left", [0, 1, 200, 32_768])
def test_a_log_that_was_cut_is_reported(image: Path, left: int) -> None:
    log = newest_log(image)
    log.write_bytes(log.read_bytes()[:left])
    for _ in range(2):
        with pytest.raises(DamagedDatabase, match="on disk"):
            RocksDatabase(image)


def test_a_missing_log_is_reported(image: Path) -> None:
    newest_log(image).unlink()
    for _ in range(2):
        with pytest.raises(DamagedDatabase, match="its last commit is 0, but 300 was on disk"):
            RocksDatabase(image)


def test_the_watermark_follows_syncs_and_survives_a_torn_write(image: Path) -> None:
    assert read_watermark(image) == 300
    newer, older = (image / NAME).read_bytes()[:512], (image / NAME).read_bytes()[512:]
    (image / NAME).write_bytes(bytes(512) + older)
    first = read_watermark(image)
    (image / NAME).write_bytes(newer + bytes(512))
    assert sorted([first or 0, read_watermark(image) or 0]) == [0, 300]  # The older one is from the opening.
    (image / NAME).write_bytes(b"x" * 1024)
    assert read_watermark(image) is None
    with RocksDatabase(image) as database:
        assert count(database) == 300
    assert read_watermark(image) == 301  # Without a mark that it was closed, the fence floor was raised.


WATERMARKS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "neither of its two copies": lambda whole: b"x" * len(whole),
    "has 0 bytes": lambda _: b"",
    "has 512 bytes": lambda whole: whole[:512],
    "one of its two copies": lambda whole: b"x" * 16 + whole[16:],
    "the directory was closed": lambda whole: whole[:260] + b"x" + whole[261:],
}


@pytest.mark.parametrize("found", WATERMARKS)
def test_a_damaged_or_missing_watermark_is_reported(
    tmp_path: Path, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening warns, and doctor has a finding; both replace the file."""
    for reader in ("open", "doctor"):
        folder = tmp_path / reader
        with fastness.open(f"dir:{folder}") as plane:
            plane.queue("jobs").put(1)
        path = folder / "kv" / NAME
        damaged = WATERMARKS[found](path.read_bytes())
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        caplog.clear()
        if reader == "open":
            with fastness.open(f"dir:{folder}") as plane:
                assert plane.queue("jobs").stats().ready == 1
            assert [found in record.message for record in warnings_of(caplog)] == [True]
        else:
            checked = CliRunner().invoke(root, ["doctor", str(folder), "--json"])
            assert checked.exit_code == DAMAGED
            (finding,) = json.loads(checked.stdout)["findings"]
            assert (finding["where"], found in finding["what"]) == (str(path), True)
        caplog.clear()
        with fastness.open(f"dir:{folder}"):
            assert warnings_of(caplog) == []


def test_a_directory_that_never_had_a_watermark_opens_without_a_warning(
    image: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new one, one whose first opening was killed, and a checkpoint."""
    with RocksDatabase(tmp_path / "new"):
        pass
    Rdict(str(tmp_path / "killed"), table_options()).close()
    with RocksDatabase(tmp_path / "killed"):
        pass
    with RocksDatabase(image) as database:
        database.checkpoint(tmp_path / "checkpoint")
    with RocksDatabase(tmp_path / "checkpoint") as database:
        assert count(database) == 300
        assert database.watermark_fault is None
    assert warnings_of(caplog) == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "fastness.rocksdb"]


@pytest.mark.parametrize("emptied", [True, False])
@pytest.mark.parametrize("with_objects", [True, False])
def test_a_used_data_directory_without_its_key_space_is_refused(
    tmp_path: Path, emptied: bool, with_objects: bool
) -> None:
    with fastness.open(f"dir:{tmp_path}/data") as plane:
        plane.queue("jobs").put("work")
        if with_objects:
            plane.blobs.put(b"large" * 10_000)
    shutil.rmtree(tmp_path / "data/kv")
    if emptied:
        (tmp_path / "data/kv").mkdir()
    with pytest.raises(DamagedDatabase, match="key space"):
        fastness.open(f"dir:{tmp_path}/data")


def test_a_directory_without_its_list_of_tables_is_refused(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(put_numbers, range(10))
        database.flush_tables()
    (tmp_path / "kv" / "CURRENT").unlink()
    with pytest.raises(DamagedDatabase, match="CURRENT"):
        RocksDatabase(tmp_path / "kv")


# Salvage.


def test_salvage_copies_all_commits_but_the_damaged_one(image: Path) -> None:
    log = newest_log(image)
    change(log, records(log)[3].offset + 5, b"\x40")
    before = {file.name: file.read_bytes() for file in image.iterdir()}
    salvaged = salvage(image, image.with_name("salvaged"))
    assert (salvaged.pairs, salvaged.commits) == (299, 299)
    assert any("commits 4 to 4" in each for each in salvaged.lost)
    with RocksDatabase(image.with_name("salvaged")) as database:
        assert count(database) == 299
    assert {file.name: file.read_bytes() for file in image.iterdir()} == before


@pytest.mark.parametrize("broken", ["CURRENT", "MANIFEST-*"])
def test_salvage_reads_tables_without_their_list(tmp_path: Path, broken: str) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(put_numbers, range(100))
        database.flush_tables()
        database.transact(put_numbers, range(100, 120))
        shutil.copytree(tmp_path / "kv", tmp_path / "image")
    for file in (tmp_path / "image").glob(broken):
        file.write_bytes(b"x" * 100)
    salvaged = salvage(tmp_path / "image", tmp_path / "salvaged")
    assert salvaged.pairs == 120
    assert any("list of tables" in each for each in salvaged.lost)


def test_salvage_skips_only_the_damaged_part_of_a_table(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        for begin in range(0, 9_000, 1_000):
            database.transact(put_numbers, range(begin, begin + 1_000))
        database.flush_tables()
    table = max((tmp_path / "kv").glob("*.sst"), key=lambda path: path.stat().st_size)
    change(table, table.stat().st_size // 3, b"\xff" * 10)
    salvaged = salvage(tmp_path / "kv", tmp_path / "salvaged")
    assert 8_500 < salvaged.pairs < 9_000
    assert any("pairs between" in each for each in salvaged.lost)


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
    assert check_files(image_of_many_logs) == Repairs()
    with RocksDatabase(image_of_many_logs) as database:
        assert count(database) == 3_000


def test_a_truncated_older_log_is_reported(image_of_many_logs: Path) -> None:
    """RocksDB itself would silently replay the later logs."""
    older = sorted(image_of_many_logs.glob("*.log"))[1]
    older.write_bytes(older.read_bytes()[: older.stat().st_size // 2])
    with pytest.raises(DamagedDatabase, match="missing commits"):
        RocksDatabase(image_of_many_logs)


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_older_log_is_reported(image_of_many_logs: Path, index: int) -> None:
    sorted(image_of_many_logs.glob("*.log"))[index].unlink()
    with pytest.raises(DamagedDatabase, match="missing commits"):
        RocksDatabase(image_of_many_logs)


def test_logs_whose_commits_are_in_tables_are_ignored(tmp_path: Path) -> None:
    """A power loss may keep any of the removed logs: here the oldest, and not the one after it."""
    with RocksDatabase(tmp_path / "live") as database:
        for number in range(4):
            database.transact(put_numbers, range(number, number + 1))
            if number == 0:
                shutil.copytree(tmp_path / "live", tmp_path / "before")
            if number < 3:
                database.flush_tables()
        image = Path(shutil.copytree(tmp_path / "live", tmp_path / "image"))
    old = newest_log(tmp_path / "before")
    assert records(old)
    assert not (image / old.name).exists()
    shutil.copyfile(old, image / old.name)
    for _ in range(2):
        with RocksReader(image) as reader:
            assert reader.read(lambda tx: len(tx.scan(b"key", b"kez", limit=10))) == 4
    with RocksDatabase(image) as reopened:
        assert count(reopened) == 4


def make_earlier_manifest(folder: Path) -> tuple[Path, bytes]:
    """A directory, and the content of its MANIFEST from before its last opening."""
    with RocksDatabase(folder / "kv") as database:
        database.transact(put_numbers, range(10))
    [manifest] = (folder / "kv").glob("MANIFEST-*")
    return manifest, manifest.read_bytes()


def test_a_new_current_without_its_manifest_is_repaired(tmp_path: Path) -> None:
    """RocksDB syncs both names at once, so a power loss may keep one of them."""
    make_earlier_manifest(tmp_path)
    (tmp_path / "kv" / "CURRENT").write_text("MANIFEST-009999\n")
    with RocksReader(tmp_path / "kv") as reader:
        assert reader.read(lambda tx: len(tx.scan(b"key", b"kez", limit=100))) == 10
    assert (tmp_path / "kv" / "CURRENT").read_text() == "MANIFEST-009999\n"
    with RocksDatabase(tmp_path / "kv") as database:
        assert count(database) == 10


@pytest.mark.parametrize("lost", ["commits", "table", "part of the manifest"])
def test_a_missing_manifest_is_not_replaced_by_an_incomplete_one(tmp_path: Path, lost: str) -> None:
    earlier, content = make_earlier_manifest(tmp_path)
    kv = tmp_path / "kv"
    if lost == "commits":
        with RocksDatabase(kv) as database:
            database.transact(put_numbers, range(10, 20))
        (kv / (kv / "CURRENT").read_text().strip()).unlink()
        earlier.write_bytes(content)
    elif lost == "table":
        next(kv.glob("*.sst")).unlink()
    else:
        earlier.write_bytes(content[:-30])
    (kv / "CURRENT").write_text("MANIFEST-009999\n")
    with pytest.raises(DamagedDatabase, match="MANIFEST-009999 is damaged: it is missing"):
        RocksDatabase(kv)
    assert (kv / "CURRENT").read_text() == "MANIFEST-009999\n"


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
    monkeypatch.setattr("fastness.limits.IMPORTANT_SYNC_SECONDS_MAX", 0.02)
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
