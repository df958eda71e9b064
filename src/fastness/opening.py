"""How a plane is opened in this process, or reached over the network.

A function imports what it needs when it is called, so that a client does not load the storage engine, and an embedded
plane does not load the client.
"""

from typing import TYPE_CHECKING, NamedTuple

from fastness.limits import GC_EVERY_SECONDS, GC_GRACE_SECONDS, PUSHES_PER_MINUTE
from fastness.names import UNIVERSE, checked_name

if TYPE_CHECKING:
    import os
    import ssl

    from fastness.clock import Clock
    from fastness.encryption_keys import KeyProvider
    from fastness.handles.opening import Opening
    from fastness.handles.sync.plane import Plane
    from fastness.tiers import TierPolicy


def open(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    activity: str | None = None,
    tiers: "TierPolicy | str | os.PathLike[str] | None" = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    disk_reserve_bytes: int | None = None,
    gc_every_seconds: float | None = GC_EVERY_SECONDS,
    gc_grace_seconds: float = GC_GRACE_SECONDS,
    activity_keep_seconds: float | None = None,
    activity_bytes_max: int | None = None,
    archived_keep_seconds: float | None = None,
    archived_bytes_max: int | None = None,
    dead_letter_bytes_max: int | None = None,
    ingress_pushes_per_minute: int = PUSHES_PER_MINUTE,
    read_from: str = "primary",
    encryption: "KeyProvider | None" = None,
    clock: "Clock | None" = None,
) -> "Plane":
    """Open the plane at `url` in this process: `memory:`, `dir:PATH` or `postgresql://...`.

    Args:
        universe: the tenant to work in.
        objects: the object store for large values (`dir:`, `s3://`, `az://`, `gs://`); `PATH/objects` by default.
        activity: the folder of session logs; `PATH/activity` by default.
        tiers: the tier of each entity field, as a policy or the path of a TOML file.
        verify_blobs: whether blobs are verified when they are read: always, sampled or never.
        compact_every_seconds: compact journals into `objects` in the background at this interval; off by default.
        disk_reserve_bytes: refuse new data with DiskFull while less of the disk is free; 0 is never. The default is a
            tenth of the disk, 64 to 384 MiB, but at most a quarter.
        gc_every_seconds: how often blobs that nothing names are deleted in the background; None for never.
        gc_grace_seconds: how long a blob that nothing names is kept.
        activity_keep_seconds: how long session logs in `objects` are kept; for ever by default.
        activity_bytes_max: how many bytes of session logs a universe keeps in `objects`; without a limit by default.
        archived_keep_seconds: how long an archived world is kept before it is deleted; for ever by default.
        archived_bytes_max: how many bytes of archived worlds' journals a universe keeps; without a limit by default.
        dead_letter_bytes_max: how many bytes of dead letters a universe keeps; without a limit by default.
        ingress_pushes_per_minute: how often one sender may push; 0 for no limit.
        read_from: "standby" lets lists, statistics and other reads that may be stale come from a standby of PostgreSQL.
        encryption: the master keys of encrypted universes, as in `FileKeys("keys")`; by default those that
            `FASTNESS_ENCRYPTION_KEY_FILE` or `FASTNESS_ENCRYPTION_COMMAND` names.
        clock: replaces the wall clock, for tests.
    """
    from fastness.handles.sync.plane import Plane
    from fastness.plane import Options, open_plane
    from fastness.runtime.maintenance.space_options import SpaceOptions

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        disk_reserve_bytes=disk_reserve_bytes,
        gc_every_seconds=gc_every_seconds,
        space=SpaceOptions(
            grace_seconds=gc_grace_seconds,
            log_keep_seconds=activity_keep_seconds,
            log_bytes_max=activity_bytes_max,
            archived_keep_seconds=archived_keep_seconds,
            archived_bytes_max=archived_bytes_max,
            dead_letter_bytes_max=dead_letter_bytes_max,
        ),
        read_from=read_from,
        pushes_per_minute=ingress_pushes_per_minute,
        encryption=encryption,
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
    disk_reserve_bytes: int | None = None,
    gc_every_seconds: float | None = GC_EVERY_SECONDS,
    gc_grace_seconds: float = GC_GRACE_SECONDS,
    activity_keep_seconds: float | None = None,
    activity_bytes_max: int | None = None,
    archived_keep_seconds: float | None = None,
    archived_bytes_max: int | None = None,
    dead_letter_bytes_max: int | None = None,
    ingress_pushes_per_minute: int = PUSHES_PER_MINUTE,
    read_from: str = "primary",
    encryption: "KeyProvider | None" = None,
    clock: "Clock | None" = None,
) -> "Opening":
    """`open` for asyncio: await it, or enter it with `async with`."""
    from fastness.handles.opening import Opening
    from fastness.handles.plane import AsyncPlane
    from fastness.plane import Options, open_plane_async
    from fastness.runtime.maintenance.space_options import SpaceOptions

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        disk_reserve_bytes=disk_reserve_bytes,
        gc_every_seconds=gc_every_seconds,
        space=SpaceOptions(
            grace_seconds=gc_grace_seconds,
            log_keep_seconds=activity_keep_seconds,
            log_bytes_max=activity_bytes_max,
            archived_keep_seconds=archived_keep_seconds,
            archived_bytes_max=archived_bytes_max,
            dead_letter_bytes_max=dead_letter_bytes_max,
        ),
        read_from=read_from,
        pushes_per_minute=ingress_pushes_per_minute,
        encryption=encryption,
        clock=clock,
    )

    async def opening() -> AsyncPlane:
        return AsyncPlane(await open_plane_async(url, options), universe)

    return Opening(opening())


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    universe: str | None = None,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Plane":
    """Connect to the server at `url`, as in `http://127.0.0.1:9440`; returns the same handles as `open`.

    Args:
        url: by default the server of the command line, with its token, universe and certificates: FASTNESS_URL, the
            current context, or http://127.0.0.1:9440.
        token: the access token; not needed for a server on a loopback address without tokens.
        universe: the tenant to work in; `main` by default.
        tls: the TLS context for an `https://` address; by default the system's certificates are trusted.
        patience_seconds: how long calls wait for an unavailable server before they raise Unreachable. When it is
            back they are sent again, and are executed once.
    """
    from fastness.client.transport import RemoteTransport
    from fastness.handles.sync.plane import Plane

    server = _server(url, token, universe, tls)
    transport = RemoteTransport(server.url, token=server.token, tls=server.tls, patience_seconds=patience_seconds)
    return Plane(transport, server.universe)


