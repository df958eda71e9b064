"""The production server (`fastness serve`) in its own process, on a free loopback port."""

import http.client
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import websockets
from websockets.sync.client import connect as connect_stream

from fastness.client.transport import RemoteTransport
from fastness.handles.sync.plane import Plane
from tests.support.forked import start_python
from tests.support.waiting import PAUSE_SECONDS, POLLS_MAX, eventually, exit_code

CHILD = """
import json, resource, sys
import msgspec
from fastness import limits
from fastness.server.http_protocol import BoundedHttp
from fastness.server.serving import run
from fastness.server.settings import Settings

class Bounded(Settings, frozen=True, kw_only=True):
    @property
    def http_limits(self):
        return msgspec.structs.replace(super().http_limits, **json.loads(sys.argv[2]))

given = json.loads(sys.argv[3])
if share := given.pop("disk_reserve_share_max", None):
    limits.DISK_RESERVE_SHARE_MAX = share
if files := given.pop("files_max", None):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 1_024), files))
for name, value in given.items():
    setattr(BoundedHttp, name, value)
sys.exit(run(Bounded.load(json.loads(sys.argv[1]))))
"""
SECONDS_MAX = 60.0  # Bounds every wait; far longer than any step takes.


class Server:
    """A server process on a free port of the loopback address."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        before: str = "",
        **flags: Any,
    ) -> None:
        """`flags` are those of `fastness serve`. Bounds without flags: `limits` are HttpLimits, and `process` has
        attributes of BoundedHttp, `files_max` and `disk_reserve_share_max`. The code `before` runs before all of it."""
        self.data = f"dir:{folder / 'data'}"
        self._log = folder / "server.log"
        self._log_read = 0
        settings = {"data": self.data, "port": 0, "log_format": "json", **flags}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        with self._log.open("ab") as log:
            self.process = start_python(
                ["-c", before + CHILD, *(json.dumps(each or {}) for each in (settings, limits, process))],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        self.url: str = json.loads(line)["url"]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return host, int(port)

    @property
    def resident_bytes(self) -> int:
        """The current memory of the server."""
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the server since `forget_peak`, or since its start."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith(name))

    def log(self) -> str:
        """The log since `forget_log`."""
        return self._log.read_bytes()[self._log_read :].decode()

    def forget_log(self) -> None:
        self._log_read = self._log.stat().st_size

    def logged(self, *words: str) -> bool:
        """Whether a log line with all of these words appears in the end."""
        for _ in range(POLLS_MAX):
            if any(all(word in line for word in words) for line in self.log().splitlines()):
                return True
            time.sleep(PAUSE_SECONDS)
        return False

    def get(
        self, path: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(self.url + path, headers=headers, data=body)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX, context=tls) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    @contextmanager
    def plane(self, token: str | None = None, universe: str = "main", **options: Any) -> Iterator[Plane]:
        with Plane(RemoteTransport(self.url, token=token, **options), universe) as plane:
            yield plane

    @contextmanager
    def unfinished_upload(self) -> Iterator[Callable[[], int]]:
        """Half of a blob upload; call the result to send the rest and get the status.

        Until then a request is in flight, so a server that is stopped keeps draining.
        """
        connection = http.client.HTTPConnection(*self.address, timeout=SECONDS_MAX)
        connection.putrequest("POST", "/v1/blobs")
        connection.putheader("Content-Type", "application/octet-stream")
        connection.putheader("Content-Length", "8")
        connection.endheaders(b"half")
        eventually(lambda: b"fastness_http_requests_in_flight 1.0" in self.get("/metrics")[2])

        def finish() -> int:
            connection.send(b"half")
            return connection.getresponse().status

        try:
            yield finish
        finally:
            connection.close()

    def status_of_stream(self, token: str | None = None) -> int:
        """The HTTP status of the handshake of a stream; 101 is success."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with connect_stream(self.url.replace("http", "ws", 1) + "/v1/stream", additional_headers=headers):
                return 101
        except websockets.InvalidStatus as error:
            return error.response.status_code

    def stop(self, *, times: int = 1) -> int:
        """Send SIGTERM; return the exit code."""
        for number in range(times):
            assert number == 0 or self.logged("stopping: waiting"), "the first signal was not handled"
            self.process.send_signal(signal.SIGTERM)
        return exit_code(self.process)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def free_port() -> int:
    """A free port below the ephemeral range, so that no outgoing connection can take it before it is used."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])
