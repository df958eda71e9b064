"""Short messages are read without websockets, with the same result for any input in any chunks."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from fastness.server.sockets import BoundedProtocol, BoundedSocket
from fastness.wire.websocket_frames import ShortFrameReader, client_frame, server_frame

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        pass


class Socket(BoundedSocket):
    """An open socket that records its messages."""

    def __init__(self, *, alone: bool) -> None:
        self.conn = BoundedProtocol(max_size=100_000, logger=logging.getLogger("test"))
        self.conn.receive_data(REQUEST)
        [request] = self.conn.events_received()
        self.conn.send_response(self.conn.accept(request))  # type: ignore[arg-type]
        self.conn.data_to_send()
        self.transport: Any = Transport()
        self.frames = []
        self.queue = asyncio.Queue()
        self.close_sent = self.read_paused = self.disconnected = False
        self.handshake_complete = True
        self.close_timer = self.pending_ping_payload = None
        self.close_timeout = 1.0
        self.loop: Any = SimpleNamespace(call_later=lambda *_: None)
        self.logger = logging.getLogger("test")
        self.messages: list[str | bytes] = []
        self.on_message = self.messages.append
        self.read_here = 0
        self.is_enabled = not alone  # type: ignore[misc]

    def _read_frames(self, protocol: Protocol, data: bytes) -> int:
        read = super()._read_frames(protocol, data)
        self.read_here += read
        return read

    @property
    def seen(self) -> tuple[Any, ...]:
        """Everything observable from outside."""
        return self.transport.written, self.transport.closing, self.conn.state, self.queue.qsize()


class Wire(bytes):
    """Bytes with a short repr for test failures."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes, {self[:12].hex()}>"


def frame(opcode: Opcode, data: bytes, *, fin: bool = True) -> Wire:
    return Wire(Frame(opcode, data, fin=fin).serialize(mask=True))


payloads = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([0, 1, 125, 126, 127, 300, 65_535, 65_536, 70_000]).map(lambda size: b"x" * size),
)
whole = st.builds(frame, st.sampled_from([Opcode.TEXT, Opcode.BINARY]), payloads)
control = st.builds(frame, st.sampled_from([Opcode.PING, Opcode.PONG]), st.binary(max_size=20))
in_parts = st.lists(payloads, min_size=2, max_size=3).map(
    lambda parts: Wire(
        b"".join(
            frame(Opcode.CONT if number else Opcode.BINARY, part, fin=number == len(parts) - 1)
            for number, part in enumerate(parts)
        )
    )
)
strange = st.sampled_from(
    [
        frame(Opcode.TEXT, b"\xff\xfe"),
        frame(Opcode.CLOSE, b"\x03\xe8"),
        frame(Opcode.CONT, b"of nothing"),
        frame(Opcode.BINARY, b"not all", fin=False),
        frame(Opcode.BINARY, b"x" * 100_001),
        Wire(Frame(Opcode.TEXT, b"no mask").serialize(mask=False)),
        Wire(b"\xc2" + frame(Opcode.BINARY, b"reserved")[1:]),
        Wire(b"\x83" + frame(Opcode.BINARY, b"unknown")[1:]),
    ]
)


@given(
    st.lists(st.one_of(whole, whole, control, in_parts), max_size=8),
    st.lists(strange, max_size=1),
    st.lists(whole, max_size=2),
    st.lists(st.integers(1, 400), min_size=1, max_size=10),
)
def test_short_frames_are_read_as_websockets_reads_them(
    frames: list[bytes], odd: list[bytes], rest: list[bytes], sizes: list[int]
) -> None:
    data = b"".join(frames + odd + rest)
    here, alone = Socket(alone=False), Socket(alone=True)
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)] * (1 if len(data) < 10_000 else 100)
        for socket in (here, alone):
            if not socket.transport.closing:
                socket.data_received(data[at : at + size])
        at, turn = at + size, turn + 1
    assert here.seen == alone.seen
    assert alone.read_here == 0
    if here.messages != alone.messages:  # uvicorn drops what stood before a fault in the same piece.
        assert odd
        assert here.messages[: len(alone.messages)] == alone.messages


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
def test_short_messages_bypass_websockets(size: int) -> None:
    """Otherwise the test above would compare websockets with itself."""
    data = b"".join(frame(Opcode.TEXT, b"%d" % number) for number in range(20)) + frame(Opcode.BINARY, b"y" * 300)
    socket = Socket(alone=False)
    for at in range(0, len(data), size):
        socket.data_received(data[at : at + size])
    assert socket.messages == [*map(str, range(20)), b"y" * 300]
    assert socket.conn.reader.buffer == b""
    assert socket._partial == b""
    assert socket.read_here >= len(data)


