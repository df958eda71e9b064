"""Bodies that do not fit a frame, streamed over HTTP: blobs in both directions, and very long calls.

One part is in memory at a time. The HTTP connection is the standard library's; an event loop uses it in a thread. A
broken download resumes where it stopped, because a blob never changes, and the result is checked against the blob's
hash.
"""

import asyncio
import hashlib
import http.client
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from fastness.client.connection_errors import CHECKED_BEFORE_KEYS, connection_error, refused, unknown
from fastness.errors import (
    FastnessError,
    HashMismatch,
    InvalidArgument,
    InvalidValue,
    ShutdownDraining,
    Unreachable,
)
from fastness.limits import BLOB_PART_BYTES, CALL_KEY_PERIOD_SECONDS
from fastness.names import checked_name
from fastness.wire.answers import decoder_of
from fastness.wire.blobs import OpenBlob, Stored, WriteBlob
from fastness.wire.problems import Problem, error_of

_TIMEOUT_SECONDS_MAX: Final = 60.0
_PAUSE_SECONDS: Final = 0.1
_KEYS_SECONDS: Final = CALL_KEY_PERIOD_SECONDS - 60.0
_MSGPACK: Final = "application/msgpack"
_OFFSET_MAX: Final = 10**18 - 1  # Beyond any blob's length. Servers reject longer numbers.
_CONNECTION_ERRORS: Final = (OSError, http.client.HTTPException)

Result = TypeVar("Result")


class Server(Protocol):
    """The address and credentials of a server, and how long to retry."""

    url: str
    token: str | None
    tls: ssl.SSLContext | None
    patience_seconds: float


def connect(server: Server, *, timeout_seconds: float = _TIMEOUT_SECONDS_MAX) -> http.client.HTTPConnection:
    """A new HTTP connection to a server."""
    parts = urlsplit(server.url)
    timeout_seconds = min(timeout_seconds, max(server.patience_seconds, 1.0))
    if parts.scheme == "https":
        host, port = parts.hostname or "", parts.port
        return http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=server.tls)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)


def path(server: Server, rest: str) -> str:
    """The request path for `rest`, behind the prefix in the server's URL."""
    return urlsplit(server.url).path + rest


def headers(server: Server, **others: str) -> dict[str, str]:
    """The headers of a request, with the access token. Underscores in names become dashes."""
    request_headers = {name.replace("_", "-"): value for name, value in others.items()}
    if server.token:
        request_headers["Authorization"] = f"Bearer {server.token}"
    return request_headers


# Uploads.


def put(server: Server, request: WriteBlob, data: bytes) -> Stored:
    """Store bytes. Sent again if the connection breaks; blobs are stored by hash, so that is safe."""
    parts = range(0, len(data), BLOB_PART_BYTES)
    return retry(server, lambda: _upload(server, request, (data[at : at + BLOB_PART_BYTES] for at in parts)))


def send(server: Server, request: WriteBlob, chunks: Iterable[bytes]) -> Stored:
    """Store a stream.

    Raises:
        Unreachable: the connection broke. Nothing was stored, and only the caller can restart the stream.
    """
    try:
        return _upload(server, request, _split(chunks))
    except _CONNECTION_ERRORS as error:
        raise Unreachable(f"{server.url} broke the connection ({error}); send the blob again") from error


