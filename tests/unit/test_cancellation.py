"""What takes effect although whoever wanted it has gone: it is taken back, and they hear of their end alone."""

import asyncio

import pytest

from holdfast.errors import Unreachable
from holdfast.runtime.cancellation import finish_or_undo_async


@pytest.mark.parametrize("error", [None, Unreachable("away"), ZeroDivisionError("damaged")], ids=repr)
async def test_whoever_is_cancelled_hears_of_that_alone(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on, undone = asyncio.Event(), asyncio.Event(), list[int]()

    async def work() -> int:
        begun.set()
        await go_on.wait()
        return 7

    def undo(result: int) -> None:
        undone.append(result)
        if error is not None:
            raise error

    wanting = asyncio.create_task(finish_or_undo_async(work(), undo))
    await begun.wait()
    wanting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await wanting
    assert undone == [7]
    assert ("ZeroDivisionError" in caplog.text) == isinstance(error, ZeroDivisionError)
