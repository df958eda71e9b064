"""The fence floor: it is raised wherever commits may have been lost, and no fence is issued twice."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.watermark import NAME
from fastness.errors import FastnessError, InvalidArgument
from fastness.kv import Transaction, fence_floor
from fastness.kv.batch import run_batch
from fastness.layers import lineages, queues
from fastness.layers.queues import QueueKey
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage
from tests.unit.queue_calls import proof

JOBS = QueueKey("main", "jobs")
STEP, COPY_STEP = fence_floor.STEP, fence_floor.COPY_STEP


def floor_of(path: Path) -> int:
    """The floor that transactions see after the directory is opened, and that is stored."""
    with RocksDatabase(path, clock=ManualClock()) as database:  # Its time is before the floor begins to follow it.
        seen: int = database.transact(lambda tx: tx.fence_floor)
        assert database.read(lambda tx: tx.fence_floor) == seen
        assert database.transact(fence_floor.load) == seen
    return seen


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(Transaction.put, b"a", b"1")
    return tmp_path / "kv"


def test_a_closed_directory_keeps_its_floor(closed: Path, tmp_path: Path) -> None:
    assert floor_of(closed) == floor_of(closed) == 0
    assert floor_of(closed.rename(tmp_path / "moved")) == 0


def test_a_new_directory_has_no_floor(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        assert database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=10)) == []


def copied(path: Path) -> Path:
    """The original may continue to issue fences."""
    return Path(shutil.copytree(path, path.parent / "copy"))


def without_watermark(path: Path) -> Path:
    (path / NAME).unlink()
    return path


def with_a_torn_mark(path: Path) -> Path:
    content = bytearray((path / NAME).read_bytes())
    content[260] ^= 1
    with (path / NAME).open("r+b") as file:  # The same inode.
        file.write(content)
    return path


def with_a_shorter_watermark(path: Path) -> Path:
    os.truncate(path / NAME, 512)
    return path


def written_by_another_program(path: Path) -> Path:
    """A program that knows only RocksDB leaves the mark as it is."""
    rocks = Rdict(str(path), Options(raw_mode=True))
    rocks.put(b"b", b"2")
    rocks.close()
    return path


def checkpointed(path: Path) -> Path:
    with RocksDatabase(path) as database:
        database.checkpoint(path.parent / "checkpoint")
    return path.parent / "checkpoint"


def copied_while_open(path: Path) -> Path:
    with RocksDatabase(path):
        return copied(path)


@pytest.mark.parametrize(
    ("change", "floor"),
    [
        (copied, COPY_STEP),
        (copied_while_open, STEP),  # As after a crash.
        (checkpointed, COPY_STEP),
        (without_watermark, COPY_STEP),
        (with_a_torn_mark, COPY_STEP),
        (with_a_shorter_watermark, STEP),
        (written_by_another_program, COPY_STEP),
    ],
)
def test_the_floor_is_raised_unless_the_directory_was_closed_here(
    closed: Path, change: Callable[[Path], Path], floor: int
) -> None:
    changed = change(closed)
    assert floor_of(changed) == floor
    assert floor_of(changed) == floor  # It was closed then.


def test_the_floor_of_older_data_follows_the_time() -> None:
    """So it is above that of an earlier restore of the same backup, and of an original that was killed often."""
    earlier = fence_floor.floor_of_copy(0, fence_floor.BEGIN_MS + 1_000)
    assert earlier == 1_000 * 1_024 + COPY_STEP
    assert fence_floor.floor_of_copy(0, fence_floor.BEGIN_MS + 2_000) > earlier + STEP
    assert fence_floor.floor_of_copy(earlier, fence_floor.BEGIN_MS) == earlier + STEP  # The clock was set back.
    in_2300 = fence_floor.BEGIN_MS + 274 * 365 * 86_400_000
    assert fence_floor.floor_of_copy(0, in_2300) < 2**53


def test_a_killed_process_does_not_close(closed: Path) -> None:
    for expected in (STEP, 2 * STEP):
        if (child := os.fork()) == 0:
            database = RocksDatabase(closed)
            database.transact(Transaction.put, b"b", b"2")
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert floor_of(closed) == expected


def test_a_forked_child_leaves_the_mark_to_its_parent(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(Transaction.put, b"a", b"1")
        if (child := os.fork()) == 0:
            database.close()
            os._exit(0)
        os.waitpid(child, 0)
        shutil.copyfile(tmp_path / "kv" / NAME, tmp_path / "while open")
    assert not any((tmp_path / "while open").read_bytes()[256:288])
    assert floor_of(tmp_path / "kv") == 0


def test_a_failed_sync_is_no_close(closed: Path) -> None:
    database = RocksDatabase(closed)
    database.transact(Transaction.put, b"b", b"2")

    def fail() -> None:
        raise OSError("no")

    database._log._sync = fail
    with pytest.raises(FastnessError):
        database.transact(Transaction.put, b"c", b"3")
    database.close()
    assert floor_of(closed) == STEP


def test_reopening_after_a_failure_raises_the_floor_at_once(closed: Path) -> None:
    with RocksDatabase(closed) as database:

        def fail() -> None:
            raise OSError("no")

        database._log._sync = fail
        with pytest.raises(FastnessError):
            database.transact(Transaction.put, b"c", b"3")
        database.reopen()
        assert database.transact(lambda tx: tx.fence_floor) == STEP
        database.transact(queues.put, JOBS, [NewMessage(payload=b"x")])
        # The commit that was lost is none that a delivery waits for.
        (message,) = database.transact(queues.lease, JOBS, owner="ada", may_lose=True)
        assert message.fence == STEP + 1


def test_another_lineage_raises_the_floor_at_once() -> None:
    with MemoryDatabase(clock=ManualClock()) as database:
        database.transact(queues.put, JOBS, [NewMessage(payload=b"x")] * 3)
        fences = []
        for _ in range(3):
            (message,) = database.transact(queues.lease, JOBS, owner="ada")
            fences.append(message.fence)
            database.transact(lineages.begin, "restored")
    assert fences == [1, COPY_STEP + 1, COPY_STEP + STEP + 1]


def test_a_fence_above_the_floor_still_grows() -> None:
    with MemoryDatabase() as database:
        database.transact(fence_floor.raise_floor)
        database.transact(queues.put, JOBS, [NewMessage(payload=b"x")])
        for expected in (STEP + 1, STEP + 2):
            (message,) = database.transact(queues.lease, JOBS, owner="ada")
            assert message.fence == expected
            database.transact(queues.nack, JOBS, proof(message), counts=False)


def test_prefetched_messages_are_read_again_after_the_floor_was_raised() -> None:
    """The counters that they are compared with may have been lost, and have the same versions again."""
    prefetched = queues.Prefetched()
    with MemoryDatabase() as database:
        database.transact(queues.put, JOBS, [NewMessage(payload=b"x") for _ in range(3)])
        database.transact(queues.lease, JOBS, owner="ada", prefetched=prefetched)
        assert len(prefetched.messages) == 2
        stale = prefetched.messages[-1][0]
        prefetched.messages = [(stale, b"from before the failure")]
        database.transact(fence_floor.raise_floor)
        (message,) = database.transact(queues.lease, JOBS, owner="ada", prefetched=prefetched)
        assert message.payload == b"x"


def test_calls_of_a_batch_see_the_floor_and_keep_the_batch() -> None:
    def keep(tx: Transaction, _: object) -> int:
        tx.put(b"a", b"1")
        tx.keep()
        return tx.fence_floor

    def fail(tx: Transaction, _: object) -> None:
        tx.put(b"b", b"2")
        raise InvalidArgument("no")

    def batch(tx: Transaction) -> tuple[list[object], bool]:
        return run_batch(tx, [(keep, None), (fail, None)]), tx.is_kept

    with MemoryDatabase() as database:
        database.transact(fence_floor.raise_floor)
        (floor, error), is_kept = database.transact(batch)
    assert (floor, is_kept) == (STEP, True)
    assert isinstance(error, InvalidArgument)
