"""Several `fastness serve` processes on one PostgreSQL, with faults.

    clients ──► proxy ──► server ──► proxy ──► PostgreSQL

Every server has its own two proxies. Faults: a server is killed and restarted, or paused; its network to the clients or
to PostgreSQL is cut, loses responses, or is silent for a while; PostgreSQL ends all sessions.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import psycopg

import fastness
from fastness import Plane
from tests.support.forked import start_python
from tests.support.proxy import Proxy

READY_SECONDS_MAX = 60.0  # How long a server may take to start; far more than it does.
PATIENCES = {"patient": 30.0, "impatient": 0.2}  # How long a client waits for a server that is unreachable.


class Server:
    """A server process, and the proxies on both of its sides."""

    def __init__(self, folder: Path, number: int, url: str, command: list[str]) -> None:
        """`url` is that of PostgreSQL, over a Unix socket."""
        self.number = number
        self.is_ready = threading.Event()
        self._log = folder / f"server-{number}.log"
        self._stack = ExitStack()
        parts = urlsplit(url)
        [socket_folder] = parse_qs(parts.query)["host"]
        self.database_proxy = self._stack.enter_context(Proxy(f"{socket_folder}/.s.PGSQL.5432"))
        self.client_proxy = self._stack.enter_context(Proxy(1))  # Refused, until the server is ready.
        data = f"postgresql://{parts.username}@127.0.0.1:{self.database_proxy.port}{parts.path}"
        # Without polls, a consumer that is not notified waits longer than any test.
        polls = ["--queue-poll-interval", "1h", "--queue-resilient-poll-interval", "1h"]
        self._command = [*command, "serve", "--data", data, "--port", "0", "--gc-every", "0", *polls]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self._environment["XDG_STATE_HOME"] = str(folder / f"state-{number}")
        self.planes = {name: self._connect(seconds) for name, seconds in PATIENCES.items()}
        self.start()

    def _connect(self, patience_seconds: float) -> Plane:
        return self._stack.enter_context(fastness.connect(self.client_proxy.url, patience_seconds=patience_seconds))

    def start(self) -> None:
        """Start the process; `is_ready` is set once it serves."""
        self.is_ready.clear()
        with self._log.open("ab") as log:
            self._process = start_python(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        threading.Thread(target=self._watch_start, args=(self._process,), daemon=True).start()

    def _watch_start(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            _, _, port = process.stdout.readline().strip().rpartition(":")
            if port.isdigit():
                self.client_proxy.target = int(port)
                self.is_ready.set()
            process.stdout.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_until_ready(self) -> None:
        assert self.is_ready.wait(READY_SECONDS_MAX), self.log()

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.kill()
        self._stack.close()


class Fleet:
    """The servers, and the faults that they and their networks can have. Use it in a `with` block."""

    def __init__(self, url: str, folder: Path, size: int, *, command: list[str] | None = None) -> None:
        """`command` runs the CLI; by default the installed one."""
        self._url = url
        self._stopping = threading.Event()
        self.servers: list[Server] = []
        fastness.open(url).close()  # Creates the tables.
        for number in range(size):
            run = command or ["-m", "fastness.cli"]
            self.servers.append(Server(folder, number, url, run))

    def __enter__(self) -> Self:
        for server in self.servers:
            server.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
            server.close()

    # Faults. Each lasts for `seconds`, and is over when the call returns.

    def kill(self, server: Server, seconds: float) -> None:
        """Kill the server, and start it again; it may take longer than this call to be ready."""
        server.kill()
        self._wait(seconds)
        server.start()

    def pause(self, server: Server, seconds: float) -> None:
        server.send_signal(signal.SIGSTOP)
        self._wait(seconds)
        server.send_signal(signal.SIGCONT)

    def end_sessions(self, server: Server, seconds: float) -> None:
        """Let PostgreSQL end all sessions of all servers, twice."""
        del server
        query = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'fastness'"""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(query)
            self._wait(seconds)
            connection.execute(query)

    def cut_database(self, server: Server, seconds: float) -> None:
        self._cut(server.database_proxy, seconds)

    def cut_clients(self, server: Server, seconds: float) -> None:
        self._cut(server.client_proxy, seconds)

    def mute_database(self, server: Server, seconds: float) -> None:
        self._mute(server.database_proxy, seconds)

    def mute_clients(self, server: Server, seconds: float) -> None:
        self._mute(server.client_proxy, seconds)

    def hold_database(self, server: Server, seconds: float) -> None:
        self._hold(server.database_proxy, seconds)

    def hold_clients(self, server: Server, seconds: float) -> None:
        self._hold(server.client_proxy, seconds)

    def _cut(self, proxy: Any, seconds: float) -> None:
        """Cut the connections, and refuse new ones."""
        proxy.refuses = True
        proxy.cut_all()
        self._wait(seconds)
        proxy.refuses = False

    def _mute(self, proxy: Any, seconds: float) -> None:
        """Drop the responses, then cut the connections: what was requested happens, and the requester does not know."""
        proxy.mutes = True
        self._wait(seconds / 2)
        self._cut(proxy, seconds / 2)

    def _hold(self, proxy: Any, seconds: float) -> None:
        """Pass nothing on, and everything afterwards: late requests are executed."""
        proxy.holds = True
        self._wait(seconds)
        proxy.holds = False

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)


FAULTS: dict[str, Callable[[Fleet, Server, float], None]] = {
    "kill": Fleet.kill,
    "pause": Fleet.pause,
    "end sessions": Fleet.end_sessions,
    "cut database": Fleet.cut_database,
    "cut clients": Fleet.cut_clients,
    "mute database": Fleet.mute_database,
    "mute clients": Fleet.mute_clients,
    "hold database": Fleet.hold_database,
    "hold clients": Fleet.hold_clients,
}
