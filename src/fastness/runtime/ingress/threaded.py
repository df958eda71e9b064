"""The ingress of a plane whose callers wait on their own threads: it runs on an event loop in a thread of its own.

    caller's thread ── push ──► event loop in the thread "fastness-ingress-loop" ──► commits in the writer's thread
                  ◄── outcome ──┘

The thread starts with the first push or watch, and ends with the plane, after everything accepted is stored. It is a
daemon: at the end of a program that has not closed the plane, `Ingress.close_at_exit` stores what was accepted.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from fastness.errors import Closed, FastnessError, InvalidArgument
from fastness.layers.mailboxes import Address
from fastness.runtime.ingress.ingress import AddressedPush, Ingress
from fastness.wire.ingress import IngressStats, NewPush, Pushed, PushOutcomes, SeenPushes, WatchPushes
from fastness.wire.transport import OnDataPush

Result = TypeVar("Result")


class ThreadedIngress:
    """An `Ingress` for threads."""

    def __init__(self, ingress: Ingress) -> None:
        """`ingress` must not have been started."""
        self._ingress = ingress
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False

    def push(self, sender: Address, to: Address, new: NewPush) -> Pushed:
        """As `Ingress.push`."""
        return self._run(self._ingress.push, sender, to, new)

    def push_many(self, sender: Address, pushes: Sequence[AddressedPush | FastnessError]) -> PushOutcomes:
        """As `Ingress.push_many`."""
        return self._run(self._ingress.push_many, sender, pushes)

    def watch(self, request: WatchPushes) -> SeenPushes:
        """As `Ingress.watch`."""
        return self._run(self._ingress.watch, request)

    def stats(self) -> IngressStats:
        """As `Ingress.stats`."""
        return self._ingress.stats()

    def on_data_push(self, listener: OnDataPush) -> Callable[[], None]:
        """As `Ingress.on_data_push`. The listener runs in the thread of the event loop."""
        return self._ingress.on_data_push(listener)

    def close(self) -> None:
        """Store what was accepted, and end the thread.

        Raises:
            InvalidArgument: called by a callback of `on_data_push`, for which the ingress waits.
        """
        if threading.current_thread() is self._thread:
            raise InvalidArgument("A callback of on_data_push cannot close the plane; close it from another thread")
        with self._lock:
            was_closed, self._closed = self._closed, True
            loop, thread = self._loop, self._thread
        if was_closed or loop is None or thread is None or os.getpid() != self._process or not thread.is_alive():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._ingress.close(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _run(self, function: Callable[..., Coroutine[Any, Any, Result]], *args: Any, **kwargs: Any) -> Result:
        """The result of a coroutine function, on the event loop."""
        loop = self._started_loop()
        running = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop)
        try:
            return running.result()
        except CancelledError:
            raise _closed() from None
        finally:
            running.cancel()  # The caller was interrupted, for example by Ctrl-C; does nothing otherwise.

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if threading.current_thread() is self._thread:
            raise InvalidArgument(
                "A callback of on_data_push cannot push or watch, because the push that it was called with waits for "
                "it; push from another thread"
            )
        with self._lock:
            if self._closed or os.getpid() != self._process:
                raise _closed()
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(loop,), name="fastness-ingress-loop", daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _closed() -> Closed:
    return Closed("The plane was closed, or this process was forked after it was opened; open it again")
