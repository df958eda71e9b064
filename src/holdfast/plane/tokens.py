"""Handlers of token requests, and what a server needs to authenticate with tokens."""

from holdfast.errors import InvalidArgument
from holdfast.kv import Database, Transaction, Watch
from holdfast.layers import tokens
from holdfast.layers.tokens import Token, check, check_usable
from holdfast.names import checked_name
from holdfast.plane.handlers import transaction
from holdfast.wire.permissions import checked_universes, checked_verbs
from holdfast.wire.tokens import (
    TOKEN_RATE_MAX,
    TOKEN_TTL_SECONDS_MAX,
    CreateToken,
    ListTokens,
    Revoked,
    RevokeToken,
    TokenInfo,
    TokenPage,
)

__all__ = ["Token", "check", "check_usable", "create", "known", "page", "revoke", "watch"]


@transaction
def create(tx: Transaction, request: CreateToken) -> TokenInfo:
    request.check()
    token = tokens.create(
        tx,
        name=checked_name("token", request.name),
        universes=checked_universes(request.universes),
        verbs=checked_verbs(request.verbs),
        secret_hash=bytes.fromhex(request.secret_sha256),
        ttl_ms=_ttl_ms(request.ttl_seconds),
        rate_per_second=_rate(request.rate_per_second),
        body_bytes_max=_bytes(request.body_bytes_max),
        maker=request.maker,
    )
    return _info(token)


@transaction
def page(tx: Transaction, request: ListTokens) -> TokenPage:
    found = tokens.page(tx, after=request.after, limit=request.limit)
    return TokenPage([_info(token) for token in found], found[-1].id if len(found) == request.limit else None)


@transaction
def revoke(tx: Transaction, request: RevokeToken) -> Revoked:
    return Revoked(tokens.revoke(tx, request.id, keep_children=request.keep_children))


def known(tx: Transaction) -> tuple[int, list[Token]]:
    """The time of the key space, and every token in it."""
    return tx.now_ms, tokens.all_tokens(tx)


def watch(database: Database) -> Watch:
    """Wakes when a token is created or revoked."""
    return database.watch(tokens.SUBSPACE.prefix)


def _info(token: Token) -> TokenInfo:
    return TokenInfo(
        token.id,
        token.name,
        token.universes,
        token.verbs,
        token.created_ms,
        token.expires_ms,
        token.revoked_ms,
        token.rate_per_second,
        token.body_bytes_max,
        token.maker,
    )


def _ttl_ms(seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not 1 <= seconds <= TOKEN_TTL_SECONDS_MAX:  # NaN fails this too.
        raise InvalidArgument(f"ttl_seconds is {seconds}; choose 1 to {TOKEN_TTL_SECONDS_MAX:.0f}, or none for no end")
    return round(seconds * 1_000)


def _rate(per_second: float | None) -> float | None:
    if per_second is not None and not 0.001 <= per_second <= TOKEN_RATE_MAX:
        raise InvalidArgument(f"rate_per_second is {per_second}; choose 0.001 to {TOKEN_RATE_MAX:.0f}, or none")
    return per_second


def _bytes(most: int | None) -> int | None:
    if most is not None and most < 1:
        raise InvalidArgument(f"body_bytes_max is {most}; choose 1 or more, or none")
    return most
