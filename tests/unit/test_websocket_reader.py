"""What comes in on a connection is taken in order, held back where there is no room, and never held for ever."""

import asyncio
import logging
from typing import Any

import pytest

from holdfast.server.websocket_reader import Hearing


class Socket:
    """As much of a socket as an ear needs."""

    def __init__(self) -> None:
        self.taker: Any = None
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.is_held = self.is_aborted = False

    def hold(self) -> None:
        self.is_held = True

    def go_on(self) -> None:
        self.is_held = False

    def abort(self) -> None:
        self.is_aborted = True


class Hearer:
    """Has room for so many messages until somebody makes more."""

    is_gone = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[str | bytes] = []
        self.more = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self.taken) >= self.room

    def take(self, message: str | bytes) -> None:
        if message == "bad":
            raise RuntimeError("nobody thought of this")
        self.taken.append(message)

    async def wait_for_room(self) -> None:
        await self.more.wait()
        self.more.clear()


def listening(room: int) -> tuple[Socket, Hearer]:
    socket, hearer = Socket(), Hearer(room)
    Hearing(socket, hearer, hearer.take).begin()  # type: ignore[arg-type]
    return socket, hearer


async def test_what_there_is_no_room_for_waits_and_is_taken_in_order() -> None:
    socket, hearer = listening(room=2)
    for message in "abcd":
        socket.taker(message)
    assert (hearer.taken, socket.is_held) == (["a", "b"], True)
    hearer.room = 10
    hearer.more.set()
    while socket.is_held:
        await asyncio.sleep(0)
    assert hearer.taken == ["a", "b", "c", "d"]
    socket.taker("e")
    assert hearer.taken[-1] == "e"


async def test_a_connection_whose_messages_cannot_be_taken_is_cut_and_not_held_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    socket, hearer = listening(room=1)
    with caplog.at_level(logging.ERROR):
        socket.taker("a")
        socket.taker("bad")
        hearer.room = 10
        hearer.more.set()
        while not socket.is_aborted:
            await asyncio.sleep(0)
    assert "in a way that nobody thought of" in caplog.text
    assert hearer.taken == ["a"]


async def test_whoever_is_gone_is_given_nothing_more() -> None:
    socket, hearer = listening(room=1)
    socket.taker("a")
    socket.taker("b")
    hearer.is_gone = True
    hearer.more.set()
    while hearer.more.is_set():
        await asyncio.sleep(0)
    socket.taker("c")
    assert hearer.taken == ["a"]
