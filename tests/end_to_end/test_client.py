"""The client against a real server process: every feature, from threads and from asyncio, and its failures."""

import asyncio
import gc
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.client import ClientProtocol

import fastness
from fastness import AsyncPlane, AsyncWorker, Plane, Worker
from fastness.adaptive_batching import SINGLE_CALLER_TICKS_MIN
from fastness.client import lease_renewal
from fastness.client import session as client_session
from fastness.client.blocking_connection import BlockingConnection
from fastness.client.blocking_socket import BlockingSocket
from fastness.client.connection import Connection
from fastness.client.session import Session
from fastness.client.transport import RemoteTransport
from fastness.client.websocket import Socket
from fastness.errors import (
    BlobNotFound,
    CasMismatch,
    Closed,
    HeadAdvanced,
    InvalidArgument,
    InvalidUrl,
    LeaseExpired,
    LeaseHeld,
    NotAllowed,
    Unreachable,
    VersionConflict,
)
from fastness.wire.audit import ReadAudit
from fastness.wire.frames import decode_calls
from fastness.wire.inboxes import Control
from fastness.wire.leases import LeaseProof
from fastness.wire.queues import AckMessages, NewMessage, Receipts, ReceiveMessages
from fastness.wire.requests import Request
from fastness.wire.worlds import DescribeWorld, ListWorlds
from tests.support.http_server import Server, serving
from tests.support.proxy import Proxy
from tests.support.waiting import eventually, eventually_async

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


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in each frame that a client has sent."""
    sent: list[int] = []
    send, write_now, output = ClientProtocol.send_binary, Socket.write_now, BlockingSocket.output

    def count(message: Any) -> None:
        with suppress(Exception):  # A hello is not a list of calls.
            sent.append(len(decode_calls(message)))

    def sending(self: ClientProtocol, message: Any, *rest: Any) -> None:
        count(message)
        send(self, message, *rest)

    def writing(self: Socket, message: bytes) -> bool:
        written = write_now(self, message)
        if written:
            count(message)
        return written

    def writing_from_thread(self: BlockingSocket, messages: list[bytes]) -> bytes:
        for message in messages:
            count(message)
        return output(self, messages)

    monkeypatch.setattr(BlockingSocket, "output", writing_from_thread)
    monkeypatch.setattr(ClientProtocol, "send_binary", sending)
    monkeypatch.setattr(Socket, "write_now", writing)
    return sent


# Every feature once, from a thread and from an event loop.


def test_every_feature_works_from_a_thread(plane: Plane, name: str) -> None:
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
    assert plane.entities.update("task", name, lambda found: {"title": found["title"] + "b"}).versions == [2]  # type: ignore[index]
    assert plane.entities.get("task", name)["title"] == "ab"  # type: ignore[index]
    assert len(plane.entities.history("task", name)) == 2
    hash = plane.blobs.put(b"bytes")
    assert (plane.blobs.get(hash), plane.blobs.has(hash), plane.blobs.size(hash)) == (b"bytes", True, 5)
    with pytest.raises(BlobNotFound, match="No blob 0"):
        plane.blobs.size("0" * 64)
    plane.activity.log(name, {"n": 1})
    eventually(lambda: plane.activity.read(session=name).records)
    jobs.set_policy(jobs.policy())
    jobs.schedule("daily", "0 0 * * *", "body")
    assert [each.name for each in jobs.schedules()] == ["daily"]
    assert jobs.unschedule("daily")
    assert jobs.purge() == 1
    assert name in plane.queues(after=name[:-1], limit=10_000)
    assert name in plane.worlds(limit=10_000)


async def test_every_feature_works_from_an_event_loop(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane:
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


def test_a_client_runs_on_uvloop(server: Server, name: str) -> None:
    """uvloop reads into the client's own buffer with its own code: answers shorter than the buffer, and longer ones."""

    async def main() -> None:
        async with fastness.connect_async(server.url) as plane:
            jobs = plane.queue(name)
            await asyncio.gather(*(jobs.put(number) for number in range(300)))
            payloads = [os.urandom(1_000_000) for _ in range(3)]
            for payload in payloads:  # One at a time, as a single caller, and together longer than the buffer.
                await jobs.put(payload, priority=9)
            messages = await jobs.receive_many(3, extend_for_seconds=0)
            assert [message.payload for message in messages] == payloads
            rest = await asyncio.gather(*(jobs.receive() for _ in range(300)))
            assert sorted(message.json() for message in rest if message is not None) == [*range(300)]
            await asyncio.gather(*(message.ack() for message in (*messages, *filter(None, rest))))
            assert (await jobs.stats()).acked_total == 303

    uvloop.run(main())


