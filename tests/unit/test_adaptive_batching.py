"""Who is alone goes at once; who is not, shares."""

import asyncio

from holdfast.adaptive_batching import LONE_TURNS_MIN, AdaptiveBatching


def alone(turns: AdaptiveBatching) -> None:
    for _ in range(LONE_TURNS_MIN):
        assert not turns.take()
        turns.shared(1)


async def test_whoever_was_alone_for_a_while_goes_at_once() -> None:
    turns = AdaptiveBatching(asyncio.get_running_loop())
    alone(turns)
    for _ in range(3):
        assert turns.take()
        await asyncio.sleep(0)


async def test_a_second_caller_in_one_turn_shows_that_there_are_others() -> None:
    turns = AdaptiveBatching(asyncio.get_running_loop())
    alone(turns)
    assert turns.take()
    assert not turns.take()
    await asyncio.sleep(0)
    assert not turns.take(), "and they are waited for until nobody else has come for a while"
    turns.shared(2)
    alone(turns)
    assert turns.take()


async def test_a_turn_that_others_shared_begins_the_count_anew() -> None:
    turns = AdaptiveBatching(asyncio.get_running_loop())
    for _ in range(LONE_TURNS_MIN - 1):
        turns.shared(1)
    turns.shared(2)
    for _ in range(LONE_TURNS_MIN - 1):
        turns.shared(1)
    assert not turns.take()