def test_short_messages_bypass_websockets_after_a_long_one() -> None:
    socket, before = Socket(alone=False), 0
    for data in (frame(Opcode.PING, b""), frame(Opcode.BINARY, b"z" * 70_000), frame(Opcode.TEXT, b"short")):
        before = socket.read_here
        socket.data_received(data)
    assert socket.messages == [b"z" * 70_000, "short"]
    assert socket.read_here - before == len(data)


def test_a_message_without_a_reader_is_left_to_websockets() -> None:
    socket = Socket(alone=False)
    first, second = frame(Opcode.TEXT, b"first"), frame(Opcode.TEXT, b"second")

    def take(message: str | bytes) -> None:
        socket.messages.append(message)
        socket.on_message = None

    socket.on_message = take
    socket.data_received(first + second[:3])
    socket.data_received(second[3:])
    assert socket.messages == ["first"]
    assert socket.queue.get_nowait() == {"type": "websocket.receive", "text": "second"}


# The client's.


class Reader(ShortFrameReader):
    """A client's reader without a network."""

    def __init__(self, *, alone: bool) -> None:
        self.protocol = ClientProtocol(parse_uri("ws://h/"), max_size=100_000, logger=logging.getLogger("test"))
        server = ServerProtocol()
        self.protocol.send_request(self.protocol.connect())
        server.receive_data(b"".join(self.protocol.data_to_send()))
        [request] = server.events_received()
        server.send_response(server.accept(request))  # type: ignore[arg-type]
        self.protocol.receive_data(b"".join(server.data_to_send()))
        assert len(self.protocol.events_received()) == 1
        self.messages: list[bytes] = []
        self.others: list[Frame] = []
        self.on_message = None if alone else self.messages.append

    def read(self, data: bytes) -> None:
        rest = self.read_short(self.protocol, data)
        if rest:
            self.protocol.receive_data(rest)
        for event in self.protocol.events_received():
            assert isinstance(event, Frame)
            if event.opcode is Opcode.BINARY and event.fin:
                self.messages.append(bytes(event.data))
            else:
                self.others.append(event)


def sent(opcode: Opcode, data: bytes, *, fin: bool = True) -> Wire:
    """A frame from a server."""
    return Wire(Frame(opcode, data, fin=fin).serialize(mask=False))


@given(
    st.lists(
        st.one_of(
            payloads.map(lambda data: Wire(server_frame(data))),
            st.builds(sent, st.sampled_from([Opcode.TEXT, Opcode.PING, Opcode.PONG]), st.just(b"x")),
            payloads.map(
                lambda data: Wire(sent(Opcode.BINARY, b"begins", fin=False) + sent(Opcode.CONT, data, fin=True))
            ),
        ),
        max_size=8,
    ),
    st.sampled_from(
        [Wire(), sent(Opcode.CLOSE, b"\x03\xe8"), sent(Opcode.CONT, b"of nothing"), frame(Opcode.TEXT, b"")]
    ),
    st.lists(st.integers(1, 400), min_size=1, max_size=10),
)
def test_a_client_reads_what_websockets_reads(frames: list[bytes], last: bytes, sizes: list[int]) -> None:
    data = b"".join([*frames, last])
    here, alone = Reader(alone=False), Reader(alone=True)
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)] * (1 if len(data) < 10_000 else 100)
        for reader in (here, alone):
            reader.read(data[at : at + size])
        at, turn = at + size, turn + 1
    assert (here.messages, here.others) == (alone.messages, alone.others)
    assert here.protocol.state is alone.protocol.state
    written = [[len(piece) for piece in reader.protocol.data_to_send()] for reader in (here, alone)]
    assert written[0] == written[1], "pongs and closes, each with a mask of its own"


@given(payloads)
def test_websockets_reads_what_a_client_writes(data: bytes) -> None:
    server = Socket(alone=True)
    server.data_received(client_frame(data) + client_frame(data))
    assert server.messages == [data, data]
    assert len(data) < 100 or client_frame(data) != client_frame(data), "with another mask each time"
