"""The client against a real server process: every feature, for threads and for asyncio, and what goes wrong."""

import asyncio
import gc
import hashlib
import os
import resource
import runpy
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.client import ClientProtocol

import holdfast
from holdfast import AsyncPlane, AsyncWorker, Plane, Worker
from holdfast.adaptive_batching import LONE_TURNS_MIN
from holdfast.client import connection as client_connection
from holdfast.client.connection import Connection
from holdfast.client.websocket import Socket
from holdfast.errors import (
    BlobNotFound,
    CasMismatch,
    Closed,
    HeadAdvanced,
    InvalidArgument,
    InvalidUrl,
    InvalidValue,
    LeaseHeld,
    NotAllowed,
    Unreachable,
    VersionConflict,
)
from holdfast.wire.frames import decode_calls
from holdfast.wire.inboxes import Control
from holdfast.wire.queues import NewMessage, Receipts
from holdfast.wire.worlds import ListWorlds

HERE = Path(__file__).parent
serving = runpy.run_path(str(HERE / "serving.py"))["serving"]  # Test files cannot import each other.
Proxy = runpy.run_path(str(HERE.parent / "faults" / "proxy.py"))["Proxy"]
MEGABYTE = 1_048_576
PATIENCE_SECONDS = 60.0  # Far more than anything here takes.
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}") as running:
        yield running


@pytest.fixture
def plane(server: Any) -> Iterator[Plane]:
    with holdfast.connect(server.url) as plane:
        yield plane


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"thing-{next(_names)}"


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls there were in each frame that a client has sent."""
    sent: list[int] = []
    send, write_now = ClientProtocol.send_binary, Socket.write_now

    def count(message: Any) -> None:
        with suppress(Exception):  # A hello is no list of calls.
            sent.append(len(decode_calls(message)))

    def sending(self: ClientProtocol, message: Any, *rest: Any) -> None:
        count(message)
        send(self, message, *rest)

    def writing(self: Socket, message: bytes) -> bool:
        written = write_now(self, message)
        if written:
            count(message)
        return written

    monkeypatch.setattr(ClientProtocol, "send_binary", sending)
    monkeypatch.setattr(Socket, "write_now", writing)
    return sent


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


async def until_async(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.005)


# Everything once, both ways.


def test_every_noun_is_reachable_from_a_thread(plane: Plane, name: str) -> None:
    jobs, world, state = plane.queue(name), plane.world(name), plane.state(name)
    receipt = jobs.put({"n": 1}, attributes={"a": "b"})
    assert [letter.id for letter in jobs.peek()] == [receipt.id]
    head = world.create().head
    with plane.lease(name).acquire("ada") as lease, jobs.receive(with_state=True) as message:
        message.save_state({"step": 1})
        etag = state.update({"n": 1}, lease=lease).etag
        answers = (
            plane.atomic()
            .put(jobs, "more")
            .append(world, ["entry"], expected_head=head)
            .deliver(world, Control(command="go"))
            .update(state, {"n": 2}, lease=lease, if_match=etag)
            .write("task", name, {"title": "a"})
            .check(lease)
            .commit()
        )
        assert isinstance(answers[0], Receipts)
    assert (jobs.stats().acked_total, jobs.stats().ready) == (1, 1)
    assert world.drain() == [head + 1]
    assert plane.entities.update("task", name, lambda found: {"title": found["title"] + "b"}).versions == [2]
    assert plane.entities.get("task", name)["title"] == "ab"
    assert len(plane.entities.history("task", name)) == 2
    hash = plane.blobs.put(b"bytes")
    assert (plane.blobs.get(hash), plane.blobs.has(hash)) == (b"bytes", True)
    plane.activity.log(name, {"n": 1})
    until(lambda: plane.activity.read(session=name).records)
    jobs.set_policy(jobs.policy())
    jobs.schedule("daily", "0 0 * * *", "body")
    assert [each.name for each in jobs.schedules()] == ["daily"]
    assert jobs.unschedule("daily")
    assert jobs.purge() == 1
    assert name in plane.queues(after=name[:-1], limit=10_000)
    assert name in plane.worlds(limit=10_000)


async def test_every_noun_is_reachable_from_a_loop(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane:
        jobs, world, state = plane.queue(name), plane.world(name), plane.state(name)
        await jobs.put("a")
        head = (await world.create()).head
        async with await plane.lease(name).acquire("ada") as lease, await jobs.receive() as message:
            assert message.json() == "a"
            await state.update({"n": 1}, lease=lease)
        assert await world.append(["x"], expected_head=head) == head
        assert (await plane.entities.write("task", name, {"title": 1})).versions == [1]
        hash = await plane.blobs.put(b"bytes")
        assert await plane.blobs.get(hash) == b"bytes"
        await plane.activity.log(name, {"n": 1})
        async for more in jobs.subscribe(wait_seconds=0):
            raise AssertionError(more)
        assert (await jobs.stats()).acked_total == 1


def test_a_client_may_run_on_uvloop(server: Any, name: str) -> None:
    """It reads into the client's own buffer too, by other code: answers shorter than it, and longer ones."""

    async def main() -> None:
        async with holdfast.connect_async(server.url) as plane:
            jobs = plane.queue(name)
            await asyncio.gather(*(jobs.put(number) for number in range(300)))
            payloads = [os.urandom(1_000_000) for _ in range(3)]
            for payload in payloads:  # One after the other, as a lone caller, and longer than the buffer together.
                await jobs.put(payload, priority=9)
            messages = await jobs.receive_many(3, extend_for_seconds=0)
            assert [message.payload for message in messages] == payloads
            rest = await asyncio.gather(*(jobs.receive() for _ in range(300)))
            assert sorted(message.json() for message in rest if message is not None) == [*range(300)]
            await asyncio.gather(*(message.ack() for message in (*messages, *filter(None, rest))))
            assert (await jobs.stats()).acked_total == 303

    uvloop.run(main())


