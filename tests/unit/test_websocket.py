"""Connections whose other end is slow, deaf or gone: which of them are given up, and when. Time is moved by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.client.websocket import Socket
from holdfast.server.sockets import BoundedSocket

# The server's.


class Transport:
    """Has a number of bytes that were not taken."""

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
    """An event loop whose time is moved by hand, one timer after the other."""

    def __init__(self) -> None:
        self.waiting: list[tuple[SimpleNamespace, Callable[[], None]]] = []

    def call_later(self, seconds: float, work: Callable[..., None], *args: Any) -> Any:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self.waiting.append((handle, lambda: work(*args)))
        return handle

    def pass_by(self) -> bool:
        """Let the next timer go off; whether there was one."""
        while self.waiting:
            handle, work = self.waiting.pop(0)
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
            "conn": SimpleNamespace(fail=lambda *why: None, data_to_send=lambda: [b"close"]),
        }.items():
            setattr(self.socket, name, value)
        self.socket.writable.set()
        self.pings = 0
        monkeypatch.setattr(BoundedSocket, "schedule_ping", lambda socket: setattr(self, "pings", self.pings + 1))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_who_takes_nothing_is_cut(server: Server) -> None:
    server.transport.unread = 100_000
    server.socket.pause_writing()
    assert server.timers.pass_by()
    assert server.transport.aborted
    assert not server.timers.pass_by()


def test_who_is_slow_is_not_cut(server: Server) -> None:
    server.transport.unread = 100_000
    server.socket.pause_writing()
    for _ in range(50):
        server.transport.unread -= 1_000
        server.timers.pass_by()
    assert not server.transport.aborted
    server.socket.resume_writing()
    assert not server.timers.pass_by()


def test_a_connection_that_is_closed_is_cut_if_the_rest_is_not_taken(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(socket: Any) -> None:
        socket.transport.close()

    monkeypatch.setattr(WebSocketsSansIOProtocol, "run_asgi", nothing)
    server.transport.unread = 10
    asyncio.run(server.socket.run_asgi())
    server.socket.resume_writing()  # A little was taken, and the connection is closing all the same.
    assert server.timers.pass_by()
    assert server.transport.aborted


def test_who_does_not_answer_a_ping_is_gone(server: Server) -> None:
    server.transport.unread = 10
    server.socket.keepalive_timeout()
    assert (server.transport.aborted, server.pings) == (True, 0)


@pytest.mark.parametrize("because", ["nothing is read from it", "much is to be taken before the ping"])
def test_who_cannot_be_heard_is_asked_again(server: Server, because: str) -> None:
    if because == "nothing is read from it":
        server.socket.read_paused = True
    else:
        server.transport.unread = 100_000
        server.socket.pause_writing()
    server.socket.keepalive_timeout()
    assert (server.transport.aborted, server.transport.closing, server.pings) == (False, False, 1)


# The client's.


class Quiet(Socket):
    """A connection without a network, of which it is known how often it has asked, and whether it was given up."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ping_interval = self.ping_timeout = 0.001
        self.asked = 0
        self.failed = asyncio.Event()
        self.protocol: Any = SimpleNamespace(
            fail=lambda *why: self.failed.set(),
            receive_data=lambda data: None,
            events_received=list,
            close_expected=bool,
        )

    async def ping(self, data: Any = None, ack_on_close: bool = False) -> Any:
        self.asked += 1

    def send_data(self) -> None:
        pass

    @asynccontextmanager
    async def send_context(self, **_: Any) -> AsyncIterator[None]:
        yield


async def test_a_server_from_which_nothing_comes_is_given_up() -> None:
    quiet = Quiet()
    keeping = asyncio.create_task(quiet.keepalive())
    await asyncio.wait_for(quiet.failed.wait(), 30)
    keeping.cancel()


async def test_a_server_from_which_anything_comes_is_not() -> None:
    quiet = Quiet()
    quiet.ping_timeout = 0.05
    keeping = asyncio.create_task(quiet.keepalive())
    while quiet.asked < 3 and not quiet.failed.is_set():
        quiet.data_received(b"a part of a long answer, and no pong")
        await asyncio.sleep(0.001)
    assert not quiet.failed.is_set()
    keeping.cancel()
