"""Who may come in: tokens, and the addresses at which none is asked for.

Guards have every token in memory, so whoever tries tokens at random costs no read. A watch on the key space brings what
is made or revoked, by this server or by another one; where servers share a PostgreSQL, a look every second catches what
a notification that was lost would have told. What a token allows is looked at with every call, not only when a
connection begins: a token that was revoked is refused at its next call.
"""

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from holdfast.clock import SystemClock
from holdfast.errors import Busy, Closed, HoldfastError, InvalidArgument, NotAllowed, PayloadTooLarge
from holdfast.plane import tokens
from holdfast.plane.tokens import Token
from holdfast.server.authorization import Guard, Guards, Open
from holdfast.server.logs import Sparing
from holdfast.tiers import Tier
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.requests import Request
from holdfast.wire.tokens import EVERYTHING, CreateToken, covers, split_token, universes_of, verb_of

_log = logging.getLogger("holdfast.tokens")
_refusals = logging.getLogger("holdfast.refusals")
_refusals.addFilter(Sparing(per_second=20))  # Whoever tries tokens must not fill the disk with what we say about it.

_LOOK_SECONDS_SHARED: Final = 1.0  # How long another server's revocation may go unnoticed if its notification is lost.
_LOOK_SECONDS: Final = 60.0  # Nobody else writes to an embedded key space; this only sets the clock right.
_HEADER_CHARACTERS_MAX: Final = 256

Told = Callable[[str], None]


