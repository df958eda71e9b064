"""Calls to the plane for one caller of the SQS API."""

from typing import Any

from fastness.layers.idempotency import KeyedCall
from fastness.server.audit import call_audited
from fastness.server.sqs.caller import SqsCaller
from fastness.server.transport import ServerTransport
from fastness.wire.requests import Answer, Request


def authorize(caller: SqsCaller, request: Request[Any]) -> None:
    """Return if the caller may send this request. Do this before anything is read: a refusal reveals nothing.

    Raises:
        NotAllowed: the caller may not send it.
    """
    caller.authorizer.authorize(request)


async def execute(
    transport: ServerTransport, caller: SqsCaller, request: Request[Answer], call: KeyedCall | None = None
) -> Answer:
    """The answer to a request that the caller is authorized to send; recorded if it is audited."""
    request.check()
    checked = caller.authorizer.attributed(request)
    return await call_audited(transport, caller.authorizer, checked, lambda: transport.call(checked, call))