def test_workers_run_unchanged(plane: Plane, name: str) -> None:
    plane.queue(name).put_many(range(20))
    seen: list[int] = []
    worker = Worker(plane, {name: lambda message: seen.append(message.json())}, concurrency=4)
    worker.start()
    until(lambda: worker.stats.handled == 20)
    worker.stop()
    assert sorted(seen) == list(range(20))


async def test_asynchronous_workers_run_unchanged(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane:
        await plane.queue(name).put_many(range(20))
        seen: list[int] = []

        async def handle(message: Any) -> None:
            seen.append(message.json())
            if len(seen) == 20:
                worker.stop()

        worker = AsyncWorker(plane, {name: handle}, concurrency=4)
        await asyncio.wait_for(worker.run(), PATIENCE_SECONDS)
        assert sorted(seen) == list(range(20))


# Frames.


async def test_calls_made_at_the_same_time_travel_together(server: Any, name: str, frames: list[int]) -> None:
    async with holdfast.connect_async(server.url) as plane:
        await plane.state(name).update(0)
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(number) for number in range(200)))
        assert (sum(frames), len(frames)) == (200, 1)


async def test_whoever_was_alone_shares_a_frame_with_those_who_come(server: Any, name: str, frames: list[int]) -> None:
    async with holdfast.connect_async(server.url) as plane:
        for number in range(2 * LONE_TURNS_MIN):
            await plane.state(name).update(number)
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(number) for number in range(200)))
        assert frames == [1, 199], "the first went at once"
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(0) for number in range(200)))
        assert frames == [200]


async def test_puts_made_at_the_same_time_are_one_call(server: Any, name: str, frames: list[int]) -> None:
    async with holdfast.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await jobs.put("first")
        frames.clear()
        receipts = await asyncio.gather(*(jobs.put(number) for number in range(200)))
        assert frames == [1]
        assert [each.id for each in await jobs.peek(201)][1:] == [receipt.id for receipt in receipts]


