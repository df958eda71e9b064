"""A durable plane for fleets of agents.

import holdfast

with holdfast.open("dir:./data") as plane:
    plane.transact(work)
"""

from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.handles import AsyncPlane, Opening, Plane
from holdfast.kv import Subspace, Transaction
from holdfast.plane import open_plane, open_plane_async
from holdfast.tiers import Tier

__version__ = "0.1.0"
__all__ = ["AsyncPlane", "HoldfastError", "Plane", "Subspace", "Tier", "Transaction", "open", "open_async"]


def open(url: str, *, objects: str | None = None, clock: Clock | None = None) -> Plane:
    """The plane at `url`, running in this process: `memory:`, `dir:PATH` or `postgresql://...`.

    `objects` says where big bytes go (`dir:`, `s3://`, `az://`, `gs://`); a directory keeps them in itself by default.
    `clock` replaces the wall clock, for tests.
    """
    return Plane(open_plane(url, objects=objects, clock=clock))


def open_async(url: str, *, objects: str | None = None, clock: Clock | None = None) -> Opening:
    """`open` for asyncio: await it, or enter it with `async with`."""

    async def opening() -> AsyncPlane:
        return AsyncPlane(await open_plane_async(url, objects=objects, clock=clock))

    return Opening(opening())
