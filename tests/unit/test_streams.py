"""A stream, without a network: what it does when connections end, callers go, and replies are not read."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import Closed
from holdfast.kv import serial_database
from holdfast.limits import CALLS_MAX, READS_MAX, TOGETHER_REPLIES_MAX, UNSENT_BYTES_MAX
from holdfast.plane import Options, open_plane_async
from holdfast.plane.batching import call_batch
from holdfast.plane.embedded import AsyncEmbeddedTransport
from holdfast.server import consumers
from holdfast.server.authorization import Anybody
from holdfast.server.consumers import Consumers
from holdfast.server.streams import Streams
from holdfast.threads import run_in_thread
from holdfast.tiers import Tier
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.blobs import PutBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.frames import PROTOCOL, Call, Hello, decode_hello, encode
from holdfast.wire.queues import GetQueueStats, NewMessage, PeekMessages, PutMessages, ReceiveMessages
from holdfast.wire.states import FoundState, GetState, UpdateState
from holdfast.wire.worlds import ReadJournal

DEADLINE_SECONDS = 30.0
PUT = PutMessages("jobs", [NewMessage(b"1")])
RECEIVE = ReceiveMessages("jobs", "ada", wait_seconds=600)
decode = msgspec.msgpack.Decoder().decode


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async("memory:", Options())
    yield transport
    await transport.close()


@pytest.fixture(params=["messages", "a socket"])
def streams(transport: AsyncEmbeddedTransport, request: pytest.FixtureRequest) -> Streams:
    streams = Streams(transport)
    streams.has_sockets = request.param == "a socket"
    return streams


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


class Wire:
    """The socket of a stream, as far as one uses it: frames go to whoever takes them, unless they are held."""

    def __init__(self, peer: "Peer") -> None:
        self.taker: Callable[[bytes], None] | None = None
        self.queue = peer._inbox
        self._peer = peer
        self._held = False
        self._waiting: list[bytes] = []

    def give(self, data: bytes) -> None:
        self._waiting.append(data)
        self._give_on()

    def hold(self) -> None:
        self._held = True

    def go_on(self) -> None:
        self._held = False
        self._give_on()

    def write_now(self, frame: bytes) -> bool:
        if not self._peer.reading.is_set() or self._peer.closed is not None:
            return False
        self._peer.take(frame)
        return True

    def _give_on(self) -> None:
        while self._waiting and not self._held and self.taker is not None:
            self._peer.heard += 1
            self.taker(self._waiting.pop(0))


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
        self._wire = Wire(self) if streams.has_sockets else None
        self.serving = asyncio.create_task(streams.serve(Anybody(), self._receive, self._send, self._wire))

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
        if self._wire is not None and self._wire.taker is not None:
            self._wire.give(encode(frame))
        else:
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
            self.take(message["bytes"])

    def take(self, frame: bytes) -> None:
        self.frames.append(frame)
        found = decode(frame)
        if len(self.frames) > 1:
            self.replies.update((reply[0], reply) for reply in found)


async def puts(transport: AsyncEmbeddedTransport) -> int:
    return (await transport.call(GetQueueStats("jobs"))).put_total


# Connections that end.


async def test_a_call_that_nobody_wants_any_more_is_not_begun(transport: AsyncEmbeddedTransport) -> None:
    [outcome] = await call_batch(transport, [Call(0, PUT, "key")], lambda: False)
    assert isinstance(outcome, Closed)
    assert await puts(transport) == 0
    [outcome] = await call_batch(transport, [Call(0, PUT, "key")], lambda: True)
    assert len(outcome.receipts) == 1


class Held:
    """Keeps the first work that goes to a thread from its turn, for as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: AsyncEmbeddedTransport) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.done = threading.Event()
        self._turn = transport.services.database._turn  # type: ignore[attr-defined]
        self._monkeypatch = monkeypatch
        self._turn.acquire()  # As another thread would: so the event loop sends the work to one.
        monkeypatch.setattr(serial_database, "run_in_thread", self._first)

    async def _first(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def held() -> Any:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_SECONDS)
            try:
                return work(*args, **kwargs)
            finally:
                self.done.set()

        self._monkeypatch.setattr(serial_database, "run_in_thread", run_in_thread)
        return await run_in_thread(held)

    async def free_the_turn(self) -> None:
        await until(self.begun.is_set)
        self._turn.release()


