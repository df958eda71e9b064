"""Fixtures for the tests of the relay: a hub without sockets, its agents and its commits."""

import asyncio
from collections.abc import AsyncIterator
from types import UnionType
from typing import Any

import pytest

from fastness.errors import FastnessError
from fastness.limits import (
    MAIL_BATCH_MAX,
    RELAY_RECEIPTS_SECONDS,
)
from fastness.plane import Options, open_plane_async
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.runtime.relay.hub import RelayHub
from fastness.testing.clock import ManualClock
from fastness.wire.frames import Call
from fastness.wire.mail import (
    CountMail,
    NewMail,
    SendMail,
)
from fastness.wire.relay import (
    Body,
    Confirm,
    Error,
    Frame,
    Mail,
    RateLimited,
    Send,
    Sent,
)
from fastness.wire.requests import Request
from tests.support.waiting import eventually_async

DEADLINE_SECONDS = 30.0


async def quiet() -> None:
    """Wait long enough for all background work, including the delayed check for receipts."""
    for _ in range(20):
        await asyncio.sleep(RELAY_RECEIPTS_SECONDS / 10)


class Commits:
    """Executes calls, and can be made to fail or to wait."""

    def __init__(self, transport: AsyncEmbeddedTransport) -> None:
        self.batches: list[list[Request[Any]]] = []
        self.failing: FastnessError | None = None
        self.held: list[asyncio.Event] = []  # The next batches wait for these events before they are executed.
        self._transport = transport

    async def __call__(self, calls: list[Call]) -> list[Any]:
        self.batches.append([call.request for call in calls])
        if self.held:
            await self.held.pop(0).wait()
        if self.failing is not None:
            return [self.failing] * len(calls)
        return await self._transport.call_all(calls)

    def count(self, kind: type[Request[Any]]) -> int:
        return sum(isinstance(request, kind) for batch in self.batches for request in batch)


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async("memory:", Options())
    yield transport
    await transport.close()


@pytest.fixture
def commits(transport: AsyncEmbeddedTransport) -> Commits:
    return Commits(transport)


@pytest.fixture
async def hub(transport: AsyncEmbeddedTransport, commits: Commits, clock: ManualClock) -> AsyncIterator[RelayHub]:
    hub = RelayHub(transport.services.database, commits, clock=clock)
    yield hub
    commits.failing = None
    for event in commits.held:
        event.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await hub.close()


class Agent:
    """The agent of a session; it reads frames while `reading` is set."""

    def __init__(self, hub: RelayHub, name: str, *, reads: bool = True, **options: Any) -> None:
        self.name = name
        self.frames: list[Frame] = []
        self.batches: list[list[Frame]] = []
        self.reading = asyncio.Event()
        if reads:
            self.reading.set()
        self._hub = hub
        self._options = {"authorize": lambda request: None, **options}

    async def __aenter__(self) -> "Agent":
        self.session = await self._hub.join("main", self.name, **self._options)
        self._pumping = asyncio.create_task(self._pump())
        await eventually_async(lambda: len(self.frames) >= 2 or not self.reading.is_set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hub.leave(self.session)
        self.reading.set()
        await asyncio.wait({self._pumping}, timeout=DEADLINE_SECONDS)
        self._pumping.result()

    async def _pump(self) -> None:
        await self.reading.wait()
        while (batch := await self.session.outgoing()) is not None:
            frames, size = batch
            await self.reading.wait()
            self.frames += frames
            self.batches.append(frames)
            self.session.on_written(size)

    def all(self, kind: type[Any] | UnionType) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    @property
    def mails(self) -> list[Mail]:
        return self.all(Mail)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(mail.body) for mail in self.mails]

    async def get(self, count: int) -> list[Mail]:
        await eventually_async(lambda: len(self.mails) >= count)
        return self.mails

    def send(self, to: str, body: bytes = b"x", id: str | None = None, **options: Any) -> str:
        id = id or f"{self.name}-{len(self.frames)}-{id_of()}"
        self.session.receive([Send(id, to, Body(body), **options)])
        return id

    def confirm(self, *mails: Mail) -> None:
        self.session.receive([Confirm([mail.message_id for mail in mails])])

    async def answer(self, id: str) -> Any:
        def found() -> list[Any]:
            return [frame for frame in self.all(Sent | Error | RateLimited) if frame.message_id == id]

        await eventually_async(found)
        return found()[0]


_ids = iter(range(1 << 30))


def id_of() -> str:
    return f"m-{next(_ids)}"


async def store(
    transport: AsyncEmbeddedTransport, count: int, *, to: str = "bob", sender: str = "ada", body: bytes = b""
) -> None:
    for first in range(0, count, MAIL_BATCH_MAX):
        numbers = range(first, min(first + MAIL_BATCH_MAX, count))
        mails = [NewMail(to, body or b"%d" % number, id_of()) for number in numbers]
        sent = (await transport.call(SendMail(sender, mails))).mails
        assert [each.code for each in sent] == [None] * len(mails)


async def pending(transport: AsyncEmbeddedTransport, agent: str = "bob") -> int:
    return (await transport.call(CountMail(agent))).pending
