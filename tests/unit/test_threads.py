"""run_in_thread: a call that raised Busy, or was cancelled before it started, never runs later."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Busy
from fastness.kv import Transaction
from fastness.threads import run_in_thread

PATIENCE_SECONDS = 60.0


async def test_run_in_thread_keeps_result_error_and_context() -> None:
    name: ContextVar[str] = ContextVar("name", default="unset")
    name.set("ada")
    assert await run_in_thread(lambda word, end: f"{name.get()} {word}{end}", "runs", end=".") == "ada runs."
    assert await run_in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(RuntimeError, match="of its own"):
        await run_in_thread(_fail)


def _fail() -> None:
    raise RuntimeError("of its own")


async def test_a_call_cancelled_before_it_starts_never_runs() -> None:
    loop, free = asyncio.get_running_loop(), threading.Event()
    done: list[int] = []
    workers = [loop.run_in_executor(None, free.wait, PATIENCE_SECONDS) for _ in range(64)]  # More than it has threads.
    waiting = asyncio.ensure_future(run_in_thread(done.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # Awaiting it lets the cancellation take effect, in the next tick.
    free.set()
    await asyncio.gather(*workers)
    await run_in_thread(done.append, 2)
    assert done == [2]


async def test_a_transaction_without_a_thread_is_not_committed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has already queued the call, and an existing thread would run it."""
    database, started, end = MemoryDatabase(), threading.Event(), threading.Event()

    def slow(tx: Transaction) -> None:
        started.set()
        assert end.wait(PATIENCE_SECONDS)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    busy = asyncio.ensure_future(run_in_thread(database.transact, slow))
    while not started.is_set():
        await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Busy, match="nothing was done"):
            await database.transact_async(lambda tx: tx.put(b"key", b"value"))
    end.set()
    await busy
    for _ in range(64):  # Calls queued before run before these.
        await run_in_thread(lambda: None)
    assert database.read(lambda tx: tx.get(b"key")) is None
