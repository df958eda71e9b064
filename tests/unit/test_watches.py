"""Watches: which waiters a commit wakes, and that none misses it."""

import asyncio
import threading

import pytest

from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.errors import Busy, Closed
from fastness.kv import Transaction, Watches

Range = tuple[bytes, bytes]


@pytest.fixture
def watches() -> Watches:
    return Watches()


@pytest.mark.parametrize("prefix", [b"", b"a", b"ab"], ids=repr)
def test_a_key_wakes_every_prefix_of_it(watches: Watches, prefix: bytes) -> None:
    watch = watches.open(prefix)
    watches.notify([b"zz", b"ab"] if prefix else [b"zz"])
    assert watch.wait(0)


@pytest.mark.parametrize("prefix", [b"b", b"abc", b"aa", b"ab\x00"], ids=repr)
def test_a_key_wakes_no_other_prefix(watches: Watches, prefix: bytes) -> None:
    watch = watches.open(prefix)
    watches.notify([b"ab", b"a"])
    assert not watch.wait(0)


@pytest.mark.parametrize(
    ("prefix", "cleared", "woken"),
    [
        (b"b", (b"a", b"c"), True),  # The prefix is inside the range.
        (b"b", (b"b1", b"b2"), True),  # The range is below the prefix.
        (b"b", (b"b1", b"c"), True),
        (b"b", (b"a", b"b\x00"), True),
        (b"b", (b"a", b"b"), False),  # The end is not part of the range.
        (b"b", (b"c", b"d"), False),
        (b"b\xff", (b"c", b"d"), False),
        (b"", (b"a", b"b"), True),
    ],
)
def test_a_cleared_range_wakes_the_prefixes_it_overlaps(
    watches: Watches, prefix: bytes, cleared: Range, woken: bool
) -> None:
    watch = watches.open(prefix)
    watches.notify((), [cleared])
    assert watch.wait(0) is woken


@pytest.mark.parametrize(
    ("writes", "cleared", "changed", "woken"),
    [
        ({b"a1": b""}, [], [], True),
        ({b"b": b""}, [], [], True),
        ({b"a1": None}, [], [], False),
        ({b"a1": None, b"b": b""}, [], [], True),
        ({b"c": b""}, [], [], False),
        ({b"a1": None, b"c": b""}, [], [], False),
        ({}, [(b"a", b"c")], [], False),
        ({}, [], [(b"a", b"a1")], True),
        ({}, [(b"a", b"c")], [(b"c", b"d")], False),
    ],
)
def test_a_watch_for_additions_ignores_deletions(
    watches: Watches, writes: dict[bytes, bytes | None], cleared: list[Range], changed: list[Range], woken: bool
) -> None:
    additions, everything = watches.open(b"a", b"b", additions=True), watches.open(b"a")
    watches.notify(writes, cleared, changed)
    assert additions.wait(0) is woken
    is_below_a = any(key.startswith(b"a") for key in writes) or (b"a", b"c") in cleared or (b"a", b"a1") in changed
    assert everything.wait(0) is is_below_a


def test_a_watch_on_several_prefixes_is_closed_as_one(watches: Watches) -> None:
    watch, other = watches.open(b"a", b"bb"), watches.open(b"a")
    assert watches.count == 2
    watch.close()
    watch.close()
    assert watches.count == 1
    watches.notify([b"bb", b"a"])
    assert other.wait(0)
    other.close()
    assert watches.count == 0
    with pytest.raises(Closed):
        watch.wait(0)


def test_many_writes_leave_one_hint_that_is_consumed_once(watches: Watches) -> None:
    watch = watches.open(b"a")
    for _ in range(3):
        watches.notify([b"a"])
    assert watch.wait(0)
    assert not watch.wait(0)


def test_each_watch_of_a_prefix_has_its_own_hint(watches: Watches) -> None:
    first, second = watches.open(b"a"), watches.open(b"a")
    watches.notify([b"a"])
    assert first.wait(0)
    assert second.wait(0)


def test_a_closed_watch_leaves_the_others_of_its_prefix_open(watches: Watches) -> None:
    first, second = watches.open(b"a"), watches.open(b"a")
    first.close()
    watches.notify([b"a"])
    assert second.wait(0)


