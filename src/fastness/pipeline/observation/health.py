"""Health of `ingest --follow`, for Kubernetes, systemd and load balancers.

/healthz   200 while rounds end or report progress; 503 once nothing has happened for too long: restart the process
/readyz    200 if the last round succeeded; 503 while the plane or the lake cannot be reached
/metrics   the metrics of docs/metrics.md
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastness.errors import FastnessError, InvalidArgument, PathUnusable
from fastness.limits import FOLLOW_STALL_SECONDS, HEALTH_CONNECTIONS_MAX
from fastness.pipeline.config import JobResult

_START_SECONDS: Final = 10.0


class FollowHealth:
    """What is known about a run that repeats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at = clock()
        self._rounds = 0
        self._error: str | None = None

    def beat(self) -> None:
        """Note that the current round makes progress."""
        self._seen_at = self._clock()

    def round_ended(self, outcome: JobResult | FastnessError) -> None:
        """Note the end of a round, or the error that it will be retried after."""
        self.beat()
        self._rounds += not isinstance(outcome, FastnessError)
        self._error = str(outcome) if isinstance(outcome, FastnessError) else None

    @property
    def is_alive(self) -> bool:
        return self._clock() - self._seen_at < FOLLOW_STALL_SECONDS

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self._rounds > 0 and self._error is None

    def fields(self) -> dict[str, object]:
        """What the endpoints answer."""
        silent = round(self._clock() - self._seen_at, 3)
        return {"rounds": self._rounds, "silent_seconds": silent, "error": self._error}


@contextmanager
def serve_health(address: str, health: FollowHealth, metrics: Callable[[], bytes]) -> Iterator[int]:
    """Answer health checks at [HOST:]PORT while the context is open; yields the port.

    Raises:
        InvalidArgument: the address is not a host and a port.
        PathUnusable: the port cannot be used.
    """
    listener = _listen(address)
    config = uvicorn.Config(
        _application(health, metrics),
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=HEALTH_CONNECTIONS_MAX,
        timeout_keep_alive=5,
        server_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="fastness-pipeline-health", daemon=True
    )
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(_START_SECONDS)
        listener.close()


def _application(health: FollowHealth, metrics: Callable[[], bytes]) -> Starlette:
    async def healthz(_request: Request) -> Response:
        return JSONResponse(health.fields(), 200 if health.is_alive else 503)

    async def readyz(_request: Request) -> Response:
        return JSONResponse(health.fields(), 200 if health.is_ready else 503)

    async def scrape(_request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", scrape)])


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise InvalidArgument(f"--health {address!r} is invalid; use PORT or HOST:PORT, such as 0.0.0.0:8080")
    host = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise PathUnusable(
            f"Port {port} of {host} cannot be used ({error.strerror or error}); choose another --health"
        ) from error
