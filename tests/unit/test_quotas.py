"""Quotas of universes: what is over one is refused, writes nothing, and is told to the caller."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane
from fastness.errors import InvalidArgument, QuotaExceeded
from fastness.kv import Transaction
from fastness.limits import QUOTA_CALLER_SECONDS, QUOTA_COUNT_MAX, QUOTA_RATE_MAX
from fastness.runtime.quotas import UsageCount
from fastness.testing.clock import ManualClock
from fastness.wire.collections import PutRow
from fastness.wire.queues import NewMessage
from fastness.wire.quotas import Quota
from tests.support.waiting import eventually

WAIT_SECONDS = 60.0


@pytest.fixture(params=["memory", "dir", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return "memory:" if request.param == "memory" else f"dir:{tmp_path / 'data'}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.open(url, universe="shop") as plane:
        yield plane


def when_there_is_room(put: Callable[[], Any]) -> Any:
    """The result of `put`, once it is accepted: on PostgreSQL only a measurement sees what was removed."""

    def accepted() -> list[Any]:
        with suppress(QuotaExceeded):
            return [put()]
        return []

    [result] = eventually(accepted, "room that a measurement has seen")
    return result


def fill(put: Callable[[], Any]) -> tuple[int, QuotaExceeded]:
    """Put until it is refused; how often that was not the case, and the error."""
    for done in range(10_000):
        try:
            put()
        except QuotaExceeded as error:
            return done, error
    raise AssertionError("nothing was refused")


def test_a_put_over_the_quota_is_refused_and_writes_nothing(plane: Plane) -> None:
    plane.quotas.set("shop", Quota(messages=3))
    jobs, later = plane.queue("jobs"), plane.queue("later")
    jobs.put(b"1")
    later.put(b"2", delay_seconds=3_600)
    jobs.put(b"3", idempotency_key="three")
    put: Callable[[], object]
    for put in (
        lambda: jobs.put(b"4"),
        lambda: plane.queue("new").put(b"4"),
        lambda: later.put(b"4", unique_key="four"),
    ):
        with pytest.raises(QuotaExceeded, match="fastness quota set shop --messages 6") as caught:
            put()
        error = caught.value
        assert (error.universe, error.kind, error.limit, error.used) == ("shop", "messages", 3, 3)
    assert jobs.put(b"3", idempotency_key="three").duplicate, "a repeated put adds nothing"
    assert plane.queues() == ["jobs", "later"]
    assert (jobs.stats().ready, later.stats().delayed) == (2, 1)
    assert plane.quotas.usage().messages == 3


def test_a_batch_is_refused_as_a_whole_and_each_batch_by_itself(plane: Plane) -> None:
    plane.quotas.set("shop", Quota(messages=5))
    jobs = plane.queue("jobs")
    jobs.put_many([NewMessage(b"")] * 3)
    with pytest.raises(QuotaExceeded, match="3 messages of 5, its quota, and 3 more"):
        jobs.put_many([NewMessage(b"")] * 3)
    with pytest.raises(QuotaExceeded):
        jobs.put_many([NewMessage(b"", idempotency_key=str(number)) for number in range(3)])
    assert jobs.stats().ready == 3
    when_there_is_room(lambda: jobs.put_many([NewMessage(b"")] * 2))
    assert jobs.stats().ready == 5


def test_an_ack_a_purge_and_a_higher_quota_make_room(plane: Plane) -> None:
    plane.quotas.set("shop", Quota(messages=2))
    jobs = plane.queue("jobs")
    jobs.put_many([NewMessage(b"")] * 2)
    message = jobs.receive()
    assert message is not None
    with pytest.raises(QuotaExceeded):  # It is leased, and may return.
        jobs.put(b"")
    message.ack()
    when_there_is_room(lambda: jobs.put(b""))
    assert plane.quotas.usage().messages == 2
    jobs.purge()
    when_there_is_room(lambda: jobs.put_many([NewMessage(b"")] * 2))
    plane.quotas.set("shop", Quota(messages=3))
    jobs.put(b"")
    fill(lambda: jobs.put(b""))
    plane.quotas.clear("shop")
    jobs.put_many([NewMessage(b"")] * 10)
    assert plane.quotas.get() == Quota()


def test_dead_letters_count_and_a_full_universe_can_be_drained_and_deleted(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many([NewMessage(b"", max_attempts=1)] * 2)
    plane.quotas.set("shop", Quota(messages=1, bytes=0))
    for message in jobs.receive_many(2):
        message.nack(error="broken")
    assert jobs.stats().dead == 2
    assert plane.quotas.usage().messages == 2, "it held more than its quota before it was set"
    with pytest.raises(QuotaExceeded):
        jobs.put(b"")
    assert jobs.redrive() == 2
    for message in jobs.receive_many(2):
        message.ack()
    eventually(lambda: plane.quotas.usage().messages == 0)
    jobs.delete()
    assert "jobs" not in plane.queues()


def test_bytes_are_limited_for_everything_that_stores(plane: Plane) -> None:
    plane.quotas.set("shop", Quota(bytes=40_000))
    numbers, text = count(), "z" * 12_000
    puts: list[Callable[[], object]] = [
        lambda: plane.queue("jobs").put(b"x" * 3_000),
        lambda: plane.blobs.put(b"%015000d" % next(numbers)),
        lambda: plane.state("s").update({f"{next(numbers)}": text}),
        lambda: plane.entities.write("order", f"{next(numbers)}", {"text": text}),
        lambda: plane.collection("notes").commit([PutRow("p", (next(numbers),), text.encode())]),
        lambda: plane.mailbox("a").send("b", b"m" * 3_000),
    ]
    for put in puts:
        _, error = fill(put)
        assert (error.universe, error.kind, error.limit) == ("shop", "bytes", 40_000)
        assert "fastness quota set shop --bytes" in str(error)
    used = plane.quotas.usage()
    assert used.bytes is not None
    assert 20_000 < used.bytes <= 40_000
    assert used.bytes_measured_ms > 0
    plane.queue("jobs").purge()  # What frees space is not refused,
    when_there_is_room(lambda: plane.queue("jobs").put(b"x" * 3_000))  # and makes room.


def test_a_schedule_of_a_full_universe_leaves_a_run_out(clock: ManualClock) -> None:
    with fastness.open("memory:", universe="shop", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put(b"")
        plane.quotas.set("shop", Quota(messages=1))
        before = jobs.schedule("minutely", "* * * * *", b"").next_ms
        clock.advance_ms(60_000)
        jobs.receive_many(2)[0].ack()
        assert jobs.stats().ready == 0, "the run was left out"
        assert jobs.schedules()[0].next_ms == before + 60_000
        clock.advance_ms(60_000)
        assert len(jobs.receive_many(2)) == 1, "the next one had room"


def test_a_universe_without_a_quota_pays_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_of_a_put(plane: Plane) -> int:
        reads = 0
        get = Transaction.get

        def counted(tx: Transaction, key: bytes) -> bytes | None:
            nonlocal reads
            reads += 1
            return get(tx, key)

        queue = plane.queue("jobs")
        queue.put(b"")
        with monkeypatch.context() as patched:
            patched.setattr(Transaction, "get", counted)
            queue.put(b"")
        return reads

    with fastness.open(url, universe="free") as plane:
        assert plane._transport.services.database.usage is None  # type: ignore[attr-defined]
        before = reads_of_a_put(plane)
        plane.quotas.set("shop", Quota(messages=10, bytes=1_000_000, rate_per_second=1.0))
        assert reads_of_a_put(plane) == before
        plane.quotas.clear("shop")
        assert plane._transport.services.database.usage is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("quota", [Quota(messages=-1), Quota(bytes=QUOTA_COUNT_MAX + 1), Quota(rate_per_second=0.0)])
def test_a_limit_out_of_range_is_refused(quota: Quota) -> None:
    with fastness.open("memory:") as plane:
        with pytest.raises(
            InvalidArgument,
            match=f"give a (whole )?number from .* to ({QUOTA_COUNT_MAX:,}|{QUOTA_RATE_MAX:,.0f}), or None",
        ):
            plane.quotas.set("shop", quota)
        assert plane.quotas.get("shop") == Quota()


def test_quotas_survive_a_restart(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with fastness.open(url, universe="shop") as plane:
        plane.quotas.set("shop", Quota(messages=1))
        plane.queue("jobs").put(b"")
    with fastness.open(url, universe="shop") as plane:
        with pytest.raises(QuotaExceeded):
            plane.queue("jobs").put(b"")
        assert plane.quotas.usage().messages == 1


def test_threads_of_one_process_never_exceed_a_quota(plane: Plane) -> None:
    plane.quotas.set("shop", Quota(messages=50))
    accepted = [0] * 4

    def put(number: int) -> None:
        accepted[number], _ = fill(lambda: plane.queue(f"jobs-{number}").put(b""))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(accepted) == plane.quotas.usage().messages == 50


def test_a_server_accepts_and_counts_puts_while_it_measures_a_new_quota(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fastness.open(postgres_url, universe="shop") as plane, fastness.open(postgres_url, universe="shop") as other:
        quotas = plane._transport.services.quotas  # type: ignore[attr-defined]
        measure, found = quotas._measure_messages, list[tuple[int, QuotaExceeded]]()

        def put_meanwhile(universe: Any) -> None:
            if not found:
                found.append(fill(lambda: plane.queue("jobs").put(b"")))
            measure(universe)

        monkeypatch.setattr(quotas, "_measure_messages", put_meanwhile)
        other.quotas.set("shop", Quota(messages=3))
        quotas.load()
        [(accepted, error)] = found
        assert (accepted, error.used, error.limit) == (3, 3, 3), "it accepts at most the quota by itself"
        assert plane.quotas.usage().messages == 3
        with pytest.raises(QuotaExceeded):
            plane.queue("jobs").put(b"")


def test_what_callers_add_counts_for_a_minute_as_one_number_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, added = 1_000.25, []
    monkeypatch.setattr("fastness.runtime.quotas.monotonic", lambda: now)
    counted = UsageCount()
    counted.set_measured(7, 1, 0, 0.0)
    for _ in range(3_000):
        counted.add_lasting(2)
        added.append(now)
        now += 0.0625
        within = [sum(2 for at in added if now - at < seconds) for seconds in (QUOTA_CALLER_SECONDS, 61.0)]
        assert counted.used is not None
        assert within[0] <= counted.used - 7 <= within[1]
        assert len(counted._lasting) <= 61
    now += 61.0
    assert counted.used == 7
