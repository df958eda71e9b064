"""Pushes as they are accepted, as server-sent events or lines of JSON.

The id of an event is the position after it. A browser sends the last one as `Last-Event-ID` when it reconnects, so the
stream continues there.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from fastness.errors import FastnessError
from fastness.server.http import json_codec
from fastness.server.http.endpoints import Endpoint, Parameter
from fastness.server.http.events import LINES, NDJSON, SSE, End, Events, EventStream
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import problem_for
from fastness.wire.ingress import DataPush, SeenPushes, WatchPushes


class Watching(msgspec.Struct, frozen=True):
    """Where a watch begins, or continues after pushes that were missed.

    `missed` counts pushes to the universe that were forgotten before this watch was sent them. `restarted`: the server
    was restarted since the given position, and an unknown number of pushes may be missing.
    """

    position: str
    missed: int
    restarted: bool


class WatchingLine(msgspec.Struct, frozen=True):
    """The watch has begun, or has missed pushes."""

    event: Literal["watching"]
    data: Watching


class PushLine(msgspec.Struct, frozen=True):
    """A push that was accepted."""

    event: Literal["push"]
    data: DataPush


_LINES: Final = (WatchingLine, PushLine, *LINES)


async def _watch(context: RequestContext) -> Response:
    given: dict[str, Any] = {
        name: value for name, value in context.request.query_params.items() if name in ("to", "topic", "after")
    }
    last = context.request.headers.get("last-event-id")
    if last:
        given["after"] = last
    request: WatchPushes = json_codec.decode(WatchPushes, given, universe=context.universe)
    seen = await context.call(request)  # So that an invalid request gets an error status.
    context.http_context.check_watches()
    events = _events(context, request, seen)
    return EventStream(await anext(events), events, context.media)


async def _events(context: RequestContext, request: WatchPushes, seen: SeenPushes) -> AsyncGenerator[bytes, None]:
    http_context, events = context.http_context, Events(context.media)
    wait_seconds = min(http_context.limits.heartbeat_seconds, http_context.limits.wait_seconds_max)
    started = time.monotonic()
    drained = http_context.spawn(http_context.wait_for_drain())
    http_context.watches += 1
    try:
        yield _watching(events, seen)
        while True:
            for line in _lines(events, seen):
                yield line
            if drained.done() or time.monotonic() - started > http_context.limits.subscribe_seconds_max:
                yield events.event("end", End("shutdown_draining" if drained.done() else "reconnect"))
                return
            after = seen.position
            request = msgspec.structs.replace(request, after=after, wait_seconds=wait_seconds)
            reading = asyncio.create_task(context.call(request))
            try:
                await asyncio.wait([reading, drained], return_when=asyncio.FIRST_COMPLETED)
                seen = reading.result() if reading.done() else SeenPushes(after, [])
            finally:
                reading.cancel()
            if seen.missed or seen.restarted:
                yield _watching(events, seen)
            elif not seen.pushes:
                yield events.heartbeat()
    except FastnessError as error:
        yield events.event("problem", problem_for(error, context.correlation_id)[0])
    finally:
        drained.cancel()
        http_context.watches -= 1


def _watching(events: Events, seen: SeenPushes) -> bytes:
    # The event comes before the pushes of the same answer, so its id must not be the position after them.
    id = None if seen.pushes else seen.position
    return events.event("watching", Watching(seen.position, seen.missed, seen.restarted), id=id)


def _lines(events: Events, seen: SeenPushes) -> Iterator[bytes]:
    for push in seen.pushes:
        yield events.event("push", push, id=push.position)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/v1/pushes/watch",
        tag="ingress",
        summary="Stream pushes as they are accepted; a reconnect continues at `after` or `Last-Event-ID`.",
        handle=_watch,
        parameters=(
            *(
                Parameter(each.name, "query", each.type)
                for each in msgspec.structs.fields(WatchPushes)
                if each.name in ("to", "topic", "after")
            ),
            Parameter("universe", "query"),
            Parameter("Last-Event-ID", "header", description="The position to continue at, as `after`."),
        ),
        response_types={SSE: _LINES, NDJSON: _LINES},
    ),
)
