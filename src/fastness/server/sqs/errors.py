"""Errors of the SQS API, and how those of Fastness become them.

The message of an error is AWS's own, because programs compare it. What Fastness adds is its hint: a field of its own.
"""

from typing import Final

from fastness.errors import (
    Busy,
    Closed,
    FastnessError,
    NotAllowed,
    NotFound,
    TransactionConflict,
    Unsupported,
    Validation,
)
from fastness.server.sqs.model import ErrorShape
from fastness.server.sqs.shapes import ERRORS

_COMMON_NAMESPACE: Final = "com.amazon.coral.service"
_REASON: Final = "Reason: "
_QUEUE_TYPE: Final = "Modifying queue type is not supported."


class SqsError(Exception):
    """An error response of the SQS API."""

    def __init__(
        self, name: str, message: str, *, hint: str = "", status: int | None = None, query_code: str | None = None
    ) -> None:
        """`name` is that of the error's shape, or its code in the Query protocol: `QueueDoesNotExist`,
        `InvalidParameterValue`. Errors of the service model, and those that all services of AWS have, are known; give
        the code and the status of others, or they are the name and 400.
        """
        super().__init__(message)
        known = _KNOWN.get(name) or ErrorShape(name, name)
        self.shape = ErrorShape(known.name, query_code or known.query_code, status or known.status, known.namespace)
        self.message = message
        self.hint = hint

    @property
    def name(self) -> str:
        """The name of the error's shape."""
        return self.shape.name

    @property
    def code(self) -> str:
        """The `__type` of JSON responses."""
        return f"{self.shape.namespace}#{self.shape.name}"

    @property
    def query_code(self) -> str:
        """The code of XML responses, of entries of a batch, and what most clients show."""
        return self.shape.query_code

    @property
    def status(self) -> int:
        return self.shape.status

    @property
    def sender_fault(self) -> bool:
        """Whether the request is wrong, and not the server."""
        return self.status < 500

    @property
    def is_known(self) -> bool:
        """Whether the name is one of those below, of which there is a bounded number."""
        return self.shape.name in _KNOWN


def sqs_error(error: FastnessError) -> SqsError:
    """The response to an error of Fastness."""
    name = _BY_CODE.get(error.code)
    if name is None:
        name = next((name for kind, name in _BY_CLASS if isinstance(error, kind)), "InternalFailure")
    message, hint = _TEXTS.get(name, str(error)), str(error)
    if name == "InvalidAttributeValue":  # Its reasons are Fastness's own, but for one.
        message, _, hint = message.partition(f" {_REASON}")
        if hint == _QUEUE_TYPE:
            message, hint = str(error), ""
    return SqsError(name, message, hint="" if hint == message else hint)


def missing_parameter(name: str) -> SqsError:
    """The error for a request without a required parameter."""
    return SqsError("MissingParameter", f"The request must contain the parameter {name}.")


def _common(name: str, query_code: str, status: int = 400) -> ErrorShape:
    return ErrorShape(name, query_code, status, _COMMON_NAMESPACE)


# Errors that every service of AWS has. The model of SQS does not list them.
COMMON_ERRORS: Final = (
    _common("AccessDeniedException", "AccessDenied", 403),
    _common("ConflictingQueryParameter", "ConflictingQueryParameter"),
    _common("ExpiredTokenException", "ExpiredToken", 403),
    _common("IncompleteSignatureException", "IncompleteSignature"),
    _common("InternalFailure", "InternalFailure", 500),
    _common("InvalidAction", "InvalidAction"),
    _common("InvalidClientTokenId", "InvalidClientTokenId", 403),
    _common("InvalidHttpRequest", "InvalidHttpRequest"),
    _common("InvalidParameterCombinationException", "InvalidParameterCombination"),
    _common("InvalidParameterValueException", "InvalidParameterValue"),
    _common("InvalidQueryParameter", "InvalidQueryParameter"),
    _common("InvalidSignatureException", "SignatureDoesNotMatch", 403),
    _common("MalformedQueryString", "MalformedQueryString", 404),
    _common("MethodNotAllowed", "MethodNotAllowed", 405),
    _common("MissingAction", "MissingAction"),
    _common("MissingAuthenticationTokenException", "MissingAuthenticationToken", 403),
    _common("MissingRequiredParameterException", "MissingParameter"),
    _common("NoSuchVersion", "NoSuchVersion"),
    _common("OptInRequired", "OptInRequired", 403),
    _common("RequestEntityTooLargeException", "RequestEntityTooLarge", 413),
    _common("RequestExpired", "RequestExpired"),
    _common("RequestTimeout", "RequestTimeout", 408),
    _common("SerializationException", "SerializationException"),
    _common("ServiceUnavailable", "ServiceUnavailable", 503),
    _common("ThrottlingException", "Throttling"),
    _common("UnknownOperationException", "UnknownOperationException", 404),
    _common("UnrecognizedClientException", "UnrecognizedClient", 403),
    _common("ValidationException", "ValidationError"),
)
_KNOWN: Final = {shape.query_code: shape for shape in (*ERRORS.values(), *COMMON_ERRORS)} | {
    shape.name: shape for shape in (*ERRORS.values(), *COMMON_ERRORS)
}

_BY_CODE: Final = {
    "invalid_argument": "InvalidParameterValue",
    "invalid_sqs_attribute": "InvalidAttributeValue",
    "move_task_not_running": "UnsupportedOperation",
    "move_task_running": "InvalidParameterValue",
    "not_found": "ResourceNotFoundException",
    "payload_too_large": "InvalidParameterValue",
    "purge_in_progress": "PurgeQueueInProgress",
    "queue_full": "OverLimit",
    "queue_message_lease_mismatch": "ReceiptHandleIsInvalid",
    "queue_not_found": "QueueDoesNotExist",
    "quota_exceeded": "RequestThrottled",
    "rate_limited": "RequestThrottled",
    "sqs_queue_deleted_recently": "QueueDeletedRecently",
    "sqs_queue_exists": "QueueNameExists",
    "unknown_sqs_attribute": "InvalidAttributeName",
}
_BY_CLASS: Final[tuple[tuple[type[FastnessError], str], ...]] = (
    (Validation, "InvalidParameterValue"),
    (NotAllowed, "AccessDenied"),
    (NotFound, "ResourceNotFoundException"),
    (Busy, "ServiceUnavailable"),  # SDKs repeat the request after a pause.
    (TransactionConflict, "ServiceUnavailable"),
    (Closed, "ServiceUnavailable"),
    (Unsupported, "UnsupportedOperation"),
)

# What AWS says in an error that a call may get for several reasons of Fastness. The reason is the hint.
QUEUE_DOES_NOT_EXIST: Final = "The specified queue does not exist."
INTERNAL_FAILURE: Final = "The request processing has failed because of an unknown error, exception or failure."
UNAVAILABLE: Final = "The request has failed due to a temporary failure of the server."
_TEXTS: Final = {
    "InternalFailure": INTERNAL_FAILURE,
    "QueueDoesNotExist": QUEUE_DOES_NOT_EXIST,
    "RequestThrottled": "The request was denied due to request throttling.",
    "ServiceUnavailable": UNAVAILABLE,
}
