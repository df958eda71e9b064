"""Receiving messages over HTTP: JSON, or multipart/related with payloads that are streamed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from holdfast.server.http import dialect
from holdfast.server.http.endpoints import BYTES, Endpoint, rendered
from holdfast.server.http.enqueues import universe_of
from holdfast.server.http.forms import MessageView, message_view, safe_content_type
from holdfast.server.http.limits import PAGE_SIZE_MAX
from holdfast.server.http.multiparts import Writer
from holdfast.server.http.refusals import JSON, Refusal, draining
from holdfast.server.http.visits import Visit
from holdfast.tiers import Tier
from holdfast.wire.blobs import OpenBlob
from holdfast.wire.queues import Delivery, MessageLease, NackMessages, ReceiveMessages

RELATED: Final = "multipart/related"


class DequeueBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`wait_seconds`: -1 does not wait, 0 waits as long as the server lets one wait (20 s), more waits that long."""

    queue: str
    owner: str
    namespace: str | None = None
    universe: str | None = None
    wait_seconds: float = 0.0
    page_size: int = 1
    visibility_timeout_seconds: float | None = None
    txn_id: str | None = None
    tier: Tier = Tier.CRITICAL


class MessagesView(msgspec.Struct, frozen=True):
    """Messages that are the caller's now, until their leases end; none if none came in time."""

    messages: list[MessageView]


def receiving(visit: Visit, body: Any, *, with_state: bool, most: int, wait_seconds: float) -> ReceiveMessages:
    """The request behind a dequeue or a subscription.

    Raises:
        Refusal: an owner or a queue is missing.
    """
    if not body.queue:
        raise Refusal(400, "missing_queue", "queue is empty; name one")
    if not body.owner:
        raise Refusal(400, "missing_owner", "owner is empty; say who will work on the messages")
    return ReceiveMessages(
        body.queue,
        body.owner,
        most,
        wait_seconds,
        body.visibility_timeout_seconds,
        with_state,
        body.txn_id,
        universe_of(visit, body),
        tier=body.tier,
    )


async def leased(visit: Visit, request: ReceiveMessages) -> list[Delivery]:
    """Messages for a caller that may hang up, and a server that may stop, while they wait.

    Raises:
        Refusal: the server is about to stop.
    """
    if request.wait_seconds <= 0:
        return (await visit.ask(request)).messages
    asking = asyncio.create_task(visit.ask(request))
    watching = [asyncio.create_task(visit.gone()), asyncio.create_task(visit.hall.draining())]
    try:
        await asyncio.wait([asking, *watching], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            if watching[0].done():
                return []  # Nobody hears this.
            raise draining()
        deliveries = asking.result().messages
        if watching[0].done():
            if not visit.has_key:
                give_back(visit, request, deliveries)
            return []
        return deliveries
    finally:
        for task in (asking, *watching):
            task.cancel()


def give_back(visit: Visit, request: ReceiveMessages, deliveries: list[Delivery]) -> None:
    """Messages whose consumer has gone before it heard of them are the next one's, and it was not their fault."""
    if deliveries:
        leases = [MessageLease(each.id, each.lease_id, each.fence) for each in deliveries]
        nack = NackMessages(request.queue, leases, intent="defer", universe=request.universe)
        visit.hall.spawn(visit.hall.port.call(nack))


def _dequeue(with_state: bool) -> Any:
    async def handle(visit: Visit) -> Response:
        body: DequeueBody = dialect.checked(await visit.json(), DequeueBody)
        if not 1 <= body.page_size <= PAGE_SIZE_MAX:
            raise Refusal(400, "invalid_argument", f"page_size is {body.page_size}; choose 1 to {PAGE_SIZE_MAX}")
        request = receiving(
            visit,
            body,
            with_state=with_state,
            most=body.page_size,
            wait_seconds=bounded_wait(body.wait_seconds, visit.hall.limits.wait_seconds_max),
        )
        deliveries = await leased(visit, request)
        headers = {"Cache-Control": "no-store"}
        if len(deliveries) == 1:
            headers["X-Correlation-Id"] = deliveries[0].correlation_id
        if visit.media == RELATED:
            if not deliveries:
                return Response(status_code=204, headers=headers)
            writer = Writer()
            content = _parts(visit, request, writer, deliveries)
            return StreamingResponse(content, headers=headers, media_type=writer.content_type)
        views = [message_view(each, request) for each in deliveries]
        return rendered(MessagesView(views), headers=headers)

    return handle


def bounded_wait(wait_seconds: float, seconds_max: float) -> float:
    """How long to wait for whoever says -1 (not at all), 0 (as long as may be) or a number of seconds."""
    if wait_seconds < 0:
        return 0.0
    return seconds_max if wait_seconds == 0 else min(wait_seconds, seconds_max)


async def _parts(
    visit: Visit, request: ReceiveMessages, writer: Writer, deliveries: list[Delivery]
) -> AsyncIterator[bytes]:
    """For each message its meta, then its payload."""
    for delivery in deliveries:
        meta = dialect.encoded(message_view(delivery, request, payload=False))
        yield writer.head("meta", JSON, len(meta)) + meta
        yield writer.head("payload", safe_content_type(delivery.content_type), delivery.size)
        if delivery.payload is not None or delivery.blob is None:
            yield delivery.payload or b""
        else:
            async for piece in await visit.hall.port.receive(OpenBlob(delivery.blob, request.universe)):
                yield piece
    yield writer.end()


def _row(path: str, summary: str, *, with_state: bool) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        noun="messages",
        summary=summary,
        handle=_dequeue(with_state),
        takes={JSON: DequeueBody},
        answers={JSON: MessagesView, RELATED: BYTES},
        others={204: "No message came in time, for callers that want multipart/related."},
        keyed=True,
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _row("/v1/queue/dequeue", "Lease messages, waiting for the first", with_state=False),
    _row("/v1/queue/dequeueWithState", "Lease messages with their workflow state", with_state=True),
)
