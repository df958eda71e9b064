"""Bodies that do not fit a frame: blobs in both directions and very long calls, over HTTP, a part in memory at a time.

The connection is the standard library's. A thread that calls uses it as it is; an event loop has it used on a thread. A
download that breaks goes on where it was, because a blob never changes; what came is compared with its name.
"""

import asyncio
import hashlib
import http.client
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from holdfast.client.connection_errors import BEFORE_KEYS, told, unknown
from holdfast.errors import (
    HashMismatch,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    ShutdownDraining,
    Unreachable,
)
from holdfast.limits import BLOB_PART_BYTES, ONCE_PERIOD_SECONDS
from holdfast.wire.answers import decoder_of
from holdfast.wire.blobs import OpenBlob, Stored
from holdfast.wire.problems import Problem, error_of

_TIMEOUT_SECONDS_MAX: Final = 60.0
_PAUSE_SECONDS: Final = 0.1
_KEYS_SECONDS: Final = ONCE_PERIOD_SECONDS - 60.0
_MSGPACK: Final = "application/msgpack"
_OFFSET_MAX: Final = 10**18 - 1  # No blob is so long, and what is longer is no number to a server.
_BROKEN: Final = (OSError, http.client.HTTPException)

Result = TypeVar("Result")


class Server(Protocol):
    """Where to, as whom, and for how long to try."""

    url: str
    token: str | None
    tls: ssl.SSLContext | None
    patience_seconds: float


def connect(server: Server, *, timeout_seconds: float = _TIMEOUT_SECONDS_MAX) -> http.client.HTTPConnection:
    """A connection to a server."""
    parts = urlsplit(server.url)
    timeout_seconds = min(timeout_seconds, max(server.patience_seconds, 1.0))
    if parts.scheme == "https":
        host, port = parts.hostname or "", parts.port
        return http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=server.tls)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)


def path(server: Server, rest: str) -> str:
    """Where something is on a server, which may itself be behind a prefix."""
    return urlsplit(server.url).path + rest


def headers(server: Server, **others: str) -> dict[str, str]:
    """What every request says of itself; underscores in names are dashes."""
    said = {name.replace("_", "-"): value for name, value in others.items()}
    if server.token:
        said["Authorization"] = f"Bearer {server.token}"
    return said


# Up.


def put(server: Server, universe: str, data: bytes) -> Stored:
    """Store bytes that are at hand; sent again if the connection breaks, which stores them once."""
    pieces = range(0, len(data), BLOB_PART_BYTES)
    return patiently(server, lambda: _upload(server, universe, (data[at : at + BLOB_PART_BYTES] for at in pieces)))


def send(server: Server, universe: str, chunks: Iterable[bytes]) -> Stored:
    """Store a stream.

    Raises:
        Unreachable: the connection broke; nothing was stored, and only the caller can begin the stream again.
    """
    try:
        return _upload(server, universe, _pieces(chunks))
    except _BROKEN as error:
        raise Unreachable(f"{server.url} broke the connection ({error}); send the blob again") from error


