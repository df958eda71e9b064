"""Tokens: credentials for callers from the network, limited to universes and verbs (`permissions.py`).

    fnt_<id>_<secret>        the token, as a caller sends it
    FN<ID>, <secret>         its SQS access key, if it has one: an access key id, and a secret that signs requests

The client creates the secrets. Of the token's, only the SHA-256 is sent and stored, so no log, backup or stored answer
contains it. That of an access key is sent, because signatures are computed from it, and stored encrypted
(`fastness.access_keys`).
"""

import operator
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import InvalidArgument
from fastness.wire.fields import Limit, Name, ruled
from fastness.wire.requests import Operation, Request, Route

PREFIX: Final = "fnt"

_TOKEN: Final = re.compile(rf"{PREFIX}_([0-9a-f]{{32}})_([0-9A-Za-z]{{16,128}})")
_SHA256: Final = re.compile("^[0-9a-f]{64}$")
_ACCESS_KEY: Final = re.compile("FN([0-9A-F]{32})")
_ACCESS_KEY_SECRET: Final = re.compile("^([A-Za-z0-9/+]{32,128})?$")


# Neither value is shown.


def _check_hash(field: str, text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise InvalidArgument(f"{field} is not a SHA-256; send the 64 hex digits of the SHA-256 of a random secret")


def _check_secret(field: str, text: str) -> None:
    if not _ACCESS_KEY_SECRET.fullmatch(text):
        raise InvalidArgument(f"{field} is not 32 to 128 letters, digits, / or +; create a random one")


class TokenInfo(msgspec.Struct, frozen=True):
    """A token without its secret."""

    id: str
    name: str
    universes: list[str]
    verbs: list[str]
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    rate_per_second: float | None
    body_bytes_max: int | None
    maker: str = ""  # The id of the token that created it; empty: created without a token.
    queues: list[str] = []  # Names, and patterns such as `orders-*`; empty: all queues.
    access_key_id: str = ""  # Of its SQS access key; empty: it has none.


class NewToken(msgspec.Struct, frozen=True):
    """A new token. Save `token` and `secret_access_key` now: they cannot be read again."""

    token: str
    info: TokenInfo
    secret_access_key: str = ""  # Of its SQS access key, whose id is `info.access_key_id`.

    def __repr__(self) -> str:
        return f"<token {self.info.name} ({self.info.id}), its secret not shown>"


class TokenPage(msgspec.Struct, frozen=True):
    """Tokens in the order of creation; `next` is where the next page starts, if there is one."""

    tokens: list[TokenInfo]
    next: str | None


class Revoked(msgspec.Struct, frozen=True):
    """Whether the token was usable until now."""

    revoked: bool


class CreateToken(Request[TokenInfo], frozen=True, tag="tokens.create"):
    """Create a token whose secret has this SHA-256. `universes=["*"]` is every universe.

    A caller with a token cannot create one that allows more. Limits that are not given are those of its own token.
    """

    operation = Operation(
        audited=True,
        stores=True,
        http=(
            Route(
                "POST",
                "/v1/tokens",
                "Create a token. The caller creates its secret, and sends the SHA-256 of the secret only.",
                status=201,
                fixed={"maker": ""},
            ),
        ),
    )

    name: Name
    universes: list[str]
    verbs: list[str]
    secret_sha256: Annotated[str, ruled(_check_hash, _SHA256.fullmatch, pattern=_SHA256.pattern)]
    ttl_seconds: Annotated[float, Meta(ge=1, le=limits.TTL_SECONDS_MAX)] | None = None  # None: until it is revoked.
    rate_per_second: Annotated[float, Meta(ge=limits.QUOTA_RATE_MIN, le=limits.QUOTA_RATE_MAX)] | None = None  # Calls.
    body_bytes_max: Annotated[int, Meta(ge=1)] | None = None  # Of one call; None: the server's limit.
    maker: str = ""  # The id of the caller's token. A server sets it, whatever the caller sends.
    queues: list[str] = msgspec.field(default_factory=list)  # Or `orders-*`; empty: all that the maker may use.
    sqs_secret: Annotated[str, ruled(_check_secret, operator.not_, pattern=_ACCESS_KEY_SECRET.pattern)] = (
        ""  # Of its SQS access key; empty: it has none. It is for one universe then.
    )

    def __repr__(self) -> str:
        return f"<create token {self.name}, its secrets not shown>"


class ListTokens(Request[TokenPage], frozen=True, tag="tokens.list"):
    """Every token, including those that were revoked or expired recently."""

    operation = Operation(reads=True, http=(Route("GET", "/v1/tokens", "List the tokens, without their secrets."),))

    after: str = ""
    limit: Limit = 100


class OwnToken(msgspec.Struct, frozen=True):
    """The caller's token; None: the plane was called without one."""

    token: TokenInfo | None


class ShowOwnToken(Request[OwnToken], frozen=True, tag="tokens.self"):
    """The token that the caller sends, without its secret. Every token allows this."""

    operation = Operation(
        reads=True,
        any_token=True,
        http=(Route("GET", "/v1/tokens/self", "Return the token of the caller.", fixed={"id": ""}),),
    )

    id: str = ""  # The id of the caller's token. A server sets it, whatever the caller sends.


class RevokeToken(Request[Revoked], frozen=True, tag="tokens.revoke"):
    """Refuse this token from now on, and all that come from it: those that it created, those that they created, …"""

    operation = Operation(
        audited=True, http=(Route("DELETE", "/v1/tokens/{id}", "Revoke a token and those that it created."),)
    )

    id: str
    keep_children: bool = False  # The tokens that it created stay usable, and count as created by its own maker.


def token_text(id: str, secret: str) -> str:
    """A token as a caller sends it."""
    return f"{PREFIX}_{id}_{secret}"


def split_token(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if the text is not a token."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], found[2])


def access_key_id(token_id: str) -> str:
    """The id of the SQS access key of a token."""
    return f"FN{token_id.upper()}"


def token_id_of(access_key_id: str) -> str | None:
    """The id of the token that an access key id names; None if it is not an id that a server made."""
    found = _ACCESS_KEY.fullmatch(access_key_id)
    return None if found is None else found[1].lower()
