"""Work beside an event loop: nobody is told that something was not done, and finds it done later."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import Busy
from holdfast.kv import Transaction
from holdfast.threads import run_in_thread

PATIENCE_SECONDS = 60.0


async def test_it_has_the_result_or_the_error_and_the_context_of_its_caller() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    name.set("ada")
    assert await run_in_thread(lambda word, end: f"{name.get()} {word}{end}", "knits", end=".") == "ada knits."
    assert await run_in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(RuntimeError, match="of its own"):
        await run_in_thread(_fail)


def _fail() -> None:
    raise RuntimeError("of its own")


async def test_what_is_cancelled_before_it_began_never_does() -> None:
    loop, free = asyncio.get_running_loop(), threading.Event()
    done: list[int] = []
    workers = [loop.run_in_executor(None, free.wait, PATIENCE_SECONDS) for _ in range(64)]  # More than it has threads.
    waiting = asyncio.ensure_future(run_in_thread(done.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # Only then does the line know: to cancel a task is to have it cancelled in the next turn.
    free.set()
    await asyncio.gather(*workers)
    await run_in_thread(done.append, 2)
    assert done == [2]


async def test_a_transaction_that_finds_no_thread_is_not_committed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor has put it in line by then, and would have it done by a thread that it has."""
    database, begun, end = MemoryDatabase(), threading.Event(), threading.Event()

    def slow(tx: Transaction) -> None:
        begun.set()
        assert end.wait(PATIENCE_SECONDS)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    busy = asyncio.ensure_future(run_in_thread(database.transact, slow))
    while not begun.is_set():
        await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Busy, match="nothing was done"):
            await database.transact_async(lambda tx: tx.put(b"key", b"value"))
    end.set()
    await busy
    for _ in range(64):  # Whatever is in line is behind none of these.
        await run_in_thread(lambda: None)
    assert database.read(lambda tx: tx.get(b"key")) is None
