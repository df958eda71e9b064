"""Connections with slow, stalled or lost peers: which are closed, and when. Timers fire by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from fastness.client.websocket import Socket
from fastness.limits import WEBSOCKET_FRAMES_MAX
from fastness.server.sockets import BoundedProtocol, BoundedSocket
from fastness.wire.websocket_frames import ShortFrameReader, server_frame

# The server's socket.


class Transport:
    """A transport with a settable number of unread bytes."""

    def __init__(self) -> None:
        self.unread = 0
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def write(self, data: bytes) -> None:
        self.unread += len(data)

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(setsockopt=lambda *option: None)

    def abort(self) -> None:
        self.aborted = True


class Timers:
    """An event loop whose timers fire by hand, one after the other."""

    def __init__(self) -> None:
        self.pending: list[tuple[SimpleNamespace, Callable[[], None]]] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, seconds: float, work: Callable[..., None], *args: Any) -> Any:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self.pending.append((handle, lambda: work(*args)))
        return handle

    def fire_next(self) -> bool:
        """Fire the next timer; return whether there was one."""
        while self.pending:
            handle, work = self.pending.pop(0)
            if not handle.cancelled:
                work()
                return True
        return False


class Server:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport, self.timers = Transport(), Timers()
        self.socket: Any = object.__new__(BoundedSocket)
        for name, value in {
            "loop": self.timers,
            "transport": self.transport,
            "writable": asyncio.Event(),
            "read_paused": False,
            "close_sent": False,
            "connections": {self.socket},
            "pong_timer": None,
            "pending_ping_payload": b"ping",
            "logger": SimpleNamespace(level=100),
            "conn": SimpleNamespace(fail=lambda *reason: None, data_to_send=lambda: [b"close"]),
        }.items():
            setattr(self.socket, name, value)
        self.socket.writable.set()
        self.pings = 0
        monkeypatch.setattr(BoundedSocket, "schedule_ping", lambda socket: setattr(self, "pings", self.pings + 1))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_peer_that_reads_nothing_is_disconnected(server: Server) -> None:
    server.transport.unread = 100_000
    server.socket.pause_writing()
    assert server.timers.fire_next()
    assert server.transport.aborted
    assert not server.timers.fire_next()


def test_slow_peer_stays_connected(server: Server) -> None:
    server.transport.unread = 100_000
    server.socket.pause_writing()
    for _ in range(50):
        server.transport.unread -= 1_000
        server.timers.fire_next()
    assert not server.transport.aborted
    server.socket.resume_writing()
    assert not server.timers.fire_next()


def test_closing_connection_is_aborted_if_the_rest_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(socket: Any) -> None:
        socket.transport.close()

    monkeypatch.setattr(WebSocketsSansIOProtocol, "run_asgi", nothing)
    server.transport.unread = 10
    asyncio.run(server.socket.run_asgi())
    server.socket.resume_writing()  # A little was read, and the connection is still closing.
    assert server.timers.fire_next()
    assert server.transport.aborted


def test_peer_without_pong_is_disconnected(server: Server) -> None:
    server.transport.unread = 10
    server.socket.keepalive_timeout()
    assert (server.transport.aborted, server.pings) == (True, 0)


@pytest.mark.parametrize("reason", ["reading is paused", "writing is paused"])
def test_ping_is_repeated_while_the_pong_cannot_arrive(server: Server, reason: str) -> None:
    if reason == "reading is paused":
        server.socket.read_paused = True
    else:
        server.transport.unread = 100_000
        server.socket.pause_writing()
    server.socket.keepalive_timeout()
    assert (server.transport.aborted, server.transport.closing, server.pings) == (False, False, 1)


# Frames that make no message.


def fragment(*, first: bool = False, last: bool = False) -> bytes:
    return Frame(Opcode.TEXT if first else Opcode.CONT, b"", fin=last).serialize(mask=True)


FLOODS = {
    "fragments": (fragment(first=True), fragment()),
    "pings": (b"", Frame(Opcode.PING, b"").serialize(mask=True)),
    "pongs": (b"", Frame(Opcode.PONG, b"").serialize(mask=True)),
    "messages that the endpoint does not take": (b"", fragment(first=True, last=True)),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_frames_is_read_up_to_a_bound(kind: str) -> None:
    protocol = BoundedProtocol(state=State.OPEN)
    begin, frame = FLOODS[kind]
    protocol.receive_data(begin + frame * 160_000)
    assert len(protocol.events_received()) == WEBSOCKET_FRAMES_MAX
    assert len(protocol.data_to_send()) <= WEBSOCKET_FRAMES_MAX + 2  # Pongs, the close frame and the end.
    assert isinstance(protocol.parser_exc, ProtocolError)
    assert protocol.close_sent is not None
    assert protocol.close_sent.code == CloseCode.PROTOCOL_ERROR


def test_frames_between_messages_are_counted_from_the_last_ping(server: Server) -> None:
    """A connection that stays quiet for days has its pongs. A message that has begun is counted to its end."""
    protocol = server.socket.conn = BoundedProtocol(state=State.OPEN)
    server.socket.frames, server.socket.ping_timeout = [], None
    for _ in range(3):
        protocol.receive_data(FLOODS["pongs"][1] * WEBSOCKET_FRAMES_MAX)
        server.socket.send_keepalive_ping()
    assert protocol.parser_exc is None
    protocol.receive_data(fragment(first=True) + fragment() * (WEBSOCKET_FRAMES_MAX - 1))
    server.socket.frames = [b""]
    server.socket.send_keepalive_ping()
    assert protocol.parser_exc is None
    protocol.receive_data(fragment())
    assert isinstance(protocol.parser_exc, ProtocolError)


# The reader of short frames.


class RenamedSize:
    """A protocol of the installed websockets, in which the size of an incomplete message has another name."""

    def __init__(self, protocol: Protocol, name: str) -> None:
        self._protocol = protocol
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in ("cur_size", "current_size"):
            if name != self._name:
                raise AttributeError(name)
            name = next(each for each in ("cur_size", "current_size") if hasattr(self._protocol, each))
        return getattr(self._protocol, name)


@pytest.mark.parametrize("name", ["cur_size", "current_size"])  # Of websockets 15, and of later versions.
def test_short_frames_are_read_between_messages_only(name: str) -> None:
    protocol = Protocol(Side.CLIENT)
    renamed: Any = RenamedSize(protocol, name)
    reader, messages = ShortFrameReader(), list[bytes]()
    reader.on_message = messages.append

    def receive(data: bytes) -> bytes:
        """Read data as a connection does; what websockets had to parse."""
        rest = reader.read_short(renamed, data)
        protocol.receive_data(rest)
        return rest

    def parsed() -> list[bytes]:
        return [bytes(event.data) for event in protocol.events_received() if isinstance(event, Frame)]

    assert receive(server_frame(b"one") + server_frame(b"two")) == b""
    start, end = Frame(Opcode.BINARY, b"th", fin=False), Frame(Opcode.CONT, b"ree", fin=True)
    for part in (start.serialize(mask=False), end.serialize(mask=False)):
        assert receive(part) == part
    assert receive(server_frame(b"four")) == b""
    assert (messages, parsed()) == ([b"one", b"two", b"four"], [b"th", b"ree"])
    # Inside of a fragmented message another one is an error of the peer, which only websockets finds.
    receive(start.serialize(mask=False))
    assert receive(server_frame(b"five")) == server_frame(b"five")
    assert messages == [b"one", b"two", b"four"]
    assert isinstance(protocol.parser_exc, ProtocolError)


# The client's socket.


class FakeSocket(Socket):
    """A connection without a network that counts its pings and records whether it failed."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ping_interval = self.ping_timeout = 0.001
        self.pings = 0
        self.failed = asyncio.Event()
        self.protocol: Any = SimpleNamespace(
            fail=lambda *reason: self.failed.set(),
            receive_data=lambda data: None,
            events_received=list,
            close_expected=bool,
        )

    async def ping(self, data: Any = None, ack_on_close: bool = False) -> Any:
        self.pings += 1

    def send_data(self) -> None:
        pass

    @asynccontextmanager
    async def send_context(self, **_: Any) -> AsyncIterator[None]:
        yield


async def test_silent_server_is_disconnected() -> None:
    socket = FakeSocket()
    keepalive = asyncio.create_task(socket.keepalive())
    await asyncio.wait_for(socket.failed.wait(), 30)
    keepalive.cancel()


async def test_server_that_sends_anything_stays_connected() -> None:
    socket = FakeSocket()
    socket.ping_timeout = 0.05
    keepalive = asyncio.create_task(socket.keepalive())
    while socket.pings < 3 and not socket.failed.is_set():
        socket.data_received(b"a part of a long answer, and no pong")
        await asyncio.sleep(0.001)
    assert not socket.failed.is_set()
    keepalive.cancel()
