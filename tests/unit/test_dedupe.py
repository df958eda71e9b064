"""Keys of pushes: what is remembered, for how long, and what is written down."""

import asyncio

import pytest

from holdfast.errors import Busy
from holdfast.kv import Database
from holdfast.layers import dedupe as written
from holdfast.limits import DEDUPE_MAX, DEDUPE_SECONDS, VALUE_BYTES_MAX
from holdfast.runtime.ingress.dedupe import Dedupe, Stage, key_of
from holdfast.testing.clock import ManualClock

DAY_MS = 86_400_000
LOST = Busy("lost")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def keys(clock: ManualClock) -> Dedupe:
    return Dedupe(clock, most=3)


def test_a_key_is_found_while_it_is_remembered(keys: Dedupe, clock: ManualClock) -> None:
    reserved = keys.reserve(key(1))
    assert keys.find(key(1)) is reserved
    assert keys.find(key(2)) is None
    clock.advance_ms(7 * DAY_MS - 1)
    assert keys.find(key(1)) is reserved
    clock.advance_ms(1)
    assert keys.find(key(1)) is None


def test_the_bounds_are_seven_days_and_ten_thousand() -> None:
    assert (DEDUPE_SECONDS, DEDUPE_MAX) == (7 * 86_400, 10_000)


def test_overflow_forgets_the_oldest_first(keys: Dedupe) -> None:
    """Lesson 2: overflowing dedupe evicted at random, not the oldest."""
    for number in range(1, 6):
        keys.reserve(key(number))
    assert [keys.find(key(number)) is not None for number in range(1, 6)] == [False, False, True, True, True]
    assert len(keys) == 3


def test_what_is_pushed_again_after_its_time_is_the_newest(keys: Dedupe, clock: ManualClock) -> None:
    """Lesson 2: the oldest is what was accepted first, not what was first seen."""
    keys.reserve(key(1))
    clock.advance_ms(7 * DAY_MS)
    keys.reserve(key(2))
    keys.reserve(key(1))
    keys.reserve(key(3))
    keys.reserve(key(4))
    assert keys.find(key(2)) is None
    assert keys.find(key(1)) is not None


def test_prune_forgets_what_is_over_and_nothing_else(keys: Dedupe, clock: ManualClock) -> None:
    keys.reserve(key(1))
    clock.advance_ms(DAY_MS)
    keys.reserve(key(2))
    clock.advance_ms(6 * DAY_MS)
    assert len(keys) == 2
    assert keys.prune() == 1
    assert len(keys) == 1
    assert keys.find(key(2)) is not None


def test_a_lost_push_gives_its_key_back(keys: Dedupe) -> None:
    """Lesson 1: a failed flush kept its dedupe key, so the retry was swallowed."""
    keys.release(keys.reserve(key(1)), LOST)
    assert keys.find(key(1)) is None


def test_a_lost_push_gives_back_only_its_own_reservation(keys: Dedupe) -> None:
    first = keys.reserve(key(1))
    for number in range(2, 5):
        keys.reserve(key(number))
    second = keys.reserve(key(1))
    keys.release(first, LOST)
    assert keys.find(key(1)) is second


def test_only_what_is_stored_may_be_written_down(keys: Dedupe, clock: ManualClock) -> None:
    """Lesson 1: a key that is written down before its push is stored would outlive a crash that loses the push."""
    stored, queued = keys.reserve(key(1)), keys.reserve(key(2))
    keys.reserve(key(3))
    queued.move(Stage.QUEUED)
    assert not keys.has_news
    keys.settle(stored)
    assert keys.has_news
    assert keys.stored() == [(key(1), clock.now_ms())]
    assert not keys.has_news


async def test_whoever_waits_hears_how_far_a_push_came(keys: Dedupe) -> None:
    reserved = keys.reserve(key(1))
    entered = asyncio.create_task(reserved.beyond(Stage.ENTERING))
    stored = asyncio.create_task(reserved.beyond(Stage.QUEUED))
    await asyncio.sleep(0)
    reserved.move(Stage.QUEUED)
    await entered
    assert not stored.done()
    keys.settle(reserved)
    await stored
    await reserved.beyond(Stage.QUEUED)


async def test_whoever_waits_for_what_is_lost_hears_why(keys: Dedupe) -> None:
    reserved = keys.reserve(key(1))
    waiting = [asyncio.create_task(reserved.beyond(Stage.ENTERING)) for _ in range(2)]
    await asyncio.sleep(0)
    keys.release(reserved, LOST)
    assert await asyncio.gather(*waiting, return_exceptions=True) == [LOST, LOST]


def test_keys_are_read_back_as_they_were_written_down(database: Database, clock: ManualClock) -> None:
    assert database.read(written.load) == []
    entries = [(key(2), 5), (key(1), 7)]
    database.transact(written.save, entries, since_ms=0, most=10)
    assert database.read(written.load) == entries


def test_what_several_have_written_down_is_put_together(database: Database) -> None:
    database.transact(written.save, [(key(1), 1), (key(2), 4), (key(9), 2)], since_ms=0, most=10)
    database.transact(written.save, [(key(3), 3), (key(2), 4), (key(9), 5)], since_ms=2, most=3)
    assert database.read(written.load) == [(key(3), 3), (key(2), 4), (key(9), 5)]


def test_what_is_over_is_not_written_down_again(database: Database) -> None:
    database.transact(written.save, [(key(1), 1), (key(2), 2)], since_ms=0, most=10)
    database.transact(written.save, [(key(3), 3)], since_ms=2, most=10)
    assert database.read(written.load) == [(key(2), 2), (key(3), 3)]


def test_of_too_many_keys_the_latest_are_written_down(database: Database) -> None:
    """Lesson 2, in the key space."""
    database.transact(written.save, [(key(1), 4), (key(2), 2)], since_ms=0, most=2)
    database.transact(written.save, [(key(3), 3)], since_ms=0, most=2)
    assert database.read(written.load) == [(key(3), 3), (key(1), 4)]


def test_as_many_keys_as_are_remembered_fit_one_value(database: Database) -> None:
    entries = [(key(number), 1_700_000_000_000 + number) for number in range(DEDUPE_MAX)]
    database.transact(written.save, entries, since_ms=0, most=DEDUPE_MAX)
    assert database.read(written.load) == entries
    assert DEDUPE_MAX * 24 < VALUE_BYTES_MAX


def test_restored_keys_are_stored_ones_and_the_oldest_go_first(keys: Dedupe, clock: ManualClock) -> None:
    """Lesson 2, after a restart."""
    now_ms = clock.now_ms()
    keys.restore([(key(0), now_ms - 7 * DAY_MS), *((key(number), now_ms - 10 + number) for number in range(1, 5))])
    assert [keys.find(key(number)) is not None for number in range(5)] == [False, False, True, True, True]
    found = keys.find(key(4))
    assert found is not None
    assert found.stage is Stage.STORED
    keys.reserve(key(7))
    assert keys.find(key(2)) is None


def test_a_key_counts_for_one_recipient_one_sender_and_one_topic() -> None:
    asked = [("bob", "ada", "t", "k"), ("eve", "ada", "t", "k"), ("bob", "eve", "t", "k"), ("bob", "ada", "u", "k")]
    asked += [("bob", "ada", "t", "l"), ("bob", "adat", "", "k"), ("bob", "ada", "tk", "")]
    assert len({key_of(*each) for each in asked}) == len(asked)
    assert key_of("bob", "ada", "t", "k") == key_of("bob", "ada", "t", "k")
