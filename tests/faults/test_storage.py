"""What a power loss leaves of a real run, and system calls that fail: nothing acknowledged is lost, every error is typed.

Images are built from the trace of one process (`storage_child.py`). A failure names the seed; to repeat it alone:

    pytest tests/faults/test_storage.py --image-seed SEED
"""

import errno
import json
import random
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import DamagedDatabase
from holdfast.testing.storage import (
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

CHILD = Path(__file__).parent / "storage_child.py"
CHILD_MODULE: Any = runpy.run_path(str(CHILD))  # Test files cannot import each other.
DEADLINE_SECONDS = 600.0
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    try:
        return build_recorder(tmp_path_factory.mktemp("recorder"))
    except CompilerMissing as error:
        pytest.skip(str(error))


class Trace(NamedTuple):
    """The recorded run of a child process."""

    events: list[Event]
    root: str

    @property
    def data_folders(self) -> list[str]:
        return [f"{self.root}/data", f"{self.root}/data/kv"]


@pytest.fixture(scope="module")
def trace(recorder: Recorder, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("recorded").resolve()
    root = folder / "root"
    root.mkdir()
    environment = recorder.environment(root, marks=folder / "marks", trace=folder / "trace")
    command = [sys.executable, str(CHILD), "write", str(root), str(folder / "marks")]
    subprocess.run(command, env=environment, check=True, timeout=DEADLINE_SECONDS)
    return Trace(read_trace(folder / "trace"), str(root))


def check_image(image: Image, folder: Path) -> None:
    """Open an image, and check every acknowledgement that came before its power loss.

    Raises:
        DamagedDatabase: it was refused.
    """
    acknowledged = [mark.split() for mark in image.marks]
    durable = max((int(number) for number, how in acknowledged if how != b"important"), default=-1)
    with RocksDatabase(folder / "data" / "kv") as database:
        stored = CHILD_MODULE["stored_numbers"](database)
        assert stored == list(range(len(stored))), "a commit is missing before a later one"
        assert durable < len(stored) <= len(acknowledged) + 1, f"commit {durable} was acknowledged as durable"
        database.transact(CHILD_MODULE["write"], len(stored))
    if image.seed % 10 == 0:
        with RocksDatabase(folder / "data" / "kv") as database:
            assert len(CHILD_MODULE["stored_numbers"](database)) == len(stored) + 1


def check_images(trace: Trace, seeds: Iterable[int], tmp_path: Path, *, strict: bool = False) -> Counter[str]:
    """Check an image per seed. Returns how many were opened and how many refused, by kind of loss.

    Without `strict`, the names of the data directory itself count as durable, and an image whose unsynced writes are
    torn, zeroed or out of order may be refused.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        image = build_image(trace.events, trace.root, seed, synced_names=() if strict else trace.data_folders)
        folder = tmp_path / str(seed)
        write_image(image, folder)
        try:
            check_image(image, folder)
            counts[f"{image.loss}: opened"] += 1
        except DamagedDatabase as error:
            if strict or image.loss in (Loss.NOTHING, Loss.EVERYTHING):
                raise AssertionError(f"{image}: refused, although nothing synced is damaged") from error
            counts[f"{image.loss}: refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{image}: {error}") from error
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


def test_the_whole_trace_gives_the_files_that_the_process_left(trace: Trace) -> None:
    """The recorder saw every write: if nothing is lost, the image is the real folder."""
    seed = next(seed for seed in range(100) if build_image(trace.events, trace.root, seed).loss is Loss.NOTHING)
    image = build_image(trace.events, trace.root, seed, first_cut=len(trace.events))
    files = {path: path.read_bytes() for path in Path(trace.root).rglob("*") if path.is_file()}
    real = {str(path.relative_to(trace.root)): data for path, data in files.items() if not path.name.startswith("LOG")}
    assert {path: data for path, data in image.entries.items() if data is not None} == real


def test_every_acknowledged_commit_is_in_every_image(
    trace: Trace, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    counts = check_images(trace, chosen_seeds(request, 200), tmp_path)
    assert request.config.getoption("--image-seed") is not None or counts.total() == 200


@pytest.mark.nightly
def test_every_acknowledged_commit_is_in_twenty_thousand_images(
    trace: Trace, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = random.randrange(1 << 32)
    print(f"seeds from {first}")
    check_images(trace, chosen_seeds(request, 20_000, first), tmp_path)


@pytest.mark.xfail(
    strict=True, reason="a torn record before zeros, and sectors out of order, make a sound directory refuse to open"
)
def test_no_image_is_refused(trace: Trace, tmp_path: Path) -> None:
    counts = check_images(trace, range(100), tmp_path)
    assert not any("refused" in outcome for outcome in counts)


@pytest.mark.xfail(strict=True, reason="the parent of a new data directory is not synced")
def test_a_new_data_directory_is_durable(trace: Trace, tmp_path: Path) -> None:
    """Nothing unsynced reached the disk. What was acknowledged is there, so its folders must be, too."""
    seeds = [seed for seed in range(60) if build_image(trace.events, trace.root, seed).loss is Loss.EVERYTHING]
    check_images(trace, seeds, tmp_path, strict=True)
