"""Compaction of worlds whose baseline has moved, one world at a time, beside the turns."""

import asyncio
import logging

from fastness.errors import FastnessError, Unsupported
from fastness.limits import HOST_WORLDS_MAX
from fastness.wire import AsyncTransport
from fastness.wire.worlds import CompactWorld

_log = logging.getLogger("fastness.host")


class Compactor:
    """Compacts the worlds that are asked for. What it cannot do is logged: the next baseline asks again."""

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self._wanted: asyncio.Queue[tuple[str, int]] = asyncio.Queue(HOST_WORLDS_MAX)
        self._is_possible = True

    def want(self, world: str, incarnation: int) -> None:
        """Compact a world soon. Nothing happens if many others wait already, or the plane has no object store."""
        if self._is_possible and not self._wanted.full():
            self._wanted.put_nowait((world, incarnation))

    async def run(self) -> None:
        """Compact worlds until it is cancelled."""
        while True:
            world, incarnation = await self._wanted.get()
            try:
                await self._transport.call(CompactWorld(world, universe=self._universe, incarnation=incarnation))
            except Unsupported:
                self._is_possible = False
            except FastnessError as error:
                _log.warning("world %s is not compacted: %s", world, error)
