"""The compaction loop continues after errors in one world or in all of them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Closed, Unreachable
from fastness.layers import worlds
from fastness.layers.worlds import World
from fastness.runtime.maintenance.compaction_loop import CompactionLoop

DEADLINE_SECONDS = 30.0


class Store:
    """Records compacted worlds, and can be made to fail."""

    def __init__(self) -> None:
        self.compacted: list[str] = []
        self.errors: dict[str, Exception] = {}

    def compact(self, world: World, **_: Any) -> Any:
        if world.name in self.errors:
            raise self.errors[world.name]
        self.compacted.append(world.name)
        return worlds_compacted


class _Compacted:
    segments = 0


worlds_compacted = _Compacted()


def until(reached: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(round(DEADLINE_SECONDS / 0.005)):
        if reached():
            return
        pause.wait(0.005)
    raise AssertionError("it did not happen")


@pytest.fixture
def database() -> MemoryDatabase:
    database = MemoryDatabase()
    for name in ("a", "b", "c"):
        database.transact(worlds.create, World("main", name))
    return database


@pytest.mark.parametrize("error", [Unreachable("away"), ZeroDivisionError("damaged")], ids=["expected", "unexpected"])
def test_a_failing_world_does_not_stop_the_compaction_of_others(
    database: MemoryDatabase, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store: Any = Store()
    store.errors["a"] = error
    loop = CompactionLoop(database, store, 0.001)
    until(lambda: loop.passes >= 2)
    loop.stop()
    assert store.compacted[:4] == ["b", "c", "b", "c"]
    assert "world main/a" in caplog.text


@pytest.mark.parametrize("error", [Unreachable("away"), ZeroDivisionError("damaged")], ids=["expected", "unexpected"])
def test_compaction_continues_after_a_failed_pass(
    database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store: Any = Store()
    read, failed = database.read, threading.Event()

    def fail_once(*args: Any, **options: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise error
        return read(*args, **options)

    monkeypatch.setattr(database, "read", fail_once)
    loop = CompactionLoop(database, store, 0.001)
    until(lambda: len(store.compacted) >= 3)
    loop.stop()
    assert failed.is_set()
    assert "compaction was interrupted" in caplog.text


def test_a_closed_database_ends_the_thread(database: MemoryDatabase) -> None:
    store: Any = Store()
    store.errors["a"] = Closed("closed")
    loop = CompactionLoop(database, store, 0.001)
    loop._thread.join(DEADLINE_SECONDS)
    assert not loop._thread.is_alive()
    loop.stop()
