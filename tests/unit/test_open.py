"""Opening a plane by its URL, and the errors of invalid URLs."""

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, limits
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Closed, DirectoryInUse, DiskFull, InvalidArgument, InvalidUrl, PathUnusable, SchemaMismatch
from fastness.kv import Database, Transaction
from fastness.kv.formats import FORMAT
from fastness.plane import open as opening
from fastness.testing.clock import ManualClock


@pytest.mark.parametrize(
    "url", ["", "redis://localhost", "dir:", "memory:x", "DIR:/data", "postgresql:host", ":", "file:///data"]
)
def test_an_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrl, match=r"does not name a backend|is not a known backend"):
        fastness.open(url)


@pytest.mark.parametrize("url", ["data", "./data", "/var/lib/data"])
def test_a_plain_path_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(InvalidUrl, match=f"write dir:{url}"):
        fastness.open(url)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://127.0.0.1:9440", 'fastness.connect("http://127.0.0.1:9440")'),
        ("https://plane.example", 'fastness.connect("https://plane.example")'),
        ("http://ada:secret@host", 'fastness.connect("http://HOST:PORT")'),
        ("localhost:9440", "write http://localhost:9440"),
        (Path("data"), 'write "dir:data"'),
    ],
    ids=str,
)
def test_open_of_a_server_suggests_connect(url: Any, hint: str) -> None:
    with pytest.raises(InvalidUrl, match=re.escape(hint)) as caught:
        fastness.open(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("dir:./data", 'fastness.open("dir:./data")'),
        ("./data", 'fastness.open("dir:./data")'),
        (Path("data"), 'fastness.open("dir:data")'),
        ("memory:", 'fastness.open("memory:")'),
        ("postgresql://ada:secret@host/db", 'fastness.open("postgresql://…")'),
        ("localhost:9440", "write http://localhost:9440"),
        ("ftp://ada:secret@host", "write http://HOST:PORT"),
    ],
    ids=str,
)
def test_connect_to_a_plane_that_is_not_served_suggests_open(url: Any, hint: str) -> None:
    with pytest.raises(InvalidUrl, match=re.escape(hint)) as caught:
        fastness.connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", [None, 7, b"memory:", Path("data"), ["memory:"]], ids=repr)
def test_a_url_is_text(url: Any) -> None:
    with pytest.raises(InvalidUrl, match=type(url).__name__):
        fastness.open(url)


async def test_open_async_refuses_the_same() -> None:
    with pytest.raises(InvalidUrl):
        await fastness.open_async("redis://localhost")


@pytest.mark.parametrize("below", ["", "/data", "/a/b"])
def test_a_path_at_or_below_a_file_is_unusable(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathUnusable, match="choose a folder"):
        fastness.open(f"dir:{tmp_path}/file{below}")


@pytest.mark.parametrize("path", ["/proc", "/proc/data", "/" + "x" * 300, "\0", "\ud800"], ids=ascii)
def test_a_path_that_cannot_be_written_is_unusable(path: str) -> None:
    with pytest.raises(PathUnusable):
        fastness.open(f"dir:{path}")


def test_a_file_instead_of_the_key_space_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(PathUnusable, match="kv"):
        fastness.open(f"dir:{tmp_path}")


# The format of a folder.


def test_a_new_folder_is_marked_with_its_format(tmp_path: Path) -> None:
    fastness.open(f"dir:{tmp_path}/deep/data").close()
    assert json.loads((tmp_path / "deep/data/fastness.json").read_text()) == {"format": FORMAT}
    assert sorted(path.name for path in (tmp_path / "deep/data").iterdir()) == ["fastness.json", "kv", "objects"]


def everything_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """What is in a folder, without the files of RocksDB, whose folder protects them; and its mode."""
    for path in (folder, *folder.rglob("*")):
        if path.parent.name != "kv":
            yield path, stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_access_what_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, found = os.umask(0o022), list[tuple[Path, int]]()
    try:
        for _ in range(2):
            with fastness.open(f"dir:{tmp_path}/new/data") as plane:
                plane.blobs.put(b"large" * 10_000)
                plane.activity.log("s", {"a": 1})
                # It is in a local file now, and in the object store once closed.
                assert plane.activity.read(session="s").records
                found = list(everything_in(tmp_path / "new"))
    finally:
        os.umask(before)
    assert {"fastness.json", "kv", "objects", "activity"} <= {path.name for path, _ in found}
    assert {path.suffix for path, _ in found} >= {".json", ".jsonl"}
    assert [path for path, mode in found if mode != (0o700 if path.is_dir() else 0o600)] == []
    assert "other users" not in caplog.text


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_can_access_is_reported_once_and_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    data = tmp_path / "data"
    fastness.open(f"dir:{data}").close()
    data.chmod(mode)
    (data / "fastness.json").chmod(0o644)
    fastness.open(f"dir:{data}").close()
    [line] = [record.getMessage() for record in caplog.records if "other users" in record.getMessage()]
    assert f"mode {mode:04o}; also: fastness.json" in line
    assert f"fastness doctor --fix {data}" in line
    assert stat.S_IMODE(data.stat().st_mode) == mode


