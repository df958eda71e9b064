"""Small calls that are made at the same time travel as one, and each is answered as if it had been alone."""

import asyncio
from typing import Any

import pytest

from holdfast.client.batching import CallMerger, Small
from holdfast.client.pending_calls import TooLong
from holdfast.errors import InvalidArgument, Unreachable
from holdfast.tiers import Tier
from holdfast.wire.queues import (
    AckMessages,
    MessageLease,
    NewMessage,
    Outcome,
    Outcomes,
    PutMessages,
    Receipt,
    Receipts,
)


class Server:
    """Answers what a frame brings a turn of the loop later, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.merging = CallMerger(self.send)
        self._flushing = False

    async def call(self, request: Any) -> Any:
        """A call that leaves with all others of this turn of the loop."""
        loop = asyncio.get_running_loop()
        small = Small(request, loop.create_future())
        self.merging.add(small)
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        return await small.future

    def _flush(self) -> None:
        self._flushing = False
        self.merging.send()

    def send(self, request: Any) -> "asyncio.Future[Any]":
        self.asked.append(request)
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(self._answer, request, future)
        return future

    def _answer(self, request: Any, future: "asyncio.Future[Any]") -> None:
        if self.error is not None:
            future.set_exception(self.error)
        elif isinstance(request, AckMessages):
            future.set_result(Outcomes([Outcome(correlation_id=lease.id) for lease in request.leases]))
        elif any(message.payload == b"wrong" for message in request.messages):
            future.set_exception(InvalidArgument("One of them is wrong; correct it"))
        else:
            receipts = [Receipt(each.payload.decode(), request.tier, False, "") for each in request.messages]
            future.set_result(Receipts(receipts))

    def sizes(self) -> list[int]:
        return [len(each.messages if isinstance(each, PutMessages) else each.leases) for each in self.asked]


@pytest.fixture
async def server() -> Server:
    return Server()


def put(*bodies: str, queue: str = "jobs", tier: Tier = Tier.CRITICAL) -> PutMessages:
    return PutMessages(queue, [NewMessage(body.encode()) for body in bodies], tier=tier)


def ack(id: str) -> AckMessages:
    return AckMessages("jobs", [MessageLease(id, "lease", 1)])


def ids(answer: Receipts) -> list[str]:
    return [receipt.id for receipt in answer.receipts]


async def test_a_call_that_is_alone_goes_at_once_as_it_is(server: Server) -> None:
    request = put("a")
    assert ids(await server.call(request)) == ["a"]
    assert server.asked == [request]


async def test_puts_of_one_turn_travel_together_and_each_has_its_own_receipts(server: Server) -> None:
    answers = await asyncio.gather(*(server.call(put(f"{n}", f"{n}'")) for n in range(5)))
    assert [ids(answer) for answer in answers] == [[f"{n}", f"{n}'"] for n in range(5)]
    assert server.sizes() == [10]


async def test_acks_travel_together_and_apart_from_puts(server: Server) -> None:
    await asyncio.gather(
        server.call(put("first")), *(server.call(ack(f"{n}")) for n in range(3)), server.call(put("x"))
    )
    assert sorted(server.sizes()) == [2, 3]
    assert {type(each) for each in server.asked} == {PutMessages, AckMessages}


async def test_other_queues_tiers_and_universes_are_other_calls(server: Server) -> None:
    other = PutMessages("jobs", [NewMessage(b"x")], "elsewhere")
    calls = [put("a"), put("b"), put("c", queue="mail"), put("d", tier=Tier.IMPORTANT), other]
    await asyncio.gather(*(server.call(each) for each in calls))
    assert server.sizes() == [2, 1, 1, 1]


async def test_one_that_is_wrong_fails_alone(server: Server) -> None:
    bodies = ["first", "a", "wrong", "b"]
    answers = await asyncio.gather(*(server.call(put(body)) for body in bodies), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, InvalidArgument, Receipts]
    assert server.sizes() == [4, 1, 1, 1, 1]


async def test_a_server_that_is_gone_is_gone_for_all(server: Server) -> None:
    server.error = Unreachable("Nobody is there")
    answers = await asyncio.gather(*(server.call(put(f"{n}")) for n in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unreachable] * 4
    assert server.sizes() == [4], "what may have happened is not sent again by itself"


async def test_no_call_has_more_messages_or_bytes_than_it_may(server: Server) -> None:
    await asyncio.gather(*(server.call(put(f"{n}")) for n in range(600)))
    assert server.sizes() == [256, 256, 88]
    server.asked.clear()
    await asyncio.gather(*(server.call(put("x" * 100_000)) for _ in range(6)))
    assert server.sizes() == [2, 2, 2]


async def test_whoever_is_cancelled_disturbs_nobody(server: Server) -> None:
    tasks = [asyncio.ensure_future(server.call(put(f"{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, asyncio.CancelledError, Receipts]
    assert server.sizes() == [3], "whoever has gone before it was sent is not sent"


async def test_many_callers_are_answered_in_two_halves_so_that_they_ask_in_two_frames(server: Server) -> None:
    async def twice(number: int) -> None:
        await server.call(put(f"{number}"))
        await server.call(put(f"{number}'"))

    await asyncio.gather(*(twice(number) for number in range(40)))
    assert server.sizes() == [40, 20, 20]


async def test_what_cannot_be_sent_fails_by_itself(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = server.send

    def send(request: Any) -> Any:
        if any(len(message.payload) > 10 for message in request.messages):
            raise TooLong
        return whole(request)

    monkeypatch.setattr(server, "merging", CallMerger(send))
    bodies = ["a", "x" * 11, "b"]
    answers = await asyncio.gather(*(server.call(put(body)) for body in bodies), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, TooLong, Receipts]


async def test_a_call_that_is_none_is_told_so_and_those_beside_it_go() -> None:
    server = Server()
    wrong: Any = PutMessages("jobs", [NewMessage(5)])  # type: ignore[arg-type]

    def send(request: Any) -> "asyncio.Future[Any]":
        if request is wrong:
            raise InvalidArgument("PutMessages cannot be sent")
        return server.send(request)

    server.merging = CallMerger(send)
    good = PutMessages("jobs", [NewMessage(b"good")])
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(server.call(good), server.call(wrong), return_exceptions=True)
    assert isinstance(outcomes[0], Receipts)
    assert isinstance(outcomes[1], InvalidArgument)
