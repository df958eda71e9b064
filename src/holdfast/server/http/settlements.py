"""Settling messages over HTTP: ack, nack, reject and extend, of one message or of a batch."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from holdfast.errors import HoldfastError
from holdfast.errors.codes import rebuild
from holdfast.server.http import dialect
from holdfast.server.http.endpoints import Endpoint, rendered
from holdfast.server.http.enqueues import universe_of
from holdfast.server.http.forms import LeaseForm, lease_of
from holdfast.server.http.refusals import JSON, Refusal
from holdfast.server.http.visits import Visit
from holdfast.tiers import Tier
from holdfast.wire.queues import (
    AckMessages,
    ExtendMessages,
    MessageLease,
    NackMessages,
    Outcome,
    Outcomes,
    RejectMessages,
)
from holdfast.wire.requests import Request


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
        body = dialect.checked(await visit.json(), kind)
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


def _row(path: str, summary: str, kind: type[SettleBody], make: Any) -> Endpoint:
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
    _row("/v1/queue/ack", "A message is done; doing this twice is fine", SettleBody, _ack),
    _row("/v1/queue/nack", "Give a message back", NackBody, _nack),
    _row("/v1/queue/reject", "Send a message to the dead letters at once", RejectBody, _reject),
    _row("/v1/queue/extend", "Let the lease of a message last longer", ExtendBody, _extend),
)
