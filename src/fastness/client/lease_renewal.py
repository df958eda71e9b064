"""Lease renewal over plain HTTP from a thread, so a holder that blocks its event loop keeps its leases."""

import http.client
import socket
import threading
from contextlib import suppress
from typing import Final

import msgspec

from fastness.client.streaming import Server, connect, headers, path
from fastness.errors import Closed, FastnessError, Unreachable, rebuild
from fastness.lease_renewal import LeaseRenewer
from fastness.wire.leases import Granted, KeepLease, LeaseProof
from fastness.wire.locks import LockSession, RenewLocks, SessionRenewed
from fastness.wire.problems import Problem, error_of
from fastness.wire.queues import ExtendMessages, MessageLease, Outcomes

_TIMEOUT_SECONDS: Final = 10.0  # One renewal that hangs must not make all other leases expire.
_TIMEOUT_SECONDS_MIN: Final = 0.1
_MSGPACK: Final = "application/msgpack"


class RemoteLeaseRenewer(LeaseRenewer):
    """Renews leases by calling the server."""

    def __init__(self, server: Server) -> None:
        super().__init__(self._extend_messages, self._keep_lease)
        self._server = server
        self._connection: http.client.HTTPConnection | None = None
        self._connection_lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # Ends a read that is in progress.
                connection.sock.shutdown(socket.SHUT_RDWR)
        super().close()
        with self._connection_lock:
            self._disconnect()

    def _extend_messages(
        self, universe: str, queue: str, leases: list[MessageLease], seconds: float
    ) -> list[int | FastnessError]:
        request = ExtendMessages(queue, leases, seconds, universe)
        outcomes = msgspec.msgpack.decode(self._post(msgspec.msgpack.encode(request)), type=Outcomes).outcomes
        return [
            each.expires_ms if each.code is None else rebuild(each.code, each.detail or each.code) for each in outcomes
        ]

    def _keep_lease(self, proof: LeaseProof | LockSession, seconds: float) -> int:
        # A renewal without an answer must leave time to try again before the lease expires.
        timeout_seconds = min(_TIMEOUT_SECONDS, max(seconds / 3, _TIMEOUT_SECONDS_MIN))
        if isinstance(proof, LockSession):
            answer = self._post(msgspec.msgpack.encode(RenewLocks(proof, seconds)), timeout_seconds)
            return msgspec.msgpack.decode(answer, type=SessionRenewed).expires_ms
        answer = self._post(msgspec.msgpack.encode(KeepLease(proof, seconds)), timeout_seconds)
        return msgspec.msgpack.decode(answer, type=Granted).expires_ms

    def _post(self, body: bytes, timeout_seconds: float = _TIMEOUT_SECONDS) -> bytes:
        with self._connection_lock:
            if self._connection is not None:
                self._connection.timeout = timeout_seconds
                if self._connection.sock is not None:
                    self._connection.sock.settimeout(timeout_seconds)
                with suppress(Unreachable):  # The server closes idle connections.
                    return self._request(self._connection, body)
            if self._is_closed:
                raise Closed("The plane was closed; connect again")
            self._connection = connect(self._server, timeout_seconds=timeout_seconds)
            return self._request(self._connection, body)

    def _request(self, connection: http.client.HTTPConnection, body: bytes) -> bytes:
        request_headers = headers(self._server, Content_Type=_MSGPACK, Accept=_MSGPACK)
        try:
            connection.request("POST", path(self._server, "/v1/call"), body, request_headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            raise Unreachable(f"{self._server.url} does not answer ({error})") from error
        if response.status != http.client.OK:
            raise error_of(msgspec.msgpack.decode(data, type=Problem))
        return data

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
