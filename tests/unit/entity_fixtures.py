"""Fixtures and short forms for the tests of entities."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane
from fastness.layers.entities import EntityKey
from fastness.testing.clock import ManualClock

PATIENCE_SECONDS = 30.0  # A generous deadline for conditions that the tests wait for.
TASK = EntityKey("main", "task", "1")


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(8)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # Closing the plane wakes threads that still wait.


def logged(plane: Plane, **which: Any) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each.record) for each in plane.activity.read(**which).records]


def rows_locked(plane: Plane) -> int:
    return plane.locks.stats()["record_id"].acquisitions


def row_locks(plane: Plane, count: int) -> int:
    """How many rows writes have to lock: none where processes share locks, unless another caller has locked them."""
    return 0 if plane._transport.locks is None else count
