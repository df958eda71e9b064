"""Token authentication, and loopback addresses that need no token.

The authenticator keeps every token in memory, so guessing tokens costs no database read. A watch on the key space
reports tokens that this or another server creates or revokes. Servers that share a PostgreSQL also poll every second,
in case a notification is lost. Every call is checked, not only the first of a connection: a revoked token is refused
at its next call.
"""

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from fastness.clock import SystemClock
from fastness.errors import Busy, Closed, FastnessError, InvalidArgument, NotAllowed, PayloadTooLarge
from fastness.plane import tokens
from fastness.plane.tokens import Token
from fastness.server.authorization import Authenticator, Authorizer, NoAuthentication
from fastness.server.logs import RateLimitFilter
from fastness.server.transport import ServerTransport
from fastness.tiers import Tier
from fastness.wire.atomic import CommitAtomic
from fastness.wire.permissions import EVERYTHING, covers, universes_of
from fastness.wire.queues import AckMessages, ReceiveMessages
from fastness.wire.requests import Request, permission_of
from fastness.wire.tokens import CreateToken, split_token

_log = logging.getLogger("fastness.tokens")
_refusals = logging.getLogger("fastness.refusals")
_refusals.addFilter(RateLimitFilter(per_second=20))  # Token guessing must not fill the disk with log lines.

_POLL_SECONDS_SHARED: Final = 1.0  # Bounds the delay of another server's revocation if its notification is lost.
_POLL_SECONDS: Final = 60.0  # An embedded key space has one writer; polling only corrects the clock skew.
_HEADER_CHARACTERS_MAX: Final = 256
_QUEUE_NOUNS: Final = ("queue:", "sqs:")

OnEvent = Callable[[str], None]
OnRefusal = Callable[[Authorizer, Request[Any], FastnessError], None]