async def send_async(
    server: Server, request: WriteBlob, chunks: AsyncIterable[bytes], threads: ThreadPoolExecutor
) -> Stored:
    """`send` for an event loop. A thread pulls the chunks from the loop, so only one is in memory."""
    loop = asyncio.get_running_loop()
    chunks_left = aiter(chunks)
    pulling: Future[bytes | None] | None = None
    stopped = False

    def pull_chunks() -> Iterator[bytes]:
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
        raise OSError("the upload was cancelled")  # Truncates the body, so the server stores nothing.

    try:
        return await loop.run_in_executor(threads, send, server, request, pull_chunks())
    finally:
        stopped = True
        if pulling is not None:
            pulling.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next chunk; None at the end, because a future cannot carry StopAsyncIteration to another thread."""
    async for chunk in chunks:
        return chunk
    return None


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if not isinstance(chunk, bytes):
            raise InvalidValue(f"A blob's chunks must be bytes, not {type(chunk).__name__}; encode them first")
        for at in range(0, len(chunk), BLOB_PART_BYTES):
            yield chunk[at : at + BLOB_PART_BYTES]


def _upload(server: Server, request: WriteBlob, parts: Iterator[bytes]) -> Stored:
    request_headers = headers(
        server, X_Fastness_Universe=checked_name("universe", request.universe), Content_Type="application/octet-stream"
    )
    target = "/v1/blobs" if request.pinned else "/v1/blobs?pinned=false"
    connection = connect(server)
    failures: list[Exception] = []

    def record_failures() -> Iterator[bytes]:
        try:
            yield from parts
        except Exception as error:
            failures.append(error)
            raise

    try:
        connection.connect()
        with suppress(ConnectionError):  # The server may have sent an error response before it closed the connection.
            connection.request("POST", path(server, target), record_failures(), request_headers, encode_chunked=True)
        if failures:  # The error came from the source of the chunks, not from this connection.
            raise failures[0]
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise error_in(server, response.status, data)
    return msgspec.json.decode(data, type=Stored)


# Downloads.


class Parts(ABC):
    """Reads the body of an answer in parts, over one connection after the other if they break."""

    def __init__(self, server: Server) -> None:
        """Raises the error with which the server rejects the request."""
        self._server = server
        self._offset = 0  # How many bytes have been read.
        self._done = False
        self._connection: http.client.HTTPConnection | None = None
        self._response = retry(server, self._open)

    def read(self) -> bytes:
        """The next part; b"" at the end.

        Raises:
            HashMismatch: the received bytes do not match the blob's hash.
            Unreachable: the connection broke, and the answer cannot be resumed.
        """
        if self._done:
            return b""
        part = retry(self._server, self._read_part)
        self._offset += len(part)
        if not part:
            self._done = True
            self.close()
        return part

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._response.close()
            self._connection.close()
            self._connection = None

    @abstractmethod
    def _read_part(self) -> bytes: ...

    @abstractmethod
    def _open(self) -> http.client.HTTPResponse:
        """Request what is left."""

    def _get(
        self, target: str, request_headers: dict[str, str], *, accepted: int | None = None
    ) -> http.client.HTTPResponse:
        connection = connect(self._server)
        try:
            connection.request("GET", path(self._server, target), headers=request_headers)
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST and response.status != accepted:
                raise error_in(self._server, response.status, response.read())
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return response


class Download(Parts):
    """Reads a blob, or a range of it."""

    def __init__(self, server: Server, request: OpenBlob) -> None:
        """Raises BlobNotFound if the blob does not exist."""
        if request.start < 0 or (request.length is not None and request.length < 0):
            raise InvalidArgument(
                f"start={request.start} and length={request.length} are not a range of a blob; use 0 or more for both"
            )
        self._request = request
        self._sha = hashlib.sha256()
        self._size: int | None = None
        self._is_whole = True
        super().__init__(server)

    def read(self) -> bytes:
        part = super().read()
        self._sha.update(part)
        if not part and self._is_whole and self._sha.hexdigest() != self._request.hash.lower():
            raise HashMismatch(
                f"The received bytes of blob {self._request.hash} have another hash; the blob is damaged"
            )
        return part

    def _read_part(self) -> bytes:
        if self._offset == self._size:
            return b""
        if self._connection is None:
            self._response = self._open()
        try:
            part = self._response.read(BLOB_PART_BYTES)
            if not part and self._size is not None and self._offset < self._size:
                raise http.client.IncompleteRead(part, self._size - self._offset)
        except BaseException:
            self.close()
            raise
        return part

    def _open(self) -> http.client.HTTPResponse:
        request_headers = headers(
            self._server, X_Fastness_Universe=checked_name("universe", self._request.universe), Accept="*/*"
        )
        start, length = self._request.start, self._request.length
        begin = min(start + self._offset, _OFFSET_MAX)
        if begin or length is not None:
            # HTTP has no empty range: an empty part requests one byte and does not read it.
            request_headers["Range"] = (
                f"bytes={begin}-{'' if length is None else min(start + max(length, 1) - 1, _OFFSET_MAX)}"
            )
        past_end = http.client.REQUESTED_RANGE_NOT_SATISFIABLE
        response = self._get(f"/v1/blobs/{quote(self._request.hash, safe='')}", request_headers, accepted=past_end)
        if begin and response.status == http.client.OK:
            self._response = response
            self.close()
            raise Unreachable(f"{self._server.url} ignored the Range header; check whether a proxy removes it")
        if self._size is None:
            self._is_whole = response.status == http.client.OK and length != 0
            self._size = 0 if response.status == past_end or length == 0 else response.length
        return response


def receive(download: Parts) -> Iterator[bytes]:
    """Iterate over the parts of a download, which was opened (and raised any error) when it was created."""

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
    """The answer to a call that does not fit a frame, sent over HTTP."""
    body = msgspec.msgpack.encode(request)
    request_headers = headers(server, Content_Type=_MSGPACK, Accept=_MSGPACK)
    if key is not None:
        request_headers["Idempotency-Key"] = key

    was_sent = False

    def attempt() -> Any:
        nonlocal was_sent
        is_repeated = was_sent and key is not None
        connection = connect(server)
        try:
            connection.connect()
            was_sent = True
            with suppress(ConnectionError):
                connection.request("POST", path(server, "/v1/call"), body, request_headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            error = error_in(server, response.status, data)
            if is_repeated and isinstance(error, CHECKED_BEFORE_KEYS) and not isinstance(error, ShutdownDraining):
                raise unknown(request, error)
            raise error
        return decoder_of(request)(data)

    def on_timeout(error: BaseException) -> FastnessError:
        why = connection_error(server.url, error)
        return unknown(request, why) if was_sent and key is not None else why

    return retry(server, attempt, on_timeout)


def retry(
    server: Server, work: Callable[[], Result], on_timeout: Callable[[BaseException], FastnessError] | None = None
) -> Result:
    """Retry `work` for `patience_seconds`; with `on_timeout`, at most for as long as servers remember keys."""
    seconds = server.patience_seconds if on_timeout is None else min(server.patience_seconds, _KEYS_SECONDS)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except (*_CONNECTION_ERRORS, ShutdownDraining) as error:
            if time.monotonic() > deadline:
                raise (connection_error(server.url, error) if on_timeout is None else on_timeout(error)) from error
        time.sleep(_PAUSE_SECONDS)


def error_in(server: Server, status: int, data: bytes) -> FastnessError:
    """The error in a response, whose body is JSON or MessagePack."""
    if status == http.client.UNAUTHORIZED and not server.token:
        return refused(server.url, None)
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            return error_of(decode(data, type=Problem))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return Unreachable(f"The server answered {data[:80]!r}, which is not a Fastness response; check the URL")
