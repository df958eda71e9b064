"""What session logs tell is taken out of its JSON and dealt out, and nothing that makes sense is lost on the way."""

import random
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.limits import ROWS_BATCH
from holdfast.pipeline import events
from holdfast.pipeline.lifecycles import AT_MS_MAX, Event, MailGroup, MessageGroup

PUT = {"event": "put", "queue": "jobs", "id": "x", "correlation_id": "c", "at_ms": 5}
STORED = {"event": "stored", "to": "bob@main", "sender": "ada@main", "id": "x", "at_ms": 5}
REFUSED = {"event": "refused", "key": "deploy", "owner": "bob", "waited_ms": 7, "at_ms": 5}


def batch(*records: Any, universe: str = "main") -> pa.RecordBatch:
    lines = [record if isinstance(record, str) else msgspec.json.encode(record).decode() for record in records]
    return pa.RecordBatch.from_pydict({"universe": [universe] * len(lines), "record": pa.array(lines, pa.string())})


def messages(*hands: tuple[int, bytes]) -> list[MessageGroup]:
    return [group for groups in events.gather_messages(hand for _, hand in hands) for group in groups]


def test_all_that_is_told_of_a_message_comes_together_whatever_batch_and_order_it_came_in() -> None:
    told = [
        {**PUT, "id": str(n), "event": event, "at_ms": at_ms, "attempt": at_ms}
        for n in range(500)
        for at_ms, event in enumerate(("put", "leased", "acked"))
    ]
    random.Random(7).shuffle(told)
    by_bucket: dict[int, list[bytes]] = {}
    for begin in range(0, len(told), 100):
        for bucket, hand in events.deal_messages(batch(*told[begin : begin + 100]), 4):
            by_bucket.setdefault(bucket, []).append(hand)
    assert set(by_bucket) == {0, 1, 2, 3}
    groups = [group for hands in by_bucket.values() for each in events.gather_messages(hands) for group in each]
    assert sorted(group.id for group in groups) == sorted(str(n) for n in range(500))
    expected = {Event("put", 0, 0), Event("leased", 1, 1), Event("acked", 2, 2)}
    assert all(set(group.events) == expected for group in groups)


def test_messages_of_other_queues_and_universes_are_others() -> None:
    hands = [
        *events.deal_messages(batch(PUT, {**PUT, "queue": "mails"}), 1),
        *events.deal_messages(batch(PUT, universe="other"), 1),
    ]
    assert [group[:4] for group in messages(*hands)] == [
        ("main", "jobs", "x", "c"),
        ("main", "mails", "x", "c"),
        ("other", "jobs", "x", "c"),
    ]


def test_old_logs_tell_less_and_the_plane_knows_the_rest() -> None:
    old = {name: PUT[name] for name in ("event", "queue", "id", "at_ms")}
    known = events.deal_errors([("main", "jobs", "x", "no host"), ("main", "jobs", "unheard of", "no host")], 1)
    assert messages(*known, *events.deal_messages(batch(old), 1)) == [
        MessageGroup("main", "jobs", "x", None, [Event("put", 5)], "no host")
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
def test_records_that_make_no_sense_are_left_out(nonsense: Any) -> None:
    assert [group.id for group in messages(*events.deal_messages(batch(nonsense, PUT), 1))] == ["x"]
    assert list(events.deal_mails(batch(nonsense), 1)) == []
    assert events.leases(batch(nonsense)).num_rows == 0


def test_mails_and_leases_are_told_as_they_were() -> None:
    hands = [hand for _, hand in events.deal_mails(batch(STORED, STORED, {**STORED, "event": "confirmed"}), 1)]
    assert list(events.gather_mails(hands)) == [
        [
            MailGroup(
                "main", "bob@main", "ada@main", "x", [Event("stored", 5), Event("stored", 5), Event("confirmed", 5)]
            )
        ]
    ]
    assert events.leases(batch(REFUSED)).to_pylist() == [{"universe": "main", **REFUSED}]
    assert events.leases(batch()).schema == events.LEASES


def test_groups_come_a_bounded_number_at_a_time() -> None:
    hands = events.deal_messages(batch(*({**PUT, "id": str(n)} for n in range(ROWS_BATCH + 1))), 1)
    assert [len(groups) for groups in events.gather_messages(hand for _, hand in hands)] == [ROWS_BATCH, 1]
