"""Settling messages over HTTP: ack, nack, reject, or change the leases of messages, one or a batch.

One message is answered with its result, or with the problem as the response's status. A batch is answered with a result
for each message, so that one lease that has ended does not hide the others.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from fastness.errors import BlobNotFound, FastnessError, rebuild
from fastness.limits import RESULT_BYTES_MAX
from fastness.server.http import json_codec
from fastness.server.http.endpoints import Endpoint, Handler, json_response
from fastness.server.http.message_schemas import MessageLeaseBody, ResultBody, lease_of, new_result
from fastness.server.http.messages import check_queue, universe_of
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, HttpError
from fastness.tiers import Tier
from fastness.wire.blobs import FindBlob, PutBlob
from fastness.wire.fields import DelaySeconds, VisibilitySeconds
from fastness.wire.queues import (
    AckMessages,
    ChangeVisibility,
    ExtendMessages,
    MessageLease,
    NackMessages,
    NewResult,
    Outcome,
    RejectMessages,
    VisibilityChange,
)


class SettleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease of one message, or those of up to 256 as `messages`."""

    queue: str
    message_id: str | None = None
    lease_id: str | None = None
    fence: int | None = None
    meta_etag: str | None = None
    messages: list[MessageLeaseBody] | None = None
    universe: str | None = None
    tier: Tier = Tier.CRITICAL


# The fields of `ResultBody` are repeated below: a struct has one base.


