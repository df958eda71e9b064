"""After an unexpected error in the relay at most one session is ended, and the hub continues."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fastness.errors import FastnessError
from fastness.layers.mailboxes import Address
from fastness.limits import (
    RELAY_PING_SECONDS,
)
from fastness.runtime.relay import hub as relay_hub
from fastness.runtime.relay.hub import RelayHub
from fastness.runtime.relay.session import STOPPING, Session
from fastness.testing.clock import ManualClock
from fastness.wire.frames import Call
from fastness.wire.relay import (
    Error,
    Ping,
    Sent,
)
from tests.support.waiting import eventually_async
from tests.unit import relay_fixtures
from tests.unit.relay_fixtures import DEADLINE_SECONDS, Agent, Commits, quiet

transport = relay_fixtures.transport
commits = relay_fixtures.commits
hub = relay_fixtures.hub


class Failing:
    """Raises an unexpected error at the first call, and works from then on."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.has_failed = False
        self._work = work

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError
        return self._work(*args, **kwargs)


@pytest.mark.parametrize("step", ["_fill_batch", "_on_write_done", "_on_mail_read"])
async def test_delivery_continues_when_a_step_of_a_batch_fails(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "cyd") as cyd, Agent(hub, "bob") as bob:
        await quiet()
        failing = Failing(getattr(hub, step))
        monkeypatch.setattr(hub, step, failing)
        ada.send("bob", b"lost, perhaps")
        await eventually_async(lambda: failing.has_failed)
        await quiet()
        last = bob
        if bob.session.ended is not None:  # Its read failed, so the agent reconnects.
            last = Agent(hub, "bob")
            await last.__aenter__()
        cyd.send("bob", b"after it")
        await eventually_async(lambda: b"after it" in last.bodies)
        if last is not bob:
            await last.__aexit__()


@pytest.mark.parametrize("method", ["next_writes", "flush", "on_sent"])
async def test_a_failing_session_is_ended_and_the_others_continue(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "cyd") as cyd, Agent(hub, "bob") as bob:
        await quiet()
        monkeypatch.setattr(ada.session, method, Failing(getattr(ada.session, method)))
        ada.send("bob", b"of ada")
        cyd.send("bob", b"of cyd")
        await eventually_async(lambda: b"of cyd" in bob.bodies)
        await eventually_async(lambda: ada.session.ended == (STOPPING, "failed"))
        assert not ada.session.is_busy
        assert cyd.session.ended is None
    async with Agent(hub, "ada") as again:
        assert isinstance(await again.answer(again.send("bob")), Sent)


@pytest.mark.parametrize("name", ["read_mail", "read_receipts"])
async def test_a_session_that_fails_to_read_does_not_block_others(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob, Agent(hub, "cyd") as cyd:
        await quiet()
        work = getattr(relay_hub, name)

        def reads(session: Session, *args: Any) -> Any:
            if session is bob.session:
                raise ZeroDivisionError
            return work(session, *args)

        monkeypatch.setattr(relay_hub, name, reads)
        bob.session.must_recheck = bob.session.may_have_receipts = True
        ada.send("cyd", b"x")
        hub.wake(bob.session)
        await cyd.get(1)
        await eventually_async(lambda: bob.session.ended == (STOPPING, "failed"))
        assert not bob.session.is_busy


async def test_an_unexpected_error_in_a_join_is_raised_and_the_next_join_succeeds(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Agent(hub, "ada") as ada:
        assert hub._commit_listener is not None
        monkeypatch.setattr(hub._commit_listener, "add_session", Failing(hub._commit_listener.add_session))
        with pytest.raises(FastnessError, match="see its log"):
            async with asyncio.timeout(DEADLINE_SECONDS):
                await hub.join("main", "bob", None)
        assert Address("main", "bob") not in hub.sessions
        async with Agent(hub, "bob") as bob:
            ada.send("bob", b"x")
            await bob.get(1)


async def test_a_failed_subscription_is_retried_by_the_next_join(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub._database, "subscribe", Failing(hub._database.subscribe))
    with pytest.raises(ZeroDivisionError):
        await hub.join("main", "bob", None)
    async with Agent(hub, "bob") as bob, Agent(hub, "ada") as ada:
        ada.send("bob", b"x")
        await bob.get(1)


async def test_ticks_continue_after_errors_of_a_tick_or_a_session(
    hub: RelayHub, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_hub, "_TICK_SECONDS", 0.001)
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        failing = Failing(hub.tick)
        monkeypatch.setattr(hub, "tick", failing)
        await eventually_async(lambda: failing.has_failed)
        monkeypatch.setattr(ada.session, "push", Failing(ada.session.push))
        clock.advance_ms(round(RELAY_PING_SECONDS * 1_000))
        await eventually_async(lambda: bob.all(Ping))
        assert ada.session.ended == (STOPPING, "failed")


async def test_a_commit_without_outcomes_is_reported_as_an_error(
    hub: RelayHub, commits: Commits, monkeypatch: Any
) -> None:
    async def nothing(calls: list[Call]) -> list[Any]:
        return []

    async with Agent(hub, "ada") as ada:
        await quiet()
        monkeypatch.setattr(hub, "_commit", nothing)
        id = ada.send("bob")
        assert isinstance(await ada.answer(id), Error)
        monkeypatch.setattr(hub, "_commit", commits)
        assert isinstance(await ada.answer(ada.send("bob")), Sent)


async def test_an_unexpected_error_in_a_commit_is_answered(
    hub: RelayHub, commits: Commits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()

        async def broken(calls: list[Call]) -> list[Any]:
            raise RuntimeError("secret")

        monkeypatch.setattr(hub, "_commit", broken)
        answer = await ada.answer(ada.send("bob"))
        assert isinstance(answer, Error)
        assert "secret" not in answer.detail
        assert "secret" in caplog.text
        monkeypatch.setattr(hub, "_commit", commits)
        assert isinstance(await ada.answer(ada.send("bob")), Sent)