@pytest.mark.parametrize("found", [FORMAT + 1, 0])
def test_a_folder_of_another_format_is_refused(tmp_path: Path, found: Any) -> None:
    (tmp_path / "fastness.json").write_text(json.dumps({"format": found}))
    with pytest.raises(SchemaMismatch, match=f"has format {found}"):
        fastness.open(f"dir:{tmp_path}")
    assert not (tmp_path / "kv").exists()


BROKEN = [b"", b"{", b"{}", b"[]", b"null", b"7", b"\x80", b'{"format"', b"[" * 100_000, b'{"format":' * 100_000]


@pytest.mark.parametrize("body", BROKEN)
def test_a_folder_with_a_damaged_marker_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "fastness.json").write_bytes(body)
    with pytest.raises(PathUnusable, match=r"fastness\.json is not a Fastness file"):
        fastness.open(f"dir:{tmp_path}")
    assert (tmp_path / "fastness.json").read_bytes() == body
    assert not (tmp_path / "kv").exists()


def test_a_folder_instead_of_the_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fastness.json").mkdir()
    with pytest.raises(PathUnusable):
        fastness.open(f"dir:{tmp_path}")


# One folder, one plane.


def test_a_folder_opens_once_in_a_process(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        with pytest.raises(DirectoryInUse, match="is already open in this process"):
            fastness.open(f"dir:{tmp_path}")
        plane.pairs.put(b"a", b"still works")
    fastness.open(f"dir:{tmp_path}").close()


def test_a_folder_opens_once_among_processes(tmp_path: Path) -> None:
    code = f"""import fastness
try: fastness.open("dir:{tmp_path}").close(); print("opened")
except fastness.FastnessError as error: print(error.code, error)"""

    def other_process() -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    with fastness.open(f"dir:{tmp_path}"):
        refused = other_process()
        assert refused.startswith("directory_in_use ")
        assert f"is already open in process {os.getpid()}; stop that process" in refused
    assert other_process() == "opened"


def test_a_folder_keeps_what_was_written_and_memory_does_not(tmp_path: Path) -> None:
    for url, found in ((f"dir:{tmp_path}", b"1"), ("memory:", None)):
        with fastness.open(url) as plane:
            plane.pairs.put(b"a", b"1")
        with fastness.open(url) as plane:
            assert plane.pairs.get(b"a") == found


def test_two_planes_in_memory_share_nothing() -> None:
    with fastness.open("memory:") as one, fastness.open("memory:") as other:
        one.pairs.put(b"a", b"1")
        assert other.pairs.get(b"a") is None


def test_postgresql_keeps_what_was_written(postgres_url: str) -> None:
    with fastness.open(postgres_url) as plane:
        plane.pairs.put(b"a", b"1")
    with fastness.open(postgres_url.replace("postgresql://", "postgres://", 1)) as plane:
        assert plane.pairs.get(b"a") == b"1"


@pytest.mark.parametrize("url", ["memory:", "dir:{}/data"])
def test_the_given_clock_is_the_plane_s(url: str, tmp_path: Path, clock: ManualClock) -> None:
    clock.jump_to_ms(12_345)
    with fastness.open(url.format(tmp_path), clock=clock) as plane:
        assert plane.transact(lambda tx: tx.now_ms) == 12_345


# Home folders.


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fastness.open("dir:~/data").close()
    assert (tmp_path / "data/fastness.json").exists()


def test_the_home_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(PathUnusable):
        fastness.open("dir:~no-such-user/data")


# Cancellation.


async def test_a_cancelled_opening_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Database] = []
    arrived, go_on = threading.Event(), threading.Event()

    def slow(path: Path, **options: Any) -> Database:
        opened.append(RocksDatabase(path, **options))
        arrived.set()
        go_on.wait(60)
        return opened[0]

    monkeypatch.setattr(opening, "RocksDatabase", slow)

    async def use() -> None:
        async with fastness.open_async(f"dir:{tmp_path}"):
            pass

    using = asyncio.ensure_future(use())
    await asyncio.to_thread(arrived.wait)
    using.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    await asyncio.get_running_loop().shutdown_default_executor()
    try:
        with pytest.raises(Closed):
            opened[0].read(Transaction.get, b"a")
    finally:
        opened[0].close()


