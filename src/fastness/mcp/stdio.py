"""The transport over standard input and output: one client, which is the process that started this one.

Only the protocol uses the two streams. Other code in the process reads nothing, and what it prints goes to stderr.

The streams are read and written by threads that do not keep the process alive. The SDK's own transport would wait for
the next line of input before the process can stop.
"""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import anyio
import msgspec
from mcp.server.stdio import stdio_server

from fastness.errors import InvalidArgument
from fastness.limits import MCP_LINE_BYTES_MAX, MCP_LINES_BUFFERED
from fastness.mcp.dispatch import FastnessServer
from fastness.mcp.errors import INVALID_ID, has_invalid_id

_READ_BYTES: Final = 65_536


async def serve_stdio(server: FastnessServer) -> None:
    """Serve one client until it closes its end. Cancel it to stop earlier; requests that still run are cancelled then.

    Raises:
        InvalidArgument: the client sent a message that is too long.
    """
    with _claimed_streams() as (reading, writing), anyio.CancelScope() as scope:
        loop = asyncio.get_running_loop()
        output: Any = _Output(loop, writing, on_broken=scope.cancel)
        lines: Any = _Lines(loop, reading, output)
        async with stdio_server(stdin=lines, stdout=output) as (received, sent):
            await server.run(received, sent, server.create_initialization_options())
    if lines.error is not None:
        raise lines.error


@contextmanager
def _claimed_streams() -> Iterator[tuple[int, int]]:
    """Descriptors of standard input and output that nothing else in the process uses."""
    sys.stdout.flush()
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield reading, writing
    finally:
        sys.stdout.flush()  # What was printed meanwhile belongs to stderr.
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        # The duplicates stay open: a thread may still wait for one of them.


class _Message(msgspec.Struct):
    """What is read of a line before the SDK decodes it."""

    id: Any = msgspec.UNSET


class _Lines:
    """The lines of a descriptor. Those whose id the SDK does not know are answered at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, output: "_Output") -> None:
        self.error: InvalidArgument | None = None
        self._loop = loop
        self._descriptor = descriptor
        self._output = output
        self._lines = asyncio.Queue[bytes | None](MCP_LINES_BUFFERED)
        threading.Thread(target=self._read, name="fastness-mcp-stdin", daemon=True).start()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while (line := await self._lines.get()) is not None:
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):  # The SDK has an answer for those.
                if has_invalid_id(msgspec.json.decode(line, type=_Message).id):
                    await self._output.write(f"{INVALID_ID.decode()}\n")
                    continue
            return line.decode("utf-8", "replace")
        raise StopAsyncIteration

    def _read(self) -> None:
        with suppress(RuntimeError):  # The loop has ended.
            rest = b""
            while chunk := self._chunk():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._put(line)
                if len(rest) > MCP_LINE_BYTES_MAX:
                    limit = MCP_LINE_BYTES_MAX // 1_048_576
                    self.error = InvalidArgument(
                        f"The client's message is over {limit} MiB; store large values as blobs"
                    )
                    break
            self._put(None)

    def _chunk(self) -> bytes:
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except OSError:  # The peer of a pseudo terminal or socket is gone.
            return b""

    def _put(self, line: bytes | None) -> None:
        """Wait until the server has taken earlier lines."""
        if line is None or line.strip():
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()


class _Output:
    """Writes to a descriptor. A write returns when the client can read it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, *, on_broken: Callable[[], None]) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._writes = queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]]()
        threading.Thread(target=self._write, name="fastness-mcp-stdout", daemon=True).start()

    async def write(self, text: str) -> int:
        done = self._loop.create_future()
        self._writes.put((text.encode("utf-8", "replace"), done))
        await done
        return len(text)

    async def flush(self) -> None:
        """Nothing is buffered."""

    def _write(self) -> None:
        with suppress(RuntimeError):  # The loop has ended.
            while True:
                data, done = self._writes.get()
                try:
                    while data:
                        data = data[os.write(self._descriptor, data) :]
                except OSError:  # The client does not read any more.
                    self._loop.call_soon_threadsafe(self._on_broken)
                self._loop.call_soon_threadsafe(_set_done, done)


def _set_done(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)
