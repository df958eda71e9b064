"""Searching the messages of a queue, on every backend. The properties have random searches."""

from typing import Any

import pytest

from fastness.errors import InvalidArgument
from fastness.kv import Database
from fastness.layers import queues
from fastness.limits import SEARCH_ENTRIES
from fastness.plane.executor import execute
from fastness.testing.clock import ManualClock
from fastness.wire.queues import FoundMessages, SearchMessages
from tests.unit.queue_calls import lease, lease_one, put, reject


def search(database: Database, **wanted: Any) -> FoundMessages:
    found: FoundMessages = database.read(execute, SearchMessages("jobs", **wanted))
    return found


def found(database: Database, **wanted: Any) -> list[str]:
    return [each.id for each in search(database, **wanted).messages]


def test_a_search_finds_messages_by_state_key_owner_age_and_error(database: Database, clock: ManualClock) -> None:
    dead, leased = (each.id for each in put(database, b"1", b"2", priority=9))
    reject(database, lease_one(database), "Timeout of the model")
    clock.advance_ms(5_000)
    held = lease_one(database, owner="worker-7")
    (keyed,) = (each.id for each in put(database, b"3", key="tenant"))
    (delayed,) = (each.id for each in put(database, b"4", delay_seconds=60.0))
    assert found(database) == [keyed, delayed, leased, dead]
    assert found(database, states=["dead", "delayed"]) == [delayed, dead]
    assert found(database, key="tenant") == [keyed]
    assert found(database, owner="worker-7") == [leased] == [queues.format_id(held.id)]
    assert found(database, error="tIMEOUT") == [dead]
    assert found(database, older_than_seconds=5.0) == [leased, dead]
    assert found(database, newer_than_seconds=5.0) == [keyed, delayed]
    assert found(database, states=["ready"], owner="worker-7") == []


def test_a_page_reads_a_bounded_number_of_records_and_continues(database: Database) -> None:
    for _ in range(SEARCH_ENTRIES // 250 + 1):
        put(database, *[b"x"] * 250)
    (last,) = put(database, b"x", priority=0, key="tenant")
    page = search(database, key="tenant")
    assert (page.messages, page.scanned) == ([], SEARCH_ENTRIES)
    page = search(database, key="tenant", after=page.next)
    assert ([each.id for each in page.messages], page.scanned, page.next) == ([last.id], 251, None)


def test_messages_of_one_lease_are_found_page_by_page(database: Database) -> None:
    ids = [each.id for each in put(database, b"1", b"2", b"3")]
    lease(database, 3)
    pages = []
    after: str | None = ""
    while after is not None:
        page = search(database, states=["leased"], limit=1, after=after)
        pages.append([each.id for each in page.messages])
        after = page.next
    assert pages == [[id] for id in ids]


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": 1_001},
        {"states": ["gone"]},
        {"error": ""},
        {"owner": "x" * 257},
        {"older_than_seconds": -1.0},
        {"after": "nonsense"},
        {"after": "r.xy.0"},
    ],
    ids=str,
)
def test_an_invalid_search_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        search(database, **wrong)
