"""AWS Signature Version 4: what a request's signature is computed from.

    canonical request = method, path, query, signed headers, their names, SHA-256 of the body
    string to sign    = algorithm, date, scope, SHA-256 of the canonical request
    signing key       = HMAC of the secret with the day, the region and the service
    signature         = HMAC of the string to sign with the signing key

The signature is in the header `Authorization`, or in the query of a presigned URL. These are functions of the request
alone: they know neither the time nor any secret. What must be signed, and until when, is decided in `authentication`.

Two requests that this server would read differently must not have the same canonical request. So what the rules of AWS
leave open is refused: repeated query parameters, whose order is not signed, and repeated signed headers.
"""

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import msgspec

from fastness.limits import SQS_SIGNED_HEADERS_MAX
from fastness.server.sqs.errors import SqsError

ALGORITHM: Final = "AWS4-HMAC-SHA256"

_TERMINATOR: Final = "aws4_request"
_DATE: Final = "%Y%m%dT%H%M%SZ"
_DATE_TEXT: Final = re.compile("[0-9]{8}T[0-9]{6}Z")
_SIGNATURE: Final = re.compile("[0-9a-f]{64}")
_HEADER_NAME: Final = re.compile("[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_SPACE: Final = " \t"
_SPACES: Final = re.compile("[ \t]+")  # Not all that is white in Unicode: these may be bytes of UTF-8.
_PARTS: Final = ("Credential", "SignedHeaders", "Signature")
# Of presigned URLs.
_QUERY_ALGORITHM: Final = "X-Amz-Algorithm"
_QUERY_CREDENTIAL: Final = "X-Amz-Credential"
_QUERY_DATE: Final = "X-Amz-Date"
_QUERY_EXPIRES: Final = "X-Amz-Expires"
_QUERY_HEADERS: Final = "X-Amz-SignedHeaders"
_QUERY_SIGNATURE: Final = "X-Amz-Signature"

Pairs = list[tuple[bytes, bytes]]  # The parameters of a query, decoded.


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The signature that came with a request, not yet checked."""

    access_key: str
    day: str  # YYYYMMDD
    region: str
    service: str
    timestamp: str  # When it was signed: YYYYMMDDTHHMMSSZ,
    signed_seconds: int  # and the same in seconds since 1970.
    signed_headers: tuple[str, ...]
    value: str  # 64 hex digits.
    expires_seconds: int | None = None  # Of a presigned URL.

    @property
    def scope(self) -> str:
        return f"{self.day}/{self.region}/{self.service}/{_TERMINATOR}"


def read_signature(pairs: Pairs, headers: Mapping[str, str]) -> Signature:
    """The signature of a request with this query and these headers.

    Raises:
        SqsError: MissingAuthenticationToken or IncompleteSignature.
    """
    authorization = headers.get("authorization")
    query = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
    is_presigned = any(name in query for name in (_QUERY_ALGORITHM, _QUERY_SIGNATURE, _QUERY_CREDENTIAL))
    if authorization is not None and is_presigned:
        raise _incomplete("The request has a signature in its header and another one in its query; send one")
    if authorization is not None:
        return _from_header(authorization, headers)
    if is_presigned:
        return _from_query(query)
    raise SqsError(
        "MissingAuthenticationToken",
        "The request is not signed; give the SDK an access key, which `fastness token create NAME --sqs` prints",
    )


def _from_header(authorization: str, headers: Mapping[str, str]) -> Signature:
    algorithm, _, rest = authorization.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise _incomplete(f"The algorithm of the signature is {algorithm[:40]!r}; use {ALGORITHM}")
    parts: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in _PARTS or name in parts:
            raise _incomplete(f"Authorization must have {', '.join(_PARTS)}, each once; use an AWS SDK to sign")
        parts[name] = value
    missing = [name for name in _PARTS if name not in parts]
    if missing:
        raise _incomplete(f"Authorization has no {' and no '.join(missing)}; use an AWS SDK to sign")
    timestamp = headers.get("x-amz-date")
    if timestamp is None:
        raise _incomplete("The header X-Amz-Date is missing; use an AWS SDK to sign")
    return _signature(parts["Credential"], timestamp, parts["SignedHeaders"], parts["Signature"], None)


def _from_query(query: Mapping[str, str]) -> Signature:
    wanted = (_QUERY_ALGORITHM, _QUERY_CREDENTIAL, _QUERY_DATE, _QUERY_EXPIRES, _QUERY_HEADERS, _QUERY_SIGNATURE)
    missing = [name for name in wanted if name not in query]
    if missing:
        raise _incomplete(f"The presigned URL has no {' and no '.join(missing)}; use an AWS SDK to sign")
    if query[_QUERY_ALGORITHM] != ALGORITHM:
        raise _incomplete(f"The algorithm of the signature is {query[_QUERY_ALGORITHM][:40]!r}; use {ALGORITHM}")
    expires = query[_QUERY_EXPIRES]
    if not re.fullmatch("[0-9]{1,7}", expires):
        raise _incomplete(f"{_QUERY_EXPIRES} is {expires[:40]!r}; give a number of seconds")
    credential, timestamp = query[_QUERY_CREDENTIAL], query[_QUERY_DATE]
    return _signature(credential, timestamp, query[_QUERY_HEADERS], query[_QUERY_SIGNATURE], int(expires))


def _signature(credential: str, timestamp: str, signed: str, value: str, expires_seconds: int | None) -> Signature:
    scope = credential.split("/")
    if len(scope) != 5 or scope[4] != _TERMINATOR:
        raise _incomplete(f"The credential must be KEY/YYYYMMDD/region/sqs/{_TERMINATOR}; use an AWS SDK to sign")
    access_key, day, region, service, _ = scope
    signed_seconds = _seconds_of(timestamp) if _DATE_TEXT.fullmatch(timestamp) else None
    if signed_seconds is None:
        raise _incomplete(f"The date of the signature is {timestamp[:40]!r}; use the form YYYYMMDDTHHMMSSZ")
    if day != timestamp[:8]:
        raise _incomplete(f"The credential is of the day {day[:16]!r}, and the date is {timestamp}; use the same day")
    names = tuple(signed.split(";"))
    if len(names) > SQS_SIGNED_HEADERS_MAX:
        raise _incomplete(f"{len(names)} headers are signed, of at most {SQS_SIGNED_HEADERS_MAX}; sign fewer")
    if list(names) != sorted(set(names)) or not all(_HEADER_NAME.fullmatch(name) for name in names):
        raise _incomplete("SignedHeaders must be names in lower case, in order, each once; use an AWS SDK to sign")
    if not _SIGNATURE.fullmatch(value):
        raise _incomplete("The signature is not 64 hex digits; use an AWS SDK to sign")
    return Signature(
        access_key=access_key,
        day=day,
        region=region,
        service=service,
        timestamp=timestamp,
        signed_seconds=signed_seconds,
        signed_headers=names,
        value=value,
        expires_seconds=expires_seconds,
    )


@lru_cache(maxsize=64)  # Most requests have one of few dates.
def _seconds_of(timestamp: str) -> int | None:
    """The seconds since 1970; None if it is not a date."""
    try:
        return int(datetime.strptime(timestamp, _DATE).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def decoded_query(query_string: str) -> Pairs:
    """The parameters of a query, decoded as forms are: a plus is a space.

    Raises:
        SqsError: IncompleteSignature, if a parameter is repeated. A signature does not cover the order of its values.
    """
    if not query_string:
        return []
    pairs: Pairs = []
    for part in query_string.split("&"):
        if part:
            name, _, value = part.replace("+", " ").partition("=")
            pairs.append((unquote_to_bytes(name), unquote_to_bytes(value)))
    if len({name for name, _ in pairs}) != len(pairs):
        raise _incomplete("The query has a parameter twice; send each once")
    return pairs


def canonical_request(
    method: str, path: str, pairs: Pairs, headers: Mapping[str, str], *, signed: Sequence[str], body_hash: str
) -> bytes:
    """What the string to sign has the hash of. The path is as it was sent, not decoded.

    Raises:
        SqsError: IncompleteSignature, if a signed header is missing or repeated.
    """
    counts = Counter(name.lower() for name, _ in headers.items())
    for name in signed:
        if counts[name] != 1:
            state = "missing" if not counts[name] else "repeated"
            raise _incomplete(f"The signed header {name[:64]!r} is {state}; send each signed header once")
    lines = [
        method.upper(),
        canonical_path(path),
        _canonical_query(pairs),
        *(f"{name}:{_SPACES.sub(' ', headers[name].strip(_SPACE))}" for name in signed),
        "",
        ";".join(signed),
        body_hash,
    ]
    return "\n".join(lines).encode("latin-1", "replace")  # The bytes of the headers: ASGI decodes them as Latin-1.


def canonical_path(path: str) -> str:
    """A path without empty and relative parts, encoded once more than it was sent."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    joined = "/".join(parts)
    return quote(f"/{joined}/" if joined and path.endswith("/") else f"/{joined}", safe="/~")


def _canonical_query(pairs: Pairs) -> str:
    encoded = [(_encoded(name), _encoded(value)) for name, value in pairs if name != _QUERY_SIGNATURE.encode()]
    return "&".join([f"{name}={value}" for name, value in sorted(encoded)])


def _encoded(data: bytes) -> str:
    return quote(data, safe="-_.~")


def string_to_sign(signature: Signature, canonical: bytes) -> bytes:
    """What is signed."""
    digest = hashlib.sha256(canonical).hexdigest()
    return f"{ALGORITHM}\n{signature.timestamp}\n{signature.scope}\n{digest}".encode()


def signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    """The key of all signatures of one day, region and service."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, _TERMINATOR):
        key = _hmac(key, part.encode())
    return key


def sign(key: bytes, text: bytes) -> str:
    """The signature of `text`: 64 hex digits."""
    return _hmac(key, text).hex()


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _incomplete(message: str) -> SqsError:
    return SqsError("IncompleteSignature", message)
