"""Small calls that are made at the same time travel as one, and each is answered as if it had been alone."""

import asyncio
from typing import Any

import pytest

from holdfast.client.merging import Merging
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
    """Answers puts and acks after a turn of the loop, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None

    async def ask(self, request: Any) -> Any:
        self.asked.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if isinstance(request, AckMessages):
            return Outcomes([Outcome(correlation_id=lease.id) for lease in request.leases])
        if any(message.payload == b"wrong" for message in request.messages):
            raise InvalidArgument("One of them is wrong; correct it")
        return Receipts([Receipt(each.payload.decode(), request.tier, False, "") for each in request.messages])

    def sizes(self) -> list[int]:
        return [len(each.messages if isinstance(each, PutMessages) else each.leases) for each in self.asked]


@pytest.fixture
def server() -> Server:
    return Server()


def put(*bodies: str, queue: str = "jobs", tier: Tier = Tier.CRITICAL) -> PutMessages:
    return PutMessages(queue, [NewMessage(body.encode()) for body in bodies], tier=tier)


def ack(id: str) -> AckMessages:
    return AckMessages("jobs", [MessageLease(id, "lease", 1)])


def ids(answer: Receipts) -> list[str]:
    return [receipt.id for receipt in answer.receipts]


async def test_a_call_that_is_alone_goes_at_once_as_it_is(server: Server) -> None:
    request = put("a")
    assert ids(await Merging(server.ask).call(request)) == ["a"]
    assert server.asked == [request]


async def test_puts_of_one_turn_travel_together_and_each_has_its_own_receipts(server: Server) -> None:
    merging = Merging(server.ask)
    answers = await asyncio.gather(*(merging.call(put(f"{n}", f"{n}'")) for n in range(5)))
    assert [ids(answer) for answer in answers] == [[f"{n}", f"{n}'"] for n in range(5)]
    assert server.sizes() == [2, 8]


async def test_acks_travel_together_and_apart_from_puts(server: Server) -> None:
    merging = Merging(server.ask)
    await asyncio.gather(
        merging.call(put("first")), *(merging.call(ack(f"{n}")) for n in range(3)), merging.call(put("x"))
    )
    assert sorted(server.sizes()) == [1, 1, 3]
    assert {type(each) for each in server.asked} == {PutMessages, AckMessages}


async def test_other_queues_tiers_and_universes_are_other_calls(server: Server) -> None:
    merging = Merging(server.ask)
    other = PutMessages("jobs", [NewMessage(b"x")], "elsewhere")
    calls = [put("a"), put("b"), put("c", queue="mail"), put("d", tier=Tier.IMPORTANT), other]
    await asyncio.gather(*(merging.call(each) for each in calls))
    assert server.sizes() == [1] * 5


async def test_one_that_is_wrong_fails_alone(server: Server) -> None:
    merging = Merging(server.ask)
    bodies = ["first", "a", "wrong", "b"]
    answers = await asyncio.gather(*(merging.call(put(body)) for body in bodies), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, InvalidArgument, Receipts]
    assert server.sizes() == [1, 3, 1, 1, 1]


async def test_a_server_that_is_gone_is_gone_for_all(server: Server) -> None:
    server.error = Unreachable("Nobody is there")
    merging = Merging(server.ask)
    answers = await asyncio.gather(*(merging.call(put(f"{n}")) for n in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unreachable] * 4
    assert server.sizes() == [1, 3], "what may have happened is not sent again by itself"


async def test_no_call_has_more_messages_or_bytes_than_it_may(server: Server) -> None:
    merging = Merging(server.ask)
    await asyncio.gather(*(merging.call(put(f"{n}")) for n in range(600)))
    assert server.sizes() == [1, 256, 256, 87]
    server.asked.clear()
    await asyncio.gather(*(merging.call(put("x" * 100_000)) for _ in range(6)))
    assert server.sizes() == [1, 2, 2, 1]


async def test_whoever_is_cancelled_disturbs_nobody(server: Server) -> None:
    merging = Merging(server.ask)
    tasks = [asyncio.ensure_future(merging.call(put(f"{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Receipts, Receipts, asyncio.CancelledError, Receipts]
    assert server.sizes() == [1, 2]


async def test_when_all_are_answered_the_next_one_is_alone_again(server: Server) -> None:
    merging = Merging(server.ask)
    await asyncio.gather(*(merging.call(put(f"{n}")) for n in range(3)))
    request = put("x")
    await merging.call(request)
    assert server.asked[-1] is request
