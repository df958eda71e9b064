"""Access tokens for the network API.

    ("tokens", id)  ->  what the token allows, and the SHA-256 of its secret

    usable ── ttl expires ──► expired ──┐
       └───── revoke ───────► revoked ──┴─ 30 days ──► deleted

The secret itself is not stored. It is random and long, so its hash needs neither a salt nor a slow function. Expired
and revoked tokens stay listed for a while, which explains why they are refused.
"""

import hmac
from typing import Final

import msgspec

from holdfast.errors import Busy, InvalidArgument, NotAllowed, NotFound
from holdfast.kv import Subspace, Transaction
from holdfast.limits import READ_ENTRIES_MAX

TOKENS_MAX: Final = 10_000  # Every server keeps all of them in memory.
KEPT_SECONDS: Final = 30 * 86_400  # How long an expired or revoked token stays listed.
SUBSPACE: Final = Subspace("tokens")

_NO_HASH: Final = bytes(32)


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token as it is stored. `universes` and `verbs` may be "*"."""

    id: str
    name: str
    universes: list[str]
    verbs: list[str]
    secret_hash: bytes
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    rate_per_second: float | None = None
    body_bytes_max: int | None = None

    def usable_at(self, now_ms: int) -> bool:
        return self.revoked_ms is None and (self.expires_ms is None or now_ms < self.expires_ms)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Token).decode


def create(
    tx: Transaction,
    *,
    name: str,
    universes: list[str],
    verbs: list[str],
    secret_hash: bytes,
    ttl_ms: int | None = None,
    rate_per_second: float | None = None,
    body_bytes_max: int | None = None,
) -> Token:
    """Create a token for the secret with the hash `secret_hash`. Deletes tokens that ended 30 days ago.

    Raises:
        Busy: there are as many tokens as allowed.
    """
    now_ms, kept = tx.now_ms, 0
    for token in all_tokens(tx):
        ended_ms = token.revoked_ms or token.expires_ms
        if ended_ms is not None and ended_ms + KEPT_SECONDS * 1_000 <= now_ms:
            tx.delete(SUBSPACE.key(token.id))
        else:
            kept += 1
    if kept >= TOKENS_MAX:
        raise Busy(f"There are {TOKENS_MAX} tokens, the maximum; revoke unused ones, which are deleted after 30 days")
    expires_ms = None if ttl_ms is None else now_ms + ttl_ms
    id = tx.new_id().hex
    token = Token(
        id=id,
        name=name,
        universes=universes,
        verbs=verbs,
        secret_hash=secret_hash,
        created_ms=now_ms,
        expires_ms=expires_ms,
        rate_per_second=rate_per_second,
        body_bytes_max=body_bytes_max,
    )
    tx.put(SUBSPACE.key(id), _encode(token))
    return token


def revoke(tx: Transaction, id: str) -> bool:
    """Revoke a token; whether it was usable until now.

    Raises:
        NotFound: no token has this id.
    """
    token = find(tx, id)
    if token is None:
        raise NotFound(f"There is no token {id}; list them to find its id")
    if not token.usable_at(tx.now_ms):
        return False
    tx.put(SUBSPACE.key(id), _encode(msgspec.structs.replace(token, revoked_ms=tx.now_ms)))
    return True


def find(tx: Transaction, id: str) -> Token | None:
    """The token with this id, usable or not; None if there is none."""
    stored = tx.get(SUBSPACE.key(id))
    return None if stored is None else _decode(stored)


def check(token: Token | None, secret_hash: bytes, now_ms: int) -> Token:
    """The token, if `secret_hash` matches and it is usable at `now_ms`.

    Raises:
        NotAllowed: the secret is wrong, or the token is not usable.
    """
    # Constant time: the duration must not reveal how much of a guess was right.
    matches = hmac.compare_digest(_NO_HASH if token is None else token.secret_hash, secret_hash)
    if token is None or not matches:
        raise NotAllowed("The token is unknown; create one with: holdfast token create NAME --allow VERBS")
    return check_usable(token, now_ms)


def check_usable(token: Token, now_ms: int) -> Token:
    """The token, if it is usable at `now_ms`.

    Raises:
        NotAllowed: it was revoked or has expired.
    """
    if token.revoked_ms is not None:
        raise NotAllowed(f"The token {token.name} ({token.id}) was revoked; request a new one")
    if not token.usable_at(now_ms):
        raise NotAllowed(f"The token {token.name} ({token.id}) has expired; request a new one")
    return token


def page(tx: Transaction, *, after: str, limit: int) -> list[Token]:
    """At most `limit` tokens after the id `after`, in the order of their creation."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; one page has 1 to {READ_ENTRIES_MAX} tokens")
    begin, end = SUBSPACE.range()
    pairs = tx.scan(SUBSPACE.key(after) + b"\x00" if after else begin, end, limit=limit)
    return [_decode(value) for _, value in pairs]


def all_tokens(tx: Transaction) -> list[Token]:
    """All tokens, usable or not."""
    return page(tx, after="", limit=TOKENS_MAX)