def test_workers_run_over_the_network(plane: Plane, name: str) -> None:
    plane.queue(name).put_many(range(20))
    seen: list[int] = []
    worker = Worker(plane, {name: lambda message: seen.append(message.json())}, concurrency=4)
    worker.start()
    eventually(lambda: worker.stats.handled == 20)
    worker.stop()
    assert sorted(seen) == list(range(20))


def test_a_worker_with_quick_handlers_makes_one_call_for_many_messages(
    plane: Plane, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = plane.queue(name)
    jobs.put_many(range(200))
    calls: list[Any] = []
    call = jobs._transport.call

    def noted(request: Any) -> Any:
        calls.append(request)
        return call(request)

    monkeypatch.setattr(jobs._transport, "call", noted)
    seen: list[int] = []
    worker = Worker(plane, {name: lambda message: seen.append(message.json())})
    worker._monotonic = lambda: 0.0  # Handlers take no time.
    worker.start()
    eventually(lambda: worker.stats.handled == 200)
    worker.stop()
    assert seen == list(range(200))
    assert [len(request.acks) for request in calls if isinstance(request, ReceiveMessages) and request.acks] == [1] * 8
    assert not [request for request in calls if isinstance(request, AckMessages)]


async def test_async_workers_run_over_the_network(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane:
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


async def test_concurrent_calls_share_a_frame(server: Server, name: str, frames: list[int]) -> None:
    async with fastness.connect_async(server.url) as plane:
        await plane.state(name).update(0)
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(number) for number in range(200)))
        assert (sum(frames), len(frames)) == (200, 1)


async def test_a_single_caller_shares_a_frame_once_others_call(server: Server, name: str, frames: list[int]) -> None:
    async with fastness.connect_async(server.url) as plane:
        for number in range(2 * SINGLE_CALLER_TICKS_MIN):
            await plane.state(name).update(number)
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(number) for number in range(200)))
        assert frames == [1, 199], "the first call was sent at once"
        frames.clear()
        await asyncio.gather(*(plane.state(f"{name}/{number}").update(0) for number in range(200)))
        assert frames == [200]


async def test_concurrent_puts_are_one_call(server: Server, name: str, frames: list[int]) -> None:
    async with fastness.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await jobs.put("first")
        frames.clear()
        receipts = await asyncio.gather(*(jobs.put(number) for number in range(200)))
        assert frames == [1]
        assert [each.id for each in await jobs.peek(201)][1:] == [receipt.id for receipt in receipts]


def test_calls_of_threads_share_frames(plane: Plane, name: str, frames: list[int]) -> None:
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda number: plane.state(f"{name}/{number}").update(number), range(640)))
    assert sum(frames) == 640
    assert len(frames) < 640


async def test_a_full_frame_is_followed_by_another(server: Server, name: str, frames: list[int]) -> None:
    async with fastness.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await asyncio.gather(*(jobs.put_many([os.urandom(16_000)] * 64) for _ in range(8)))
        assert (sum(frames), len(frames) > 2) == (8, True)
        assert (await jobs.stats()).ready == 512


def test_a_call_too_long_for_a_frame_is_sent_over_http(plane: Plane, name: str) -> None:
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
    assert [len(message.payload or b"") for message in jobs.receive_many(20, extend_for_seconds=0)] == [1_000_000] * 20


