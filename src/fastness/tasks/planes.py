"""The planes of a task app: one for threads, and one for each event loop."""

import asyncio
import os
import threading
from weakref import WeakKeyDictionary

import fastness
from fastness import context_file
from fastness.errors import Closed, InvalidArgument, InvalidUrl
from fastness.handles.plane import AsyncPlane
from fastness.handles.sync.plane import Plane
from fastness.names import UNIVERSE


class AppPlanes:
    """Opens the plane of an app when it is first used."""

    def __init__(self, target: str | Plane | None, *, token: str | None, universe: str | None) -> None:
        if not isinstance(target, str | Plane | None):
            raise InvalidUrl(f"A task app takes a URL or an open plane, not {type(target).__name__}")
        self._url = target if isinstance(target, str) else None
        self._token = token
        self._universe = universe
        self._plane = target if isinstance(target, Plane) else None
        self._owns_plane = False
        self._is_closed = False
        self._async_planes: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncPlane] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def has_target(self) -> bool:
        """Whether a URL or a plane was given."""
        return self._url is not None or self._plane is not None

    def use(self, plane: Plane) -> None:
        """Use an open plane from now on, which its owner closes."""
        self.close()
        self._async_planes.clear()
        self._plane, self._is_closed = plane, False

    def get(self) -> Plane:
        """The plane for threads.

        Raises:
            Closed: the app was closed.
        """
        with self._lock:
            self._check_open()
            if self._plane is None:
                self._plane, self._owns_plane = self._open(), True
            return self._plane

    async def get_async(self) -> AsyncPlane:
        """The plane for the running event loop."""
        self._check_open()
        loop = asyncio.get_running_loop()
        found = self._async_planes.get(loop)
        if found is None:
            found = self._async_planes.setdefault(loop, await self.new_async())
        return found

    async def new_async(self) -> AsyncPlane:
        """Another handle of the plane, for an event loop."""
        return async_plane_of(await asyncio.to_thread(self.get))  # A data directory takes time to open.

    def set_async(self, plane: AsyncPlane) -> None:
        """Use a plane on the running event loop."""
        self._async_planes[asyncio.get_running_loop()] = plane

    def close(self) -> None:
        """Close the plane, unless it was given open. Nothing is sent or run from now on."""
        with self._lock:
            self._is_closed = True
            if self._owns_plane and self._plane is not None:
                self._plane.close()
                self._plane, self._owns_plane = None, False

    async def close_async(self) -> None:
        """Close what the running event loop uses, then the plane."""
        found = self._async_planes.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await close_handle(found)
        await asyncio.to_thread(self.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("The task app was closed; make another TaskApp, or close it after its last call")

    def _open(self) -> Plane:
        given = {"url": self._url, "token": self._token, "universe": self._universe}
        found = context_file.resolve(given, os.environ) if self._url is None else given
        url = str(found["url"])
        if url.startswith(("http://", "https://")):
            return fastness.connect(self._url, token=self._token, universe=self._universe)
        return fastness.open(url, universe=found["universe"] or UNIVERSE, objects=found.get("objects"))


def check_no_loop(call: str) -> None:
    """Refuse a call that would block an event loop.

    Raises:
        InvalidArgument: an event loop is running in this thread.
    """
    if asyncio._get_running_loop() is not None:
        raise InvalidArgument(f"`{call}` would block the running event loop; write `await {call}_async(…)`")


async def close_handle(plane: AsyncPlane) -> None:
    """Close a handle for an event loop; an embedded plane stays open, which its handle for threads closes."""
    from fastness.client.transport import AsyncRemoteTransport

    if isinstance(plane._transport, AsyncRemoteTransport):
        await plane.close()


def async_plane_of(plane: Plane) -> AsyncPlane:
    """Another handle of an open plane, for an event loop."""
    from fastness.client.transport import AsyncRemoteTransport, RemoteTransport

    transport = plane._transport
    if isinstance(transport, RemoteTransport):
        return AsyncPlane(transport.opened_again(AsyncRemoteTransport), plane.universe)
    from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport

    assert isinstance(transport, EmbeddedTransport)
    return AsyncPlane(AsyncEmbeddedTransport(transport.services), plane.universe)


def plane_of(plane: AsyncPlane) -> Plane:
    """Another handle of an open plane, for threads."""
    from fastness.client.transport import AsyncRemoteTransport, RemoteTransport

    transport = plane._transport
    if isinstance(transport, AsyncRemoteTransport):
        return Plane(transport.opened_again(RemoteTransport), plane.universe)
    from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport

    assert isinstance(transport, AsyncEmbeddedTransport)
    return Plane(EmbeddedTransport(transport.services), plane.universe)


def close_blocking_handle(plane: Plane) -> None:
    """Close a handle for threads; an embedded plane stays open, which its other handle closes."""
    from fastness.client.transport import RemoteTransport

    if isinstance(plane._transport, RemoteTransport):
        plane.close()
