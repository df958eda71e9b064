"""A power loss at any time, and system calls that fail: nothing acknowledged is lost, and every error is typed.

Images are built from the trace of one process (`storage_child.py`). A failure names the seed; to repeat it alone:

    pytest tests/faults/test_storage.py --image-seed SEED
"""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastness.backends.rocksdb import RocksDatabase, RocksReader
from fastness.testing.storage import (
    CompilerMissing,
    Event,
    Image,
    Kind,
    Loss,
    Recorder,
    build_image,
    build_recorder,
    read_trace,
    write_image,
)
from tests.faults import storage_child, storage_delivery_child, storage_plane_child
from tests.support.depth import Depth

CHILD = Path(__file__).parent / "storage_child.py"
PLANE_CHILD = Path(__file__).parent / "storage_plane_child.py"
DELIVERY_CHILD = Path(__file__).parent / "storage_delivery_child.py"
DEADLINE_SECONDS = 600.0
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    try:
        return build_recorder(tmp_path_factory.mktemp("recorder"))
    except CompilerMissing:
        pytest.skip("no C compiler on the path; apt-get install gcc libc6-dev")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, in memory where that is possible: opening a directory syncs it several times."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fastness-images-", dir=parent) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def image_folder() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


class Trace(NamedTuple):
    """The recorded run of a child process."""

    events: list[Event]
    root: str


def record_trace(recorder: Recorder, folder: Path, *command: str) -> Trace:
    root = folder / "root"
    root.mkdir()
    environment = recorder.environment(root, marks=folder / "marks", trace=folder / "trace")
    subprocess.run(
        [sys.executable, *command, str(root), str(folder / "marks")],
        env=environment,
        check=True,
        timeout=DEADLINE_SECONDS,
    )
    return Trace(read_trace(folder / "trace"), str(root))


@pytest.fixture(scope="module")
def trace(recorder: Recorder) -> Iterator[Trace]:
    with folder_in_memory() as folder:
        yield record_trace(recorder, folder, str(CHILD), "write")


@pytest.fixture(scope="module")
def plane_trace(recorder: Recorder) -> Iterator[Trace]:
    with folder_in_memory() as folder:
        yield record_trace(recorder, folder, str(PLANE_CHILD))


@pytest.fixture(scope="module")
def delivery_trace(recorder: Recorder) -> Iterator[Trace]:
    with folder_in_memory() as folder:
        yield record_trace(recorder, folder, str(DELIVERY_CHILD))


def check_image(image: Image, folder: Path) -> None:
    """Open an image, and check every acknowledgement that came before its power loss."""
    acknowledged = [mark.split() for mark in image.marks]
    durable = max((int(number) for number, how in acknowledged if how != b"important"), default=-1)
    path = folder / "data" / "kv"
    read_first = None
    if acknowledged and image.seed % 10 == 5:
        with RocksReader(path) as reader:
            read_first = storage_child.stored_numbers(reader)
    with RocksDatabase(path) as database:
        stored = storage_child.stored_numbers(database)
        assert stored == list(range(len(stored))), "a commit is missing before a later one"
        assert durable < len(stored) <= len(acknowledged) + 1, f"commit {durable} was acknowledged as durable"
        assert read_first in (None, stored), "a reader finds other commits"
        database.transact(storage_child.write, len(stored))
    if image.seed % 10 == 0:
        with RocksDatabase(path) as database:
            assert len(storage_child.stored_numbers(database)) == len(stored) + 1


