"""HTTP errors, and how every error becomes a problem response (RFC 9457)."""

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastness.errors import Closed, FastnessError, NotAllowed, RetryAdvice
from fastness.wire.problems import RETRY_AFTER_SECONDS, Problem, problem_of

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


class HttpError(Exception):
    """The HTTP API rejects a request before it reaches the plane."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry: RetryAdvice = RetryAdvice.NEVER,
        headers: Mapping[str, str] | None = None,
        current_version: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.retry = retry
        self.headers = dict(headers or {})
        self.current_version = current_version


class Unauthenticated(Exception):
    """The request's token is unknown, expired or revoked."""

    def __init__(self, reason: NotAllowed) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.challenge = 'Bearer realm="fastness"'  # The header `WWW-Authenticate` of the response.


def draining_error() -> HttpError:
    """The error for requests that arrive while the server shuts down."""
    return HttpError(
        503, "shutdown_draining", "The server is shutting down; retry in a few seconds", retry=RetryAdvice.LATER
    )


def problem_for(error: Exception, correlation_id: str, *, conditional: bool = False) -> tuple[Problem, dict[str, str]]:
    """The problem for an error, and its response headers.

    `conditional`: the request had an `If-Match` or `If-None-Match` header, so a version conflict is a 412 (RFC 9110).
    """
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        problem = Problem(
            code=error.code,
            title=error.code.replace("_", " ").capitalize(),
            status=error.status,
            detail=str(error),
            retry=error.retry,
            type=f"urn:fastness:error:{error.code}",
            retry_after_seconds=RETRY_AFTER_SECONDS if error.retry is RetryAdvice.LATER else None,
            correlation_id=correlation_id,
            current_version=error.current_version,
        )
        headers.update(error.headers)
    elif isinstance(error, Unauthenticated):
        problem = msgspec.structs.replace(problem_of(error.reason, correlation_id), status=UNAUTHORIZED)
        headers["WWW-Authenticate"] = error.challenge
    elif isinstance(error, Closed):
        return problem_for(draining_error(), correlation_id)
    elif isinstance(error, FastnessError):
        problem = problem_of(error, correlation_id)
        if conditional and error.code in _PRECONDITIONS:
            problem = msgspec.structs.replace(problem, status=PRECONDITION_FAILED)
        if isinstance(error, NotAllowed):
            headers["WWW-Authenticate"] = 'Bearer realm="fastness", error="insufficient_scope"'
    elif isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "http_error")
        return problem_for(HttpError(error.status_code, code, _detail_of(error), headers=error.headers), correlation_id)
    else:
        problem = Problem(
            code="internal_error",
            title="Internal error",
            status=500,
            detail=f"Unexpected error; the server's log has the details under correlation id {correlation_id}",
            type="urn:fastness:error:internal_error",
            correlation_id=correlation_id,
        )
    if problem.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(problem.retry_after_seconds))
    return problem, headers


def problem_response(problem: Problem, headers: Mapping[str, str], request_headers: Headers) -> Response:
    """The response that carries a problem: MessagePack if the caller accepts or sends it, otherwise JSON."""
    if MSGPACK in request_headers.get("accept", "") or request_headers.get("content-type", "").startswith(MSGPACK):
        content, media = msgspec.msgpack.encode(problem), MSGPACK
    else:
        # `retry` is written even if it has its default, which a JSON reader cannot know.
        content, media = msgspec.json.encode({"retry": problem.retry, **msgspec.to_builtins(problem)}), PROBLEM
    return Response(
        content, problem.status, {"Cache-Control": "no-store", "Link": help_link(problem.code), **headers}, media
    )


def help_link(code: str) -> str:
    """The `Link` header of a problem: the page with the cause and the remedy of its code."""
    return f'</docs/errors/{code}>; rel="help"'


def _detail_of(error: HTTPException) -> str:
    if error.status_code == 404:
        return "No endpoint has this path; /docs lists all endpoints"
    if error.status_code == 405:
        return f"This path does not support this method; use {(error.headers or {}).get('Allow', 'another one')}"
    return str(error.detail)
