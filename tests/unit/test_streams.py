"""A stream, without a network: what it does when connections end, callers go, and replies are not read."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from holdfast.errors import Closed
from holdfast.plane import Options, open_plane_async
from holdfast.plane.groups import call_group
from holdfast.plane.ports import AsyncEmbeddedPort
from holdfast.server.guards import Anybody
from holdfast.server.streams import Streams
from holdfast.wire.frames import PROTOCOL, Call, Hello, decode_hello, encode
from holdfast.wire.queues import GetQueueStats, NewMessage, PutMessages

DEADLINE_SECONDS = 30.0
PUT = PutMessages("jobs", [NewMessage(b"1")])
decode = msgspec.msgpack.Decoder().decode


@pytest.fixture
async def port() -> AsyncIterator[AsyncEmbeddedPort]:
    port = await open_plane_async("memory:", Options())
    yield port
    await port.close()


@pytest.fixture
def streams(port: AsyncEmbeddedPort) -> Streams:
    return Streams(port)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


class Peer:
    """The other end of a stream: sends frames, and takes what comes, while `reading` is set."""

    def __init__(self, streams: Streams, session: str = "s") -> None:
        self.frames: list[bytes] = []
        self.replies: dict[int, list[Any]] = {}
        self.closed: int | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self.heard = 0  # Messages that the server has asked for.
        self._session = session
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.serving = asyncio.create_task(streams.serve(Anybody(), self._receive, self._send))

    async def __aenter__(self) -> "Peer":
        self._inbox.put_nowait({"type": "websocket.connect"})
        self.send(Hello(PROTOCOL, self._session))
        await until(lambda: self.frames)
        decode_hello(self.frames[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        await asyncio.wait({self.serving}, timeout=DEADLINE_SECONDS)
        assert self.serving.done()
        self.serving.result()

    def send(self, frame: Any) -> None:
        self._inbox.put_nowait({"type": "websocket.receive", "bytes": encode(frame)})

    def end(self) -> None:
        """The connection is gone: nothing more is taken, and whoever is sending fails."""
        self.closed = self.closed or 1006
        self.reading.set()
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def answer(self, number: int) -> Any:
        await until(lambda: number in self.replies)
        _, answer, problem = self.replies[number]
        assert problem is None, problem
        return answer

    async def problem(self, number: int) -> str:
        await until(lambda: number in self.replies)
        _, _, problem = self.replies[number]
        assert problem is not None
        return str(problem["code"])

    async def _receive(self) -> dict[str, Any]:
        self.heard += 1
        return await self._inbox.get()

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        if self.closed is not None:
            raise OSError("the connection is gone")
        if message["type"] == "websocket.close":
            self.closed = message["code"]
            self._inbox.put_nowait({"type": "websocket.disconnect", "code": message["code"]})
        elif message["type"] == "websocket.send":
            self.frames.append(message["bytes"])
            found = decode(message["bytes"])
            if len(self.frames) > 1:
                self.replies.update((reply[0], reply) for reply in found)


async def puts(port: AsyncEmbeddedPort) -> int:
    return (await port.call(GetQueueStats("jobs"))).put_total


# Connections that end.


async def test_a_call_that_nobody_wants_any_more_is_not_begun(port: AsyncEmbeddedPort) -> None:
    [outcome] = await call_group(port, [Call(0, PUT, "key")], lambda: False)
    assert isinstance(outcome, Closed)
    assert await puts(port) == 0
    [outcome] = await call_group(port, [Call(0, PUT, "key")], lambda: True)
    assert len(outcome.receipts) == 1


class Held:
    """Keeps the first work that goes to a thread from its turn, for as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: AsyncEmbeddedPort) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.done = threading.Event()
        self._turn = port.parts.database._turn  # type: ignore[attr-defined]
        self._to_thread = asyncio.to_thread
        self._turn.acquire()  # As another thread would: so the event loop sends the work to one.
        monkeypatch.setattr(asyncio, "to_thread", self._first)

    async def _first(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def held() -> Any:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_SECONDS)
            try:
                return work(*args, **kwargs)
            finally:
                self.done.set()

        asyncio.to_thread = self._to_thread
        return await asyncio.to_thread(held)

    async def free_the_turn(self) -> None:
        await until(self.begun.is_set)
        self._turn.release()


async def test_a_put_that_stood_in_line_while_its_client_sent_it_again_happens_once(
    port: AsyncEmbeddedPort, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, port)
    async with Peer(streams) as old:
        old.send([Call(0, PUT, "key")])
        await held.free_the_turn()
        async with Peer(streams) as new:
            assert old.closed == 4001
            new.send([Call(0, PUT, "key", True)])
            receipt = await new.answer(0)
            held.go_on.set()  # What the old connection sent has its turn only now.
            await until(held.done.is_set)
            new.send([Call(1, PUT, "key", True)])
            assert await new.answer(1) == receipt
    assert await puts(port) == 1


async def test_a_commit_that_was_begun_is_told_of_though_its_connection_ended(
    port: AsyncEmbeddedPort, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(port.parts, "tell", told.extend)
    held = Held(monkeypatch, port)
    monkeypatch.setattr("holdfast.server.streams.Stream._is_wanted", lambda self: True)  # It was, when it was asked.
    async with Peer(streams) as peer:
        peer.send([Call(0, PUT)])
        await held.free_the_turn()
    held.go_on.set()
    await until(lambda: told)
    assert await puts(port) == 1
