"""Bodies that are streamed: blobs in both directions, over HTTP, a few parts in memory at a time.

The connection is the standard library's, on a thread; the event loop hands parts over and takes them.
"""

import asyncio
import http.client
import queue
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import HoldfastError, InvalidArgument, Unreachable
from holdfast.limits import BLOB_PART_BYTES
from holdfast.wire.blobs import OpenBlob, WriteBlob
from holdfast.wire.problems import Problem, error_of
from holdfast.wire.requests import Answer, Request, answer_type

_TIMEOUT_SECONDS = 60.0
_PARTS_AHEAD = 4


class Server(Protocol):
    """Where to, and as whom."""

    url: str
    token: str | None
    tls: ssl.SSLContext | None


def connect(server: Server) -> http.client.HTTPConnection:
    """A connection to a server."""
    parts = urlsplit(server.url)
    if parts.scheme == "https":
        host, port = parts.hostname or "", parts.port
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=server.tls)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)


def headers(server: Server, universe: str) -> dict[str, str]:
    """What every request says of itself."""
    said = {"Accept": "application/json", "X-Holdfast-Universe": universe}
    if server.token:
        said["Authorization"] = f"Bearer {server.token}"
    return said


async def send_body(server: Server, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
    """The answer to a blob that is streamed to the server.

    Raises:
        Unreachable: the connection broke; nothing was stored under its name.
    """
    if not isinstance(request, WriteBlob):
        raise InvalidArgument(f"{type(request).__name__} has no body to send")
    parts: queue.Queue[bytes | None] = queue.Queue(_PARTS_AHEAD)
    stopped = False

    def each() -> Iterator[bytes]:
        while (part := parts.get()) is not None:
            if stopped:
                raise OSError("the body ended early")
            yield part

    uploading = asyncio.create_task(asyncio.to_thread(_upload, server, request.universe, each()))
    try:
        async for chunk in chunks:
            for start in range(0, len(chunk), BLOB_PART_BYTES):
                await _put(parts, chunk[start : start + BLOB_PART_BYTES], uploading)
    except BaseException:
        stopped = True
        parts.put_nowait(b"") if not parts.full() else None
        raise
    finally:
        await _put(parts, None, uploading)
    data = await uploading
    answer: Answer = msgspec.json.decode(data, type=answer_type(type(request)))
    return answer


async def receive_body(server: Server, request: Request[Any]) -> AsyncIterator[bytes]:
    """The parts of a blob.

    Raises:
        BlobNotFound: nobody has stored it.
    """
    if not isinstance(request, OpenBlob):
        raise InvalidArgument(f"{type(request).__name__} has no body to receive")
    response = await asyncio.to_thread(_download, server, request)
    return _parts(response)


async def _parts(response: http.client.HTTPResponse) -> AsyncIterator[bytes]:
    try:
        while part := await asyncio.to_thread(_read, response):
            yield part
    finally:
        response.close()


async def _put(parts: "queue.Queue[bytes | None]", part: bytes | None, uploading: "asyncio.Task[bytes]") -> None:
    while not uploading.done():
        try:
            parts.put_nowait(part)
        except queue.Full:
            await asyncio.sleep(0.002)
        else:
            return


def _upload(server: Server, universe: str, chunks: Iterator[bytes]) -> bytes:
    connection = connect(server)
    try:
        connection.request(
            "POST",
            f"{urlsplit(server.url).path}/v1/blobs",
            body=chunks,
            headers=headers(server, universe) | {"Content-Type": "application/octet-stream"},
            encode_chunked=True,
        )
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{server.url} broke the connection ({error}); send the blob again") from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise _problem(data)
    return data


def _download(server: Server, request: OpenBlob) -> http.client.HTTPResponse:
    connection = connect(server)
    try:
        connection.request(
            "GET",
            f"{urlsplit(server.url).path}/v1/blobs/{request.hash}",
            headers=headers(server, request.universe) | {"Accept": "*/*"},
        )
        response = connection.getresponse()
        if response.status >= http.client.BAD_REQUEST:
            raise _problem(response.read())
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Unreachable(f"{server.url} does not answer ({error}); try again") from error
    return response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(BLOB_PART_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"The connection broke in the middle of a blob ({error}); open it again") from error


def _problem(data: bytes) -> HoldfastError:
    try:
        return error_of(msgspec.json.decode(data, type=Problem))
    except msgspec.MsgspecError:
        return Unreachable(f"The server answered {data[:80]!r}, which is no answer of Holdfast; check the URL")
