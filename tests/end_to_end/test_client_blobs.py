"""Blobs through the client: streaming in both directions, ranges, failures and bounded memory."""

import asyncio
import gc
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane
from fastness.errors import BlobNotFound, InvalidArgument, InvalidValue, Unreachable
from tests.support.http_server import Server, serving
from tests.support.proxy import Proxy

MEGABYTE = 1_048_576
PATIENCE_SECONDS = 60.0  # Far more than any step needs.
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}") as running:
        yield running


@pytest.fixture
def plane(server: Server) -> Iterator[Plane]:
    with fastness.connect(server.url) as plane:
        yield plane


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"thing-{next(_names)}"


class PeakMemory:
    """Measures by how much the peak memory of this process grows."""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.grew = self._peak() - self._before

    def _peak(self) -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1_024 for line in status.splitlines() if line.startswith("VmHWM"))


def pieces(megabytes: int) -> Iterator[bytes]:
    for number in range(megabytes):
        yield bytes([number]) * MEGABYTE


def hash_of(megabytes: int) -> str:
    sha = hashlib.sha256()
    for piece in pieces(megabytes):
        sha.update(piece)
    return sha.hexdigest()


def test_a_large_blob_is_streamed_in_both_directions(server: Server, plane: Plane) -> None:
    with PeakMemory() as memory:
        hash = plane.blobs.write(pieces(20))
        sha = hashlib.sha256()
        for part in plane.blobs.open(hash):
            assert len(part) <= MEGABYTE
            sha.update(part)
    assert hash == sha.hexdigest() == hash_of(20)
    assert memory.grew < 12 * MEGABYTE
    assert (
        plane.blobs.write(plane.blobs.open(hash)) == hash
    )  # A stream may come from the same plane that it is written to.
    assert plane.blobs.put(plane.blobs.get(hash)) == hash


async def test_an_event_loop_streams_a_large_blob_in_both_directions(server: Server) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces(20):
            await asyncio.sleep(0)
            yield piece

    async with fastness.connect_async(server.url) as plane:
        with PeakMemory() as memory:
            hash = await plane.blobs.write(chunks())
            sha = hashlib.sha256()
            async for part in await plane.blobs.open(hash):
                sha.update(part)
        assert hash == sha.hexdigest() == hash_of(20)
        assert memory.grew < 12 * MEGABYTE
        copies = [await plane.blobs.open(hash) for _ in range(3)]
        assert set(await asyncio.gather(*map(plane.blobs.write, copies))) == {hash}


@pytest.mark.parametrize("error", [LookupError, ConnectionResetError, BrokenPipeError])
def test_a_stream_that_fails_stores_nothing(plane: Plane, name: str, error: type[Exception]) -> None:
    def failing() -> Iterator[bytes]:
        yield name.encode() * MEGABYTE
        raise error("no more")

    with pytest.raises((error, Unreachable)):  # An OSError may come from the stream or from the connection.
        plane.blobs.write(failing())
    wrong: Any
    for wrong in ("text", 5, None):
        with pytest.raises(InvalidArgument, match="data is"):
            plane.blobs.put(wrong)
        with pytest.raises(InvalidValue):
            plane.blobs.write(iter([wrong]))
    assert not plane.blobs.has(hashlib.sha256(name.encode() * MEGABYTE).hexdigest())


async def test_a_stream_whose_task_is_cancelled_stores_nothing(server: Server, name: str) -> None:
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield name.encode()
        begun.set()
        await asyncio.sleep(3_600)

    async with fastness.connect_async(server.url) as plane:
        writing = asyncio.create_task(plane.blobs.write(endless()))
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not await plane.blobs.has(hashlib.sha256(name.encode()).hexdigest())


def test_a_cut_download_resumes(server: Server, plane: Plane) -> None:
    hash = plane.blobs.write(pieces(8))
    with Proxy(server.port, seed=1) as proxy, fastness.connect(proxy.url) as cut:
        proxy.bytes_max = 4 * MEGABYTE
        assert hashlib.sha256(cut.blobs.get(hash)).hexdigest() == hash
        assert b"".join(cut.blobs.open(hash)) == b"".join(pieces(8))
        assert proxy.cuts


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (0, 10),
        (MEGABYTE - 1, 2),
        (3 * MEGABYTE, None),
        (1, 10**30),
        (0, 10**30),
        (5 * MEGABYTE, 1),
        (10**30, None),
        (7, 0),
    ],
)
def test_a_range_of_a_blob_is_read(server: Server, plane: Plane, start: int, length: int | None) -> None:
    whole = b"".join(pieces(4))
    hash = plane.blobs.write(pieces(4))
    end = None if length is None else start + length
    assert b"".join(plane.blobs.open(hash, start=start, length=length)) == whole[start:end]

    async def on_a_loop() -> bytes:
        async with fastness.connect_async(server.url) as other:
            return b"".join([part async for part in await other.blobs.open(hash, start=start, length=length)])

    assert asyncio.run(on_a_loop()) == whole[start:end]


def test_an_invalid_range_is_rejected(plane: Plane) -> None:
    hash = plane.blobs.put(b"few")
    for part in ({"start": -1}, {"length": -1}):
        with pytest.raises(InvalidArgument, match="at least 0"):
            plane.blobs.open(hash, **part)
    for part in ({"start": 1}, {"length": 0}, {"start": 3, "length": 5}):
        with pytest.raises(BlobNotFound):
            plane.blobs.open("0" * 64, **part)


def test_a_cut_range_download_resumes(server: Server, plane: Plane) -> None:
    hash = plane.blobs.write(pieces(12))
    with Proxy(server.port, seed=1) as proxy, fastness.connect(proxy.url) as cut:
        proxy.bytes_max = 4 * MEGABYTE
        found = b"".join(cut.blobs.open(hash, start=MEGABYTE + 5, length=9 * MEGABYTE))
        assert found == b"".join(pieces(12))[MEGABYTE + 5 :][: 9 * MEGABYTE]
        assert proxy.cuts


def test_a_large_payload_is_streamed_with_its_message(plane: Plane, name: str) -> None:
    body = os.urandom(3 * MEGABYTE)
    plane.queue(name).put(body)
    with plane.queue(name).receive() as message:
        assert (message.payload, message.read()) == (None, body)
        assert b"".join(message.open()) == body
