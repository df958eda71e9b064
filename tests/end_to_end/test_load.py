"""One server and many callers: all calls are answered correctly, and the server's memory is bounded.

The suite runs a small version of each test, `make nightly` the full one. Durations are printed; only memory and
correctness are asserted.
"""

import asyncio
import base64
import hashlib
import http.client
import json
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.wire.frames import PROTOCOL, Call, Hello, encode
from fastness.wire.queues import PeekMessages
from tests.support.server_process import Server

MIB = 1 << 20
OTHER_FILES = 512


def versions(suite: Any, nightly: Any) -> list[Any]:
    return [pytest.param(suite, id=f"{suite}"), pytest.param(nightly, id=f"{nightly}", marks=pytest.mark.nightly)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        server.get("/readyz")
        yield server
        assert '"level":"error"' not in server.log()
    finally:
        server.kill()


@pytest.fixture
def files() -> Iterator[Callable[[int], None]]:
    """Raises the limit of open files, or skips the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def raise_limit(needed: int) -> None:
        if hard != resource.RLIM_INFINITY and hard < needed:
            pytest.skip(f"no more than {hard} open files allowed; raise `ulimit -Hn` to {needed}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))

    yield raise_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Measured:
    """Prints durations and the server's memory."""

    def __init__(self, server: Server, subject: str) -> None:
        self._server = server
        self._subject = subject
        self.idle = server.resident_bytes
        server.forget_peak()
        self._started = time.monotonic()

    def report(self, step: str) -> None:
        now = time.monotonic()
        print(
            f"{self._subject}: {step} in {now - self._started:.1f} s; "
            f"server {self._server.resident_bytes / MIB:.0f} MiB, "
            f"peak {self._server.peak_bytes / MIB:.0f} MiB, idle {self.idle / MIB:.0f} MiB"
        )
        self._started = now

    @property
    def grown(self) -> int:
        """The growth of the server's peak memory."""
        return int(self._server.peak_bytes) - int(self.idle)


# Subscribers.


@pytest.mark.parametrize("subscribers", versions(100, 1_000))
async def test_every_stream_subscriber_gets_its_messages(
    server: Server, files: Callable[[int], None], subscribers: int
) -> None:
    files(subscribers + OTHER_FILES)
    messages = 5
    measured = Measured(server, f"{subscribers} streams")
    got: dict[int, list[Any]] = {number: [] for number in range(subscribers)}

    async def subscribe(number: int, ready: asyncio.Event) -> None:
        async with fastness.connect_async(server.url) as plane:
            queue = plane.queue(f"mine-{number}")
            ready.set()
            while len(got[number]) < messages:
                for message in await queue.receive_many(10, wait_seconds=600):
                    got[number].append(message.json())
                    await message.ack()

    async with asyncio.TaskGroup() as running:
        for number in range(subscribers):
            ready = asyncio.Event()
            running.create_task(subscribe(number, ready))
            if number % 50 == 0:
                await ready.wait()
        async with fastness.connect_async(server.url) as plane:
            while await waiting(server) < subscribers:
                await asyncio.sleep(0.05)
            measured.report("all are waiting")
            for round_ in range(messages):
                await asyncio.gather(
                    *(plane.queue(f"mine-{number}").put([number, round_]) for number in range(subscribers))
                )
    measured.report(f"{subscribers * messages} messages delivered and acknowledged")
    assert got == {number: [[number, round_] for round_ in range(messages)] for number in range(subscribers)}
    assert measured.grown < 64 * MIB + subscribers * 102_400


async def waiting(server: Server) -> float:
    """How many calls wait for messages or locks."""
    text = (await asyncio.to_thread(server.get, "/metrics"))[2].decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("fastness_calls_waiting"))