def test_calls_of_threads_travel_together(plane: Plane, name: str, frames: list[int]) -> None:
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda number: plane.state(f"{name}/{number}").update(number), range(640)))
    assert sum(frames) == 640
    assert len(frames) < 640


async def test_a_frame_that_is_full_is_followed_by_another(server: Any, name: str, frames: list[int]) -> None:
    async with holdfast.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await asyncio.gather(*(jobs.put_many([os.urandom(16_000)] * 64) for _ in range(8)))
        assert (sum(frames), len(frames) > 2) == (8, True)
        assert (await jobs.stats()).ready == 512


def test_a_call_that_fits_no_frame_goes_all_the_same(plane: Plane, name: str) -> None:
    jobs = plane.queue(name)
    messages = [NewMessage(os.urandom(16_384), attributes={"a": "b" * 1_000}) for _ in range(256)]
    receipts = jobs.put_many(messages)
    assert [receipt.id for receipt in receipts] == [each.id for each in jobs.peek(256)]
    found = jobs.receive_many(256, extend_for_seconds=0)
    assert [message.payload for message in found] == [message.payload for message in messages]


def test_an_answer_may_be_longer_than_a_frame(plane: Plane, name: str) -> None:
    jobs = plane.queue(name)
    for _ in range(20):
        jobs.put(os.urandom(1_000_000))
    assert [len(message.payload) for message in jobs.receive_many(20, extend_for_seconds=0)] == [1_000_000] * 20


async def test_calls_that_wait_do_not_hold_up_the_others(server: Any, name: str) -> None:
    """There are more of them than a server takes at a time."""
    async with holdfast.connect_async(server.url) as plane:
        await plane.lease(name).acquire("ada", ttl_seconds=600)
        waiting = [asyncio.create_task(plane.lease(name).acquire(wait_seconds=600)) for _ in range(5_000)]

        async def enough_wait() -> bool:
            return (await plane.lease(name).describe()).waiting >= 2_000

        await until_async(enough_wait)
        await asyncio.gather(*(plane.queue(name).put(number) for number in range(100)))
        assert (await plane.queue(name).stats()).ready == 100
    assert {type(outcome) for outcome in await asyncio.gather(*waiting, return_exceptions=True)} == {Closed}


def test_a_call_that_cannot_be_sent_fails_alone(plane: Plane, name: str) -> None:
    """It would end the connection, be sent again on the next one, and so for ever."""
    jobs, transport = plane.queue(name), plane._transport
    with ThreadPoolExecutor(8) as threads:
        puts = [threads.submit(jobs.put, number) for number in range(50)]
        for wrong in (ListWorlds(after=7), ListWorlds(limit="many"), ListWorlds(limit=1 << 70), ListWorlds("\ud800")):
            with pytest.raises(InvalidArgument, match="cannot be sent"):
                transport.call(wrong)
        for put in puts:
            put.result(PATIENCE_SECONDS)
    assert jobs.stats().put_total == 50


# Errors.


def test_errors_keep_their_class_and_what_they_know(plane: Plane, name: str) -> None:
    plane.lease(name).acquire("ada", ttl_seconds=60)
    with pytest.raises(LeaseHeld) as held:
        plane.lease(name).acquire("bob")
    assert (held.value.owner, held.value.key, held.value.retry) == ("ada", name, "later")
    assert held.value.expires_ms > held.value.now_ms
    state = plane.state(f"{name}/1")
    etag = state.update(1).etag
    with pytest.raises(CasMismatch) as stale:
        state.update(2, if_match="other")
    assert stale.value.current_etag == etag
    with pytest.raises(CasMismatch) as gone:
        plane.state(f"{name}/2").update(2, if_match="other")
    assert gone.value.current_etag is None
    head = plane.world(name).create().head
    with pytest.raises(HeadAdvanced) as advanced:
        plane.world(name).append(["x"], expected_head=head + 3)
    assert (advanced.value.expected, advanced.value.actual) == (head + 3, head)
    plane.entities.write("task", name, {"a": 1})
    with pytest.raises(VersionConflict) as conflict:
        plane.entities.put_if_version("task", name, {"a": 2}, expected_version=5)
    assert (conflict.value.expected, conflict.value.actual) == (5, 1)
    with pytest.raises(BlobNotFound):
        plane.blobs.get(hashlib.sha256(name.encode()).hexdigest())
    with pytest.raises(BlobNotFound):
        plane.blobs.open(hashlib.sha256(name.encode()).hexdigest())


