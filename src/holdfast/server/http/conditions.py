"""Conditions: ETags in headers (RFC 9110), and what they say."""

import re
from typing import Final

from starlette.datastructures import Headers

from holdfast.server.http.endpoints import Parameter
from holdfast.server.http.problems import Refusal

_ETAG: Final = re.compile(r'"([!#-~]*)"\Z')

IF_MATCH: Final = Parameter("If-Match", "header", about="Only if this is still the version that is there.")
IF_NONE_MATCH: Final = Parameter(
    "If-None-Match", "header", about="On reads: 304 if it is this version. On writes, *: only if there is none."
)


def quoted(etag: str | int) -> str:
    """An ETag as headers have it."""
    return f'"{etag}"'


def if_match(asked: Headers) -> str | None:
    """The version that `If-Match` names ("*": any), if it is there.

    Raises:
        Refusal: it names several, or in another form than ETags have.
    """
    text = asked.get("if-match")
    if text is None or text.strip() == "*":
        return text and "*"
    match = _ETAG.match(text.strip())
    if match is None:
        raise Refusal(400, "invalid_etag", f'If-Match is {text[:80]!r}; give one strong ETag as in "abc", or *')
    return match[1]


def if_absent(asked: Headers) -> bool:
    """Whether a write is wanted only where nothing is.

    Raises:
        Refusal: `If-None-Match` names versions, which a write cannot use.
    """
    text = asked.get("if-none-match")
    if text is None:
        return False
    if text.strip() != "*":
        raise Refusal(400, "invalid_etag", "On a write If-None-Match is *, for: only if there is none")
    return True


def is_known(asked: Headers, etag: str | int) -> bool:
    """Whether a reader has this version already."""
    text = asked.get("if-none-match")
    if text is None:
        return False
    known = [each.strip().removeprefix("W/") for each in text.split(",")]
    return "*" in known or quoted(etag) in known


def version_of(etag: str | None) -> int | None:
    """The version of an entity that an ETag names.

    Raises:
        Refusal: it names none.
    """
    if etag is None:
        return None
    if not etag.isdecimal() or len(etag) > 18:
        raise Refusal(400, "invalid_etag", f'If-Match is {etag[:80]!r}; an entity has its version as ETag, as in "3"')
    return int(etag)
