"""Tokens: credentials for callers from the network."""

import hashlib
import secrets
from collections.abc import Iterable

from holdfast.handles.arguments import checked_items
from holdfast.wire import AsyncTransport
from holdfast.wire.tokens import CreateToken, ListTokens, NewToken, RevokeToken, TokenPage, split_token, token_text

_SECRET_BYTES = 24  # 192 bits: too many to guess.


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
    ) -> NewToken:
        """A new token that allows `verbs` (`queue:put`, `queue:*`, `*`) in `universes` ("*": all).

        Lists may be given as comma-separated text. The secret is created here, and only its hash is sent. Repeating the
        call after an error is safe: at worst it leaves an unused token.

        Raises:
            InvalidArgument: a verb or a limit is invalid.
            NotAllowed: the caller may not create tokens, or not with these permissions.
        """
        secret = secrets.token_hex(_SECRET_BYTES)
        request = CreateToken(
            name,
            _listed(universes),
            _listed(verbs),
            hashlib.sha256(secret.encode()).hexdigest(),
            ttl_seconds,
            rate_per_second,
            body_bytes_max,
        )
        info = await self._transport.call(request)
        return NewToken(token_text(info.id, secret), info)

    async def page(self, *, after: str = "", limit: int = 100) -> TokenPage:
        """At most `limit` tokens in the order of creation, starting after the id `after`."""
        return await self._transport.call(ListTokens(after, limit))

    async def revoke(self, id: str, *, keep_children: bool = False) -> bool:
        """Refuse the token from now on; whether it was usable until now. `id` may be the token itself.

        The tokens that it created, and those that they created, are revoked too. With `keep_children` they stay usable,
        and count as created by the token's own maker.

        Raises:
            NotFound: there is no token with that id.
        """
        whole = split_token(id)
        return (await self._transport.call(RevokeToken(id if whole is None else whole[0], keep_children))).revoked


def _listed(words: str | Iterable[str]) -> list[str]:
    if isinstance(words, str):
        return [word.strip() for word in words.split(",")]
    return list(checked_items(words, "give a list, or text with commas"))