def test_a_token_that_the_server_does_not_know_is_not_tried_again() -> None:
    with serving(tokens=True) as strict:
        with holdfast.connect(strict.url, token="nonsense") as plane:
            for _ in range(2):
                with pytest.raises(NotAllowed):
                    plane.worlds()
            with pytest.raises(NotAllowed):
                plane.blobs.put(bytes(MEGABYTE))
        with holdfast.connect(strict.url, token="reader") as plane:
            assert plane.worlds() == []
            with pytest.raises(NotAllowed):
                plane.world("ada").create()
            with pytest.raises(NotAllowed):
                plane.blobs.write(iter([bytes(MEGABYTE)] * 8))


@pytest.mark.parametrize("url", ["http://", "http://:80", "http://a:b", "http://a:99999", "http://a/?b", "ftp://a"])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidUrl):
        holdfast.connect(url)


@contextmanager
def somebody_else(answer: bytes | None) -> Iterator[str]:
    """A server that is not ours: it says the same to everybody, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            kept = []
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    if answer is None:
                        kept.append(connection)
                        continue
                    with connection, suppress(OSError):
                        connection.recv(65_536)
                        connection.sendall(answer)
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_SECONDS)


def assert_unreachable(url: str, says: str) -> None:
    began = time.monotonic()
    with holdfast.connect(url, patience_seconds=0.4) as plane:
        for call in (plane.worlds, lambda: plane.blobs.put(bytes(MEGABYTE)), lambda: plane.blobs.get("0" * 64)):
            with pytest.raises(Unreachable, match=says):
                call()
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_a_port_at_which_nobody_listens_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert_unreachable(url, "does not answer.*holdfast serve")


def test_a_host_that_there_is_not_is_unreachable() -> None:
    assert_unreachable("http://no-such-host.invalid:9440", "does not answer.*check the URL")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\nnot found",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
        b"220 smtp.example.com\r\n",
        b"",
    ],
)
def test_a_server_that_is_not_ours_is_unreachable(answer: bytes) -> None:
    with somebody_else(answer) as url:
        assert_unreachable(url, "check")


def test_a_server_that_never_answers_is_unreachable() -> None:
    with somebody_else(None) as url:
        assert_unreachable(url, "check")


async def test_a_loop_hears_the_same() -> None:
    with somebody_else(b"HTTP/1.1 404 Not Found\r\n\r\n") as url:
        async with holdfast.connect_async(url, patience_seconds=0.2) as plane:
            outcomes = await asyncio.gather(*(plane.worlds() for _ in range(5)), return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {Unreachable}


def test_a_call_outlasts_a_server_that_is_gone_for_a_while(server: Any, name: str) -> None:
    with Proxy(server.port) as proxy, holdfast.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane:
        plane.queue(name).put("a")
        proxy.refuses = True
        proxy.cut_all()
        with ThreadPoolExecutor(2) as threads:
            put, blob = threads.submit(plane.queue(name).put, "b"), threads.submit(plane.blobs.put, bytes(MEGABYTE))
            refused = proxy.accepted
            until(lambda: proxy.accepted > refused + 3)
            proxy.refuses = False
            put.result(PATIENCE_SECONDS)
            blob.result(PATIENCE_SECONDS)
        assert plane.queue(name).stats().ready == 2


def let_an_hour_pass(plane: Plane) -> None:
    """For the connection of a client, and what it waits for."""
    transport: Any = plane._transport

    async def move() -> None:
        connection = transport._transport._connection
        connection._up_since -= 3_600.0
        for waiting in (connection, "_gone_since"), *((each, "since") for each in connection._pending.values()):
            setattr(*waiting, getattr(*waiting) - 3_600.0)

    transport._wait(move())


def test_a_connection_that_lived_longer_than_patience_is_made_again(
    server: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience begins when the server goes, not when it came."""
    monkeypatch.setattr("holdfast.client.connection._LOOK_SECONDS_MAX", 0.005)
    with (
        Proxy(server.port) as proxy,
        holdfast.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane,
        holdfast.connect(server.url) as watching,
        ThreadPoolExecutor(1) as threads,
    ):
        jobs = watching.queue(name)
        waiter = threads.submit(plane.queue(name).receive, wait_seconds=600, extend_for_seconds=0)
        until(lambda: jobs.stats().waiting_consumers == 1)
        let_an_hour_pass(plane)
        proxy.refuses = True
        proxy.cut_all()
        refused = proxy.accepted
        until(lambda: proxy.accepted > refused + 2)
        assert not waiter.done()
        proxy.refuses = False
        until(lambda: waiter.done() or jobs.stats().waiting_consumers == 1)
        jobs.put("a")
        message = waiter.result(PATIENCE_SECONDS)
        assert message is not None
        assert message.json() == "a"


