"""Random histories of a universe with a quota: what is counted is never below what is stored, nor over the quota."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastness
from fastness import Plane
from fastness.errors import QuotaExceeded
from fastness.kv import Transaction
from fastness.layers import usage
from fastness.runtime.quotas import UsageCount
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage
from fastness.wire.quotas import Quota

MESSAGES, BYTES = 12, 60_000
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 6), st.sampled_from(["", "unique", "keyed"])),
        st.tuples(st.just("blob"), st.integers(1, 30_000), st.just("")),
        st.tuples(st.just("state"), st.integers(1, 12_000), st.just("")),
        st.tuples(st.just("receive"), st.integers(1, 4), st.sampled_from(["ack", "nack", "keep"])),
        st.tuples(st.just("purge"), st.just(0), st.just("")),
        st.tuples(st.just("measure"), st.just(0), st.just("")),
        st.tuples(st.just("fail"), st.integers(1, 4), st.just("")),
    ),
    max_size=30,
)


@pytest.mark.parametrize(("scheme", "examples"), [("memory", 40), ("dir", 15)])
def test_usage_is_never_below_what_is_stored(scheme: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(STEPS)
    def check(steps: list[tuple[str, int, str]]) -> None:
        with TemporaryDirectory() as folder:
            url = "memory:" if scheme == "memory" else f"dir:{Path(folder) / 'data'}"
            with fastness.open(url, universe="shop", clock=ManualClock()) as plane:
                plane.quotas.set("shop", Quota(messages=MESSAGES, bytes=BYTES))
                run_history(plane, steps)

    check()


def run_history(plane: Plane, steps: list[tuple[str, int, str]]) -> None:
    quotas = plane._transport.services.quotas  # type: ignore[attr-defined]
    database = plane._transport.services.database  # type: ignore[attr-defined]
    numbers = count()
    actions: dict[str, Callable[[int, str], object]] = {
        "put": lambda size, kind: plane.queue(f"q{size % 2}").put_many([new(kind, numbers) for _ in range(size)]),
        "blob": lambda size, _: plane.blobs.put(f"{next(numbers)}".rjust(size, "0").encode()),
        "state": lambda size, _: plane.state(f"s{size % 3}").update("x" * size),
        "receive": lambda size, then: settle(plane, size, then),
        "purge": lambda *_: plane.queue("q0").purge(),
        "measure": lambda *_: quotas.measure(),
        "fail": lambda size, _: fail_after_puts(plane, size),
    }
    for action, size, kind in steps:
        before = stored(plane)
        try:
            actions[action](size, kind)
        except QuotaExceeded:
            assert action in ("put", "blob", "state", "fail"), f"{action} must not be refused"
            assert stored(plane) == before, "a refused call has written"
        messages, size_bytes = stored(plane)
        [found] = quotas.all()
        assert messages <= found.messages.used
        assert size_bytes <= found.bytes.used
        assert messages <= MESSAGES
        assert database.usage is quotas


def new(kind: str, numbers: "count[int]") -> NewMessage:
    if kind == "unique":
        return NewMessage(b"u", unique_key=f"{next(numbers) % 3}")
    return NewMessage(b"k", idempotency_key=f"{next(numbers) % 5}") if kind == "keyed" else NewMessage(b"p" * 2_000)


def settle(plane: Plane, size: int, then: str) -> None:
    for message in plane.queue("q0").receive_many(size):
        if then == "ack":
            message.ack()
        elif then == "nack":
            message.nack(error="broken " * 20)


def fail_after_puts(plane: Plane, size: int) -> None:
    """Puts whose transaction is given up: they may be counted, and are not stored."""
    with pytest.raises((RuntimeError, QuotaExceeded)):
        plane.transact(put_and_fail, size)


def put_and_fail(tx: Transaction, size: int) -> None:
    from fastness.layers import queues

    queues.put(tx, queues.QueueKey("shop", "q0"), [NewMessage(b"")] * size)
    raise RuntimeError("given up")


def stored(plane: Plane) -> tuple[int, int]:
    """The messages and bytes that are stored, counted without the quotas."""
    database = plane._transport.services.database  # type: ignore[attr-defined]
    size = database.size_of(*usage.range_of("shop")) + database.read(usage.count_body_bytes, "shop")
    return database.read(usage.count_messages, "shop"), size


@given(st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(0, 3), st.booleans())), max_size=600))
def test_a_count_keeps_what_running_transactions_have_added(steps: list[int | tuple[int, bool]]) -> None:
    """A transaction adds, and is committed later. A measurement sees what is committed when it begins."""
    counted, ticket, committed = UsageCount(), 0, 0
    running: dict[int, int] = {}  # By ticket: what the transaction has added, and not committed.
    counted.set_measured(0, 1, 0, 0.0)
    for step in steps:
        if isinstance(step, int):
            ticket += 1
            running[ticket] = step
            counted.add(step, ticket, min(running))
            continue
        position, measures = step
        if running and not measures:
            committed += running.pop(sorted(running)[position % len(running)])
        elif measures:
            counted.set_measured(committed, min(running, default=ticket + 1), 0, 0.0)
        assert counted.used is not None
        assert counted.used >= committed
    while running:
        committed += running.popitem()[1]
    assert counted.used is not None
    assert counted.used >= committed
    counted.set_measured(committed, ticket + 1, 0, 0.0)
    assert counted.used == committed
