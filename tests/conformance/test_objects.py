"""Every object store passes the conformance checks, in both forms of an operation; S3 also over a network."""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import boto3
import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import CommitUnknown, InvalidArgument, InvalidUrl, ObjectNotFound, PathUnusable, Unreachable
from fastness.limits import OBJECT_PART_BYTES, OBJECT_PARTS_IN_FLIGHT
from fastness.testing.conformance.objects import OBJECT_CHECKS

PARTS_AHEAD_MAX = OBJECT_PARTS_IN_FLIGHT + 2  # One is being filled and one is being consumed.
YEAR_2020_MS, YEAR_2100_MS = 1_577_836_800_000, 4_102_444_800_000
_BUCKETS = itertools.count()


class AsyncAsSync:
    """A store's synchronous methods, implemented by its async operations where it has them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation: Callable[..., Awaitable[Any]] | None = getattr(self._store, f"{name}_async", None)
        if operation is None:
            return cast("Callable[..., Any]", getattr(self._store, name))

        async def run(*args: Any, **kwargs: Any) -> Any:
            return await operation(*args, **kwargs)

        return lambda *args, **kwargs: asyncio.run(run(*args, **kwargs))

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return asyncio.run(self._store.write_async(path, stream(), create_only=create_only))

    def open(self, path: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        loop = asyncio.new_event_loop()
        try:
            parts = loop.run_until_complete(self._store.open_async(path, start, length))
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
        # S3 decides a conditional put atomically. moto checks, then stores, so its requests run one at a time.
        http = cast("Any", self.server._server)
        answer, lock = http.app, threading.Lock()
        http.app = lambda environ, respond: _serialized(lock, answer, environ, respond)
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


def _serialized(lock: threading.Lock, answer: Any, environ: Any, respond: Any) -> list[bytes]:
    with lock:
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


@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_every_store(store: ObjectStore, check: Callable[[ObjectStore], None]) -> None:
    check(store)


@pytest.mark.parametrize("store", ["memory", "dir", pytest.param("s3", marks=pytest.mark.rotating)], indirect=True)
@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_every_store_async(store: ObjectStore, check: Callable[[ObjectStore], None]) -> None:
    check(cast("ObjectStore", AsyncAsSync(store)))


def test_every_store_reports_when_an_object_was_written(store: ObjectStore) -> None:
    store.put("first/0", b"")
    metas = {store.put(f"a/{n}", b"x" * n) for n in range(3)}
    store.put("ab", b"elsewhere")
    found = list(store.times("a"))
    assert {meta.path: meta.size for meta, _ in found} == {meta.path: meta.size for meta in metas}
    store.put("last/0", b"")
    [(_, first_ms)], [(_, last_ms)] = store.times("first"), store.times("last")
    assert all(first_ms <= at_ms <= last_ms for _, at_ms in found)
    assert YEAR_2020_MS < first_ms < YEAR_2100_MS
    assert list(store.times("nowhere")) == []


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
def test_an_unknown_url_is_refused(url: str) -> None:
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


# S3.


def test_a_large_stream_to_s3_is_read_only_a_few_parts_ahead_of_the_upload(moto: Moto) -> None:
    bucket = moto.new_bucket()
    store = open_objects(f"s3://{bucket}", **moto.config)
    uploads = moto.backend.buckets[bucket].multiparts
    ahead: list[int] = []

    def chunks() -> Iterator[bytes]:
        for consumed in range(16):
            ahead.append(consumed - sum(len(upload.parts) for upload in uploads.values()))
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


def test_names_and_folders_of_a_folder(store: ObjectStore) -> None:
    for path in ("a/b-2/x", "a/b/y", "a/b/x@1:2+3=4.json", "a/b/deeper/z", "a/top", "ab/x"):
        store.put(path, b"data")
    assert (store.names("a/b"), store.names("a")) == (["x@1:2+3=4.json", "y"], ["top"])
    assert (store.folders("a"), store.folders("a/b")) == (["b", "b-2"], ["deeper"])
    for missing in ("none", "a/top", "a/b/deeper/none"):
        assert (store.names(missing), store.folders(missing)) == ([], [])


def test_a_listing_covers_more_objects_than_one_s3_page(moto: Moto) -> None:
    bucket = moto.new_bucket()
    paths = [f"{number:04d}" for number in range(1_100)]
    for path in paths:
        moto.backend.put_object(bucket, f"prefix/{path}", b"")
    store = open_objects(f"s3://{bucket}/prefix", **moto.config)
    first = store.list()
    assert [meta.path for meta in first + store.list(after=first[-1].path)] == paths
    assert open_objects(f"s3://{bucket}", **moto.config).names("prefix") == paths


def test_a_missing_bucket_is_reported(moto: Moto) -> None:
    store = open_objects("s3://no-such-bucket", **moto.config)
    for act in (lambda: store.get("a"), lambda: store.put("a", b""), store.list):
        with pytest.raises(PathUnusable, match="bucket"):
            act()
    with pytest.raises(ObjectNotFound):
        store.head("a")  # S3 answers a head without a reason.


def test_a_store_that_refuses_connections_is_unreachable(moto: Moto) -> None:
    config = {**moto.config, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
    store = open_objects("s3://bucket", **config)
    for act in (lambda: store.get("a"), lambda: store.put("a", b""), store.list, lambda: store.delete("a")):
        with pytest.raises(Unreachable, match="endpoint"):
            act()


def test_a_write_whose_answer_is_lost_may_have_happened(moto: Moto) -> None:
    with _server_that_hangs_up() as endpoint:
        store = open_objects("s3://bucket", **{**moto.config, "endpoint": endpoint, "retry_config": {"max_retries": 0}})
        with pytest.raises(CommitUnknown, match="check before repeating"):
            store.put("a", b"")
        with pytest.raises(Unreachable):
            store.get("a")


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
