"""Work of a cancelled caller is undone, and the caller only gets its cancellation."""

import asyncio

import pytest

from fastness.errors import Unreachable
from fastness.runtime.cancellation import finish_or_undo_async


@pytest.mark.parametrize("error", [None, Unreachable("away"), ZeroDivisionError("damaged")], ids=repr)
async def test_an_error_of_the_undo_does_not_replace_the_cancellation(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    started, go_on, undone = asyncio.Event(), asyncio.Event(), list[int]()

    async def work() -> int:
        started.set()
        await go_on.wait()
        return 7

    def undo(result: int) -> None:
        undone.append(result)
        if error is not None:
            raise error

    wanting = asyncio.create_task(finish_or_undo_async(work(), undo))
    await started.wait()
    wanting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await wanting
    assert undone == [7]
    assert ("ZeroDivisionError" in caplog.text) == isinstance(error, ZeroDivisionError)
