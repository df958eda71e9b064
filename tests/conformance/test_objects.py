"""Every object store keeps the same promises, in both forms of each operation; local folders keep a few more."""

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import boto3
import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from holdfast.backends import objects
from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.errors import (
    Backend,
    CommitUnknown,
    DiskFull,
    HoldfastError,
    InvalidArgument,
    InvalidUrl,
    ObjectExists,
    ObjectNotFound,
    PathUnusable,
    Unreachable,
)
from holdfast.limits import OBJECT_PART_BYTES
from holdfast.testing.objects import OBJECT_CHECKS

MEBIBYTE = 1_048_576
STREAM_BYTES = 256 * MEBIBYTE
STREAM_MEMORY_BYTES_MAX = 64 * MEBIBYTE
PARTS_AHEAD_MAX = 6  # Four on their way, one being filled and one being taken.
_BUCKETS = itertools.count()


class Twin:
    """The synchronous surface of a store, carried out by its async operations."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation: Callable[..., Awaitable[Any]] = getattr(self._store, f"{name}_async")

        async def run(*args: Any, **kwargs: Any) -> Any:
            return await operation(*args, **kwargs)

        return lambda *args, **kwargs: asyncio.run(run(*args, **kwargs))

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return asyncio.run(self._store.write_async(path, stream(), create_only=create_only))

    def open(self, path: str) -> Iterator[bytes]:
        loop = asyncio.new_event_loop()
        try:
            parts = loop.run_until_complete(self._store.open_async(path))
        except BaseException:
            loop.close()
            raise
        return self._read(loop, parts)

    def _read(self, loop: asyncio.AbstractEventLoop, parts: AsyncIterator[bytes]) -> Iterator[bytes]:
        try:
            while part := loop.run_until_complete(anext(parts, b"")):
                yield part
        finally:
            loop.close()


class Moto:
    """An S3 on the loopback."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        # S3 decides a conditional put in one step. moto looks, then stores, so its requests go one at a time.
        http = cast("Any", self.server._server)
        answer, turn = http.app, threading.Lock()
        http.app = lambda environ, respond: _in_turn(turn, answer, environ, respond)
        self.config = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "client_options": {"allow_http": True},
        }
        self.backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )

    def new_bucket(self) -> str:
        name = f"bucket-{next(_BUCKETS)}"
        self.client.create_bucket(Bucket=name)
        return name


def _in_turn(turn: threading.Lock, answer: Any, environ: Any, respond: Any) -> list[bytes]:
    with turn:
        return list(answer(environ, respond))


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    moto = Moto()
    yield moto
    moto.server.stop()


@pytest.fixture(params=["memory", "dir", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return open_objects("memory:")
    if request.param == "dir":
        return open_objects(f"dir:{tmp_path / 'objects'}")
    moto = request.getfixturevalue("moto")
    return open_objects(f"s3://{moto.new_bucket()}/some/prefix", **moto.config)


@pytest.fixture
def folder(tmp_path: Path) -> ObjectStore:
    return open_objects(f"dir:{tmp_path}")


@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_every_store(store: ObjectStore, check: Callable[[ObjectStore], None]) -> None:
    check(store)


@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_every_store_async(store: ObjectStore, check: Callable[[ObjectStore], None]) -> None:
    check(cast("ObjectStore", Twin(store)))


def test_a_cancelled_stream_leaves_no_object(store: ObjectStore) -> None:
    async def cancel_half_way() -> None:
        reached = asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            yield b"x" * OBJECT_PART_BYTES
            yield b"more"
            reached.set()
            await asyncio.Event().wait()

        writing = asyncio.ensure_future(store.write_async("a", stuck()))
        await reached.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(cancel_half_way())
    assert store.list() == []


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "dir:", "file:///tmp", "ftp://host/x", "s3://", "/tmp"])
def test_an_unknown_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidUrl, match="s3://"):
        open_objects(url)


def test_configuration_that_no_store_takes_is_refused() -> None:
    with pytest.raises(InvalidUrl, match="nonsense"):
        open_objects("s3://bucket", nonsense="1")
    with pytest.raises(InvalidArgument, match="region"):
        open_objects("memory:", region="eu-central-1")


def test_google_and_azure_urls_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("gs://bucket/prefix", "az://container/prefix"):
        assert isinstance(open_objects(url), ObjectStore)


# A local folder.


