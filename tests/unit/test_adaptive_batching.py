"""AdaptiveBatching: single callers skip batching, concurrent callers share a batch."""

import asyncio

from fastness.adaptive_batching import SINGLE_CALLER_TICKS_MIN, AdaptiveBatching


def record_single_callers(batching: AdaptiveBatching) -> None:
    for _ in range(SINGLE_CALLER_TICKS_MIN):
        assert not batching.may_skip()
        batching.record_batch(1)


async def test_batching_is_skipped_after_several_ticks_with_one_caller() -> None:
    batching = AdaptiveBatching(asyncio.get_running_loop())
    record_single_callers(batching)
    for _ in range(3):
        assert batching.may_skip()
        await asyncio.sleep(0)


async def test_a_second_caller_in_one_tick_turns_batching_on() -> None:
    batching = AdaptiveBatching(asyncio.get_running_loop())
    record_single_callers(batching)
    assert batching.may_skip()
    assert not batching.may_skip()
    await asyncio.sleep(0)
    assert not batching.may_skip(), "batching stays on until there was one caller for several ticks"
    batching.record_batch(2)
    record_single_callers(batching)
    assert batching.may_skip()


async def test_a_tick_with_several_callers_resets_the_count() -> None:
    batching = AdaptiveBatching(asyncio.get_running_loop())
    for _ in range(SINGLE_CALLER_TICKS_MIN - 1):
        batching.record_batch(1)
    batching.record_batch(2)
    for _ in range(SINGLE_CALLER_TICKS_MIN - 1):
        batching.record_batch(1)
    assert not batching.may_skip()
