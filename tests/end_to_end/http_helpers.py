"""Helpers of the HTTP tests: receiving, multipart bodies, and streamed lines."""

import json
import socket
from email.parser import BytesParser
from typing import Any

from tests.support.http_server import Server


def receive(server: Server, queue: str, **options: Any) -> dict[str, Any]:
    answer = server.post("/v1/queue/dequeue", {"queue": queue, "owner": "ada", "wait_seconds": -1, **options})
    assert answer.status == 200, answer
    [message] = answer.json()["messages"]
    return dict(message)


def server_ms(server: Server) -> int:
    """The time of the server, in a message that it creates now."""
    receipt = server.post("/v1/queue/enqueue", {"queue": "clock", "payload": 1}).json()
    message = server.get(f"/v1/queues/clock/messages/{receipt['message_id']}").json()
    return round(float(message["created_at_unix"]) * 1_000)


def lease(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("queue", "message_id", "lease_id")}


def multipart(meta: Any, payload: bytes | None, *, kind: str = "application/octet-stream") -> tuple[bytes, str]:
    parts = [b'--b0\r\nContent-Disposition: form-data; name="meta"\r\n\r\n' + json.dumps(meta).encode()]
    if payload is not None:
        head = f'--b0\r\nContent-Disposition: form-data; name="payload"\r\nContent-Type: {kind}\r\n\r\n'
        parts.append(head.encode() + payload)
    return b"\r\n".join([*parts, b"--b0--\r\n"]), "multipart/form-data; boundary=b0"


def parts_of(answer: Any) -> list[tuple[str, Any]]:
    """The names and bodies of the parts of a multipart response."""
    head = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode()
    message = BytesParser().parsebytes(head + answer.body)
    return [
        (str(part.get_param("name", header="content-disposition")), part.get_payload(decode=True))
        for part in message.get_payload()
    ]


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    held = b""
    while True:
        try:
            chunk = connection.recv(65_536)
        except ConnectionError:  # The server closed it while data was still being sent.
            return held
        if not chunk:
            return held
        held += chunk


class EventLines:
    """Reads the NDJSON events of a streaming response."""

    def __init__(self, server: Server, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.connection = server.connect()
        headers = {"Content-Type": "application/json", **headers} if body is not None else headers
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def next(self, event: str) -> Any:
        """The data of the next event with that name."""
        while line := self.response.readline():
            found = json.loads(line)
            if found["event"] == event:
                return found["data"]
        raise AssertionError(f"the stream ended before a {event}")

    def close(self) -> None:
        self.response.close()
        self.connection.close()