def check_bind(host: str, *, tokens_on: bool, tls: bool, insecure: bool) -> None:
    """Return if a server may listen at `host`.

    Raises:
        InvalidArgument: it is not a loopback address, and tokens or TLS are off.
    """
    if is_loopback(host):
        return
    if not tokens_on:
        raise InvalidArgument(
            f"{host} is not a loopback address: it is refused unless tokens are on. Create one "
            "(holdfast token create --universe u --allow queue:put,queue:receive --ttl 30d) and serve with --tokens"
        )
    if not tls and not insecure:
        raise InvalidArgument(
            f"{host} is not a loopback address: without TLS it is refused, because tokens and messages could be read "
            "on the way. Give --tls-cert and --tls-key, or --insecure if something else encrypts"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name that somebody would have to look up counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def choose_guards(
    transport: Any, *, tokens_on: bool, rejected: Told | None = None, ended: Told | None = None
) -> Guards:
    """The guards of a server: of tokens, or of a loopback address without any. `start` them if they have a start."""
    return TokenGuards(transport, rejected=rejected, ended=ended) if tokens_on else Loopback()


class Loopback(Open):
    """Lets everybody on this machine in, except web pages.

    A browser lets any page in the world speak to a loopback address. It says where the page is from, and a page that
    came under a borrowed name shows by the name that it asks for.
    """

    def admit(self, headers: Mapping[str, str], client: str) -> Guard:
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and not is_loopback(_hostname(origin)):
            _refusals.warning("refused: a web page of %s called a server that has no tokens", origin[:100])
            raise NotAllowed("A web page may not call a server without tokens; turn them on")
        if host and not _is_address(_hostname(f"//{host}")):
            _refusals.warning("refused: a server without tokens was called by the name %s", host[:100])
            raise NotAllowed("A server without tokens answers to localhost and to addresses, not to names")
        return super().admit(headers, client)


class TokenGuards:
    """Knows every token. Start it before the first `admit`, on the event loop that will ask."""

    def __init__(self, transport: Any, *, rejected: Told | None = None, ended: Told | None = None) -> None:
        """`rejected` is told why somebody was refused, `ended` which token cannot be used any more."""
        self._database = transport.services.database
        self._shared: bool = transport.services.shared
        self._clock = transport.services.clock or SystemClock()
        self._rejected = rejected or _nobody
        self._ended = ended or _nobody
        self._skew_ms = 0  # The key space may have another clock than this machine.
        self._passes: dict[str, _Pass] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn every token, and keep learning."""
        self._watch = tokens.watch(self._database)
        await self._learn()
        self._watching = asyncio.get_running_loop().create_task(self._keep_learning())
        if not self._passes:
            _log.warning("tokens are on and there is none; stop the server, then: holdfast token create")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watch.close()

    def now_ms(self) -> int:
        """The time of the key space."""
        return self._clock.now_ms() + self._skew_ms

    def admit(self, headers: Mapping[str, str], client: str) -> "TokenGuard":
        kind, _, shown = headers.get("authorization", "")[:_HEADER_CHARACTERS_MAX].partition(" ")
        parts = split_token(shown.strip()) if kind.lower() == "bearer" else None
        try:
            if parts is None:
                raise NotAllowed("Show a token: Authorization: Bearer hft_…; holdfast token create makes one")
            id, secret = parts
            known = self._passes.get(id)
            digest = hashlib.sha256(secret.encode()).digest()
            tokens.check(None if known is None else known.token, digest, self.now_ms())
        except NotAllowed as error:
            self._refuse("token", error, parts[0] if parts else "-", client)
            raise
        return TokenGuard(self, id, client)

    def check(self, id: str, client: str) -> "_Pass":
        """What a token allows now.

        Raises:
            NotAllowed: it was revoked, or its time is over.
        """
        held = self._passes.get(id)
        try:
            if held is None:
                raise NotAllowed(f"The token {id} was removed; ask for another")
            tokens.check_usable(held.token, self.now_ms())
        except NotAllowed as error:
            self._refuse("token", error, id, client)
            raise
        return held

    def refuse(self, reason: str, error: HoldfastError, guard: "TokenGuard", asked: str) -> None:
        """Count and log that a call was refused."""
        self._refuse(reason, error, guard.name, guard.client, asked)

    def _refuse(self, reason: str, error: HoldfastError, id: str, client: str, asked: str = "-") -> None:
        self._rejected(reason)
        _refusals.warning(
            "refused: %s",
            error,
            extra={"code": error.code, "reason": reason, "token": id, "client": client, "asked": asked},
        )

    async def _learn(self) -> None:
        # IMPORTANT: this waits for no sync, so a revocation is known here before its own caller hears of it.
        now_ms, found = await self._database.read_async(tokens.known, tier=Tier.IMPORTANT)
        self._skew_ms = now_ms - self._clock.now_ms()
        before, passes = self._passes, dict[str, _Pass]()
        for token in found:
            old = before.get(token.id)
            # The same one, with what it has used of its rate, unless something has changed.
            passes[token.id] = old if old is not None and old.token == token else _Pass(token)
        self._passes = passes
        for id, old in before.items():
            new = passes.get(id)
            if new is None or (new is not old and not new.token.usable_at(now_ms)):
                self._ended(id)

    async def _keep_learning(self) -> None:
        pause = _LOOK_SECONDS_SHARED if self._shared else _LOOK_SECONDS
        is_behind = False  # The watch has told of something that could not be read yet, and will not tell again.
        while True:
            try:
                if not is_behind:
                    await self._watch.wait_async(pause)
                is_behind = True
                await self._learn()
                is_behind = False
            except Closed:
                return
            except Exception as error:  # Whatever it is: guards that stopped to learn would let the revoked in.
                _log.error("tokens could not be read, and the last known ones hold: %s", error, exc_info=error)
                await asyncio.sleep(_LOOK_SECONDS_SHARED)


class TokenGuard:
    """Stands for whoever showed a token."""

    __slots__ = ("_guards", "client", "name")

    def __init__(self, guards: TokenGuards, id: str, client: str) -> None:
        self.name = id
        self.client = client
        self._guards = guards

    @property
    def holder(self) -> str:
        """The name of the token. Raises NotAllowed if it was revoked, or its time is over."""
        return self._guards.check(self.name, self.client).token.name

    def allow(self, request: Request[Any]) -> None:
        """Return if the token allows this now.

        Raises:
            NotAllowed: it does not, or was revoked, or its time is over.
            Busy: it has made as many calls as it may; come back later.
            PayloadTooLarge: the request is larger than the token allows.
        """
        held = self._guards.check(self.name, self.client)
        try:
            held.check_rate()
            held.check_size(request)
            held.check(request)
        except HoldfastError as error:
            self._guards.refuse(error.code, error, self, verb_of(type(request)))
            raise

    def check(self, request: Request[Any]) -> None:
        """`allow`, for what is not done yet: it does not count as a call.

        Raises:
            NotAllowed: the token does not allow it, or was revoked, or its time is over.
        """
        held = self._guards.check(self.name, self.client)
        try:
            held.check(request)
        except NotAllowed as error:
            self._guards.refuse(error.code, error, self, verb_of(type(request)))
            raise

    def allow_body(self, size: int) -> None:
        """Return if the token allows a body of so many bytes, beside the request that it came with or as all of it.

        Raises:
            NotAllowed: it was revoked, or its time is over.
            PayloadTooLarge: the body is larger than the token allows.
        """
        held = self._guards.check(self.name, self.client)
        most = held.token.body_bytes_max
        if most is not None and size > most:
            error = PayloadTooLarge(f"The body has at least {size} bytes and the token {held.token.name} allows {most}")
            self._guards.refuse(error.code, error, self, "body")
            raise error

    @property
    def token(self) -> Token:
        """What is known of the token. Raises NotAllowed if it was revoked, or its time is over."""
        return self._guards.check(self.name, self.client).token

    def may(self, request: Request[Any] | str) -> bool:
        """Whether the token allows a request, or a verb in every universe; nobody is told of a refusal."""
        held = self._guards.check(self.name, self.client)
        try:
            if isinstance(request, str):
                held.check_verb(request)
                held.check_universes(())
            else:
                held.check(request)
        except NotAllowed:
            return False
        return True

    def permit(self, verb: str) -> None:
        """Return if the token allows a verb that no request stands for, in every universe; raise NotAllowed if not."""
        held = self._guards.check(self.name, self.client)
        try:
            held.check_verb(verb)
            held.check_universes(())
        except NotAllowed as error:
            self._guards.refuse(error.code, error, self, verb)
            raise


class _Pass:
    """A token as it is looked at with every call."""

    def __init__(self, token: Token) -> None:
        self.token = token
        self._verbs = frozenset(token.verbs)
        self._universes = None if EVERYTHING in token.universes else frozenset(token.universes)
        self._covered: set[type[Request[Any]]] = set()  # Requests that were found to be allowed.
        self._rate = token.rate_per_second
        self._left = self._burst = max(self._rate or 1.0, 1.0)  # A second's worth may come at once.
        self._counted = monotonic()

    def check_rate(self) -> None:
        if self._rate is None:
            return
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._counted) * self._rate)
        self._counted = now
        if self._left < 1:
            raise Busy(f"The token {self.token.name} may make {self._rate:g} calls a second; slow down")
        self._left -= 1

    def check_size(self, request: Request[Any]) -> None:
        most = self.token.body_bytes_max
        if most is not None and (size := len(msgspec.msgpack.encode(request))) > most:
            raise PayloadTooLarge(f"The call has {size} bytes and the token {self.token.name} allows {most}")

    def check(self, request: Request[Any]) -> None:
        if isinstance(request, CommitAtomic):
            for step in request.operations:  # Together they may do what each of them may.
                self.check(step)
            return
        kind = type(request)
        if kind not in self._covered:
            self.check_verb(verb_of(kind))
            self._covered.add(kind)
        if self._universes is not None:
            self.check_universes(tuple(universes_of(request)))
        if isinstance(request, CreateToken):
            for verb in request.verbs:  # Nobody makes a token that may do more than their own.
                self.check_verb(verb.strip().lower())

    def check_verb(self, verb: str) -> None:
        if not covers(self._verbs, verb):
            raise NotAllowed(f"The token {self.token.name} does not allow {verb}; create one with --allow {verb}")

    def check_universes(self, universes: tuple[str, ...]) -> None:
        """What names no universe concerns them all."""
        if self._universes is not None and not (universes and self._universes.issuperset(universes)):
            other = next((name for name in universes if name not in self._universes), "every universe")
            raise NotAllowed(f"The token {self.token.name} is not for {other[:128]}; create one with --universe")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host == "localhost" or host.endswith(".localhost")


def _nobody(what: str) -> None:
    """Nobody wants to be told."""
    del what
