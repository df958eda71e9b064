"""Refusals: what the door itself has to say against a request, and how every problem is answered."""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from holdfast.errors import Closed, HoldfastError, NotAllowed, Retry
from holdfast.wire.problems import RETRY_AFTER_SECONDS, Problem, problem_of

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
PROBLEM: Final = "application/problem+json"
UNAUTHORIZED: Final = 401
PRECONDITION_FAILED: Final = 412
TOO_LARGE: Final = 413

_CODES: Final = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "body_too_large",
    415: "invalid_content_type",
}
_PRECONDITIONS: Final = ("cas_mismatch", "version_conflict")


class Refusal(Exception):
    """The door refuses a request; the plane has not heard of it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry: Retry = Retry.NEVER,
        headers: Mapping[str, str] | None = None,
        **known: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.retry = retry
        self.headers = dict(headers or {})
        self.known = known


class Unauthenticated(Exception):
    """Nobody is known by the token that came with a request."""

    def __init__(self, reason: NotAllowed) -> None:
        super().__init__(str(reason))
        self.reason = reason


def draining() -> Refusal:
    """The server is about to stop."""
    return Refusal(
        503, "shutdown_draining", "The server is shutting down; send this again in a moment", retry=Retry.LATER
    )


def problem_for(error: Exception, correlation_id: str, *, conditional: bool = False) -> tuple[Problem, dict[str, str]]:
    """A problem and the headers that go with it. `conditional`: the request named a version in a header (RFC 9110)."""
    headers: dict[str, str] = {}
    if isinstance(error, Refusal):
        problem = Problem(
            code=error.code,
            title=error.code.replace("_", " ").capitalize(),
            status=error.status,
            detail=str(error),
            retry=error.retry,
            type=f"urn:holdfast:error:{error.code}",
            retry_after_seconds=RETRY_AFTER_SECONDS if error.retry is Retry.LATER else None,
            correlation_id=correlation_id,
            **error.known,
        )
        headers.update(error.headers)
    elif isinstance(error, Unauthenticated):
        problem = msgspec.structs.replace(problem_of(error.reason, correlation_id), status=UNAUTHORIZED)
        headers["WWW-Authenticate"] = 'Bearer realm="holdfast"'
    elif isinstance(error, Closed):
        return problem_for(draining(), correlation_id)
    elif isinstance(error, HoldfastError):
        problem = problem_of(error, correlation_id)
        if conditional and error.code in _PRECONDITIONS:
            problem = msgspec.structs.replace(problem, status=PRECONDITION_FAILED)
        if isinstance(error, NotAllowed):
            headers["WWW-Authenticate"] = 'Bearer realm="holdfast", error="insufficient_scope"'
    elif isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "http_error")
        refusal = Refusal(error.status_code, code, _words(error), headers=error.headers)
        return problem_for(refusal, correlation_id)
    else:
        problem = Problem(
            code="internal_error",
            title="Internal error",
            status=500,
            detail=f"Something went wrong that should not; the server's log says what under {correlation_id}",
            type="urn:holdfast:error:internal_error",
            correlation_id=correlation_id,
        )
    if problem.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(problem.retry_after_seconds))
    return problem, headers


def problem_response(problem: Problem, headers: Mapping[str, str], asked: Headers) -> Response:
    """The answer that carries a problem: MessagePack for who speaks it, JSON for everybody else."""
    if MSGPACK in asked.get("accept", "") or asked.get("content-type", "").startswith(MSGPACK):
        content, media = msgspec.msgpack.encode(problem), MSGPACK
    else:
        # Said outright, because a reader of JSON does not know what is meant by its absence.
        content, media = msgspec.json.encode({"retry": problem.retry, **msgspec.to_builtins(problem)}), PROBLEM
    return Response(content, problem.status, {"Cache-Control": "no-store", **headers}, media)


def _words(error: HTTPException) -> str:
    if error.status_code == 404:
        return "There is nothing at this path; /docs lists what there is"
    if error.status_code == 405:
        return f"This path does not take that method; it takes {(error.headers or {}).get('Allow', 'others')}"
    return str(error.detail)
