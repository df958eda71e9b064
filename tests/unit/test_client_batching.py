"""Concurrent small calls are sent as one call, and each caller receives its own answer."""

import asyncio
from typing import Any

import pytest

from fastness.client.batching import BatchableCall, RequestBatcher
from fastness.client.pending_calls import TooLong
from fastness.errors import InvalidArgument, Unreachable
from fastness.tiers import Tier
from fastness.wire.queues import (
    AckMessages,
    MessageLease,
    NewMessage,
    NewResult,
    Outcome,
    Outcomes,
    PackedAck,
    PutMessages,
    Receipt,
    Receipts,
    RefusedAck,
)


class Server:
    """Answers each request one event-loop iteration later, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: Exception | None = None
        self.refused: list[RefusedAck] = []  # Of every ack.
        self.batcher = RequestBatcher(self.send, asyncio.get_running_loop().call_soon)
        self._flushing = False

    async def call(self, request: Any) -> Any:
        """Make a call that is sent with all other calls of this event-loop iteration."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.batcher.add(BatchableCall(request, future))
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._flushing = False
        self.batcher.send()

    def send(self, request: Any) -> "asyncio.Future[Any]":
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(self._answer, request, future)
        return future

    def _answer(self, request: Any, future: "asyncio.Future[Any]") -> None:
        if self.error is not None:
            future.set_exception(self.error)
        elif isinstance(request, AckMessages):
            future.set_result(Outcomes([Outcome(correlation_id=lease.id) for lease in request.leases], self.refused))
        elif any(message.payload == b"wrong" for message in request.messages):
            future.set_exception(InvalidArgument("One of them is wrong; correct it"))
        else:
            receipts = [Receipt(each.payload.decode(), request.tier, False, "") for each in request.messages]
            future.set_result(Receipts(receipts))

    def sizes(self) -> list[int]:
        return [len(each.messages if isinstance(each, PutMessages) else each.leases) for each in self.requests]


@pytest.fixture
async def server() -> Server:
    return Server()


def put(*bodies: str, queue: str = "jobs", tier: Tier = Tier.CRITICAL) -> PutMessages:
    return PutMessages(queue, [NewMessage(body.encode()) for body in bodies], tier=tier)


def ack(*ids: str, results: list[NewResult | None] | None = None) -> AckMessages:
    return AckMessages("jobs", [MessageLease(id, "lease", 1) for id in ids], results=results or [])


def ids(answer: Receipts) -> list[str]:
    return [receipt.id for receipt in answer.receipts]


async def test_a_single_call_is_sent_unchanged(server: Server) -> None:
    request = put("a")
    assert ids(await server.call(request)) == ["a"]
    assert server.requests == [request]


async def test_concurrent_puts_are_sent_together_and_each_gets_its_own_receipts(server: Server) -> None:
    answers = await asyncio.gather(*(server.call(put(f"{n}", f"{n}'")) for n in range(5)))
    assert [ids(answer) for answer in answers] == [[f"{n}", f"{n}'"] for n in range(5)]
    assert server.sizes() == [10]


async def test_acks_are_sent_together_and_separately_from_puts(server: Server) -> None:
    await asyncio.gather(
        server.call(put("first")), *(server.call(ack(f"{n}")) for n in range(3)), server.call(put("x"))
    )
    assert sorted(server.sizes()) == [2, 3]
    assert {type(each) for each in server.requests} == {PutMessages, AckMessages}


async def test_acks_that_are_sent_together_keep_their_results(server: Server) -> None:
    one, two = NewResult(b"one"), NewResult(b"two")
    await asyncio.gather(
        server.call(ack("a", "b")), server.call(ack("c", "d", results=[one])), server.call(ack("e", results=[two]))
    )
    (sent,) = server.requests
    kept = {lease.id: result for lease, result in zip(sent.leases, sent.results, strict=True)}
    assert kept == {"a": None, "b": None, "c": one, "d": None, "e": two}


