"""Killed servers, cut connections and misbehaving clients: acknowledged work is stored exactly once."""

import asyncio
import base64
import os
import random
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import fastness
from fastness import AsyncWorker, Plane, Worker
from fastness.errors import CommitUnknown, FastnessError
from fastness.limits import FRAME_BYTES_MAX
from fastness.wire.frames import PROTOCOL, Call, Hello, encode
from fastness.wire.queues import NewMessage, PeekMessages, PutMessages, ReceiveMessages
from tests.support.depth import Depth
from tests.support.http_server import serving
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

WAIT = ReceiveMessages("waiting", "stalled", wait_seconds=600)
DEADLINE_SECONDS = 60.0  # Bounds every wait; far longer than any step takes.
SEED = int(os.environ.get("FASTNESS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed of the random numbers; FASTNESS_SEED repeats a run."""
    print(f"FASTNESS_SEED={SEED}")
    return SEED


# Load.


class Load:
    """Callers that put, append and count, and workers that handle messages, all through one address."""

    def __init__(self, url: str, *, putters: int = 6, puts: int = 60) -> None:
        self.expected = putters * puts
        self.handled: dict[int, set[str]] = defaultdict(set)  # By payload: the ids of its messages.
        self.appended = 0
        self.counted = 0
        self._puts = puts
        self._stopping = threading.Event()
        self._planes = ExitStack()
        self._callers = self._planes.enter_context(fastness.connect(url, patience_seconds=DEADLINE_SECONDS))
        self._workers = self._planes.enter_context(fastness.connect(url, patience_seconds=DEADLINE_SECONDS))
        self._callers.world("ada").create()
        self._head = self._callers.world("ada").head()
        options: dict[str, Any] = {
            "concurrency": 4,
            "visibility_seconds": 2.0,
            "retry_delay_seconds": lambda failures: 0.0,
        }
        self.worker = Worker(self._workers, {"jobs": self._handle}, **options)
        self._threads = ThreadPoolExecutor(putters + 2)
        self._putting = [self._threads.submit(self._put, number) for number in range(putters)]
        self._others = [self._threads.submit(self._append), self._threads.submit(self._count)]
        self.worker.start()

    @property
    def progress(self) -> int:
        return len(self.handled)

    def finish(self) -> None:
        """Wait for all callers, and compare the stored data with what was acknowledged."""
        try:
            for putting in self._putting:
                putting.result(DEADLINE_SECONDS)
            eventually(lambda: len(self.handled) == self.expected, "every message was handled")
            self._stopping.set()
            for other in self._others:
                other.result(DEADLINE_SECONDS)
            doubled = {number: ids for number, ids in self.handled.items() if len(ids) > 1}
            assert doubled == {}
            ada = self._callers.world("ada")
            entries = [record for record in ada.read(self._head, limit=10_000) if record.kind == "entry"]
            assert len(entries) == self.appended
            entity = self._callers.entities.get("counter", "1")
            assert entity is not None
            assert entity["n"] == self.counted
        finally:
            self._stopping.set()
            self.worker.stop()
            self._threads.shutdown()
            self._planes.close()

    def _put(self, putter: int) -> None:
        jobs = self._callers.queue("jobs")
        for number in range(self._puts):
            jobs.put(putter * self._puts + number, max_attempts=1_000)

    def _handle(self, message: Any) -> None:
        self.handled[message.json()].add(message.id)

    def _append(self) -> None:
        """Each append names its expected head: one that happened twice, or not at all, makes the next one fail."""
        ada, head = self._callers.world("ada"), self._head
        while not self._stopping.is_set():
            head = ada.append([self.appended], expected_head=head) + 1
            self.appended += 1

    def _count(self) -> None:
        """After CommitUnknown, read the counter to find out whether the update was committed."""
        entities = self._callers.entities
        while not self._stopping.is_set():
            try:
                entities.update("counter", "1", lambda found: {"n": (found["n"] if found else 0) + 1})
            except CommitUnknown:
                found = entities.get("counter", "1")
                if (found["n"] if found else 0) == self.counted:
                    continue
            self.counted += 1


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_window_of_messages_is_acknowledged_once_although_the_answer_is_lost(tmp_path: Path, kind: str) -> None:
    """The server acknowledges a window and leases the next one, and the connection ends before the worker knows.

    It ends after the answer was sent: the server makes messages that it could not send available again, and they would
    be delivered a second time.
    """
    seen: list[int] = []
    with ExitStack() as running:
        server = running.enter_context(serving(f"dir:{tmp_path}"))
        proxy = running.enter_context(Proxy(server.port))
        jobs = running.enter_context(fastness.connect(server.url)).queue("jobs")
        jobs.put_many(range(100))

        def handle(message: Any) -> None:
            seen.append(message.json())
            if len(seen) == 20:
                proxy.mutes = True

        with _worker_in_thread(proxy.url, kind, handle) as worker:
            eventually(lambda: jobs.stats().acked_total >= 20, "the window was acknowledged")
            eventually(lambda: proxy.dropped_bytes >= 1_000, "the answer with the next window was sent")
            proxy.cut_all()
            eventually(lambda: worker.stats.handled == 100, "every message was handled")
        stats = jobs.stats()
    assert seen == list(range(100))
    assert (stats.acked_total, stats.delivered_total, stats.leased, worker.stats.failed) == (100, 100, 0, 0)


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("batch", [None, pytest.param(3, marks=pytest.mark.rotating)])
def test_a_running_handler_notices_that_its_messages_are_cancelled(
    tmp_path: Path, kind: str, batch: int | None
) -> None:
    """Leases are not renewed, so only the question of the worker finds it."""
    at_work: SimpleQueue[Any] = SimpleQueue()
    ended: SimpleQueue[Any] = SimpleQueue()

    def block(messages: Any) -> None:
        at_work.put(None)
        eventually(lambda: all(each.cancelled for each in (messages if batch else [messages])), "they are cancelled")
        ended.put(True)

    async def wait(messages: Any) -> None:
        at_work.put(None)
        try:
            await asyncio.sleep(DEADLINE_SECONDS)
        finally:
            ended.put(all(each.cancelled for each in (messages if batch else [messages])))

    options = {"extend_for_seconds": 0, **({"batch": batch} if batch else {})}
    with serving(f"dir:{tmp_path}") as server, fastness.connect(server.url) as plane:
        jobs = plane.queue("jobs")
        receipts = jobs.put_many(range(batch or 1))
        with _worker_in_thread(server.url, kind, block if kind == "threads" else wait, **options) as worker:
            at_work.get(timeout=DEADLINE_SECONDS)
            for receipt in receipts:
                jobs.cancel(receipt.id)
            assert ended.get(timeout=DEADLINE_SECONDS)
            eventually(lambda: worker.stats.cancelled == len(receipts), "they are counted")
        stats = jobs.stats()
    assert (worker.stats.handled, worker.stats.failed, worker.stats.deferred, worker.error) == (0, 0, 0, None)
    assert (stats.acked_total, stats.failed_total, stats.ready, stats.leased) == (0, 0, 0, 0)


@contextmanager
def _worker_in_thread(
    url: str, kind: str, handle: Callable[[Any], Any], **options: Any
) -> Iterator[Worker | AsyncWorker]:
    """A worker of this kind with one slot and by default a prefetch, on a connection of its own."""
    options = options or {"prefetch": 32}
    if kind == "threads":
        with fastness.connect(url, patience_seconds=DEADLINE_SECONDS) as plane:
            worker = Worker(plane, {"jobs": handle}, **options)
            worker.start()
            yield worker
            worker.stop()
        return

    async def handle_async(message: Any) -> None:
        waiting = handle(message)
        if waiting is not None:
            await waiting

    async def run() -> None:
        async with fastness.connect_async(url, patience_seconds=DEADLINE_SECONDS) as plane:
            worker = AsyncWorker(plane, {"jobs": handle_async}, **options)
            started.put((worker, asyncio.get_running_loop()))
            await worker.run()

    started: SimpleQueue[tuple[AsyncWorker, asyncio.AbstractEventLoop]] = SimpleQueue()
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    async_worker, loop = started.get(timeout=DEADLINE_SECONDS)
    yield async_worker
    loop.call_soon_threadsafe(async_worker.stop)
    thread.join(DEADLINE_SECONDS)


def test_killed_server_loses_and_duplicates_nothing(tmp_path: Path, seed: int, depth: Depth) -> None:
    rng = random.Random(seed)
    with ExitStack() as running:
        server = running.enter_context(serving(f"dir:{tmp_path}"))
        proxy = running.enter_context(Proxy(server.port, seed))  # Gives all servers the same address.
        load = Load(proxy.url, puts=round(60 * depth.load))
        for _ in range(depth.server_kills):
            target = load.progress + rng.randrange(20, 50)
            eventually(lambda: load.progress >= min(target, load.expected), f"progress to {target}")  # noqa: B023
            server.process.kill()
            server.process.wait()
            server = running.enter_context(serving(f"dir:{tmp_path}"))
            proxy.target = server.port
        load.finish()


def test_cut_and_delayed_connections_lose_and_duplicate_nothing(tmp_path: Path, seed: int, depth: Depth) -> None:
    with serving(f"dir:{tmp_path}") as server, Proxy(server.port, seed) as proxy:
        proxy.bytes_max = 40_000
        proxy.delay_seconds = 0.004
        load = Load(proxy.url, puts=round(40 * depth.load))
        eventually(lambda: proxy.cuts >= 15 * depth.load, "connections were cut")
        proxy.bytes_max = 0
        load.finish()
        print(f"{proxy.cuts} of {proxy.accepted} connections were cut")


def test_silent_connection_is_replaced() -> None:
    """The network drops all packets without an error on either side."""
    with (
        serving("memory:") as server,
        Proxy(server.port) as proxy,
        fastness.connect(proxy.url, patience_seconds=DEADLINE_SECONDS) as plane,
        ThreadPoolExecutor(1) as threads,
    ):
        plane.queue("jobs").put("a")
        proxy.swallows = True
        proxy.cut_all()
        eventually(lambda: proxy.accepted > 1, "the client connected again")
        put = threads.submit(plane.queue("jobs").put, "b")
        time.sleep(0.1)
        assert not put.done()
        proxy.swallows = False  # Connections that are already silent stay silent.
        put.result(DEADLINE_SECONDS)
        assert plane.queue("jobs").stats().ready == 2


# Several servers.


def test_messages_leased_through_a_killed_server_are_redelivered_by_another(postgres_url: str) -> None:
    with (
        serving(postgres_url) as one,
        serving(postgres_url) as other,
        fastness.connect(one.url) as first,
        fastness.connect(other.url) as second,
    ):
        first.queue("jobs").put_many(range(8))
        leased = sorted(message.json() for message in first.queue("jobs").receive_many(4, visibility_seconds=10.0))
        rest = sorted(message.json() for message in second.queue("jobs").receive_many(10, extend_for_seconds=0))
        assert sorted(leased + rest) == list(range(8))
        one.process.kill()  # Now the leases cannot be extended.
        again: list[Any] = []
        while len(again) < 4:
            again += second.queue("jobs").receive_many(wait_seconds=10.0)
        assert sorted(message.json() for message in again) == leased
        assert all(message.fence > 1 for message in again)
        for message in again:
            message.ack()


def test_put_that_reaches_two_servers_happens_once(postgres_url: str, seed: int, depth: Depth) -> None:
    """The client loses its connection to one server while puts are in flight, and repeats them at the other."""
    with (
        serving(postgres_url) as one,
        serving(postgres_url) as other,
        Proxy(one.port, seed) as proxy,
        fastness.connect(proxy.url, patience_seconds=DEADLINE_SECONDS) as plane,
        ThreadPoolExecutor(8) as threads,
    ):
        count = round(400 * depth.load)
        puts = [threads.submit(plane.queue("jobs").put, number) for number in range(count)]
        for attempt in range(round(20 * depth.load)):
            proxy.target = (one, other)[attempt % 2].port
            proxy.cut_all()
            time.sleep(0.02)
        ids = {put.result(DEADLINE_SECONDS).id for put in puts}
        assert (len(ids), plane.queue("jobs").stats().ready) == (count, count)


# Misbehaving clients.


class RawStream:
    """A stream without a client: sends raw frames, and reads nothing by itself."""

    def __init__(self, port: int, session: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        assert b" 101 " in self.socket.recv(4_096)
        self.send(encode(Hello(PROTOCOL, session)))

    def send(self, data: bytes) -> None:
        length = len(data)
        if length < 126:
            head = bytes([0x82, 0x80 | length])
        elif length < 65_536:
            head = b"\x82\xfe" + struct.pack(">H", length)
        else:
            head = b"\x82\xff" + struct.pack(">Q", length)
        self.socket.sendall(head + bytes(4) + data)  # The mask is zero.


def resident_bytes(server: Any) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1_024 for line in status.splitlines() if line.startswith("VmRSS"))


@contextmanager
def stalled_consumer(server: Any, plane: Plane, *, calls: int, waiting: int = 0) -> Iterator[RawStream]:
    """A client that sends many calls and reads nothing. Each answer has 2 MB."""
    plane.queue("big").put_many([os.urandom(8_000) for _ in range(256)])
    raw = RawStream(server.port, "stalled")
    raw.socket.settimeout(1.0)
    with raw.socket:
        raw.send(encode([Call(-1 - number, WAIT) for number in range(waiting)]))
        with suppress(TimeoutError):
            for first in range(0, calls, 64):
                raw.send(encode([Call(first + number, PeekMessages("big", 256)) for number in range(64)]))
        yield raw


def test_client_that_stops_reading_does_not_affect_others() -> None:
    with serving("memory:") as server, fastness.connect(server.url, patience_seconds=DEADLINE_SECONDS) as plane:
        with stalled_consumer(server, plane, calls=2_048):
            for number in range(100):
                plane.queue("jobs").put(number)
            assert plane.queue("jobs").stats().ready == 100
        plane.queue("jobs").put("after")


@pytest.mark.parametrize("backend", ["memory", "postgres"])
def test_client_that_stops_reading_does_not_grow_the_server(backend: str, request: pytest.FixtureRequest) -> None:
    """With reads that finish at once (memory) and with many reads in flight (PostgreSQL)."""
    url = "memory:" if backend == "memory" else request.getfixturevalue("postgres_url")
    with serving(url) as server, fastness.connect(server.url) as plane:
        plane.queue("big").stats()
        before = resident_bytes(server)
        with stalled_consumer(server, plane, calls=1_024):
            for number in range(100):
                plane.queue("jobs").put(number)
            assert resident_bytes(server) - before < 160 << 20


def test_client_that_never_reads_again_is_disconnected_and_stops_waiting() -> None:
    with serving("memory:", unread_seconds=0.5) as server, fastness.connect(server.url) as plane:
        with stalled_consumer(server, plane, calls=1_024, waiting=8) as raw:
            poll = select.poll()
            poll.register(raw.socket, select.POLLHUP)
            eventually(lambda: poll.poll(0), "it was disconnected")
            eventually(lambda: plane.queue("waiting").stats().waiting_consumers == 0, "it stopped waiting")
        plane.queue("waiting").put("for another consumer")
        assert plane.queue("waiting").receive(wait_seconds=DEADLINE_SECONDS) is not None


def good_frame() -> bytes:
    puts = [PutMessages("fuzzed", [NewMessage(payload=b"payload", attributes={"a": "b"})]) for _ in range(3)]
    return encode([Call(number, put, f"key-{number}") for number, put in enumerate(puts)])


def frames(rng: random.Random, share: float) -> Iterator[tuple[str, bytes | str]]:
    """Invalid frames of many kinds."""
    good = good_frame()
    for _ in range(round(60 * share)):
        yield "random bytes", rng.randbytes(rng.randrange(1, 300))
    for _ in range(round(60 * share)):
        yield "cut short", good[: rng.randrange(1, len(good))]
    for _ in range(round(80 * share)):
        position = rng.randrange(len(good))
        yield "one byte changed", good[:position] + bytes([rng.randrange(256)]) + good[position + 1 :]
    for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        yield "a huge length", head + b"\xff\xff\xff\xff"
        yield "a huge length inside", b"\x91\x94\x00" + head + b"\xff\xff\xff\xff"
    for opening in (b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"):
        yield "deep nesting", opening * 100_000
        yield "deep nesting inside", b"\x91\x94\x00" + opening * 100_000
    wrong: Any
    for wrong in (None, 5, "text", {}, ["1"], [[]], [[1, 2, 3, 4]], [["1", {}, None, False]], [[1, {"op": "no.such"}]]):
        yield "wrong types", encode(wrong)
    for wrong in (
        {"op": "queues.put", "queue": "x", "messages": [], "unknown": 1},
        {"op": "queues.put", "queue": 5, "messages": []},
        {"op": "pairs.put", "key": b"a", "value": b"b"},
        {"op": "queues.receive", "queue": "x", "owner": "y", "wait_seconds": "long"},
    ):
        yield "wrong requests", encode([[0, wrong, None, False]])
    yield "a number that is too large", b"\x91\x94\xcf" + b"\xff" * 8 + b"\x80\xc0\xc2"
    yield "too long", bytes(FRAME_BYTES_MAX + 1)
    yield "much too long", bytes(FRAME_BYTES_MAX + 100_000)
    yield "text", "hello"


MAY_BE_VALID = ("one byte changed", "random bytes")


def test_fuzzed_frames_close_only_their_connection(seed: int, depth: Depth) -> None:
    rng = random.Random(seed)
    with serving("memory:") as server, fastness.connect(server.url) as plane:
        url = server.url.replace("http", "ws") + "/v1/stream"
        codes: dict[str, set[int]] = defaultdict(set)
        for kind, data in frames(rng, depth.load):
            with connect(url, compression=None, proxy=None, max_size=None) as stream:
                stream.send(encode(Hello(PROTOCOL, "fuzz")))
                stream.recv(DEADLINE_SECONDS)
                try:
                    stream.send(data)
                    # The changed byte may be part of a payload, and random bytes may be a valid frame.
                    stream.recv(0.1 if kind in MAY_BE_VALID else DEADLINE_SECONDS)
                    codes[kind].add(0)
                except TimeoutError:
                    codes[kind].add(0)
                except ConnectionClosed as closed:
                    codes[kind].add(closed.rcvd.code if closed.rcvd is not None else -1)
            assert plane.worlds() == []
        print(dict(codes))
        assert server.process.poll() is None
        for kind, found in codes.items():
            assert found <= {0, 1002, 1007, 1009}, (kind, found)
            assert kind in MAY_BE_VALID or 0 not in found, kind


def test_fuzzed_hellos_close_only_their_connection(seed: int) -> None:
    rng = random.Random(seed)
    with serving("memory:") as server, fastness.connect(server.url) as plane:
        url = server.url.replace("http", "ws") + "/v1/stream"
        wrong: list[bytes | str] = [rng.randbytes(rng.randrange(1, 100)) for _ in range(30)]
        wrong += [b"", "text", encode(Hello(PROTOCOL + 1, "a")), encode(Hello(PROTOCOL, "")), good_frame()]
        wrong += [encode(Hello(PROTOCOL, "a" * 65)), b"\x91" * 100_000, bytes(FRAME_BYTES_MAX + 1)]
        for data in wrong:
            with connect(url, compression=None, proxy=None) as stream, pytest.raises(ConnectionClosed) as closed:
                stream.send(data)
                stream.recv(DEADLINE_SECONDS)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code in (1002, 1007, 1009)
        assert plane.worlds() == []


async def test_disconnected_clients_leave_no_waiting_consumers() -> None:
    """Sessions are replaced and connections close during calls; finally no consumer waits."""
    with serving("memory:") as server, Proxy(server.port, SEED) as proxy:
        async with fastness.connect_async(server.url) as watching:
            for _ in range(10):
                async with fastness.connect_async(proxy.url) as plane:
                    waiting = [asyncio.create_task(plane.queue("jobs").receive(wait_seconds=600)) for _ in range(10)]
                    await asyncio.sleep(0.02)
                    proxy.cut_all()
                    await asyncio.sleep(0.02)
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(outcome, FastnessError) for outcome in outcomes)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while (await watching.queue("jobs").stats()).waiting_consumers:
                    await asyncio.sleep(0.01)
