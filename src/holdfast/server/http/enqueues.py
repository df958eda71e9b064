"""Putting messages over HTTP: JSON, or multipart with a payload of any size that is never held in memory."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.errors import BlobNotFound
from holdfast.limits import PAYLOAD_INLINE_BYTES_MAX
from holdfast.server.http import dialect
from holdfast.server.http.endpoints import Endpoint, rendered
from holdfast.server.http.forms import MessageForm, ReceiptView, checked_content_type, new_message
from holdfast.server.http.limits import META_BYTES_MAX
from holdfast.server.http.media import media_type_of
from holdfast.server.http.multiparts import Parts
from holdfast.server.http.refusals import JSON, Refusal
from holdfast.server.http.visits import Visit, parsed, wrong_media
from holdfast.tiers import Tier
from holdfast.wire.blobs import FindBlob, PutBlob, WriteBlob
from holdfast.wire.queues import NewMessage, PutMessages


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
    body: EnqueueBody = dialect.checked(await visit.json(), EnqueueBody)
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
        meta: EnqueueMeta = dialect.checked(parsed(await parts.whole(META_BYTES_MAX)), EnqueueMeta)
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
            stored = await visit.hall.port.send(WriteBlob(universe), chunks)
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
        stored = await visit.hall.port.call(PutBlob(message.payload, universe))
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
