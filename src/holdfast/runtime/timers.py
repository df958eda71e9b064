"""Alarms: something happens on an event loop once time has passed, by a clock that a test may move."""

import asyncio
from collections.abc import Callable

from holdfast.clock import Clock, when_moved


def ring_after(clock: Clock, seconds: float, ring: Callable[[], None]) -> Callable[[], None]:
    """Have `ring` called by this event loop after so many seconds, unless the function that this returns is called.

    A wall clock may be set back, so its seconds are those of the event loop; one that is moved by hand is looked at.
    """
    loop = asyncio.get_running_loop()
    if not hasattr(clock, "subscribe"):
        return loop.call_later(seconds, ring).cancel
    until_ms = clock.now_ms() + round(seconds * 1_000)
    over = False

    def look() -> None:
        if not over and clock.now_ms() >= until_ms:
            end()
            loop.call_soon_threadsafe(ring)

    def end() -> None:
        nonlocal over
        if not over:
            over = True
            stop_listening()

    stop_listening = when_moved(clock, look)
    return end


async def sleep(clock: Clock, seconds: float) -> None:
    """Return after so many seconds."""
    woken = asyncio.get_running_loop().create_future()
    stop = ring_after(clock, seconds, lambda: wake(woken))
    try:
        await woken
    finally:
        stop()


def wake(waiting: "asyncio.Future[None]") -> None:
    """Let whoever awaits this go on."""
    if not waiting.done():
        waiting.set_result(None)
