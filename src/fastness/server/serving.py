"""Runs a server, from its settings to its exit.

settings ──► address bound ──► plane opened ──► authenticator, endpoints, metrics ──► listening; prints its URL
SIGTERM or SIGINT ──► draining ──► connections closed ──► plane closed ──► exit code 0
a second signal ──► the same, without waiting for calls in flight
"""

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from fastness.errors import FastnessError, InvalidArgument, PathUnusable
from fastness.limits import FRAME_BYTES_MAX, RELAY_RATE_PER_SECOND
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.open import open_plane_async
from fastness.server import logs
from fastness.server.app import make_app
from fastness.server.audit import RefusalRecorder
from fastness.server.console.history import History
from fastness.server.console.routes import console_routes
from fastness.server.console.samples import Samples
from fastness.server.context import ServerContext
from fastness.server.encryption_metrics import EncryptionMetrics
from fastness.server.health import Health
from fastness.server.http_protocol import BoundedHttp
from fastness.server.ingress_metrics import IngressMetrics
from fastness.server.logs import RateLimitFilter
from fastness.server.mcp.metrics import McpMetrics
from fastness.server.mcp.mounting import open_mcp
from fastness.server.metrics import MeasuredTransport, Metrics, metrics_route
from fastness.server.node_metrics import NodeMetrics
from fastness.server.queue_metrics import ConsumerMetrics
from fastness.server.quota_metrics import QuotaMetrics
from fastness.server.recovery import EXIT_FAILED, Recovery
from fastness.server.relay import RelayOptions
from fastness.server.settings import Settings
from fastness.server.sockets import BoundedSocket
from fastness.server.space_metrics import SpaceMetrics
from fastness.server.sqs import mounting as sqs
from fastness.server.sqs.metrics import SqsMetrics
from fastness.server.telemetry import Telemetry
from fastness.server.tokens import TokenAuthenticator, check_bind, is_loopback, make_authenticator

_log = logging.getLogger("fastness.server")
_uvicorn = logging.getLogger("uvicorn.error")
_uvicorn.addFilter(RateLimitFilter(per_second=20))  # Clients can send any number of bad requests.
# Logged as an error for every stream that is refused with a status, and for responses that a shutdown interrupts.
_uvicorn.addFilter(lambda record: "returned without completing" not in str(record.msg))

_FRAME_SLACK_BYTES: Final = 1_024  # A slightly larger frame gets our error, not that of websockets.
_BACKLOG: Final = 2_048
_SWITCH_SECONDS: Final = 0.0005  # Bounds how long a thread that finished a sync waits for the GIL.
_GC_THRESHOLD: Final = 50_000  # New objects. With Python's default of 700, a busy server spends 20 % in the GC.
_CONNECTIONS_MAX: Final = 20_000  # Unless the settings or the limit of open files say otherwise.
_OTHER_FILES: Final = 1_024  # Of the key space, session logs and blob transfers.
_CLOSE_SECONDS: Final = 1  # For connections to close after draining.
_HOST_CHARACTERS_MAX: Final = 255  # Of the host in a node's name, which is part of keys.
_IDLE_POLL_SECONDS: Final = 0.05
_IDLE_POLLS: Final = 3  # Polls in a row without calls in flight: replies are sent, and no client is between two calls.


def run(settings: Settings) -> int:
    """Serve until a signal stops the server; return the exit code.

    Raises:
        InvalidArgument: the address is invalid or in use.
        FastnessError: as `fastness.open`.
    """
    logs.configure(settings.log_format, settings.log_level)
    _raise_file_limit()
    _check_file_limit(settings.connections_max)
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


async def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> int:
    """Serve on this event loop until a signal stops the server; return the exit code.

    `ready` gets the URL, which is printed by default.
    """
    check_bind(settings.host, tokens_on=settings.tokens, tls=settings.tls, insecure=settings.insecure)
    tls = _tls_context(settings) if settings.tls else None
    sqs.check_sqs(settings.host, settings.sqs_options)
    with ExitStack() as stack:
        listening = stack.enter_context(_bound_socket(settings.host, settings.port))
        sqs_listening = None
        if settings.sqs_options.port is not None:
            bound = _bound_socket(settings.host, settings.sqs_options.port, option="--sqs-port")
            sqs_listening = stack.enter_context(bound)
        transport = await open_plane_async(settings.data, settings.options)
        try:
            serving = Serving(settings, transport)
            announce = ready or partial(_announce, settings.log_format)
            await serving.run(listening, tls, announce, sqs_listening=sqs_listening)
        finally:
            await _close(transport)
    _log.info("stopped")
    return EXIT_FAILED if serving.recovery.has_stopped else 0


