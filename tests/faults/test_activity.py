"""Session logs when processes die, disks fill up and stores fail: records may be missing, but none are damaged."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import CommitUnknown, Unreachable
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.log import ActivityLog, LoggedRecord
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, faulty_objects
from tests.support.forked import run_python, start_python
from tests.support.waiting import eventually

LOGGING = """
import sys, threading
from pathlib import Path
from fastness.runtime.activity.log import ActivityLog

log = ActivityLog(Path(sys.argv[1]), None, flush_seconds=0.002, file_bytes_max=int(sys.argv[2]))
pause = threading.Event()
def work(thread):
    session = log.session("main", "s", "k")
    number = 0
    while True:
        session.log({"thread": thread, "number": number, "text": "x" * (number % 300)})
        number += 1
        if number % 50 == 0:
            pause.wait(0.001)  # Limits the amount of data.
for thread in range(2):
    threading.Thread(target=work, args=(thread,), daemon=True).start()
print("logging", flush=True)
threading.Event().wait()
"""


def everything(log: ActivityLog, **which: Any) -> list[LoggedRecord]:
    found: list[LoggedRecord] = []
    while page := log.read("main", **which, after=found[-1].position if found else None, limit=10_000):
        found += page
    return found


def values(records: list[LoggedRecord]) -> list[Any]:
    return [msgspec.json.decode(each.record) for each in records]


def start_logging(folder: Path, *, file_bytes_max: int = 1 << 30) -> "subprocess.Popen[bytes]":
    child = start_python(["-c", LOGGING, folder, str(file_bytes_max)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"logging\n"
    return child


def kill(child: "subprocess.Popen[bytes]") -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def wait_for_bytes(folder: Path, size: int) -> None:
    eventually(lambda: sum(path.stat().st_size for path in folder.glob("main/*.jsonl")) >= size, "logged")


def check_threads(found: list[LoggedRecord]) -> None:
    """The records of each thread are complete from its first one, in order, without gaps."""
    for thread in range(2):
        mine = [value["number"] for value in values(found) if value["thread"] == thread]
        assert mine == list(range(len(mine)))


@pytest.mark.parametrize("size", [1, 20_000, 300_000])
def test_a_killed_writer_leaves_complete_records_and_at_most_a_truncated_end(tmp_path: Path, size: int) -> None:
    """During writing and after a kill, all lines but the last are complete."""
    folder = tmp_path / "activity"
    reader = ActivityLog(folder, None, start_flusher=False)
    child = start_logging(folder)
    try:
        wait_for_bytes(folder, size)
        while_it_logs = reader.read("main")
    finally:
        kill(child)
    (path,) = folder.glob("main/*.jsonl")
    bad = [line is None for _, line in log_format.lines(path.read_bytes())]
    assert sum(bad[:-1]) == 0
    found = everything(reader)
    assert [each.position.n for each in found] == list(range(len(found)))
    assert found[: len(while_it_logs)] == while_it_logs
    check_threads(found)
    reader.close()

    objects = open_objects(f"dir:{tmp_path / 'objects'}")
    again = ActivityLog(folder, objects, start_flusher=False)
    assert everything(again) == found
    assert list(folder.glob("main/*")) == []
    assert again.stats().skipped == 0
    again.close()


def test_killed_writers_with_many_files_lose_none_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "activity"
    child = start_logging(folder, file_bytes_max=10_000)
    try:
        wait_for_bytes(folder, 200_000)
    finally:
        kill(child)
    log = ActivityLog(folder, open_objects("memory:"), start_flusher=False)
    assert len(log.files("main")) >= 20
    found = everything(log)
    check_threads(found)
    assert log.stats().rotated >= 20
    assert everything(log) == found
    log.close()


def test_two_processes_on_one_folder_never_share_a_file(tmp_path: Path) -> None:
    """Files have one appender each, while a third process rotates."""
    folder, objects = tmp_path / "activity", open_objects("memory:")
    children = [start_logging(folder, file_bytes_max=20_000) for _ in range(2)]
    log = ActivityLog(folder, objects, start_flusher=False)
    try:
        wait_for_bytes(folder, 400_000)
        log.flush()
        assert log.stats().rotated > 0
        wait_for_bytes(folder, 100_000)
    finally:
        for child in children:
            kill(child)
    log.close()
    log = ActivityLog(folder, objects, start_flusher=False)
    found = everything(log)
    by_file: dict[str, list[LoggedRecord]] = {}
    for each in found:
        by_file.setdefault(each.position.file, []).append(each)
    for records in by_file.values():
        assert [each.position.n for each in records] == list(range(len(records)))
        for thread in range(2):  # Of one process, so in sequence.
            mine = [value["number"] for value in values(records) if value["thread"] == thread]
            first = mine[0] if mine else 0
            assert mine == list(range(first, first + len(mine)))
    for thread in range(2):  # Of both processes: every number twice, up to the first kill.
        numbers = sorted(value["number"] for value in values(found) if value["thread"] == thread)
        twice = len(numbers) - len(set(numbers))
        assert numbers == sorted([*range(numbers[-1] + 1), *range(twice)])
    assert log.stats().skipped == 0
    log.close()


FILLING = """
import json, resource, sys
from pathlib import Path
from fastness.runtime.activity.log import ActivityLog

