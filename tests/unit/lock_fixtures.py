"""Fixtures for the tests of the lock table: threads and tasks that acquire locks."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from fastness.errors import LockTimeout
from fastness.runtime.locks.table import Held, LockTable
from tests.support.waiting import eventually

DATABASE = ["database"]
TASKS = ["entity_type", "task"]
NOTES = ["entity_type", "note"]
MODES = ("IS", "IX", "S", "X")
COMPATIBLE = {"IS": "IS IX S", "IX": "IS IX", "S": "IS S", "X": ""}
COVERS = {"IS": "IS", "IX": "IS IX", "S": "IS S", "X": "IS IX S X"}
SECONDS_MAX = 60.0  # Far longer than any test takes, so that a failing test ends.
TIMEOUT_SECONDS = 2 * SECONDS_MAX  # Longer than a test: a claim that is only woken by its timeout fails.


def row(id: int | str, kind: str = "task") -> list[str]:
    return ["record_id", f"{kind}/{id}"]


class Actor(Protocol):
    """An owner of locks that executes its calls one after the other."""

    def acquire(
        self, path: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS
    ) -> "Future[Held]": ...

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS
    ) -> "Future[Held]": ...


class ThreadActor:
    def __init__(self, table: LockTable, name: str) -> None:
        self.table = table
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def acquire(self, path: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS) -> "Future[Held]":
        return self.pool.submit(self.table.acquire, path, mode, timeout_seconds=timeout_seconds)

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS
    ) -> "Future[Held]":
        return self.pool.submit(self.table.acquire_all, paths, mode, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        self.pool.shutdown()


class TaskActor:
    def __init__(self, table: LockTable, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.table = table
        self.loop = loop
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.life = asyncio.run_coroutine_threadsafe(self.live(name), loop)

    async def live(self, name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        while (job := await self.jobs.get()) is not None:
            coroutine, future = job
            try:
                future.set_result(await coroutine)
            except Exception as error:
                future.set_exception(error)

    def acquire(self, path: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS) -> "Future[Held]":
        return self.submit(self.table.acquire_async(path, mode, timeout_seconds=timeout_seconds))

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = TIMEOUT_SECONDS
    ) -> "Future[Held]":
        return self.submit(self.table.acquire_all_async(paths, mode, timeout_seconds=timeout_seconds))

    def submit(self, coroutine: Any) -> "Future[Held]":
        future: Future[Held] = Future()
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, (coroutine, future))
        return future

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, None)
        self.life.result(SECONDS_MAX)


@pytest.fixture
def table() -> LockTable:
    return LockTable()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["threads", "tasks", "both"])
def new_actor(
    request: pytest.FixtureRequest, table: LockTable, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[str], Actor]]:
    actors: list[ThreadActor | TaskActor] = []

    def new_actor(name: str) -> Actor:
        is_thread = request.param == "threads" or (request.param == "both" and len(actors) % 2 == 0)
        actors.append(ThreadActor(table, name) if is_thread else TaskActor(table, name, loop))
        return actors[-1]

    yield new_actor
    for actor in actors:
        actor.close()


@pytest.fixture
def ada(new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("ada")


@pytest.fixture
def bob(ada: Actor, new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("bob")


@pytest.fixture
def cyd(bob: Actor, new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("cyd")


def done(future: "Future[Held]") -> Held:
    return future.result(SECONDS_MAX)


def until_waiting(table: LockTable, number: int) -> None:
    eventually(lambda: sum(level.waiting for level in table.stats().values()) == number)


def free(table: LockTable, path: list[str], mode: str = "X") -> bool:
    """Whether another owner could acquire `path` without waiting."""

    def attempt() -> bool:
        try:
            table.acquire(path, mode, timeout_seconds=0).release()
        except LockTimeout:
            return False
        return True

    with ThreadPoolExecutor(1) as stranger:
        return stranger.submit(attempt).result()


def assert_empty(table: LockTable) -> None:
    """Nothing is held or waited for, and no state of past names and owners is left."""
    assert table.holders() == []
    registry = table._registry
    assert not any(
        (
            registry.held,
            registry.lines,
            registry.owners,
            registry.completed,
            registry.unnoticed,
            registry.waiting,
            table._pending_releases,
        )
    )
