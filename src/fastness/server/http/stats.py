"""Queue statistics: read once, or streamed when they change."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Final, Literal

import msgspec
from starlette.responses import Response

from fastness.errors import FastnessError
from fastness.server.http import json_codec
from fastness.server.http.endpoints import Endpoint, Parameter, json_response
from fastness.server.http.events import LINES, NDJSON, SSE, End, Events, EventStream
from fastness.server.http.messages import universe_of
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, problem_for
from fastness.tiers import Tier
from fastness.wire.queues import GetQueueStats, QueueStats


class StatsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The queue whose statistics to read."""

    queue: str
    universe: str | None = None


class StatsView(QueueStats, frozen=True, kw_only=True):
    """The number of messages in each state, and of waiting consumers. Reading this leases nothing."""

    universe: str
    available: bool  # Whether a dequeue would get a message now.
    pending_candidates: int  # Messages that are ready.
    total_consumers: int
    has_active_watcher: bool


class StatsLine(msgspec.Struct, frozen=True):
    """Changed statistics."""

    event: Literal["stats"]
    data: StatsView


_LINES: Final = (StatsLine, *LINES)
_WATCH_SUMMARY: Final = "Stream the statistics of a queue whenever they change."


def _view(context: RequestContext, universe: str, stats: QueueStats) -> StatsView:
    return StatsView(
        universe=universe,
        available=stats.ready > 0 and not stats.paused,
        pending_candidates=stats.ready,
        total_consumers=stats.waiting_consumers,
        has_active_watcher=context.http_context.watches > 0,
        **msgspec.structs.asdict(stats),
    )


async def _stats(context: RequestContext) -> Response:
    body: StatsBody = json_codec.convert_named(await context.json(), StatsBody)
    universe = universe_of(context, body)
    return json_response(_view(context, universe, await context.call(GetQueueStats(body.queue, universe))))


async def _watch(context: RequestContext) -> Response:
    if context.request.method == "POST":
        body: StatsBody = json_codec.convert_named(await context.json(), StatsBody)
    else:
        body = json_codec.convert_named(dict(context.request.query_params), StatsBody)
    universe = universe_of(context, body)
    first = await context.call(GetQueueStats(body.queue, universe))  # So that an invalid request gets an error status.
    context.http_context.check_watches()
    events = _events(context, universe, first)
    return EventStream(await anext(events), events, context.media)


async def _events(context: RequestContext, universe: str, stats: QueueStats) -> AsyncGenerator[bytes, None]:
    http_context, events = context.http_context, Events(context.media)
    request = GetQueueStats(stats.queue, universe, tier=Tier.IMPORTANT)  # Includes writes that are not yet synced.
    started = sent_at = time.monotonic()
    http_context.watches += 1
    try:
        yield events.event("stats", _view(context, universe, stats))
        while True:
            await asyncio.sleep(http_context.limits.watch_seconds)
            now = time.monotonic()
            if http_context.server.draining or now - started > http_context.limits.subscribe_seconds_max:
                yield events.event("end", End("shutdown_draining" if http_context.server.draining else "reconnect"))
                return
            latest = await context.call(request)
            if _without_age(latest) != _without_age(stats):
                stats, sent_at = latest, now
                yield events.event("stats", _view(context, universe, stats))
            elif now - sent_at > http_context.limits.heartbeat_seconds:
                sent_at = now
                yield events.heartbeat()
    except FastnessError as error:
        yield events.event("problem", problem_for(error, context.correlation_id)[0])
    finally:
        http_context.watches -= 1


def _without_age(stats: QueueStats) -> QueueStats:
    """The stats without the age, which changes all the time."""
    return msgspec.structs.replace(stats, head_age_seconds=0.0)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/queue/stats",
        tag="messages",
        summary="Read the statistics of a queue.",
        handle=_stats,
        accepts={JSON: StatsBody},
        response_types={JSON: StatsView},
    ),
    Endpoint(
        method="POST",
        path="/v1/queue/watch",
        tag="messages",
        summary=_WATCH_SUMMARY,
        handle=_watch,
        accepts={JSON: StatsBody},
        response_types={SSE: _LINES, NDJSON: _LINES},
    ),
    Endpoint(
        method="GET",
        path="/v1/queue/watch",
        tag="messages",
        summary=_WATCH_SUMMARY,
        handle=_watch,
        parameters=(
            Parameter("queue", "query", required=True),
            Parameter("universe", "query"),
        ),
        query_aliases=frozenset({"namespace"}),
        response_types={SSE: _LINES, NDJSON: _LINES},
    ),
)