# Blobs.


class Memory:
    """How much memory this process has had at most since it was asked."""

    def __enter__(self) -> "Memory":
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


def test_a_large_blob_is_streamed_both_ways(server: Any, plane: Plane) -> None:
    with Memory() as memory:
        hash = plane.blobs.write(pieces(20))
        sha = hashlib.sha256()
        for part in plane.blobs.open(hash):
            assert len(part) <= MEGABYTE
            sha.update(part)
    assert hash == sha.hexdigest() == hash_of(20)
    assert memory.grew < 12 * MEGABYTE
    assert plane.blobs.write(plane.blobs.open(hash)) == hash  # A stream may come from the very plane it goes to.
    assert plane.blobs.put(plane.blobs.get(hash)) == hash


async def test_a_loop_streams_a_large_blob_both_ways(server: Any) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces(20):
            await asyncio.sleep(0)
            yield piece

    async with holdfast.connect_async(server.url) as plane:
        with Memory() as memory:
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

    with pytest.raises((error, Unreachable)):  # What is an OSError may as well be the connection's.
        plane.blobs.write(failing())
    for wrong in ("text", 5, None):
        with pytest.raises(InvalidValue):
            plane.blobs.put(wrong)
        with pytest.raises(InvalidValue):
            plane.blobs.write(iter([wrong]))
    assert not plane.blobs.has(hashlib.sha256(name.encode() * MEGABYTE).hexdigest())


async def test_a_stream_whose_task_is_cancelled_stores_nothing(server: Any, name: str) -> None:
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield name.encode()
        begun.set()
        await asyncio.sleep(3_600)

    async with holdfast.connect_async(server.url) as plane:
        writing = asyncio.create_task(plane.blobs.write(endless()))
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not await plane.blobs.has(hashlib.sha256(name.encode()).hexdigest())


def test_a_download_goes_on_where_it_was_cut(server: Any, plane: Plane) -> None:
    hash = plane.blobs.write(pieces(8))
    with Proxy(server.port, seed=1) as proxy, holdfast.connect(proxy.url) as cut:
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
def test_a_part_of_a_blob_comes_alone(server: Any, plane: Plane, start: int, length: int | None) -> None:
    whole = b"".join(pieces(4))
    hash = plane.blobs.write(pieces(4))
    end = None if length is None else start + length
    assert b"".join(plane.blobs.open(hash, start=start, length=length)) == whole[start:end]

    async def on_a_loop() -> bytes:
        async with holdfast.connect_async(server.url) as other:
            return b"".join([part async for part in await other.blobs.open(hash, start=start, length=length)])

    assert asyncio.run(on_a_loop()) == whole[start:end]


