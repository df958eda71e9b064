"""Tokens: credentials for callers from the network, limited to universes and verbs (`permissions.py`).

    hft_<id>_<secret>        the token, as a caller sends it

The client creates the secret. Only its SHA-256 is sent and stored, so no log, backup or stored answer contains it.
"""

import re
from typing import Final

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.wire.requests import Operation, Request

PREFIX: Final = "hft"
TOKEN_TTL_SECONDS_MAX: Final = 315_360_000.0  # Ten years. A token without an end has no TTL.
TOKEN_RATE_MAX: Final = 1_000_000.0

_TOKEN: Final = re.compile(rf"{PREFIX}_([0-9a-f]{{32}})_([0-9A-Za-z]{{16,128}})")
_SHA256: Final = re.compile("[0-9a-f]{64}")


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


class NewToken(msgspec.Struct, frozen=True):
    """A new token. Save `token` now: it is not stored and cannot be read again."""

    token: str
    info: TokenInfo

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

    operation = Operation(stores=True)

    name: str
    universes: list[str]
    verbs: list[str]
    secret_sha256: str
    ttl_seconds: float | None = None  # None: until it is revoked.
    rate_per_second: float | None = None  # Calls; None: no limit.
    body_bytes_max: int | None = None  # Of one call; None: the server's limit.
    maker: str = ""  # The id of the caller's token. A server sets it, whatever the caller sends.

    def check(self) -> None:
        if not _SHA256.fullmatch(self.secret_sha256):
            raise InvalidArgument(
                "secret_sha256 is not a SHA-256; send the 64 hex digits of the SHA-256 of a random secret"
            )


class ListTokens(Request[TokenPage], frozen=True, tag="tokens.list"):
    """Every token, including those that were revoked or expired recently."""

    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100


class RevokeToken(Request[Revoked], frozen=True, tag="tokens.revoke"):
    """Refuse this token from now on, and all that come from it: those that it created, those that they created, …"""

    id: str
    keep_children: bool = False  # The tokens that it created stay usable, and count as created by its own maker.


def token_text(id: str, secret: str) -> str:
    """A token as a caller sends it."""
    return f"{PREFIX}_{id}_{secret}"


def split_token(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if the text is not a token."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else (found[1], found[2])