async def test_waiting_calls_do_not_block_other_calls(server: Server, name: str) -> None:
    """There are more waiting calls than a server accepts at a time."""
    async with fastness.connect_async(server.url) as plane:
        await plane.lease(name).acquire("ada", ttl_seconds=600)
        waiting = [asyncio.create_task(plane.lease(name).acquire(wait_seconds=600)) for _ in range(5_000)]

        async def enough_wait() -> bool:
            return (await plane.lease(name).describe()).waiting >= 2_000

        await eventually_async(enough_wait)
        await asyncio.gather(*(plane.queue(name).put(number) for number in range(100)))
        assert (await plane.queue(name).stats()).ready == 100
    assert {type(outcome) for outcome in await asyncio.gather(*waiting, return_exceptions=True)} == {Closed}


def test_a_call_that_cannot_be_sent_fails_by_itself(plane: Plane, name: str) -> None:
    """Otherwise it would end each connection and be sent again on the next one, without end."""
    jobs, transport = plane.queue(name), plane._transport
    with ThreadPoolExecutor(8) as threads:
        puts = [threads.submit(jobs.put, number) for number in range(50)]
        wrongs: list[tuple[Request[Any], str]] = [
            (ListWorlds(after=7), "after is 7; give a text"),  # type: ignore[arg-type]
            (ListWorlds(limit="many"), "limit is 'many'; give a whole number"),  # type: ignore[arg-type]
            (DescribeWorld("w", incarnation=1 << 70), "DescribeWorld cannot be sent"),
            (ReadAudit(actor="\ud800"), "ReadAudit cannot be sent"),
        ]
        for wrong, why in wrongs:
            with pytest.raises(InvalidArgument, match=why):
                transport.call(wrong)
        for put in puts:
            put.result(PATIENCE_SECONDS)
    assert jobs.stats().put_total == 50


# Errors.


def test_errors_keep_their_class_and_attributes(plane: Plane, name: str) -> None:
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


def test_an_unknown_token_is_not_retried() -> None:
    with serving(tokens=True) as strict:
        with fastness.connect(strict.url, token="nonsense") as plane:
            for _ in range(2):
                with pytest.raises(NotAllowed):
                    plane.worlds()
            with pytest.raises(NotAllowed):
                plane.blobs.put(bytes(MEGABYTE))
        with fastness.connect(strict.url, token="reader") as plane:
            assert plane.worlds() == []
            with pytest.raises(NotAllowed):
                plane.world("ada").create()
            with pytest.raises(NotAllowed):
                plane.blobs.write(iter([bytes(MEGABYTE)] * 8))


def test_a_missing_token_is_reported_with_how_to_give_one() -> None:
    calls: list[Callable[[Plane], object]] = [
        lambda plane: plane.worlds(),
        lambda plane: plane.blobs.put(bytes(MEGABYTE)),
        lambda plane: plane.blobs.write(iter([b"x"])),
        lambda plane: b"".join(plane.blobs.open("0" * 64)),
        lambda plane: plane.backups.begin(),
        lambda plane: list(plane.backups.examine()),
    ]
    with serving(tokens=True) as strict:
        for call in calls:
            with fastness.connect(strict.url) as plane, pytest.raises(NotAllowed) as caught:
                call(plane)
            message = str(caught.value)
            assert "needs a token and none was given" in message
            assert all(way in message for way in ("token=", "FASTNESS_TOKEN", "--token", "fastness token create"))
            assert "host" not in message
        by_name = strict.url.replace("127.0.0.1", "localhost")
        with fastness.connect(by_name, token="nonsense") as plane, pytest.raises(NotAllowed, match="refused the token"):
            plane.worlds()


@pytest.mark.parametrize("url", ["http://", "http://:80", "http://a:b", "http://a:99999", "http://a/?b", "ftp://a"])
def test_an_invalid_url_is_rejected_at_once(url: str) -> None:
    with pytest.raises(InvalidUrl):
        fastness.connect(url)


