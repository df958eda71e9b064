"""Upkeep: whatever is wrong with one world, or for a moment with all of them, compaction goes on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import Closed, Unreachable
from holdfast.layers import worlds
from holdfast.layers.worlds import World
from holdfast.runtime.maintenance.compaction_loop import CompactionLoop

DEADLINE_SECONDS = 30.0


class Store:
    """Compacts worlds, and fails where it is told to."""

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


@pytest.mark.parametrize("error", [Unreachable("away"), ZeroDivisionError("damaged")], ids=["foreseen", "unforeseen"])
def test_a_world_that_fails_does_not_keep_the_others_from_being_compacted(
    database: MemoryDatabase, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store: Any = Store()
    store.errors["a"] = error
    upkeep = CompactionLoop(database, store, 0.001)
    until(lambda: upkeep.passes >= 2)
    upkeep.stop()
    assert store.compacted[:4] == ["b", "c", "b", "c"]
    assert "world main/a" in caplog.text


@pytest.mark.parametrize("error", [Unreachable("away"), ZeroDivisionError("damaged")], ids=["foreseen", "unforeseen"])
def test_upkeep_goes_on_after_a_round_that_failed(
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
    upkeep = CompactionLoop(database, store, 0.001)
    until(lambda: len(store.compacted) >= 3)
    upkeep.stop()
    assert failed.is_set()
    assert "compaction was interrupted" in caplog.text


def test_a_database_that_was_closed_is_its_end(database: MemoryDatabase) -> None:
    store: Any = Store()
    store.errors["a"] = Closed("closed")
    upkeep = CompactionLoop(database, store, 0.001)
    upkeep._thread.join(DEADLINE_SECONDS)
    assert not upkeep._thread.is_alive()
    upkeep.stop()
