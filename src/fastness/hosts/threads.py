"""The host for programs without an event loop: it runs on a thread of its own."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self, TypedDict, Unpack

from fastness.errors import InvalidArgument
from fastness.handles.sync.plane import Plane
from fastness.hosts.apps import HostApp
from fastness.hosts.host import AsyncHost, HostStats
from fastness.hosts.programs import Program
from fastness.stop_signals import stop_on_signals
from fastness.tasks.planes import async_plane_of, close_handle

_log = logging.getLogger("fastness.host")
_CHECK_SECONDS: Final = 0.5  # How often a running host looks whether it has ended by an error.
_CLOSE_SECONDS: Final = 10.0  # How long it may take to give worlds back, after the drain.


class HostOptions(TypedDict, total=False):
    """The options of `AsyncHost`, which describes them."""

    programs: list[str | Program] | None
    owner: str | None
    concurrency: int
    lease_seconds: float
    effect_concurrency: int
    snapshot_every: int
    on_error: Literal["set_aside", "stop"]
    max_attempts: int
    drain_seconds: float


class Host:
    """Runs the programs of an app on a thread of its own: `with Host(plane, app): …`, or `Host(plane, app).run()`."""

    def __init__(self, plane: Plane, app: HostApp | None = None, **options: Unpack[HostOptions]) -> None:
        """A host for the worlds of one universe, with the options of `AsyncHost`.

        Args:
            plane: where the worlds are.
            app: the programs and adapters; those of `fastness.program` and `fastness.adapter` by default.
            options: as `AsyncHost` describes them.
        """
        if not isinstance(plane, Plane):
            raise InvalidArgument(f"Host needs a Plane, not {type(plane).__name__}; use AsyncHost for an AsyncPlane")
        self.stopped_by: int | None = None  # The signal that has stopped it.
        self.error: Exception | None = None  # What has ended it, if a retry cannot succeed.
        self._plane = plane
        self._app = app
        self._options = options
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: AsyncHost | None = None
        self._thread: threading.Thread | None = None

    @property
    def stats(self) -> HostStats:
        """Counts until now."""
        return HostStats() if self._host is None else self._host.stats

    @property
    def programs(self) -> list[str]:
        """The names of the programs that it runs, once it is started."""
        return [] if self._host is None else self._host.programs

    def start(self) -> None:
        """Start to run worlds.

        Raises:
            InvalidArgument: the app has nothing to run, or an option is out of range.
        """
        self._thread = threading.Thread(target=self._run_loop, name="fastness-host", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._host is None and self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Finish running turns and adapters, give all worlds back, and end.

        Raises:
            FastnessError: it has ended by this error before.
        """
        self._stopping.set()
        if self._loop is not None and self._host is not None:
            with suppress(RuntimeError):  # It has ended meanwhile.
                self._loop.call_soon_threadsafe(self._host.stop)
        if self._thread is not None:
            self._thread.join(self._options.get("drain_seconds", 10.0) + _CLOSE_SECONDS)
        if self.error is not None:
            raise self.error

    def request_stop(self) -> None:
        """Make `run` drain and return. Signal handlers may call it."""
        self._stopping.set()

    def run(self, *, on_start: Callable[[], object] | None = None) -> None:
        """Run worlds until `request_stop`, SIGTERM or SIGINT (in the main thread); then drain. A second signal ends it.

        Args:
            on_start: called when it has started.

        Raises:
            FastnessError: worlds cannot be claimed, and a retry cannot succeed (its `retry` is `never`).
        """
        with stop_on_signals(self._stop_on_signal, second_ends=True):
            self.start()
            if on_start is not None:
                on_start()
            while not self._stopping.wait(_CHECK_SECONDS) and self.error is None:
                pass
            _log.info("stopping: waiting for running turns and adapters")
            self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _stop_on_signal(self, number: int) -> None:
        self.stopped_by = number
        self._stopping.set()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._run_host())
        except Exception as error:
            self.error = error
        finally:
            self._ready.set()

    async def _run_host(self) -> None:
        plane = async_plane_of(self._plane)
        try:
            self._host = AsyncHost(plane, self._app, **self._options)
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._host.run()
        finally:
            await close_handle(plane)
