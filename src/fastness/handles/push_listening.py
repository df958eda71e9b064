"""Callbacks for the pushes of a server: a thread, or a task, that reads them and calls the callback.

A server that does not answer is asked again, with pauses. A callback that raises is logged.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Final

from fastness.errors import Backend, Busy, Closed, FastnessError
from fastness.wire.ingress import DataPush
from fastness.wire.transport import OnDataPush

_log = logging.getLogger("fastness.ingress")
_PAUSE_SECONDS: Final = 1.0  # Before a server that does not answer is asked again.


class AsyncPushPoller:
    """Reads pushes in a task, until it is stopped or the plane is closed."""

    def __init__(self, read: Callable[[], Awaitable[list[DataPush]]], callback: OnDataPush) -> None:
        self._read = read
        self._callback = callback
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Call the callback no more."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                pushes = await self._read()
            except FastnessError as error:
                if not _may_retry(error):
                    return
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            for push in pushes:
                _call(self._callback, push)
                if self._task.cancelling():  # The callback has stopped it.
                    return


class PushPoller:
    """Reads pushes in a thread, until it is stopped or the plane is closed."""

    def __init__(self, read: Callable[[], list[DataPush]], callback: OnDataPush) -> None:
        self._read = read
        self._callback = callback
        self._stopped = threading.Event()
        self._calling = threading.RLock()  # So that no call starts after `stop` has returned; a callback may call it.
        threading.Thread(target=self._run, name="fastness-push-listener", daemon=True).start()

    def stop(self) -> None:
        """Call the callback no more. The thread ends once its last request is answered."""
        with self._calling:
            self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                pushes = self._read()
            except FastnessError as error:
                if not _may_retry(error):
                    return
                self._stopped.wait(_PAUSE_SECONDS)
                continue
            for push in pushes:
                with self._calling:
                    if self._stopped.is_set():
                        return
                    _call(self._callback, push)


def _may_retry(error: FastnessError) -> bool:
    if isinstance(error, Closed):
        return False
    if isinstance(error, Backend | Busy):
        _log.warning("pushes cannot be read now, trying again: %s", error)
        return True
    _log.error("a push listener has ended: %s", error)
    return False


def _call(callback: OnDataPush, push: DataPush) -> None:
    try:
        callback(push)
    except Exception:
        _log.exception("a push listener failed; the push was accepted")