class AckedMessageBody(MessageLeaseBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease of a message that is done, and its result."""

    result: Any = UNSET
    result_base64: bytes | UnsetType = UNSET
    result_blob: str | None = None
    result_bytes: int = 0
    result_content_type: str | None = None


class AckBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease of one message and its result, or those of up to 256 as `messages`.

    Results are kept for `result_ttl_seconds` of the queue's policy; a large one is stored as a blob.
    """

    messages: list[AckedMessageBody] | None = None  # type: ignore[assignment]  # They also have results.
    result: Any = UNSET
    result_base64: bytes | UnsetType = UNSET
    result_blob: str | None = None
    result_bytes: int = 0
    result_content_type: str | None = None


class RejectBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message to dead-letter at once, and the reason."""

    last_error: str | None = None
    error_type: str | None = None
    traceback: str | None = None


class NackBody(RejectBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`intent`: "failure" counts against max_attempts and may have an error; "defer" does neither.

    Without `delay_seconds`, a failure is delivered again after the back-off of the queue's policy, and a deferred
    message at once.
    """

    delay_seconds: DelaySeconds | None = None
    intent: str = "failure"


class ExtendBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The leases to extend, and their new duration from now on."""

    extend_by_seconds: VisibilitySeconds


class VisibilityOfMessage(MessageLeaseBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease of a message, and how long it lasts from now on."""

    visibility_seconds: float | None = None


class VisibilityBody(SettleBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The leases to change, and how long they last from now on. With 0 a message returns to the queue at once.

    A message of a batch may have a time of its own.
    """

    messages: list[VisibilityOfMessage] | None = None  # type: ignore[assignment]  # They also have times.
    visibility_seconds: float | None = None


class SettleResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result for one message: settled, or an error's code and detail."""

    message_id: str
    settled: bool
    correlation_id: str | None = None
    meta_etag: str | None = None
    lease_expires_at_unix: float | None = None
    code: str | None = None
    detail: str | None = None


class SettleResults(msgspec.Struct, frozen=True):
    """The result for each message of a batch, in order."""

    messages: list[SettleResult]


_SettleRequest = AckMessages | NackMessages | RejectMessages | ExtendMessages | ChangeVisibility


_Body = TypeVar("_Body", bound=SettleBody)


def _settle(kind: type[_Body], make_request: Callable[[_Body, str], _SettleRequest]) -> Handler:
    async def handle(context: RequestContext) -> Response:
        body: _Body = json_codec.convert_named(await context.json(), kind)
        check_queue(body.queue)
        return await _settled(context, body, make_request(body, universe_of(context, body)))

    return handle


async def _ack(context: RequestContext) -> Response:
    body: AckBody = json_codec.convert_named(await context.json(), AckBody)
    check_queue(body.queue)
    universe = universe_of(context, body)
    request = AckMessages(body.queue, _leases_of(body), universe, tier=body.tier)
    context.authorizer.authorize(request)  # Before any blob is stored.
    if body.messages is not None and _result_body(body) != ResultBody():
        raise HttpError(400, "invalid_body", "A batch has its results inside `messages`; move them there")
    acked = [body] if body.messages is None else body.messages
    results = [await _stored_result(context, universe, _result_body(each)) for each in acked]
    if any(result is not None for result in results):
        request = msgspec.structs.replace(request, results=results)
    return await _settled(context, body, request)


def _result_body(body: AckBody | AckedMessageBody) -> ResultBody:
    return ResultBody(**{name: getattr(body, name) for name in ResultBody.__struct_fields__})


async def _stored_result(context: RequestContext, universe: str, body: ResultBody) -> NewResult | None:
    """The result of a body; None if it has none. A result that is too large to inline is stored as a blob."""
    result = new_result(body, inline=False)
    if result is None:
        return None
    if result.blob is not None:
        size = (await context.call(FindBlob(result.blob, universe))).size
        if size is None:
            raise BlobNotFound(f"No blob {result.blob} is stored in {universe}; put it first")
        return msgspec.structs.replace(result, blob_size=size)
    if len(result.value) > RESULT_BYTES_MAX:
        stored = await context.http_context.transport.call(PutBlob(result.value, universe, pinned=False))
        return msgspec.structs.replace(result, value=b"", blob=stored.hash, blob_size=stored.size)
    return result


async def _settled(context: RequestContext, body: SettleBody, request: _SettleRequest) -> Response:
    outcomes = (await context.call(request)).outcomes
    results = [_settle_result(lease, outcome) for lease, outcome in zip(request.leases, outcomes, strict=True)]
    if body.messages is not None:
        return json_response(SettleResults(results))
    if results[0].code is not None:
        raise _error_of(outcomes[0])
    headers = {"X-Correlation-Id": results[0].correlation_id} if results[0].correlation_id else None
    return json_response(results[0], headers=headers)


def _nack_request(body: NackBody, universe: str) -> NackMessages:
    if body.intent not in ("failure", "defer"):
        raise HttpError(400, "invalid_nack_intent", f"intent is {body.intent[:80]!r}; use failure or defer")
    if body.intent == "defer":
        for name in ("last_error", "error_type", "traceback"):
            if getattr(body, name) is not None:
                raise HttpError(
                    400, "invalid_nack_intent", f"{name} needs the intent failure; remove it or change intent"
                )
    return NackMessages(
        body.queue,
        _leases_of(body),
        body.delay_seconds,
        body.intent,
        body.last_error,
        universe,
        error_type=body.error_type,
        traceback=body.traceback,
        tier=body.tier,
    )


def _reject_request(body: RejectBody, universe: str) -> RejectMessages:
    return RejectMessages(
        body.queue,
        _leases_of(body),
        body.last_error,
        universe,
        error_type=body.error_type,
        traceback=body.traceback,
        tier=body.tier,
    )


def _extend_request(body: ExtendBody, universe: str) -> ExtendMessages:
    return ExtendMessages(body.queue, _leases_of(body), body.extend_by_seconds, universe, tier=body.tier)


def _visibility_request(body: VisibilityBody, universe: str) -> ChangeVisibility:
    leases = _leases_of(body)
    own = [None] * len(leases) if body.messages is None else [each.visibility_seconds for each in body.messages]
    changes: list[VisibilityChange] = []
    for lease, seconds in zip(leases, own, strict=True):
        chosen = body.visibility_seconds if seconds is None else seconds
        if chosen is None:
            raise HttpError(400, "missing_fields", f"visibility_seconds of message {lease.id} is missing; send it")
        changes.append(VisibilityChange(lease, chosen))
    return ChangeVisibility(body.queue, changes, universe, tier=body.tier)


def _leases_of(body: SettleBody) -> list[MessageLease]:
    if body.messages is not None:
        if body.message_id is not None or body.lease_id is not None:
            raise HttpError(400, "invalid_body", "Send either message_id and lease_id, or messages, not both")
        leases = body.messages
    else:
        if not body.message_id or not body.lease_id:
            raise HttpError(400, "missing_fields", "message_id and lease_id identify the message; send both")
        leases = [
            MessageLeaseBody(
                message_id=body.message_id,
                lease_id=body.lease_id,
                fence=body.fence,
                meta_etag=body.meta_etag,
            )
        ]
    for lease in leases:
        if lease.meta_etag is not None and lease.meta_etag != lease.lease_id:
            raise HttpError(
                409,
                "cas_mismatch",
                f"Message {lease.message_id} was delivered again after its meta_etag was read; stop working on it",
            )
    return [lease_of(lease) for lease in leases]


def _settle_result(lease: MessageLease, outcome: Outcome) -> SettleResult:
    return SettleResult(
        message_id=lease.id,
        settled=outcome.code is None,
        correlation_id=outcome.correlation_id,
        meta_etag=lease.lease_id if outcome.expires_ms else None,
        lease_expires_at_unix=outcome.expires_ms / 1_000 if outcome.expires_ms else None,
        code=outcome.code,
        detail=outcome.detail,
    )


def _error_of(outcome: Outcome) -> FastnessError:
    return rebuild(outcome.code or "", outcome.detail or "")


def _settle_endpoint(path: str, summary: str, kind: type[SettleBody], handle: Handler) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        tag="messages",
        summary=summary,
        handle=handle,
        accepts={JSON: kind},
        response_types={JSON: (SettleResult, SettleResults)},
        keyed=True,
    )


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _settle_endpoint(
        "/v1/queue/ack",
        "Acknowledge messages as done, with or without results. Repeating this is safe.",
        AckBody,
        _ack,
    ),
    _settle_endpoint(
        "/v1/queue/nack",
        "Release messages for another delivery, as failed or deferred.",
        NackBody,
        _settle(NackBody, _nack_request),
    ),
    _settle_endpoint(
        "/v1/queue/reject", "Dead-letter messages at once.", RejectBody, _settle(RejectBody, _reject_request)
    ),
    _settle_endpoint(
        "/v1/queue/extend", "Extend the leases of messages.", ExtendBody, _settle(ExtendBody, _extend_request)
    ),
    _settle_endpoint(
        "/v1/queue/visibility",
        "Let the leases of messages end sooner or later, or now.",
        VisibilityBody,
        _settle(VisibilityBody, _visibility_request),
    ),
)