async def test_a_put_that_stood_in_line_while_its_client_sent_it_again_happens_once(
    transport: AsyncEmbeddedTransport, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, transport)
    async with Peer(streams) as old:
        old.send([Call(0, PUT, "key")])
        await held.free_the_turn()
        async with Peer(streams) as new:
            await until(lambda: old.closed == 4001)
            new.send([Call(0, PUT, "key", True)])
            receipt = await new.answer(0)
            held.go_on.set()  # What the old connection sent has its turn only now.
            await until(held.done.is_set)
            new.send([Call(1, PUT, "key", True)])
            assert await new.answer(1) == receipt
    assert await puts(transport) == 1


async def test_a_commit_that_was_begun_is_told_of_though_its_connection_ended(
    transport: AsyncEmbeddedTransport, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(transport.services, "publish", told.extend)
    held = Held(monkeypatch, transport)
    # It was, when it was asked.
    monkeypatch.setattr("holdfast.server.stream_connection.Conversation._is_wanted", lambda self: True)
    async with Peer(streams) as peer:
        peer.send([Call(0, PUT)])
        await held.free_the_turn()
    held.go_on.set()
    await until(lambda: told)
    assert await puts(transport) == 1


# Calls of one frame.


async def test_calls_of_one_frame_happen_in_their_order(streams: Streams, transport: AsyncEmbeddedTransport) -> None:
    """Whatever they are, and whatever they promise: a read sees the write before it, and none behind it."""
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
        assert len(peer.frames) == 2, "one group, answered in one frame"


async def test_reads_alone_wait_for_no_writer(streams: Streams, transport: AsyncEmbeddedTransport) -> None:
    turn = transport.services.database._turn  # type: ignore[attr-defined]
    async with Peer(streams) as peer:
        with turn:
            peer.send([Call(number, GetState("s")) for number in range(3)])
            assert [(await peer.answer(number))["state"] for number in range(3)] == [None] * 3


@pytest.mark.parametrize("writes", [False, True])
async def test_long_answers_end_a_group_and_the_order_stays(
    writes: bool, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.plane.batching.GROUP_ANSWERS_BYTES", 2_500)
    await transport.call(UpdateState("s", canonical("x" * 1_000)))
    calls = [Call(number, GetState("s")) for number in range(8)]
    if writes:
        calls.insert(4, Call(8, UpdateState("s", canonical("y" * 1_000))))
    groups = []
    while calls:
        groups.append(await call_batch(transport, calls))
        calls = calls[len(groups[-1]) :]
    assert [len(group) for group in groups] == ([3, 4, 2] if writes else [3, 3, 2])
    values = [found.state.value[-1:] for group in groups for found in group if isinstance(found, FoundState)]
    assert values == ([b"x"] * 4 + [b"y"] * 4 if writes else [b"x"] * 8)


# Callers that go.


async def standing(transport: AsyncEmbeddedTransport, line: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await transport.call(GetQueueStats("jobs"))).waiting_consumers != line:
            await asyncio.sleep(0.001)


async def test_a_call_that_is_cancelled_leaves_its_line_and_is_answered(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    async with Peer(streams) as peer:
        peer.send([Call(number, RECEIVE) for number in range(3)])
        await standing(transport, 3)
        peer.send([1, 7, 0, 1])  # One of them twice, and one that there is not.
        assert [await peer.problem(number) for number in (0, 1)] == ["closed", "closed"]
        await standing(transport, 1)
        await transport.call(PUT)
        assert len((await peer.answer(2))["messages"]) == 1
        assert len(peer.replies) == 3


async def test_a_call_that_is_cancelled_before_it_began_is_answered_too(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    async with Peer(streams) as peer:
        peer.send([Call(0, RECEIVE), 0, Call(1, PUT), 1])
        assert await peer.problem(0) == "closed"
        assert len((await peer.answer(1))["receipts"]) == 1, "what does not wait is done"
        await standing(transport, 0)


async def test_calls_that_were_cancelled_make_room_for_others(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.stream_connection.CALLS_MAX", 4)
    async with Peer(streams) as peer:
        for first in range(0, 30, 3):
            numbers = range(first, first + 3)
            peer.send([Call(number, RECEIVE) for number in numbers])
            peer.send(list(numbers))
            assert {await peer.problem(number) for number in numbers} == {"closed"}


# Replies that are not read.


def fill(transport: AsyncEmbeddedTransport, messages: int = 100) -> Any:
    return transport.call(PutMessages("jobs", [NewMessage(b"x" * 1_000) for _ in range(messages)]))


async def settled(peer: Peer) -> int:
    """How many frames the server has heard once it hears no more."""
    heard, looks = -1, 0
    while looks < 20:
        await asyncio.sleep(0.001)
        heard, looks = (heard, looks + 1) if heard == peer.heard else (peer.heard, 0)
    return heard


async def test_nothing_more_is_heard_from_a_connection_that_does_not_read(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    await fill(transport)
    frames, each = 100, 20
    async with Peer(streams) as deaf, Peer(streams, "other") as other:
        deaf.reading.clear()
        for first in range(0, frames * each, each):
            deaf.send([Call(first + number, PeekMessages("jobs", 100)) for number in range(each)])
        assert await settled(deaf) < 10
        assert UNSENT_BYTES_MAX <= sum(stream.replies.unsent for stream in streams.open.values()) < 4 << 20
        other.send([Call(0, PUT)])
        await other.answer(0)
        deaf.reading.set()
        await until(lambda: len(deaf.replies) == frames * each)
        assert max(map(len, deaf.frames)) < 2 << 20, "they were answered as they were read"


@pytest.mark.parametrize("request_", [PeekMessages("jobs", 100), ReadJournal("ada", 0, 100)])
async def test_only_so_many_long_answers_are_in_memory(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, request_: Any
) -> None:
    """On a store that is asked from threads, many calls can be under way before the first answer is not read."""
    under_way, most, go_on = 0, 0, asyncio.Event()

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await go_on.wait()
        under_way -= 1
        return [None] if isinstance(args[0], list) else None

    monkeypatch.setattr(transport, "call", slowly)
    monkeypatch.setattr(streams, "call_batch", slowly)
    async with Peer(streams) as peer:
        for number in range(100):
            peer.send([Call(number, request_)])
        await settled(peer)
        go_on.set()
        await until(lambda: len(peer.replies) == 100)
    assert most == READS_MAX


async def test_a_connection_that_does_not_read_holds_up_neither_its_successor_nor_a_cut(
    streams: Streams, transport: AsyncEmbeddedTransport
) -> None:
    await fill(transport)
    async with Peer(streams) as deaf, Peer(streams, "other") as other:
        for peer in (deaf, other):
            peer.reading.clear()
            peer.send([Call(number, PeekMessages("jobs", 100)) for number in range(20)])
        await until(lambda: unsent_of(streams, "s") and unsent_of(streams, "other"))
        async with Peer(streams) as new:
            new.send([Call(0, PUT)])
            await new.answer(0)
            await asyncio.wait_for(streams.cut("anybody"), DEADLINE_SECONDS)
            await until(lambda: new.closed == 4003)
        for peer in (deaf, other):
            peer.end()


def unsent_of(streams: Streams, session: str) -> int:
    return streams.open[f"anybody/{session}"].replies.unsent


async def test_replies_are_split_into_frames(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.replies.FRAME_BYTES_MAX", 1_500)
    await fill(transport, 2)
    async with Peer(streams) as peer:
        peer.send([*(Call(number, PUT) for number in range(64)), Call(64, PeekMessages("jobs", 2))])
        await until(lambda: len(peer.replies) == 65)
        assert len((await peer.answer(64))["messages"]) == 2
        assert len(peer.frames) > 5
        assert sum(len(frame) > 1_500 for frame in peer.frames) == 1, "only the one that is so long by itself"


async def test_an_answer_that_cannot_be_encoded_is_a_problem_of_its_call_alone(
    streams: Streams,
    transport: AsyncEmbeddedTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(streams, "call_batch", lambda calls, wanted: asyncio.sleep(0, [1, 1 << 70, 3]))
    async with Peer(streams) as peer:
        peer.send([Call(number, PUT) for number in range(3)])
        assert (await peer.answer(0), await peer.problem(1), await peer.answer(2)) == (1, "error", 3)
    assert "cannot be encoded" in caplog.text


# Answers that do not arrive.


async def leased(transport: AsyncEmbeddedTransport) -> tuple[int, int]:
    """How many messages somebody has, and how many are there for anybody."""
    stats = await transport.call(GetQueueStats("jobs"))
    return stats.leased, stats.ready


async def given_back(transport: AsyncEmbeddedTransport, ready: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await leased(transport) != (0, ready):
            await asyncio.sleep(0.001)
    found = (await transport.call(PeekMessages("jobs", 1))).messages[0]
    assert found.failure_attempts == 0, "it was nobody's failure"


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("ending", ["gone", "cut", "taken over"])
async def test_messages_that_could_not_be_sent_are_given_back_at_once(
    streams: Streams, transport: AsyncEmbeddedTransport, key: str | None, ending: str
) -> None:
    await fill(transport, 3)
    async with Peer(streams) as peer:
        peer.reading.clear()
        peer.send([Call(0, ReceiveMessages("jobs", "ada", 2), key)])
        await until(lambda: unsent_of(streams, "s"))
        assert await leased(transport) == (2, 1)
        if ending == "gone":
            peer.end()
        elif ending == "cut":
            await streams.cut("anybody")
        else:
            async with Peer(streams):
                pass
        await given_back(transport, 3)
        peer.end()


async def test_a_consumer_that_asks_again_has_what_its_old_connection_could_not_tell(
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
            assert await leased(transport) == (1, 1)
        old.end()


async def test_a_consumer_is_told_of_as_many_messages_as_fit_a_reply(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.replies.ANSWER_BYTES_MAX", 20_000)
    monkeypatch.setattr("holdfast.server.consumers._FEW", 1)
    await fill(transport, 60)
    async with Peer(streams) as peer:
        peer.send([Call(0, ReceiveMessages("jobs", "ada", 60), "key")])
        found = (await peer.answer(0))["messages"]
        assert 7 <= len(found) < 20
        await until(lambda: not streams._tasks)
        assert await leased(transport) == (len(found), 60 - len(found))
        first = (await transport.call(PeekMessages("jobs", 60))).messages
        assert len(found) + len(first) == 60


async def test_an_answer_that_no_reply_carries_is_a_problem_that_says_so(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.replies.FRAME_BYTES_MAX", 20_000)
    monkeypatch.setattr("holdfast.server.replies.ANSWER_BYTES_MAX", 20_000)
    await fill(transport, 60)
    async with Peer(streams) as peer:
        peer.send([Call(0, PeekMessages("jobs", 60)), Call(1, PUT), Call(2, PeekMessages("jobs", 10))])
        assert await peer.problem(0) == "answer_too_large"
        assert len((await peer.answer(1))["receipts"]) == 1
        assert len((await peer.answer(2))["messages"]) == 10
        assert peer.closed is None


async def test_consumers_that_waited_while_nobody_reads_get_nothing(
    streams: Streams, transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are told is kept for them only up to a bound; the messages are for those who read."""
    monkeypatch.setattr("holdfast.server.replies.ANSWER_BYTES_MAX", 5_000)
    async with Peer(streams) as deaf, Peer(streams, "other") as other:
        deaf.send([Call(number, RECEIVE) for number in range(50)])
        await standing(transport, 50)
        deaf.reading.clear()
        await fill(transport, 60)
        await standing(transport, 0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await leased(transport))[0] >= 10:
                await asyncio.sleep(0.001)
        await until(lambda: not streams._tasks)
        kept, free = await leased(transport)
        assert (free, kept < 10) == (60 - kept, True)
        other.send([Call(0, ReceiveMessages("jobs", "bob", 2))])
        assert len((await other.answer(0))["messages"]) == 2
        deaf.reading.set()
        await until(lambda: len(deaf.replies) == 50)
        assert sum(reply[2] is None for reply in deaf.replies.values()) == kept


@pytest.fixture
async def synced(tmp_path: Path) -> AsyncIterator[AsyncEmbeddedTransport]:
    """A port whose callers wait for a sync, most of them together."""
    transport = await open_plane_async(f"dir:{tmp_path}", Options())
    yield transport
    await transport.close()


def streams_of(transport: AsyncEmbeddedTransport) -> Streams:
    streams = Streams(transport)
    streams.has_sockets = True
    return streams


async def test_consumers_who_are_served_together_are_told_together(synced: AsyncEmbeddedTransport) -> None:
    async with Peer(streams_of(synced)) as peer:
        await fill(synced, 100)
        peer.send([Call(number, RECEIVE, f"key {number}") for number in range(100)])
        await until(lambda: len(peer.replies) == 100)
        assert len({reply[1]["messages"][0]["id"] for reply in peer.replies.values()}) == 100
        assert max(len(decode(frame)) for frame in peer.frames[1:]) == TOGETHER_REPLIES_MAX
        assert await leased(synced) == (100, 0)


async def test_a_long_message_shares_no_frame(synced: AsyncEmbeddedTransport) -> None:
    body = b"x" * 100_000
    stored = await synced.call(PutBlob(body))
    await synced.call(PutMessages("jobs", [NewMessage(blob=stored.hash, blob_size=len(body))] * 5))
    async with Peer(streams_of(synced)) as peer:
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: len(peer.replies) == 5)
        assert [len(decode(frame)) for frame in peer.frames[1:]] == [1] * 5


@pytest.mark.parametrize("key", ["key", None])
async def test_consumers_who_are_gone_before_they_are_told_leave_their_messages(
    synced: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Their messages are leased and synced, and the frame is written at the end of the turn: in between they go."""
    publish, gone = Consumers._tell_ready, []
    streams = streams_of(synced)

    def go_first(self: Consumers) -> None:
        gone.append(len(self._ready))
        streams.open["anybody/s"].drop()
        publish(self)

    monkeypatch.setattr(Consumers, "_tell_ready", go_first)
    await fill(synced, 5)
    async with Peer(streams) as peer:
        peer.send([Call(number, RECEIVE, key and f"{key} {number}") for number in range(5)])
        await until(lambda: gone)
        await given_back(synced, 5)
        assert (gone, peer.replies) == ([5], {})


async def test_consumers_who_do_not_read_and_go_leave_their_messages_at_once(synced: AsyncEmbeddedTransport) -> None:
    await fill(synced, 5)
    streams = streams_of(synced)
    async with Peer(streams) as peer:
        peer.reading.clear()
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: streams.open["anybody/s"]._replying)
        streams.open["anybody/s"].drop()
        await given_back(synced, 5)


@pytest.mark.parametrize("broken", ["not encoded", "not written"])
async def test_what_cannot_be_told_together_is_told_one_by_one(
    synced: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "not encoded":
        encoded = consumers.encoded
        monkeypatch.setattr(consumers, "encoded", lambda replies: encoded(replies) if len(replies) == 1 else None)
    else:
        monkeypatch.setattr("holdfast.server.replies.FRAME_BYTES_MAX", 2_000)
    await fill(synced, 5)
    async with Peer(streams_of(synced)) as peer:
        peer.send([Call(number, RECEIVE) for number in range(5)])
        await until(lambda: len(peer.replies) == 5)
        assert [len(decode(frame)) for frame in peer.frames[1:]] == [1] * 5
        assert await leased(synced) == (5, 0)


# Frames that are none.


async def test_a_frame_has_a_bounded_number_of_calls(streams: Streams) -> None:
    async with Peer(streams) as peer:
        peer.send(list(range(CALLS_MAX + 1)))
        await until(lambda: peer.closed)
        assert peer.closed == 1002


async def test_who_says_no_hello_does_not_keep_its_connection(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.stream_connection.HELLO_SECONDS", 0.01)
    peer = Peer(streams)
    peer._inbox.put_nowait({"type": "websocket.connect"})
    await asyncio.wait_for(peer.serving, DEADLINE_SECONDS)
    assert peer.closed == 1002
    assert peer.frames == []


async def test_who_hangs_up_before_saying_hello_is_told_nothing(streams: Streams) -> None:
    peer = Peer(streams)
    peer._inbox.put_nowait({"type": "websocket.connect"})
    await until(lambda: peer.heard == 2)
    peer.end()
    await asyncio.wait_for(peer.serving, DEADLINE_SECONDS)
    assert peer.frames == []


async def test_a_call_whose_answer_fails_in_a_way_that_nobody_thought_of_does_not_wait_for_ever(
    transport: AsyncEmbeddedTransport,
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection is cut, the client makes another one, and asks again there."""

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
