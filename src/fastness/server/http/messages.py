"""Messages over HTTP: enqueue and dequeue. Settling them is in `settlements.py`.

    enqueue   JSON, or multipart with a payload of any size, which is streamed and never held in memory
    dequeue   lease messages, waiting for the first; as JSON, or as multipart/related with streamed payloads

A message with a payload over `PAYLOAD_INLINE_BYTES_MAX` refers to a blob, which is stored before the message.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final, Protocol

import msgspec
from starlette.responses import Response, StreamingResponse

from fastness.errors import BlobNotFound
from fastness.limits import PAYLOAD_INLINE_BYTES_MAX
from fastness.server.http import json_codec
from fastness.server.http.endpoints import BYTES, Endpoint, Handler, json_response
from fastness.server.http.limits import META_BYTES_MAX, PageSize
from fastness.server.http.media import media_type_of
from fastness.server.http.message_schemas import (
    MessageBody,
    MessageView,
    ReceiptView,
    checked_content_type,
    message_view,
    new_message,
    safe_content_type,
    view,
)
from fastness.server.http.multipart import MultipartReader, MultipartWriter
from fastness.server.http.request_context import RequestContext, parse_json, unsupported_media_type
from fastness.server.problems import JSON, HttpError, draining_error
from fastness.tiers import Tier
from fastness.wire.blobs import FindBlob, OpenBlob, PutBlob, WriteBlob
from fastness.wire.fields import VisibilitySeconds
from fastness.wire.queues import (
    Delivery,
    MessageLease,
    NackMessages,
    NewMessage,
    PutMessages,
    ReceiveMessages,
)

RELATED: Final = "multipart/related"


class _Universe(Protocol):
    @property
    def universe(self) -> str | None: ...


def universe_of(context: RequestContext, body: _Universe) -> str:
    """The universe of a request: that in the body, or that of the query or header."""
    return context.universe if body.universe is None else body.universe


# Enqueue


class EnqueueBody(MessageBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message to put into a queue, or up to 256 of them as `messages`, in one commit."""

    queue: str
    universe: str | None = None
    messages: list[MessageBody] | None = None
    tier: Tier = Tier.CRITICAL