def check_images(trace: Trace, seeds: Iterable[int], images: Path) -> Counter[str]:
    """Check an image per seed: each opens, with all that was acknowledged. Returns how many, by kind of loss."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        image = build_image(trace.events, trace.root, seed)
        folder = images / str(seed)
        write_image(image, folder)
        try:
            check_image(image, folder)
        except BaseException as error:
            raise AssertionError(f"{image}: {error}") from error
        counts[image.loss] += 1
        shutil.rmtree(folder)
    print(f"{counts.total()} images: {dict(sorted(counts.items()))}")
    return counts


def chosen_seeds(request: pytest.FixtureRequest, count: int, first: int = 0) -> list[int]:
    one = request.config.getoption("--image-seed")
    return list(range(first, first + count)) if one is None else [one]


def test_the_trace_has_every_kind_of_event(trace: Trace) -> None:
    """Otherwise the images below would prove little."""
    kinds = Counter(event.kind for event in trace.events)
    print(f"{len(trace.events)} events: {dict(kinds)}")
    assert kinds[Kind.MARK] == 77
    assert {*Kind} - {Kind.LINK} <= set(kinds)
    assert any(event.path.endswith(".sst") for event in trace.events if event.kind is Kind.CREATE)
    assert any(event.target.endswith("/CURRENT") for event in trace.events if event.kind is Kind.RENAME)


@pytest.mark.parametrize("which", ["trace", "plane_trace"])
def test_the_whole_trace_gives_the_files_that_the_process_left(request: pytest.FixtureRequest, which: str) -> None:
    """The recorder saw every write: if nothing is lost, the image is the real folder."""
    trace: Trace = request.getfixturevalue(which)
    image = build_image(trace.events, trace.root, 0, first_cut=len(trace.events), loss=Loss.NOTHING)
    files = {path: path.read_bytes() for path in Path(trace.root).rglob("*") if path.is_file()}
    real = {str(path.relative_to(trace.root)): data for path, data in files.items()}
    assert {path: data for path, data in image.entries.items() if data is not None} == real


def test_every_acknowledged_commit_is_in_every_image(
    trace: Trace, image_folder: Path, depth: Depth, request: pytest.FixtureRequest
) -> None:
    counts = check_images(trace, chosen_seeds(request, round(200 * depth.images)), image_folder)
    assert request.config.getoption("--image-seed") is not None or counts.total() == round(200 * depth.images)


@pytest.mark.nightly
def test_every_acknowledged_commit_is_in_twenty_thousand_images(
    trace: Trace, image_folder: Path, request: pytest.FixtureRequest
) -> None:
    first = random.randrange(1 << 32)
    print(f"seeds from {first}")
    check_images(trace, chosen_seeds(request, 20_000, first), image_folder)


def test_a_new_current_may_reach_the_disk_without_its_manifest(trace: Trace, image_folder: Path) -> None:
    """RocksDB syncs the folder only after CURRENT names a new MANIFEST. So the power is lost just before that."""
    cuts = [
        number
        for number, event in enumerate(trace.events, 1)
        if event.kind is Kind.RENAME and event.target.endswith("/CURRENT")
    ]
    assert len(cuts) == 3
    without = 0
    for cut in cuts:
        for seed in range(12):
            image = build_image(trace.events[:cut], trace.root, seed, first_cut=cut, loss=Loss.ANYTHING)
            named = image.entries.get("data/kv/CURRENT") or b""
            without += bool(named) and f"data/kv/{named.decode().strip()}" not in image.entries
            write_image(image, image_folder / "image")
            check_image(image, image_folder / "image")
            shutil.rmtree(image_folder / "image")
    assert without >= 3, "no image lacks the MANIFEST"


def check_plane_image(image: Image, root: Path, *, resume: bool) -> str:
    """Check an image of a whole plane, and return what became of the backup.

    It is written to the recorded folder: an interrupted backup resumes only where it began.
    """
    shutil.rmtree(root)
    write_image(image, root)
    outcome = "not begun"
    try:
        if any(mark.startswith(b"closed") for mark in image.marks):
            outcome = storage_plane_child.check_backup(root, image.marks, resume=resume)
        storage_plane_child.check_plane(root / "data", image.marks)
    except BaseException as error:
        raise AssertionError(f"{image}, backup {outcome}: {error}") from error
    return outcome


def check_plane_images(trace: Trace, seeds: Iterable[int]) -> Counter[str]:
    """Check an image per seed. Returns how many, by kind of loss and what became of the backup."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        image = build_image(trace.events, trace.root, seed)
        outcome = check_plane_image(image, Path(trace.root), resume=seed % 2 == 0)
        counts[f"{image.loss}, backup {outcome}"] += 1
    print(f"{counts.total()} images: {dict(sorted(counts.items()))}")
    return counts


def test_the_trace_of_a_plane_has_every_kind_of_file(plane_trace: Trace) -> None:
    names = [event.target or event.path for event in plane_trace.events if event.kind is not Kind.WRITE]
    for part in ("/objects/cas/", "/objects/segments/", "/objects/activity-manifest/", "/data/activity/", "/.backup-"):
        assert any(part in name for name in names), f"nothing was recorded in {part}"
    for name in ("data/fastness.json", "backup/backup.json", "restored/"):
        assert any(f"{each}/".endswith(f"/{name.rstrip('/')}/") for each in names), f"{name} was not recorded"


def test_every_image_of_a_plane_holds_what_was_acknowledged(
    plane_trace: Trace, depth: Depth, request: pytest.FixtureRequest
) -> None:
    counts = check_plane_images(plane_trace, chosen_seeds(request, round(120 * depth.images)))
    assert request.config.getoption("--image-seed") is not None or counts.total() == round(120 * depth.images)


def test_a_backup_never_resumes_from_a_partial_checkpoint(plane_trace: Trace, depth: Depth) -> None:
    """The power is lost just after a checkpoint got a name, before the names in it are durable."""
    cuts = [
        number
        for number, event in enumerate(plane_trace.events, 1)
        if event.kind is Kind.RENAME and re.search(r"/\.backup-[^/]*$", event.target)
    ]
    assert cuts
    for cut in cuts:
        for seed in range(max(3, round(10 * depth.images))):
            image = build_image(plane_trace.events[:cut], plane_trace.root, seed, first_cut=cut, loss=Loss.ANYTHING)
            assert check_plane_image(image, Path(plane_trace.root), resume=True) == "refused"


