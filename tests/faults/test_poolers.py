"""Connection poolers between Fastness and PostgreSQL, with a real PgBouncer."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

import fastness
from fastness.backends.postgres import PostgresDatabase
from fastness.errors import Unsupported
from fastness.kv import Transaction
from tests.support.waiting import eventually

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def put(tx: Transaction) -> None:
    tx.put(b"k", b"v")


@pytest.fixture
def pooled(postgres_url: str) -> Iterator[Callable[..., str]]:
    """Starts a PgBouncer in front of the test's database; returns the URL through it."""
    if PROGRAM is None:
        pytest.skip("no PgBouncer on the path; apt-get install pgbouncer")
    with ExitStack() as stack:

        def start(mode: str, **settings: object) -> str:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastness-pool-")))
            folder.chmod(0o777)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            parts = urlsplit(postgres_url)
            lines = {
                "listen_addr": "127.0.0.1",
                "listen_port": port,
                "unix_socket_dir": "",
                "auth_type": "any",
                "pool_mode": mode,
                "logfile": folder / "log",
                "pidfile": folder / "pid",
                **settings,
            }
            sockets = Path(parse_qs(parts.query)["host"][0])
            place = f"host={sockets} user={parts.username} dbname={parts.path[1:]}"
            text = "\n".join(f"{name} = {value}" for name, value in lines.items())
            config = folder / "pgbouncer.ini"
            config.write_text(f"[databases]\nplane = {place}\n[pgbouncer]\n{text}\n")
            config.chmod(0o644)
            words = [PROGRAM, "-q", *(["-u", sockets.owner()] if os.getuid() == 0 else []), str(config)]
            process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            url = f"postgresql://{parts.username}@127.0.0.1:{port}/plane"
            _await_answer(url, process)
            return url

        yield start


def _await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        assert process.poll() is None, "PgBouncer has ended"
        with suppress(psycopg.OperationalError):
            psycopg.connect(url, connect_timeout=5).close()
            return True
        return False

    eventually(answers, "an answer of PgBouncer")


@pytest.mark.parametrize("settings", [{}, {"server_round_robin": 1}], ids=["last-used", "round-robin"])
@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_shares_sessions_is_refused(
    pooled: Callable[..., str], postgres_url: str, mode: str, settings: dict[str, object]
) -> None:
    url = pooled(mode, **settings)
    with pytest.raises(Unsupported, match="connect to PostgreSQL directly, or set pool_mode = session"):
        PostgresDatabase(url)
    with psycopg.connect(postgres_url) as direct:
        assert direct.execute("SELECT to_regclass('fastness_kv')").fetchone() == (None,), "nothing was created"


@pytest.mark.parametrize("settings", [{}, {"server_round_robin": 1}], ids=["last-used", "round-robin"])
def test_a_pooler_that_shares_sessions_is_refused_while_others_use_it(
    pooled: Callable[..., str], settings: dict[str, object]
) -> None:
    """The pool has idle servers, and other clients take some of them in between."""
    url = pooled("transaction", **settings)
    with ExitStack() as stack:
        others = [stack.enter_context(psycopg.connect(url)) for _ in range(6)]
        for other in others:
            other.execute("SELECT 1")
        for other in others[:3]:
            other.rollback()
        with pytest.raises(Unsupported):
            PostgresDatabase(url)


def test_a_pooler_in_session_mode_is_used_like_a_server(pooled: Callable[..., str], tmp_path: Path) -> None:
    url = pooled("session")
    with fastness.open(url, activity=str(tmp_path / "logs")) as plane:
        plane.queue("jobs").put({"n": 1})
        message = plane.queue("jobs").receive(wait_seconds=10)
        assert message is not None
        assert message.json() == {"n": 1}
    with PostgresDatabase(url) as one, PostgresDatabase(url) as other, one.watch(b"k") as watch:
        while watch.wait(0):
            pass
        other.transact(put)
        assert watch.wait(60)