async def test_each_caller_is_told_which_of_its_packed_acks_were_refused(server: Server) -> None:
    def packed(lease: bytes, bits: int) -> AckMessages:
        return AckMessages("jobs", [], packed=[PackedAck(lease, 1, [], bytes([bits]))])

    server.refused = lost = [RefusedAck(b"one", 1, "gone"), RefusedAck(b"two", 0, "gone")]
    answers = await asyncio.gather(
        *map(server.call, (packed(b"one", 0b01), packed(b"one", 0b10), packed(b"two", 0b11), packed(b"three", 0b11)))
    )
    assert [answer.refused for answer in answers] == [[], lost[:1], lost[1:], []]
    (sent,) = server.requests
    assert [(each.lease, each.mask) for each in sent.packed] == [(b"one", 0b11), (b"two", 0b11), (b"three", 0b11)]


async def test_queues_tiers_and_universes_are_batched_separately(server: Server) -> None:
    other = PutMessages("jobs", [NewMessage(b"x")], "elsewhere")
    calls = [put("a"), put("b"), put("c", queue="mail"), put("d", tier=Tier.IMPORTANT), other]
    await asyncio.gather(*(server.call(each) for each in calls))
    assert server.sizes() == [2, 1, 1, 1]


async def test_an_invalid_call_fails_by_itself(server: Server) -> None:
    bodies = ["first", "a", "wrong", "b"]
    answers = await asyncio.gather(*(server.call(put(body)) for body in bodies), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, InvalidArgument, Receipts]
    assert server.sizes() == [4, 1, 1, 1, 1]


async def test_an_unreachable_server_fails_every_call_of_the_batch(server: Server) -> None:
    server.error = Unreachable("no server")
    answers = await asyncio.gather(*(server.call(put(f"{n}")) for n in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unreachable] * 4
    assert server.sizes() == [4], "a batch that may have been carried out is not sent again one by one"


async def test_batches_respect_the_message_and_byte_limits(server: Server) -> None:
    await asyncio.gather(*(server.call(put(f"{n}")) for n in range(600)))
    assert server.sizes() == [256, 256, 88]
    server.requests.clear()
    await asyncio.gather(*(server.call(put("x" * 100_000)) for _ in range(6)))
    assert server.sizes() == [2, 2, 2]


async def test_a_cancelled_call_does_not_affect_the_others(server: Server) -> None:
    tasks = [asyncio.ensure_future(server.call(put(f"{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, asyncio.CancelledError, Receipts]
    assert server.sizes() == [3], "a call that was cancelled before it was sent is not sent"


async def test_many_callers_are_answered_in_two_halves(server: Server) -> None:
    async def put_twice(number: int) -> None:
        await server.call(put(f"{number}"))
        await server.call(put(f"{number}'"))

    await asyncio.gather(*(put_twice(number) for number in range(40)))
    assert server.sizes() == [40, 20, 20]


async def test_a_call_that_does_not_fit_a_frame_fails_by_itself(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_all = server.send

    def send(request: Any) -> Any:
        if any(len(message.payload) > 10 for message in request.messages):
            raise TooLong
        return send_all(request)

    monkeypatch.setattr(server, "batcher", RequestBatcher(send))
    bodies = ["a", "x" * 11, "b"]
    answers = await asyncio.gather(*(server.call(put(body)) for body in bodies), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, TooLong, Receipts]


async def test_a_malformed_call_fails_by_itself() -> None:
    server = Server()
    wrong: Any = PutMessages("jobs", [NewMessage(5)])  # type: ignore[arg-type]

    def send(request: Any) -> "asyncio.Future[Any]":
        if request is wrong:
            raise InvalidArgument("PutMessages cannot be sent")
        return server.send(request)

    server.batcher = RequestBatcher(send)
    good = PutMessages("jobs", [NewMessage(b"good")])
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(server.call(good), server.call(wrong), return_exceptions=True)
    assert isinstance(outcomes[0], Receipts)
    assert isinstance(outcomes[1], InvalidArgument)