class EnqueueMeta(MessageBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `meta` part of a multipart enqueue; the `payload` part follows it."""

    queue: str
    universe: str | None = None
    tier: Tier = Tier.CRITICAL


class EnqueueParts(msgspec.Struct, frozen=True):
    """A multipart enqueue: two parts, in this order. Without the second part the message has no payload."""

    meta: EnqueueMeta
    payload: bytes = b""


class ReceiptsView(msgspec.Struct, frozen=True):
    """The acknowledgements of a batch, in the order of its messages."""

    messages: list[ReceiptView]


async def _enqueue(context: RequestContext) -> Response:
    media = media_type_of(context.request.headers)
    if media.startswith("multipart/"):
        return await _enqueue_multipart(context)
    if not media:
        raise unsupported_media_type("", "application/json or multipart/form-data")
    body: EnqueueBody = json_codec.convert_named(await context.json(), EnqueueBody)
    universe = universe_of(context, body)
    context.authorizer.authorize(PutMessages(body.queue, [], universe))  # Before any blob is stored.
    if body.messages is None:
        single = _message_body_of(body)
        messages = [await _message_with_stored_payload(context, universe, single)]
        receipt = (await _put(context, body, universe, messages, [single]))[0]
        return _receipt_response(receipt)
    if body != EnqueueBody(queue=body.queue, universe=body.universe, messages=body.messages, tier=body.tier):
        raise HttpError(400, "invalid_body", "A batch has its payloads and options inside `messages`; move them there")
    messages = [await _message_with_stored_payload(context, universe, each) for each in body.messages]
    return json_response(ReceiptsView(await _put(context, body, universe, messages, body.messages)))


async def _enqueue_multipart(context: RequestContext) -> Response:
    async with aclosing(context.stream()) as stream:
        parts = MultipartReader(context.request.headers["content-type"], stream)
        part = await parts.next_part()
        if part is None or part[0] != "meta":
            raise HttpError(400, "invalid_body", "The first part of an enqueue must be named meta")
        meta: EnqueueMeta = json_codec.convert_named(parse_json(await parts.read_all(META_BYTES_MAX)), EnqueueMeta)
        body, universe = _message_body_of(meta), universe_of(context, meta)
        message = new_message(body)
        context.authorizer.authorize(PutMessages(meta.queue, [], universe))
        message = await _read_payload_part(context, universe, message, body.content_type, parts) or message
    return _receipt_response((await _put(context, meta, universe, [message], [body]))[0])


async def _read_payload_part(
    context: RequestContext, universe: str, message: NewMessage, content_type: str | None, parts: MultipartReader
) -> NewMessage | None:
    """The message with the payload of the next part; None if there is no next part."""
    part = await parts.next_part()
    if part is None:
        return None
    name, headers = part
    if name != "payload":
        raise HttpError(400, "invalid_body", f"The second part of an enqueue must be named payload, not {name[:80]!r}")
    if message.payload or message.blob is not None:
        raise HttpError(400, "invalid_body", "The payload is in the meta part and in the payload part; send it once")
    content_type = checked_content_type(content_type or headers.get("content-type") or "application/octet-stream")
    async with aclosing(parts.chunks()) as chunks:
        first = bytearray()
        async for chunk in chunks:
            first += chunk
            if len(first) > PAYLOAD_INLINE_BYTES_MAX:
                break
        if len(first) <= PAYLOAD_INLINE_BYTES_MAX:
            await _check_last_part(parts)
            return msgspec.structs.replace(message, payload=bytes(first), content_type=content_type)
        async with aclosing(_payload_chunks(bytes(first), chunks, parts)) as payload:
            stored = await context.http_context.transport.send(WriteBlob(universe, pinned=False), payload)
    return msgspec.structs.replace(message, blob=stored.hash, blob_size=stored.size, content_type=content_type)


async def _payload_chunks(
    first: bytes, rest: AsyncIterator[bytes], parts: MultipartReader
) -> AsyncGenerator[bytes, None]:
    """The payload, up to the end of the body: nothing is stored if the body is truncated or too long."""
    yield first
    async for chunk in rest:
        yield chunk
    await _check_last_part(parts)


async def _check_last_part(parts: MultipartReader) -> None:
    if await parts.next_part() is not None:
        raise HttpError(400, "invalid_body", "An enqueue has two parts, meta and payload; remove the others")


async def _message_with_stored_payload(context: RequestContext, universe: str, body: MessageBody) -> NewMessage:
    """The message of a body. A payload that is too large to inline is stored as a blob."""
    message = new_message(body, inline=False)
    if message.blob is not None:
        size = (await context.call(FindBlob(message.blob, universe))).size
        if size is None:
            raise BlobNotFound(f"No blob {message.blob} is stored in {universe}; put it first")
        return msgspec.structs.replace(message, blob_size=size)
    if len(message.payload) > PAYLOAD_INLINE_BYTES_MAX:
        stored = await context.http_context.transport.call(PutBlob(message.payload, universe, pinned=False))
        return msgspec.structs.replace(message, payload=b"", blob=stored.hash, blob_size=stored.size)
    return message


async def _put(
    context: RequestContext,
    body: EnqueueBody | EnqueueMeta,
    universe: str,
    messages: list[NewMessage],
    message_bodies: list[MessageBody],
) -> list[ReceiptView]:
    as_sent = PutMessages(body.queue, messages, universe, tier=body.tier)
    # A message without a correlation id gets that of the request.
    messages = [
        msgspec.structs.replace(message, correlation_id=each.correlation_id or context.correlation_id)
        for message, each in zip(messages, message_bodies, strict=True)
    ]
    request = msgspec.structs.replace(as_sent, messages=messages)
    answer = await context.call(request, authorized=True, as_sent=as_sent)
    return [
        view(
            ReceiptView,
            receipt,
            universe=universe,
            queue=body.queue,
            payload_bytes=message.blob_size if message.blob is not None else len(message.payload),
        )
        for receipt, message in zip(answer.receipts, messages, strict=True)
    ]


def _message_body_of(body: EnqueueBody | EnqueueMeta) -> MessageBody:
    return MessageBody(**{name: getattr(body, name) for name in MessageBody.__struct_fields__})


def _receipt_response(receipt: ReceiptView) -> Response:
    return json_response(receipt, headers={"X-Correlation-Id": receipt.correlation_id})


# Dequeue


class ReceiveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields that a dequeue and a subscription share."""

    queue: str
    owner: str
    universe: str | None = None
    wait_seconds: float = 0.0
    visibility_seconds: VisibilitySeconds | None = None
    txn_id: str | None = None
    tier: Tier | None = None


class DequeueBody(ReceiveBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`wait_seconds`: -1 does not wait, 0 waits up to the server's limit (20 s), a positive number waits that long."""

    page_size: PageSize = 1


class MessagesView(msgspec.Struct, frozen=True):
    """Messages that the caller holds until their leases expire; empty if none arrived in time."""

    messages: list[MessageView]


def receive_request(
    context: RequestContext, body: ReceiveBody, *, with_state: bool, max_messages: int, wait_seconds: float
) -> ReceiveMessages:
    """The plane request of a dequeue or a subscription.

    Raises:
        HttpError: the owner or the queue is empty.
    """
    check_queue(body.queue)
    if not body.owner:
        raise HttpError(400, "missing_owner", "owner is empty; send the name of the consumer")
    return ReceiveMessages(
        body.queue,
        body.owner,
        max_messages,
        wait_seconds,
        body.visibility_seconds,
        with_state,
        body.txn_id,
        universe_of(context, body),
        tier=body.tier,
    )


def release(context: RequestContext, request: ReceiveMessages, deliveries: list[Delivery]) -> None:
    """Release messages that their consumer did not get. This does not count as a failed attempt."""
    if deliveries:
        leases = [MessageLease(each.id, each.lease_id, each.fence) for each in deliveries]
        nack = NackMessages(request.queue, leases, intent="defer", universe=request.universe)
        context.http_context.spawn(context.http_context.transport.call(nack))


def _dequeue(with_state: bool) -> Handler:
    async def handle(context: RequestContext) -> Response:
        body: DequeueBody = json_codec.convert_named(await context.json(), DequeueBody)
        request = receive_request(
            context,
            body,
            with_state=with_state,
            max_messages=body.page_size,
            wait_seconds=_bounded_wait(body.wait_seconds, context.http_context.limits.wait_seconds_max),
        )
        deliveries = await _receive(context, request)
        headers = {"Cache-Control": "no-store"}
        if len(deliveries) == 1:
            headers["X-Correlation-Id"] = deliveries[0].correlation_id
        if context.media == RELATED:
            if not deliveries:
                return Response(status_code=204, headers=headers)
            writer = MultipartWriter()
            content = _multipart_chunks(context, request, writer, deliveries)
            return StreamingResponse(content, headers=headers, media_type=writer.content_type)
        views = [message_view(each, request) for each in deliveries]
        return json_response(MessagesView(views), headers=headers)

    return handle


def _bounded_wait(wait_seconds: float, seconds_max: float) -> float:
    """Seconds to wait: none for a negative number, `seconds_max` for 0, otherwise at most `seconds_max`."""
    if wait_seconds < 0:
        return 0.0
    return seconds_max if wait_seconds == 0 else min(wait_seconds, seconds_max)


async def _receive(context: RequestContext, request: ReceiveMessages) -> list[Delivery]:
    """Receive messages; waiting ends early if the caller disconnects or the server shuts down.

    Raises:
        HttpError: the server is shutting down.
    """
    if request.wait_seconds <= 0:
        return (await context.call(request)).messages
    receiving = asyncio.create_task(context.call(request))
    disconnected = asyncio.create_task(context.wait_for_disconnect())
    draining = asyncio.create_task(context.http_context.wait_for_drain())
    try:
        await asyncio.wait([receiving, disconnected, draining], return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            if disconnected.done():
                return []
            raise draining_error()
        deliveries = receiving.result().messages
        if disconnected.done():
            # A caller with an idempotency key gets the same messages when it repeats the request.
            if not context.has_idempotency_key:
                release(context, request, deliveries)
            return []
        return deliveries
    finally:
        for task in (receiving, disconnected, draining):
            task.cancel()


async def _multipart_chunks(
    context: RequestContext, request: ReceiveMessages, writer: MultipartWriter, deliveries: list[Delivery]
) -> AsyncIterator[bytes]:
    """For each message a `meta` part, then a `payload` part."""
    for delivery in deliveries:
        meta = json_codec.encode(message_view(delivery, request, payload=False))
        yield writer.part_head("meta", JSON, len(meta)) + meta
        yield writer.part_head("payload", safe_content_type(delivery.content_type), delivery.size)
        if delivery.payload is not None or delivery.blob is None:
            yield delivery.payload or b""
        else:
            async for chunk in await context.http_context.transport.receive(OpenBlob(delivery.blob, request.universe)):
                yield chunk
    yield writer.end()


def check_queue(queue: str) -> None:
    """Raise HttpError if no queue is named."""
    if not queue:
        raise HttpError(400, "missing_queue", "queue is empty; send the name of a queue")


# Endpoints


def _dequeue_endpoint(path: str, summary: str, *, with_state: bool) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        tag="messages",
        summary=summary,
        handle=_dequeue(with_state),
        accepts={JSON: DequeueBody},
        response_types={JSON: MessagesView, RELATED: BYTES},
        other_statuses={204: "No message arrived in time (multipart/related only)."},
        keyed=True,
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/queue/enqueue",
        tag="messages",
        summary="Enqueue a message or a batch of messages.",
        handle=_enqueue,
        accepts={JSON: EnqueueBody, "multipart/form-data": EnqueueParts},
        response_types={JSON: (ReceiptView, ReceiptsView)},
        keyed=True,
    ),
    _dequeue_endpoint("/v1/queue/dequeue", "Lease messages, waiting for the first one.", with_state=False),
    _dequeue_endpoint(
        "/v1/queue/dequeueWithState",
        "Lease messages and their workflow states, waiting for the first.",
        with_state=True,
    ),
)