def test_fire_all_wakes_every_watch(watches: Watches) -> None:
    opened = [watches.open(prefix) for prefix in (b"", b"a", b"b")]
    watches.fire_all()
    assert all(watch.wait(0) for watch in opened)


def test_closing_the_registry_closes_every_watch(watches: Watches) -> None:
    opened = [watches.open(prefix) for prefix in (b"a", b"a", b"b")]
    watches.close()
    for watch in opened:
        with pytest.raises(Closed):
            watch.wait(0)


def test_the_number_of_watches_is_limited(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WATCHES_MAX", 2)
    with watches.open(b"a"), watches.open(b"b"), pytest.raises(Busy, match="2 watches"):
        watches.open(b"c")
    watches.open(b"c")


def test_closing_a_watch_twice_frees_one_slot(watches: Watches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WATCHES_MAX", 1)
    closed = watches.open(b"a")
    closed.close()
    watches.open(b"a")
    closed.close()
    with pytest.raises(Busy):
        watches.open(b"b")


def test_close_wakes_a_waiting_thread(watches: Watches) -> None:
    watch = watches.open(b"a")
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            watch.wait(60)
        except Closed as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    watch.close()
    waiting.join()
    assert len(outcome) == 1


async def test_close_wakes_a_waiting_coroutine(watches: Watches) -> None:
    watch = watches.open(b"a")
    waiting = asyncio.ensure_future(watch.wait_async(60))
    await asyncio.sleep(0)
    watch.close()
    with pytest.raises(Closed):
        await waiting


async def test_a_hint_from_another_thread_wakes_every_coroutine(watches: Watches) -> None:
    watch = watches.open(b"a")
    waiting = [asyncio.ensure_future(watch.wait_async(60)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(watches.notify, [b"a"])
    assert await asyncio.gather(*waiting) == [True, True, True]


async def test_notify_returns_whether_it_woke_a_coroutine_of_the_same_loop(watches: Watches) -> None:
    watch = watches.open(b"a")
    assert not watches.notify([b"a"]), "there is no waiter yet"
    assert await watch.wait_async(0)
    waiting = asyncio.ensure_future(watch.wait_async(60))
    await asyncio.sleep(0)
    assert not watches.notify([b"b"])
    assert watches.notify([b"a"])
    assert await waiting


async def test_notify_returns_false_for_coroutines_of_another_loop(watches: Watches) -> None:
    watch = watches.open(b"a")
    waiting = asyncio.ensure_future(watch.wait_async(60))
    await asyncio.sleep(0)
    assert not await asyncio.to_thread(watches.notify, [b"a"])
    assert await waiting


async def test_a_coroutine_consumes_an_existing_hint_without_waiting(watches: Watches) -> None:
    watch = watches.open(b"a")
    watches.notify([b"a"])
    assert await watch.wait_async(0)
    assert not await watch.wait_async(0)


async def test_a_cancelled_waiter_leaves_the_hint_for_the_next(watches: Watches) -> None:
    watch = watches.open(b"a")
    waiting = asyncio.ensure_future(watch.wait_async(60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    watches.notify([b"a"])
    assert await watch.wait_async(0)


def test_a_waiter_on_a_closed_loop_does_not_fail_a_commit() -> None:
    with MemoryDatabase() as database:
        watch = database.watch(b"a")
        loop = asyncio.new_event_loop()
        waiter = loop.create_task(watch.wait_async(60))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        try:
            database.transact(Transaction.put, b"a", b"1")
        finally:
            # It can never finish, which is the case under test.
            waiter._log_destroy_pending = False  # type: ignore[attr-defined]
        assert watch.wait(0)


def test_every_wait_on_a_closed_watch_raises(watches: Watches) -> None:
    watch = watches.open(b"a")
    watch.close()
    for _ in range(3):
        with pytest.raises(Closed):
            watch.wait(0)


def test_fire_all_notifies_subscribers_of_the_whole_key_space(watches: Watches) -> None:
    ranges: list[Range] = []
    stop = watches.subscribe(lambda keys, cleared: ranges.extend(cleared))
    watches.fire_all()
    [(begin, end)] = ranges
    assert begin <= b"any" < end
    assert watches.count == 1
    stop()
    stop()
    watches.fire_all()
    assert (len(ranges), watches.count) == (1, 0)
