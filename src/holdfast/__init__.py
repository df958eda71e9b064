"""A durable plane for fleets of agents.

import holdfast

with holdfast.open("dir:./data") as plane:
    plane.transact(work)
"""

from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.handles import AsyncPlane, Opening, Plane
from holdfast.kv import Subspace, Transaction
from holdfast.names import UNIVERSE, checked_name
from holdfast.plane import open_plane, open_plane_async
from holdfast.tiers import Tier

__version__ = "0.1.0"
__all__ = ["AsyncPlane", "HoldfastError", "Plane", "Subspace", "Tier", "Transaction", "open", "open_async"]


def open(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    clock: Clock | None = None,
) -> Plane:
    """The plane at `url`, running in this process: `memory:`, `dir:PATH` or `postgresql://...`.

    Args:
        universe: the tenant whose data the plane shows.
        objects: where big bytes go (`dir:`, `s3://`, `az://`, `gs://`); a directory keeps them in itself by default.
        verify_blobs: whether blobs are hashed again when they are read: always, sampled or never.
        compact_every_seconds: moves the cold ends of journals to `objects` in the background; off by default.
        clock: replaces the wall clock, for tests.
    """
    universe = checked_name("universe", universe)
    port = open_plane(
        url, objects=objects, clock=clock, compact_every_seconds=compact_every_seconds, verify_blobs=verify_blobs
    )
    return Plane(port, universe)


def open_async(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    clock: Clock | None = None,
) -> Opening:
    """`open` for asyncio: await it, or enter it with `async with`."""
    universe = checked_name("universe", universe)

    async def opening() -> AsyncPlane:
        port = await open_plane_async(
            url, objects=objects, clock=clock, compact_every_seconds=compact_every_seconds, verify_blobs=verify_blobs
        )
        return AsyncPlane(port, universe)

    return Opening(opening())
