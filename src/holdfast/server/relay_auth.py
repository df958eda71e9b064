"""Introductions: who an agent at the relay's door is, proved by its key or by a token."""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from holdfast.errors import AgentExists, InvalidArgument, NotAllowed
from holdfast.limits import AGENT_KEY_BYTES
from holdfast.runtime.relay.session import Allow
from holdfast.server.authorization import Guards
from holdfast.server.logs import Sparing
from holdfast.wire.agents import GetAgent, RegisterAgent
from holdfast.wire.mail import ConfirmMail, JoinMailbox, LeaveMailbox, ReadMail, ReadReceipts
from holdfast.wire.relay import Authenticate, split_address

_refusals = logging.getLogger("holdfast.relay.refusals")
_refusals.addFilter(Sparing(per_second=20))  # Whoever tries keys must not fill the disk with what we say about it.


class Introduced(NamedTuple):
    """An agent that has proved who it is."""

    universe: str
    agent: str
    allow: Allow | None
    caller: str  # The token that it came in with; empty for one that came with a key.


class Introductions:
    """Asks agents who they are."""

    def __init__(
        self,
        transport: Any,
        tokens: Guards | None,
        *,
        registration: Literal["open", "closed"],
        rejected: Callable[[str], None] | None = None,
    ) -> None:
        """`tokens` is None where there are none; `rejected` is told why somebody was refused."""
        self._transport = transport
        self._tokens = tokens
        self._registration = registration
        self._rejected = rejected

    async def introduce(self, frame: Authenticate, proof: bytes, client: str) -> Introduced:
        """Who has answered a challenge; `proof` is what they had to sign.

        Raises:
            NotAllowed: nobody, or not whom they say.
            InvalidArgument, InvalidName: this proves nothing, or names nobody.
        """
        universe, agent = split_address(frame.address)
        try:
            if frame.token is not None:
                return self._by_token(frame.token, universe, agent, client)
            if frame.public_key is None or frame.signature is None:
                raise InvalidArgument("Prove who you are: sign the challenge (public_key, signature), or show a token")
            await self._check_key(universe, agent, bytes(frame.public_key), frame.signature, proof)
        except NotAllowed as error:
            if self._rejected is not None:
                self._rejected("relay")
            about = {"code": error.code, "reason": "relay", "client": client, "asked": f"{agent}@{universe}"}
            _refusals.warning("refused: %s", error, extra=about)
            raise
        return Introduced(universe, agent, None, "")

    def _by_token(self, token: str, universe: str, agent: str, client: str) -> Introduced:
        if self._tokens is None:
            raise NotAllowed("This server has no tokens; sign the challenge with the agent's key")
        guard = self._tokens.admit({"authorization": f"Bearer {token}"}, client)
        check = getattr(guard, "check", guard.allow)
        for request in (
            LeaveMailbox(agent, "", universe),
            ReadMail(agent, universe=universe),
            ConfirmMail(agent, [], universe),
            ReadReceipts(agent, universe=universe),
        ):
            check(request)
        guard.allow(JoinMailbox(agent, "", universe))
        return Introduced(universe, agent, guard.allow, guard.name)

    async def _check_key(self, universe: str, agent: str, key: bytes, signature: bytes, proof: bytes) -> None:
        address = f"{agent}@{universe}"
        # What is wrong is not said: whoever has not proved who they are need not know who is registered.
        wrong = NotAllowed(f"This does not prove that you are {address}: sign protocol, host and nonce with its key")
        if len(key) != AGENT_KEY_BYTES:
            raise wrong
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, proof)
        except (InvalidSignature, ValueError):
            raise wrong from None
        known = (await self._transport.call(GetAgent(agent, universe))).agent
        if known is not None and known.public_key is not None:
            if known.public_key != key:
                raise wrong
        elif self._registration == "closed":
            raise wrong
        else:
            try:
                await self._transport.call(RegisterAgent(agent, key, universe=universe))
            except AgentExists:  # Somebody else was first.
                raise wrong from None
