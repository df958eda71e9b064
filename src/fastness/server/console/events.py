"""The event stream of a console page: change notifications, and a metrics sample every second.

    history    the samples of the last minutes, once
    sample     every second, if the token may read metrics
    storage    whether the key space has failed or its disk is nearly full, when that changes
    changed    the sections in which data was written; the page then reads `/v1` again
    end        the server shuts down, or an hour has passed: reconnect

A section is reported if the caller may list its contents. The events contain no written data.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import Closed, FastnessError, RetryAdvice
from fastness.kv import Subspace, Watch
from fastness.limits import (
    CONSOLE_POLL_SECONDS,
    CONSOLE_SAMPLE_SECONDS,
    CONSOLE_SECONDS_MAX,
    CONSOLE_WATCHERS_MAX,
    CONSOLE_WATCHERS_PER_TOKEN_MAX,
)
from fastness.names import UNIVERSE, checked_name
from fastness.server import health
from fastness.server.authorization import Authorizer, NoAuthentication
from fastness.server.console.samples import Sample, Samples
from fastness.server.context import ServerContext
from fastness.server.http.events import SSE, End, Events, EventStream
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import HttpError, problem_for
from fastness.wire.entities import ListKinds
from fastness.wire.leases import ListLeases
from fastness.wire.mail import ListMailboxes
from fastness.wire.permissions import METRICS
from fastness.wire.queues import SurveyQueues
from fastness.wire.requests import Request
from fastness.wire.runs import ListRuns
from fastness.wire.worlds import SurveyWorlds

# The key prefixes of each section of a universe, and the request that the caller must be allowed to make.
_SECTIONS: Final[dict[str, tuple[tuple[str, ...], type[Request[Any]]]]] = {
    "queues": (("q",), SurveyQueues),
    "mail": (("mail",), ListMailboxes),
    "worlds": (("w", "segments", "effects", "timers"), SurveyWorlds),
    "runs": (("runs",), ListRuns),
    "leases": (("leases", "lock-sessions"), ListLeases),
    "entities": (("entities",), ListKinds),
}


class _Storage(msgspec.Struct, frozen=True):
    """Why a server refuses writes. Every page shows it, whatever its token allows; /readyz says the same."""

    failure: str | None = None  # The code of the error after which the key space has failed.
    disk_low: bool = False


class ConsoleEvents:
    """Serves the event streams of all open console pages."""

    def __init__(self, context: ServerContext, samples: Samples) -> None:
        self._context = context
        self._samples = samples
        self._database = context.transport.services.database
        self._open: Counter[str] = Counter()  # Open streams by token name.

    def route(self) -> Route:
        """`/console/events`."""
        return Route("/console/events", self._answer, methods=["GET"])

    async def _answer(self, request: HttpRequest) -> Response:
        authorizer = authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        universe = checked_name("universe", request.query_params.get("universe", UNIVERSE))
        per_token_max = (
            CONSOLE_WATCHERS_MAX
            if isinstance(self._context.authenticator, NoAuthentication)
            else CONSOLE_WATCHERS_PER_TOKEN_MAX
        )
        if self._open[authorizer.name] >= per_token_max or self._open.total() >= CONSOLE_WATCHERS_MAX:
            raise HttpError(
                503,
                "console_busy",
                f"The limit of {CONSOLE_WATCHERS_MAX} open console pages, or {per_token_max} per token, is reached; "
                "close one, or retry later",
                retry=RetryAdvice.LATER,
            )
        events = self._events(authorizer, universe, request.scope["state"]["correlation_id"])
        return EventStream(await anext(events), events, SSE)

    async def _events(self, authorizer: Authorizer, universe: str, correlation_id: str) -> AsyncGenerator[bytes, None]:
        events = Events(SSE)
        self._open[authorizer.name] += 1
        try:
            with ExitStack() as stack:
                watches = [
                    (section, stack.enter_context(self._database.watch(Subspace("u", universe, name).prefix)))
                    for section, (names, request) in _SECTIONS.items()
                    if authorizer.is_allowed(request(universe=universe))  # type: ignore[call-arg]
                    for name in names
                ]
                stack.enter_context(health.waiting())
                metrics = authorizer.is_allowed(METRICS)
                history = self._samples.history if metrics else []
                yield events.event("history", {"samples": history, "metrics": metrics})
                async for each in self._poll(authorizer, watches, metrics=metrics):
                    yield each
        except Closed:
            yield events.event("end", End("shutdown_draining"))
        except FastnessError as error:
            yield events.event("problem", problem_for(error, correlation_id)[0])
        finally:
            self._open -= Counter((authorizer.name,))  # Subtraction drops names whose count is zero.

    def _storage(self) -> "_Storage":
        failure = self._database.failure
        return _Storage(None if failure is None else failure.code, self._database.low_space)

    async def _poll(
        self, authorizer: Authorizer, watches: list[tuple[str, Watch]], *, metrics: bool
    ) -> AsyncGenerator[bytes, None]:
        events = Events(SSE)
        began, checked = time.monotonic(), float("-inf")
        last_sample: Sample | None = None
        last_storage = _Storage()
        while True:
            now = time.monotonic()
            if self._context.draining or now - began > CONSOLE_SECONDS_MAX:
                yield events.event("end", End("shutdown_draining" if self._context.draining else "reconnect"))
                return
            if (storage := self._storage()) != last_storage:
                last_storage = storage
                yield events.event("storage", storage)
            sections = sorted({section for section, watch in watches if watch.wait(0)})
            if sections:
                yield events.event("changed", {"sections": sections})
            if now - checked >= CONSOLE_SAMPLE_SECONDS:
                checked = now
                _ = authorizer.holder  # Raises NotAllowed if the token was revoked or has expired.
                if not metrics:
                    yield events.heartbeat()
            if metrics and (sample := await self._samples.latest()) is not last_sample:
                last_sample = sample
                yield events.event("sample", sample)
            await asyncio.sleep(CONSOLE_POLL_SECONDS)
