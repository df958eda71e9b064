"""How a queue is doing: asked once, or watched."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from holdfast.errors import HoldfastError, Retry
from holdfast.server.http import json_codec
from holdfast.server.http.endpoints import Endpoint, Parameter, rendered
from holdfast.server.http.events import LINES, NDJSON, SSE, End, Events, EventStream
from holdfast.server.http.messages import universe_of
from holdfast.server.http.problems import JSON, Refusal, problem_for
from holdfast.server.http.request_context import Visit
from holdfast.tiers import Tier
from holdfast.wire.queues import GetQueueStats, QueueStats


class StatsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which queue."""

    queue: str
    namespace: str | None = None
    universe: str | None = None


class StatsView(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages are in which state, and who waits. Looking consumes nothing."""

    namespace: str
    queue: str
    available: bool  # Something would be delivered now.
    pending_candidates: int  # Messages that are ready.
    waiting_consumers: int
    total_consumers: int
    has_active_watcher: bool
    head_message_id: str | None
    head_age_seconds: float
    ready: int
    delayed: int
    leased: int
    blocked: int
    dead: int
    paused: bool
    put_total: int
    delivered_total: int
    acked_total: int
    failed_total: int
    expired_total: int
    dead_total: int


class StatsLine(msgspec.Struct, frozen=True):
    """Stats that have changed."""

    event: Literal["stats"]
    data: StatsView


_LINES: Final = (StatsLine, *LINES)


def _view(visit: Visit, universe: str, stats: QueueStats) -> StatsView:
    return StatsView(
        namespace=universe,
        available=stats.ready > 0 and not stats.paused,
        pending_candidates=stats.ready,
        total_consumers=stats.waiting_consumers,
        has_active_watcher=visit.hall.watches > 0,
        **msgspec.structs.asdict(stats),
    )


async def _stats(visit: Visit) -> Response:
    body: StatsBody = json_codec.checked(await visit.json(), StatsBody)
    universe = universe_of(visit, body)
    return rendered(_view(visit, universe, await visit.ask(GetQueueStats(body.queue, universe))))


async def _watch(visit: Visit) -> Response:
    if visit.http.method == "POST":
        body: StatsBody = json_codec.checked(await visit.json(), StatsBody)
    else:
        body = json_codec.checked(dict(visit.http.query_params), StatsBody)
    universe = universe_of(visit, body)
    first = await visit.ask(GetQueueStats(body.queue, universe))  # So that what is wrong is a problem, not an event.
    hall = visit.hall
    if hall.watches >= hall.limits.watches_max:
        raise Refusal(
            503, "queue_busy", f"{hall.limits.watches_max} watches are open already; come back later", retry=Retry.LATER
        )
    events = _events(visit, universe, first)
    return EventStream(await anext(events), events, visit.media)


async def _events(visit: Visit, universe: str, stats: QueueStats) -> AsyncGenerator[bytes, None]:
    hall, events = visit.hall, Events(visit.media)
    request = GetQueueStats(stats.queue, universe, tier=Tier.IMPORTANT)  # The newest, though not yet synced.
    started = spoken = time.monotonic()
    hall.watches += 1
    try:
        yield events.event("stats", _view(visit, universe, stats))
        while True:
            await asyncio.sleep(hall.limits.watch_seconds)
            now = time.monotonic()
            if hall.doors.draining or now - started > hall.limits.subscribe_seconds_max:
                yield events.event("end", End("shutdown_draining" if hall.doors.draining else "reconnect"))
                return
            latest = await visit.ask(request)
            if _what_counts(latest) != _what_counts(stats):
                stats, spoken = latest, now
                yield events.event("stats", _view(visit, universe, stats))
            elif now - spoken > hall.limits.heartbeat_seconds:
                spoken = now
                yield events.heartbeat()
    except HoldfastError as error:
        yield events.event("problem", problem_for(error, visit.correlation_id)[0])
    finally:
        hall.watches -= 1


def _what_counts(stats: QueueStats) -> QueueStats:
    """The stats without what changes by itself."""
    return msgspec.structs.replace(stats, head_age_seconds=0.0)


def _row(method: str, **options: Any) -> Endpoint:
    return Endpoint(
        method=method,
        path="/v1/queue/watch",
        noun="messages",
        summary="The stats of a queue, whenever they change",
        handle=_watch,
        answers={SSE: _LINES, NDJSON: _LINES},
        **options,
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/queue/stats",
        noun="messages",
        summary="How many messages of a queue are in which state",
        handle=_stats,
        takes={JSON: StatsBody},
        answers={JSON: StatsView},
    ),
    _row("POST", takes={JSON: StatsBody}),
    _row(
        "GET",
        parameters=(
            Parameter("queue", "query", required=True),
            Parameter("namespace", "query"),
            Parameter("universe", "query"),
        ),
    ),
)
