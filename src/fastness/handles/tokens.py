"""Tokens: credentials for callers from the network."""

import hashlib
import secrets
import string
from collections.abc import Iterable

from fastness.handles.arguments import checked_items
from fastness.wire import AsyncTransport
from fastness.wire.tokens import (
    CreateToken,
    ListTokens,
    NewToken,
    RevokeToken,
    ShowOwnToken,
    TokenInfo,
    TokenPage,
    split_token,
    token_text,
)
from fastness.wire.type_checks import check_argument

_SECRET_BYTES = 24  # 192 bits: too many to guess.
_ACCESS_SECRET_CHARACTERS = 40  # As those of AWS: 238 bits. A URL needs not escape letters and digits.
_ALPHABET = string.ascii_letters + string.digits


class AsyncTokens:
    """Creates, lists and revokes tokens. A server requires them if it runs with tokens on."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        universes: str | Iterable[str],
        verbs: str | Iterable[str],
        ttl_seconds: float | None = None,
        rate_per_second: float | None = None,
        body_bytes_max: int | None = None,
        queues: str | Iterable[str] = (),
        sqs: bool = False,
    ) -> NewToken:
        """A new token that allows `verbs` (`queue:put`, `queue:*`, `*`) in `universes` ("*": all).

        `queues` limits it to queues: names, or beginnings such as `orders-*`. With `sqs` it also has an access key for
        the SQS endpoint, in one universe: `info.access_key_id` and `secret_access_key` of the answer.

        Lists may be given as comma-separated text. The secrets are created here. Only the hash of the token's is sent;
        that of an access key is sent as it is, so use TLS. Repeating the call after an error is safe: at worst it
        leaves an unused token.

        Raises:
            InvalidArgument: a verb or a limit is invalid.
            NotAllowed: the caller may not create tokens, or not with these permissions.
        """
        secret = secrets.token_hex(_SECRET_BYTES)
        access_secret = "".join(secrets.choice(_ALPHABET) for _ in range(_ACCESS_SECRET_CHARACTERS)) if sqs else ""
        request = CreateToken(
            name,
            _listed(universes),
            _listed(verbs),
            hashlib.sha256(secret.encode()).hexdigest(),
            ttl_seconds,
            rate_per_second,
            body_bytes_max,
            queues=_listed(queues) if queues else [],
            sqs_secret=access_secret,
        )
        info = await self._transport.call(request)
        return NewToken(token_text(info.id, secret), info, access_secret)

    async def page(self, *, after: str = "", limit: int = 100) -> TokenPage:
        """At most `limit` tokens in the order of creation, starting after the id `after`."""
        return await self._transport.call(ListTokens(after, limit))

    async def self(self) -> TokenInfo | None:
        """The token that this plane was connected with, which says what it allows; None without a token.

        Every usable token allows this call. An embedded plane, and a server that requires no tokens, return None.
        """
        return (await self._transport.call(ShowOwnToken())).token

    async def revoke(self, id: str, *, keep_children: bool = False) -> bool:
        """Refuse the token from now on; whether it was usable until now. `id` may be the token itself.

        The tokens that it created, and those that they created, are revoked too. With `keep_children` they stay usable,
        and count as created by the token's own maker.

        Raises:
            NotFound: there is no token with that id.
        """
        check_argument("id", id, str)
        whole = split_token(id)
        return (await self._transport.call(RevokeToken(id if whole is None else whole[0], keep_children))).revoked


def _listed(words: str | Iterable[str]) -> list[str]:
    if isinstance(words, str):
        return [word.strip() for word in words.split(",")]
    return list(checked_items(words, "give a list, or text with commas"))
