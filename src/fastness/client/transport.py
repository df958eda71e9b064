"""The transports of a plane in another process: the same requests, sent to a server."""

import asyncio
import os
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, Final, NoReturn, TypeVar, get_args
from urllib.parse import urlsplit

from fastness.client import streaming
from fastness.client.blocking_connection import BlockingConnection
from fastness.client.connection import Connection
from fastness.client.lease_renewal import RemoteLeaseRenewer
from fastness.client.pending_calls import TooLong
from fastness.client.transfers import STREAMED, Transfer
from fastness.errors import Closed, InvalidArgument, InvalidUrl, NotEmbedded
from fastness.lock_sessions import LockSessions
from fastness.threads import run_in_thread
from fastness.tiers import Tier
from fastness.wire.blobs import Body, GetBlob, OpenBlob, PutBlob, WriteBlob
from fastness.wire.frames import AnyRequest
from fastness.wire.requests import Answer, Request
from fastness.wire.type_checks import check_types

_REMOTE_REQUESTS: Final = frozenset(get_args(AnyRequest))
_BLOB_REQUESTS: Final = (GetBlob, PutBlob)
_FRAME_DATA_BYTES_MAX: Final = 262_144  # A larger blob is streamed over HTTP and does not delay other calls.
_UPLOADS_MAX: Final = 16  # Uploads wait for their chunks, so they have their own threads.


Transport = TypeVar("Transport", bound="_Server")


class _Server(ABC):
    """The address of a server, and what both transports send over HTTP."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, patience_seconds: float = 30.0
    ) -> None:
        """Raises InvalidUrl if `url` is not a server's URL. The first call connects."""
        self.url = _checked_url(url)
        self.token = token
        self.tls = tls
        self.patience_seconds = patience_seconds
        self.lease_renewer = RemoteLeaseRenewer(self)
        self.lock_sessions = LockSessions(self.lease_renewer)
        self.locks = None  # All callers of the server share its locks.
        self.on_data_push = None  # The ingress is in the server's process.
        self._closed = False
        self._prepare()

    def opened_again(self, kind: "type[Transport]") -> "Transport":
        """A transport of another kind to the same server."""
        return kind(self.url, token=self.token, tls=self.tls, patience_seconds=self.patience_seconds)

    def transfer_blob(self, request: GetBlob | PutBlob) -> Any:
        """Read or write a blob over HTTP, while the caller's thread waits."""
        self.check_open()
        check_types(request)
        if isinstance(request, PutBlob):
            return streaming.put(self, WriteBlob(request.universe, request.pinned), request.data)
        return Body(b"".join(streaming.receive(streaming.Download(self, OpenBlob(request.hash, request.universe)))))

    def post(self, request: AnyRequest) -> Any:
        """The answer to a call that does not fit a frame, while the caller's thread waits."""
        check_types(request)
        return streaming.post(self, request, token_hex(16) if request.operation.takes_key else None)

    def transact(self, work: Callable[..., Any], /, *args: Any, tier: Tier, **kwargs: Any) -> NoReturn:
        del work, args, tier, kwargs
        raise _not_embedded()

    def execute(self, tx: Any, request: Request[Any]) -> NoReturn:
        del tx, request
        raise _not_embedded()

    def within(self, connection: object) -> NoReturn:
        raise NotEmbedded(
            f"The plane is in another process, which has no access to {type(connection).__name__}; open the plane with "
            "its URL: fastness.open('postgresql://…')"
        )

    def reopen(self) -> NoReturn:
        raise NotEmbedded("The plane is in another process; its server reopens it by itself")

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def check_open(self) -> None:
        """Raises Closed if the transport is closed."""


class AsyncRemoteTransport(_Server):
    """Sends requests to a server without blocking the caller's event loop."""

    def _prepare(self) -> None:
        self._connection: Connection | None = None
        self._uploads = ThreadPoolExecutor(_UPLOADS_MAX, "fastness-upload")

    async def call(self, request: Request[Answer]) -> Answer:
        if isinstance(request, _BLOB_REQUESTS) and not _fits(request):
            return await run_in_thread(self.transfer_blob, request)
        _require_remote(request)
        try:
            answer: Answer = await self._open_connection().call(request)
        except TooLong:
            answer = await run_in_thread(self.post, request)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        self.check_open()
        answer: Any = await streaming.send_async(self, _require_write(request), chunks, self._uploads)
        return answer  # type: ignore[no-any-return]

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        self.check_open()
        return streaming.receive_async(await asyncio.to_thread(_download, self, request))

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.close()
        await asyncio.to_thread(self.lease_renewer.close)
        self._uploads.shutdown(wait=False)

    def check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _open_connection(self) -> Connection:
        self.check_open()
        if self._connection is None:
            self._connection = Connection(
                self.url, token=self.token, tls=self.tls, patience_seconds=self.patience_seconds
            )
        return self._connection


class RemoteTransport(_Server):
    """Sends requests to a server while the caller's thread waits."""

    def _prepare(self) -> None:
        self._connection = BlockingConnection(
            self.url, token=self.token, tls=self.tls, patience_seconds=self.patience_seconds
        )
        self._lock = threading.Lock()
        self._process = os.getpid()

    def call(self, request: Request[Answer]) -> Answer:
        if isinstance(request, _BLOB_REQUESTS) and not _fits(request):
            answer: Any = self.transfer_blob(request)
            return answer  # type: ignore[no-any-return]
        _require_remote(request)
        self.check_open()
        try:
            answer = self._connection.call(request)
        except TooLong:
            answer = self.post(request)
        return answer  # type: ignore[no-any-return]

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        self.check_open()
        answer: Any = streaming.send(self, _require_write(request), chunks)
        return answer  # type: ignore[no-any-return]

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        self.check_open()
        return streaming.receive(_download(self, request))

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # The threads and the connection are the parent's.
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._connection.close()
        self.lease_renewer.close()

    def check_open(self) -> None:
        if self._closed or os.getpid() != self._process:
            raise _closed()


def _require_remote(request: Request[Any]) -> None:
    if type(request) not in _REMOTE_REQUESTS:
        raise NotEmbedded(f"{type(request).__name__} needs the key space itself; open the plane embedded to use it")


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_server and not (parts.query or parts.fragment or parts.username):
            return url.rstrip("/")
    except ValueError:
        pass
    raise InvalidUrl(f"{url!r} is not the URL of a server; use http://HOST:PORT")


def _fits(request: GetBlob | PutBlob) -> bool:
    """Whether a blob can be sent in a frame. A blob to read may have any size."""
    if isinstance(request, GetBlob):
        return False
    check_types(request)
    return len(request.data) <= _FRAME_DATA_BYTES_MAX


def _require_write(request: Request[Any]) -> WriteBlob:
    if isinstance(request, WriteBlob):
        check_types(request)
        return request
    raise InvalidArgument(f"{type(request).__name__} has no body to send")


def _download(server: streaming.Server, request: Request[Any]) -> streaming.Parts:
    check_types(request)
    if isinstance(request, OpenBlob):
        return streaming.Download(server, request)
    if isinstance(request, STREAMED):
        return Transfer(server, request)
    raise InvalidArgument(f"{type(request).__name__} has no body to receive")


def _closed() -> Closed:
    return Closed("The plane was closed, or this process was forked after it was opened; connect again")


def _not_embedded() -> NotEmbedded:
    return NotEmbedded("The plane is in another process, where a function cannot run; use plane.atomic() instead")