def test_a_part_that_is_none_is_refused(plane: Plane) -> None:
    hash = plane.blobs.put(b"few")
    for part in ({"start": -1}, {"length": -1}):
        with pytest.raises(InvalidArgument, match="0 or more"):
            plane.blobs.open(hash, **part)
    for part in ({"start": 1}, {"length": 0}, {"start": 3, "length": 5}):
        with pytest.raises(BlobNotFound):
            plane.blobs.open("0" * 64, **part)


def test_a_part_goes_on_where_it_was_cut(server: Any, plane: Plane) -> None:
    hash = plane.blobs.write(pieces(12))
    with Proxy(server.port, seed=1) as proxy, holdfast.connect(proxy.url) as cut:
        proxy.bytes_max = 4 * MEGABYTE
        found = b"".join(cut.blobs.open(hash, start=MEGABYTE + 5, length=9 * MEGABYTE))
        assert found == b"".join(pieces(12))[MEGABYTE + 5 :][: 9 * MEGABYTE]
        assert proxy.cuts


def test_a_large_payload_goes_with_its_message(plane: Plane, name: str) -> None:
    body = os.urandom(3 * MEGABYTE)
    plane.queue(name).put(body)
    with plane.queue(name).receive() as message:
        assert (message.payload, message.read()) == (None, body)
        assert b"".join(message.open()) == body


def test_what_another_client_holds_is_settled_by_what_it_is_known_by(server: Any, plane: Plane, name: str) -> None:
    plane.queue(name).put(1)
    message = plane.queue(name).receive(extend_for_seconds=0)
    lease = plane.lease(name).acquire("ada")
    with holdfast.connect(server.url) as other:
        other.queue(name).held(message.id, lease_id=message.lease.lease_id, fence=message.fence).ack()
        assert other.lease(name).held(lease.id, fence=lease.fence).release() is True
    assert plane.queue(name).stats().leased == 0


# Whoever is cancelled.


async def standing(plane: AsyncPlane, name: str, line: int) -> None:
    async def are_there() -> bool:
        return (await plane.queue(name).stats()).waiting_consumers == line

    await until_async(are_there)


