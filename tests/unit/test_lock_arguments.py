"""The lock table validates paths, modes, timeouts and levels."""

from collections.abc import Callable
from typing import Any

import pytest

from fastness import limits
from fastness.errors import InvalidArgument
from fastness.runtime.locks.table import LockTable
from tests.support.failures import Failures
from tests.unit import lock_fixtures
from tests.unit.lock_fixtures import Actor, assert_empty, done, free, row, until_waiting

table = lock_fixtures.table
loop = lock_fixtures.loop
new_actor = lock_fixtures.new_actor
ada = lock_fixtures.ada
bob = lock_fixtures.bob


async def test_an_invalid_path_is_rejected(table: LockTable) -> None:
    failures = Failures()
    paths: list[tuple[Any, str]] = [
        (["table", "task"], "database, entity_type, record_id"),
        (["record_id", "123"], "type/id"),
        (["record_id", "task/"], "type/id"),
        (["record_id", "/1"], "type/id"),
        (["record_id"], "type/id"),
        (["record_id", ""], "type/id"),
        (["entity_type"], "a name without a slash"),
        (["entity_type", ""], "a name without a slash"),
        (["entity_type", "task/1"], "a name without a slash"),
        (["database", "main"], "without a name"),
        (["record_id", "task/" + "x" * limits.LOCK_NAME_CHARACTERS_MAX], f"{limits.LOCK_NAME_CHARACTERS_MAX}"),
        (["record_id", 7], "strings"),
        ([7, "task/1"], "strings"),
        (["record_id", None], "strings"),
        (["record_id", b"task/1"], "strings"),
        ([["record_id"], "task/1"], "strings"),
        ([], "0 parts"),
        (["record_id", "task/1", "x"], "3 parts"),
        ("record_id", "a list of a level and a name"),
        (None, "a list of a level and a name"),
        (7, "a list of a level and a name"),
        ({"record_id": "task/1"}, "a list of a level and a name"),
    ]
    for path, message in paths:
        with failures.of((path, message)):
            with pytest.raises(InvalidArgument, match=message):
                table.acquire(path)
            with pytest.raises(InvalidArgument, match=message):
                await table.acquire_async(path)
            with pytest.raises(InvalidArgument, match=message):
                table.acquire_all([row(1), path])
            with pytest.raises(InvalidArgument, match=message):
                await table.acquire_all_async([row(1), path])
            assert_empty(table)
    failures.check()


async def test_other_invalid_arguments_are_rejected() -> None:
    timeouts: list[Any] = [-1, -0.001, float("nan"), float("inf"), float("-inf"), "1", True, [], 1j]
    cases: list[tuple[Callable[[LockTable, Any], object], str | None, list[Any]]] = [
        (LockTable.acquire_all, None, ["record_id", ["record_id", "task/1"], None, 7, [None]]),
        (
            lambda table, mode: table.acquire(row(1), mode),
            "IS, IX, S, X",
            ["", "SIX", "x", "EXCLUSIVE", None, 3, [], {}],
        ),
        (lambda table, seconds: table.acquire(row(1), timeout_seconds=seconds), "timeout_seconds", timeouts),
        (lambda _, levels: LockTable(levels), None, [(), "database", ("a", ""), ("a", 7), ("a", "A"), 7, None]),
        (lambda _, number: LockTable(waiters_max=number), "waiters_max", [-1, 1.5, "1", None, True]),
    ]
    failures = Failures()
    for call, message, values in cases:
        for value in values:
            table = LockTable()
            with failures.of((call, value)):
                with pytest.raises(InvalidArgument, match=message):
                    call(table, value)
                assert_empty(table)
    for seconds in timeouts:
        table = LockTable()
        with failures.of(seconds):
            with pytest.raises(InvalidArgument, match="timeout_seconds"):
                await table.acquire_async(row(1), timeout_seconds=seconds)
            assert_empty(table)
    failures.check()


def test_a_very_long_timeout_is_accepted(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1), timeout_seconds=1e300))
    waiting = bob.acquire(row(1), timeout_seconds=1e300)
    until_waiting(table, 1)
    held.release()
    done(waiting)


def test_level_names_are_case_insensitive(table: LockTable) -> None:
    with table.acquire(("RECORD_ID", "task/1")) as held:
        assert held.paths == [("record_id", "task/1")]
        assert not free(table, row(1))
        assert not free(table, ["Database", ""])
    assert LockTable(("Outer", "inner")).acquire(["OUTER"]).paths == [("Outer", "")]


def test_levels_nest_as_declared() -> None:
    table = LockTable(("cluster", "database", "table", "row"))
    with table.acquire(["row", "main/task/1"]):
        assert [(tuple(info.path), info.mode) for info in table.holders()] == [
            (("cluster", ""), "IX"),
            (("database", "main"), "IX"),
            (("table", "main/task"), "IX"),
            (("row", "main/task/1"), "X"),
        ]
        assert not free(table, ["table", "main/task"], "S")
        assert free(table, ["table", "other/task"])
    with pytest.raises(InvalidArgument, match="database/table/row"):
        table.acquire(["row", "task/1"])
    with pytest.raises(InvalidArgument, match="type/id"):
        table.acquire(["table", "main/task/1"])
