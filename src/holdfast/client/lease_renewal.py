"""Extends leases from a thread of its own, over plain HTTP: a worker that blocks its event loop keeps its messages."""

import http.client
import socket
import threading
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.client.streaming import Server, connect, headers, path
from holdfast.errors import Closed, Unreachable, rebuild
from holdfast.lease_renewal import LeaseRenewer
from holdfast.wire.problems import Problem, error_of
from holdfast.wire.queues import ExtendMessages, MessageLease, Outcomes

_TIMEOUT_SECONDS: Final = 10.0  # One extension that hangs must not cost all the others their leases.
_MSGPACK: Final = "application/msgpack"


class RemoteLeaseRenewer(LeaseRenewer):
    """A keeper whose extensions travel."""

    def __init__(self, server: Server) -> None:
        super().__init__(self._extend)
        self._server = server
        self._connection: http.client.HTTPConnection | None = None
        self._speaking = threading.Lock()
        self._hung_up = False

    def close(self) -> None:
        self._hung_up = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # Whoever waits for an answer there waits no more.
                connection.sock.shutdown(socket.SHUT_RDWR)
        super().close()
        with self._speaking:
            self._hang_up()

    def _extend(self, universe: str, queue: str, lease: MessageLease, seconds: float) -> int:
        request = ExtendMessages(queue, [lease], seconds, universe)
        outcome = msgspec.msgpack.decode(self._post(msgspec.msgpack.encode(request)), type=Outcomes).outcomes[0]
        if outcome.code is not None:
            raise rebuild(outcome.code, outcome.detail or outcome.code)
        return outcome.expires_ms

    def _post(self, body: bytes) -> bytes:
        with self._speaking:
            if self._connection is not None:
                with suppress(Unreachable):  # The server closes connections that were quiet for a while.
                    return self._ask(self._connection, body)
            if self._hung_up:
                raise Closed("The plane was closed; connect again")
            self._connection = connect(self._server, timeout_seconds=_TIMEOUT_SECONDS)
            return self._ask(self._connection, body)

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> bytes:
        said = headers(self._server, Content_Type=_MSGPACK, Accept=_MSGPACK)
        try:
            connection.request("POST", path(self._server, "/v1/call"), body, said)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            raise Unreachable(f"{self._server.url} does not answer ({error})") from error
        if response.status != http.client.OK:
            raise error_of(msgspec.msgpack.decode(data, type=Problem))
        return data

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
