"""Session logs: records are accepted immediately, written soon, numbered without gaps, and read back."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fastness import limits
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import Busy, Closed, InvalidArgument, InvalidName, InvalidValue, Unreachable
from fastness.runtime.activity import writer as log_writer
from fastness.runtime.activity.log import ActivityLog, LoggedRecord, Position
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, faulty_objects
from tests.support.waiting import eventually

DAY_MS = 86_400_000
START = "2023-11-14_22-13-20"  # The start of the manual clock.
MIDNIGHT_MS = 1_700_006_400_000


@pytest.fixture
def objects() -> ObjectStore:
    return open_objects("memory:")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "activity"


Open = Callable[..., ActivityLog]


@pytest.fixture
def open_log(folder: Path, objects: ObjectStore, clock: ManualClock) -> Iterator[Open]:
    """Opens logs on one folder, by default without the flusher; they are closed after the test."""
    opened: list[ActivityLog] = []

    def open_one(**options: Any) -> ActivityLog:
        settings = {"objects": objects, "clock": clock, "start_flusher": False, **options}
        opened.append(ActivityLog(folder, **settings))
        return opened[-1]

    yield open_one
    for log in opened:
        log.close()


@pytest.fixture
def log(open_log: Open) -> ActivityLog:
    return open_log()


def local(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*"))


def lines(path: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def values(records: list[LoggedRecord]) -> list[Any]:
    return [msgspec.json.decode(each.record) for each in records]


def everything(log: ActivityLog, **which: Any) -> list[LoggedRecord]:
    """All records, in pages."""
    found: list[LoggedRecord] = []
    while page := log.read("main", **which, after=found[-1].position if found else None, limit=1_000):
        found += page
    return found


# Logging and writing.


def test_a_flush_writes_records_to_the_file_of_their_session(
    log: ActivityLog, folder: Path, clock: ManualClock
) -> None:
    log.log("main", "abc123", {"cpu": 0.5}, kind="metrics")
    clock.advance_ms(7)
    log.log("main", "abc123", {"cpu": 0.75}, kind="metrics")
    assert local(folder) == []
    log.flush()
    assert local(folder) == [f"{START}_abc123_metrics.jsonl"]
    header, *records = lines(folder / "main" / f"{START}_abc123_metrics.jsonl")
    writer = header["header"].pop("writer")
    assert len(writer) == 36
    for line in (header, *records):
        assert isinstance(line.pop("crc"), int)
    assert header == {
        "header": {"universe": "main", "session": "abc123", "kind": "metrics", "opened_ms": 1_700_000_000_000}
    }
    assert records == [
        {"n": 0, "at_ms": 1_700_000_000_000, "record": {"cpu": 0.5}},
        {"n": 1, "at_ms": 1_700_000_000_007, "record": {"cpu": 0.75}},
    ]


def test_the_flusher_writes_without_a_call_of_flush(open_log: Open, folder: Path) -> None:
    log = open_log(start_flusher=True)
    for number in range(3):
        log.log("main", "s", {"number": number})
        eventually(lambda: log.stats().written == number + 1)  # noqa: B023
    (path,) = folder.glob("main/*")
    assert [each["record"]["number"] for each in lines(path)[1:]] == [0, 1, 2]


def test_a_record_may_be_changed_after_it_was_logged(log: ActivityLog) -> None:
    record = {"state": "before"}
    log.log("main", "s", record)
    record["state"] = "after"
    assert values(log.read("main")) == [{"state": "before"}]


@pytest.mark.parametrize(
    ("record", "error"),
    [([1], InvalidValue), ({"a": object()}, InvalidValue), ({"a": "x" * 70_000}, InvalidArgument)],
)
def test_a_record_that_cannot_be_encoded_is_rejected(log: ActivityLog, record: Any, error: type) -> None:
    with pytest.raises(error):
        log.log("main", "s", record)
    with pytest.raises(error):
        log.session("main", "s", "k").log(record)
    assert log.stats().accepted == 0


def test_encoded_records_are_accepted_all_or_none(log: ActivityLog) -> None:
    log.log_encoded("main", "s", "k", [b'{"a":1}', b'{"a":2}'])
    with pytest.raises(InvalidValue):
        log.log_encoded("main", "s", "k", [b'{"a":3}', b'{"a":\n4}'])
    with pytest.raises(InvalidValue):
        log.log_encoded("main", "s", "k", b'{"a":3}')  # type: ignore[arg-type]
    log.log_encoded("main", "s", "k", [])
    assert values(log.read("main")) == [{"a": 1}, {"a": 2}]


def test_names_are_checked_and_keep_their_case(log: ActivityLog, folder: Path) -> None:
    assert log.session("main", "S", "K") is not log.session("main", "s", "k")
    log.log("main", "Abc:1@x", {}, kind="K+=")
    assert [each.session for each in log.read("main", session="Abc:1@x", kind="K+=")] == ["Abc:1@x"]
    assert log.read("main", session="abc:1@x", kind="K+=") == []
    for names in (("..", "s"), ("a/b", "s"), ("main", ""), ("main", "a b")):
        with pytest.raises(InvalidName):
            log.log(*names, {})
    with pytest.raises(InvalidName):
        log.read("main", session="")
    assert [path.name for path in folder.iterdir()] == ["main"]


def test_a_flush_writes_a_session_once(log: ActivityLog, monkeypatch: pytest.MonkeyPatch) -> None:
    session = log.session("main", "s", "k")
    session.log({"number": 0})
    log.flush()
    sizes: list[int] = []
    monkeypatch.setattr(log_writer, "os", counting_writes(sizes))
    for number in range(500):
        session.log({"number": number})
    log.flush()
    log.flush()
    assert len(sizes) == 1


def counting_writes(sizes: list[int]) -> SimpleNamespace:
    def write(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return os.write(descriptor, data)

    return SimpleNamespace(**{**vars(os), "write": write})


def test_a_full_buffer_is_written_by_the_caller(
    log: ActivityLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded even without a flusher."""
    monkeypatch.setattr(limits, "ACTIVITY_BUFFER_BYTES_MAX", 2_000)
    for number in range(100):
        log.log("main", "s", {"number": number})
    stats = log.stats()
    assert (stats.accepted, stats.dropped) == (100, 0)
    assert 80 < stats.written < 100
    assert [value["number"] for value in values(log.read("main"))] == list(range(100))


