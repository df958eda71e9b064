"""What subscribers of MCP resources are notified of, and their bounds."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

import fastness
from fastness import AsyncPlane
from fastness.errors import Busy, NotAllowed
from fastness.mcp import Caller, changes, make_server, subscriptions
from fastness.mcp.changes import Changes, Target
from fastness.mcp.subscriptions import Subscriptions

SECONDS_MAX = 60.0


class Hints:
    """Hints that a test fires, and how many are open."""

    def __init__(self) -> None:
        self.fired: set[Target] = set()
        self.open = 0

    def __call__(self, target: Target) -> Any:
        hints = self
        hints.open += 1

        class Hint:
            def has_fired(self) -> bool:
                was_fired = target in hints.fired
                hints.fired.discard(target)
                return was_fired

            def close(self) -> None:
                hints.open -= 1

        return Hint()


@pytest.fixture
async def plane() -> AsyncIterator[AsyncPlane]:
    async with fastness.open_async("memory:") as opened:
        yield opened


async def test_listeners_hear_of_changes_and_not_of_hints_without_one(plane: AsyncPlane) -> None:
    hints = Hints()
    watching = Changes(hints, seconds=3_600)
    queue, mail = Target("main", "queue", "jobs"), Target("main", "mail", "ada")
    heard: list[str] = []
    stops = [
        await watching.watch(plane, target, partial(heard.append, name))
        for target, name in ((queue, "first"), (queue, "second"), (mail, "mail"))
    ]
    assert hints.open == 2  # Listeners of the same target share a watch.

    async def fire() -> None:
        hints.fired |= {queue, mail}
        await watching.look()

    await fire()
    assert heard == []
    for number in range(3):
        await plane.queue("jobs").put(number)
    await fire()
    assert heard == ["first", "second"]  # One change, however many messages.
    await plane.mailbox("bob").send("ada", "hello")
    stops[0]()
    await plane.queue("jobs").put(4)
    await watching.look()
    assert heard[2:] == []  # Without a hint nothing is read.
    await fire()
    assert heard[2:] == ["second", "mail"]
    for stop in stops * 2:  # Ending a watch twice is fine.
        stop()
    assert hints.open == 0
    watching.close()


async def test_a_failed_read_is_no_change_and_disturbs_no_other_target(
    plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = Hints()
    watching = Changes(hints, seconds=3_600)
    bad, good = Target("main", "queue", "bad"), Target("main", "queue", "good")
    heard: list[str] = []
    for target in (bad, good):
        await watching.watch(plane, target, partial(heard.append, target.name))
        await plane.queue(target.name).put(1)
    read, failures = changes._read, [Busy("later"), ZeroDivisionError()]

    async def read_or_fail(plane: AsyncPlane, target: Target) -> object:
        if target == bad:
            raise failures.pop()
        return await read(plane, target)

    monkeypatch.setattr(changes, "_read", read_or_fail)
    while failures:
        hints.fired |= {bad, good}
        await watching.look()
        assert heard == ["good"]
    monkeypatch.setattr(changes, "_read", read)
    hints.fired |= {bad, good}
    await watching.look()
    assert heard == ["good", "bad"]
    watching.close()


async def test_subscriptions_are_bounded(plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MCP_WATCHED_MAX", 2)
    monkeypatch.setattr(subscriptions, "MCP_SUBSCRIPTIONS_MAX", 3)
    monkeypatch.setattr(subscriptions, "MCP_STREAMS_PER_AGENT_MAX", 1)
    hints = Hints()
    subscribed = Subscriptions(Changes(hints, seconds=3_600))
    caller = Caller(plane=plane, agent="ada")
    server = make_server(lambda _: caller, features=[subscribed.install])
    uris = [f"fastness://main/queues/{name}" for name in "abcd"]
    async with asyncio.timeout(SECONDS_MAX), Client(server, mode="2026-07-28") as client:
        with pytest.raises(MCPError, match="at most 3 subscriptions"):
            async with client.listen(resource_subscriptions=uris):
                pass
        with pytest.raises(MCPError, match="watch 2 resources"):
            async with client.listen(resource_subscriptions=uris[:3]):
                pass
        assert (hints.open, subscribed.streams) == (0, 0)
        async with client.listen(resource_subscriptions=uris[:1]):
            with pytest.raises(MCPError, match="1 per agent"):
                async with client.listen(tools_list_changed=True):
                    pass
    subscribed.close()


async def test_a_stream_ends_when_its_caller_is_not_allowed_any_more(plane: AsyncPlane) -> None:
    is_revoked = False

    def is_allowed(verb: str) -> bool:
        if is_revoked:
            raise NotAllowed(f"The token was revoked and does not allow {verb}")
        return True

    subscribed = Subscriptions(Changes(Hints(), seconds=3_600))
    caller = Caller(plane=plane, agent="ada", is_allowed=is_allowed)
    server = make_server(lambda _: caller, features=[subscribed.install])
    async with (
        asyncio.timeout(SECONDS_MAX),
        Client(server, mode="2026-07-28") as client,
        client.listen(resource_subscriptions=["fastness://main/queues/jobs"]) as events,
    ):
        is_revoked = True
        subscribed.check_callers()
        assert [event async for event in events] == []
        assert subscribed.streams == 0
    subscribed.close()
