"""Opens the plane that the global options select.

A server and PostgreSQL are shared: one plane stays open while a command waits. A data directory can be open in one
process at a time, so a waiting command opens it for each poll and closes it again. In between, another process can put
the message or release the lease.
"""

import asyncio
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

from fastness import context_file
from fastness.cli.given_options import given_options
from fastness.errors import DirectoryInUse, InvalidArgument
from fastness.handles.plane import AsyncPlane
from fastness.handles.sync.plane import Plane
from fastness.names import UNIVERSE, checked_name
from fastness.wire import AsyncTransport, Transport

PATIENCE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05  # Between two attempts to open a directory that is in use.
_POLL_SECONDS: Final = (0.1, 0.5)  # Between two polls of a directory: the first and the longest pause.
_CALL_SECONDS: Final = 20.0  # How long one call waits on a server before the next call.

Result = TypeVar("Result")


class Target(context_file.Context, frozen=True, kw_only=True):
    """The plane and universe to use, and how to connect."""

    url: str
    universe: str = UNIVERSE
    patience_seconds: float = PATIENCE_SECONDS

    @property
    def is_server(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    @property
    def is_exclusive(self) -> bool:
        """Whether no other process can use the plane while it is open here."""
        return self.url.startswith("dir:")

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for the server; None if the connection is not encrypted."""
        from fastness.client import tls

        return tls.context(self.url, ca=self.ca, cert=self.cert, key=self.key)


def current_target() -> Target:
    """The target that the options, environment and context of the current command select."""
    flags = given_options()
    fields = context_file.resolve(flags, os.environ)
    patience = flags.get("patience")
    return Target(
        **{**fields, "universe": checked_name("universe", fields["universe"] or UNIVERSE)},
        patience_seconds=PATIENCE_SECONDS if patience is None else patience,
    )


@contextmanager
def open_plane(target: Target | None = None, *, create: bool = False) -> Iterator[Plane]:
    """The plane of the current command, or of `target`.

    A command whose work makes sense in an empty plane gives `create`. For the others, a plane that does not exist is a
    mistyped URL.

    Raises:
        NotFound: there is no plane, and `create` is False.
    """
    target = target or current_target()
    with Plane(open_transport(target, create=create), target.universe) as plane:
        yield plane


@asynccontextmanager
async def open_plane_async(target: Target, *, create: bool = False) -> AsyncIterator[AsyncPlane]:
    """`open_plane` for an event loop, with a given target."""
    async with AsyncPlane(await _open_transport_async(target, create=create), target.universe) as plane:
        yield plane


async def _open_transport_async(target: Target, *, create: bool) -> AsyncTransport:
    if target.is_server:
        from fastness.client.transport import AsyncRemoteTransport

        return AsyncRemoteTransport(
            target.url, token=target.token, tls=target.tls(), patience_seconds=target.patience_seconds
        )
    from fastness import plane as embedded

    options = embedded.Options(create=create, objects=target.objects, caller=embedded.command_caller())
    deadline = time.monotonic() + target.patience_seconds
    while True:
        try:
            return await embedded.open_plane_async(target.url, options)
        except DirectoryInUse:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)


def open_transport(target: Target, *, create: bool) -> Transport:
    """The transport to a plane. Retries while another process has the directory open."""
    # Imported here: a command for a server does not load the storage engine, and the other way round.
    if target.is_server:
        from fastness.client.transport import RemoteTransport

        return RemoteTransport(
            target.url, token=target.token, tls=target.tls(), patience_seconds=target.patience_seconds
        )
    from fastness import plane as embedded

    options = embedded.Options(create=create, objects=target.objects, caller=embedded.command_caller())
    return retry_while_in_use(lambda: embedded.open_plane(target.url, options), target.patience_seconds)


def retry_while_in_use(open: Callable[[], Result], patience_seconds: float) -> Result:
    """The result of `open`, retried while another process has the directory open."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return open()
        except DirectoryInUse:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


class PlaneCaller:
    """Calls a plane repeatedly. A data directory is opened for each call, any other plane once."""

    def __init__(self, target: Target, *, create: bool = False) -> None:
        self._target = target
        self._create = create
        self._plane: Plane | None = None

    def call(self, work: Callable[[Plane], Result]) -> Result:
        """The result of `work(plane)`."""
        if self._target.is_exclusive:
            with open_plane(self._target, create=self._create) as plane:
                return work(plane)
        if self._plane is None:
            self._plane = Plane(open_transport(self._target, create=self._create), self._target.universe)
        return work(self._plane)

    def poll(self, attempt: Callable[[Plane, float], Result | None], wait_seconds: float) -> Result | None:
        """The first result of `attempt(plane, seconds)` within `wait_seconds`, or None. It may itself wait."""
        if math.isnan(wait_seconds) or wait_seconds < 0:
            raise InvalidArgument(f"The wait must be 0 or more seconds, not {wait_seconds}")
        deadline, (pause, longest) = time.monotonic() + wait_seconds, _POLL_SECONDS
        while True:
            left = deadline - time.monotonic()
            seconds = 0.0 if self._target.is_exclusive else min(max(left, 0.0), _CALL_SECONDS)
            found = self.call(lambda plane, seconds=seconds: attempt(plane, seconds))  # type: ignore[misc]
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            if self._target.is_exclusive:
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, longest)

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
