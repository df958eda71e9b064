"""Timers of an event loop that follow a clock, which a test may move."""

import asyncio
from collections.abc import Callable

from fastness.clock import Clock, on_clock_change


def call_after(clock: Clock, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` on this event loop after `seconds`; the returned function cancels that.

    The event loop measures the seconds of a wall clock, because a wall clock may be set back. A clock that a test moves
    is checked whenever it moves.
    """
    loop = asyncio.get_running_loop()
    if not hasattr(clock, "subscribe"):
        return loop.call_later(seconds, callback).cancel
    until_ms = clock.now_ms() + round(seconds * 1_000)
    is_done = False

    def check() -> None:
        if not is_done and clock.now_ms() >= until_ms:
            stop()
            loop.call_soon_threadsafe(callback)

    def stop() -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            stop_listening()

    stop_listening = on_clock_change(clock, check)
    return stop


async def sleep(clock: Clock, seconds: float) -> None:
    """Return after `seconds`."""
    woken = asyncio.get_running_loop().create_future()
    stop = call_after(clock, seconds, lambda: wake(woken))
    try:
        await woken
    finally:
        stop()


def wake(waiting: "asyncio.Future[None]") -> None:
    """Resolve the future, unless that was already done."""
    if not waiting.done():
        waiting.set_result(None)
