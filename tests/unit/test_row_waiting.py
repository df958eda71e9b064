"""Waiting for rows: woken by the commit that changes one of them, on every backend, for threads and event loops."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import fastness
from fastness import AsyncPlane, ChangedRow, DeleteRow, KnownRow, Plane, PutRow, Row
from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument, InvalidKey
from fastness.limits import COLLECTION_PAGE_BYTES, COLLECTION_ROWS_MAX, COLLECTION_WAIT_SECONDS_MAX


@pytest.fixture
def url(backend: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    if backend == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return "memory:" if backend == "memory" else f"dir:{tmp_path_factory.mktemp('rows')}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.open(url) as plane:
        yield plane


def test_rows_that_differ_from_what_is_known_are_answered_at_once(plane: Plane) -> None:
    rows = plane.collection("results")
    rows.commit([PutRow("a", ("1",), b"one"), PutRow("b", ("2",), b"two")])
    rows.commit([PutRow("b", ("2",), b"two again")])

    found = rows.wait([KnownRow("a", ("1",)), KnownRow("b", ("2",), 1), KnownRow("b", ("3",))], wait_seconds=60)

    assert found.rows == [
        ChangedRow("a", ("1",), Row(("1",), b"one", 1)),
        ChangedRow("b", ("2",), Row(("2",), b"two again", 2)),
    ]
    assert not found.more
    assert rows.wait([KnownRow("a", ("1",), 1), KnownRow("b", ("3",))]).rows == []


def test_a_row_that_was_deleted_is_answered_as_none(plane: Plane) -> None:
    rows = plane.collection("results")
    rows.commit([PutRow("a", ("1",), b"one")])
    rows.commit([DeleteRow("a", ("1",))])
    assert rows.wait([KnownRow("a", ("1",), 1)], wait_seconds=60).rows == [ChangedRow("a", ("1",), None)]


@pytest.mark.usefixtures("no_polls")
def test_a_waiting_thread_is_woken_by_the_commit(plane: Plane) -> None:
    rows = plane.collection("results")
    known = [KnownRow("a", (f"{number}",)) for number in range(100)]
    rows.wait(known, wait_seconds=0.01)  # On PostgreSQL this starts the listener, which fires all watches once.
    with ThreadPoolExecutor() as pool:
        watches = plane._transport.services.database._watches  # type: ignore[attr-defined]
        unwatched = watches.count
        waiting = pool.submit(rows.wait, known, wait_seconds=60)
        while watches.count == unwatched and not waiting.done():
            time.sleep(0.001)
        rows.commit([PutRow("a", ("other",), b"")])
        rows.commit([PutRow("a", ("7",), b"seven")])
        assert [each.key for each in waiting.result(20).rows] == [("7",)]


@pytest.mark.usefixtures("no_polls")
async def test_a_waiting_task_is_woken_by_the_commit(url: str) -> None:
    async with fastness.open_async(url) as plane:
        assert isinstance(plane, AsyncPlane)
        rows = plane.collection("results")
        await rows.wait([KnownRow("a", ("1",))], wait_seconds=0.01)  # As above.
        watches = plane._transport.services.database._watches  # type: ignore[attr-defined]
        unwatched = watches.count
        waiting = asyncio.create_task(rows.wait([KnownRow("a", ("1",))], wait_seconds=60))
        while watches.count == unwatched and not waiting.done():
            await asyncio.sleep(0.001)
        await rows.commit([PutRow("a", ("1",), b"one")])
        found = await asyncio.wait_for(waiting, 30)
        assert [each.row.value for each in found.rows if each.row] == [b"one"]


def test_a_wait_ends_without_rows_after_its_time(plane: Plane) -> None:
    assert plane.collection("results").wait([KnownRow("a", ("1",))], wait_seconds=0.01).rows == []


def test_a_row_may_be_named_twice(plane: Plane) -> None:
    rows = plane.collection("results")
    timer = threading.Timer(0.01, rows.commit, [[PutRow("a", ("1",), b"one")]])
    timer.start()
    found = rows.wait([KnownRow("a", ("1",)), KnownRow("a", ("1",))], wait_seconds=60)
    timer.join()
    assert len(found.rows) == 2


def test_an_answer_that_would_be_too_large_says_that_there_are_more(plane: Plane) -> None:
    rows = plane.collection("results")
    large = bytes(COLLECTION_PAGE_BYTES // 8 + 1)
    known = [KnownRow("a", (number,)) for number in range(10)]
    for each in known:
        rows.commit([PutRow(each.partition, each.key, large)])
    found = rows.wait(known, wait_seconds=60)
    assert found.more
    assert 0 < len(found.rows) < len(known)
    rest = rows.wait(known[len(found.rows) :], wait_seconds=60)
    assert not rest.more
    assert len(found.rows) + len(rest.rows) == len(known)


def test_invalid_waits_are_refused(plane: Plane) -> None:
    rows = plane.collection("results")
    known = KnownRow("a", ("1",))
    with pytest.raises(EmptyBatch):
        rows.wait([])
    with pytest.raises(BatchTooLarge):
        rows.wait([known] * (COLLECTION_ROWS_MAX + 1))
    with pytest.raises(InvalidKey):
        rows.wait([KnownRow("a", ())])
    with pytest.raises(InvalidArgument, match="version"):
        rows.wait([KnownRow("a", ("1",), -1)])
    for seconds in (-1, COLLECTION_WAIT_SECONDS_MAX + 1):
        with pytest.raises(InvalidArgument, match="wait_seconds"):
            rows.wait([known], wait_seconds=seconds)
