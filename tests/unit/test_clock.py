"""Clocks, and ids that increase whatever the clock does."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from holdfast.clock import IdSource, SystemClock
from holdfast.errors import InvalidArgument
from holdfast.testing.clock import START_MS, ManualClock


def is_increasing(ids: list[uuid.UUID]) -> bool:
    return all(left < right and left.bytes < right.bytes for left, right in pairwise(ids))


def test_the_system_clock_returns_the_machine_time() -> None:
    before = time.time_ns() // 1_000_000
    assert before <= SystemClock().now_ms() <= time.time_ns() // 1_000_000


def test_a_manual_clock_changes_only_when_moved(clock: ManualClock) -> None:
    assert clock.now_ms() == clock.now_ms() == START_MS
    clock.advance_ms(7)
    assert clock.now_ms() == START_MS + 7
    clock.jump_to_ms(5)
    assert clock.now_ms() == 5


def test_a_manual_clock_advances_forward_only(clock: ManualClock) -> None:
    with pytest.raises(InvalidArgument, match="jump_to_ms"):
        clock.advance_ms(-1)
    assert clock.now_ms() == START_MS


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_ids_increase_while_the_clock_stops(seed: int | None) -> None:
    source = IdSource(seed)
    assert is_increasing([source.new_id(START_MS) for _ in range(10_000)])


def test_ids_increase_while_the_clock_goes_forward_and_back() -> None:
    source = IdSource()
    times_ms = [START_MS, START_MS + 5, START_MS - 60_000, START_MS + 4, START_MS + 5, START_MS + 6, 0, START_MS + 7]
    assert is_increasing([source.new_id(time_ms) for time_ms in times_ms for _ in range(100)])


def test_an_id_carries_its_time_in_its_first_48_bits() -> None:
    source = IdSource()
    assert source.new_id(START_MS).int >> 80 == START_MS
    assert source.new_id(START_MS - 1).int >> 80 == START_MS  # Time goes back, ids do not.
    assert source.new_id(2**48 - 1).int >> 80 == 2**48 - 1


def test_ids_of_a_full_millisecond_use_the_next_timestamp() -> None:
    source = IdSource()
    ids = [source.new_id(START_MS)]
    source._left = 0  # As after about 2**30 ids.
    ids += [source.new_id(START_MS) for _ in range(3)]
    assert is_increasing(ids)
    assert [made.int >> 80 for made in ids] == [START_MS, *[START_MS + 1] * 3]


def test_every_id_is_a_uuid_of_version_7() -> None:
    source = IdSource()
    ids = [source.new_id(START_MS + number // 10) for number in range(1_000)]
    assert {made.version for made in ids} == {7}
    assert {made.variant for made in ids} == {uuid.RFC_4122}


def test_every_bit_but_the_fixed_ones_is_random() -> None:
    source = IdSource()
    seen = 0
    for number in range(200):
        seen |= source.new_id(START_MS + number).int
    assert seen & (1 << 62) - 1 == (1 << 61) - 1  # The top bit starts clear, which leaves space to increase.
    assert seen >> 64 & 0xFFF == 0xFFF


def test_a_seed_determines_the_ids() -> None:
    first, again, other = IdSource(seed=1), IdSource(seed=1), IdSource(seed=2)
    ids = [first.new_id(START_MS + number // 3) for number in range(100)]
    assert ids == [again.new_id(START_MS + number // 3) for number in range(100)]
    assert not set(ids) & {other.new_id(START_MS + number // 3) for number in range(100)}


def test_two_sources_without_a_seed_do_not_collide() -> None:
    left, right = IdSource(), IdSource()
    assert not {left.new_id(START_MS) for _ in range(1_000)} & {right.new_id(START_MS) for _ in range(1_000)}


def test_ids_of_many_threads_increase_and_never_repeat() -> None:
    source = IdSource()
    with ThreadPoolExecutor(8) as threads:
        series = list(threads.map(lambda _: [source.new_id(START_MS) for _ in range(2_000)], range(8)))
    assert all(is_increasing(ids) for ids in series)
    assert len({made for ids in series for made in ids}) == 16_000