@pytest.mark.parametrize("marker", ["[" * 100_000, '{"format": true}', '{"format": "1"}', "{}", ""])
def test_an_invalid_marker_is_refused(marker: str, tmp_path: Path) -> None:
    (tmp_path / "fastness.json").write_text(marker)
    with pytest.raises(PathUnusable, match="is not a Fastness file"):
        fastness.open(f"dir:{tmp_path}")


def test_a_refused_url_does_not_repeat_its_password() -> None:
    with pytest.raises(InvalidUrl) as caught:
        fastness.open("postgrsql://ada:secret@host/database")
    assert "secret" not in str(caught.value)


def test_objects_are_stored_beside_the_key_space_by_default(tmp_path: Path) -> None:
    for objects, place in (
        (None, tmp_path / "data" / "objects"),
        (f"dir:{tmp_path / 'elsewhere'}", tmp_path / "elsewhere"),
    ):
        transport = opening.open_plane(f"dir:{tmp_path / 'data'}", opening.Options(objects=objects))
        assert transport.services.objects is not None
        transport.services.objects.put("a/b", b"big")
        transport.close()
        assert (place / "a" / "b").read_bytes() == b"big"


def test_a_wrong_object_store_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidUrl):
        fastness.open(f"dir:{tmp_path}", objects="nonsense://x")
    fastness.open(f"dir:{tmp_path}").close()


@pytest.mark.parametrize("interrupted", [False, True], ids=["new", "created by a process that ended"])
def test_every_new_name_is_synced_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    data = tmp_path / "machine" / "planes" / "data"
    if interrupted:
        (data / "kv").mkdir(parents=True)
    synced: set[Path] = set()
    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        if folder.is_dir():
            synced.update(folder.iterdir())

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    with fastness.open(f"dir:{data}") as plane:
        plane.blobs.put(os.urandom(100_000))
        plane.activity.log("ada", {"step": 1})
        assert plane.activity.read(session="ada").records
        found = {data, *(path for path in data.rglob("*") if path.is_dir() or "objects" in path.parts)}
        found |= {data / "fastness.json"} | ({data.parent, data.parent.parent} if not interrupted else set())
        assert found <= synced | {path for path in found if ".staging" in path.parts and path.is_file()}


FEW_FILES = """
import resource, sys
import fastness
from fastness.errors import FastnessError
import fastness.plane, fastness.handles.sync.plane

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with fastness.open(f"dir:{sys.argv[1]}") as plane:
        plane.queue("jobs").put({"n": 1})
except FastnessError as error:
    print(error)
"""


@pytest.mark.parametrize("files", [6, 9, 12, 15, 18])
@pytest.mark.rotating
def test_too_few_open_files_are_a_typed_error(tmp_path: Path, files: int) -> None:
    fastness.open(f"dir:{tmp_path / 'data'}").close()
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "data"), str(files)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "open files" in child.stdout or (files > 9 and not child.stdout)


RUNS = int(os.environ.get("FASTNESS_EXIT_RUNS", "2"))  # Of each program that ends without close.

LEFT_OPEN = """
import asyncio, os, sys
import fastness

url = f"dir:{sys.argv[1]}"

async def use():
    plane = await fastness.open_async(url)
    await plane.queue("jobs").put({"n": 1}, tier=fastness.Tier.IMPORTANT)
    await plane.activity.log("ada", {"step": 1})
    return plane

if sys.argv[2] == "async":
    plane = asyncio.run(use())
else:
    plane = fastness.open(url)
    plane.queue("jobs").put({"n": 1}, tier=fastness.Tier.IMPORTANT)
    plane.activity.log("ada", {"step": 1})
if sys.argv[2] == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(0)  # It must not close what its parent uses.
    assert os.waitpid(child, 0)[1] == 0
    plane.activity.log("ada", {"step": 2})
"""


@pytest.mark.parametrize("kind", ["sync", "async", "forked"])
def test_a_program_that_ends_without_close_loses_nothing(tmp_path: Path, kind: str) -> None:
    # Python 3.12 and newer warn about every fork of a process with threads.
    command = [sys.executable, "-W", "ignore:This process", "-c", LEFT_OPEN, str(tmp_path), kind]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (child.returncode, child.stderr) == (0, "")
    with fastness.open(f"dir:{tmp_path}") as plane:
        steps = [json.loads(each.record)["step"] for each in plane.activity.read(session="ada").records]
        assert steps == ([1, 2] if kind == "forked" else [1])
        assert len(plane.activity.read(kind="queues").records) == 1


