"""What a page of the console hears: that something has changed, and a sample of the metrics every second.

    history    the last minutes, once
    sample     every second, to whoever may read the metrics
    changed    the rooms in which something was written since; the page asks `/v1` for what it shows of them
    end        the server stops, or an hour is over: connect again

A room is told of if the caller may list what is in it. Nothing of what was written is said here.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast.errors import Closed, HoldfastError, Retry
from holdfast.kv import Subspace
from holdfast.limits import (
    CONSOLE_LOOK_SECONDS,
    CONSOLE_SAMPLE_SECONDS,
    CONSOLE_SECONDS_MAX,
    CONSOLE_WATCHERS_MAX,
    CONSOLE_WATCHERS_OF_TOKEN_MAX,
)
from holdfast.names import UNIVERSE, checked_name
from holdfast.server import health
from holdfast.server.authorization import Open
from holdfast.server.console.samples import Samples
from holdfast.server.console.sessions import may
from holdfast.server.doors import Doors
from holdfast.server.http.events import SSE, End, Events, EventStream
from holdfast.server.http.middleware import admitted
from holdfast.server.http.problems import Refusal, problem_for
from holdfast.wire.entities import ListKinds
from holdfast.wire.leases import ListLeases
from holdfast.wire.mail import ListMailboxes
from holdfast.wire.queues import SurveyQueues
from holdfast.wire.requests import Request
from holdfast.wire.tokens import METRICS
from holdfast.wire.worlds import SurveyWorlds

# The rooms of a universe, and what tells whether somebody may know of them.
_ROOMS: Final[dict[str, tuple[tuple[str, ...], type[Request[Any]]]]] = {
    "queues": (("q",), SurveyQueues),
    "mail": (("mail",), ListMailboxes),
    "worlds": (("w", "segments"), SurveyWorlds),
    "leases": (("leases",), ListLeases),
    "entities": (("entities",), ListKinds),
}


class Watchers:
    """The pages that are open."""

    def __init__(self, doors: Doors, samples: Samples) -> None:
        self._doors = doors
        self._samples = samples
        self._database = doors.transport.services.database
        self._open: Counter[str] = Counter()  # By who has opened them.

    def route(self) -> Route:
        """`/console/events`."""
        return Route("/console/events", self._answer, methods=["GET"])

    async def _answer(self, request: HttpRequest) -> Response:
        guard = admitted(self._doors, request.headers, request.client.host if request.client else "")
        universe = checked_name("universe", request.query_params.get("universe", UNIVERSE))
        of_one = CONSOLE_WATCHERS_MAX if isinstance(self._doors.guards, Open) else CONSOLE_WATCHERS_OF_TOKEN_MAX
        if self._open[guard.name] >= of_one or self._open.total() >= CONSOLE_WATCHERS_MAX:
            raise Refusal(
                503,
                "console_busy",
                f"{CONSOLE_WATCHERS_MAX} pages of the console are open already, or {of_one} of yours; close one, or "
                "come back later",
                retry=Retry.LATER,
            )
        events = self._events(guard, universe, request.scope["state"]["correlation_id"])
        return EventStream(await anext(events), events, SSE)

    async def _events(self, guard: Any, universe: str, correlation_id: str) -> AsyncGenerator[bytes, None]:
        events = Events(SSE)
        self._open[guard.name] += 1
        try:
            with ExitStack() as around:
                watches = [
                    (room, around.enter_context(self._database.watch(Subspace("u", universe, name).prefix)))
                    for room, (names, request) in _ROOMS.items()
                    if may(guard, request(universe=universe))  # type: ignore[call-arg]
                    for name in names
                ]
                around.enter_context(health.waiting())
                metrics = may(guard, METRICS)
                history = self._samples.history if metrics else []
                yield events.event("history", {"samples": history, "metrics": metrics})
                async for each in self._go_on(guard, watches, metrics=metrics):
                    yield each
        except Closed:
            yield events.event("end", End("shutdown_draining"))
        except HoldfastError as error:
            yield events.event("problem", problem_for(error, correlation_id)[0])
        finally:
            self._open -= Counter((guard.name,))  # Whoever has none open any more is not kept.

    async def _go_on(self, guard: Any, watches: list[Any], *, metrics: bool) -> AsyncGenerator[bytes, None]:
        events = Events(SSE)
        began, checked = time.monotonic(), float("-inf")
        told: Any = None
        while True:
            now = time.monotonic()
            if self._doors.draining or now - began > CONSOLE_SECONDS_MAX:
                yield events.event("end", End("shutdown_draining" if self._doors.draining else "reconnect"))
                return
            rooms = sorted({room for room, watch in watches if watch.wait(0)})
            if rooms:
                yield events.event("changed", {"rooms": rooms})
            if now - checked >= CONSOLE_SAMPLE_SECONDS:
                checked = now
                getattr(guard, "holder", None)  # Raises if the token was revoked, or its time is over.
                if not metrics:
                    yield events.heartbeat()
            if metrics and (sample := await self._samples.latest()) is not told:
                told = sample
                yield events.event("sample", sample)
            await asyncio.sleep(CONSOLE_LOOK_SECONDS)