def test_a_folder_is_created_and_found_again(tmp_path: Path) -> None:
    meta = open_objects(f"dir:{tmp_path / 'not' / 'yet' / 'there'}").put("a/b", b"kept")
    again = open_objects(f"dir:{tmp_path / 'not' / 'yet' / 'there'}")
    assert again.get("a/b") == b"kept"
    assert again.list() == [meta]


def test_a_relative_folder_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_objects("dir:objects")
    monkeypatch.chdir("/")
    store.put("a", b"kept")
    assert (tmp_path / "objects" / "a").read_bytes() == b"kept"


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing"])
def test_an_unusable_folder_is_refused_when_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PathUnusable, match="choose another"):
        open_objects(f"dir:{tmp_path / path}")


def test_two_stores_on_one_folder_agree(tmp_path: Path) -> None:
    one, two = open_objects(f"dir:{tmp_path}"), open_objects(f"dir:{tmp_path}")
    meta = one.create("a", b"first")
    with pytest.raises(ObjectExists):
        two.create("a", b"second")
    two.replace("a", b"second", etag=meta.etag)
    assert one.get("a") == b"second"


WRITES: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put("new/folder/a", b"x"),
    "create": lambda store: store.create("new/folder/a", b"x"),
    "write": lambda store: store.write("new/folder/a", [b"x", b"y"]),
    "put_async": lambda store: asyncio.run(store.put_async("new/folder/a", b"x")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_syncs_its_bytes_before_its_name_and_its_folders_before_it_returns(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[ObjectStore], object]
) -> None:
    steps = _record_steps(monkeypatch)
    write(folder)
    root, new, target = tmp_path, tmp_path / "new", tmp_path / "new" / "folder"
    assert steps == ["sync file", f"sync {root}", f"sync {new}", "name", f"sync {target}"]


def test_a_replace_and_a_delete_sync_too(folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etag = folder.put("a", b"first").etag
    steps = _record_steps(monkeypatch)
    folder.replace("a", b"second", etag=etag)
    folder.delete("a")
    assert steps == ["sync file", "name", f"sync {tmp_path}", f"sync {tmp_path}"]


def test_a_create_that_finds_an_object_syncs_it_before_saying_so(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put("a", b"first")
    steps = _record_steps(monkeypatch)
    with pytest.raises(ObjectExists):
        folder.create("a", b"second")
    assert steps == ["sync file", "name", f"sync {tmp_path}"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, Backend)])
