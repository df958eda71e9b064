"""A server, from its settings to its end.

settings ──► address bound ──► plane opened ──► guards, doors, metrics ──► listening; one line says where
SIGTERM or SIGINT ──► draining ──► connections closed ──► plane closed ──► exit code 0
a second one ──► the same, without waiting for what is under way
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn
import uvloop

from holdfast.errors import InvalidArgument, PathUnusable
from holdfast.limits import FRAME_BYTES_MAX, RELAY_RATE_PER_SECOND
from holdfast.plane.open import open_plane_async
from holdfast.server import logs
from holdfast.server.app import make_app
from holdfast.server.console.routes import console_routes
from holdfast.server.doors import Doors
from holdfast.server.health import Health
from holdfast.server.http_protocol import BoundedHttp
from holdfast.server.ingress_metrics import IngressMetrics
from holdfast.server.logs import Sparing
from holdfast.server.metrics import MeasuredTransport, Metrics, metrics_route
from holdfast.server.relay import RelayOptions
from holdfast.server.settings import Settings
from holdfast.server.sockets import BoundedSocket
from holdfast.server.tokens import TokenGuards, check_bind, choose_guards, is_loopback

_log = logging.getLogger("holdfast.server")
_uvicorn = logging.getLogger("uvicorn.error")
_uvicorn.addFilter(Sparing(per_second=20))  # Bad requests are others' to make.
# Said of every stream that was refused with a status of its own, and of answers that a stop cut off, as an error.
_uvicorn.addFilter(lambda record: "returned without completing" not in str(record.msg))

_FRAME_SLACK_BYTES: Final = 1_024  # So that a frame that is a little too large hears so from us, by its name.
_BACKLOG: Final = 2_048
_SWITCH_SECONDS: Final = 0.0005  # A thread that comes back from a sync waits for the loop no longer than that.
_COLLECT_AFTER: Final = 50_000  # New objects; after 700, as Python has it, a busy server collects a fifth of its time.
_FILES_BESIDE: Final = 1_024  # Of the key space, session logs and blobs on their way.
_CLOSE_SECONDS: Final = 1  # How long connections may take to close once nothing is under way.
_CALM_SECONDS: Final = 0.05
_CALM_LOOKS: Final = 3  # So often in a row nothing was under way: replies are out, and nobody was between two calls.


def run(settings: Settings) -> int:
    """Serve until a signal says to stop; the exit code.

    Raises:
        InvalidArgument: the address is not one to serve at, or cannot be had.
        HoldfastError: as `holdfast.open`.
    """
    logs.configure(settings.log_format, settings.log_level)
    _open_more_files(settings.connections_max)
    gc.set_threshold(_COLLECT_AFTER, 20, 20)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))
    return 0


async def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve on this event loop until a signal says to stop; `ready` is told the URL instead of everybody."""
    check_bind(settings.host, tokens_on=settings.tokens, tls=settings.tls, insecure=settings.insecure)
    tls = _tls_context(settings) if settings.tls else None
    with _bound(settings.host, settings.port) as listening:
        port = await open_plane_async(settings.data, settings.options)
        try:
            serving = Serving(settings, port)
            await serving.run(listening, tls, ready or _announce)
        finally:
            await port.close()
    _log.info("stopped")


