"""The WebSocket of a client for threads: it never blocks in a read or a write, only where a thread waits for either.

websockets does the handshake, pings and closes, without I/O of its own. Short messages bypass it.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import USER_AGENT
from websockets.protocol import State
from websockets.uri import parse_uri

from fastness.wire.websocket_frames import ShortFrameReader, client_frame

_READ_BYTES: Final = 262_144
_WAKE_BYTES_MAX: Final = 4_096  # More than that many calls of `wake` let several waits return at once.
_CLOSE_SECONDS_MAX: Final = 1.0  # How long closing waits for the server to close its side.
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_DATA_OPCODES: Final = (Opcode.BINARY, Opcode.TEXT, Opcode.CONT)


class Opening:
    """An attempt to open a connection, in a thread: looking up a host name cannot be interrupted."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        hello: bytes,
        tls: ssl.SSLContext | None,
        timeout_seconds: float,
        on_done: Callable[[], object],
    ) -> None:
        self.server_hello = b""
        self.opened: BlockingSocket | None = None
        self.error: Exception | None = None
        self._url = url
        self._headers = headers
        self._hello = hello
        self._tls = tls
        self._deadline = time.monotonic() + timeout_seconds
        self._on_done = on_done
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._raw: socket.socket | None = None

    def start(self) -> None:
        """Start the attempt. `on_done` is called at its end, with `opened` or `error` set.

        Raises:
            RuntimeError: no thread is available.
        """
        threading.Thread(target=self._run, name="fastness-connect", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self.opened is not None or self.error is not None

    def result(self) -> "BlockingSocket":
        """The open connection, or the error as an exception."""
        if self.opened is None:
            raise self.error or ConnectionError("the connection is not open yet")
        return self.opened

    def cancel(self) -> None:
        """End the attempt soon, and close what it opens."""
        with self._lock:
            self._is_cancelled = True
            raw, opened = self._raw, self.opened
        if raw is not None:
            _shut_down(raw)
        if opened is not None:
            opened.close()

    def _run(self) -> None:
        try:
            opened = self._open()
        except Exception as error:
            self.error = error
        else:
            with self._lock:
                self.opened = opened
                is_cancelled = self._is_cancelled
            if is_cancelled:
                opened.close()
        self._on_done()

    def _open(self) -> "BlockingSocket":
        uri = parse_uri(self._url)
        connected: socket.socket = socket.create_connection((uri.host, uri.port), timeout=self._seconds_left())
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if uri.secure:
                tls = self._tls or ssl.create_default_context()
                connected.settimeout(self._seconds_left())
                connected = tls.wrap_socket(connected, server_hostname=uri.host)
            with self._lock:
                self._raw = connected
            protocol = ClientProtocol(uri, max_size=None)
            self._shake_hands(connected, protocol)
            self.server_hello = self._exchange_hellos(connected, protocol)
            connected.setblocking(False)
            return BlockingSocket(connected, protocol)
        except BaseException:
            connected.close()
            raise
        finally:
            with self._lock:
                self._raw = None

    def _shake_hands(self, connected: socket.socket, protocol: ClientProtocol) -> None:
        request = protocol.connect()
        request.headers.update(self._headers)
        request.headers.setdefault("User-Agent", USER_AGENT)
        protocol.send_request(request)
        while protocol.handshake_exc is None and protocol.state is State.CONNECTING:
            self._exchange(connected, protocol)
        if protocol.handshake_exc is not None:
            raise protocol.handshake_exc
        protocol.events_received()  # The response.

    def _exchange_hellos(self, connected: socket.socket, protocol: ClientProtocol) -> bytes:
        protocol.send_binary(self._hello)
        while True:
            for event in protocol.events_received():
                if isinstance(event, Frame) and event.opcode in _DATA_OPCODES:
                    return bytes(event.data)
            if protocol.state is State.CLOSED:
                raise protocol.close_exc
            self._exchange(connected, protocol)

    def _exchange(self, connected: socket.socket, protocol: ClientProtocol) -> None:
        """Send what the protocol has to send, and pass on what arrives next."""
        connected.settimeout(self._seconds_left())
        connected.sendall(b"".join(protocol.data_to_send()))
        data = connected.recv(_READ_BYTES)
        if data:
            protocol.receive_data(data)
        else:
            protocol.receive_eof()

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out while opening a connection")
        return left


class _Poll:
    """Waits for one connection, in one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._descriptor = connected.fileno()
        self._sends = False
        self._woken, self._waker = socket.socketpair()  # An eventfd would be one file, and exists on Linux only.
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._descriptor, select.POLLIN)

    def wait(self, seconds: float | None, *, sends: bool) -> None:
        if sends is not self._sends:
            self._sends = sends
            self._poll.modify(self._descriptor, select.POLLIN | select.POLLOUT if sends else select.POLLIN)
        for descriptor, _ in self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1_000):
            if descriptor != self._descriptor:
                with suppress(BlockingIOError):
                    self._woken.recv(_WAKE_BYTES_MAX)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # It is full: the next wait returns at once.
            self._waker.send(b"\0")

    def close(self) -> None:
        self._woken.close()
        self._waker.close()


class BlockingSocket(ShortFrameReader):
    """An open WebSocket. One thread reads and one thread writes at a time, under the lock of its connection."""

    def __init__(self, connected: socket.socket, protocol: ClientProtocol) -> None:
        self.received_at = time.monotonic()
        self.unsent: memoryview | None = None  # What the kernel did not accept yet.
        self._socket = connected
        self._protocol = protocol
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._fragments: list[bytes] = []
        # OpenSSL does not allow a read and a write of one connection at the same time.
        self._tls_lock = threading.Lock() if isinstance(connected, ssl.SSLSocket) else None
        self._caller_poll = _Poll(connected)
        self._background_poll = _Poll(connected)

    # Waiting.

    def wait(self) -> None:
        """Wait until something can be received, or sent if there is something, or until `wake`. For a caller."""
        self._caller_poll.wait(None, sends=self.unsent is not None)

    def wait_in_background(self, seconds: float) -> None:
        """The same for the background thread, for a limited time."""
        self._background_poll.wait(seconds, sends=self.unsent is not None)

    def wake(self) -> None:
        """Wake the threads that wait, or let the next wait return at once."""
        self._caller_poll.wake()
        self._background_poll.wake()

    # Reading.

    def receive(self) -> None:
        """Pass the messages that have arrived to `on_message`.

        Raises:
            ConnectionClosed: the connection has ended.
            OSError: the connection broke.
        """
        while (data := self._read()) is not None:
            self.received_at = time.monotonic()
            rest = self.read_short(self._protocol, data)
            if rest or not data:
                self._receive_rest(rest)
            if self._tls_lock is None:  # Otherwise the rest of a record may wait in OpenSSL, unseen by poll().
                return

    def _read(self) -> bytes | None:
        """The bytes that have arrived; b"" at the end, None if there are none."""
        try:
            if self._tls_lock is None:
                size = self._socket.recv_into(self._buffer)
            else:
                with self._tls_lock:
                    size = self._socket.recv_into(self._buffer)
        except _WOULD_BLOCK:
            return None
        return bytes(self._buffer[:size])

    def _receive_rest(self, data: bytes) -> None:
        """Let websockets receive anything but short messages, and the end (no data)."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in _DATA_OPCODES:
                self._receive_part(event)
        if self._protocol.state is not State.OPEN:
            self._end()

    def _receive_part(self, frame: Frame) -> None:
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            message, self._fragments = b"".join(self._fragments), []
            if self.on_message is not None:
                self.on_message(message)

    def _end(self) -> None:
        """Answer the server's close frame, if there is one, and raise the end of the connection."""
        if self.unsent is None:
            with suppress(OSError):
                self.send(self.output([]))
        self._protocol.receive_eof()
        raise self._protocol.close_exc

    # Writing.

    @property
    def has_output(self) -> bool:
        """Whether pongs or pings wait to be sent, or a part of the last output."""
        return self.unsent is not None or bool(self._protocol.writes)

    def output(self, messages: list[bytes]) -> bytes:
        """What to send: these messages, each in a frame, and what the protocol has to send."""
        parts = [client_frame(message) for message in messages]
        if self._protocol.writes:
            parts += self._protocol.data_to_send()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, output: bytes | memoryview) -> None:
        """Send as much as the kernel accepts. The rest is in `unsent`, and has to be sent before anything else."""
        left = memoryview(output)
        try:
            while left:
                if self._tls_lock is None:
                    sent = self._socket.send(left)
                else:
                    with self._tls_lock:
                        sent = self._socket.send(left)
                left = left[sent:]
        except _WOULD_BLOCK:
            pass
        self.unsent = left or None

    def ping(self) -> None:
        """Add a ping to what has to be sent."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")

    # The end.

    def shut_down(self) -> None:
        """End the connection. A thread that waits for it is woken; the files are closed by `close`."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Close the files. No thread may use the connection any more."""
        self._socket.close()
        self._caller_poll.close()
        self._background_poll.close()

    def close_politely(self) -> None:
        """Send a close frame, and wait for a moment for the server to close its side."""
        with suppress(OSError):
            if self.unsent is None and self._protocol.state is State.OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self.send(self.output([]))
            deadline = time.monotonic() + _CLOSE_SECONDS_MAX
            while (left := deadline - time.monotonic()) > 0:
                self.wait_in_background(left)
                if self._read() == b"":
                    return


def _shut_down(connected: socket.socket) -> None:
    with suppress(OSError):
        # The method of an SSLSocket removes the encryption first: another thread could still send, in plain text.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
