"""Handlers of token requests, and what a server needs to authenticate with tokens."""

from functools import partial

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Database, Transaction, Watch
from fastness.layers import tokens
from fastness.layers.idempotency import KeyedCall, run_idempotent
from fastness.layers.tokens import Token, check, check_usable
from fastness.plane.handlers import service, transaction
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.tiers import Tier
from fastness.wire.answers import read_answer
from fastness.wire.permissions import EVERYTHING, checked_queues, checked_universes, checked_verbs
from fastness.wire.tokens import (
    CreateToken,
    ListTokens,
    OwnToken,
    Revoked,
    RevokeToken,
    ShowOwnToken,
    TokenInfo,
    TokenPage,
    access_key_id,
)

__all__ = [
    "Token",
    "access_key_secret",
    "check",
    "check_usable",
    "create",
    "known",
    "page",
    "revoke",
    "show_own",
    "watch",
]


@service
def create(stores: AnyStores, request: CreateToken, call: KeyedCall | None = None) -> Served[TokenInfo]:
    return stores.run_in_thread(_create, stores.services, request, call)  # It may read or write the key file.


def _create(services: Services, request: CreateToken, call: KeyedCall | None) -> TokenInfo:
    encrypted = _encrypted_secret(services, request) if request.sqs_secret else b""

    def run(tx: Transaction, request: CreateToken) -> TokenInfo:
        return _store(tx, request, encrypted)

    info: TokenInfo = (
        services.database.transact(run, request, tier=request.tier)
        if call is None
        else services.database.transact(
            run_idempotent, call, partial(read_answer, request), run, request, tier=request.tier
        )
    )
    return info


def _encrypted_secret(services: Services, request: CreateToken) -> bytes:
    """The secret of the access key, as it is stored.

    Raises:
        InvalidArgument: the token is not for one universe, which SQS cannot name.
        EncryptionKeyMissing: the server has no key to encrypt it with.
    """
    universes = checked_universes(request.universes)
    if len(universes) != 1 or universes == [EVERYTHING]:
        raise InvalidArgument("An access key is for one universe; name it, as in --universe main")
    services.access_keys.prepare(has_access_keys=services.database.read(tokens.has_access_keys, tier=Tier.IMPORTANT))
    return services.access_keys.encrypt(request.sqs_secret, binding=request.secret_sha256)


def _store(tx: Transaction, request: CreateToken, access_key: bytes) -> TokenInfo:
    token = tokens.create(
        tx,
        name=request.name,
        universes=checked_universes(request.universes),
        verbs=checked_verbs(request.verbs),
        secret_hash=bytes.fromhex(request.secret_sha256),
        ttl_ms=None if request.ttl_seconds is None else round(request.ttl_seconds * 1_000),
        rate_per_second=request.rate_per_second,
        body_bytes_max=request.body_bytes_max,
        maker=request.maker,
        queues=checked_queues(request.queues),
        access_key=access_key,
    )
    return _info(token)


@transaction
def page(tx: Transaction, request: ListTokens) -> TokenPage:
    found = tokens.page(tx, after=request.after, limit=request.limit)
    return TokenPage([_info(token) for token in found], found[-1].id if len(found) == request.limit else None)


@transaction
def show_own(tx: Transaction, request: ShowOwnToken) -> OwnToken:
    token = tokens.find(tx, request.id) if request.id else None
    return OwnToken(None if token is None else _info(token))


@transaction
def revoke(tx: Transaction, request: RevokeToken) -> Revoked:
    return Revoked(tokens.revoke(tx, request.id, keep_children=request.keep_children))


def known(tx: Transaction) -> tuple[int, list[Token]]:
    """The time of the key space, and every token in it."""
    return tx.now_ms, tokens.all_tokens(tx)


def access_key_secret(services: Services, token: Token) -> str:
    """The secret of a token's SQS access key.

    Raises:
        EncryptionKeyMissing: the key file of this server does not decrypt it.
    """
    return services.access_keys.decrypt(token.access_key, binding=token.secret_hash.hex())


def watch(database: Database) -> Watch:
    """Wakes when a token is created or revoked."""
    return database.watch(tokens.SUBSPACE.prefix)


def _info(token: Token) -> TokenInfo:
    info = msgspec.convert(token, TokenInfo, from_attributes=True)
    return msgspec.structs.replace(info, access_key_id=access_key_id(token.id)) if token.access_key else info
