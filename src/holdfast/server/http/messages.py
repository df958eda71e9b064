"""Putting messages over HTTP: JSON, or multipart with a payload of any size that is never held in memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from holdfast.errors import BlobNotFound, HoldfastError, rebuild
from holdfast.limits import PAYLOAD_INLINE_BYTES_MAX
from holdfast.server.http import json_codec
from holdfast.server.http.endpoints import BYTES, Endpoint, rendered
from holdfast.server.http.limits import META_BYTES_MAX, PAGE_SIZE_MAX
from holdfast.server.http.media import media_type_of
from holdfast.server.http.message_schemas import (
    LeaseForm,
    MessageForm,
    MessageView,
    ReceiptView,
    checked_content_type,
    lease_of,
    message_view,
    new_message,
    safe_content_type,
)
from holdfast.server.http.multiparts import Parts, Writer
from holdfast.server.http.problems import JSON, Refusal, draining
from holdfast.server.http.request_context import Visit, parsed, wrong_media
from holdfast.tiers import Tier
from holdfast.wire.blobs import FindBlob, OpenBlob, PutBlob, WriteBlob
from holdfast.wire.queues import (
    AckMessages,
    Delivery,
    ExtendMessages,
    MessageLease,
    NackMessages,
    NewMessage,
    Outcome,
    Outcomes,
    PutMessages,
    ReceiveMessages,
    RejectMessages,
)
from holdfast.wire.requests import Request


class EnqueueBody(MessageForm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message to put into a queue, or up to 256 of them as `messages`, as one commit."""

    queue: str
    namespace: str | None = None
    universe: str | None = None
    messages: list[MessageForm] | None = None
    tier: Tier = Tier.CRITICAL