def connect_async(
    url: str | None = None,
    *,
    token: str | None = None,
    universe: str | None = None,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Opening":
    """`connect` for asyncio: await it, or enter it with `async with`."""
    from fastness.client.transport import AsyncRemoteTransport
    from fastness.handles.opening import Opening
    from fastness.handles.plane import AsyncPlane

    server = _server(url, token, universe, tls)

    async def opening() -> AsyncPlane:
        transport = AsyncRemoteTransport(
            server.url, token=server.token, tls=server.tls, patience_seconds=patience_seconds
        )
        return AsyncPlane(transport, server.universe)

    return Opening(opening())


class _Server(NamedTuple):
    url: str
    token: str | None
    universe: str
    tls: "ssl.SSLContext | None"


def _server(url: str | None, token: str | None, universe: str | None, tls: "ssl.SSLContext | None") -> _Server:
    """The server to connect to; without a `url`, that of the command line."""
    if url is None:
        import os

        from fastness import context_file
        from fastness.client import tls as certificates

        found = context_file.resolve({"token": token, "universe": universe}, os.environ)
        url, token, universe = found["url"], found["token"], found["universe"]
        tls = tls or certificates.context(str(url), ca=found["ca"], cert=found["cert"], key=found["key"])
    return _Server(_checked_url(url), token, checked_name("universe", universe or UNIVERSE), tls)


def _checked_url(url: object) -> str:
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        return url
    import os

    from fastness.errors import InvalidUrl

    text = str(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str):
        raise InvalidUrl(f"A URL is text, not {type(url).__name__}; write http://HOST:PORT")
    scheme, colon, rest = text.partition(":")
    if scheme in ("postgresql", "postgres"):
        raise InvalidUrl('PostgreSQL is opened in this process, with fastness.open("postgresql://…")')
    if text == "memory:" or scheme == "dir" or not colon:
        opened = text if colon else f"dir:{text}"
        raise InvalidUrl(
            f'{text} is not the address of a server; open it in this process with fastness.open("{opened}")'
        )
    if rest.isdigit():
        raise InvalidUrl(f"{text!r} has no scheme; write http://{text}")
    raise InvalidUrl(f"{scheme!r} is not the scheme of a server; write http://HOST:PORT")
