"""A real server in its own process, with an HTTP client from the standard library."""

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

from tests.support.forked import start_python

CHILD = Path(__file__).with_name("http_server_child.py")


class Answer:
    """An HTTP response."""

    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status = response.status
        self.headers: Message = response.headers
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem response; checks its form."""
        assert self.headers["content-type"] == "application/problem+json", (self.status, self.body[:500])
        problem = self.json()
        assert problem["status"] == self.status
        assert problem["type"].endswith(problem["code"])
        assert problem["detail"]
        assert problem["correlation_id"] == self.headers["x-correlation-id"]
        if problem["retry"] == "later":
            assert int(self.headers["retry-after"]) >= 1
        return str(problem["code"])

    def __repr__(self) -> str:
        return f"<{self.status} {self.body[:300]!r}>"


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._connection: http.client.HTTPConnection | None = None

    def connect(self, timeout: float = 30.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request; a body that is not bytes is sent as JSON. Underscores in header names become dashes."""
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent_headers.setdefault("content-type", "application/json")
        connection = self.connect()
        try:
            connection.request(method, path, body, sent_headers)
            response = connection.getresponse()
            return Answer(response, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def raw(self, timeout: float = 30.0) -> socket.socket:
        """A TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def peak_bytes(self) -> int:
        """The peak memory of the server."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1_024 for line in status.splitlines() if line.startswith("VmHWM"))

    def read_bytes(self) -> int:
        """How many bytes the server has read from files and connections."""
        counts = Path(f"/proc/{self.process.pid}/io").read_text()
        return next(int(line.split()[1]) for line in counts.splitlines() if line.startswith("rchar"))

    def drain(self) -> None:
        os.kill(self.process.pid, signal.SIGUSR1)


@contextmanager
def serving(url: str = "memory:", **options: Any) -> Iterator[Server]:
    """A server over the plane at `url`; `options` are those of `HttpLimits`, and `tokens`."""
    process = start_python([CHILD, url, json.dumps(options)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdigit(), "the server did not start"
        yield Server(process, int(line))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
