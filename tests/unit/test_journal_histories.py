"""The journal checker accepts the answers of a correct journal, and finds each kind of violation."""

from typing import Any

import pytest

from fastness.testing.histories import History, Operation, Violation
from fastness.testing.histories.journals import check_journal


@pytest.fixture
def history() -> History:
    return History()


def append(history: History, height: int, *values: str) -> Operation:
    """An append that returned before anything else was invoked."""
    return history.ok(history.invoke("ada", "append", "w", list(values)), height)


def read(history: History, *records: tuple[int, Any], start: int = 0, limit: int = 100) -> Operation:
    return history.ok(history.invoke("bob", "journal", "w", [start, limit]), [list(record) for record in records])


# Valid histories.


def test_an_empty_journal_passes(history: History) -> None:
    read(history)
    assert check_journal(history, "w", []) == 0


def test_acknowledged_appends_and_reads_of_them_pass(history: History) -> None:
    append(history, 1, "a")
    read(history, (0, None), (1, "a"))
    append(history, 2, "b", "c")
    read(history, (1, "a"), (2, "b"), start=1, limit=2)
    read(history, (2, "b"), (3, "c"), start=2)
    history.ok(history.invoke("ada", "append", "other", ["a"]), 7)
    assert check_journal(history, "w", [(0, None), (1, "a"), (2, "b"), (3, "c")]) == 2


@pytest.mark.parametrize("records", [[(0, "b")], [(0, "a"), (1, "b")], [(0, "b"), (1, "a")]])
def test_an_append_whose_answer_was_lost_is_stored_once_or_never(
    history: History, records: list[tuple[int, str]]
) -> None:
    history.unknown(history.invoke("ada", "append", "w", ["a"]))
    append(history, {value: height for height, value in records}["b"], "b")
    check_journal(history, "w", records)


def test_a_failed_append_that_is_not_stored_passes(history: History) -> None:
    history.failed(history.invoke("ada", "append", "w", ["a"]))
    check_journal(history, "w", [])


def test_a_read_that_overlaps_an_append_may_have_it_or_not(history: History) -> None:
    appending = history.invoke("ada", "append", "w", ["a"])
    read(history)
    read(history, (0, "a"))
    history.ok(appending, 0)
    check_journal(history, "w", [(0, "a")])


# Violations.


def test_a_gap_is_found(history: History) -> None:
    append(history, 0, "a")
    append(history, 2, "b")
    with pytest.raises(Violation, match="a gap or a doubled height before 2"):
        check_journal(history, "w", [(0, "a"), (2, "b")])


def test_a_lost_append_is_found(history: History) -> None:
    append(history, 0, "a")
    with pytest.raises(Violation, match="an acknowledged append is lost"):
        check_journal(history, "w", [])


def test_a_doubled_entry_is_found(history: History) -> None:
    append(history, 0, "a")
    with pytest.raises(Violation, match="'a' is stored at 0 and at 1"):
        check_journal(history, "w", [(0, "a"), (1, "a")])


def test_an_entry_at_another_height_is_found(history: History) -> None:
    append(history, 1, "a")
    with pytest.raises(Violation, match="is stored at 0, not where its answer says"):
        check_journal(history, "w", [(0, "a"), (1, None)])


def test_a_failed_append_that_is_stored_is_found(history: History) -> None:
    history.failed(history.invoke("ada", "append", "w", ["a"]))
    with pytest.raises(Violation, match="a failed append is stored"):
        check_journal(history, "w", [(0, "a")])


@pytest.mark.parametrize("records", [[(0, "a"), (1, None)], [(0, None), (1, "b")], [(0, "b"), (1, "a")]])
def test_an_append_that_is_stored_in_part_or_apart_is_found(
    history: History, records: list[tuple[int, str | None]]
) -> None:
    history.unknown(history.invoke("ada", "append", "w", ["a", "b"]))
    with pytest.raises(Violation, match="stored apart"):
        check_journal(history, "w", records)


def test_an_entry_without_an_append_is_found(history: History) -> None:
    with pytest.raises(Violation, match="1 entries have no append, from 0 on"):
        check_journal(history, "w", [(0, "a")])


def test_appends_against_the_order_of_real_time_are_found(history: History) -> None:
    append(history, 1, "a")
    append(history, 0, "b")
    with pytest.raises(Violation, match="stored after a later one"):
        check_journal(history, "w", [(0, "b"), (1, "a")])


def test_a_read_that_misses_an_entry_is_found(history: History) -> None:
    append(history, 0, "a")
    read(history)
    with pytest.raises(Violation, match="has not the entry at 0"):
        check_journal(history, "w", [(0, "a")])


def test_a_read_from_before_its_append_is_found(history: History) -> None:
    read(history, (0, "a"))
    append(history, 0, "a")
    with pytest.raises(Violation, match="before its append"):
        check_journal(history, "w", [(0, "a")])


def test_a_read_of_something_else_is_found(history: History) -> None:
    append(history, 0, "a")
    read(history, (0, "b"))
    with pytest.raises(Violation, match="has 'b' at 0; the journal has not"):
        check_journal(history, "w", [(0, "a")])


def test_a_read_with_a_gap_is_found(history: History) -> None:
    append(history, 0, "a", "b", "c")
    read(history, (0, "a"), (2, "c"))
    with pytest.raises(Violation, match="A read of journal 'w' has a gap"):
        check_journal(history, "w", [(0, "a"), (1, "b"), (2, "c")])


def test_a_read_that_begins_too_late_is_found(history: History) -> None:
    append(history, 0, "a", "b", "c")
    read(history, (1, "b"), limit=1)
    with pytest.raises(Violation, match="from 0 on begins at 1"):
        check_journal(history, "w", [(0, "a"), (1, "b"), (2, "c")])