log = ActivityLog(Path(sys.argv[1]), None, start_flusher=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for number in range(3_000):
    log.log("main", "s", {"number": number, "text": "x" * 50})
    if number % 100 == 99:
        log.flush()
full = log.stats()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.flush()
print(json.dumps([full.written, full.failures > 10, full.last_error, log.stats().written, log.stats().dropped]))
log.close()
"""


def test_a_file_that_cannot_grow_keeps_complete_lines_and_the_rest_is_buffered(tmp_path: Path) -> None:
    """Simulates a full disk where no small file system can be mounted."""
    done = run_python(["-c", FILLING, tmp_path / "activity"], check=True)
    written, has_failed, error, later, dropped = json.loads(done.stdout)
    assert 500 < written < 1_500
    assert has_failed
    assert "too large" in error
    assert (later, dropped) == (3_000, 0)
    assert done.stderr.count("Writing session logs fails") == 1
    log = ActivityLog(tmp_path / "activity", None, start_flusher=False)
    found = everything(log)
    assert [value["number"] for value in values(found)] == list(range(3_000))
    assert [each.position.n for each in found] == list(range(3_000))
    assert log.stats().skipped == 0
    log.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system; run the tests as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_drops_the_oldest_and_damages_nothing(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    log = ActivityLog(small_disk / "activity", None, start_flusher=False)
    session = log.session("main", "s", "k")
    for number in range(20_000):
        session.log({"number": number, "text": "x" * 50})
        if number % 500 == 499:
            log.flush()
    stats = log.stats()
    assert stats.written > 1_000
    assert stats.dropped > 1_000
    assert "No space left" in (stats.last_error or "")
    ballast.unlink()
    found = everything(log)
    numbers = [value["number"] for value in values(found)]
    assert [each.position.n for each in found] == list(range(len(found)))
    assert numbers[: stats.written] == list(range(stats.written))
    waited = numbers[stats.written :]
    assert waited == list(range(stats.written + stats.dropped, 20_000))
    assert log.stats().skipped == 0
    log.close()


def prepared(folder: Path) -> list[Any]:
    """Three closed files, one of them with a truncated end, as a process without an object store left them."""
    clock = ManualClock()
    log = ActivityLog(folder, None, clock=clock, start_flusher=False)
    for number in range(30):
        log.log("main", f"s{number // 10}", {"number": number})
    log.close()
    path = max(folder.glob("main/*"))
    path.write_bytes(path.read_bytes() + b'{"n":10,"at_ms":17')
    return [{"number": number} for number in range(30)]


def objects_of(store: ObjectStore) -> dict[str, bytes]:
    return {meta.path: store.get(meta.path) for meta in store.list()}


def rotate_all(folder: Path, store: ObjectStore) -> None:
    ActivityLog(folder, store, start_flusher=False).flush()


def test_a_rotation_interrupted_by_a_crash_is_completed_at_the_next_open(tmp_path: Path) -> None:
    """Also after a partial body. Every record is read once before and after, and the objects are the same."""
    made = tmp_path / "made"
    wanted = prepared(made)
    files = {path.name: path.read_bytes() for path in made.glob("main/*")}

    def start(name: str) -> tuple[Path, ObjectStore]:
        folder = tmp_path / name / "activity"
        (folder / "main").mkdir(parents=True)
        for file, data in files.items():
            (folder / "main" / file).write_bytes(data)
        return folder, open_objects(f"dir:{tmp_path / name / 'objects'}")

    counting = ChosenFault()
    folder, store = start("without a fault")
    rotate_all(folder, faulty_objects(store, counting))
    final = objects_of(store)
    assert len(final) == 6
    assert len(counting.points) == 18
    for fail_at in range(len(counting.points)):
        folder, store = start(str(fail_at))
        with pytest.raises(Crash):
            rotate_all(folder, faulty_objects(store, ChosenFault(fail_at)))
        reader = ActivityLog(folder, store, start_flusher=False)
        reader._rotation._has_scanned = True  # It reads before the leftovers are rotated.
        assert sorted(values(everything(reader)), key=lambda value: value["number"]) == wanted
        log = ActivityLog(folder, store, start_flusher=False)
        assert sorted(values(everything(log)), key=lambda value: value["number"]) == wanted
        assert objects_of(store) == final, counting.points[fail_at]
        assert list(folder.glob("main/*")) == []
        log.close()


@pytest.mark.parametrize("error", [lambda: Unreachable("down"), lambda: CommitUnknown("lost")])
def test_a_failed_rotation_step_is_repeated_by_the_next_run(tmp_path: Path, error: Any) -> None:
    for fail_at in range(18):
        folder = tmp_path / str(fail_at) / "activity"
        wanted = prepared(folder)
        store = open_objects(f"dir:{tmp_path / str(fail_at) / 'objects'}")
        log = ActivityLog(folder, faulty_objects(store, ChosenFault(fail_at, error)), start_flusher=False)
        log.flush()
        assert list(folder.glob("main/*"))
        log.flush()
        assert list(folder.glob("main/*")) == []
        assert sorted(values(everything(log)), key=lambda value: value["number"]) == wanted
        assert (log.stats().rotated, log.stats().failures) == (3, 1)
        log.close()


def test_a_forked_child_holds_no_log_and_cannot_log(tmp_path: Path) -> None:
    """The parent continues to log to the same file while children start and end."""
    command = [sys.executable, "-c", FORKING, str(tmp_path / "activity")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0"] * 10, done.stderr
    log = ActivityLog(tmp_path / "activity", None, start_flusher=False)
    assert len(log.files("main")) == 1
    found = everything(log)
    assert [value["number"] for value in values(found)] == list(range(len(found)))
    log.close()


FORKING = """
import os, sys, threading
from pathlib import Path
from fastness.errors import Closed
from fastness.runtime.activity.log import ActivityLog

folder = sys.argv[1]
log = ActivityLog(Path(folder), None, flush_seconds=0.001)
session = log.session("main", "s", "k")
session.log({"number": 0})
log.flush()
stop = threading.Event()
def work():
    number = 1
    while not stop.is_set():
        session.log({"number": number})
        number += 1
thread = threading.Thread(target=work)
thread.start()

def refused(use):
    try:
        use()
    except Closed:
        return True

def held():
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and os.readlink(link).startswith(folder)]