async def _close(transport: AsyncEmbeddedTransport) -> None:
    """Close the plane. A key space that has failed cannot be synced, which was logged when it failed."""
    try:
        await transport.close()
    except FastnessError:
        if transport.services.database.failure is None:
            raise


class Serving:
    """The parts of a running server."""

    def __init__(self, settings: Settings, transport: AsyncEmbeddedTransport) -> None:
        self.settings = settings
        self.health = Health(transport)
        self.telemetry = Telemetry()
        self.metrics = Metrics(
            queues_max=settings.metrics_queues_max,
            worlds_max=settings.metrics_worlds_max,
            streams=lambda: len(self.context.streams.open),
            sessions=lambda: len(self.context.relay),
            exchanges=lambda: self.health.in_flight,
            recorder=self.telemetry.recorder,
        )
        self._unmeasured = transport  # For reads of the server itself.
        measured = MeasuredTransport(transport, self.metrics)
        self.refusals = RefusalRecorder(transport)
        self.authenticator = make_authenticator(
            transport,
            tokens_on=settings.tokens,
            rejected=self.metrics.count_reject,
            ended=self._close_connections_of,
            refused=self.refusals.record,
        )
        self.context = ServerContext(
            measured,
            self.authenticator,
            agent=settings.ingress_agent,
            relay=_relay_options(settings),
            rejected=self.metrics.count_reject,
        )
        self.metrics.registry.register(IngressMetrics(transport.ingress, self.telemetry.recorder))
        self.metrics.registry.register(ConsumerMetrics(transport.services.waiting_consumers))
        self.metrics.registry.register(SpaceMetrics(transport.services.space_counters))
        self.metrics.registry.register(EncryptionMetrics(transport.services.database))
        self.metrics.registry.register(QuotaMetrics(transport.services.quotas))
        self.metrics.registry.register(NodeMetrics(transport.services))
        self.mcp = open_mcp(self.context, settings.http_limits, settings.mcp_options)
        if self.mcp is not None:
            self.metrics.registry.register(McpMetrics(self.mcp))
        self.history = (
            History(Samples(self.metrics, transport), transport.services.database, seconds=settings.history_seconds)
            if settings.history_seconds
            else None
        )
        app = make_app(self.context, settings.http_limits, mcp=self.mcp)
        app.router.routes[:0] = [
            *self.health.routes(),
            metrics_route(self.metrics, transport, self.authenticator),
            *console_routes(
                self.context,
                self.metrics,
                transport,
                reports=settings.pipeline_reports,
                lake=settings.pipeline_lake,
                history=self.history,
            ),
        ]
        self.sqs = sqs.open_sqs(self.context, settings.http_limits, settings.sqs_options, self._sqs_tokens(transport))
        if self.sqs is not None:
            self.metrics.registry.register(SqsMetrics(self.sqs))
        self.app = self.health.wrap(app if self.sqs is None else sqs.mounted(self.sqs, app))
        exits = settings.on_database_failure == "exit"
        self.recovery = Recovery(transport.services, stop=self.stop if exits else None)
        self.metrics.registry.register(self.recovery)
        database: Any = transport.services.database
        if hasattr(database, "on_sync"):
            database.on_sync = self.metrics.observe_sync
        transport.services.lock_counters.on_wait = self.metrics.observe_lock_wait
        self._server: _Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def run(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
        ready: Callable[[str], None],
        *,
        sqs_listening: socket.socket | None = None,
    ) -> None:
        """Serve until `stop` is called and all calls are answered."""
        url = _url_of(listening, tls)
        self._server = _Server(self._config(self.app, tls), lambda: self._ready(url, ready))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if isinstance(self.authenticator, TokenAuthenticator):
            await self.authenticator.start()
        if self._own_sqs_tokens is not None:
            await self._own_sqs_tokens.start()
        await self.context.transport.ingress.start()
        self.recovery.start()
        try:
            async with (
                self.telemetry.running(self.metrics, self._unmeasured),
                self._serving_sqs(sqs_listening, tls),
            ):
                await self._server.serve(sockets=[listening])
        finally:
            if self.history is not None:
                await self.history.stop()
            if self.mcp is not None:
                await self.mcp.stop()
            await self.recovery.end()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self.context.relay.close()
            if isinstance(self.authenticator, TokenAuthenticator):
                await self.authenticator.stop()
            if self._own_sqs_tokens is not None:
                await self._own_sqs_tokens.stop()
            await self.refusals.stop()

    def _sqs_tokens(self, transport: AsyncEmbeddedTransport) -> TokenAuthenticator | None:
        """What knows the access keys of SQS; None if its requests need no signature.

        SQS needs access keys even if the other endpoints, on a loopback address, need no tokens.
        """
        self._own_sqs_tokens: TokenAuthenticator | None = None
        options = self.settings.sqs_options
        if not options.enabled or options.anonymous:
            return None
        if isinstance(self.authenticator, TokenAuthenticator):
            return self.authenticator
        made = make_authenticator(
            transport, tokens_on=True, rejected=self.metrics.count_reject, refused=self.refusals.record
        )
        assert isinstance(made, TokenAuthenticator), "tokens are on"
        self._own_sqs_tokens = made
        return made

    @asynccontextmanager
    async def _serving_sqs(self, listening: socket.socket | None, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Serve SQS at a port of its own inside the block, if there is one."""
        if listening is None or self.sqs is None:
            yield
            return
        assert self._server is not None, "both servers stop together"
        is_ready = asyncio.Event()
        server = _Server(self._config(self.health.wrap(self.sqs), tls), is_ready.set)
        running = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        running.add_done_callback(lambda _: is_ready.set())
        await is_ready.wait()
        _log.info("SQS is ready at %s", _url_of(listening, tls))
        try:
            yield
        finally:
            server.should_exit, server.force_exit = True, self._server.force_exit
            await running

    def stop(self) -> None:
        """Drain, then close. Called again: close at once."""
        assert self._server is not None, "signals are handled only while the server runs"
        if self._draining is None:
            _log.info("stopping: waiting up to %g s for calls in flight", self.settings.drain_seconds)
            _notify_systemd("STOPPING=1")
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._server))
        else:
            _log.warning("stopping at once: %s calls in flight are not answered", self.in_flight)
            self._draining.cancel()
            self._server.force_exit = self._server.should_exit = True

    @property
    def in_flight(self) -> int:
        """Calls and HTTP requests in flight, without those that wait for messages or locks."""
        return self.health.in_flight + self.metrics.in_flight - self.metrics.waiting

    async def _drain(self, server: "_Server") -> None:
        try:
            await self._wait_for_calls()
            if self.mcp is not None:
                await self.mcp.close()  # Streams of notifications end by themselves only when their clients do.
        except Exception:  # One signal must suffice to stop the server.
            _log.exception("unexpected error while draining; the server stops at once")
        server.should_exit = True

    async def _wait_for_calls(self) -> None:
        self.health.draining = True
        self.context.streams.drain()
        self.context.relay.drain()
        if self.mcp is not None:
            self.mcp.drain()
        idle_polls = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                while idle_polls < _IDLE_POLLS:
                    await asyncio.sleep(_IDLE_POLL_SECONDS)
                    idle_polls = 0 if self.in_flight else idle_polls + 1
        if idle_polls < _IDLE_POLLS:
            _log.warning("%s calls were still in flight after %g s", self.in_flight, self.settings.drain_seconds)

    def _close_connections_of(self, token: str) -> None:
        """Close the streams, relay connections and MCP sessions of a token that became unusable."""
        self.context.relay.close_sessions_of(token)
        closings = [self.context.streams.close_streams_of(token)]
        if self.mcp is not None:
            closings.append(self.mcp.close_sessions_of(token))
        for closing in closings:
            task = asyncio.get_running_loop().create_task(closing)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _ready(self, url: str, ready: Callable[[str], None]) -> None:
        gc.collect()
        gc.freeze()  # Exempts the objects that exist now: collecting them takes 16 ms, during which all calls wait.
        _log.info("ready at %s", url, extra={"data": self.settings.data, "tokens": self.settings.tokens})
        _notify_systemd("READY=1")
        self.context.transport.services.announce_server(
            url,
            calls=lambda: sum(self.metrics.requests.values()),
            connections=lambda: len(self.context.streams.open) + len(self.context.relay) + self.health.in_flight,
        )
        if self.history is not None:
            self.history.start(history_node(url) if self.context.transport.services.shared else "local")
        ready(url)

    def _config(self, app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Config:
        settings = self.settings
        bounds = {
            "bytes_max": settings.header_bytes_max,
            "seconds": settings.header_seconds,
            "connections_max": connections_allowed(settings.connections_max),
            "count_reject": self.metrics.count_reject,
        }
        return uvicorn.Config(
            app,
            http=type("Http", (BoundedHttp,), bounds),
            ws=BoundedSocket,
            ws_max_size=FRAME_BYTES_MAX + _FRAME_SLACK_BYTES,
            ws_per_message_deflate=False,  # Deflate makes small frames larger and takes longer than the calls.
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # Forwarded headers of clients are not trusted.
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_context_factory=None if tls is None else lambda config, default: tls,  # noqa: ARG005
        )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which close connections before their calls are answered."""

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
    """Loopback without tokens: open registration and no rate limit. Other addresses: closed, and limited."""
    local = is_loopback(settings.host)
    rate = settings.relay_rate_per_second
    return RelayOptions(
        host=settings.relay_host,
        registration=settings.relay_registration or ("open" if local and not settings.tokens else "closed"),
        rate_per_second=rate if rate is not None else 0.0 if local else RELAY_RATE_PER_SECOND,
        burst=settings.relay_burst,
        authenticate_seconds=settings.relay_authenticate_seconds,
    )


def connections_allowed(configured: int | None) -> int:
    """How many connections may be open: as configured, or as many as the limit of open files allows, up to 20,000."""
    if configured is not None:
        return configured
    files = _file_limit()
    return _CONNECTIONS_MAX if files is None else min(_CONNECTIONS_MAX, max(files - _OTHER_FILES, files // 2))


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # Some systems allow less than their hard limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_file_limit(configured: int | None) -> None:
    """Warn if the limit of open files is too low for the configured connections, or for a useful number of them."""
    files, needed = _file_limit(), (configured or _OTHER_FILES) + _OTHER_FILES
    if files is not None and files < needed:
        connections = connections_allowed(configured)
        _log.warning("%s open files are too few for connections_max=%s; raise ulimit -n", files, connections)


def _file_limit() -> int | None:
    """How many files this process may open; None if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def history_node(url: str) -> str:
    """What the samples of a server on a shared key space are stored under.

    Servers in containers all listen at the same address, and those behind a proxy each at the loopback of its machine:
    the URL alone does not tell them apart. The host stays the same after a restart, which an id of a process does not.
    """
    return f"{socket.gethostname()[:_HOST_CHARACTERS_MAX]} {url}"


def _url_of(listening: socket.socket, tls: ssl.SSLContext | None) -> str:
    host, port = listening.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def _bound_socket(host: str, port: int, *, option: str = "--port") -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument(f"{host} is not an address of this machine ({error}); choose another --host") from error
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            raise InvalidArgument(_bind_problem(host, port, option, error)) from error
        listening.setblocking(False)
        yield listening


def _bind_problem(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is already in use; choose another {option}, or stop the process that uses it"
    return f"Cannot listen at {host}:{port} ({error.strerror}); choose another --host or {option}"


def _tls_context(settings: Settings) -> ssl.SSLContext:
    """The TLS context of the server.

    Raises:
        PathUnusable: a certificate or key cannot be used.
    """
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
            f"TLS cannot be set up with {files} ({error}); give a PEM certificate and its key"
        ) from error
    return context


def _announce(log_format: str, url: str) -> None:
    """Print the URL, in the first line of standard output: the starting process reads it there."""
    ready, console = f"Fastness is ready at {url}", f"{url}/console"
    if log_format == "json":
        fields = {"name": _log.name, "levelname": "INFO", "msg": ready, "url": url, "console": console}
        text = logs.JsonFormatter().format(logging.makeLogRecord(fields))
    else:
        text = f"{ready}\nThe web console is at {console}"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _notify_systemd(state: str) -> None:
    """Notify systemd, if it started the server."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