async def test_a_cancelled_receive_gives_its_message_back(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane, holdfast.connect_async(server.url) as other:
        jobs = plane.queue(name)
        receiving = asyncio.create_task(jobs.receive(wait_seconds=600))
        await standing(plane, name, 1)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await other.queue(name).put("a")
        message = await other.queue(name).receive(wait_seconds=PATIENCE_SECONDS)
        assert message is not None
        assert message.failure_attempts == 0
        await message.ack()


async def test_a_cancelled_acquire_gives_its_lease_back(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane:
        held = await plane.lease(name).acquire("ada", ttl_seconds=600)
        acquiring = asyncio.create_task(plane.lease(name).acquire("bob", wait_seconds=600, ttl_seconds=600))

        async def waits() -> bool:
            return (await plane.lease(name).describe()).waiting == 1

        await until_async(waits)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await held.release()
        assert await plane.lease(name).acquire("carl", wait_seconds=PATIENCE_SECONDS)


async def test_a_client_that_is_gone_leaves_the_line(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane:
        leaving = await holdfast.connect_async(server.url)
        receiving = asyncio.create_task(leaving.queue(name).receive(wait_seconds=600))
        await standing(plane, name, 1)
        await leaving.close()
        with pytest.raises(Closed):
            await receiving
        await standing(plane, name, 0)


def test_an_interrupted_thread_gives_its_message_back(server: Any, name: str) -> None:
    with holdfast.connect(server.url) as plane:
        jobs = plane.queue(name)
        before = signal.signal(signal.SIGALRM, _interrupt)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGALRM)).start()
            with pytest.raises(KeyboardInterrupt):
                jobs.receive(wait_seconds=600)
        finally:
            signal.signal(signal.SIGALRM, before)
        jobs.put("a")
        with jobs.receive(wait_seconds=PATIENCE_SECONDS) as message:
            assert message.failure_attempts == 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# Several clients, threads, ends.


def test_two_clients_share_a_plane(server: Any, plane: Plane, name: str) -> None:
    with holdfast.connect(server.url) as other, ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(other.queue(name).receive, wait_seconds=60)
        until(lambda: plane.queue(name).stats().waiting_consumers == 1)
        plane.queue(name).put("a")
        message = waiter.result(PATIENCE_SECONDS)
        assert message is not None
        message.ack()
        assert plane.queue(name).stats().acked_total == 1
        assert Plane(other._transport, "elsewhere").queues() == []


def test_a_closed_client_says_so_and_lets_nobody_wait_for_ever(server: Any, name: str) -> None:
    plane = holdfast.connect(server.url)
    with ThreadPoolExecutor(16) as threads:
        waiters = [threads.submit(plane.queue(name).receive, wait_seconds=600) for _ in range(16)]
        until(lambda: plane.queue(name).stats().waiting_consumers == 16)
        plane.close()
        for waiter in waiters:
            with pytest.raises(Closed):
                waiter.result(PATIENCE_SECONDS)
    plane.close()
    for call in (
        plane.worlds,
        lambda: plane.queue(name).put("a"),
        lambda: plane.blobs.put(bytes(MEGABYTE)),
        lambda: plane.blobs.write(iter([b"a"])),
        lambda: plane.blobs.open("0" * 64),
    ):
        with pytest.raises(Closed):
            call()


async def test_a_closed_client_of_a_loop_says_so(server: Any) -> None:
    plane = await holdfast.connect_async(server.url)
    await plane.worlds()
    await plane.close()
    await plane.close()
    with pytest.raises(Closed):
        await plane.worlds()


def test_a_client_that_never_called_is_closed_too(server: Any) -> None:
    holdfast.connect(server.url).close()
    asyncio.run(_open_and_close(server.url))


async def _open_and_close(url: str) -> None:
    async with holdfast.connect_async(url):
        pass


def test_a_client_does_not_outlive_a_fork(server: Any) -> None:
    with holdfast.connect(server.url) as plane:
        plane.worlds()
        child = os.fork()
        if not child:  # Nothing of pytest's may run here.
            try:
                plane.worlds()
                os._exit(1)
            except Closed:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        plane.worlds()


# Leases that are extended.


async def test_a_message_is_kept_while_its_event_loop_is_blocked(server: Any, name: str) -> None:
    async with holdfast.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await jobs.put("a", visibility_seconds=6)  # A machine that is busy for two seconds loses nothing.
        message = await jobs.receive()
        assert message is not None
        first = message.expires_ms
        until(lambda: message.expires_ms > first + 3_000)  # Blocks the loop: this is no `await`.
        await message.ack()
        stats = await jobs.stats()
        assert (stats.expired_total, stats.acked_total) == (0, 1)


def test_the_keeper_outlasts_connections_that_are_closed(server: Any, name: str) -> None:
    """Servers close connections that are quiet for a while; an extension must not be lost by that."""
    with Proxy(server.port) as proxy, holdfast.connect(proxy.url) as plane:
        jobs = plane.queue(name)
        jobs.put("a", visibility_seconds=6)
        message = jobs.receive()
        assert message is not None
        for _ in range(3):
            before = message.expires_ms
            until(lambda before=before: message.expires_ms > before)
            proxy.cut_all()
        message.ack()
        assert (jobs.stats().expired_total, message.lost) == (0, False)


def test_a_keeper_whose_server_is_silent_does_not_hold_up_the_end(server: Any, name: str) -> None:
    with Proxy(server.port) as proxy:
        plane = holdfast.connect(proxy.url)
        plane.queue(name).put("a", visibility_seconds=3)
        message = plane.queue(name).receive()
        assert message is not None
        proxy.swallows = True
        accepted = proxy.accepted
        proxy.cut_all()
        until(lambda: proxy.accepted >= accepted + 2)  # The plane's connection again, and the keeper's.
        plane.close()


def test_what_a_client_leaves_behind_is_nothing(server: Any) -> None:
    gc.collect()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(5):
        with holdfast.connect(server.url) as plane:
            plane.blobs.get(plane.blobs.put(bytes(MEGABYTE)))
            plane.worlds()
    until(lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) <= before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_server_that_drains_puts_calls_off_until_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    deliver = Connection._deliver

    def listening(self: Connection, reply: Any) -> None:
        deliver(self, reply)
        told.append(reply.problem and reply.problem.code)

    monkeypatch.setattr(Connection, "_deliver", listening)
    with serving(f"dir:{tmp_path}") as first, Proxy(first.port) as proxy, holdfast.connect(proxy.url) as plane:
        plane.queue("jobs").put("a")
        first.drain()
        with ThreadPoolExecutor(1) as threads:
            until(lambda: first.get("/v1/queues").status == 503)
            told.clear()
            put = threads.submit(plane.queue("jobs").put, "b")
            until(lambda: told == ["shutdown_draining"])
            assert not put.done()
            first.process.terminate()
            first.process.wait(PATIENCE_SECONDS)
            with serving(f"dir:{tmp_path}") as second:
                proxy.target = second.port
                put.result(PATIENCE_SECONDS)
                assert plane.queue("jobs").stats().ready == 2


async def test_a_connection_that_ends_in_a_way_that_nobody_thought_of_is_made_again(
    server: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises: in what a connection begins with, in what its end says, while calls are sorted out."""
    failed: list[str] = []

    def once(method: str) -> None:
        owner: Any = client_connection if method == "sift" else Connection
        work = getattr(owner, method)

        def fail(*args: Any) -> Any:
            if method not in failed:
                failed.append(method)
                raise ZeroDivisionError(method)
            return work(*args)

        monkeypatch.setattr(owner, method, fail)

    async with asyncio.timeout(PATIENCE_SECONDS), await holdfast.connect_async(server.url) as plane:
        connection = plane._transport._connected()
        for number, method in enumerate(("_stream", "_resume", "sift", "_fail_late")):
            once(method)
            socket = connection._socket
            if socket is not None and method == "sift":
                connection._write_frame(socket, b"\xc1")  # No frame at all.
            elif socket is not None:
                socket.transport.abort()
            await plane.queue(name).put(str(number))
            while method not in failed:
                await asyncio.sleep(0.01)
        assert (await plane.queue(name).stats()).ready == 4


async def test_a_frame_that_cannot_be_sent_ends_its_connection_and_is_sent_by_the_next(
    server: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), await holdfast.connect_async(server.url) as plane:
        await plane.queue(name).put("first")
        broken = plane._transport._connected()._socket

        async def fail(*args: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(broken, "write_now", lambda message: False)
        monkeypatch.setattr(broken, "send", fail)
        await plane.queue(name).put("second")
        assert (await plane.queue(name).stats()).ready == 2
    assert "ZeroDivisionError" in caplog.text


async def test_a_flush_that_fails_does_not_keep_later_calls_from_being_sent(
    server: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), await holdfast.connect_async(server.url) as plane:
        queue = plane.queue(name)
        await asyncio.gather(*[queue.put(number) for number in range(3)])
        merging = plane._transport._connected()._merging
        send, failed = merging.send, list[int]()

        def fail_once() -> int:
            if not failed:
                failed.append(1)
                raise ZeroDivisionError
            return send()

        monkeypatch.setattr(merging, "send", fail_once)
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        first = [asyncio.create_task(queue.put(number)) for number in range(3)]
        while not errors:
            await asyncio.sleep(0.001)
        await asyncio.gather(*first, *[queue.put(number) for number in range(3)])
        assert (await queue.stats()).ready == 9