@contextmanager
def foreign_server(answer: bytes | None) -> Iterator[str]:
    """Runs a server that is not Fastness: it sends the same bytes to every client, or nothing. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as record_reply:

        def serve() -> None:
            kept = []
            with suppress(OSError):
                while True:
                    connection, _ = record_reply.accept()
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
        yield f"http://127.0.0.1:{record_reply.getsockname()[1]}"
        record_reply.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_SECONDS)


def assert_unreachable(url: str, message: str) -> None:
    """Each call gives up after its patience, in which a client tries to connect about five times."""
    attempts: list[Any] = []
    create_connection = socket.create_connection

    def count(address: Any, *rest: Any, **options: Any) -> socket.socket:
        attempts.append(address)
        return create_connection(address, *rest, **options)

    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        fastness.connect(url, patience_seconds=0.4) as plane,
    ):
        monkeypatch.setattr(socket, "create_connection", count)
        for call in (plane.worlds, lambda: plane.blobs.put(bytes(MEGABYTE)), lambda: plane.blobs.get("0" * 64)):
            attempts.clear()
            with pytest.raises(Unreachable, match=message):
                call()
            assert 1 <= len(attempts) <= 20


def test_a_closed_port_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert_unreachable(url, "does not answer.*fastness serve")


def test_an_unknown_host_is_unreachable() -> None:
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
def test_a_foreign_server_is_unreachable(answer: bytes) -> None:
    with foreign_server(answer) as url:
        assert_unreachable(url, "check")


def test_a_server_that_never_answers_is_unreachable() -> None:
    with foreign_server(None) as url:
        assert_unreachable(url, "check")


async def test_an_async_client_raises_the_same_errors() -> None:
    with foreign_server(b"HTTP/1.1 404 Not Found\r\n\r\n") as url:
        async with fastness.connect_async(url, patience_seconds=0.2) as plane:
            outcomes = await asyncio.gather(*(plane.worlds() for _ in range(5)), return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {Unreachable}


def test_a_call_survives_an_outage_of_the_server(server: Server, name: str) -> None:
    with Proxy(server.port) as proxy, fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane:
        plane.queue(name).put("a")
        proxy.refuses = True
        proxy.cut_all()
        with ThreadPoolExecutor(2) as threads:
            put, blob = threads.submit(plane.queue(name).put, "b"), threads.submit(plane.blobs.put, bytes(MEGABYTE))
            refused = proxy.accepted
            eventually(lambda: proxy.accepted > refused + 3)
            proxy.refuses = False
            put.result(PATIENCE_SECONDS)
            blob.result(PATIENCE_SECONDS)
        assert plane.queue(name).stats().ready == 2


def age_connection_by_an_hour(plane: Plane) -> None:
    """Move the times that a client's connection has recorded an hour into the past."""
    connection: Any = plane._transport._connection  # type: ignore[attr-defined]
    session = connection._session
    with connection._lock:
        session._connected_since -= 3_600.0
        for waiting in (session, "_disconnected_since"), *((each, "since") for each in session.pending.values()):
            setattr(*waiting, getattr(*waiting) - 3_600.0)


