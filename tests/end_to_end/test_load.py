"""One server and many callers: everybody gets what is theirs, and the server's memory has a bound.

The suite runs a small version of each; `make nightly` the whole one. What was measured is printed, and only memory and
correctness are asserted: how long it takes is the machine's business.
"""

import asyncio
import base64
import hashlib
import http.client
import json
import os
import resource
import runpy
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.wire.frames import PROTOCOL, Call, Hello, encode
from holdfast.wire.queues import PeekMessages

_processes = runpy.run_path(str(Path(__file__).with_name("processes.py")))  # Test files cannot import each other.
Server, SECONDS_MAX = _processes["Server"], _processes["SECONDS_MAX"]
DEADLINE_SECONDS = 300.0  # Far more than anything here takes; whoever waits for a condition must end some day.
MIB = 1 << 20
FILES_BESIDE = 512


def versions(suite: Any, nightly: Any) -> list[Any]:
    return [pytest.param(suite, id=f"{suite}"), pytest.param(nightly, id=f"{nightly}", marks=pytest.mark.nightly)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    server = Server(tmp_path)
    try:
        server.get("/readyz")
        yield server
        assert '"level":"error"' not in server.log()
    finally:
        server.kill()


@pytest.fixture
def files() -> Iterator[Callable[[int], None]]:
    """Lets this process open so many files, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(needed: int) -> None:
        if hard != resource.RLIM_INFINITY and hard < needed:
            pytest.skip(f"{needed} open files are needed and {hard} allowed: raise ulimit -n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Measured:
    """Prints what was measured, with how long it took."""

    def __init__(self, server: Any, what: str) -> None:
        self._server = server
        self._what = what
        self.idle = server.resident_bytes
        server.forget_peak()
        self._started = time.monotonic()

    def tell(self, step: str) -> None:
        now = time.monotonic()
        print(
            f"{self._what}: {step} in {now - self._started:.1f} s; server {self._server.resident_bytes / MIB:.0f} MiB, "
            f"at most {self._server.peak_bytes / MIB:.0f} MiB, idle it had {self.idle / MIB:.0f} MiB"
        )
        self._started = now

    @property
    def grown(self) -> int:
        """By how much the server's memory grew at most."""
        return int(self._server.peak_bytes) - int(self.idle)


# Subscribers.


@pytest.mark.parametrize("subscribers", versions(100, 1_000))
async def test_every_subscriber_of_a_stream_gets_its_messages(
    server: Any, files: Callable[[int], None], subscribers: int
) -> None:
    files(subscribers + FILES_BESIDE)
    messages = 5
    measured = Measured(server, f"{subscribers} streams")
    got: dict[int, list[Any]] = {number: [] for number in range(subscribers)}

    async def subscribe(number: int, ready: asyncio.Event) -> None:
        async with holdfast.connect_async(server.url) as plane:
            queue = plane.queue(f"mine-{number}")
            ready.set()
            while len(got[number]) < messages:
                for message in await queue.receive_many(10, wait_seconds=600):
                    got[number].append(message.json())
                    await message.ack()

    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as running:
        for number in range(subscribers):
            ready = asyncio.Event()
            running.create_task(subscribe(number, ready))
            if number % 50 == 0:
                await ready.wait()
        async with holdfast.connect_async(server.url) as plane:
            while await waiting(server) < subscribers:
                await asyncio.sleep(0.05)
            measured.tell("all wait")
            for turn in range(messages):
                await asyncio.gather(
                    *(plane.queue(f"mine-{number}").put([number, turn]) for number in range(subscribers))
                )
    measured.tell(f"{subscribers * messages} messages delivered and acknowledged")
    assert got == {number: [[number, turn] for turn in range(messages)] for number in range(subscribers)}
    assert measured.grown < 64 * MIB + subscribers * 102_400


async def waiting(server: Any) -> float:
    """How many calls wait for something to come."""
    text = (await asyncio.to_thread(server.get, "/metrics"))[2].decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("holdfast_calls_waiting"))


