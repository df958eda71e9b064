"""Streams without a network: closed connections, cancelled calls and unread replies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastness.errors import Closed
from fastness.kv import serial_database
from fastness.limits import CALLS_MAX, READS_MAX, REPLY_BATCH_MAX, UNSENT_BYTES_MAX
from fastness.plane import Options, open_plane_async
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.server import consumers
from fastness.server.authorization import AllowAll
from fastness.server.consumers import Consumers
from fastness.server.replies import encode_replies
from fastness.server.streams import Streams
from fastness.threads import run_in_thread
from fastness.tiers import Tier
from fastness.wire.atomic import CommitAtomic
from fastness.wire.blobs import PutBlob
from fastness.wire.canonical import canonical
from fastness.wire.frames import PROTOCOL, Call, Hello, decode_hello, encode
from fastness.wire.queues import GetQueueStats, NewMessage, PeekMessages, PutMessages, Receipts, ReceiveMessages
from fastness.wire.states import FoundState, GetState, UpdateState
from fastness.wire.worlds import ReadJournal

DEADLINE_SECONDS = 30.0
PUT = PutMessages("jobs", [NewMessage(b"1")])
RECEIVE = ReceiveMessages("jobs", "ada", wait_seconds=600)
decode = msgspec.msgpack.Decoder().decode


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async("memory:", Options())
    yield transport
    await transport.close()


class SocketStreams(Streams):
    """Streams whose peers are served through a FakeSocket."""


@pytest.fixture(params=["messages", "a socket"])
def streams(transport: AsyncEmbeddedTransport, request: pytest.FixtureRequest) -> Streams:
    return SocketStreams(transport) if request.param == "a socket" else Streams(transport)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


class FakeSocket:
    """Stands in for BoundedSocket: passes frames to `on_message` unless receiving is paused."""

    def __init__(self, peer: "Peer") -> None:
        self.on_message: Callable[[bytes], None] | None = None
        self.queue = peer._inbox
        self._peer = peer
        self._is_paused = False
        self._queued: list[bytes] = []

    def deliver(self, data: bytes) -> None:
        self._queued.append(data)
        self._flush()

    def pause_receiving(self) -> None:
        self._is_paused = True

    def resume_receiving(self) -> None:
        self._is_paused = False
        self._flush()

    def write_now(self, frame: bytes) -> bool:
        if not self._peer.reading.is_set() or self._peer.closed is not None:
            return False
        self._peer.read(frame)
        return True

    def _flush(self) -> None:
        while self._queued and not self._is_paused and self.on_message is not None:
            self._peer.received += 1
            self.on_message(self._queued.pop(0))


class Peer:
    """The client of a stream: sends frames, and reads replies while `reading` is set."""

    def __init__(self, streams: Streams, session: str = "s", *, caller: str = AllowAll.name) -> None:
        self.frames: list[bytes] = []
        self.replies: dict[int, list[Any]] = {}
        self.closed: int | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self.received = 0  # Messages that the server has asked for.
        self._session = session
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._socket = FakeSocket(self) if isinstance(streams, SocketStreams) else None
        authorizer = AllowAll()
        authorizer.name = caller
        self.serving = asyncio.create_task(streams.serve(authorizer, self._receive, self._send, self._socket))  # type: ignore[arg-type]

    async def __aenter__(self) -> "Peer":
        self._inbox.put_nowait({"type": "websocket.connect"})
        self.send(Hello(PROTOCOL, self._session))
        await until(lambda: self.frames)
        decode_hello(self.frames[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.disconnect()
        await asyncio.wait({self.serving}, timeout=DEADLINE_SECONDS)
        assert self.serving.done()
        self.serving.result()

    def send(self, frame: Any) -> None:
        if self._socket is not None and self._socket.on_message is not None:
            self._socket.deliver(encode(frame))
        else:
            self._inbox.put_nowait({"type": "websocket.receive", "bytes": encode(frame)})

    def disconnect(self) -> None:
        """Lose the connection: nothing more is read, and sends fail."""
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
        self.received += 1
        return await self._inbox.get()

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reading.wait()
        if self.closed is not None:
            raise OSError("the connection is lost")
        if message["type"] == "websocket.close":
            self.closed = message["code"]
            self._inbox.put_nowait({"type": "websocket.disconnect", "code": message["code"]})
        elif message["type"] == "websocket.send":
            self.read(message["bytes"])

    def read(self, frame: bytes) -> None:
        self.frames.append(frame)
        found = decode(frame)
        if len(self.frames) > 1:
            self.replies.update((reply[0], reply) for reply in found)


async def puts(transport: AsyncEmbeddedTransport) -> int:
    return (await transport.call(GetQueueStats("jobs"))).put_total


# Connections that close.


async def test_call_of_a_closed_connection_does_not_start(transport: AsyncEmbeddedTransport) -> None:
    [outcome] = await transport.call_all([Call(0, PUT, "key")], lambda: False)
    assert isinstance(outcome, Closed)
    assert await puts(transport) == 0
    [outcome] = await transport.call_all([Call(0, PUT, "key")], lambda: True)
    assert isinstance(outcome, Receipts)
    assert len(outcome.receipts) == 1


class BlockedThread:
    """Blocks the first work that is sent to a thread until `resume` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: AsyncEmbeddedTransport) -> None:
        self.started = threading.Event()
        self.resume = threading.Event()
        self.done = threading.Event()
        self._lock = transport.services.database._write_lock  # type: ignore[attr-defined]
        self._monkeypatch = monkeypatch
        self._lock.acquire()  # As another thread would, so that the event loop sends the work to a thread.
        monkeypatch.setattr(serial_database, "run_in_thread", self._first)

    async def _first(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def blocked() -> Any:
            self.started.set()
            assert self.resume.wait(DEADLINE_SECONDS)
            try:
                return work(*args, **kwargs)
            finally:
                self.done.set()

        self._monkeypatch.setattr(serial_database, "run_in_thread", run_in_thread)
        return await run_in_thread(blocked)

    async def release_database(self) -> None:
        await until(self.started.is_set)
        self._lock.release()


async def test_put_that_is_repeated_while_it_waits_happens_once(
    transport: AsyncEmbeddedTransport, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = BlockedThread(monkeypatch, transport)
    async with Peer(streams) as old:
        old.send([Call(0, PUT, "key")])
        await blocked.release_database()
        async with Peer(streams) as new:
            await until(lambda: old.closed == 4001)
            new.send([Call(0, PUT, "key", True)])
            receipt = await new.answer(0)
            blocked.resume.set()  # Only now does the call of the old connection run.
            await until(blocked.done.is_set)
            new.send([Call(1, PUT, "key", True)])
            assert await new.answer(1) == receipt
    assert await puts(transport) == 1


async def test_callers_with_equal_sessions_and_keys_do_not_get_the_answers_of_each_other(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    async with Peer(streams, caller="ada") as ada, Peer(streams, caller="bob") as bob:
        ada.send([Call(0, PUT, "key")])
        first = (await ada.answer(0))["receipts"][0]
        bob.send([Call(0, PUT, "key", True)])
        assert (await bob.answer(0))["receipts"][0] != first
        ada.send([Call(1, PUT, "key", True)])
        assert (await ada.answer(1))["receipts"][0] == first
        assert await leased_and_ready(transport) == (0, 2)


async def test_started_commit_publishes_its_events_after_its_connection_closed(
    transport: AsyncEmbeddedTransport, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Any] = []
    monkeypatch.setattr(transport.services.database, "publish", published.extend)
    blocked = BlockedThread(monkeypatch, transport)
    # As if the connection had closed just after the check.
    monkeypatch.setattr("fastness.server.streams.StreamConnection._is_open", lambda self: True)
    async with Peer(streams) as peer:
        peer.send([Call(0, PUT)])
        await blocked.release_database()
    blocked.resume.set()
    await until(lambda: published)
    assert await puts(transport) == 1


# Calls of one frame.


async def test_calls_of_one_frame_run_in_order(streams: Streams, transport: AsyncEmbeddedTransport) -> None:
    """Of any type and tier: a read sees the writes before it, and none after it."""
    async with Peer(streams) as peer:
        peer.send(
            [
                Call(0, GetState("s")),
                Call(1, UpdateState("s", b"\x01")),
                Call(2, GetState("s", tier=Tier.IMPORTANT)),
                Call(3, UpdateState("s", b"\x02", tier=Tier.IMPORTANT)),
                Call(4, GetState("s")),
                Call(5, UpdateState("s", b"\x03", tier=Tier.BEST_EFFORT)),
                Call(6, UpdateState("s", b"\x04", if_absent=True)),
                Call(7, CommitAtomic([UpdateState("s", b"\x05")]), "key"),
                Call(8, GetState("s")),
            ]
        )
        await until(lambda: 8 in peer.replies)
        assert [(await peer.answer(number))["state"]["value"] for number in (2, 4, 8)] == [b"\x01", b"\x02", b"\x05"]
        assert (await peer.answer(0))["state"] is None
        assert [await peer.problem(number) for number in (5, 6)] == ["unsupported_tier", "cas_mismatch"]
        assert len(peer.frames) == 2, "one batch, answered in one frame"


async def test_batch_of_reads_does_not_wait_for_writers(streams: Streams, transport: AsyncEmbeddedTransport) -> None:
    lock = transport.services.database._write_lock  # type: ignore[attr-defined]
    async with Peer(streams) as peer:
        with lock:
            peer.send([Call(number, GetState("s")) for number in range(3)])
            assert [(await peer.answer(number))["state"] for number in range(3)] == [None] * 3


@pytest.mark.parametrize("writes", [False, True])
async def test_large_answers_end_a_batch_and_keep_the_order(
    writes: bool, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.plane.executor.READ_BATCH_REPLY_BYTES", 2_500)
    await transport.call(UpdateState("s", canonical("x" * 1_000)))
    calls = [Call(number, GetState("s")) for number in range(8)]
    if writes:
        calls.insert(4, Call(8, UpdateState("s", canonical("y" * 1_000))))
    batches = []
    while calls:
        batches.append(await transport.call_all(calls))
        calls = calls[len(batches[-1]) :]
    assert [len(batch) for batch in batches] == ([3, 4, 2] if writes else [3, 3, 2])
    values = [found.state.value[-1:] for batch in batches for found in batch if isinstance(found, FoundState)]
    assert values == ([b"x"] * 4 + [b"y"] * 4 if writes else [b"x"] * 8)


# Cancelled calls.


async def until_waiting(transport: AsyncEmbeddedTransport, consumers: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await transport.call(GetQueueStats("jobs"))).waiting_consumers != consumers:
            await asyncio.sleep(0.001)


async def test_cancelled_call_stops_waiting_and_is_answered(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    async with Peer(streams) as peer:
        peer.send([Call(number, RECEIVE) for number in range(3)])
        await until_waiting(transport, 3)
        peer.send([1, 7, 0, 1])  # One of them twice, and one unknown number.
        assert [await peer.problem(number) for number in (0, 1)] == ["closed", "closed"]
        await until_waiting(transport, 1)
        await transport.call(PUT)
        assert len((await peer.answer(2))["messages"]) == 1
        assert len(peer.replies) == 3


async def test_call_that_is_cancelled_in_its_own_frame_is_answered(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    async with Peer(streams) as peer:
        peer.send([Call(0, RECEIVE), 0, Call(1, PUT), 1])
        assert await peer.problem(0) == "closed"
        assert len((await peer.answer(1))["receipts"]) == 1, "a call that does not wait is executed"
        await until_waiting(transport, 0)


async def test_cancelled_calls_free_capacity(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.server.streams.CALLS_MAX", 4)
    async with Peer(streams) as peer:
        for first in range(0, 30, 3):
            numbers = range(first, first + 3)
            peer.send([Call(number, RECEIVE) for number in numbers])
            peer.send(list(numbers))
            assert {await peer.problem(number) for number in numbers} == {"closed"}


# Unread replies.


def fill(transport: AsyncEmbeddedTransport, messages: int = 100) -> Any:
    return transport.call(PutMessages("jobs", [NewMessage(b"x" * 1_000) for _ in range(messages)]))


async def received_when_idle(peer: Peer) -> int:
    """How many frames the server has received, once that number no longer grows."""
    received, polls = -1, 0
    while polls < 20:
        await asyncio.sleep(0.001)
        received, polls = (received, polls + 1) if received == peer.received else (peer.received, 0)
    return received


async def test_server_stops_reading_from_a_client_that_does_not_read(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    await fill(transport)
    frames, each = 30, 20
    async with Peer(streams) as stalled, Peer(streams, "other") as other:
        stalled.reading.clear()
        for first in range(0, frames * each, each):
            stalled.send([Call(first + number, PeekMessages("jobs", 100)) for number in range(each)])
        assert await received_when_idle(stalled) < 10
        assert UNSENT_BYTES_MAX <= sum(stream.replies.unsent_bytes for stream in streams.open.values()) < 4 << 20
        other.send([Call(0, PUT)])
        await other.answer(0)
        stalled.reading.set()
        await until(lambda: len(stalled.replies) == frames * each)
        assert max(map(len, stalled.frames)) < 2 << 20, "replies are sent as they are read"


@pytest.mark.parametrize("request_", [PeekMessages("jobs", 100), ReadJournal("ada", 0, 100)])
async def test_number_of_large_answers_in_memory_is_bounded(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, request_: Any
) -> None:
    """With a store that runs in threads, many calls can be in flight before the first answer is sent."""
    in_flight, most, resume = 0, 0, asyncio.Event()

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await resume.wait()
        in_flight -= 1
        return [None] if isinstance(args[0], list) else None

    monkeypatch.setattr(transport, "call", slowly)
    monkeypatch.setattr(transport, "call_all", slowly)
    async with Peer(streams) as peer:
        for number in range(100):
            peer.send([Call(number, request_)])
        await received_when_idle(peer)
        resume.set()
        await until(lambda: len(peer.replies) == 100)
    assert most == READS_MAX


async def test_stalled_connection_blocks_neither_its_successor_nor_a_close(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    await fill(transport)
    async with Peer(streams) as stalled, Peer(streams, "other") as other:
        for peer in (stalled, other):
            peer.reading.clear()
            peer.send([Call(number, PeekMessages("jobs", 100)) for number in range(20)])
        await until(lambda: unsent_of(streams, "s") and unsent_of(streams, "other"))
        async with Peer(streams) as new:
            new.send([Call(0, PUT)])
            await new.answer(0)
            await asyncio.wait_for(streams.close_streams_of("anybody"), DEADLINE_SECONDS)
            await until(lambda: new.closed == 4003)
        for peer in (stalled, other):
            peer.disconnect()


def unsent_of(streams: Streams, session: str) -> int:
    return streams.open[f"anybody/{session}"].replies.unsent_bytes


async def test_replies_are_split_into_frames(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.server.replies.FRAME_BYTES_MAX", 1_500)
    await fill(transport, 2)
    async with Peer(streams) as peer:
        peer.send([*(Call(number, PUT) for number in range(64)), Call(64, PeekMessages("jobs", 2))])
        await until(lambda: len(peer.replies) == 65)
        assert len((await peer.answer(64))["messages"]) == 2
        assert len(peer.frames) > 5
        assert sum(len(frame) > 1_500 for frame in peer.frames) == 1, "only the frame of the single long reply"


async def test_answer_that_cannot_be_encoded_is_a_problem_of_its_call_only(
    streams: Streams,
    transport: AsyncEmbeddedTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transport, "call_all", lambda calls, wanted: asyncio.sleep(0, [1, 1 << 70, 3]))
    async with Peer(streams) as peer:
        peer.send([Call(number, PUT) for number in range(3)])
        assert (await peer.answer(0), await peer.problem(1), await peer.answer(2)) == (1, "error", 3)
    assert "cannot be encoded" in caplog.text


# Undelivered answers.


async def leased_and_ready(transport: AsyncEmbeddedTransport) -> tuple[int, int]:
    """The numbers of leased and of ready messages."""
    stats = await transport.call(GetQueueStats("jobs"))
    return stats.leased, stats.ready


async def until_released(transport: AsyncEmbeddedTransport, ready: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await leased_and_ready(transport) != (0, ready):
            await asyncio.sleep(0.001)
    found = (await transport.call(PeekMessages("jobs", 1))).messages[0]
    assert found.failure_attempts == 0, "a release is not a failure"


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("ending", ["lost", "closed", "replaced"])
async def test_undelivered_messages_are_released_at_once(
    streams: Streams, transport: AsyncEmbeddedTransport, key: str | None, ending: str
) -> None:
    await fill(transport, 3)
    async with Peer(streams) as peer:
        peer.reading.clear()
        peer.send([Call(0, ReceiveMessages("jobs", "ada", 2), key)])
        await until(lambda: unsent_of(streams, "s"))
        assert await leased_and_ready(transport) == (2, 1)
        if ending == "lost":
            peer.disconnect()
        elif ending == "closed":
            await streams.close_streams_of("anybody")
        else:
            async with Peer(streams):
                pass
        await until_released(transport, 3)
        peer.disconnect()


async def test_repeated_receive_gets_messages_that_the_old_connection_did_not_deliver(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    await fill(transport, 2)
    async with Peer(streams) as old:
        old.reading.clear()
        old.send([Call(0, RECEIVE, "key")])
        await until(lambda: unsent_of(streams, "s"))
        async with Peer(streams) as new:
            new.send([Call(0, RECEIVE, "key", True)])
            assert len((await new.answer(0))["messages"]) == 1
            assert await leased_and_ready(transport) == (1, 1)
        old.disconnect()


async def test_receive_delivers_as_many_messages_as_fit_a_reply(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.server.replies.ANSWER_BYTES_MAX", 20_000)
    monkeypatch.setattr("fastness.server.consumers._ALWAYS_FITS", 1)
    await fill(transport, 60)
    async with Peer(streams) as peer:
        peer.send([Call(0, ReceiveMessages("jobs", "ada", 60), "key")])
        found = (await peer.answer(0))["messages"]
        assert 7 <= len(found) < 20
        await until(lambda: not streams._tasks)
        assert await leased_and_ready(transport) == (len(found), 60 - len(found))
        first = (await transport.call(PeekMessages("jobs", 60))).messages
        assert len(found) + len(first) == 60


async def test_too_large_answer_becomes_a_problem(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.server.replies.FRAME_BYTES_MAX", 20_000)
    monkeypatch.setattr("fastness.server.replies.ANSWER_BYTES_MAX", 20_000)
    await fill(transport, 60)
    async with Peer(streams) as peer:
        peer.send([Call(0, PeekMessages("jobs", 60)), Call(1, PUT), Call(2, PeekMessages("jobs", 10))])
        assert await peer.problem(0) == "answer_too_large"
        assert len((await peer.answer(1))["receipts"]) == 1
        assert len((await peer.answer(2))["messages"]) == 10
        assert peer.closed is None


async def test_waiting_consumers_of_a_stalled_client_get_no_messages(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their replies are buffered up to a bound; further messages go to clients that read."""
    monkeypatch.setattr("fastness.server.replies.ANSWER_BYTES_MAX", 5_000)
    async with Peer(streams) as stalled, Peer(streams, "other") as other:
        stalled.send([Call(number, RECEIVE) for number in range(50)])
        await until_waiting(transport, 50)
        stalled.reading.clear()
        await fill(transport, 60)
        await until_waiting(transport, 0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await leased_and_ready(transport))[0] >= 10:
                await asyncio.sleep(0.001)
        await until(lambda: not streams._tasks)
        kept, free = await leased_and_ready(transport)
        assert (free, kept < 10) == (60 - kept, True)
        other.send([Call(0, ReceiveMessages("jobs", "bob", 2))])
        assert len((await other.answer(0))["messages"]) == 2
        stalled.reading.set()
        await until(lambda: len(stalled.replies) == 50)
        assert sum(reply[2] is None for reply in stalled.replies.values()) == kept


@pytest.fixture
async def synced(tmp_path: Path) -> AsyncIterator[AsyncEmbeddedTransport]:
    """A transport whose calls wait for a sync, most of them in batches."""
    transport = await open_plane_async(f"dir:{tmp_path}", Options())
    yield transport
    await transport.close()


async def test_messages_of_one_sync_share_frames(synced: AsyncEmbeddedTransport) -> None:
    async with Peer(SocketStreams(synced)) as peer:
        await fill(synced, 100)
        peer.send([Call(number, RECEIVE, f"key {number}") for number in range(100)])
        await until(lambda: len(peer.replies) == 100)
        assert len({reply[1]["messages"][0]["id"] for reply in peer.replies.values()}) == 100
        assert max(len(decode(frame)) for frame in peer.frames[1:]) == REPLY_BATCH_MAX
        assert await leased_and_ready(synced) == (100, 0)


async def test_long_message_gets_its_own_frame(synced: AsyncEmbeddedTransport) -> None:
    body = b"x" * 100_000
    stored = await synced.call(PutBlob(body))
    await synced.call(PutMessages("jobs", [NewMessage(blob=stored.hash, blob_size=len(body))] * 5))
    async with Peer(SocketStreams(synced)) as peer:
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: len(peer.replies) == 5)
        assert [len(decode(frame)) for frame in peer.frames[1:]] == [1] * 5


@pytest.mark.parametrize("key", ["key", None])
async def test_messages_are_released_if_the_connection_closes_before_their_frame(
    synced: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Messages are leased and synced, and the connection closes before the frame is written."""
    flush, abandoned = Consumers._flush, []
    streams = SocketStreams(synced)

    def abandon_first(self: Consumers) -> None:
        abandoned.append(len(self._ready))
        streams.open["anybody/s"].abandon()
        flush(self)

    monkeypatch.setattr(Consumers, "_flush", abandon_first)
    await fill(synced, 5)
    async with Peer(streams) as peer:
        peer.send([Call(number, RECEIVE, key and f"{key} {number}") for number in range(5)])
        await until(lambda: abandoned)
        await until_released(synced, 5)
        assert (abandoned, peer.replies) == ([5], {})


async def test_messages_of_a_stalled_connection_that_closes_are_released_at_once(
    synced: AsyncEmbeddedTransport,
) -> None:
    await fill(synced, 5)
    streams = SocketStreams(synced)
    async with Peer(streams) as peer:
        peer.reading.clear()
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: streams.open["anybody/s"]._reply_tasks)
        streams.open["anybody/s"].abandon()
        await until_released(synced, 5)


@pytest.mark.parametrize("broken", ["not encoded", "not written"])
async def test_replies_that_cannot_share_a_frame_are_sent_singly(
    synced: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "not encoded":
        monkeypatch.setattr(
            consumers, "encode_replies", lambda replies: encode_replies(replies) if len(replies) == 1 else None
        )
    else:
        monkeypatch.setattr("fastness.server.replies.FRAME_BYTES_MAX", 2_000)
    await fill(synced, 5)
    async with Peer(SocketStreams(synced)) as peer:
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: len(peer.replies) == 5)
        assert [len(decode(frame)) for frame in peer.frames[1:]] == [1] * 5
        assert await leased_and_ready(synced) == (5, 0)


# Invalid frames.


async def test_a_frame_has_a_bounded_number_of_calls(streams: Streams) -> None:
    async with Peer(streams) as peer:
        peer.send(list(range(CALLS_MAX + 1)))
        await until(lambda: peer.closed)
        assert peer.closed == 1002


async def test_connection_without_hello_is_closed(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.server.streams.HELLO_SECONDS", 0.01)
    peer = Peer(streams)
    peer._inbox.put_nowait({"type": "websocket.connect"})
    await asyncio.wait_for(peer.serving, DEADLINE_SECONDS)
    assert peer.closed == 1002
    assert peer.frames == []


async def test_disconnect_before_hello_sends_nothing(streams: Streams) -> None:
    peer = Peer(streams)
    peer._inbox.put_nowait({"type": "websocket.connect"})
    await until(lambda: peer.received == 2)
    peer.disconnect()
    await asyncio.wait_for(peer.serving, DEADLINE_SECONDS)
    assert peer.frames == []


async def test_unexpected_error_in_a_call_closes_the_connection(
    transport: AsyncEmbeddedTransport,
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client then connects again and repeats the call."""

    async def fail(*args: Any) -> None:
        raise ZeroDivisionError

    async with Peer(streams) as peer:
        with monkeypatch.context() as broken:
            broken.setattr(Consumers, "deliver", fail)
            peer.send([Call(1, RECEIVE)])
            await until(lambda: transport.services.database._watches.count)  # type: ignore[attr-defined]
            await transport.call(PUT)
            await until(lambda: peer.closed is not None)
        assert peer.closed == 1011
    assert "ZeroDivisionError" in caplog.text
    async with Peer(streams) as again:
        await transport.call(PUT)
        again.send([Call(1, RECEIVE)])
        assert len((await again.answer(1))["messages"]) == 1