def test_a_restored_directory_is_durable_when_the_command_ends(plane_trace: Trace) -> None:
    end = len(plane_trace.events)
    image = build_image(plane_trace.events, plane_trace.root, 0, first_cut=end, loss=Loss.EVERYTHING)
    assert check_plane_image(image, Path(plane_trace.root), resume=False) == "restored"


@pytest.mark.nightly
def test_ten_thousand_images_of_a_plane_hold_what_was_acknowledged(
    plane_trace: Trace, request: pytest.FixtureRequest
) -> None:
    first = random.randrange(1 << 32)
    print(f"seeds from {first}")
    check_plane_images(plane_trace, chosen_seeds(request, 10_000, first))


def check_delivery_images(trace: Trace, seeds: Iterable[int], images: Path) -> int:
    """Check an image per seed: no fence is issued twice. Returns how many deliveries the power losses undid."""
    undone = 0
    for seed in seeds:
        image = build_image(trace.events, trace.root, seed)
        folder = images / str(seed)
        write_image(image, folder)
        try:
            undone += storage_delivery_child.check(folder, image.marks)
        except BaseException as error:
            raise AssertionError(f"{image}: {error}") from error
        shutil.rmtree(folder)
    print(f"{undone} deliveries were undone")
    return undone


def test_no_fence_is_issued_twice_although_a_power_loss_undoes_deliveries(
    delivery_trace: Trace, image_folder: Path, depth: Depth, request: pytest.FixtureRequest
) -> None:
    count = round(100 * depth.images)
    undone = check_delivery_images(delivery_trace, chosen_seeds(request, count), image_folder)
    assert undone > count // 10 or request.config.getoption("--image-seed") is not None


@pytest.mark.nightly
def test_no_fence_is_issued_twice_in_ten_thousand_images(
    delivery_trace: Trace, image_folder: Path, request: pytest.FixtureRequest
) -> None:
    first = random.randrange(1 << 32)
    print(f"seeds from {first}")
    check_delivery_images(delivery_trace, chosen_seeds(request, 10_000, first), image_folder)


class Failure(NamedTuple):
    """The calls that fail: `times` of them, from the call number `call`."""

    call: int
    error: int
    times: int

    def __str__(self) -> str:
        return f"call {self.call} failing {self.times} times with {errno.errorcode[self.error]}"


def run_with_failures(recorder: Recorder, folder: Path, failures: list[Failure]) -> list[dict[str, Any]]:
    """The reports of one short run for each failure, in a process of its own."""
    folder = folder.resolve()
    environment = recorder.environment(folder, marks=folder.parent / "marks")
    command = [sys.executable, str(CHILD), "fail", str(folder), *(":".join(map(str, each)) for each in failures)]
    child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_SECONDS)
    return [json.loads(line) for line in child.stdout.splitlines()]


def check_failures(recorder: Recorder, folder: Path, failures: list[Failure]) -> None:
    """No acknowledged write is lost, every error is typed, and a failed database can be reopened."""
    reports = run_with_failures(recorder, folder, failures)
    assert len(reports) == len(failures)
    counts: Counter[str] = Counter()
    for failure, report in zip(failures, reports, strict=True):
        assert "broken" not in report, f"{failure}: {report['broken']}"
        assert set(report["acknowledged"]) <= set(report["stored"]), f"{failure}: lost acknowledged writes {report}"
        assert not any(error.startswith("untyped") for error in report["errors"]), f"{failure}: {report['errors']}"
        assert "path_unusable" not in report["errors"], f"{failure}: it is not the path that cannot be used"
        counts[report["errors"][0] if report["errors"] else "no error"] += 1
        counts["reopened"] += report["reopened"]
    print(f"{len(failures)} runs: {dict(counts)}")


@pytest.fixture
def folder(image_folder: Path) -> Path:
    path = image_folder / "failing"
    path.mkdir()
    return path


def count_calls(recorder: Recorder, folder: Path) -> int:
    """How many calls of a run can fail."""
    never = Failure(1 << 30, errno.EIO, 1)
    (folder / "counted").mkdir()
    [report] = run_with_failures(recorder, folder / "counted", [never])
    assert report["acknowledged"] == report["stored"] == list(range(8)), report
    return int(report["calls"])


def test_system_calls_that_fail_lose_no_acknowledged_write(recorder: Recorder, folder: Path, depth: Depth) -> None:
    """A sample of the calls of a run, once with each error; all of them in nightly runs."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    calls, chance = count_calls(recorder, folder), random.Random(seed)
    failures = [
        Failure(call, error, chance.choice((1, 1_000)))
        for error in ERRORS
        for call in sorted(chance.sample(range(calls), round(15 * depth.images)))
    ]
    check_failures(recorder, folder, failures)


@pytest.mark.nightly
@pytest.mark.parametrize("times", [1, 1_000])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_each_system_call_fails_in_turn(recorder: Recorder, folder: Path, error: int, times: int) -> None:
    calls = count_calls(recorder, folder)
    print(f"{calls} calls")
    check_failures(recorder, folder, [Failure(call, error, times) for call in range(calls)])