@asynccontextmanager
async def subscription(server: Any, queue: str, n: int) -> AsyncIterator[asyncio.StreamReader]:
    """The lines of a subscription over HTTP."""
    host, port = server.address
    reader, writer = await asyncio.open_connection(host, port, local_addr=(f"127.0.0.{2 + n % 4}", 0))
    body = json.dumps({"queue": queue, "owner": "ada"})
    writer.write(
        f"POST /v1/queue/subscribe HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    try:
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()


@pytest.mark.parametrize("subscribers", versions(100, 1_000))
async def test_every_subscriber_over_http_gets_its_messages(
    server: Any, files: Callable[[int], None], subscribers: int
) -> None:
    files(subscribers + FILES_BESIDE)
    messages = 5
    measured = Measured(server, f"{subscribers} subscriptions")
    got: dict[int, list[Any]] = {}
    ready = count(1)
    all_ready = asyncio.Event()

    async def subscribe(number: int) -> None:
        async with subscription(server, f"mine-{number}", number) as reader:
            if next(ready) == subscribers:
                all_ready.set()
            found: list[Any] = []
            while len(found) < messages:
                line = await reader.readline()  # Chunks have lines of their own, with their lengths.
                if line.startswith(b"{"):
                    event = json.loads(line)
                    assert event["event"] in ("heartbeat", "message")
                    if event["event"] == "message":
                        found.append(event["data"]["payload"])
            got[number] = found

    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as running:
        for number in range(subscribers):
            running.create_task(subscribe(number))
        await all_ready.wait()
        measured.tell("all are there")
        async with holdfast.connect_async(server.url) as plane:
            for turn in range(messages):
                await asyncio.gather(
                    *(plane.queue(f"mine-{number}").put([number, turn]) for number in range(subscribers))
                )
    measured.tell(f"{subscribers * messages} messages delivered")
    assert got == {number: [[number, turn] for turn in range(messages)] for number in range(subscribers)}
    assert measured.grown < 64 * MIB + subscribers * 102_400


# Connections that do nothing.


class Idle(asyncio.Protocol):
    """A stream that says hello, and then nothing but that it is there."""

    def __init__(self, session: str) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.pings = 0
        self._session = session
        self._data = b""
        self._upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        key = base64.b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._upgraded:
            head, end, self._data = self._data.partition(b"\r\n\r\n")
            if not end:
                self._data = head
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self._upgraded = True
            self._send(0x82, encode(Hello(PROTOCOL, self._session)))
        while len(self._data) >= 2 and len(self._data) >= 2 + self._data[1]:  # All that comes is short.
            kind, payload = self._data[0] & 15, self._data[2 : 2 + self._data[1]]
            self._data = self._data[2 + len(payload) :]
            if kind == 2 and not self.ready.done():
                self.ready.set_result(None)
            elif kind == 9:
                self.pings += 1
                self._send(0x8A, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionError("the server closed the connection"))

    def _send(self, head: int, payload: bytes) -> None:
        self.transport.write(bytes([head, 0x80 | len(payload)]) + bytes(4) + payload)  # Masked by zeros.


@pytest.mark.parametrize("connections", versions(500, 10_000))
async def test_idle_streams_cost_little(server: Any, files: Callable[[int], None], connections: int) -> None:
    files(connections + FILES_BESIDE)
    host, port = server.address
    measured = Measured(server, f"{connections} idle streams")
    loop = asyncio.get_running_loop()
    idle: list[Idle] = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        for begin in range(0, connections, 100):
            made = await asyncio.gather(
                *(
                    # Of one address there are fewer ports than of a few.
                    loop.create_connection(
                        lambda number=number: Idle(f"idle-{number}"),
                        host,
                        port,
                        local_addr=(f"127.0.0.{2 + number % 4}", 0),
                    )
                    for number in range(begin, min(begin + 100, connections))
                )
            )
            idle += [protocol for _, protocol in made]
            await asyncio.gather(*(protocol.ready for _, protocol in made))
        measured.tell("connected")
        while connections >= 10_000 and min(protocol.pings for protocol in idle) < 2:
            await asyncio.sleep(0.5)
        measured.tell("and are there still")
        assert not [protocol for protocol in idle if protocol.lost]
        assert f"holdfast_open_streams {connections}.0".encode() in server.get("/metrics")[2]
        async with holdfast.connect_async(server.url) as plane:
            await asyncio.gather(*(plane.queue("jobs").put(number) for number in range(1_000)))
            measured.tell("1000 messages put by another one")
            assert len(await plane.queue("jobs").receive_many(200)) == 200
        assert server.get("/readyz")[0] == 200
        print(f"{measured.grown / connections / 1_024:.1f} KiB a stream")
        assert server.peak_bytes < measured.idle + (1_024 * MIB - measured.idle) * connections / 10_000 + 16 * MIB
        for protocol in idle:
            protocol.transport.close()
        while b"holdfast_open_streams 0.0" not in (await asyncio.to_thread(server.get, "/metrics"))[2]:
            await asyncio.sleep(0.05)
    measured.tell("all gone")


# Callers that do not read.


def deaf_stream(server: Any, number: int) -> socket.socket:
    """Asks a stream for a lot, and reads nothing."""
    connection = socket.create_connection(server.address, SECONDS_MAX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    key = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        f"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    assert b" 101 " in connection.recv(4_096)
    connection.settimeout(0.05)
    with suppress(OSError):
        for data in (encode(Hello(PROTOCOL, f"deaf-{number}")), *peeks()):
            connection.sendall(b"\x82\xfe" + struct.pack(">H", len(data)) + bytes(4) + data)
    return connection


def peeks() -> Iterator[bytes]:
    for first in range(0, 2_048, 64):
        yield encode([Call(first + number, PeekMessages("big", 100)) for number in range(64)])


def deaf_http(server: Any, request: str) -> socket.socket:
    """Asks for something large over HTTP, again and again, and reads nothing."""
    connection = socket.create_connection(server.address, SECONDS_MAX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(0.05)
    with suppress(OSError):
        for _ in range(100):
            connection.sendall(request.encode())
    return connection


@pytest.mark.parametrize("deaf", versions(12, 120))
def test_callers_that_do_not_read_are_noticed_by_nobody(server: Any, files: Callable[[int], None], deaf: int) -> None:
    files(deaf + FILES_BESIDE)
    with server.plane() as plane, ExitStack() as held:
        plane.queue("big").put_many([os.urandom(10_000) for _ in range(100)])
        blob = plane.blobs.write(os.urandom(MIB) for _ in range(32))
        body, kind = json.dumps({"queue": "big", "owner": "deaf", "credit": 64}), "Content-Type: application/json\r\n"
        asked = [
            f"GET /v1/blobs/{blob} HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "GET /v1/queues/big/peek?limit=100 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            f"POST /v1/queue/subscribe HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: {len(body)}\r\n\r\n{body}",
        ]
        plane.queue("jobs").put("warm")
        server.get("/v1/queues/big/peek?limit=100")
        measured = Measured(server, f"{deaf} callers that do not read")
        for number in range(deaf):
            what = number % (len(asked) + 1)
            held.enter_context(deaf_http(server, asked[what]) if what < len(asked) else deaf_stream(server, number))
        measured.tell("all are there")
        for number in range(200):
            plane.queue("jobs").put(number)
        with plane.queue("jobs").receive() as message:
            assert message.json() == "warm"
        assert plane.queue("jobs").stats().ready == 200
        assert server.get("/readyz")[0] == 200
        measured.tell("200 messages put by another one")
        assert measured.grown < 64 * MIB + deaf * 2 * MIB
    measured.tell("all gone")


# A blob that is larger than the memory that it may take.


def pieces(size: int, digest: Any) -> Iterator[bytes]:
    """So many bytes that cannot be made smaller, a piece at a time."""
    block = os.urandom(MIB)
    for number in range(size // MIB):
        piece = number.to_bytes(8, "big") + block[8:]
        digest.update(piece)
        yield piece


@pytest.mark.parametrize("mebibytes", versions(128, 1_024))
def test_a_blob_goes_through_in_little_memory(server: Any, mebibytes: int) -> None:
    size = mebibytes * MIB
    with server.plane() as plane:
        plane.blobs.write([os.urandom(MIB) for _ in range(2)])  # What is used later in any case, is.
        for door in ("HTTP", "the sync handle"):
            wanted, found = hashlib.sha256(), hashlib.sha256()
            measured = Measured(server, f"{mebibytes} MiB over {door}")
            if door == "HTTP":
                name = put_over_http(server, pieces(size, wanted))
            else:
                name = plane.blobs.write(pieces(size, wanted))
            measured.tell("up")
            assert name == wanted.hexdigest()
            for piece in get_over_http(server, name) if door == "HTTP" else plane.blobs.open(name):
                found.update(piece)
            measured.tell("down")
            assert found.hexdigest() == name
            print(f"grown by {measured.grown / MIB:.1f} MiB")
            assert measured.grown < 64 * MIB


def put_over_http(server: Any, chunks: Iterator[bytes]) -> str:
    connection = http.client.HTTPConnection(*server.address, timeout=DEADLINE_SECONDS)
    try:
        connection.request(
            "PUT", "/v1/blobs", chunks, {"Content-Type": "application/octet-stream"}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 201
        return str(json.loads(response.read())["hash"])
    finally:
        connection.close()


def get_over_http(server: Any, name: str) -> Iterator[bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=DEADLINE_SECONDS)
    try:
        connection.request("GET", f"/v1/blobs/{name}")
        response = connection.getresponse()
        assert response.status == 200
        while piece := response.read(MIB):
            yield piece
    finally:
        connection.close()
