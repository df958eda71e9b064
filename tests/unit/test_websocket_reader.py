"""Messages are handled in order and paused at capacity; a failure aborts the connection."""

import asyncio
import logging
from typing import Any

import pytest

from fastness.server.websocket_reader import WebsocketReader


class Socket:
    """Stands in for BoundedSocket."""

    def __init__(self) -> None:
        self.on_message: Any = None
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.is_paused = self.is_aborted = False

    def pause_receiving(self) -> None:
        self.is_paused = True

    def resume_receiving(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        self.is_aborted = True


class Receiver:
    """Handles messages up to a capacity, which tests can raise."""

    is_closed = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.handled: list[str | bytes] = []
        self.raised = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self.handled) >= self.capacity

    def handle(self, message: str | bytes) -> None:
        if message == "bad":
            raise RuntimeError("unexpected")
        self.handled.append(message)

    async def wait_for_capacity(self) -> None:
        await self.raised.wait()
        self.raised.clear()


def make_reader(capacity: int) -> tuple[Socket, Receiver]:
    socket, receiver = Socket(), Receiver(capacity)
    WebsocketReader(socket, receiver, receiver.handle).start()  # type: ignore[arg-type]
    return socket, receiver


async def test_messages_above_capacity_are_queued_in_order() -> None:
    socket, receiver = make_reader(capacity=2)
    for message in "abcd":
        socket.on_message(message)
    assert (receiver.handled, socket.is_paused) == (["a", "b"], True)
    receiver.capacity = 10
    receiver.raised.set()
    while socket.is_paused:
        await asyncio.sleep(0)
    assert receiver.handled == ["a", "b", "c", "d"]
    socket.on_message("e")
    assert receiver.handled[-1] == "e"


async def test_connection_is_aborted_if_a_queued_message_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    socket, receiver = make_reader(capacity=1)
    with caplog.at_level(logging.ERROR):
        socket.on_message("a")
        socket.on_message("bad")
        receiver.capacity = 10
        receiver.raised.set()
        while not socket.is_aborted:
            await asyncio.sleep(0)
    assert "unexpected error" in caplog.text
    assert receiver.handled == ["a"]


async def test_closed_receiver_gets_no_more_messages() -> None:
    socket, receiver = make_reader(capacity=1)
    socket.on_message("a")
    socket.on_message("b")
    receiver.is_closed = True
    receiver.raised.set()
    while receiver.raised.is_set():
        await asyncio.sleep(0)
    socket.on_message("c")
    assert receiver.handled == ["a"]