def test_a_connection_older_than_the_patience_is_reopened(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout starts when the connection is lost, not when it was opened."""
    monkeypatch.setattr("fastness.client.session._TIMEOUT_CHECK_SECONDS_MAX", 0.005)
    with (
        Proxy(server.port) as proxy,
        fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane,
        fastness.connect(server.url) as watching,
        ThreadPoolExecutor(1) as threads,
    ):
        jobs = watching.queue(name)
        waiter = threads.submit(plane.queue(name).receive, wait_seconds=600, extend_for_seconds=0)
        eventually(lambda: jobs.stats().waiting_consumers == 1)
        age_connection_by_an_hour(plane)
        proxy.refuses = True
        proxy.cut_all()
        refused = proxy.accepted
        eventually(lambda: proxy.accepted > refused + 2)
        assert not waiter.done()
        proxy.refuses = False
        eventually(lambda: waiter.done() or jobs.stats().waiting_consumers == 1)
        jobs.put("a")
        message = waiter.result(PATIENCE_SECONDS)
        assert message is not None
        assert message.json() == "a"


def test_another_client_can_settle_a_lease_by_its_id_and_fence(server: Server, plane: Plane, name: str) -> None:
    plane.queue(name).put(1)
    message = plane.queue(name).receive(extend_for_seconds=0)
    lease = plane.lease(name).acquire("ada")
    with fastness.connect(server.url) as other:
        other.queue(name).held(message.id, lease_id=message.lease.lease_id, fence=message.fence).ack()
        assert other.lease(name).held(lease.id, fence=lease.fence).release() is True
    assert plane.queue(name).stats().leased == 0


# Cancelled callers.


async def wait_for_consumers(plane: AsyncPlane, name: str, consumers: int) -> None:
    async def all_wait() -> bool:
        return (await plane.queue(name).stats()).waiting_consumers == consumers

    await eventually_async(all_wait)


async def test_a_cancelled_receive_releases_its_message(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane, fastness.connect_async(server.url) as other:
        jobs = plane.queue(name)
        receiving = asyncio.create_task(jobs.receive(wait_seconds=600))
        await wait_for_consumers(plane, name, 1)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await other.queue(name).put("a")
        message = await other.queue(name).receive(wait_seconds=PATIENCE_SECONDS)
        assert message is not None
        assert message.failure_attempts == 0
        await message.ack()


async def test_a_cancelled_acquire_releases_its_lease(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane:
        held = await plane.lease(name).acquire("ada", ttl_seconds=600)
        acquiring = asyncio.create_task(plane.lease(name).acquire("bob", wait_seconds=600, ttl_seconds=600))

        async def waits() -> bool:
            return (await plane.lease(name).describe()).waiting == 1

        await eventually_async(waits)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await held.release()
        assert (await plane.lease(name).acquire("carl", wait_seconds=PATIENCE_SECONDS)).owner == "carl"


async def test_a_closed_client_no_longer_waits_as_a_consumer(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane:
        leaving = await fastness.connect_async(server.url)
        receiving = asyncio.create_task(leaving.queue(name).receive(wait_seconds=600))
        await wait_for_consumers(plane, name, 1)
        await leaving.close()
        with pytest.raises(Closed):
            await receiving
        await wait_for_consumers(plane, name, 0)


def test_an_interrupted_thread_releases_its_message(server: Server, name: str) -> None:
    with fastness.connect(server.url) as plane:
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


def test_a_thread_interrupted_while_it_submits_its_call_releases_its_message(server: Server, name: str) -> None:
    with fastness.connect(server.url) as plane, pytest.MonkeyPatch.context() as patch:
        jobs = plane.queue(name)
        assert jobs.stats().ready == 0  # The connection is open.
        flush = BlockingConnection._flush

        def interrupted(connection: BlockingConnection) -> None:
            patch.undo()
            flush(connection)
            raise KeyboardInterrupt

        patch.setattr(BlockingConnection, "_flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs.receive(wait_seconds=600)
        jobs.put("a")
        with jobs.receive(wait_seconds=PATIENCE_SECONDS) as message:
            assert message.failure_attempts == 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# Several clients, threads, closing.


def test_two_clients_share_a_plane(server: Server, plane: Plane, name: str) -> None:
    with fastness.connect(server.url) as other, ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(other.queue(name).receive, wait_seconds=60)
        eventually(lambda: plane.queue(name).stats().waiting_consumers == 1)
        plane.queue(name).put("a")
        message = waiter.result(PATIENCE_SECONDS)
        assert message is not None
        message.ack()
        assert plane.queue(name).stats().acked_total == 1
        assert Plane(other._transport, "elsewhere").queues() == []


def test_a_closed_client_raises_closed_for_waiting_and_later_calls(server: Server, name: str) -> None:
    plane = fastness.connect(server.url)
    with ThreadPoolExecutor(16) as threads:
        waiters = [threads.submit(plane.queue(name).receive, wait_seconds=600) for _ in range(16)]
        eventually(lambda: plane.queue(name).stats().waiting_consumers == 16)
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


async def test_a_closed_async_client_raises_closed(server: Server) -> None:
    plane = await fastness.connect_async(server.url)
    await plane.worlds()
    await plane.close()
    await plane.close()
    with pytest.raises(Closed):
        await plane.worlds()


def test_an_unused_client_can_be_closed(server: Server) -> None:
    fastness.connect(server.url).close()
    asyncio.run(_open_and_close(server.url))


async def _open_and_close(url: str) -> None:
    async with fastness.connect_async(url):
        pass


def test_a_client_is_closed_in_a_forked_child(server: Server) -> None:
    with fastness.connect(server.url) as plane:
        plane.worlds()
        child = os.fork()
        if not child:  # None of pytest's code may run here.
            try:
                plane.worlds()
                os._exit(1)
            except Closed:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        plane.worlds()


# Lease renewal.


async def test_a_lease_is_renewed_while_its_event_loop_is_blocked(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as plane:
        jobs = plane.queue(name)
        await jobs.put("a", visibility_seconds=6)  # Long enough for a machine that stalls for two seconds.
        message = await jobs.receive()
        assert message is not None
        first = message.expires_ms
        eventually(lambda: message.expires_ms > first + 3_000)  # Blocks the event loop: there is no `await`.
        await message.ack()
        stats = await jobs.stats()
        assert (stats.expired_total, stats.acked_total) == (0, 1)


def test_lease_renewal_survives_closed_connections(server: Server, name: str) -> None:
    """Servers close idle connections; a renewal must not be lost by that."""
    with Proxy(server.port) as proxy, fastness.connect(proxy.url) as plane:
        jobs = plane.queue(name)
        jobs.put("a", visibility_seconds=6)
        message = jobs.receive()
        assert message is not None
        for _ in range(3):
            before = message.expires_ms
            eventually(lambda: message.expires_ms > before)  # noqa: B023
            proxy.cut_all()
        message.ack()
        assert (jobs.stats().expired_total, message.lost) == (0, False)


async def test_a_lease_in_a_with_block_is_renewed_through_a_server(server: Server, name: str) -> None:
    async with (
        fastness.connect_async(server.url) as plane,
        await plane.lease(name).acquire("ada", ttl_seconds=3) as lease,
    ):
        first = lease.expires_ms
        eventually(lambda: lease.expires_ms > first)  # Blocks the event loop: there is no `await`.
        assert (await plane.lease(name).describe()).lease.expires_ms == lease.expires_ms
        assert not lease.lost


def test_a_lease_is_lost_when_it_expires_and_the_server_does_not_answer(server: Server, name: str) -> None:
    with Proxy(server.port) as proxy, fastness.connect(proxy.url) as plane:
        with (
            pytest.raises(LeaseExpired, match=f"{name} could not be renewed before it expired"),
            plane.lease(name).acquire("ada", ttl_seconds=3.0) as lease,
        ):
            proxy.swallows = True
            proxy.cut_all()
            eventually(lambda: lease.lost)
        proxy.swallows = False
        proxy.cut_all()
        assert plane.lease(name).acquire("bob", wait_seconds=PATIENCE_SECONDS).fence == 2


def test_an_unanswered_renewal_of_a_lease_leaves_time_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_renewal, "_TIMEOUT_SECONDS", 3_600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = RemoteTransport(f"http://127.0.0.1:{silent.getsockname()[1]}", patience_seconds=3_600.0)
        for _ in range(2):
            with pytest.raises(Unreachable):
                transport.lease_renewer.keep(LeaseProof("deploy", "l", 1), 0.3)
        transport.close()


def test_closing_does_not_wait_for_a_renewal_without_an_answer(server: Server, name: str) -> None:
    with Proxy(server.port) as proxy:
        plane = fastness.connect(proxy.url)
        plane.queue(name).put("a", visibility_seconds=3)
        message = plane.queue(name).receive()
        assert message is not None
        proxy.swallows = True
        accepted = proxy.accepted
        proxy.cut_all()
        eventually(lambda: proxy.accepted >= accepted + 2)  # The plane's new connection, and the lease renewer's.
        plane.close()


def test_a_closed_client_leaks_no_threads_and_no_files(server: Server) -> None:
    gc.collect()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(5):
        with fastness.connect(server.url) as plane:
            plane.blobs.get(plane.blobs.put(bytes(MEGABYTE)))
            plane.worlds()
    eventually(lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) <= before)


def test_calls_to_a_draining_server_wait_for_the_next_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Any] = []
    deliver = Session.deliver

    def record_reply(self: Session[Any], reply: Any) -> None:
        deliver(self, reply)
        replies.append(reply.problem and reply.problem.code)

    monkeypatch.setattr(Session, "deliver", record_reply)
    with serving(f"dir:{tmp_path}") as first, Proxy(first.port) as proxy, fastness.connect(proxy.url) as plane:
        plane.queue("jobs").put("a")
        first.drain()
        with ThreadPoolExecutor(1) as threads:
            eventually(lambda: first.get("/v1/queues").status == 503)
            replies.clear()
            put = threads.submit(plane.queue("jobs").put, "b")
            eventually(lambda: replies == ["shutdown_draining"])
            assert not put.done()
            first.process.terminate()
            first.process.wait(PATIENCE_SECONDS)
            with serving(f"dir:{tmp_path}") as second:
                proxy.target = second.port
                put.result(PATIENCE_SECONDS)
                assert plane.queue("jobs").stats().ready == 2


async def test_a_connection_is_reopened_after_an_unexpected_error(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers errors while connecting, while resuming, while failing bad calls, and while checking timeouts."""
    failed: list[str] = []

    owners = {"fail_bad_calls": client_session, "fail_timed_out": Session}

    def fail_first_call(method: str) -> None:
        owner: Any = owners.get(method, Connection)
        work = getattr(owner, method)

        def fail(*args: Any) -> Any:
            if method not in failed:
                failed.append(method)
                raise ZeroDivisionError(method)
            return work(*args)

        monkeypatch.setattr(owner, method, fail)

    async with asyncio.timeout(PATIENCE_SECONDS), await fastness.connect_async(server.url) as plane:
        connection = plane._transport._open_connection()  # type: ignore[attr-defined]
        for number, method in enumerate(("_stream", "_resume", "fail_bad_calls", "fail_timed_out")):
            fail_first_call(method)
            socket = connection._socket
            if socket is not None and method == "fail_bad_calls":
                connection._write_frame(socket, b"\xc1")  # Not a valid frame.
            elif socket is not None:
                socket.transport.abort()
            await plane.queue(name).put(str(number))
            while method not in failed:
                await asyncio.sleep(0.01)
        assert (await plane.queue(name).stats()).ready == 4


async def test_a_frame_that_cannot_be_sent_is_sent_on_the_next_connection(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), await fastness.connect_async(server.url) as plane:
        await plane.queue(name).put("first")
        broken = plane._transport._open_connection()._socket  # type: ignore[attr-defined]

        async def fail(*args: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(broken, "write_now", lambda message: False)
        monkeypatch.setattr(broken, "send", fail)
        await plane.queue(name).put("second")
        assert (await plane.queue(name).stats()).ready == 2
    assert "ZeroDivisionError" in caplog.text


async def test_a_failed_flush_does_not_block_later_calls(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), await fastness.connect_async(server.url) as plane:
        queue = plane.queue(name)
        await asyncio.gather(*[queue.put(number) for number in range(3)])
        batcher = plane._transport._open_connection()._session.batcher  # type: ignore[attr-defined]
        send, failed = batcher.send, list[int]()

        def fail_once() -> Any:
            if not failed:
                failed.append(1)
                raise ZeroDivisionError
            return send()

        monkeypatch.setattr(batcher, "send", fail_once)
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        first = [asyncio.create_task(queue.put(number)) for number in range(3)]
        while not errors:
            await asyncio.sleep(0.001)
        await asyncio.gather(*first, *[queue.put(number) for number in range(3)])
        assert (await queue.stats()).ready == 9
