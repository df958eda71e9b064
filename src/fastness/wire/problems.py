"""Problems: errors on the wire (RFC 9457), and back."""

from typing import Any, Final

import msgspec

from fastness.errors import (
    Backend,
    Busy,
    Closed,
    CommitUnknown,
    Conflict,
    Corrupt,
    FastnessError,
    Fenced,
    IdempotencyKeyReused,
    InvalidUrl,
    LeaseConflict,
    NotAllowed,
    NotFound,
    PayloadTooLarge,
    QueueBusy,
    QueueMessageLeaseMismatch,
    RetryAdvice,
    ShutdownDraining,
    TransactionTooLarge,
    TxnMismatch,
    Unsupported,
    Validation,
    ValueTooLarge,
    rebuild,
)

RETRY_AFTER_SECONDS: Final = 1.0
_ATTRIBUTES: Final = (
    "current_etag",
    "expected",
    "actual",
    "owner",
    "expires_ms",
    "now_ms",
    "key",
    "universe",
    "kind",
    "limit",
    "used",
)  # Attributes of errors that are sent along.
# The first class that an error belongs to decides.
_STATUS: Final[tuple[tuple[type[FastnessError], int], ...]] = (
    (PayloadTooLarge, 413),
    (ValueTooLarge, 413),
    (TransactionTooLarge, 413),
    (LeaseConflict, 409),
    (TxnMismatch, 409),
    (QueueMessageLeaseMismatch, 409),
    (NotAllowed, 403),
    (Fenced, 403),
    (IdempotencyKeyReused, 422),
    (InvalidUrl, 400),
    (Validation, 400),
    (NotFound, 404),
    (Conflict, 409),
    (QueueBusy, 503),
    (ShutdownDraining, 503),
    (Busy, 429),
    (Closed, 503),
    (Corrupt, 500),
    (CommitUnknown, 504),
    (Unsupported, 501),
    (Backend, 503),
    (FastnessError, 500),
)


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as a caller receives it. `code` and `retry` are API; `detail` is for people."""

    code: str
    title: str
    status: int
    detail: str
    retry: str = RetryAdvice.NEVER
    type: str = "about:blank"
    retry_after_seconds: float | None = None
    correlation_id: str | None = None
    current_etag: str | None = None
    current_head: int | None = None
    current_version: int | None = None
    extra: dict[str, Any] | None = None


def status_of(error: FastnessError) -> int:
    """The HTTP status of an error."""
    return next(status for family, status in _STATUS if isinstance(error, family))


def retry_after_seconds(error: FastnessError) -> float | None:
    """How long to wait before the request is repeated; None if that would not help."""
    known: float | None = getattr(error, "retry_after_seconds", None)
    return RETRY_AFTER_SECONDS if known is None and error.retry is RetryAdvice.LATER else known


def problem_of(error: FastnessError, correlation_id: str | None = None) -> Problem:
    """The problem that represents an error."""
    known = {name: value for name in _ATTRIBUTES if (value := getattr(error, name, None)) is not None}
    actual = known.get("actual")
    return Problem(
        code=error.code,
        title=(type(error).__doc__ or error.code).split("\n", 1)[0].rstrip("."),
        status=status_of(error),
        detail=str(error),
        retry=error.retry,
        type=f"urn:fastness:error:{error.code}",
        retry_after_seconds=retry_after_seconds(error),
        correlation_id=correlation_id,
        current_etag=known.get("current_etag"),
        current_head=actual if error.code == "head_advanced" else None,
        current_version=actual if error.code == "version_conflict" else None,
        extra=known or None,
    )


def error_of(problem: Problem) -> FastnessError:
    """The error that a problem represents, with its class and attributes."""
    error = rebuild(problem.code, problem.detail)
    for name, value in (problem.extra or {}).items():
        if name in _ATTRIBUTES:
            setattr(error, name, value)
    if isinstance(error, Busy):
        error.retry_after_seconds = problem.retry_after_seconds
    if problem.code == "cas_mismatch" and not hasattr(error, "current_etag"):
        error.current_etag = None  # type: ignore[attr-defined]
    return error
