"""Errors, in the form that a model can act on.

A refusal of Fastness during a tool call is a result with `isError`: the model reads the message and what to do next. In
other requests (resources, prompts, tasks) it is a JSON-RPC error with the same data. An unexpected exception is logged
with a correlation id, and the client gets the id only.
"""

import logging
import uuid
from typing import Any, Final, TypeVar

import mcp_types
import msgspec
from mcp.shared.exceptions import MCPError

from fastness.errors import (
    Closed,
    Corrupt,
    FastnessError,
    InvalidArgument,
    LeaseHeld,
    NotAllowed,
    NotFound,
    RateLimited,
    RetryAdvice,
    Validation,
)

INVALID_ID: Final = msgspec.json.encode(
    {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": mcp_types.INVALID_REQUEST, "message": "The id of a request is a string or a whole number"},
    }
)  # The answer to a request with another id. The SDK takes it for a notification, and a client would wait without end.

AnyError = TypeVar("AnyError", bound=FastnessError)

_log = logging.getLogger(__name__)

_BY_ADVICE: Final = {
    RetryAdvice.NEVER: "The same call will fail again: change it, or do something else.",
    RetryAdvice.REFRESH: "Read the current state first, then decide whether to repeat the call.",
    RetryAdvice.LATER: "The same call may succeed later: wait, then repeat it.",
    RetryAdvice.IDEMPOTENT: "It may have been done: read the state before you repeat the call.",
}
_BY_CODE: Final = {
    "not_allowed": "Do not repeat the call; ask the operator for a token that allows it.",
    "message_not_found": "Check the queue and the id; a finished message is kept only if it was put with keep_result.",
    "queue_message_lease_mismatch": (
        "Your lease of this message has ended. Stop working on it: it was settled, or another consumer has it or will "
        "get it. Call queue_receive for more work."
    ),
    "message_cancelled": "The message was cancelled. Stop working on it, and settle nothing.",
    "lease_held": "Another agent holds the lease. Work on something else, or call again with wait_seconds.",
    "lease_expired": "Your lease has ended. Acquire it again, and read what changed before you write.",
    "fencing_mismatch": "The lease was granted again since. Acquire it, and read what changed before you write.",
    "result_not_ready": "It is not done yet: call again with wait_seconds.",
    "unreachable": "The Fastness server cannot be reached now: wait, then repeat the call.",
}


def has_invalid_id(id: object) -> bool:
    """Whether a message has an id that no request can have. `UNSET`: it has none."""
    return id.__class__ not in (str, int) and id is not msgspec.UNSET


def with_fields(error: AnyError, **fields: Any) -> AnyError:
    """The error with fields that its structured content has besides the code and the message.

    Not a subclass: an error that arrives from a server is rebuilt as the class that has its code.
    """
    error.detail_fields = fields  # type: ignore[attr-defined]
    return error


def invalid_argument(error: msgspec.ValidationError) -> InvalidArgument:
    """The error of a wrong argument, from msgspec's, as in "Expected `int` <= 9 - at `$.priority`"."""
    problem, _, place = str(error).partition(" - at ")
    path = place.strip("`") or "$"
    where = "the arguments" if path == "$" else f"argument {path.removeprefix('$.')}"
    advice = "correct them as the input schema of the tool says"
    return with_fields(InvalidArgument(f"{problem} (in {where}); {advice}"), path=path)


def advice_of(error: FastnessError) -> str:
    """What the caller should do next."""
    found = _BY_CODE.get(error.code)
    if found is None and isinstance(error, Validation):
        return "Correct the arguments, then call again."
    if found is None and isinstance(error, NotFound):
        return "Check the name or id; nothing was changed."
    return found or _BY_ADVICE[error.retry]


def data_of(error: FastnessError) -> dict[str, Any]:
    """The error as structured content."""
    found: dict[str, Any] = {
        "code": error.code,
        "detail": str(error),
        "retry": str(error.retry),
        "advice": advice_of(error),
    }
    # An error that came from a server has its code and message only.
    if isinstance(error, LeaseHeld) and hasattr(error, "expires_ms"):
        found |= {"owner": error.owner, "expires_in_seconds": max(error.expires_ms - error.now_ms, 0) / 1_000}
    if isinstance(error, RateLimited) and getattr(error, "retry_after_seconds", None) is not None:
        found["retry_after_seconds"] = error.retry_after_seconds
    more: dict[str, Any] = getattr(error, "detail_fields", {})
    return found | more


def result_of_error(error: FastnessError) -> mcp_types.CallToolResult:
    """The result of a tool call that Fastness refused."""
    data = data_of(error)
    text = f"{data['code']}: {data['detail'].rstrip('.')}. {data['advice']}"
    content = [mcp_types.TextContent(type="text", text=text)]
    return mcp_types.CallToolResult(content=list(content), structured_content=data, is_error=True)


def protocol_error(error: FastnessError) -> MCPError:
    """The JSON-RPC error of a request, other than a tool call, that Fastness refused."""
    if isinstance(error, Closed | Corrupt) or not isinstance(error, Validation | NotFound | NotAllowed):
        code = mcp_types.INTERNAL_ERROR
    else:
        code = mcp_types.INVALID_PARAMS
    return MCPError(code=code, message=str(error), data=data_of(error))


def unexpected_error(error: Exception, method: str, correlation_id: str) -> MCPError:
    """The JSON-RPC error of an unexpected exception. The log has the exception, the client gets the id."""
    _log.error("Unexpected error in %s (correlation id %s)", method, correlation_id, exc_info=error)
    return MCPError(
        code=mcp_types.INTERNAL_ERROR,
        message=f"Unexpected error; the server's log has it under correlation id {correlation_id}",
        data={"correlation_id": correlation_id},
    )


def new_correlation_id(context: object) -> str:
    """An id of its own for a request whose transport gave it none."""
    del context
    return uuid.uuid4().hex[:16]
