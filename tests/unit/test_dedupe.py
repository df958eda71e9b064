"""Deduplication keys of pushes: how long they are kept, and which of them are saved."""

import asyncio

import pytest

from fastness.errors import Busy
from fastness.kv import Database
from fastness.layers import dedupe as saved_keys
from fastness.limits import DEDUPE_MAX, DEDUPE_SECONDS, VALUE_BYTES_MAX
from fastness.runtime.ingress.dedupe import Dedupe, Stage, key_of
from fastness.testing.clock import ManualClock

DAY_MS = 86_400_000
LOST = Busy("lost")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def keys(clock: ManualClock) -> Dedupe:
    return Dedupe(clock, keys_max=3)


def test_a_key_is_a_duplicate_while_it_is_kept(keys: Dedupe, clock: ManualClock) -> None:
    reserved = keys.reserve(key(1))
    assert keys.find(key(1)) is reserved
    assert keys.find(key(2)) is None
    clock.advance_ms(7 * DAY_MS - 1)
    assert keys.find(key(1)) is reserved
    clock.advance_ms(1)
    assert keys.find(key(1)) is None


def test_the_bounds_are_seven_days_and_ten_thousand() -> None:
    assert (DEDUPE_SECONDS, DEDUPE_MAX) == (7 * 86_400, 10_000)


def test_overflow_evicts_the_oldest_key_first(keys: Dedupe) -> None:
    for number in range(1, 6):
        keys.reserve(key(number))
    assert [keys.find(key(number)) is not None for number in range(1, 6)] == [False, False, True, True, True]
    assert len(keys) == 3


def test_a_key_pushed_again_after_expiry_is_the_newest(keys: Dedupe, clock: ManualClock) -> None:
    """The age of a key is the time of its acceptance, not of its first use."""
    keys.reserve(key(1))
    clock.advance_ms(7 * DAY_MS)
    keys.reserve(key(2))
    keys.reserve(key(1))
    keys.reserve(key(3))
    keys.reserve(key(4))
    assert keys.find(key(2)) is None
    assert keys.find(key(1)) is not None


def test_prune_removes_expired_keys_only(keys: Dedupe, clock: ManualClock) -> None:
    keys.reserve(key(1))
    clock.advance_ms(DAY_MS)
    keys.reserve(key(2))
    clock.advance_ms(6 * DAY_MS)
    assert len(keys) == 2
    assert keys.prune() == 1
    assert len(keys) == 1
    assert keys.find(key(2)) is not None


def test_a_lost_push_releases_its_key(keys: Dedupe) -> None:
    """A failed flush releases its dedupe keys, so a retry is stored."""
    keys.release(keys.reserve(key(1)), LOST)
    assert keys.find(key(1)) is None


def test_a_lost_push_releases_only_its_own_reservation(keys: Dedupe) -> None:
    first = keys.reserve(key(1))
    for number in range(2, 5):
        keys.reserve(key(number))
    second = keys.reserve(key(1))
    keys.release(first, LOST)
    assert keys.find(key(1)) is second


def test_only_keys_of_stored_pushes_are_saved(keys: Dedupe, clock: ManualClock) -> None:
    """A key that is saved before its push is stored would suppress the retry after a crash."""
    stored, queued = keys.reserve(key(1)), keys.reserve(key(2))
    keys.reserve(key(3))
    queued.advance(Stage.QUEUED)
    assert not keys.has_unsaved
    keys.settle(stored)
    assert keys.has_unsaved
    assert keys.stored() == [(key(1), clock.now_ms())]
    assert not keys.has_unsaved


async def test_a_duplicate_waits_for_the_result_of_the_first_push(keys: Dedupe) -> None:
    reserved = keys.reserve(key(1))
    entered = asyncio.create_task(reserved.wait_past(Stage.ENTERING))
    stored = asyncio.create_task(reserved.wait_past(Stage.QUEUED))
    await asyncio.sleep(0)
    reserved.advance(Stage.QUEUED)
    await entered
    assert not stored.done()
    keys.settle(reserved)
    await stored
    await reserved.wait_past(Stage.QUEUED)


async def test_a_duplicate_of_a_lost_push_gets_its_error(keys: Dedupe) -> None:
    reserved = keys.reserve(key(1))
    waiting = [asyncio.create_task(reserved.wait_past(Stage.ENTERING)) for _ in range(2)]
    await asyncio.sleep(0)
    keys.release(reserved, LOST)
    assert await asyncio.gather(*waiting, return_exceptions=True) == [LOST, LOST]


def test_saved_keys_are_loaded_unchanged(database: Database, clock: ManualClock) -> None:
    assert database.read(saved_keys.load) == []
    entries = [(key(2), 5), (key(1), 7)]
    database.transact(saved_keys.save, entries, since_ms=0, most=10)
    assert database.read(saved_keys.load) == entries


def test_keys_saved_by_several_processes_are_merged(database: Database) -> None:
    database.transact(saved_keys.save, [(key(1), 1), (key(2), 4), (key(9), 2)], since_ms=0, most=10)
    database.transact(saved_keys.save, [(key(3), 3), (key(2), 4), (key(9), 5)], since_ms=2, most=3)
    assert database.read(saved_keys.load) == [(key(3), 3), (key(2), 4), (key(9), 5)]


def test_expired_keys_are_not_saved_again(database: Database) -> None:
    database.transact(saved_keys.save, [(key(1), 1), (key(2), 2)], since_ms=0, most=10)
    database.transact(saved_keys.save, [(key(3), 3)], since_ms=2, most=10)
    assert database.read(saved_keys.load) == [(key(2), 2), (key(3), 3)]


def test_only_the_latest_keys_are_saved(database: Database) -> None:
    database.transact(saved_keys.save, [(key(1), 4), (key(2), 2)], since_ms=0, most=2)
    database.transact(saved_keys.save, [(key(3), 3)], since_ms=0, most=2)
    assert database.read(saved_keys.load) == [(key(3), 3), (key(1), 4)]


def test_the_maximum_number_of_keys_fits_one_value(database: Database) -> None:
    entries = [(key(number), 1_700_000_000_000 + number) for number in range(DEDUPE_MAX)]
    database.transact(saved_keys.save, entries, since_ms=0, most=DEDUPE_MAX)
    assert database.read(saved_keys.load) == entries
    assert DEDUPE_MAX * 24 < VALUE_BYTES_MAX


def test_restored_keys_count_as_stored_and_are_evicted_oldest_first(keys: Dedupe, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    keys.restore([(key(0), now_ms - 7 * DAY_MS), *((key(number), now_ms - 10 + number) for number in range(1, 5))])
    assert [keys.find(key(number)) is not None for number in range(5)] == [False, False, True, True, True]
    found = keys.find(key(4))
    assert found is not None
    assert found.stage is Stage.STORED
    keys.reserve(key(7))
    assert keys.find(key(2)) is None


def test_a_key_is_scoped_to_recipient_sender_and_topic() -> None:
    asked = [("bob", "ada", "t", "k"), ("eve", "ada", "t", "k"), ("bob", "eve", "t", "k"), ("bob", "ada", "u", "k")]
    asked += [("bob", "ada", "t", "l"), ("bob", "adat", "", "k"), ("bob", "ada", "tk", "")]
    assert len({key_of(*each) for each in asked}) == len(asked)
    assert key_of("bob", "ada", "t", "k") == key_of("bob", "ada", "t", "k")