PUSHING = """
import asyncio, sys, threading, time
import fastness

url, ending, start = f"dir:{sys.argv[1]}", sys.argv[2], int(sys.argv[3])
accepted = []

async def use(forever):
    plane = await fastness.open_async(url)  # Not kept: nothing but the ingress refers to it in the end.
    number = start
    while forever or number < start + 30:
        key = str(number)
        try:
            await plane.ingress.push(f"ada{start}", "t", b"x", idempotency_key=key, sender=f"eve{number}")
            await plane.activity.log("ada", {"n": number})
        except fastness.errors.Closed:
            return
        accepted.append(number)
        print(number, flush=True)
        number += 1
        if forever:
            await asyncio.sleep(0.001)
    if ending == "raises":
        raise ValueError("the program ends")
    if ending == "exits":
        sys.exit(3)

if ending == "daemon":
    threading.Thread(target=lambda: asyncio.run(use(True)), daemon=True).start()
    while len(accepted) < 30:
        time.sleep(0.005)
else:
    asyncio.run(use(False))
"""


@pytest.mark.parametrize(("ending", "code"), [("returns", 0), ("raises", 1), ("exits", 3), ("daemon", 0)])
@pytest.mark.rotating
def test_what_an_open_plane_has_accepted_is_stored_however_its_program_ends(
    tmp_path: Path, ending: str, code: int
) -> None:
    accepted: dict[int, list[int]] = {}
    for start in range(0, RUNS * 100_000, 100_000):
        command = [sys.executable, "-c", PUSHING, str(tmp_path), ending, str(start)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert child.returncode == code, child.stderr
        assert child.stderr.rstrip().endswith("ValueError: the program ends" if ending == "raises" else ""), (
            child.stderr
        )
        accepted[start] = [*map(int, child.stdout.split())]
        assert len(accepted[start]) >= 30
    with fastness.open(f"dir:{tmp_path}") as plane:
        logged = [json.loads(each.record)["n"] for each in plane.activity.read(session="ada", limit=10_000).records]
        assert len(set(logged)) == len(logged)
        assert {number for numbers in accepted.values() for number in numbers} <= set(logged)
        for start, numbers in accepted.items():
            count = plane.mailbox(f"ada{start}").count()
            assert len(numbers) <= count <= len(numbers) + 1, "a daemon thread may end before it prints the last one"


def test_pushes_are_stored_by_a_close_on_another_event_loop(tmp_path: Path) -> None:
    async def use() -> AsyncPlane:
        plane = await fastness.open_async(f"dir:{tmp_path}")
        await plane.ingress.push("ada", "t", b"x", sender="eve")
        return plane

    plane = asyncio.run(use())
    asyncio.run(plane.close())
    with fastness.open(f"dir:{tmp_path}") as reopened:
        assert reopened.mailbox("ada").count() == 1


def test_a_nearly_full_disk_refuses_new_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISK_RESERVE_SHARE_MAX", 2.0)
    url = f"dir:{tmp_path}"
    with fastness.open(url) as plane:
        plane.queue("jobs").put({"n": 1})
        plane.queue("jobs").put({"n": 2})
        plane.state("s").update({"a": 1})
    with fastness.open(url, disk_reserve_bytes=1 << 60) as plane:
        queue = plane.queue("jobs")
        refused: list[Callable[[], object]] = [
            lambda: queue.put({"n": 3}),
            lambda: plane.blobs.put(b"x"),
            lambda: plane.mailbox("ada").send("bob", b"hi"),
            lambda: plane.state("s").update({"a": 2}),
            lambda: plane.world("w").create(),
            lambda: plane.transact(lambda tx: tx.put(b"key", b"value")),
            lambda: plane.atomic().put(queue, {"n": 3}).commit(),
        ]
        for write in refused:
            with pytest.raises(DiskFull, match="nearly full"):
                write()
        assert queue.stats().ready == 2
        message = queue.receive()
        assert message is not None
        message.extend(60)
        message.ack()
        assert queue.purge() == 1
        plane.transact(lambda tx: (tx.put(b"key", b"value"), tx.delete(b"other")))
        with plane.lease("l").acquire(owner="ada"):
            pass


def test_a_disk_reserve_is_a_number_of_bytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="disk_reserve_bytes"):
        fastness.open(f"dir:{tmp_path}", disk_reserve_bytes=-1)