async def send_async(
    server: Server, universe: str, chunks: AsyncIterable[bytes], threads: ThreadPoolExecutor
) -> Stored:
    """`send` for an event loop: a thread pulls the chunks out of it, so only one is in memory."""
    loop = asyncio.get_running_loop()
    chunks_left = aiter(chunks)
    pulling: Future[bytes | None] | None = None
    stopped = False

    def pulled() -> Iterator[bytes]:
        nonlocal pulling
        while not stopped:
            pulling = asyncio.run_coroutine_threadsafe(_next(chunks_left), loop)
            try:
                chunk = pulling.result()
            except CancelledError:
                break
            if chunk is None:
                return
            yield chunk
        raise OSError("the caller has gone")  # Cuts the body short, so that nothing is stored.

    try:
        return await loop.run_in_executor(threads, send, server, universe, pulled())
    finally:
        stopped = True
        if pulling is not None:
            pulling.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next chunk; None at the end. The end of an iterator cannot be told to another thread as it is."""
    async for chunk in chunks:
        return chunk
    return None


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if not isinstance(chunk, bytes):
            raise InvalidValue(f"A blob is streamed in bytes, not {type(chunk).__name__}; encode it first")
        for at in range(0, len(chunk), BLOB_PART_BYTES):
            yield chunk[at : at + BLOB_PART_BYTES]


def _upload(server: Server, universe: str, pieces: Iterator[bytes]) -> Stored:
    said = headers(server, X_Holdfast_Universe=universe, Content_Type="application/octet-stream")
    connection = connect(server)
    failures: list[Exception] = []

    def noted() -> Iterator[bytes]:
        try:
            yield from pieces
        except Exception as error:
            failures.append(error)
            raise

    try:
        connection.connect()
        with suppress(ConnectionError):  # The server may have said why before it hung up.
            connection.request("POST", path(server, "/v1/blobs"), noted(), said, encode_chunked=True)
        if failures:  # The connection that broke is one that the bytes came from.
            raise failures[0]
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise problem_in(data)
    return msgspec.json.decode(data, type=Stored)


# Down.


class Parts(Protocol):
    """Something that comes one part after the other."""

    def read(self) -> bytes:
        """The next part; nothing at the end."""
        ...

    def close(self) -> None: ...


class Download:
    """The parts of a blob, or of a range of it, one after the other."""

    def __init__(self, server: Server, request: OpenBlob) -> None:
        """Raises BlobNotFound if nobody has stored it."""
        if request.start < 0 or (request.length is not None and request.length < 0):
            raise InvalidArgument(
                f"A part of {request.length} bytes from {request.start} on is none; choose 0 or more for both"
            )
        self._server = server
        self._request = request
        self._sha = hashlib.sha256()
        self._place = 0  # How much of what was asked for has come.
        self._size: int | None = None
        self._whole = True
        self._done = False
        self._connection: http.client.HTTPConnection | None = None
        self._response = patiently(server, self._open)

    def read(self) -> bytes:
        """The next part; nothing at the end.

        Raises:
            HashMismatch: what came is not what was stored.
            Unreachable: the connection broke, and no other one could be had.
        """
        if self._done:
            return b""
        part = patiently(self._server, self._part)
        self._sha.update(part)
        self._place += len(part)
        if not part:
            self._done = True
            self.close()
            if self._whole and self._sha.hexdigest() != self._request.hash.lower():
                raise HashMismatch(f"What came as blob {self._request.hash} has another hash; it is damaged")
        return part

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._response.close()
            self._connection.close()
            self._connection = None

    def _part(self) -> bytes:
        if self._place == self._size:
            return b""
        if self._connection is None:
            self._response = self._open()
        try:
            part = self._response.read(BLOB_PART_BYTES)
            if not part and self._size is not None and self._place < self._size:
                raise http.client.IncompleteRead(part, self._size - self._place)
        except BaseException:
            self.close()
            raise
        return part

    def _open(self) -> http.client.HTTPResponse:
        """The response that has the rest of the blob."""
        said = headers(self._server, X_Holdfast_Universe=self._request.universe, Accept="*/*")
        start, length = self._request.start, self._request.length
        begin = min(start + self._place, _OFFSET_MAX)
        if begin or length is not None:
            # There is no asking for no bytes: whoever wants none asks for one, and does not read it.
            said["Range"] = f"bytes={begin}-{'' if length is None else min(start + max(length, 1) - 1, _OFFSET_MAX)}"
        connection = connect(self._server)
        try:
            connection.request("GET", path(self._server, f"/v1/blobs/{self._request.hash}"), headers=said)
            response = connection.getresponse()
            is_behind = response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE
            if response.status >= http.client.BAD_REQUEST and not is_behind:
                raise problem_in(response.read())
            if begin and response.status == http.client.OK:
                raise Unreachable(
                    f"{self._server.url} was asked for a part and sends all; something between cuts Range"
                )
        except BaseException:
            connection.close()
            raise
        if self._size is None:
            self._whole = response.status == http.client.OK and length != 0
            self._size = 0 if is_behind or length == 0 else response.length
        self._connection = connection
        return response


def receive(download: Parts) -> Iterator[bytes]:
    """The parts of a download. It was begun by whoever made it, so what is wrong was said there."""

    def parts() -> Iterator[bytes]:
        try:
            while part := download.read():
                yield part
        finally:
            download.close()

    return parts()


def receive_async(download: Parts) -> AsyncIterator[bytes]:
    """`receive` for an event loop."""

    async def parts() -> AsyncIterator[bytes]:
        try:
            while part := await asyncio.to_thread(download.read):
                yield part
        finally:
            download.close()

    return parts()


# Calls.


def post(server: Server, request: Any, key: str | None) -> Any:
    """The answer to a call that does not fit a frame."""
    body = msgspec.msgpack.encode(request)
    said = headers(server, Content_Type=_MSGPACK, Accept=_MSGPACK)
    if key is not None:
        said["Idempotency-Key"] = key

    was_sent = False

    def once() -> Any:
        nonlocal was_sent
        is_again = was_sent and key is not None
        connection = connect(server)
        try:
            connection.connect()
            was_sent = True
            with suppress(ConnectionError):
                connection.request("POST", path(server, "/v1/call"), body, said)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            error = problem_in(data)
            if is_again and isinstance(error, BEFORE_KEYS) and not isinstance(error, ShutdownDraining):
                raise unknown(request, error)
            raise error
        return decoder_of(request)(data)

    def give_up(error: BaseException) -> HoldfastError:
        why = told(server.url, error)
        return unknown(request, why) if was_sent and key is not None else why

    return patiently(server, once, give_up)


def patiently(
    server: Server, work: Callable[[], Result], give_up: Callable[[BaseException], HoldfastError] | None = None
) -> Result:
    """Try again for as long as the client is patient; what needs its key, no longer than a server remembers it."""
    seconds = server.patience_seconds if give_up is None else min(server.patience_seconds, _KEYS_SECONDS)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except (*_BROKEN, ShutdownDraining) as error:
            if time.monotonic() > deadline:
                raise (told(server.url, error) if give_up is None else give_up(error)) from error
        time.sleep(_PAUSE_SECONDS)


def problem_in(data: bytes) -> HoldfastError:
    """The problem in an answer, in whichever of both forms."""
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            return error_of(decode(data, type=Problem))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return Unreachable(f"The server answered {data[:80]!r}, which is no answer of Holdfast; check the URL")
