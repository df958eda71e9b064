"""Work of a cancelled caller is undone, and the caller only gets its cancellation."""

import asyncio

import pytest

from fastness.client.undo import undo_of
from fastness.errors import Unreachable
from fastness.runtime.cancellation import finish_or_undo_async
from fastness.wire.hosting import ClaimedWorld, ClaimedWorlds, ClaimWorlds, GivenBack, ReleaseWorlds


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


def test_a_cancelled_claim_gives_back_the_new_worlds_and_keeps_those_that_the_host_works_on() -> None:
    undo = undo_of(ClaimWorlds(["billing"], "h1", universe="beta"))
    assert undo is not None
    new, held = (
        ClaimedWorld(name, "billing", 1, fence, 0, 0, None, is_new=is_new)
        for name, fence, is_new in (("new", 4, True), ("held", 9, False))
    )
    given_back = GivenBack("new", 4, new.head, has_work=True)
    assert undo(ClaimedWorlds([new, held])) == ReleaseWorlds([given_back], "h1", universe="beta")
    assert undo(ClaimedWorlds([held])) is None