def test_threads_of_one_session_share_its_numbers_without_a_gap(open_log: Open, folder: Path) -> None:
    log = open_log(start_flusher=True, flush_seconds=0.001)
    session = log.session("main", "s", "k")

    def work(thread: int) -> None:
        for number in range(2_000):
            session.log({"thread": thread, "number": number})

    run_all([partial(work, thread) for thread in range(4)])
    found = everything(log)
    assert [each.position.n for each in found] == list(range(8_000))
    for thread in range(4):
        mine = [value["number"] for value in values(found) if value["thread"] == thread]
        assert mine == list(range(2_000))


def run_all(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_sessions_do_not_wait_for_each_other(log: ActivityLog) -> None:
    """A session that is blocked while logging or writing does not block another."""
    stuck, free = log.session("main", "stuck", "k"), log.session("main", "free", "k")
    stuck.log({})

    def log_and_write() -> None:
        free.log({})
        free.write()

    with stuck._lock, stuck._writing:
        done = threading.Thread(target=log_and_write)
        done.start()
        done.join(30)
        assert not done.is_alive()
        assert free.counts()["written"] == 1


# Files.


def test_a_new_day_starts_a_new_file(open_log: Open, objects: ObjectStore, folder: Path, clock: ManualClock) -> None:
    """Also within one batch: a record belongs to the day on which it was accepted."""
    log = open_log()
    clock.jump_to_ms(MIDNIGHT_MS - 2)
    for number in range(5):
        log.log("main", "s", {"number": number}, kind="k")
        clock.advance_ms(1)
    log.flush()
    assert local(folder) == ["2023-11-15_00-00-00_s_k.jsonl"]
    assert [meta.path.split("/")[2] for meta in objects.list("activity/main")] == ["2023-11-14"]
    found = log.read("main")
    assert [value["number"] for value in values(found)] == [0, 1, 2, 3, 4]
    assert [each.position.n for each in found] == [0, 1, 0, 1, 2]
    clock.advance_ms(DAY_MS)
    log.log("main", "s", {"number": 5}, kind="k")
    log.flush()
    assert local(folder) == ["2023-11-16_00-00-00_s_k.jsonl"]


def test_a_clock_set_back_by_a_day_starts_a_file_of_that_day(log: ActivityLog, clock: ManualClock) -> None:
    clock.jump_to_ms(MIDNIGHT_MS)
    log.log("main", "s", {"number": 0})
    clock.jump_to_ms(MIDNIGHT_MS - 5_000)
    log.log("main", "s", {"number": 1})
    assert sorted(value["number"] for value in values(log.read("main"))) == [0, 1]
    assert [file.second for file in log.files("main")] == ["2023-11-14_23-59-55", "2023-11-15_00-00-00"]


def test_a_large_file_is_closed_and_rotated(open_log: Open, objects: ObjectStore, folder: Path) -> None:
    log = open_log(file_bytes_max=1_000)
    for number in range(100):
        log.log("main", "s", {"number": number}, kind="k")
    log.flush()
    files = log.files("main")
    assert len(files) > 4
    assert all(file.is_rotated for file in files[:-1])
    assert all(1_000 <= file.size < 1_100 for file in files[:-1])
    found = log.read("main")
    assert [value["number"] for value in values(found)] == list(range(100))
    for file in files:
        numbers = [each.position.n for each in found if each.position.file == file.id]
        assert numbers == list(range(len(numbers)))


def test_rotation_runs_in_its_own_thread(open_log: Open, objects: ObjectStore) -> None:
    log = open_log(start_flusher=True, file_bytes_max=500, flush_seconds=0.001)
    for number in range(50):
        log.log("main", "s", {"number": number})
    eventually(lambda: log.stats().rotated >= 1)
    assert [value["number"] for value in values(log.read("main"))] == list(range(50))


def test_a_tiny_file_limit_still_allows_one_record_per_file(open_log: Open) -> None:
    log = open_log(file_bytes_max=1)
    for number in range(3):
        log.log("main", "s", {"number": number})
    assert [value["number"] for value in values(log.read("main"))] == [0, 1, 2]
    assert len(log.files("main")) == 3


def test_without_an_object_store_closed_files_stay_and_are_read(open_log: Open, folder: Path) -> None:
    log = open_log(objects=None)
    log.log("main", "s", {"number": 0}, kind="k")
    log.end_session("main", "s")
    log.log("main", "s", {"number": 1}, kind="k")
    assert [value["number"] for value in values(log.read("main"))] == [0, 1]
    assert local(folder) == [f"{START}-2_s_k.jsonl", f"{START}_s_k.jsonl"]


def test_an_ended_session_is_rotated_and_may_start_again(log: ActivityLog, folder: Path) -> None:
    kept = log.session("main", "s", "k")
    kept.log({"number": 0})
    log.end_session("main", "s")
    assert local(folder) == []
    assert log.stats().rotated == 1
    kept.log({"number": 1})
    log.log("main", "s", {"number": 2}, kind="k")
    found = log.read("main")
    assert [value["number"] for value in values(found)] == [0, 1, 2]
    assert [each.position.n for each in found] == [0, 0, 1]
    assert log.stats().accepted == log.stats().written == 3


def test_one_kind_of_a_session_may_be_ended(log: ActivityLog, folder: Path) -> None:
    for session, kind in (("s", "a"), ("s", "b"), ("t", "a")):
        log.log("main", session, {}, kind=kind)
    log.end_session("main", "s", "a")
    assert local(folder) == []  # The other sessions are not written yet.
    log.flush()
    assert local(folder) == [f"{START}_s_b.jsonl", f"{START}_t_a.jsonl"]


def test_ending_sessions_while_logging_loses_nothing(open_log: Open) -> None:
    log = open_log(start_flusher=True, flush_seconds=0.001)
    done = threading.Event()

    def end() -> None:
        while not done.is_set():
            log.end_session("main", "s")

    ending = threading.Thread(target=end)
    ending.start()

    def work(thread: int) -> None:
        kept = log.session("main", "s", "k")
        for number in range(300):
            kept.log({"thread": thread, "number": number})
            log.log("main", "s", {"thread": thread, "number": number}, kind="k")

    run_all([partial(work, thread) for thread in range(3)])
    done.set()
    ending.join()
    found = [(value["thread"], value["number"]) for value in values(everything(log))]
    assert sorted(found) == sorted((thread, number) for thread in range(3) for number in range(300) for _ in range(2))
    for thread in range(3):
        mine = [number for each, number in found if each == thread]
        assert mine == sorted(mine)
    stats = log.stats()
    assert stats.accepted == stats.written == 1_800


def test_an_idle_session_is_ended_automatically(open_log: Open, folder: Path, clock: ManualClock) -> None:
    """Its file reaches the object store without a call of `end_session`."""
    log = open_log(start_flusher=True, flush_seconds=0.001)
    log.log("main", "quiet", {})
    eventually(lambda: log.stats().written == 1)
    clock.advance_ms(limits.ACTIVITY_IDLE_SECONDS * 1_000)
    log.log("main", "busy", {})
    eventually(lambda: log.stats().rotated == 1)
    eventually(lambda: [name.split("_")[2] for name in local(folder)] == ["busy"])


def test_open_sessions_are_limited_and_idle_ones_are_ended(
    log: ActivityLog, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle sessions are removed, so that the table does not stay full."""
    monkeypatch.setattr(limits, "ACTIVITY_SESSIONS_MAX", 2)
    log.log("main", "a", {})
    clock.advance_ms(limits.ACTIVITY_IDLE_SECONDS * 1_000 - 1)
    log.log("main", "b", {})
    with pytest.raises(Busy, match="ACTIVITY_SESSIONS_MAX"):
        log.log("main", "c", {})
    log.log("main", "b", {})
    log.flush()
    with pytest.raises(Busy):
        log.log("main", "c", {})
    clock.advance_ms(limits.ACTIVITY_IDLE_SECONDS * 1_000 // 10)
    log.flush()
    log.log("main", "c", {})


# Reading.


def test_pages_continue_through_rotated_and_local_files(log: ActivityLog, clock: ManualClock) -> None:
    for number in range(30):
        log.log("main", "s", {"number": number})
        if number % 10 == 9:
            log.end_session("main", "s")
            clock.advance_ms(400)
    log.log("main", "s", {"number": 30})
    pages, after = [], None
    while page := log.read("main", session="s", after=after, limit=7):
        after = page[-1].position
        pages.append([value["number"] for value in values(page)])
    assert [len(page) for page in pages] == [7, 7, 7, 7, 3]
    assert [number for page in pages for number in page] == list(range(31))
    log.log("main", "s", {"number": 31})
    assert values(log.read("main", session="s", after=after)) == [{"number": 31}]


def test_a_position_stays_valid_when_its_file_is_rotated(log: ActivityLog) -> None:
    for number in range(5):
        log.log("main", "s", {"number": number})
    before = log.read("main")
    log.end_session("main", "s")
    assert log.read("main") == before
    assert log.read("main", after=before[1].position) == before[2:]


def test_sessions_and_kinds_with_underscores_are_distinguished(log: ActivityLog, folder: Path) -> None:
    """Both would have the same file name."""
    log.log("main", "a_b", {"mine": 1}, kind="c")
    log.log("main", "a", {"mine": 2}, kind="b_c")
    log.flush()
    assert local(folder) == [f"{START}-2_a_b_c.jsonl", f"{START}_a_b_c.jsonl"]
    for _ in range(2):
        assert values(log.read("main", session="a_b")) == [{"mine": 1}]
        assert values(log.read("main", session="a", kind="b_c")) == [{"mine": 2}]
        assert values(log.read("main", kind="c")) == [{"mine": 1}]
        assert log.read("main", session="a", kind="c") == []
        assert log.read("other") == []
        log.end_session("main", "a")
        log.end_session("main", "a_b")


def test_damage_is_skipped_and_counted_once_however_small_the_pages(open_log: Open, folder: Path) -> None:
    """A truncated line does not hide other lines, before or after rotation."""
    log = open_log(objects=None)
    for number in range(6):
        log.log("main", "s", {"number": number})
    log.end_session("main", "s")
    (path,) = folder.glob("main/*")
    parts = path.read_bytes().splitlines(keepends=True)
    parts[3] = parts[3][:10] + b"\n"
    path.write_bytes(b"".join(parts) + b'{"n":6,"at')
    found, page = [], log.read("main", session="s", limit=2)
    while page:
        found += values(page)
        page = log.read("main", session="s", after=page[-1].position, limit=2) if len(page) == 2 else []
    assert [value["number"] for value in found] == [0, 1, 3, 4, 5]
    assert log.stats().skipped == 2


def test_a_missing_body_does_not_hide_other_files(log: ActivityLog, objects: ObjectStore, clock: ManualClock) -> None:
    for number in range(3):
        log.log("main", "s", {"number": number})
        log.end_session("main", "s")
        clock.advance_ms(1_000)
    objects.delete(log.files("main")[1].path)
    assert [value["number"] for value in values(log.read("main"))] == [0, 2]
    assert log.stats().skipped == 1


def test_an_unreachable_object_store_fails_reads_but_not_logging(open_log: Open, objects: ObjectStore) -> None:
    log = open_log(objects=faulty_objects(objects, ChosenFault(0, lambda: Unreachable("down"))))
    log.log("main", "s", {"number": 0})
    with pytest.raises(Unreachable):
        log.read("main")
    assert values(log.read("main")) == [{"number": 0}]


def test_a_file_that_is_rotated_during_a_read_is_read_once(
    open_log: Open, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process rotates what the first has listed, before the first opens it."""
    log, other = open_log(), open_log()
    log.log("main", "s", {"number": 0})
    log.flush()
    moved = False
    real = ActivityLog._body

    def move_then_read(self: ActivityLog, file: Any) -> bytes:
        nonlocal moved
        if not moved:
            moved = True
            log.end_session("main", "s")
        return real(self, file)

    monkeypatch.setattr(ActivityLog, "_body", move_then_read)
    assert values(other.read("main")) == [{"number": 0}]


# Write errors.


def test_records_that_cannot_be_written_are_written_later(
    log: ActivityLog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("in the way")
    with caplog.at_level(logging.INFO, "fastness.activity"):
        for session in ("s", "t"):
            for number in range(5):
                log.log("main", session, {"number": number})
        log.flush()
        log.flush()
        stats = log.stats()
        assert (stats.accepted, stats.written, stats.dropped, stats.failures) == (10, 0, 0, 4)
        assert "NotADirectoryError" in (stats.last_error or "")
        folder.unlink()
        log.log("main", "s", {"number": 5})
        log.flush()
    assert ["works again" in message for message in caplog.messages] == [False, True]
    assert [value["number"] for value in values(log.read("main", session="s"))] == [0, 1, 2, 3, 4, 5]
    assert log.stats().written == 11


def test_the_oldest_records_are_dropped_and_counted_when_the_buffer_is_full(
    log: ActivityLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ACTIVITY_BUFFER_BYTES_MAX", 2_000)
    folder.write_text("in the way")
    for number in range(100):
        log.log("main", "s", {"number": number})
    stats = log.stats()
    assert stats.accepted == 100
    assert stats.failures == 1  # One failure, not one per record: callers do not retry a failed write.
    waiting = 100 - stats.dropped
    assert 10 < waiting < 16
    folder.unlink()
    found = log.read("main")
    assert [value["number"] for value in values(found)] == list(range(100 - waiting, 100))
    assert [each.position.n for each in found] == list(range(waiting))
    stats = log.stats()
    assert stats.accepted == stats.written + stats.dropped == 100


def test_the_flusher_retries_failed_writes(open_log: Open, folder: Path) -> None:
    folder.write_text("in the way")
    log = open_log(start_flusher=True, flush_seconds=0.001)
    log.log("main", "s", {"number": 0})
    eventually(lambda: log.stats().failures >= 3)
    folder.unlink()
    eventually(lambda: log.stats().written == 1)


def failing_os(monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, truncates: bool = True) -> None:
    """A disk with `free_bytes` free bytes: the write that exceeds it is short, later ones fail."""

    def write(descriptor: int, data: bytes) -> int:
        nonlocal free_bytes
        if free_bytes == 0:
            raise OSError(28, "No space left on device")
        written = os.write(descriptor, data[:free_bytes])
        free_bytes -= written
        return written

    def ftruncate(descriptor: int, size: int) -> None:
        if not truncates:
            raise OSError(5, "Input/output error")
        os.ftruncate(descriptor, size)

    monkeypatch.setattr(log_writer, "os", SimpleNamespace(**{**vars(os), "write": write, "ftruncate": ftruncate}))


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("free_bytes", [0, 1, 60, 150, 400])
def test_a_short_write_leaves_complete_lines_and_loses_nothing(
    log: ActivityLog, folder: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, truncates: bool
) -> None:
    """If a partial line cannot be removed, the remaining records go into another file."""
    log.log("main", "s", {"number": 0})
    log.flush()
    failing_os(monkeypatch, free_bytes=free_bytes, truncates=truncates)
    for number in range(1, 11):
        log.log("main", "s", {"number": number})
    log.flush()
    assert log.stats().failures == 1
    monkeypatch.setattr(log_writer, "os", os)
    log.log("main", "s", {"number": 11})
    found = log.read("main")
    assert [value["number"] for value in values(found)] == list(range(12))
    assert len(log.files("main")) == (1 if truncates else 2)
    assert log.stats().dropped == 0
    assert log.stats().skipped == 0


def test_records_accepted_during_a_failed_write_keep_their_order(
    log: ActivityLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.log("main", "s", {"number": 0})

    def write(descriptor: int, data: bytes) -> int:
        log.log("main", "s", {"number": 1})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_writer, "os", SimpleNamespace(**{**vars(os), "write": write}))
    log.flush()
    monkeypatch.setattr(log_writer, "os", os)
    log.log("main", "s", {"number": 2})
    assert [value["number"] for value in values(log.read("main"))] == [0, 1, 2]


def test_a_header_that_does_not_fit_leaves_no_file(
    log: ActivityLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_os(monkeypatch, free_bytes=20)
    log.log("main", "s", {"number": 0})
    log.flush()
    assert local(folder) == []
    monkeypatch.setattr(log_writer, "os", os)
    assert values(log.read("main")) == [{"number": 0}]


def test_records_unwritten_at_the_end_of_a_session_are_dropped_and_counted(log: ActivityLog, folder: Path) -> None:
    folder.write_text("in the way")
    for number in range(3):
        log.log("main", "s", {"number": number})
    log.end_session("main", "s")
    stats = log.stats()
    assert (stats.accepted, stats.written, stats.dropped) == (3, 0, 3)
    folder.unlink()
    log.log("main", "s", {"number": 3})
    assert values(log.read("main")) == [{"number": 3}]


# Closing.


def test_close_writes_and_rotates_everything_and_rejects_later_calls(open_log: Open, folder: Path) -> None:
    log = open_log(start_flusher=True)
    session = log.session("main", "s", "k")
    session.log({"number": 0})
    log.log("main", "t", {"number": 1})
    log.close()
    log.close()
    assert local(folder) == []
    stats = log.stats()
    assert (stats.written, stats.rotated, stats.files) == (2, 2, 0)
    refused: list[Callable[[], Any]] = [
        lambda: session.log({}),
        lambda: log.log("main", "s", {}),
        lambda: log.log_encoded("main", "s", "k", [b"{}"]),
        lambda: log.session("main", "s", "k"),
        lambda: log.end_session("main", "s"),
        log.flush,
        lambda: log.files("main"),
        lambda: log.read("main"),
    ]
    for use in refused:
        with pytest.raises(Closed):
            use()
    assert [value["number"] for value in values(open_log().read("main"))] == [0, 1]


def test_records_accepted_during_close_are_written(open_log: Open) -> None:
    log = open_log(start_flusher=True, flush_seconds=0.001)
    accepted = [0, 0, 0]

    def work(thread: int) -> None:
        session = log.session("main", f"s{thread}", "k")
        with suppress(Closed):
            while True:
                session.log({"number": accepted[thread]})
                accepted[thread] += 1

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: min(accepted) > 100)
    log.close()
    for thread in threads:
        thread.join()
    again = open_log()
    for number in range(3):
        found = [value["number"] for value in values(everything(again, session=f"s{number}"))]
        assert found == list(range(accepted[number]))


def test_files_of_a_dead_process_are_rotated_when_the_log_is_opened(open_log: Open, folder: Path) -> None:
    dead = open_log(objects=None)
    dead.log("main", "s", {"number": 0})
    dead.close()
    assert len(local(folder)) == 1
    log = open_log(start_flusher=True)
    eventually(lambda: log.stats().rotated == 1)
    assert local(folder) == []
    assert values(log.read("main")) == [{"number": 0}]


def test_files_of_an_open_log_are_read_but_not_rotated_by_another(open_log: Open, folder: Path) -> None:
    """A file has one appender."""
    first, second = open_log(), open_log()
    for number in range(10):
        first.log("main", "s", {"first": number}, kind="k")
        second.log("main", "s", {"second": number}, kind="k")
        first.flush()
        second.flush()
    assert local(folder) == [f"{START}-2_s_k.jsonl", f"{START}_s_k.jsonl"]
    assert second.stats().rotated == 0
    for log in (first, second):
        found = values(log.read("main"))
        assert sorted(value["first"] for value in found if "first" in value) == list(range(10))
        assert sorted(value["second"] for value in found if "second" in value) == list(range(10))


def test_stats_add_up(log: ActivityLog, folder: Path) -> None:
    for number in range(10):
        log.log("main", f"s{number % 2}", {"number": number})
    assert log.stats().accepted == 10
    log.end_session("main", "s0")
    stats = log.stats()
    assert (stats.accepted, stats.written, stats.rotated, stats.files) == (10, 5, 1, 0)
    log.flush()
    stats = log.stats()
    assert (stats.accepted, stats.written, stats.files) == (10, 10, 1)
    assert (stats.failures, stats.last_error) == (0, None)
    records = sum(file.size - header_size(log, file) for file in log.files("main"))
    assert stats.bytes == records


def header_size(log: ActivityLog, file: Any) -> int:
    return log._body(file).index(b"\n") + 1


def test_positions_sort_in_the_order_of_logging(log: ActivityLog) -> None:
    for number in range(12):
        log.log("main", "s", {"number": number})
        if number % 3 == 0:
            log.end_session("main", "s")
    positions = [each.position for each in log.read("main", session="s")]
    assert positions == sorted(positions)
    assert isinstance(positions[0], Position)


def test_an_unexpected_error_in_a_session_does_not_end_the_flusher(
    open_log: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(start_flusher=True, flush_seconds=0.001)
    bad, failed = log.session("main", "bad", "activity"), threading.Event()

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    monkeypatch.setattr(bad, "write", fail)
    bad.log({"n": 1})
    log.log("main", "good", {"n": 2})
    assert failed.wait(60)
    log.log("main", "better", {"n": 3})
    eventually(lambda: log.stats().written >= 2)
    assert log.stats().failures >= 1
    assert "ZeroDivisionError" in caplog.text


def test_an_error_while_ending_a_session_does_not_affect_others(
    open_log: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    for name in ("bad", "good"):
        log.log("main", name, {"n": 1})
    log.flush()
    bad = log.session("main", "bad", "activity")
    end = bad.end

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bad, "end", fail)
    clock.advance_ms(round(limits.ACTIVITY_IDLE_SECONDS * 1_000))
    log.flush()
    assert log.stats().files == 1
    monkeypatch.setattr(bad, "end", end)