@asynccontextmanager
async def subscription(server: Server, queue: str, n: int) -> AsyncIterator[asyncio.StreamReader]:
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
async def test_every_http_subscriber_gets_its_messages(
    server: Server, files: Callable[[int], None], subscribers: int
) -> None:
    files(subscribers + OTHER_FILES)
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
                line = await reader.readline()  # Chunked encoding adds lines with lengths.
                if line.startswith(b"{"):
                    event = json.loads(line)
                    assert event["event"] in ("heartbeat", "message")
                    if event["event"] == "message":
                        found.append(event["data"]["payload"])
            got[number] = found

    async with asyncio.TaskGroup() as running:
        for number in range(subscribers):
            running.create_task(subscribe(number))
        await all_ready.wait()
        measured.report("all are connected")
        async with fastness.connect_async(server.url) as plane:
            for round_ in range(messages):
                await asyncio.gather(
                    *(plane.queue(f"mine-{number}").put([number, round_]) for number in range(subscribers))
                )
    measured.report(f"{subscribers * messages} messages delivered")
    assert got == {number: [[number, round_] for round_ in range(messages)] for number in range(subscribers)}
    assert measured.grown < 64 * MIB + subscribers * 102_400


# Idle connections.


class Idle(asyncio.Protocol):
    """A stream that sends a hello, and then answers only pings."""

    def __init__(self, session: str) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.pings = 0
        self._session = session
        self._data = b""
        self._upgraded = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
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
        while len(self._data) >= 2 and len(self._data) >= 2 + self._data[1]:  # All frames are short.
            opcode, payload = self._data[0] & 15, self._data[2 : 2 + self._data[1]]
            self._data = self._data[2 + len(payload) :]
            if opcode == 2 and not self.ready.done():
                self.ready.set_result(None)
            elif opcode == 9:
                self.pings += 1
                self._send(0x8A, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionError("the server closed the connection"))

    def _send(self, head: int, payload: bytes) -> None:
        self.transport.write(bytes([head, 0x80 | len(payload)]) + bytes(4) + payload)  # The mask is zero.


@pytest.mark.parametrize("connections", versions(500, 10_000))
async def test_memory_of_idle_streams_is_small(server: Server, files: Callable[[int], None], connections: int) -> None:
    files(connections + OTHER_FILES)
    host, port = server.address
    measured = Measured(server, f"{connections} idle streams")
    loop = asyncio.get_running_loop()
    idle: list[Idle] = []
    for begin in range(0, connections, 100):
        made = await asyncio.gather(
            *(
                # Several source addresses have more ports than one.
                loop.create_connection(
                    partial(Idle, f"idle-{number}"),
                    host,
                    port,
                    local_addr=(f"127.0.0.{2 + number % 4}", 0),
                )
                for number in range(begin, min(begin + 100, connections))
            )
        )
        idle += [protocol for _, protocol in made]
        await asyncio.gather(*(protocol.ready for _, protocol in made))
    measured.report("connected")
    while connections >= 10_000 and min(protocol.pings for protocol in idle) < 2:
        await asyncio.sleep(0.5)
    measured.report("still connected after pings")
    assert not [protocol for protocol in idle if protocol.lost]
    assert f"fastness_open_streams {connections}.0".encode() in server.get("/metrics")[2]
    async with fastness.connect_async(server.url) as plane:
        await asyncio.gather(*(plane.queue("jobs").put(number) for number in range(1_000)))
        measured.report("1000 messages put by another client")
        assert len(await plane.queue("jobs").receive_many(200)) == 200
    assert server.get("/readyz")[0] == 200
    print(f"{measured.grown / connections / 1_024:.1f} KiB per stream")
    assert server.peak_bytes < measured.idle + (1_024 * MIB - measured.idle) * connections / 10_000 + 16 * MIB
    for protocol in idle:
        protocol.transport.close()
    while b"fastness_open_streams 0.0" not in (await asyncio.to_thread(server.get, "/metrics"))[2]:
        await asyncio.sleep(0.05)
    measured.report("all closed")


# Clients that do not read.


