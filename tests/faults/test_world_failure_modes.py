"""Failure modes of worlds: head conflicts and cursor regressions. Those of blobs are in tests/unit/test_blobs.py."""

import threading

import pytest

from fastness.errors import CursorAdvanced, HeadAdvanced, InvalidArgument
from fastness.kv import Database
from fastness.layers import inboxes, journal_records, journals, snapshots
from fastness.layers.worlds import World
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control

ADA = World("main", "ada")


def test_a_head_conflict_of_concurrent_appends_raises_head_advanced(database: Database) -> None:
    database.transact(snapshots.create_world, ADA)
    outcomes: list[object] = []

    def append(thread: int) -> None:
        batch = [journal_records.entry(canonical([thread, number])) for number in range(3)]
        try:
            outcomes.append(database.transact(journals.append, ADA, batch, expected_head=0))
        except HeadAdvanced as error:
            outcomes.append((error.expected, error.actual, error.code))

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == sorted(map(str, [0] + [(0, 3, "head_advanced")] * 7))
    assert database.read(journals.head, ADA) == 3
    authors = {record for _, record in database.read(journals.read_hot, ADA, 0, 10)}
    assert len(authors) == 3


def test_a_cursor_cannot_move_back(database: Database) -> None:
    database.transact(snapshots.create_world, ADA)
    for number in range(4):
        database.transact(inboxes.enqueue, ADA, Control(command=str(number)))
    database.transact(inboxes.drain, ADA, limit=3)
    with pytest.raises(InvalidArgument, match="only grows"):
        database.transact(inboxes.commit_cursor, ADA, expected=2, new=1)
    with pytest.raises(CursorAdvanced) as caught:
        database.transact(inboxes.commit_cursor, ADA, expected=0, new=3)
    assert (caught.value.expected, caught.value.actual) == (0, 2)
    assert database.read(inboxes.cursor, ADA) == 2
