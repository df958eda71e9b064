"""The backends for tests: memory, RocksDB, and a real PostgreSQL that the test run starts."""

import os
import signal
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Database
from fastness.runtime.consumer_options import Polling
from fastness.testing.clock import ManualClock
from tests.support.backends import BACKENDS
from tests.support.depth import Depth, depth_of, first_seed_of
from tests.support.postgres import SERVER, THROWAWAY, PostgresServer

PARTS = 16
COSTLY = {"spark", "browser"}  # Fixtures.
STORED = {"rocksdb", "dir", "postgres", "postgresql"}
UNIT = Path(__file__).parent / "unit"

settings.register_profile(
    "suite", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("nightly", settings.get_profile("suite"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=int, help=f"which of the {PARTS} parts of the tests that rotate to run, and quickly"
    )
    parser.addoption("--whole", action="append", default=[], help="a file whose tests marked `rotating` all run")
    parser.addoption("--kills", type=int, help="how often the crash tests kill their child process")
    parser.addoption("--flips", type=float, help="how many times as many bits the bit flip tests flip")
    parser.addoption("--flip-seed", type=int, help="the seed of the bit flip tests")
    parser.addoption(
        "--table-messages", type=int, default=10_000_000, help="how many messages go through one table of PostgreSQL"
    )
    parser.addoption("--histories", type=int, help="how many histories of several servers are checked")
    parser.addoption("--history-seed", type=int, help="the seed of the only history of several servers to check")
    parser.addoption(
        "--postgres-isolation",
        choices=("locks", "serializable"),
        default="locks",
        help="how transactions on PostgreSQL are kept apart in the conformance suite and the property tests",
    )
    parser.addoption("--image-seed", type=int, help="the seed of the only image that the storage tests build")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests that rotate, keep those of the part that is asked for."""
    part = config.getoption("--part")
    if part is None:
        return
    whole = [config.rootpath / file for file in config.getoption("--whole")]
    in_memory = {(item.path, name) for item in items for name in [_test_on(item, {"memory"})] if name}

    def rotates(item: pytest.Item) -> bool:
        """A test that is marked so, or needs Spark or a browser; and a unit test that runs in memory, on a disk."""
        if item.get_closest_marker("rotating"):
            return True
        if item.get_closest_marker("always"):
            return False
        stored = item.path.is_relative_to(UNIT) and (item.path, _test_on(item, STORED)) in in_memory
        return stored or not COSTLY.isdisjoint(getattr(item, "fixturenames", ()))

    others = {
        item
        for item in items
        if item.path not in whole and zlib.crc32(item.nodeid.encode()) % PARTS != part % PARTS and rotates(item)
    }
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _test_on(item: pytest.Item, backends: set[str]) -> str | None:
    """The name of a test without its parameters, if one of them is one of these backends."""
    call = getattr(item, "callspec", None)
    values = [] if call is None else [value for value in call.params.values() if isinstance(value, str)]
    return getattr(item, "originalname", None) if backends & set(values) else None


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As in the background of a shell. Tests send interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def depth(request: pytest.FixtureRequest) -> Depth:
    """How often this run repeats what has random faults."""
    return depth_of(request.config)


@pytest.fixture(scope="session")
def first_seed(request: pytest.FixtureRequest) -> int:
    """The first seed of what this run simulates."""
    return first_seed_of(request.config)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server: that of the test run, or one for this process."""
    if url := os.environ.get(SERVER):
        yield url
        return
    server = PostgresServer(**THROWAWAY)
    yield server.url
    server.close()


@pytest.fixture
def own_postgres_url() -> Iterator[str]:
    """The URL of a PostgreSQL server that only this test uses, so that it may kill it."""
    server = PostgresServer(**THROWAWAY)
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def _spare_databases() -> list[str]:
    """The names of empty databases that no test uses: to empty one takes a tenth of the time of creating one."""
    return []


@pytest.fixture
def postgres_url(postgres_server: str, _spare_databases: list[str]) -> Iterator[str]:
    """The URL of an empty database that no other test uses."""
    if _spare_databases:
        name = _spare_databases.pop()
    else:
        name = f"test_{os.getpid()}_{uuid.uuid4().hex}"
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
    url = postgres_server.replace("/postgres?", f"/{name}?")
    yield url
    with suppress(psycopg.Error):
        if _emptied(url):
            _spare_databases.append(name)
        else:
            with psycopg.connect(postgres_server, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _emptied(url: str) -> bool:
    """Empty a database, unless the test has left a connection open, which could disturb the next test."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        if connection.execute(others).fetchone() is not None:
            return False
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return True


@pytest.fixture
def open_postgres(postgres_url: str, request: pytest.FixtureRequest) -> Callable[..., Database]:
    """Opens the test's PostgreSQL database, with the isolation of `--postgres-isolation`."""
    return partial(PostgresDatabase, postgres_url, isolation=request.config.getoption("--postgres-isolation"))


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """A test that leaves a signal handler behind would change what an interrupt does in later tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A Spark session of an earlier test has its own.
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a commit ends a wait early: waiting callers do not poll, and watches do not fire by themselves."""
    monkeypatch.setattr(Polling, "pause_ms", lambda _, most_ms: most_ms)
    monkeypatch.setattr(limits, "WATCH_RECHECK_SECONDS", 3_600.0)


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
    opened: Callable[..., Database] = request.getfixturevalue("open_postgres")
    return opened


@pytest.fixture
def database(open_database: Callable[..., Database], clock: ManualClock) -> Iterator[Database]:
    """An open database on every backend, with a manual clock."""
    with open_database(clock=clock) as database:
        yield database
