"""The backlog: room for so many, a short line for the rest, and batches when they are due."""

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

import pytest

from holdfast import limits
from holdfast.errors import Busy, Closed
from holdfast.runtime.ingress.buffer import Backlog
from holdfast.testing.clock import ManualClock

SECONDS_MAX = 60.0
Result = TypeVar("Result")


class Item(NamedTuple):
    name: str = ""
    size: int = 1
    since_ms: int = 0
    hurries: bool = False


@pytest.fixture
def backlog(clock: ManualClock) -> Backlog[Item]:
    return Backlog(clock, most=2, bytes_max=100)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def soon(work: Awaitable[Result]) -> Result:
    """What becomes of it. What is woken by nobody fails its test, instead of waiting for ever."""
    async with asyncio.timeout(SECONDS_MAX):
        return await work


async def fill(backlog: Backlog[Item], clock: ManualClock, count: int, size: int = 1) -> None:
    for number in range(count):
        await backlog.enter(size)
        backlog.put(Item(str(number), size, clock.now_ms()))


def test_the_bounds_are_what_the_contract_says() -> None:
    assert (limits.INGRESS_QUEUE_MAX, limits.INGRESS_WAIT_SECONDS) == (4_096, 0.02)
    assert (limits.INGRESS_BATCH_MAX, limits.INGRESS_FLUSH_SECONDS, limits.INGRESS_STORE_SECONDS) == (256, 0.2, 2.0)


async def test_whoever_finds_no_room_is_refused_after_20_ms_and_not_before(
    backlog: Backlog[Item], clock: ManualClock
) -> None:
    await fill(backlog, clock, 2)
    late = asyncio.create_task(backlog.enter(1))
    await settle()
    clock.advance_ms(19)
    await settle()
    assert not late.done()
    clock.advance_ms(1)
    with pytest.raises(Busy, match="2 pushes wait"):
        await soon(late)


async def test_room_that_becomes_free_goes_to_those_in_line_in_order(
    backlog: Backlog[Item], clock: ManualClock
) -> None:
    await fill(backlog, clock, 2)
    line = [asyncio.create_task(backlog.enter(1)) for _ in range(3)]
    await settle()
    clock.advance_ms(200)  # The batch is due; those in line were there for longer than they may, too.
    await asyncio.gather(*line, return_exceptions=True)
    line = [asyncio.create_task(backlog.enter(1)) for _ in range(3)]
    await settle()
    assert [item.name for item in await soon(backlog.batch())] == ["0", "1"]
    await settle()
    assert [task.done() for task in line] == [True, True, False]
    overtaking = asyncio.create_task(backlog.enter(1))
    backlog.leave(1)
    await settle()
    assert line[2].done()
    assert not overtaking.done()
    overtaking.cancel()
    await asyncio.gather(overtaking, return_exceptions=True)


async def test_bytes_are_bounded_too(backlog: Backlog[Item], clock: ManualClock) -> None:
    await fill(backlog, clock, 1, size=70)
    large = asyncio.create_task(backlog.enter(31))
    await settle()
    small = asyncio.create_task(backlog.enter(30))
    await settle()
    assert not small.done()  # Nobody overtakes.
    clock.advance_ms(20)
    with pytest.raises(Busy):
        await soon(large)
    await soon(small)  # Whoever stood behind fits.


async def test_what_is_larger_than_all_room_enters_alone(backlog: Backlog[Item]) -> None:
    await backlog.enter(1_000)


async def test_room_shrinks_when_a_payload_became_a_blob(backlog: Backlog[Item]) -> None:
    await backlog.enter(100)
    waiting = asyncio.create_task(backlog.enter(50))
    await settle()
    assert not waiting.done()
    backlog.shrink(50)
    await soon(waiting)


async def test_a_wait_that_is_cancelled_leaves_no_trace(backlog: Backlog[Item], clock: ManualClock) -> None:
    await fill(backlog, clock, 1)
    await backlog.enter(1)
    gone = asyncio.create_task(backlog.enter(1))
    await settle()
    backlog.leave(1)  # It is granted its room,
    gone.cancel()  # and goes in the same moment.
    assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
    await soon(backlog.enter(1))


async def test_a_batch_is_due_200_ms_after_its_first(backlog: Backlog[Item], clock: ManualClock) -> None:
    batch = asyncio.create_task(backlog.batch())
    await fill(backlog, clock, 1)
    clock.advance_ms(150)
    await fill(backlog, clock, 1)
    clock.advance_ms(49)
    await settle()
    assert not batch.done()
    clock.advance_ms(1)
    assert len(await soon(batch)) == 2


async def test_a_batch_is_due_when_it_is_full(clock: ManualClock) -> None:
    backlog: Backlog[Item] = Backlog(clock)
    batch = asyncio.create_task(backlog.batch())
    await fill(backlog, clock, 255)
    await settle()
    assert not batch.done()
    await fill(backlog, clock, 2)
    assert len(await soon(batch)) == 256
    rest = asyncio.create_task(backlog.batch())
    await settle()
    assert not rest.done()
    clock.advance_ms(200)
    assert len(await soon(rest)) == 1


async def test_a_batch_is_full_by_its_bytes_too(clock: ManualClock) -> None:
    backlog: Backlog[Item] = Backlog(clock)
    await fill(backlog, clock, 40, size=65_536)
    assert len(await soon(backlog.batch())) == limits.INGRESS_BATCH_BYTES_MAX // 65_536
    assert len(backlog) == 8


async def test_what_is_left_over_waits_no_longer_than_it_would_have(clock: ManualClock) -> None:
    backlog: Backlog[Item] = Backlog(clock)
    await fill(backlog, clock, 257)
    clock.advance_ms(150)
    await soon(backlog.batch())
    rest = asyncio.create_task(backlog.batch())
    await settle()
    clock.advance_ms(49)
    await settle()
    assert not rest.done()
    clock.advance_ms(1)
    assert len(await soon(rest)) == 1


async def test_whoever_waits_for_its_push_makes_it_due(backlog: Backlog[Item], clock: ManualClock) -> None:
    await fill(backlog, clock, 1)
    await backlog.enter(1)
    backlog.put(Item("now", hurries=True))
    assert len(await soon(backlog.batch())) == 2
    await fill(backlog, clock, 1)
    backlog.hurry()
    assert len(await soon(backlog.batch())) == 1
    backlog.hurry()  # There is nothing to hurry.
    await fill(backlog, clock, 1)
    batch = asyncio.create_task(backlog.batch())
    await settle()
    assert not batch.done()
    batch.cancel()


async def test_closing_gives_the_reader_everything_at_once_and_refuses_everybody(
    backlog: Backlog[Item], clock: ManualClock
) -> None:
    await fill(backlog, clock, 2)
    waiting = asyncio.create_task(backlog.enter(1))
    await settle()
    backlog.close()
    assert len(await soon(backlog.batch())) == 2
    assert await soon(backlog.batch()) == []
    for refused in (waiting, backlog.enter(1)):
        with pytest.raises(Closed, match="shutting down"):
            await soon(refused)
    with pytest.raises(Closed):
        backlog.put(Item())


async def test_the_lag_is_how_long_the_first_has_waited(backlog: Backlog[Item], clock: ManualClock) -> None:
    assert backlog.lag_seconds == 0
    await fill(backlog, clock, 1)
    clock.advance_ms(1_500)
    assert backlog.lag_seconds == 1.5
    clock.jump_to_ms(0)
    assert backlog.lag_seconds == 0
