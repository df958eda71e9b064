"""The requests that end a failed attempt: a nack or a reject, with what the consumer reports about the error."""

import traceback
from collections.abc import Sequence
from typing import NamedTuple

from fastness.limits import LAST_ERROR_BYTES_MAX, TRACEBACK_BYTES_MAX
from fastness.tiers import Tier
from fastness.wire.queues import MessageLease, NackMessages, RejectMessages
from fastness.wire.type_checks import refused

Error = str | BaseException | None  # Of an exception, the type, message and traceback are kept.


def nack_request(
    queue: str,
    leases: Sequence[MessageLease],
    universe: str,
    error: Error,
    *,
    delay_seconds: float | None,
    intent: str = "failure",
    tier: Tier = Tier.CRITICAL,
) -> NackMessages:
    """The request that returns messages to their queue."""
    text, error_type, trace = _fields_of(error)
    return NackMessages(
        queue,
        list(leases),
        delay_seconds,
        intent,
        text,
        universe,
        error_type=error_type,
        traceback=trace,
        tier=tier,
    )


def reject_request(
    queue: str, leases: Sequence[MessageLease], universe: str, error: Error, *, tier: Tier = Tier.CRITICAL
) -> RejectMessages:
    """The request that makes messages dead letters."""
    text, error_type, trace = _fields_of(error)
    return RejectMessages(queue, list(leases), text, universe, error_type=error_type, traceback=trace, tier=tier)


class _ErrorFields(NamedTuple):
    """The error of a request. Surrogates, as in file names, are replaced: they cannot be encoded."""

    error: str | None
    error_type: str | None
    traceback: str | None


def _fields_of(error: Error) -> _ErrorFields:
    if error is None:
        return _ErrorFields(None, None, None)
    if isinstance(error, str):
        return _ErrorFields(_encodable(error[:LAST_ERROR_BYTES_MAX]), None, None)
    if not isinstance(error, BaseException):
        raise refused("error", error, "a text, or an exception")
    described = traceback.TracebackException.from_exception(error)
    return _ErrorFields(
        _encodable(str(described)[:LAST_ERROR_BYTES_MAX]),
        type(error).__name__,
        _encodable("".join(described.format())[-TRACEBACK_BYTES_MAX:]),
    )


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
