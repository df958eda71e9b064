"""Subscriptions: messages as they come, at most `credit` of them unsettled."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from holdfast.errors import HoldfastError
from holdfast.server.http import json_codec
from holdfast.server.http.endpoints import Endpoint
from holdfast.server.http.events import LINES, NDJSON, SSE, End, Events, EventStream
from holdfast.server.http.flow_control import Account
from holdfast.server.http.limits import CREDIT, PAGE_SIZE_MAX
from holdfast.server.http.message_schemas import MessageView, message_view
from holdfast.server.http.messages import give_back, receiving
from holdfast.server.http.problems import JSON, Refusal, problem_for
from holdfast.server.http.request_context import Visit
from holdfast.tiers import Tier
from holdfast.wire.queues import Delivery, ReceiveMessages


class SubscribeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """At most `credit` messages are unsettled at a time. `wait_seconds`: -1 ends when no message is ready, 0 does not
    end, more ends when none came for that long."""

    queue: str
    owner: str
    credit: int = CREDIT
    namespace: str | None = None
    universe: str | None = None
    wait_seconds: float = 0.0
    visibility_timeout_seconds: float | None = None
    txn_id: str | None = None
    tier: Tier = Tier.CRITICAL


class MessageLine(msgspec.Struct, frozen=True):
    """A message that is the caller's now."""

    event: Literal["message"]
    data: MessageView


class _Subscription:
    """One stream of messages."""

    def __init__(self, visit: Visit, body: SubscribeBody, *, with_state: bool) -> None:
        if not 1 <= body.credit <= PAGE_SIZE_MAX:
            raise Refusal(400, "invalid_argument", f"credit is {body.credit}; choose 1 to {PAGE_SIZE_MAX}")
        self._visit = visit
        self._body = body
        self._events = Events(visit.media)
        self._request = receiving(visit, body, with_state=with_state, most=body.credit, wait_seconds=0.0)
        self._unsent: list[Delivery] = []

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The lines of the answer. What is wrong with the request is raised before the first of them."""
        hall = self._visit.hall
        account = hall.credits.open(self._body.credit)
        started = last = time.monotonic()
        drained = hall.spawn(hall.draining())
        begun = False
        try:
            self._unsent = (await self._visit.ask(self._request, keyed=False)).messages
            begun = True
            yield self._events.heartbeat()
            while True:
                while self._unsent:
                    delivery = self._unsent[0]
                    account.hold(delivery.lease_id, delivery.expires_ms)
                    yield self._line(delivery)
                    del self._unsent[0]
                if drained.done():
                    yield self._events.event("end", End("shutdown_draining"))
                    return
                now = time.monotonic()
                if now - started > hall.limits.subscribe_seconds_max:
                    yield self._events.event("end", End("reconnect"))
                    return
                self._unsent = await self._next(account, drained)
                if self._unsent:
                    last = time.monotonic()
                elif self._idle(time.monotonic() - last, account):
                    yield self._events.event("end", End("idle"))
                    return
                else:
                    yield self._events.heartbeat()
        except HoldfastError as error:
            if not begun:
                raise
            yield self._events.event("problem", problem_for(error, self._visit.correlation_id)[0])
        finally:
            drained.cancel()
            account.close()
            give_back(self._visit, self._request, self._unsent)

    async def _next(self, account: Account, drained: "asyncio.Task[Any]") -> list[Delivery]:
        """Messages, as many as there is credit for; none if none came before it is time for a heartbeat."""
        limits = self._visit.hall.limits
        free = account.free()
        if free < 1:
            await account.wait(limits.heartbeat_seconds)
            return []
        wait = self._body.wait_seconds
        patience = 0.0 if wait < 0 else min(wait or limits.heartbeat_seconds, limits.heartbeat_seconds)
        request: ReceiveMessages = msgspec.structs.replace(self._request, max_messages=free, wait_seconds=patience)
        asking = asyncio.create_task(self._visit.ask(request, keyed=False))
        try:
            await asyncio.wait([asking, drained], return_when=asyncio.FIRST_COMPLETED)
            return asking.result().messages if asking.done() else []
        finally:
            asking.cancel()

    def _idle(self, seconds: float, account: Account) -> bool:
        """Whether the caller has waited as long as it wanted to. Waiting for credit is no waiting."""
        wait = self._body.wait_seconds
        if account.free() < self._body.credit and wait < 0:
            return False
        return wait < 0 or (wait > 0 and seconds >= wait)

    def _line(self, delivery: Delivery) -> bytes:
        return self._events.event("message", message_view(delivery, self._request), id=delivery.id)


_LINES: Final = (MessageLine, *LINES)


def _subscribe(with_state: bool) -> Any:
    async def handle(visit: Visit) -> Response:
        body: SubscribeBody = json_codec.checked(await visit.json(), SubscribeBody)
        lines = _Subscription(visit, body, with_state=with_state).run()
        return EventStream(await anext(lines), lines, visit.media)

    return handle


def _row(path: str, summary: str, *, with_state: bool) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        noun="messages",
        summary=summary,
        handle=_subscribe(with_state),
        takes={JSON: SubscribeBody},
        answers={NDJSON: _LINES, SSE: _LINES},
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _row("/v1/queue/subscribe", "Messages as they come, a line each", with_state=False),
    _row("/v1/queue/subscribeWithState", "Messages with their workflow states as they come", with_state=True),
)
