"""A durable plane for fleets of agents.

import holdfast

with holdfast.open("dir:./data") as plane:
    plane.transact(work)

What a name needs is loaded when it is first used: whoever connects to a server does not wait for a key space to load,
nor whoever opens one for a client.
"""

from typing import TYPE_CHECKING, Final

from holdfast._lazy_imports import lazily
from holdfast.names import UNIVERSE, checked_name

if TYPE_CHECKING:
    import os
    import ssl

    from holdfast.clock import Clock
    from holdfast.encryption import AgentKey
    from holdfast.errors import HoldfastError
    from holdfast.handles import AsyncPlane, AsyncWorker, Opening, Plane, Worker
    from holdfast.kv import Subspace, Transaction
    from holdfast.plane import fenced
    from holdfast.tiers import Tier, TierPolicy

__version__ = "0.1.0"
__all__ = [
    "AgentKey",
    "AsyncPlane",
    "AsyncWorker",
    "HoldfastError",
    "Plane",
    "Subspace",
    "Tier",
    "TierPolicy",
    "Transaction",
    "Worker",
    "connect",
    "connect_async",
    "fenced",
    "open",
    "open_async",
]

_HOMES: Final = {
    "AgentKey": "holdfast.encryption",
    "AsyncPlane": "holdfast.handles",
    "AsyncWorker": "holdfast.handles",
    "HoldfastError": "holdfast.errors",
    "Plane": "holdfast.handles",
    "Subspace": "holdfast.kv",
    "Tier": "holdfast.tiers",
    "TierPolicy": "holdfast.tiers",
    "Transaction": "holdfast.kv",
    "Worker": "holdfast.handles",
    "fenced": "holdfast.plane",
}

__getattr__, __dir__ = lazily(globals(), _HOMES)


def open(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    activity: str | None = None,
    tiers: "TierPolicy | str | os.PathLike[str] | None" = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    clock: "Clock | None" = None,
) -> "Plane":
    """The plane at `url`, running in this process: `memory:`, `dir:PATH` or `postgresql://...`.

    Args:
        universe: the tenant whose data the plane shows.
        objects: where big bytes go (`dir:`, `s3://`, `az://`, `gs://`); a directory keeps them in itself by default.
        activity: the folder of session logs; a directory keeps them in itself by default.
        tiers: which tier each field of an entity has, as a policy or the TOML file that says so.
        verify_blobs: whether blobs are hashed again when they are read: always, sampled or never.
        compact_every_seconds: moves the cold ends of journals to `objects` in the background; off by default.
        clock: replaces the wall clock, for tests.
    """
    from holdfast.handles import Plane
    from holdfast.plane import Options, open_plane

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        clock=clock,
    )
    return Plane(open_plane(url, options), universe)


def open_async(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    activity: str | None = None,
    tiers: "TierPolicy | str | os.PathLike[str] | None" = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    clock: "Clock | None" = None,
) -> "Opening":
    """`open` for asyncio: await it, or enter it with `async with`."""
    from holdfast.handles import AsyncPlane, Opening
    from holdfast.plane import Options, open_plane_async

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        clock=clock,
    )

    async def opening() -> AsyncPlane:
        return AsyncPlane(await open_plane_async(url, options), universe)

    return Opening(opening())


def connect(
    url: str,
    *,
    token: str | None = None,
    universe: str = UNIVERSE,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Plane":
    """The plane of the server at `url`, as in `http://127.0.0.1:9440`: the same handles as those of `open`.

    Args:
        token: what the server knows the caller by; not needed on a loopback address without tokens.
        tls: how to trust the server of an `https://` address, if not by the system's certificates.
        patience_seconds: how long calls wait for a server that is gone before they raise Unreachable. They are sent
            again when it is back, and happen once.
    """
    from holdfast.client.transport import RemoteTransport
    from holdfast.handles import Plane

    universe = checked_name("universe", universe)
    return Plane(RemoteTransport(_server(url), token=token, tls=tls, patience_seconds=patience_seconds), universe)


def connect_async(
    url: str,
    *,
    token: str | None = None,
    universe: str = UNIVERSE,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Opening":
    """`connect` for asyncio: await it, or enter it with `async with`."""
    from holdfast.client.transport import AsyncRemoteTransport
    from holdfast.handles import AsyncPlane, Opening

    universe = checked_name("universe", universe)
    url = _server(url)

    async def opening() -> AsyncPlane:
        transport = AsyncRemoteTransport(url, token=token, tls=tls, patience_seconds=patience_seconds)
        return AsyncPlane(transport, universe)

    return Opening(opening())


def _server(url: object) -> str:
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        return url
    from holdfast.errors import InvalidUrl

    raise InvalidUrl(f"{url!r} is no server; write http://HOST:PORT, or open a folder with holdfast.open")
