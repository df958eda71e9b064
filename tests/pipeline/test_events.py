"""Events in session logs are parsed, bucketed and grouped without losing valid records."""

import random
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from fastness.limits import ROWS_BATCH
from fastness.pipeline import events, lifecycles
from fastness.pipeline.lifecycles import AT_MS_MAX, Event, MailGroup, MessageGroup, PresentMessage
from fastness.pipeline.schemas import QUEUE_EVENTS

PUT = {"event": "put", "queue": "jobs", "id": "x", "correlation_id": "c", "at_ms": 5}
STORED = {"event": "stored", "to": "bob@main", "sender": "ada@main", "id": "x", "at_ms": 5}
REFUSED = {"event": "refused", "key": "deploy", "owner": "bob", "waited_ms": 7, "at_ms": 5}


def batch(*records: Any, universe: str = "main") -> pa.RecordBatch:
    lines = [record if isinstance(record, str) else msgspec.json.encode(record).decode() for record in records]
    return pa.RecordBatch.from_pydict({"universe": [universe] * len(lines), "record": pa.array(lines, pa.string())})


def messages(*payloads: tuple[int, bytes]) -> list[MessageGroup]:
    return [group for groups in events.group_messages(payload for _, payload in payloads) for group in groups]


def test_events_of_a_message_are_grouped_across_batches_in_any_order() -> None:
    logged = [
        {**PUT, "id": str(n), "event": event, "at_ms": at_ms, "attempt": at_ms}
        for n in range(500)
        for at_ms, event in enumerate(("put", "leased", "acked"))
    ]
    random.Random(7).shuffle(logged)
    by_bucket: dict[int, list[bytes]] = {}
    for begin in range(0, len(logged), 100):
        for bucket, payload in events.bucket_messages(batch(*logged[begin : begin + 100]), 4):
            by_bucket.setdefault(bucket, []).append(payload)
    assert set(by_bucket) == {0, 1, 2, 3}
    groups = [group for payloads in by_bucket.values() for each in events.group_messages(payloads) for group in each]
    assert sorted(group.id for group in groups) == sorted(str(n) for n in range(500))
    expected = {Event("put", 0, 0), Event("leased", 1, 1), Event("acked", 2, 2)}
    assert all(set(group.events) == expected for group in groups)


def test_messages_of_other_queues_and_universes_are_separate() -> None:
    payloads = [
        *events.bucket_messages(batch(PUT, {**PUT, "queue": "mails"}), 1),
        *events.bucket_messages(batch(PUT, universe="other"), 1),
    ]
    assert [group[:4] for group in messages(*payloads)] == [
        ("main", "jobs", "x", "c"),
        ("main", "mails", "x", "c"),
        ("other", "jobs", "x", "c"),
    ]


def test_event_of_a_session_log_and_of_a_history_counts_once() -> None:
    redriven = {**PUT, "event": "redriven"}  # Its deliveries begin anew: 0, which a log leaves out.
    stored = {"universe": "main", "queue": "jobs", "id": "x", "event": "redriven", "changed_at": 5, "attempt": 0}
    history = pa.RecordBatch.from_pylist([stored], QUEUE_EVENTS.schema)
    (group,) = messages(*events.bucket_messages(batch(redriven), 1), *events.bucket_history(history, 1))
    assert lifecycles.message(group.events).redrives == 1


def test_errors_that_logs_lack_come_from_the_plane() -> None:
    dead = PresentMessage("main", "jobs", "x", "dead", 5, 1, 9, "no host")
    letters = [PresentMessage("main", "jobs.dlq", "x", "ready", 5, 1, is_letter=True), dead]
    unlogged = PresentMessage("main", "jobs", "unlogged", "ready", 5, 0)
    known = events.bucket_present([*letters, unlogged], 1)
    assert messages(*known, *events.bucket_messages(batch(PUT), 1)) == [
        MessageGroup("main", "jobs", "x", "c", [Event("put", 5)], dead),
        MessageGroup("main", "jobs", "unlogged", None, [], unlogged),
    ]


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        '{"event": "put", "queue": "jobs", "id": "\\ud800", "at_ms": 5}',
        {**PUT, "at_ms": "soon"},
        {**PUT, "at_ms": None},
        {**PUT, "at_ms": -1},
        {**PUT, "at_ms": AT_MS_MAX},
        {**PUT, "id": [1]},
        {**PUT, "event": 5},
        {**PUT, "attempt": 1 << 31},
    ],
)
def test_invalid_records_are_skipped(nonsense: Any) -> None:
    assert [group.id for group in messages(*events.bucket_messages(batch(nonsense, PUT), 1))] == ["x"]
    assert list(events.bucket_mails(batch(nonsense), 1)) == []
    assert list(events.lease_events(batch(nonsense))) == []


def test_mail_and_lease_events_are_decoded() -> None:
    payloads = [
        payload for _, payload in events.bucket_mails(batch(STORED, STORED, {**STORED, "event": "confirmed"}), 1)
    ]
    assert list(events.group_mails(payloads)) == [
        [
            MailGroup(
                "main", "bob@main", "ada@main", "x", [Event("stored", 5), Event("stored", 5), Event("confirmed", 5)]
            )
        ]
    ]
    ((universe, refused),) = events.lease_events(batch(REFUSED))
    assert {"universe": universe, **msgspec.structs.asdict(refused)} == {"universe": "main", **REFUSED}


def test_groups_come_in_bounded_batches() -> None:
    payloads = events.bucket_messages(batch(*({**PUT, "id": str(n)} for n in range(ROWS_BATCH + 1))), 1)
    assert [len(groups) for groups in events.group_messages(payload for _, payload in payloads)] == [ROWS_BATCH, 1]
