"""The compaction of worlds continues after errors in one world or in all of them."""

from typing import Any

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Unreachable
from fastness.layers import worlds
from fastness.layers.worlds import World
from fastness.runtime.maintenance.compaction_loop import world_compaction
from tests.support.background import DrivenRunner


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
    runner, job = DrivenRunner(), world_compaction(database, store, 60.0)
    assert runner.start(job) == 60
    assert store.compacted == []
    for _ in range(2):
        assert runner.advance(60, job) == 60
    assert store.compacted == ["b", "c", "b", "c"]
    assert "world main/a" in caplog.text


def test_compaction_continues_after_a_failed_pass(
    database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise Unreachable("away")

    store: Any = Store()
    runner, job = DrivenRunner(), world_compaction(database, store, 60.0)
    runner.start(job)
    with monkeypatch.context() as patch:
        patch.setattr(database, "read", fail)
        assert runner.advance(60, job) == 1
    assert "the compaction of worlds failed" in caplog.text
    assert runner.advance(1, job) == 60
    assert store.compacted == ["a", "b", "c"]
