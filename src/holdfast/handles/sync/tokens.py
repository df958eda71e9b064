"""Generated from handles/tokens.py by tools/make_twins.py; change that file instead."""

import hashlib
import secrets
from collections.abc import Iterable

from holdfast.wire import Transport
from holdfast.wire.tokens import CreateToken, ListTokens, NewToken, RevokeToken, TokenPage, split_token, token_text

_SECRET_BYTES = 24  # 192 bits: nobody guesses it, however long they try.


class Tokens:
    """Makes, lists and revokes tokens. A server asks for them if it is started with tokens on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str,
        *,
        universes: str | Iterable[str],
        verbs: str | Iterable[str],
        ttl_seconds: float | None = None,
        rate_per_second: float | None = None,
        body_bytes_max: int | None = None,
    ) -> NewToken:
        """A token that allows `verbs` (`queue:put`, `queue:*`, `*`) in `universes` ("*": in all).

        Lists may be given as text with commas. The secret is made here and only its hash leaves: repeat this call
        after an error, and the worst that comes of it is a token that nobody has.

        Raises:
            InvalidArgument: a verb or a limit is none.
            NotAllowed: whoever asks may not make tokens, or not such ones.
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
        info = self._transport.call(request)
        return NewToken(token_text(info.id, secret), info)

    def page(self, *, after: str = "", limit: int = 100) -> TokenPage:
        """At most `limit` tokens, in the order in which they were made, the first one behind the id `after`."""
        return self._transport.call(ListTokens(after, limit))

    def revoke(self, id: str) -> bool:
        """Refuse the token from now on; whether it could be used until now. `id` may be the token itself.

        Raises:
            NotFound: there is none of that id.
        """
        whole = split_token(id)
        return (self._transport.call(RevokeToken(id if whole is None else whole[0]))).revoked


def _listed(words: str | Iterable[str]) -> list[str]:
    return [word.strip() for word in words.split(",")] if isinstance(words, str) else list(words)
