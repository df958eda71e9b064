"""Bulk loads that can be repeated, without Spark."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

import fastness
from fastness import limits
from fastness.errors import InvalidArgument, InvalidName, MailboxFull, Unreachable
from fastness.pipeline import loading
from fastness.pipeline.loading import Load, LoadResult, check_columns, run
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.mail import MailPolicy

JOBS = Load("monday", "queues", key="id", queue="jobs")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def plane(clock: ManualClock) -> Iterator[fastness.Plane]:
    with fastness.open("memory:", clock=clock) as plane:
        yield plane


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": n, "payload": b"row %d" % n} for n in range(start, start + count)]


def payloads(plane: fastness.Plane, queue: str = "jobs") -> Counter[bytes | None]:
    return Counter(message.payload for message in plane.queue(queue).peek(10_000))


def test_repeated_load_writes_every_row_once(plane: fastness.Plane, clock: ManualClock) -> None:
    assert run(plane._transport, JOBS, rows(1_000)) == LoadResult(1_000, 0)
    assert run(plane._transport, JOBS, rows(1_000)) == LoadResult(0, 1_000)
    for message in plane.queue("jobs").receive_many(100):
        message.ack()
    clock.advance_ms(86_400_000)  # Queue idempotency keys have expired long ago.
    assert run(plane._transport, JOBS, rows(1_200)) == LoadResult(200, 1_000)
    assert plane.queue("jobs").stats().put_total == 1_200


def test_same_key_in_another_load_is_another_row(plane: fastness.Plane) -> None:
    run(plane._transport, JOBS, rows(3))
    assert run(plane._transport, Load("tuesday", "queues", "id", "jobs"), rows(3)) == LoadResult(3, 0)
    assert run(plane._transport, Load("monday", "queues", "id", "jobs", universe="other"), rows(3)) == LoadResult(3, 0)


def test_rows_with_the_same_key_are_written_once(plane: fastness.Plane) -> None:
    assert run(plane._transport, JOBS, [*rows(5), *rows(5)]) == LoadResult(5, 0)
    assert set(payloads(plane).values()) == {1}


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("is_committed", [False, True])
def test_load_that_failed_half_way_can_be_repeated(plane: fastness.Plane, fails_at: int, is_committed: bool) -> None:
    class Failing:
        """Drops a commit, or its response."""

        commits = 0

        def call(self, request: Any) -> Any:
            if isinstance(request, CommitAtomic):
                self.commits += 1
                if self.commits == fails_at + 1:
                    if is_committed:
                        plane._transport.call(request)
                    raise Unreachable("The server is gone")
            return plane._transport.call(request)

    with pytest.raises(Unreachable):
        run(Failing(), JOBS, rows(600))  # type: ignore[arg-type]
    again = run(plane._transport, JOBS, rows(600)[::-1])  # In another order, so in other batches.
    assert again.known == min((fails_at + is_committed) * limits.LOAD_BATCH_ROWS, 600)
    assert payloads(plane) == Counter(row["payload"] for row in rows(600))


def test_concurrent_loads_of_overlapping_rows_write_each_once(plane: fastness.Plane) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: run(plane._transport, JOBS, rows(500, start=100 * (n % 3))), range(8)))
    assert sum(each.written for each in found) == 700
    assert payloads(plane) == Counter(row["payload"] for row in rows(700))


def test_message_options_are_columns(plane: fastness.Plane) -> None:
    row = {
        "id": "a",
        "queue": "other",
        "payload": '{"n":1}',
        "priority": 9,
        "ttl_seconds": Decimal("1000.5"),
        "attributes": {"k": "v"},
        "correlation_id": "c-1",
        "group": None,
        "content_type": None,
        "universe": None,
    }
    run(plane._transport, JOBS, [row, {"id": "b", "payload": {"n": [1, 2]}}])
    (first,) = plane.queue("other").peek()
    assert (first.payload, first.content_type, first.priority) == (b'{"n":1}', "application/json", 9)
    assert (first.attributes, first.correlation_id, first.group) == ({"k": "v"}, "c-1", None)
    (second,) = plane.queue("jobs").peek()
    assert second.payload == b'{"n":[1,2]}'


def test_rows_of_text_are_converted_to_the_types_of_a_message(plane: fastness.Plane) -> None:
    """CSV has text only, and no value for an empty cell."""
    row = {
        "id": "a",
        "payload": '{"n":1}',
        "priority": "9",
        "max_attempts": "3",
        "ttl_seconds": "60",
        "visibility_seconds": "1.5",
        "attributes": '{"k": "v"}',
        "group": "7",
        "correlation_id": None,
    }
    run(plane._transport, JOBS, [row, {"id": "b", "payload": "{}", "priority": Decimal("2"), "group": 8}])
    first, second = sorted(plane.queue("jobs").peek(10), key=lambda message: -message.priority)
    assert (first.priority, first.group, first.attributes) == (9, "7", {"k": "v"})
    assert (second.priority, second.group) == (2, "8")
    assert set(loading._OPTIONS) == {*loading.COLUMNS["queues"][1]} - {"queue", "universe"}


@pytest.mark.parametrize(
    ("column", "value", "advice"),
    [
        ("priority", "high", "whole number"),
        ("priority", "1.5", "whole number"),
        ("priority", "NaN", "whole number"),
        ("priority", True, "whole number"),
        ("max_attempts", "", "whole number"),
        ("attributes", "k=v", "JSON object"),
        ("attributes", '{"k": 1}', "JSON object"),
        ("group", 1.5, "text"),
        ("ttl_seconds", "soon", "number of seconds"),
    ],
)
def test_value_of_the_wrong_type_is_rejected_with_advice(
    plane: fastness.Plane, column: str, value: object, advice: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"{column} of a row .*{advice}"):
        run(plane._transport, JOBS, [{"id": "a", "payload": "{}", column: value}])
    assert plane.queues() == []


def test_rows_keep_their_order_within_a_queue(plane: fastness.Plane) -> None:
    mixed = [{"id": n, "payload": b"%d" % n, "queue": f"queue-{n % 3}", "priority": 5} for n in range(300)]
    assert run(plane._transport, Load("mixed", "queues", key="id"), mixed) == LoadResult(300, 0)
    for n in range(3):
        found = [message.payload for message in plane.queue(f"queue-{n}").peek(1_000)]
        assert found == [b"%d" % each for each in range(n, 300, 3)]


def test_large_payloads_become_blobs(plane: fastness.Plane) -> None:
    large = b"x" * (limits.PAYLOAD_INLINE_BYTES_MAX + 1)
    assert run(plane._transport, JOBS, [{"id": 1, "payload": large}]) == LoadResult(1, 0)
    message = plane.queue("jobs").receive()
    assert message.read() == large
    assert message.delivery.blob == hashlib.sha256(large).hexdigest()


def test_mail_is_sent_once_even_after_a_full_mailbox(plane: fastness.Plane) -> None:
    plane.set_mail_policy(MailPolicy(pending_max=200))
    load = Load("letters", "mail", key="id")
    letters = [
        {"id": n, "sender": "ada", "recipient": f"bob-{n % 2}", "body": b"%d" % n, "content_type": "text/plain"}
        for n in range(500)
    ]
    with pytest.raises(MailboxFull):
        run(plane._transport, load, letters)
    read: list[bytes] = []
    for _ in range(10):
        for box in (plane.mailbox("bob-0"), plane.mailbox("bob-1")):
            while mails := box.read(limit=50):
                read += [mail.body for mail in mails]
                box.confirm(mails)
        try:
            run(plane._transport, load, letters)
        except MailboxFull:
            continue
    assert Counter(read) == Counter(b"%d" % n for n in range(500))


def test_rows_are_loaded_into_inboxes_as_events(plane: fastness.Plane) -> None:
    plane.world("alpha").create()
    load = Load("events", "inboxes", key="id")
    large = "y" * (limits.INBOX_INLINE_BYTES_MAX + 1)
    items = [
        {"id": 1, "world": "alpha", "schema": "order.placed", "payload": {"n": 1}},
        {"id": 2, "world": "alpha", "schema": "order.placed", "payload": large},
    ]
    assert run(plane._transport, load, items) == LoadResult(2, 0)
    assert run(plane._transport, load, items) == LoadResult(0, 2)
    (_, first), (_, second) = plane.world("alpha").inbox.read()
    assert (first.schema, first.payload) == ("order.placed", b'{"n":1}')
    assert second.payload_blob is not None
    assert plane.blobs.get(second.payload_blob) == large.encode()


def test_invalid_rows_are_rejected_with_advice(plane: fastness.Plane) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        run(plane._transport, JOBS, [{"id": None, "payload": b""}])
    with pytest.raises(InvalidArgument, match="no queue"):
        run(plane._transport, Load("monday", "queues", "id"), [{"id": 1, "payload": b""}])
    with pytest.raises(InvalidArgument, match="cannot be encoded as JSON"):
        run(plane._transport, JOBS, [{"id": 1, "payload": object()}])
    with pytest.raises(InvalidArgument, match=r"delay_seconds.*soon"):
        run(plane._transport, JOBS, [{"id": 1, "payload": b"", "delay_seconds": "soon"}])
    check_columns(JOBS, ["id", "payload", "priority"])
    with pytest.raises(InvalidArgument, match="lack the columns payload"):
        check_columns(JOBS, ["id"])
    with pytest.raises(InvalidArgument, match="unknown columns colour"):
        check_columns(JOBS, ["id", "payload", "colour"])
    with pytest.raises(InvalidArgument, match="lack the columns queue"):
        check_columns(Load("monday", "queues", "id"), ["id", "payload"])
    with pytest.raises(InvalidArgument, match="Cannot load into"):
        check_columns(Load("monday", "worlds"), ["id"])
    with pytest.raises(InvalidName):
        check_columns(Load("not a name", "mail"), ["key"])


def test_batches_are_bounded_by_bytes(plane: fastness.Plane) -> None:
    bulky = [{"id": n, "payload": b"z" * 16_000} for n in range(200)]
    sizes = [len(batch) for batch in loading._batches(JOBS, bulky)]
    assert max(sizes) <= limits.LOAD_BATCH_BYTES // 16_000 + 1
    assert sum(sizes) == 200
