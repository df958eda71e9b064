"""From the global options to an open plane.

A server and a PostgreSQL are shared: one plane stays open while a command waits. A data directory belongs to one
process at a time. So a command that waits opens it for a moment, looks, and lets go of it again: whoever is waited for
can put the message or release the lease in between.
"""

import math
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from holdfast.cli import contexts
from holdfast.cli.commands import given
from holdfast.errors import DirectoryInUse, InvalidArgument
from holdfast.handles import Plane
from holdfast.names import UNIVERSE, checked_name
from holdfast.wire import Transport

PATIENCE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05  # Between two attempts at a directory that somebody has open.
_LOOK_SECONDS: Final = (0.1, 0.5)  # Between two looks into a directory: the first pause, and the longest.
_CALL_SECONDS: Final = 20.0  # How long one call waits at a server; then the next one follows.

Result = TypeVar("Result")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Which plane, whose data, and how to get there."""

    url: str
    universe: str = UNIVERSE
    token: str | None = None
    objects: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    patience_seconds: float = PATIENCE_SECONDS

    @property
    def is_server(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else can use the plane while it is open here."""
        return self.url.startswith("dir:")

    def tls(self) -> ssl.SSLContext | None:
        """How to trust the server, and how to be trusted by it; None where nothing is encrypted."""
        from holdfast.client import tls

        return tls.context(self.url, ca=self.ca, cert=self.cert, key=self.key)


def target() -> Target:
    """Where the command that runs is to go."""
    flags = given()
    found = contexts.resolved(flags, os.environ)
    patience = flags.get("patience")
    return Target(
        **{**found, "universe": checked_name("universe", found["universe"] or UNIVERSE)},
        patience_seconds=PATIENCE_SECONDS if patience is None else patience,
    )


@contextmanager
def opened(place: Target | None = None) -> Iterator[Plane]:
    """The plane that the command that runs is about."""
    place = place or target()
    with Plane(open_transport(place), place.universe) as plane:
        yield plane


def open_transport(place: Target) -> Transport:
    """The port of a plane; a directory that somebody else has open is tried for as long as the caller is patient."""
    # Loaded here: whoever asks a server does not wait for a key space to load, nor the other way round.
    if place.is_server:
        from holdfast.client.transport import RemoteTransport

        return RemoteTransport(place.url, token=place.token, tls=place.tls(), patience_seconds=place.patience_seconds)
    from holdfast.plane import Options, open_plane

    return patiently(lambda: open_plane(place.url, Options(objects=place.objects)), place.patience_seconds)


def patiently(open: Callable[[], Result], patience_seconds: float) -> Result:
    """What `open` opens, tried again while another process has the directory."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return open()
        except DirectoryInUse:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


class Visits:
    """Calls on a plane now and then: a directory is opened for each call, anything else once."""

    def __init__(self, place: Target) -> None:
        self._place = place
        self._plane: Plane | None = None

    def call(self, work: Callable[[Plane], Result]) -> Result:
        """What `work(plane)` returns."""
        if self._place.is_exclusive:
            with opened(self._place) as plane:
                return work(plane)
        if self._plane is None:
            self._plane = Plane(open_transport(self._place), self._place.universe)
        return work(self._plane)

    def find(self, look: Callable[[Plane, float], Result | None], wait_seconds: float) -> Result | None:
        """What `look(plane, seconds)` finds within `wait_seconds`, or None; it may itself wait so many seconds."""
        if math.isnan(wait_seconds) or wait_seconds < 0:
            raise InvalidArgument(f"{wait_seconds} is no time to wait; choose 0 or more")
        deadline, (pause, longest) = time.monotonic() + wait_seconds, _LOOK_SECONDS
        while True:
            left = deadline - time.monotonic()
            seconds = 0.0 if self._place.is_exclusive else min(max(left, 0.0), _CALL_SECONDS)
            found = self.call(lambda plane, seconds=seconds: look(plane, seconds))  # type: ignore[misc]
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            if self._place.is_exclusive:
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