assert len(held()) == 1
for _ in range(10):
    child = os.fork()
    if child == 0:
        uses = [lambda: session.log({}), lambda: log.log("main", "s", {}), log.flush, lambda: log.read("main")]
        code = 1
        if all(map(refused, uses)) and held() == []:
            log.close()
            code = 0
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
thread.join()
log.close()
"""


def test_a_child_process_does_not_keep_the_file_of_its_parent_locked(tmp_path: Path) -> None:
    """Otherwise the file of a dead parent could not be rotated while its child runs."""
    script = (
        "import os, signal, sys; from pathlib import Path; from fastness.runtime.activity.log import ActivityLog;"
        "log = ActivityLog(Path(sys.argv[1]), None, start_flusher=False); log.log('main', 's', {}); log.flush();"
        "os.fork() and os.kill(os.getpid(), signal.SIGKILL); print(os.getpid(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait()
        os.kill(child, 0)
        log = ActivityLog(tmp_path, open_objects("memory:"), start_flusher=False)
        log.flush()
        assert log.stats().rotated == 1
        log.close()


def test_a_finalizer_that_logs_during_a_log_call_does_not_deadlock(tmp_path: Path) -> None:
    """Like a signal handler, a finalizer runs at any point of its thread."""
    log = ActivityLog(tmp_path, None, start_flusher=False)
    session = log.session("main", "s", "k")
    is_inside = threading.local()

    def now_ms() -> int:
        if not getattr(is_inside, "yes", False):
            is_inside.yes = True
            session.log({"from": "the finalizer"})
        return 1_700_000_000_000

    session._now_ms = now_ms
    session.log({"from": "the caller"})
    assert [value["from"] for value in values(log.read("main"))] == ["the finalizer", "the caller"]
    log.close()
