"""The ingress buffer: limits, waiting reservations, and batches when they are due."""

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

import pytest

from fastness import limits
from fastness.errors import Busy, Closed
from fastness.runtime.ingress.buffer import IngressBuffer
from fastness.testing.clock import ManualClock

SECONDS_MAX = 60.0
Result = TypeVar("Result")


class Item(NamedTuple):
    name: str = ""
    size: int = 1
    enqueued_ms: int = 0
    is_urgent: bool = False


@pytest.fixture
def buffer(clock: ManualClock) -> IngressBuffer[Item]:
    return IngressBuffer(clock, items_max=2, bytes_max=100)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def soon(work: Awaitable[Result]) -> Result:
    """The result; a future that is never resolved fails the test instead of waiting forever."""
    async with asyncio.timeout(SECONDS_MAX):
        return await work


async def fill(buffer: IngressBuffer[Item], clock: ManualClock, count: int, size: int = 1) -> None:
    for number in range(count):
        await buffer.reserve_space(size)
        buffer.put(Item(str(number), size, clock.now_ms()))


def test_the_limits_match_the_documentation() -> None:
    assert (limits.INGRESS_QUEUE_MAX, limits.INGRESS_WAIT_SECONDS) == (4_096, 0.02)
    assert (limits.INGRESS_BATCH_MAX, limits.INGRESS_FLUSH_SECONDS, limits.INGRESS_STORE_SECONDS) == (256, 0.2, 2.0)


async def test_a_reservation_without_space_fails_after_20_ms(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    await fill(buffer, clock, 2)
    late = asyncio.create_task(buffer.reserve_space(1))
    await settle()
    clock.advance_ms(19)
    await settle()
    assert not late.done()
    clock.advance_ms(1)
    with pytest.raises(Busy, match="2 pushes wait"):
        await soon(late)


async def test_freed_space_goes_to_waiting_reservations_in_order(
    buffer: IngressBuffer[Item], clock: ManualClock
) -> None:
    await fill(buffer, clock, 2)
    line = [asyncio.create_task(buffer.reserve_space(1)) for _ in range(3)]
    await settle()
    clock.advance_ms(200)  # The batch is due, and the waiting reservations have timed out.
    await asyncio.gather(*line, return_exceptions=True)
    line = [asyncio.create_task(buffer.reserve_space(1)) for _ in range(3)]
    await settle()
    assert [item.name for item in await soon(buffer.next_batch())] == ["0", "1"]
    await settle()
    assert [task.done() for task in line] == [True, True, False]
    overtaking = asyncio.create_task(buffer.reserve_space(1))
    buffer.release_space(1)
    await settle()
    assert line[2].done()
    assert not overtaking.done()
    overtaking.cancel()
    await asyncio.gather(overtaking, return_exceptions=True)


async def test_bytes_are_bounded_too(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    await fill(buffer, clock, 1, size=70)
    large = asyncio.create_task(buffer.reserve_space(31))
    await settle()
    small = asyncio.create_task(buffer.reserve_space(30))
    await settle()
    assert not small.done()  # Reservations are FIFO.
    clock.advance_ms(20)
    with pytest.raises(Busy):
        await soon(large)
    await soon(small)  # The next one fits.


async def test_an_item_larger_than_the_limit_is_accepted_into_an_empty_buffer(buffer: IngressBuffer[Item]) -> None:
    await buffer.reserve_space(1_000)


async def test_reserved_bytes_shrink_when_a_payload_becomes_a_blob(buffer: IngressBuffer[Item]) -> None:
    await buffer.reserve_space(100)
    waiting = asyncio.create_task(buffer.reserve_space(50))
    await settle()
    assert not waiting.done()
    buffer.release_bytes(50)
    await soon(waiting)


async def test_a_cancelled_wait_releases_its_reservation(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    await fill(buffer, clock, 1)
    await buffer.reserve_space(1)
    gone = asyncio.create_task(buffer.reserve_space(1))
    await settle()
    buffer.release_space(1)  # The reservation is granted,
    gone.cancel()  # and cancelled at the same time.
    assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
    await soon(buffer.reserve_space(1))


async def test_a_batch_is_due_200_ms_after_its_first_push(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    batch = asyncio.create_task(buffer.next_batch())
    await fill(buffer, clock, 1)
    clock.advance_ms(150)
    await fill(buffer, clock, 1)
    clock.advance_ms(49)
    await settle()
    assert not batch.done()
    clock.advance_ms(1)
    assert len(await soon(batch)) == 2


async def test_a_batch_is_due_when_it_is_full(clock: ManualClock) -> None:
    buffer: IngressBuffer[Item] = IngressBuffer(clock)
    batch = asyncio.create_task(buffer.next_batch())
    await fill(buffer, clock, 255)
    await settle()
    assert not batch.done()
    await fill(buffer, clock, 2)
    assert len(await soon(batch)) == 256
    rest = asyncio.create_task(buffer.next_batch())
    await settle()
    assert not rest.done()
    clock.advance_ms(200)
    assert len(await soon(rest)) == 1


async def test_a_batch_is_due_when_its_bytes_reach_the_limit(clock: ManualClock) -> None:
    buffer: IngressBuffer[Item] = IngressBuffer(clock)
    await fill(buffer, clock, 40, size=65_536)
    assert len(await soon(buffer.next_batch())) == limits.INGRESS_BATCH_BYTES_MAX // 65_536
    assert len(buffer) == 8


async def test_pushes_left_after_a_batch_keep_their_due_time(clock: ManualClock) -> None:
    buffer: IngressBuffer[Item] = IngressBuffer(clock)
    await fill(buffer, clock, 257)
    clock.advance_ms(150)
    await soon(buffer.next_batch())
    rest = asyncio.create_task(buffer.next_batch())
    await settle()
    clock.advance_ms(49)
    await settle()
    assert not rest.done()
    clock.advance_ms(1)
    assert len(await soon(rest)) == 1


async def test_an_urgent_push_makes_the_batch_due(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    await fill(buffer, clock, 1)
    await buffer.reserve_space(1)
    buffer.put(Item("now", is_urgent=True))
    assert len(await soon(buffer.next_batch())) == 2
    await fill(buffer, clock, 1)
    buffer.flush_soon()
    assert len(await soon(buffer.next_batch())) == 1
    buffer.flush_soon()  # No effect on an empty buffer.
    await fill(buffer, clock, 1)
    batch = asyncio.create_task(buffer.next_batch())
    await settle()
    assert not batch.done()
    batch.cancel()


async def test_close_makes_everything_due_and_rejects_new_items(
    buffer: IngressBuffer[Item], clock: ManualClock
) -> None:
    await fill(buffer, clock, 2)
    waiting = asyncio.create_task(buffer.reserve_space(1))
    await settle()
    buffer.close()
    assert len(await soon(buffer.next_batch())) == 2
    assert await soon(buffer.next_batch()) == []
    for refused in (waiting, buffer.reserve_space(1)):
        with pytest.raises(Closed, match="shutting down"):
            await soon(refused)
    with pytest.raises(Closed):
        buffer.put(Item())


async def test_the_lag_is_the_wait_of_the_oldest_push(buffer: IngressBuffer[Item], clock: ManualClock) -> None:
    assert buffer.lag_seconds == 0
    await fill(buffer, clock, 1)
    clock.advance_ms(1_500)
    assert buffer.lag_seconds == 1.5
    clock.jump_to_ms(0)
    assert buffer.lag_seconds == 0
