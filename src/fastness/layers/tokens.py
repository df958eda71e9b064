"""Access tokens for the network API.

    ("tokens", id)  ->  what the token allows, the SHA-256 of its secret, and the encrypted secret of its access key

    usable ── ttl expires ──► expired ──┐
       └───── revoke ───────► revoked ──┴─ 30 days ──► deleted

Revoking a token revokes those that it created, and those that they created: otherwise the holder of a stolen token
could keep its access with a token of its own.

The secret itself is not stored. It is random and long, so its hash needs neither a salt nor a slow function. Expired
and revoked tokens stay listed for a while, which explains why they are refused.
"""

import hmac
from typing import Final

import msgspec

from fastness.errors import Busy, NotAllowed, NotFound
from fastness.kv import Subspace, Transaction
from fastness.wire.permissions import covers, covers_queues, covers_universes

TOKENS_MAX: Final = 10_000  # Every server keeps all of them in memory.
KEPT_SECONDS: Final = 30 * 86_400  # How long an expired or revoked token stays listed.
SUBSPACE: Final = Subspace("tokens")

_NO_HASH: Final = bytes(32)
_REVOKED_BYTES_MAX: Final = 1_024  # TOKENS_MAX revoked tokens must fit one transaction.


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token as it is stored. `universes` and `verbs` may be "*"."""

    id: str
    name: str
    universes: list[str]
    verbs: list[str]
    secret_hash: bytes  # SHA-256.
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    rate_per_second: float | None = None
    body_bytes_max: int | None = None
    maker: str = ""  # The id of the token that created it; empty: created without a token.
    queues: list[str] = []  # Names and patterns; empty: all.
    access_key: bytes = b""  # The encrypted secret of its SQS access key; empty: it has none.

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
    maker: str = "",
    queues: list[str] | None = None,
    access_key: bytes = b"",
) -> Token:
    """Create a token for the secret with the hash `secret_hash`. Deletes tokens that ended 30 days ago.

    `maker` is the id of the token that creates it. The new token has the maker's limits where none are given.

    Raises:
        NotAllowed: the maker is not usable, or the new token would allow more than the maker does.
        Busy: there are as many tokens as allowed.
    """
    now_ms, kept = tx.now_ms, 0
    wanted = Token(
        id=tx.new_id().hex,
        name=name,
        universes=universes,
        verbs=verbs,
        secret_hash=secret_hash,
        queues=queues or [],
        access_key=access_key,
        created_ms=now_ms,
        expires_ms=None if ttl_ms is None else now_ms + ttl_ms,
        rate_per_second=rate_per_second,
        body_bytes_max=body_bytes_max,
        maker=maker,
    )
    token = limited_by(_usable_maker(tx, maker), wanted) if maker else wanted
    for other in all_tokens(tx):
        ended_ms = other.revoked_ms or other.expires_ms
        if ended_ms is not None and ended_ms + KEPT_SECONDS * 1_000 <= now_ms:
            tx.delete(SUBSPACE.key(other.id))
        else:
            kept += 1
    if kept >= TOKENS_MAX:
        raise Busy(f"There are {TOKENS_MAX} tokens, the maximum; revoke unused ones, which are deleted after 30 days")
    _store(tx, token)
    return token


def limited_by(maker: Token, wanted: Token) -> Token:
    """The token that `maker` may create: `wanted`, with the maker's limits where it has none.

    Raises:
        NotAllowed: `wanted` allows more than `maker` does.
    """
    if not covers_universes(maker.universes, wanted.universes):
        raise _wider(maker, "universes", wanted.universes, maker.universes)
    if not all(covers(maker.verbs, verb) for verb in wanted.verbs):
        raise _wider(maker, "verbs", wanted.verbs, maker.verbs)
    if wanted.queues and not covers_queues(maker.queues, wanted.queues):
        raise _wider(maker, "queues", wanted.queues, maker.queues)
    if maker.expires_ms is not None and wanted.expires_ms is not None and wanted.expires_ms > maker.expires_ms:
        left = (maker.expires_ms - wanted.created_ms) / 1_000
        raise _wider(maker, "ttl_seconds", (wanted.expires_ms - wanted.created_ms) / 1_000, left)
    for field in ("rate_per_second", "body_bytes_max"):
        most, given = getattr(maker, field), getattr(wanted, field)
        if most is not None and given is not None and given > most:
            raise _wider(maker, field, given, most)
    return msgspec.structs.replace(
        wanted,
        queues=wanted.queues or maker.queues,
        expires_ms=maker.expires_ms if wanted.expires_ms is None else wanted.expires_ms,
        rate_per_second=maker.rate_per_second if wanted.rate_per_second is None else wanted.rate_per_second,
        body_bytes_max=maker.body_bytes_max if wanted.body_bytes_max is None else wanted.body_bytes_max,
    )


def _usable_maker(tx: Transaction, id: str) -> Token:
    maker = find(tx, id)
    if maker is None:
        raise NotAllowed(f"The token {id[:64]} was removed; request a new one")
    return check_usable(maker, tx.now_ms)


def _wider(maker: Token, field: str, wanted: object, most: object) -> NotAllowed:
    return NotAllowed(
        f"{field} is {wanted}, more than the token {maker.name} has itself ({most}); give no more than that, or create "
        "the token with one that has more rights"
    )


def revoke(tx: Transaction, id: str, *, keep_children: bool = False) -> bool:
    """Revoke a token and all that come from it; whether it was usable until now.

    With `keep_children` the tokens that it created stay usable. They then count as created by its own maker.

    Raises:
        NotFound: no token has this id.
    """
    token = find(tx, id)
    if token is None:
        raise NotFound(f"There is no token {id}; list them to find its id")
    was_usable = token.usable_at(tx.now_ms)
    if was_usable:
        _end(tx, token)
    children = _children(tx)
    if keep_children:
        for child in children.get(id, ()):
            _store(tx, msgspec.structs.replace(child, maker=token.maker))
        return was_usable
    makers = [id]
    while makers:
        for child in children.get(makers.pop(), ()):
            makers.append(child.id)
            if child.usable_at(tx.now_ms):
                _end(tx, child)
    return was_usable


def _children(tx: Transaction) -> dict[str, list[Token]]:
    """The tokens that were created with a token, by its id."""
    children: dict[str, list[Token]] = {}
    for token in all_tokens(tx):
        if token.maker:
            children.setdefault(token.maker, []).append(token)
    return children


def _end(tx: Transaction, token: Token) -> None:
    """Store the token as revoked: without the secret of its access key, and without what it allows if that is long."""
    revoked = msgspec.structs.replace(token, revoked_ms=tx.now_ms, access_key=b"")
    if len(_encode(revoked)) > _REVOKED_BYTES_MAX:
        revoked = msgspec.structs.replace(revoked, universes=[], verbs=[], queues=[])
    _store(tx, revoked)


def _store(tx: Transaction, token: Token) -> None:
    tx.put(SUBSPACE.key(token.id), _encode(token))


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
        raise NotAllowed("The token is unknown; create one with: fastness token create NAME --allow VERBS")
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
    begin, end = SUBSPACE.range()
    pairs = tx.scan(SUBSPACE.key(after) + b"\x00" if after else begin, end, limit=limit)
    return [_decode(value) for _, value in pairs]


def has_access_keys(tx: Transaction) -> bool:
    """Whether a usable token has an SQS access key."""
    return any(token.access_key and token.usable_at(tx.now_ms) for token in all_tokens(tx))


def all_tokens(tx: Transaction) -> list[Token]:
    """All tokens, usable or not."""
    return page(tx, after="", limit=TOKENS_MAX)
