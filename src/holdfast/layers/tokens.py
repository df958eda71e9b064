"""Tokens: who may come in from the network.

    ("tokens", id)  ->  what the token allows, and the SHA-256 of its secret

    usable ── ttl is over ──► expired ──┐
       └───── revoke ───────► revoked ──┴─ 30 days ──► forgotten

The secret itself is never here. It is random and long, so its hash needs neither salt nor slowness. A token that ended
stays for a while, so that whoever wonders why it is refused finds it in the list.
"""

import hmac
from typing import Final

import msgspec

from holdfast.errors import Busy, InvalidArgument, NotAllowed, NotFound
from holdfast.kv import Subspace, Transaction
from holdfast.limits import READ_ENTRIES_MAX

TOKENS_MAX: Final = 10_000  # Every server has all of them in memory.
KEPT_SECONDS: Final = 30 * 86_400  # How long a token that ended stays in the list.
ROOM: Final = Subspace("tokens")

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
    """A new token for whoever has the secret behind `secret_hash`.

    Raises:
        Busy: there are as many tokens as there may be.
    """
    now_ms, kept = tx.now_ms, 0
    for token in every(tx):
        ended_ms = token.revoked_ms or token.expires_ms
        if ended_ms is not None and ended_ms + KEPT_SECONDS * 1_000 <= now_ms:
            tx.delete(ROOM.key(token.id))
        else:
            kept += 1
    if kept >= TOKENS_MAX:
        raise Busy(f"There are {TOKENS_MAX} tokens; revoke those that nobody uses, and they make room in 30 days")
    expires_ms = None if ttl_ms is None else now_ms + ttl_ms
    id = tx.new_id().hex
    token = Token(
        id, name, universes, verbs, secret_hash, now_ms, expires_ms, None, rate_per_second, body_bytes_max
    )  # fmt: skip
    tx.put(ROOM.key(id), _encode(token))
    return token


def revoke(tx: Transaction, id: str) -> bool:
    """End a token now; whether it could be used until now.

    Raises:
        NotFound: there is none of that id.
    """
    token = find(tx, id)
    if token is None:
        raise NotFound(f"There is no token {id}; list them to find its id")
    if not token.usable_at(tx.now_ms):
        return False
    tx.put(ROOM.key(id), _encode(msgspec.structs.replace(token, revoked_ms=tx.now_ms)))
    return True


def find(tx: Transaction, id: str) -> Token | None:
    """The token of that id, usable or not."""
    stored = tx.get(ROOM.key(id))
    return None if stored is None else _decode(stored)


def check(token: Token | None, secret_hash: bytes, now_ms: int) -> Token:
    """The token, if the secret behind `secret_hash` is its and it can be used at that moment.

    Raises:
        NotAllowed: it is not, or cannot.
    """
    # Somebody who measures how long this takes must not learn how much of a guess was right.
    right = hmac.compare_digest(_NO_HASH if token is None else token.secret_hash, secret_hash)
    if token is None or not right:
        raise NotAllowed("Nobody is known by this token; create one with: holdfast token create")
    return check_usable(token, now_ms)


def check_usable(token: Token, now_ms: int) -> Token:
    """The token, if it can be used at that moment.

    Raises:
        NotAllowed: it was revoked, or its time is over.
    """
    if token.revoked_ms is not None:
        raise NotAllowed(f"The token {token.name} ({token.id}) was revoked; ask for another")
    if not token.usable_at(now_ms):
        raise NotAllowed(f"The token {token.name} ({token.id}) has expired; ask for another")
    return token


def page(tx: Transaction, *, after: str, limit: int) -> list[Token]:
    """At most `limit` tokens behind the id `after`, in the order in which they were made."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A page has 1 to {READ_ENTRIES_MAX} tokens, not {limit}")
    begin, end = ROOM.range()
    pairs = tx.scan(ROOM.key(after) + b"\x00" if after else begin, end, limit=limit)
    return [_decode(value) for _, value in pairs]


def every(tx: Transaction) -> list[Token]:
    """All tokens, usable or not."""
    return page(tx, after="", limit=TOKENS_MAX)
