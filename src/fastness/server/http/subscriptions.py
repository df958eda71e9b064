"""Subscriptions: a stream of messages as they arrive, with at most `credit` of them unsettled."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from fastness.errors import FastnessError
from fastness.server.http import json_codec
from fastness.server.http.endpoints import Endpoint, Handler
from fastness.server.http.events import LINES, NDJSON, SSE, End, Events, EventStream
from fastness.server.http.flow_control import CreditWindow
from fastness.server.http.limits import CREDIT, PageSize
from fastness.server.http.message_schemas import MessageView, message_view
from fastness.server.http.messages import ReceiveBody, receive_request, release
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, problem_for
from fastness.wire.queues import Delivery, ReceiveMessages


class SubscribeBody(ReceiveBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """At most `credit` messages are unsettled at a time. `wait_seconds`: -1 ends the stream when no message is ready, 0
    never ends it, a positive number ends it after that long without a message."""

    credit: PageSize = CREDIT


class MessageLine(msgspec.Struct, frozen=True):
    """A message that the caller now holds."""

    event: Literal["message"]
    data: MessageView


class _Subscription:
    """One subscription: receives messages while there is credit, and encodes them as events."""

    def __init__(self, context: RequestContext, body: SubscribeBody, *, with_state: bool) -> None:
        self._context = context
        self._body = body
        self._events = Events(context.media)
        self._request = receive_request(
            context, body, with_state=with_state, max_messages=body.credit, wait_seconds=0.0
        )
        self._unsent: list[Delivery] = []

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The events of the response. An invalid request raises before the first one."""
        http_context = self._context.http_context
        window = http_context.flow_control.open(self._body.credit)
        started = last = time.monotonic()
        drained = http_context.spawn(http_context.wait_for_drain())
        is_started = False
        try:
            self._unsent = (await self._context.call(self._request, use_key=False)).messages
            is_started = True
            yield self._events.heartbeat()
            while True:
                while self._unsent:
                    delivery = self._unsent[0]
                    window.hold(delivery.lease_id, delivery.expires_ms)
                    yield self._line(delivery)
                    del self._unsent[0]
                if drained.done():
                    yield self._events.event("end", End("shutdown_draining"))
                    return
                now = time.monotonic()
                if now - started > http_context.limits.subscribe_seconds_max:
                    yield self._events.event("end", End("reconnect"))
                    return
                self._unsent = await self._next(window, drained)
                if self._unsent:
                    last = time.monotonic()
                elif self._is_idle(time.monotonic() - last, window):
                    yield self._events.event("end", End("idle"))
                    return
                else:
                    yield self._events.heartbeat()
        except FastnessError as error:
            if not is_started:
                raise
            yield self._events.event("problem", problem_for(error, self._context.correlation_id)[0])
        finally:
            drained.cancel()
            window.close()
            release(self._context, self._request, self._unsent)

    async def _next(self, window: CreditWindow, drained: "asyncio.Task[Any]") -> list[Delivery]:
        """The next messages, as many as there is credit for; empty if a heartbeat is due first."""
        limits = self._context.http_context.limits
        available = window.available()
        if available < 1:
            await window.wait(limits.heartbeat_seconds)
            return []
        wait = self._body.wait_seconds
        wait_seconds = 0.0 if wait < 0 else min(wait or limits.heartbeat_seconds, limits.heartbeat_seconds)
        request: ReceiveMessages = msgspec.structs.replace(
            self._request, max_messages=available, wait_seconds=wait_seconds
        )
        receiving = asyncio.create_task(self._context.call(request, use_key=False))
        try:
            await asyncio.wait([receiving, drained], return_when=asyncio.FIRST_COMPLETED)
            return receiving.result().messages if receiving.done() else []
        finally:
            receiving.cancel()

    def _is_idle(self, seconds: float, window: CreditWindow) -> bool:
        """Whether no message arrived for `wait_seconds`. Time without credit does not count if that is negative."""
        wait = self._body.wait_seconds
        if window.available() < self._body.credit and wait < 0:
            return False
        return wait < 0 or (wait > 0 and seconds >= wait)

    def _line(self, delivery: Delivery) -> bytes:
        return self._events.event("message", message_view(delivery, self._request), id=delivery.id)


_LINES: Final = (MessageLine, *LINES)


def _subscribe(with_state: bool) -> Handler:
    async def handle(context: RequestContext) -> Response:
        body: SubscribeBody = json_codec.convert_named(await context.json(), SubscribeBody)
        lines = _Subscription(context, body, with_state=with_state).run()
        return EventStream(await anext(lines), lines, context.media)

    return handle


def _subscribe_endpoint(path: str, summary: str, *, with_state: bool) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        tag="messages",
        summary=summary,
        handle=_subscribe(with_state),
        accepts={JSON: SubscribeBody},
        response_types={NDJSON: _LINES, SSE: _LINES},
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _subscribe_endpoint("/v1/queue/subscribe", "Stream messages as they arrive, one line each.", with_state=False),
    _subscribe_endpoint(
        "/v1/queue/subscribeWithState", "Stream messages with their workflow states as they arrive.", with_state=True
    ),
)