def test_a_write_that_cannot_be_synced_leaves_the_old_object(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HoldfastError]
) -> None:
    folder.put("a", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(kind):
            folder.put("a", b"new")
    assert folder.get("a") == b"old"
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_full_device_is_named_while_streaming(folder: ObjectStore, tmp_path: Path) -> None:
    def full() -> Iterator[bytes]:
        yield b"x"
        (staged,) = (tmp_path / ".staging").iterdir()
        _point_at_a_full_device(staged)
        yield b"x" * MEBIBYTE

    with pytest.raises(DiskFull, match="free some space"):
        folder.write("a", full())
    assert folder.list() == []


def test_what_a_crash_left_is_never_listed_and_swept_after_a_day(folder: ObjectStore, tmp_path: Path) -> None:
    old, young = tmp_path / ".staging" / "old#0", tmp_path / ".staging" / "young#0"
    for leftover in (old, young, tmp_path / "a#1"):
        leftover.write_bytes(b"half of an obj")
    a_day_ago = young.stat().st_mtime - objects._STAGED_SECONDS_MAX - 1
    os.utime(old, (a_day_ago, a_day_ago))

    folder.put("a", b"whole")
    assert [meta.path for meta in folder.list()] == ["a"]
    again = open_objects(f"dir:{tmp_path}")
    assert [meta.path for meta in again.list()] == ["a"]
    assert not old.exists()
    assert young.exists()


def test_an_old_version_never_has_a_new_ones_etag(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An etag is inode, microsecond and size, and a file system gives the inode of a deleted file to the next one.
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    etags, stamps_ns = set(), []
    for _ in range(20):
        etags.add(folder.put("a", b"same size").etag)
        stamps_ns.append((tmp_path / "a").stat().st_mtime_ns)
    assert len(etags) == 20
    assert stamps_ns == [stamps_ns[0] + 1_000 * version for version in range(20)]


def test_a_folder_holds_no_object_above_or_below_another(folder: ObjectStore) -> None:
    folder.put("a/b", b"")
    for path in ("a", "a/b/c", "s" * 300):
        for write in (folder.put, folder.create):
            with pytest.raises(InvalidArgument, match="choose another"):
                write(path, b"")
    assert [meta.path for meta in folder.list()] == ["a/b"]


def test_a_large_stream_passes_through_little_memory(folder: ObjectStore) -> None:
    chunk = os.urandom(MEBIBYTE)
    before, peak = _resident_bytes(), 0

    def chunks() -> Iterator[bytes]:
        nonlocal peak
        for _ in range(STREAM_BYTES // MEBIBYTE):
            peak = max(peak, _resident_bytes())
            yield chunk

    assert folder.write("large", chunks()).size == STREAM_BYTES
    read_bytes = 0
    for part in folder.open("large"):
        read_bytes += len(part)
        peak = max(peak, _resident_bytes())
    assert read_bytes == STREAM_BYTES
    assert peak - before < STREAM_MEMORY_BYTES_MAX


# S3.


def test_a_large_stream_to_s3_is_taken_only_a_few_parts_ahead_of_the_upload(moto: Moto) -> None:
    bucket = moto.new_bucket()
    store = open_objects(f"s3://{bucket}", **moto.config)
    uploads = moto.backend.buckets[bucket].multiparts
    ahead: list[int] = []

    def chunks() -> Iterator[bytes]:
        for taken in range(16):
            ahead.append(taken - sum(len(upload.parts) for upload in uploads.values()))
            yield b"x" * OBJECT_PART_BYTES

    assert store.write("large", chunks()).size == 16 * OBJECT_PART_BYTES
    assert len(ahead) == 16
    assert max(ahead) <= PARTS_AHEAD_MAX


def test_a_failing_stream_leaves_no_parts_behind_on_s3(moto: Moto) -> None:
    bucket = moto.new_bucket()
    store = open_objects(f"s3://{bucket}", **moto.config)

    def failing() -> Iterator[bytes]:
        yield from (b"x" * OBJECT_PART_BYTES for _ in range(3))
        raise KeyError("the body's own failure")

    with pytest.raises(KeyError):
        store.write("a", failing())
    assert "Uploads" not in moto.client.list_multipart_uploads(Bucket=bucket)


def test_a_listing_walks_more_objects_than_s3_answers_at_once(moto: Moto) -> None:
    bucket = moto.new_bucket()
    paths = [f"{number:04d}" for number in range(1_100)]
    for path in paths:
        moto.backend.put_object(bucket, f"prefix/{path}", b"")
    store = open_objects(f"s3://{bucket}/prefix", **moto.config)
    first = store.list()
    assert [meta.path for meta in first + store.list(after=first[-1].path)] == paths


def test_a_missing_bucket_is_said_to_be_missing(moto: Moto) -> None:
    store = open_objects("s3://no-such-bucket", **moto.config)
    for act in (lambda: store.get("a"), lambda: store.put("a", b""), store.list):
        with pytest.raises(PathUnusable, match="bucket"):
            act()
    with pytest.raises(ObjectNotFound):
        store.head("a")  # S3 answers a head without a reason.


def test_a_store_that_refuses_connections_is_unreachable_and_nothing_was_written(moto: Moto) -> None:
    config = {**moto.config, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
    store = open_objects("s3://bucket", **config)
    for act in (lambda: store.get("a"), lambda: store.put("a", b""), store.list, lambda: store.delete("a")):
        with pytest.raises(Unreachable, match="endpoint"):
            act()


def test_a_write_whose_answer_is_lost_may_have_happened(moto: Moto) -> None:
    with _server_that_hangs_up() as endpoint:
        store = open_objects("s3://bucket", **{**moto.config, "endpoint": endpoint, "retry_config": {"max_retries": 0}})
        with pytest.raises(CommitUnknown, match="look before repeating"):
            store.put("a", b"")
        with pytest.raises(Unreachable):
            store.get("a")


def _record_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order."""
    steps: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def recorded_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}" if is_folder else "sync file")
        fsync(descriptor)

    def recorded(name: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(source: Any, target: Any) -> None:
            steps.append("name")
            name(source, target)

        return run

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded(link))
    monkeypatch.setattr(os, "replace", recorded(replace))
    return steps


def _point_at_a_full_device(staged: Path) -> None:
    """Make this process's open descriptor of `staged` one of /dev/full."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink() == staged:
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, int(entry.name))
                os.close(full)
                return


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def _server_that_hangs_up() -> Iterator[str]:
    """An endpoint that reads each request and closes the connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