def stalled_stream(server: Server, number: int) -> socket.socket:
    """Sends many calls over a stream, and reads nothing."""
    connection = socket.create_connection(server.address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    key = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        f"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    assert b" 101 " in connection.recv(4_096)
    connection.settimeout(0.05)
    with suppress(OSError):
        for data in (encode(Hello(PROTOCOL, f"stalled-{number}")), *peeks()):
            connection.sendall(b"\x82\xfe" + struct.pack(">H", len(data)) + bytes(4) + data)
    return connection


def peeks() -> Iterator[bytes]:
    for first in range(0, 2_048, 64):
        yield encode([Call(first + number, PeekMessages("big", 100)) for number in range(64)])


def stalled_http(server: Server, request: str) -> socket.socket:
    """Requests something large over HTTP repeatedly, and reads nothing."""
    connection = socket.create_connection(server.address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(0.05)
    with suppress(OSError):
        for _ in range(100):
            connection.sendall(request.encode())
    return connection


@pytest.mark.parametrize("stalled", versions(12, 120))
def test_clients_that_do_not_read_do_not_affect_others(
    server: Server, files: Callable[[int], None], stalled: int
) -> None:
    files(stalled + OTHER_FILES)
    with server.plane() as plane, ExitStack() as held:
        plane.queue("big").put_many([os.urandom(10_000) for _ in range(100)])
        blob = plane.blobs.write(os.urandom(MIB) for _ in range(32))
        body = json.dumps({"queue": "big", "owner": "stalled", "credit": 64})
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        requests = [
            f"GET /v1/blobs/{blob} HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "GET /v1/queues/big/peek?limit=100 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            f"POST /v1/queue/subscribe HTTP/1.1\r\n{headers}\r\n{body}",
        ]
        plane.queue("jobs").put("warm")
        server.get("/v1/queues/big/peek?limit=100")
        measured = Measured(server, f"{stalled} clients that do not read")
        for number in range(stalled):
            kind = number % (len(requests) + 1)
            held.enter_context(
                stalled_http(server, requests[kind]) if kind < len(requests) else stalled_stream(server, number)
            )
        measured.report("all are connected")
        for number in range(200):
            plane.queue("jobs").put(number)
        with plane.queue("jobs").receive() as message:
            assert message.json() == "warm"
        assert plane.queue("jobs").stats().ready == 200
        assert server.get("/readyz")[0] == 200
        measured.report("200 messages put by another client")
        assert measured.grown < 64 * MIB + stalled * 2 * MIB
    measured.report("all closed")


# Large blobs.


def pieces(size: int, digest: Any) -> Iterator[bytes]:
    """`size` incompressible bytes, one piece at a time."""
    block = os.urandom(MIB)
    for number in range(size // MIB):
        piece = number.to_bytes(8, "big") + block[8:]
        digest.update(piece)
        yield piece


@pytest.mark.rotating
@pytest.mark.parametrize("mebibytes", versions(128, 1_024))
def test_large_blob_needs_little_memory(server: Server, mebibytes: int) -> None:
    size = mebibytes * MIB
    with server.plane() as plane:
        plane.blobs.write([os.urandom(MIB) for _ in range(2)])  # Warm-up.
        for interface in ("HTTP", "the sync handle"):
            expected, found = hashlib.sha256(), hashlib.sha256()
            measured = Measured(server, f"{mebibytes} MiB over {interface}")
            if interface == "HTTP":
                name = put_over_http(server, pieces(size, expected))
            else:
                name = plane.blobs.write(pieces(size, expected))
            measured.report("uploaded")
            assert name == expected.hexdigest()
            for piece in get_over_http(server, name) if interface == "HTTP" else plane.blobs.open(name):
                found.update(piece)
            measured.report("downloaded")
            assert found.hexdigest() == name
            print(f"peak memory grew by {measured.grown / MIB:.1f} MiB")
            assert measured.grown < 64 * MIB


def put_over_http(server: Server, chunks: Iterator[bytes]) -> str:
    connection = http.client.HTTPConnection(*server.address)
    try:
        connection.request(
            "PUT", "/v1/blobs", chunks, {"Content-Type": "application/octet-stream"}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 201
        return str(json.loads(response.read())["hash"])
    finally:
        connection.close()


def get_over_http(server: Server, name: str) -> Iterator[bytes]:
    connection = http.client.HTTPConnection(*server.address)
    try:
        connection.request("GET", f"/v1/blobs/{name}")
        response = connection.getresponse()
        assert response.status == 200
        while piece := response.read(MIB):
            yield piece
    finally:
        connection.close()