def check_bind(host: str, *, tokens_on: bool, tls: bool, insecure: bool) -> None:
    """Return if a server may listen at `host`.

    Raises:
        InvalidArgument: it is not a loopback address, and tokens or TLS are off.
    """
    if is_loopback(host):
        return
    if not tokens_on:
        raise InvalidArgument(
            f"{host} is not a loopback address: it is refused unless tokens are on. Create a token with "
            "`fastness token create --universe u --allow queue:put,queue:receive --ttl 30d` and serve with --tokens"
        )
    if not tls and not insecure:
        raise InvalidArgument(
            f"{host} is not a loopback address: it is refused without TLS, because tokens and messages would cross the "
            "network unencrypted. Give --tls-cert and --tls-key, or --insecure if a proxy encrypts the traffic"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name that needs a DNS lookup counts as reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def make_authenticator(
    transport: ServerTransport,
    *,
    tokens_on: bool,
    rejected: OnEvent | None = None,
    ended: OnEvent | None = None,
    refused: OnRefusal | None = None,
) -> Authenticator:
    """The authenticator of a server: with tokens, or for a loopback address without them. Start a token one."""
    if not tokens_on:
        return Loopback(transport.services.quotas)
    return TokenAuthenticator(transport, rejected=rejected, ended=ended, refused=refused)


class Loopback(NoAuthentication):
    """Admits every process on this machine, except web pages of other sites.

    Browsers let any web page call a loopback address. The Origin header names the page's site, and the Host header
    shows the name that a page used for DNS rebinding.
    """

    def authenticate(self, headers: Mapping[str, str], client: str) -> Authorizer:
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and not is_loopback(_hostname(origin)):
            _refusals.warning("refused: a web page of %s called a server without tokens", origin[:100])
            raise NotAllowed("A web page may not call a server without tokens; serve with --tokens")
        if host and not _is_address(_hostname(f"//{host}")):
            _refusals.warning("refused: a server without tokens was called by the host name %s", host[:100])
            raise NotAllowed("A server without tokens accepts localhost and IP addresses as Host, not host names")
        return super().authenticate(headers, client)


class TokenAuthenticator:
    """Authenticates callers by their tokens. Start it before the first `authenticate`, on the same event loop."""

    def __init__(
        self,
        transport: ServerTransport,
        *,
        rejected: OnEvent | None = None,
        ended: OnEvent | None = None,
        refused: OnRefusal | None = None,
    ) -> None:
        """`rejected` is called with the reason of a refusal, `ended` with the id of a token that became unusable,
        `refused` with a request that a usable token does not allow.
        """
        self._database = transport.services.database
        self.quotas = transport.services.quotas
        self._shared: bool = transport.services.shared
        self._clock = transport.services.clock or SystemClock()
        self._rejected = rejected or _ignore
        self._ended = ended or _ignore
        self._refused = refused
        self._skew_ms = 0  # Clock of the key space minus clock of this machine.
        self._tokens: dict[str, _CheckedToken] = {}
        self._watching: asyncio.Task[None] | None = None
        self.on_start: Callable[[list[Token]], None] | None = None  # Called with all tokens before the first caller.

    async def start(self) -> None:
        """Load every token, then keep them up to date in a background task."""
        self._watch = tokens.watch(self._database)
        await self._load()
        if self.on_start is not None:
            self.on_start([each.token for each in self._tokens.values()])
        self._watching = asyncio.get_running_loop().create_task(self._keep_loading())
        if not self._tokens:
            _log.warning(
                "tokens are on and none exists; stop the server, then run: "
                "fastness --url DATA token create admin --universe '*' --allow '*'"
            )

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watch.close()

    def now_ms(self) -> int:
        """The time by the clock of the key space."""
        return self._clock.now_ms() + self._skew_ms

    def authenticate(self, headers: Mapping[str, str], client: str) -> "TokenAuthorizer":
        scheme, _, token = headers.get("authorization", "")[:_HEADER_CHARACTERS_MAX].partition(" ")
        parts = split_token(token.strip()) if scheme.lower() == "bearer" else None
        try:
            if parts is None:
                raise NotAllowed(
                    "Send a token: Authorization: Bearer fnt_…; create one with "
                    "`fastness token create NAME --allow VERBS`"
                )
            id, secret = parts
            known = self._tokens.get(id)
            digest = hashlib.sha256(secret.encode()).digest()
            tokens.check(None if known is None else known.token, digest, self.now_ms())
        except NotAllowed as error:
            self._refuse("token", error, parts[0] if parts else "-", client)
            raise
        return TokenAuthorizer(self, id, client)

    def known_token(self, id: str) -> Token | None:
        """The token with this id, usable or not; None if there is none."""
        found = self._tokens.get(id)
        return None if found is None else found.token

    def authorizer_of(self, id: str, client: str) -> "TokenAuthorizer":
        """The authorizer of a caller that has proved to hold the token with this id."""
        return TokenAuthorizer(self, id, client)

    def report_signature(self, reason: str, message: str, access_key: str, client: str) -> None:
        """Count and log a request that is not signed as it must be."""
        self._refuse(reason, NotAllowed(message), access_key, client, "sqs")

    def usable_token(self, id: str, client: str) -> "_CheckedToken":
        """The token with this id.

        Raises:
            NotAllowed: it was revoked, removed or has expired.
        """
        token = self._tokens.get(id)
        try:
            if token is None:
                raise NotAllowed(f"The token {id} was removed; create another")
            tokens.check_usable(token.token, self.now_ms())
        except NotAllowed as error:
            self._refuse("token", error, id, client)
            raise
        return token

    def report_refusal(self, error: FastnessError, authorizer: "TokenAuthorizer", asked: Request[Any] | str) -> None:
        """Count and log a refused request or verb."""
        operation = asked if isinstance(asked, str) else permission_of(type(asked))
        self._refuse(error.code, error, authorizer.name, authorizer.client, operation)
        if self._refused is not None and not isinstance(asked, str):
            self._refused(authorizer, asked, error)

    def _refuse(self, reason: str, error: FastnessError, id: str, client: str, operation: str = "-") -> None:
        self._rejected(reason)
        _refusals.warning(
            "refused: %s",
            error,
            extra={"code": error.code, "reason": reason, "token": id, "client": client, "asked": operation},
        )

    async def _load(self) -> None:
        # Tier IMPORTANT waits for no sync, so a revocation takes effect here before its own caller gets the answer.
        now_ms, found = await self._database.read_async(tokens.known, tier=Tier.IMPORTANT)
        self._skew_ms = now_ms - self._clock.now_ms()
        before, found_now = self._tokens, dict[str, _CheckedToken]()
        for token in found:
            old = before.get(token.id)
            # An unchanged token keeps its rate limiter.
            found_now[token.id] = old if old is not None and old.token == token else _CheckedToken(token)
        for checked in found_now.values():
            checked.rates = list(_rates_of(checked, found_now))
        self._tokens = found_now
        for id, old in before.items():
            new = found_now.get(id)
            if new is None or (new is not old and not new.token.usable_at(now_ms)):
                self._ended(id)

    async def _keep_loading(self) -> None:
        pause = _POLL_SECONDS_SHARED if self._shared else _POLL_SECONDS
        is_behind = False  # The watch fired once for a change that could not be read yet.
        while True:
            try:
                if not is_behind:
                    await self._watch.wait_async(pause)
                is_behind = True
                await self._load()
                is_behind = False
            except Closed:
                return
            except Exception as error:  # Keep running: otherwise revoked tokens would stay valid.
                _log.error("tokens could not be read; the last known ones stay in force: %s", error, exc_info=error)
                await asyncio.sleep(_POLL_SECONDS_SHARED)


class TokenAuthorizer(Authorizer):
    """Authorizes the holder of one token."""

    def __init__(self, authenticator: TokenAuthenticator, id: str, client: str) -> None:
        self.name = id
        self.client = client
        self._authenticator = authenticator

    @property
    def holder(self) -> str:
        """The name of the token. Raises NotAllowed if it was revoked or has expired."""
        return self._authenticator.usable_token(self.name, self.client).token.name

    def authorize(self, request: Request[Any]) -> None:
        """Return if the token allows this request now.

        Raises:
            NotAllowed: the token does not allow it, was revoked or has expired.
            Busy: the token has used up its rate limit.
            QuotaExceeded: the universe has used up its rate.
            PayloadTooLarge: the request is larger than the token allows.
        """
        checked = self._authenticator.usable_token(self.name, self.client)
        try:
            checked.check_rate()
            checked.check_size(request)
            checked.check(request)
            self._authenticator.quotas.check_rate(request)
        except FastnessError as error:
            self._authenticator.report_refusal(error, self, request)
            raise

    @property
    def only_universe(self) -> str | None:
        universes = self._authenticator.usable_token(self.name, self.client).token.universes
        return universes[0] if len(universes) == 1 and universes[0] != EVERYTHING else None

    @property
    def token_id(self) -> str:
        return self.name

    def check_allowed(self, request: Request[Any]) -> None:
        """`authorize` without counting against the rate limit.

        Raises:
            NotAllowed: the token does not allow it, was revoked or has expired.
        """
        checked = self._authenticator.usable_token(self.name, self.client)
        try:
            checked.check(request)
        except NotAllowed as error:
            self._authenticator.report_refusal(error, self, request)
            raise

    def authorize_body(self, size: int) -> None:
        """Return if the token allows a body of `size` bytes.

        Raises:
            NotAllowed: it was revoked or has expired.
            PayloadTooLarge: the body is larger than the token allows.
        """
        checked = self._authenticator.usable_token(self.name, self.client)
        most = checked.token.body_bytes_max
        if most is not None and size > most:
            error = PayloadTooLarge(
                f"The body has at least {size} bytes and the token {checked.token.name} allows {most}"
            )
            self._authenticator.report_refusal(error, self, "body")
            raise error

    @property
    def token(self) -> Token:
        """The stored token. Raises NotAllowed if it was revoked or has expired."""
        return self._authenticator.usable_token(self.name, self.client).token

    def is_allowed(self, request: Request[Any] | str) -> bool:
        """Whether the token allows a request, or a verb in every universe and queue. A refusal is not logged."""
        checked = self._authenticator.usable_token(self.name, self.client)
        try:
            if isinstance(request, str):
                checked.check_everywhere(request)
            else:
                checked.check(request)
        except NotAllowed:
            return False
        return True

    def authorize_verb(self, verb: str) -> None:
        """Return if the token allows `verb` in every universe and queue; raise NotAllowed otherwise."""
        checked = self._authenticator.usable_token(self.name, self.client)
        try:
            checked.check_everywhere(verb)
        except NotAllowed as error:
            self._authenticator.report_refusal(error, self, verb)
            raise


class _CheckedToken:
    """A token with its rate limiter and a cache of checked request types."""

    def __init__(self, token: Token) -> None:
        self.token = token
        self._verbs = frozenset(token.verbs)
        self._universes = None if EVERYTHING in token.universes else frozenset(token.universes)
        self._queues = frozenset(queue for queue in token.queues if not queue.endswith(EVERYTHING))
        self._queue_prefixes = tuple(queue[:-1] for queue in token.queues if queue.endswith(EVERYTHING))
        self._covered: set[type[Request[Any]]] = set()  # Request types that are known to be allowed.
        self.rate = None if token.rate_per_second is None else _TokenRate(token.name, token.rate_per_second)
        self.rates: list[_TokenRate] = []  # Its own, and those of the tokens that it comes from.

    def check_rate(self) -> None:
        for rate in self.rates:
            rate.check()
        for rate in self.rates:  # A call that is refused counts for none of them.
            rate.count()

    def check_size(self, request: Request[Any]) -> None:
        most = self.token.body_bytes_max
        if most is not None and (size := len(msgspec.msgpack.encode(request))) > most:
            raise PayloadTooLarge(f"The call has {size} bytes and the token {self.token.name} allows {most}")

    def check(self, request: Request[Any]) -> None:
        if isinstance(request, CommitAtomic):
            for step in request.operations:  # Each operation must be allowed.
                self.check(step)
            return
        kind = type(request)
        if kind.operation.any_token:
            return
        if kind not in self._covered:
            self.check_verb(permission_of(kind))
            self._covered.add(kind)
        if isinstance(request, ReceiveMessages) and request.acks:
            self.check_verb(permission_of(AckMessages))
        if self._universes is not None:
            self.check_universes(() if kind.operation.all_universes else tuple(universes_of(request)))
        if self.token.queues:
            self.check_queues(request)
        if isinstance(request, CreateToken):
            for verb in request.verbs:  # Its other limits are checked in the transaction that creates it.
                self.check_verb(verb.strip().lower())

    def check_everywhere(self, verb: str) -> None:
        """Check that the token allows a verb in every universe and queue."""
        self.check_verb(verb)
        self.check_universes(())
        if self.token.queues:
            raise NotAllowed(f"The token {self.token.name} is not for all queues; create one without --queue")

    def check_verb(self, verb: str) -> None:
        if not covers(self._verbs, verb):
            raise NotAllowed(f"The token {self.token.name} does not allow {verb}; create one with --allow {verb}")

    def check_queues(self, request: Request[Any]) -> None:
        """Check that the token is for every queue that a request reaches."""
        operation = request.operation
        names = request.queue_names()
        if operation.lists_queues and not names:
            return  # Its answer is limited to the queues of the token.
        # A request of queues that names none reaches all of them.
        if operation.all_queues or (not names and permission_of(type(request)).startswith(_QUEUE_NOUNS)):
            names = (EVERYTHING,)
        for name in names:
            if name not in self._queues and not name.startswith(self._queue_prefixes):
                other = "all queues" if name == EVERYTHING else f"the queue {name[:128]}"
                raise NotAllowed(f"The token {self.token.name} is not for {other}; create one with --queue")

    def check_universes(self, universes: tuple[str, ...]) -> None:
        """Check access to `universes`; no universes means all of them."""
        if self._universes is not None and not (universes and self._universes.issuperset(universes)):
            other = next((name for name in universes if name not in self._universes), "every universe")
            raise NotAllowed(f"The token {self.token.name} is not for {other[:128]}; create one with --universe")


class _TokenRate:
    """The calls that a token, and all that come from it, have left."""

    def __init__(self, name: str, per_second: float) -> None:
        self.per_second = per_second
        self._name = name
        self._left = self._burst = max(per_second, 1.0)  # A burst of one second's worth.
        self._counted = monotonic()

    def check(self) -> None:
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._counted) * self.per_second)
        self._counted = now
        if self._left < 1:
            seconds = (1 - self._left) / self.per_second
            error = Busy(
                f"The token {self._name}, with those that it created, is limited to {self.per_second:g} calls per "
                f"second; wait for {seconds:.3f} s"
            )
            error.retry_after_seconds = seconds
            raise error

    def count(self) -> None:
        self._left -= 1


def _rates_of(token: _CheckedToken, tokens: Mapping[str, _CheckedToken]) -> Iterator[_TokenRate]:
    """The limits of a token and of those that it comes from. One that is not below the next is never reached first."""
    maker: _CheckedToken | None = token
    lowest: _TokenRate | None = None
    while maker is not None:
        if maker.rate is not None:
            if lowest is not None and lowest.per_second < maker.rate.per_second:
                yield lowest
            lowest = maker.rate
        maker = tokens.get(maker.token.maker)
    if lowest is not None:
        yield lowest


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host == "localhost" or host.endswith(".localhost")


def _ignore(value: str) -> None:
    del value
