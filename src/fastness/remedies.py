"""The cause and the remedy of every error code: what `fastness explain`, the server's pages and the reference show.

An error class has its own, in `fastness.errors`; the codes that only the HTTP API or the command line has are here.
Texts are plain sentences with `code` in backticks; `see` names pages of docs/, without their folder.
"""

from typing import Final, NamedTuple

from fastness.errors import CLASSES, FastnessError


class Remedy(NamedTuple):
    """Why an error without a class happens, what to do about it, where to read more, and the status of its answer."""

    cause: str
    remedy: str
    see: tuple[str, ...] = ()
    status: int | None = None  # None for codes of the command line.


OTHER_CODES: Final[dict[str, Remedy]] = {
    # HTTP: requests that are refused before an operation starts.
    "bad_request": Remedy(
        "The request is not valid HTTP for this endpoint; the detail says why.",
        "Change the request. `/docs` has the form of each one.",
        ("protocol.md",),
        400,
    ),
    "malformed_request": Remedy(
        "The bytes on the connection are no HTTP request: for example TLS was sent to a port without it.",
        "Use `http://` for a server without a certificate and `https://` for one with it.",
        ("how-to/secure-a-server.md",),
        400,
    ),
    "request_timeout": Remedy(
        "The headers of the request did not arrive within `header_seconds`.",
        "Send the request at once after connecting. Raise the setting for slow networks.",
        ("reference/settings.md",),
        408,
    ),
    "request_head_too_large": Remedy(
        "The URL and the headers are longer than `header_bytes_max`.",
        "Send long values in the body. Remove cookies and headers that a proxy adds.",
        ("reference/settings.md",),
        431,
    ),
    "too_many_pipelined": Remedy(
        "The client sent further requests on a connection without reading the answers of the former ones.",
        "Read each answer before the next request, or use several connections or the stream.",
        ("protocol.md",),
        429,
    ),
    "too_many_connections": Remedy(
        "As many connections are open as `connections_max` allows, or as the limit of open files permits.",
        "Reuse connections. Raise `connections_max` and the service's limit of open files, or add a server.",
        ("how-to/size-a-server.md",),
        503,
    ),
    "body_timeout": Remedy(
        "The body of the request did not arrive in time.",
        "Send it faster, or in smaller parts. A proxy may be buffering or throttling it.",
        ("protocol.md",),
        408,
    ),
    "body_too_large": Remedy(
        "The body is larger than `body_bytes_max`, or than `stream_bytes_max` for blobs.",
        "Send smaller batches. Store large payloads at `/v1/blobs` and send their hashes.",
        ("reference/settings.md",),
        413,
    ),
    "invalid_content_type": Remedy(
        "The endpoint does not accept the body's Content-Type, or the request has none.",
        "Send one of the types that the detail names, usually `application/json`.",
        ("protocol.md",),
        415,
    ),
    "not_acceptable": Remedy(
        "The endpoint has no answer of a type that the `Accept` header allows.",
        "Accept `application/json`, or one of the types that the detail names.",
        ("protocol.md",),
        406,
    ),
    "method_not_allowed": Remedy(
        "The path exists, but not with this method.",
        "Use a method of the answer's `Allow` header.",
        ("protocol.md",),
        405,
    ),
    "invalid_body": Remedy(
        "The body is not valid JSON, or does not fit its schema: a field is unknown or has the wrong type.",
        "Change what the detail names. Unknown fields are refused, so that a misspelt one is not ignored.",
        ("reference/endpoints.md",),
        400,
    ),
    "invalid_query": Remedy(
        "A query parameter is unknown, given twice, or has a wrong value.",
        "Use the parameters that the detail lists.",
        ("reference/endpoints.md",),
        400,
    ),
    "missing_fields": Remedy(
        "A required field is missing in the body.",
        "Send the field that the detail names.",
        ("reference/endpoints.md",),
        400,
    ),
    "missing_owner": Remedy(
        "A request that leases something has no `owner`.",
        "Send the name of the consumer, such as its host and process id. It is shown to operators.",
        ("reference/endpoints.md",),
        400,
    ),
    "missing_queue": Remedy(
        "The request names no queue.",
        "Send `queue` in the body, or use the path with the queue's name.",
        ("reference/endpoints.md",),
        400,
    ),
    "invalid_etag": Remedy(
        "`If-Match` or `If-None-Match` is not one strong ETag, or differs from the version in the body.",
        "Send the ETag of the last answer, with its quotes, or `*`.",
        ("protocol.md",),
        400,
    ),
    "precondition_required": Remedy(
        "The write replaces something that may have changed since it was read, so it must name the version.",
        "Read it, and send its ETag in `If-Match`, or `If-None-Match: *` to create it.",
        ("protocol.md",),
        428,
    ),
    "range_not_satisfiable": Remedy(
        "The `Range` header starts behind the end of the blob.",
        "Read the size from `Content-Range` of the answer, and ask for a range inside of it.",
        ("protocol.md",),
        416,
    ),
    "invalid_idempotency_key": Remedy(
        "The `Idempotency-Key` header is empty or longer than 255 characters.",
        "Use 1 to 255 characters, such as a UUID.",
        ("explanation/idempotency.md",),
        400,
    ),
    "invalid_nack_intent": Remedy(
        "A nack has an `intent` other than `failure` or `defer`, or fields that its intent does not have.",
        "Use `failure` to count the attempt, `defer` to return the message uncounted.",
        ("how-to/retries-and-dead-letters.md",),
        400,
    ),
    "foreign_origin": Remedy(
        "A web page of another site called the server, or a proxy changed the `Host` header.",
        "Call the API from a program or from pages of the same origin. Let the proxy pass on `Host` unchanged.",
        ("how-to/secure-a-server.md", "console.md"),
        403,
    ),
    "console_busy": Remedy(
        "As many pages of the console are live as a server serves: 64, and 16 with one token.",
        "Close pages that are not needed. The page tries again by itself.",
        ("console.md",),
        503,
    ),
    "mcp_busy": Remedy(
        "The token has as many MCP sessions as one may have.",
        "End sessions with `DELETE /mcp`, or use a token for each agent.",
        ("how-to/mcp.md",),
        503,
    ),
    "pass_expired": Remedy(
        "The link to a report is valid for five minutes, or until the token that opened it is revoked.",
        "Open the report from the console again.",
        ("console.md",),
        403,
    ),
    "http_error": Remedy(
        "The HTTP layer refused the request with a status that has no code of its own.",
        "The status and the detail say why.",
        ("protocol.md",),
        500,
    ),
    "internal_error": Remedy(
        "An unexpected error in the server: a bug in Fastness.",
        "The server's log has the traceback under the correlation id of the answer. Report it with both. The call may "
        "or may not have happened: read before you repeat it.",
        status=500,
    ),
    # The command line.
    "usage": Remedy(
        "The command line has an unknown option, a missing argument or a value that is not allowed.",
        "Read the help of the command that the message names. An unknown name gets the nearest known one as a "
        "suggestion.",
        ("how-to/command-line.md",),
    ),
    "interrupted": Remedy(
        "The command was interrupted, for example with Ctrl+C, before it ended.",
        "Run it again if needed. A write that was in progress may have happened.",
    ),
}
REMEDIES: Final[dict[str, type[FastnessError] | Remedy]] = {**CLASSES, **OTHER_CODES}
