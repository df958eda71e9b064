"""Calls whose commit is unknown: which are repeated, and for how long."""

import asyncio
from collections.abc import Callable

import pytest

from fastness.errors import Busy, CommitUnknown, FastnessError, NotFound, Unreachable
from fastness.layers.idempotency import keyed_call
from fastness.plane.unknown_commits import may_repeat, repeat, repeat_async
from fastness.wire.leases import LeaseProof, ReleaseLease
from fastness.wire.queues import PutMessages

UNKNOWN = CommitUnknown("The first attempt")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.REPEAT_PAUSE_SECONDS", 0.0)


def attempts(*outcomes: FastnessError | str) -> Callable[[], str]:
    """A function that raises or returns these, one after the other, and the last one for ever."""
    left = list(outcomes)

    def attempt() -> str:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, str):
            return outcome
        raise outcome

    return attempt


@pytest.fixture(params=["threads", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], str]], str]:
    if request.param == "threads":
        return lambda attempt: repeat(attempt, UNKNOWN)

    async def awaited(attempt: Callable[[], str]) -> str:
        async def once() -> str:
            return attempt()

        return await repeat_async(once, UNKNOWN)

    return lambda attempt: asyncio.run(awaited(attempt))


def test_a_call_is_repeated_until_it_has_an_answer(run: Callable[[Callable[[], str]], str]) -> None:
    assert run(attempts(UNKNOWN, Unreachable("No server"), Busy("Later"), "done")) == "done"


def test_an_error_that_is_an_answer_ends_the_repetition(run: Callable[[Callable[[], str]], str]) -> None:
    with pytest.raises(NotFound):
        run(attempts(Unreachable("No server"), NotFound("It is gone"), "done"))


def test_a_call_that_stays_unanswered_is_unknown_and_not_unwritten(
    run: Callable[[Callable[[], str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Unreachable` would say that nothing was written, which is true of the last attempt only."""
    monkeypatch.setattr("fastness.limits.FAILOVER_SECONDS_MAX", 0.05)
    with pytest.raises(CommitUnknown, match="The first attempt"):
        run(attempts(Unreachable("No server")))


def test_only_calls_with_a_key_or_without_harm_are_repeated() -> None:
    put = PutMessages("jobs", [])
    assert not may_repeat(put, None)
    assert may_repeat(put, keyed_call("key", put, lambda: False))
    release = ReleaseLease(LeaseProof("key", "id", 1, None, "main"))
    assert may_repeat(release, None) == bool(ReleaseLease.operation.repeatable)
