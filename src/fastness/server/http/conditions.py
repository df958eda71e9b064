"""Conditional requests: ETags in `If-Match` and `If-None-Match` (RFC 9110)."""

import re
from typing import Final

from starlette.datastructures import Headers

from fastness.server.http.endpoints import Parameter
from fastness.server.problems import HttpError

_ETAG: Final = re.compile(r'"([!#-~]*)"\Z')

IF_MATCH: Final = Parameter("If-Match", "header", description="Write only if the current version has this ETag.")
IF_NONE_MATCH: Final = Parameter(
    "If-None-Match",
    "header",
    description="On reads: 304 if the current version has this ETag. On writes: *, to write only if nothing exists.",
)


def quoted(etag: str | int) -> str:
    """An ETag in quotes, as headers contain it."""
    return f'"{etag}"'


def if_match(headers: Headers) -> str | None:
    """The ETag of `If-Match` ("*" for any version), or None if the header is absent.

    Raises:
        HttpError: the header has several ETags, or a malformed one.
    """
    text = headers.get("if-match")
    if text is None or text.strip() == "*":
        return text and "*"
    match = _ETAG.match(text.strip())
    if match is None:
        raise HttpError(400, "invalid_etag", f'If-Match is {text[:80]!r}; give one strong ETag as in "abc", or *')
    return match[1]


def if_absent(headers: Headers) -> bool:
    """Whether the write must fail if something exists already (`If-None-Match: *`).

    Raises:
        HttpError: `If-None-Match` has ETags, which writes do not support.
    """
    text = headers.get("if-none-match")
    if text is None:
        return False
    if text.strip() != "*":
        raise HttpError(400, "invalid_etag", "On writes, If-None-Match supports only *: write only if nothing exists")
    return True


def is_not_modified(headers: Headers, etag: str | int) -> bool:
    """Whether the caller already has this version, so that the answer is 304."""
    text = headers.get("if-none-match")
    if text is None:
        return False
    known = [each.strip().removeprefix("W/") for each in text.split(",")]
    return "*" in known or quoted(etag) in known


def version_of(etag: str | None) -> int | None:
    """The entity version that an ETag contains.

    Raises:
        HttpError: the ETag is not a version number.
    """
    if etag is None:
        return None
    if not etag.isdecimal() or len(etag) > 18:
        raise HttpError(
            400, "invalid_etag", f'If-Match is {etag[:80]!r}; the ETag of an entity is its version, as in "3"'
        )
    return int(etag)
