"""Stops a program by SIGTERM or SIGINT: what `run` of workers and hosts does with signals."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: Callable[[int], object], *, second_ends: bool = False) -> Iterator[None]:
    """Call `stop` with the number of each SIGTERM or SIGINT inside the block; afterwards all is as before.

    Outside of the main thread, which is the only one that can handle signals, it does nothing.

    Args:
        stop: called by the signal handler, so it must not wait.
        second_ends: whether a second signal ends the process at once.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if second_ends:
            for each in STOP_SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        stop(number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, handle) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