class EnqueueMeta(MessageForm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `meta` part of a multipart enqueue; the payload is the part behind it."""

    queue: str
    namespace: str | None = None
    universe: str | None = None
    tier: Tier = Tier.CRITICAL


class EnqueueParts(msgspec.Struct, frozen=True):
    """A multipart enqueue: two parts, in this order. A message without the second has no payload."""

    meta: EnqueueMeta
    payload: bytes = b""


class ReceiptsView(msgspec.Struct, frozen=True):
    """The acknowledgements of a batch, in the order of its messages."""

    messages: list[ReceiptView]


async def _enqueue(visit: Visit) -> Response:
    media = media_type_of(visit.http.headers)
    if media.startswith("multipart/"):
        return await _from_parts(visit)
    if not media:
        raise wrong_media("nothing", "application/json or multipart/form-data")
    body: EnqueueBody = json_codec.checked(await visit.json(), EnqueueBody)
    universe = universe_of(visit, body)
    visit.guard.allow(PutMessages(body.queue, [], universe))  # Before anything is stored.
    if body.messages is None:
        form = _form_of(body)
        return await _put(visit, body, universe, [await _stored(visit, universe, form)], [form], one=True)
    if body != EnqueueBody(
        queue=body.queue, namespace=body.namespace, universe=body.universe, messages=body.messages, tier=body.tier
    ):
        raise Refusal(400, "invalid_body", "A batch has its payloads and options inside `messages`; move them there")
    messages = [await _stored(visit, universe, form) for form in body.messages]
    return await _put(visit, body, universe, messages, body.messages, one=False)


async def _from_parts(visit: Visit) -> Response:
    async with aclosing(visit.stream()) as stream:
        parts = Parts(visit.http.headers["content-type"], stream)
        part = await parts.next()
        if part is None or part[0] != "meta":
            raise Refusal(400, "invalid_body", "The first part of an enqueue is named meta; put it before the payload")
        meta: EnqueueMeta = json_codec.checked(parsed(await parts.whole(META_BYTES_MAX)), EnqueueMeta)
        form, universe = _form_of(meta), universe_of(visit, meta)
        message = new_message(form)
        visit.guard.allow(PutMessages(meta.queue, [], universe))
        message = await _with_payload(visit, universe, message, form.payload_content_type, parts) or message
    return await _put(visit, meta, universe, [message], [form], one=True)


async def _with_payload(
    visit: Visit, universe: str, message: NewMessage, kind: str | None, parts: Parts
) -> NewMessage | None:
    """The message with the payload of the next part; None if there is no next part."""
    part = await parts.next()
    if part is None:
        return None
    name, headers = part
    if name != "payload":
        raise Refusal(400, "invalid_body", f"The second part of an enqueue is named payload, not {name[:80]!r}")
    if message.payload or message.blob is not None:
        raise Refusal(400, "invalid_body", "The payload is in the meta and in a part of its own; give it once")
    kind = checked_content_type(kind or headers.get("content-type") or "application/octet-stream")
    async with aclosing(parts.pieces()) as pieces:
        first = bytearray()
        async for piece in pieces:
            first += piece
            if len(first) > PAYLOAD_INLINE_BYTES_MAX:
                break
        if len(first) <= PAYLOAD_INLINE_BYTES_MAX:
            await _check_end(parts)
            return msgspec.structs.replace(message, payload=bytes(first), content_type=kind)
        async with aclosing(_all(bytes(first), pieces, parts)) as chunks:
            stored = await visit.hall.transport.send(WriteBlob(universe), chunks)
    return msgspec.structs.replace(message, blob=stored.hash, blob_size=stored.size, content_type=kind)


async def _all(first: bytes, rest: AsyncIterator[bytes], parts: Parts) -> AsyncGenerator[bytes, None]:
    """The payload. It ends when the body does: of one that is cut off, or too long, nothing is stored."""
    yield first
    async for piece in rest:
        yield piece
    await _check_end(parts)


async def _check_end(parts: Parts) -> None:
    if await parts.next() is not None:
        raise Refusal(400, "invalid_body", "An enqueue has two parts, meta and payload; leave out the others")


async def _stored(visit: Visit, universe: str, form: MessageForm) -> NewMessage:
    """The message, its payload in a blob if it does not fit."""
    message = new_message(form, inline=False)
    if message.blob is not None:
        size = (await visit.ask(FindBlob(message.blob, universe))).size
        if size is None:
            raise BlobNotFound(f"No blob {message.blob} is stored in {universe}; put it first")
        return msgspec.structs.replace(message, blob_size=size)
    if len(message.payload) > PAYLOAD_INLINE_BYTES_MAX:
        stored = await visit.hall.transport.call(PutBlob(message.payload, universe))
        return msgspec.structs.replace(message, payload=b"", blob=stored.hash, blob_size=stored.size)
    return message


async def _put(
    visit: Visit, body: Any, universe: str, messages: list[NewMessage], forms: list[MessageForm], *, one: bool
) -> Response:
    sent = PutMessages(body.queue, messages, universe, tier=body.tier)
    # What led to a message is what led to the request that puts it, unless it says otherwise.
    messages = [
        msgspec.structs.replace(message, correlation_id=form.correlation_id or visit.correlation_id)
        for message, form in zip(messages, forms, strict=True)
    ]
    request = msgspec.structs.replace(sent, messages=messages)
    answer = await visit.ask(request, allowed=True, like=sent)
    receipts = [
        ReceiptView(
            namespace=universe,
            queue=body.queue.lower(),
            message_id=receipt.id,
            payload_bytes=message.blob_size if message.blob is not None else len(message.payload),
            correlation_id=receipt.correlation_id,
            duplicate=receipt.duplicate,
            durability=receipt.durability,
        )
        for receipt, message in zip(answer.receipts, messages, strict=True)
    ]
    if one:
        return rendered(receipts[0], headers={"X-Correlation-Id": receipts[0].correlation_id})
    return rendered(ReceiptsView(receipts))


def universe_of(visit: Visit, body: Any) -> str:
    """The universe that a body names, as `universe` or as the original's `namespace`."""
    if body.namespace is not None and body.universe is not None and body.namespace != body.universe:
        raise Refusal(400, "invalid_body", "namespace and universe are the same thing and differ; give one of them")
    named = body.namespace if body.universe is None else body.universe
    return (visit.universe if named is None else named).lower()


def _form_of(body: Any) -> MessageForm:
    return MessageForm(**{name: getattr(body, name) for name in MessageForm.__struct_fields__})


ENQUEUE: Final = Endpoint(
    method="POST",
    path="/v1/queue/enqueue",
    noun="messages",
    summary="Put a message, or a batch of them",
    handle=_enqueue,
    takes={JSON: EnqueueBody, "multipart/form-data": EnqueueParts},
    answers={JSON: (ReceiptView, ReceiptsView)},
    keyed=True,
)


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
        visit.hall.spawn(visit.hall.transport.call(nack))


def _dequeue(with_state: bool) -> Any:
    async def handle(visit: Visit) -> Response:
        body: DequeueBody = json_codec.checked(await visit.json(), DequeueBody)
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
        meta = json_codec.encoded(message_view(delivery, request, payload=False))
        yield writer.head("meta", JSON, len(meta)) + meta
        yield writer.head("payload", safe_content_type(delivery.content_type), delivery.size)
        if delivery.payload is not None or delivery.blob is None:
            yield delivery.payload or b""
        else:
            async for piece in await visit.hall.transport.receive(OpenBlob(delivery.blob, request.universe)):
                yield piece
    yield writer.end()


class SettleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease of one message, or those of up to 256 as `messages`."""

    queue: str
    message_id: str | None = None
    lease_id: str | None = None
    fencing_token: int | None = None
    meta_etag: str | None = None
    messages: list[LeaseForm] | None = None
    namespace: str | None = None
    universe: str | None = None
    tier: Tier = Tier.CRITICAL


class NackBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`intent` is failure, which counts against max_attempts and has a `last_error`, or defer, which does not."""

    delay_seconds: float = 0.0
    intent: str = "failure"
    last_error: str | None = None


class RejectBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why a message goes to the dead letters at once."""

    last_error: str | None = None


class ExtendBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long leases shall last from now."""

    extend_by_seconds: float


class Settled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one message: nothing wrong, or an error's code and what it says."""

    message_id: str
    settled: bool
    correlation_id: str | None = None
    meta_etag: str | None = None
    lease_expires_at_unix: float | None = None
    code: str | None = None
    detail: str | None = None


class SettledAll(msgspec.Struct, frozen=True):
    """What became of each message of a batch, in order."""

    messages: list[Settled]


def _leases(body: SettleBody) -> list[MessageLease]:
    if body.messages is not None:
        if body.message_id is not None or body.lease_id is not None:
            raise Refusal(400, "invalid_body", "Give message_id and lease_id, or messages, not both")
        forms = body.messages
    else:
        if not body.message_id or not body.lease_id:
            raise Refusal(400, "missing_fields", "message_id and lease_id say which message is meant; give both")
        forms = [
            LeaseForm(
                message_id=body.message_id,
                lease_id=body.lease_id,
                fencing_token=body.fencing_token,
                meta_etag=body.meta_etag,
            )
        ]
    for form in forms:
        if form.meta_etag is not None and form.meta_etag != form.lease_id:
            raise Refusal(
                409, "cas_mismatch", f"Message {form.message_id} was delivered again since its meta_etag was read; stop"
            )
    return [lease_of(form) for form in forms]


def _ack(body: SettleBody, universe: str) -> Request[Outcomes]:
    return AckMessages(body.queue, _leases(body), universe, tier=body.tier)


def _nack(body: NackBody, universe: str) -> Request[Outcomes]:
    if body.intent not in ("failure", "defer"):
        raise Refusal(400, "invalid_nack_intent", f"intent is {body.intent[:80]!r}; a nack is a failure or a defer")
    if body.intent == "defer" and body.last_error is not None:
        raise Refusal(400, "invalid_nack_intent", "Only a failure has a last_error; leave it out, or say failure")
    return NackMessages(
        body.queue, _leases(body), body.delay_seconds, body.intent, body.last_error, universe, tier=body.tier
    )


def _reject(body: RejectBody, universe: str) -> Request[Outcomes]:
    return RejectMessages(body.queue, _leases(body), body.last_error, universe, tier=body.tier)


def _extend(body: ExtendBody, universe: str) -> Request[Outcomes]:
    return ExtendMessages(body.queue, _leases(body), body.extend_by_seconds, universe, tier=body.tier)


def _settling(kind: type[SettleBody], make: Any) -> Any:
    async def handle(visit: Visit) -> Response:
        body = json_codec.checked(await visit.json(), kind)
        if not body.queue:
            raise Refusal(400, "missing_queue", "queue is empty; name one")
        request = make(body, universe_of(visit, body))
        outcomes = (await visit.ask(request)).outcomes
        settled = [_settled(lease, outcome) for lease, outcome in zip(request.leases, outcomes, strict=True)]
        if body.messages is not None:
            return rendered(SettledAll(settled))
        if settled[0].code is not None:
            raise _error(outcomes[0])
        headers = {"X-Correlation-Id": settled[0].correlation_id} if settled[0].correlation_id else None
        return rendered(settled[0], headers=headers)

    return handle


def _settled(lease: MessageLease, outcome: Outcome) -> Settled:
    return Settled(
        message_id=lease.id,
        settled=outcome.code is None,
        correlation_id=outcome.correlation_id,
        meta_etag=lease.lease_id if outcome.expires_ms else None,
        lease_expires_at_unix=outcome.expires_ms / 1_000 if outcome.expires_ms else None,
        code=outcome.code,
        detail=outcome.detail,
    )


def _error(outcome: Outcome) -> HoldfastError:
    return rebuild(outcome.code or "", outcome.detail or "")


def _dequeue_endpoint(path: str, summary: str, *, with_state: bool) -> Endpoint:
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


def _settle_endpoint(path: str, summary: str, kind: type[SettleBody], make: Any) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        noun="messages",
        summary=summary,
        handle=_settling(kind, make),
        takes={JSON: kind},
        answers={JSON: (Settled, SettledAll)},
        keyed=True,
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    ENQUEUE,
    _dequeue_endpoint("/v1/queue/dequeue", "Lease messages, waiting for the first", with_state=False),
    _dequeue_endpoint("/v1/queue/dequeueWithState", "Lease messages with their workflow state", with_state=True),
)
SETTLE_ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _settle_endpoint("/v1/queue/ack", "A message is done; doing this twice is fine", SettleBody, _ack),
    _settle_endpoint("/v1/queue/nack", "Give a message back", NackBody, _nack),
    _settle_endpoint("/v1/queue/reject", "Send a message to the dead letters at once", RejectBody, _reject),
    _settle_endpoint("/v1/queue/extend", "Let the lease of a message last longer", ExtendBody, _extend),
)