class Serving:
    """The parts of a running server."""

    def __init__(self, settings: Settings, port: Any) -> None:
        self.settings = settings
        self.health = Health(port)
        self.metrics = Metrics(
            queues_max=settings.metrics_queues_max,
            worlds_max=settings.metrics_worlds_max,
            streams=lambda: len(self.doors.streams.open),
            sessions=lambda: len(self.doors.relay),
            exchanges=lambda: self.health.under_way,
        )
        measured = MeasuredTransport(port, self.metrics)
        self.guards = choose_guards(
            port, tokens_on=settings.tokens, rejected=self.metrics.rejected, ended=self._cut_streams_of
        )
        self.doors = Doors(
            measured,
            self.guards,
            agent=settings.ingress_agent,
            relay=_relay_options(settings),
            rejected=self.metrics.rejected,
        )
        self.metrics.registry.register(IngressMetrics(port.ingress))
        app = make_app(self.doors, settings.http_limits)
        app.router.routes[:0] = [
            *self.health.routes(),
            metrics_route(self.metrics, port, self.guards),
            *console_routes(self.doors, self.metrics, port, reports=settings.pipeline_reports),
        ]
        self.app = self.health.gate(app)
        if hasattr(port.services.database, "on_sync"):
            port.services.database.on_sync = self.metrics.synced
        self._server: _Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._cutting: set[asyncio.Task[None]] = set()

    async def run(self, listening: socket.socket, tls: ssl.SSLContext | None, ready: Callable[[str], None]) -> None:
        """Serve until `stop` was called and everything is answered."""
        host, port = listening.getsockname()[:2]
        url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = _Server(self._config(tls), lambda: self._ready(url, ready))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if isinstance(self.guards, TokenGuards):
            await self.guards.start()
        await self.doors.transport.ingress.start()
        try:
            await self._server.serve(sockets=[listening])
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self.doors.relay.close()
            if isinstance(self.guards, TokenGuards):
                await self.guards.stop()

    def stop(self) -> None:
        """Drain, then close. Called again: close at once."""
        assert self._server is not None, "signals are heard while the server runs"
        if self._draining is None:
            _log.info("stopping: calls under way have %g s", self.settings.drain_seconds)
            _tell_systemd("STOPPING=1")
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._server))
        else:
            _log.warning("stopping at once: %s calls under way are not answered", self.under_way)
            self._draining.cancel()
            self._server.force_exit = self._server.should_exit = True

    @property
    def under_way(self) -> int:
        """Calls and requests that are being answered, without those that only wait for something to come."""
        return self.health.under_way + self.metrics.in_flight - self.metrics.waiting

    async def _drain(self, server: "_Server") -> None:
        try:
            await self._wait_for_calls()
        except Exception:  # Whoever asked it to stop is not to ask twice.
            _log.exception("draining failed in a way that nobody thought of; the server stops at once")
        server.should_exit = True

    async def _wait_for_calls(self) -> None:
        self.health.draining = True
        self.doors.streams.drain()
        self.doors.relay.drain()
        calm = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                while calm < _CALM_LOOKS:
                    await asyncio.sleep(_CALM_SECONDS)
                    calm = 0 if self.under_way else calm + 1
        if calm < _CALM_LOOKS:
            _log.warning("%s calls were still under way after %g s", self.under_way, self.settings.drain_seconds)

    def _cut_streams_of(self, token: str) -> None:
        """A token has ended: what waits on its behalf, waits no more."""
        self.doors.relay.cut(token)
        cutting = asyncio.get_running_loop().create_task(self.doors.streams.cut(token))
        self._cutting.add(cutting)
        cutting.add_done_callback(self._cutting.discard)

    def _ready(self, url: str, ready: Callable[[str], None]) -> None:
        gc.collect()
        gc.freeze()  # What is there now stays: to look at all of it took 16 ms, and everybody waits for a collection.
        _log.info("ready at %s", url, extra={"data": self.settings.data, "tokens": self.settings.tokens})
        _tell_systemd("READY=1")
        ready(url)

    def _config(self, tls: ssl.SSLContext | None) -> uvicorn.Config:
        settings = self.settings
        bounds = {
            "bytes_max": settings.header_bytes_max,
            "seconds": settings.header_seconds,
            "connections_max": settings.connections_max,
        }
        return uvicorn.Config(
            self.app,
            http=type("Http", (BoundedHttp,), bounds),
            ws=BoundedSocket,
            ws_max_size=FRAME_BYTES_MAX + _FRAME_SLACK_BYTES,
            ws_per_message_deflate=False,  # Frames of small calls grow by it, and it takes more time than the calls.
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # Nobody says in a header who they are.
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_context_factory=None if tls is None else lambda config, default: tls,  # noqa: ARG005
        )


class _Server(uvicorn.Server):
    """uvicorn without its signals, which end connections before their calls are answered."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()


def _relay_options(settings: Settings) -> RelayOptions:
    """Agents of one machine are let in and let go; others come by what is known of them, and at a bounded rate."""
    local = is_loopback(settings.host)
    rate = settings.relay_rate_per_second
    return RelayOptions(
        host=settings.relay_host,
        registration=settings.relay_registration or ("open" if local and not settings.tokens else "closed"),
        rate_per_second=rate if rate is not None else 0.0 if local else RELAY_RATE_PER_SECOND,
        burst=settings.relay_burst,
        authenticate_seconds=settings.relay_authenticate_seconds,
    )


def _open_more_files(connections: int) -> None:
    """Let the process have as many files open as it needs for so many connections, as far as it may."""
    needed = connections + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning("%s files may be open, too few for connections_max=%s; raise ulimit -n", allowed, connections)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument(f"{host} is no address to serve at ({error}); choose another --host") from error
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            raise InvalidArgument(
                f"{host}:{port} cannot be had ({error.strerror}); choose another --port, or stop what is there"
            ) from error
        listening.setblocking(False)
        yield listening


def _tls_context(settings: Settings) -> ssl.SSLContext:
    """Raises PathUnusable if a certificate or key cannot be used."""
    assert settings.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (settings.tls_cert, settings.tls_key, settings.tls_client_ca)))
        raise PathUnusable(
            f"TLS cannot be set up with {files} ({error}); give PEM files that belong together"
        ) from error
    return context


def _announce(url: str) -> None:
    """The one line on standard output: whoever started the server reads it, and knows where and that it is ready."""
    sys.stdout.write(f"Holdfast is ready at {url}\n")
    sys.stdout.flush()


def _tell_systemd(state: str) -> None:
    """Tell whoever started the server as a service, if somebody did."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
