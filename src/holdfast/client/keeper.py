"""Extends leases from a thread of its own, over plain HTTP: a worker that blocks its event loop keeps its messages."""

import http.client
import threading
from urllib.parse import urlsplit

import msgspec

from holdfast.client.bodies import Server, connect
from holdfast.errors import Unreachable
from holdfast.errors.codes import rebuild
from holdfast.keeping import Keeper
from holdfast.wire.problems import Problem, error_of
from holdfast.wire.queues import ExtendMessages, MessageLease, Outcomes


class RemoteKeeper(Keeper):
    """A keeper whose extensions travel."""

    def __init__(self, server: Server) -> None:
        super().__init__(self._extend)
        self._server = server
        self._path = urlsplit(server.url).path
        self._headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        if server.token:
            self._headers["Authorization"] = f"Bearer {server.token}"
        self._connection: http.client.HTTPConnection | None = None
        self._speaking = threading.Lock()

    def _extend(self, universe: str, queue: str, lease: MessageLease, seconds: float) -> int:
        request = ExtendMessages(queue, [lease], seconds, universe)
        outcome = msgspec.msgpack.decode(self._post(msgspec.msgpack.encode(request)), type=Outcomes).outcomes[0]
        if outcome.code is not None:
            raise rebuild(outcome.code, outcome.detail or outcome.code)
        return outcome.expires_ms

    def _post(self, body: bytes) -> bytes:
        with self._speaking:
            try:
                connection = self._connection = self._connection or connect(self._server)
                connection.request("POST", f"{self._path}/v1/call", body, self._headers)
                response = connection.getresponse()
                data = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection = None
                raise Unreachable(f"{self._server.url} does not answer ({error})") from error
        if response.status != http.client.OK:
            raise error_of(msgspec.msgpack.decode(data, type=Problem))
        return data
