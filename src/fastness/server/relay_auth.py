"""Authentication of the relay's agents, by key or by token."""

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fastness.encryption import checked_public_key
from fastness.errors import AgentExists, InvalidArgument, NotAllowed
from fastness.runtime.relay.session import Authorize
from fastness.server.authorization import Authenticator
from fastness.server.logs import RateLimitFilter
from fastness.server.transport import ServerTransport
from fastness.wire.agents import GetAgent, RegisterAgent
from fastness.wire.mail import ConfirmMail, JoinMailbox, LeaveMailbox, ReadMail, ReadReceipts
from fastness.wire.relay import Authenticate, split_address

_refusals = logging.getLogger("fastness.relay.refusals")
_refusals.addFilter(RateLimitFilter(per_second=20))  # Key guessing must not fill the disk with log lines.


class AuthenticatedAgent(NamedTuple):
    """An agent, and what it may do."""

    universe: str
    agent: str
    authorize: Authorize | None
    caller: str  # Name of the token; empty for an agent that authenticated with its key.


class RelayAuthenticator:
    """Authenticates agents by the answer to their challenge."""

    def __init__(
        self,
        transport: ServerTransport,
        tokens: Authenticator | None,
        *,
        registration: Literal["open", "closed"],
        rejected: Callable[[str], None],
    ) -> None:
        """`tokens` is None if the server has none; `rejected` is called with the reason of a refusal."""
        self._transport = transport
        self._tokens = tokens
        self._registration = registration
        self._rejected = rejected

    async def authenticate(self, frame: Authenticate, proof: bytes, client: str) -> AuthenticatedAgent:
        """The agent that answered a challenge; `proof` is the bytes that it had to sign.

        Raises:
            NotAllowed: the key or token does not belong to the agent.
            InvalidArgument, InvalidName: the frame has no proof, or no valid address.
        """
        universe, agent = split_address(frame.address)
        try:
            if frame.token is not None:
                return self._by_token(frame.token, universe, agent, client)
            if frame.public_key is None or frame.signature is None:
                raise InvalidArgument("Authenticate: sign the challenge (public_key, signature), or send a token")
            await self._check_key(universe, agent, bytes(frame.public_key), frame.signature, proof)
        except NotAllowed as error:
            self._rejected("relay")
            extra = {"code": error.code, "reason": "relay", "client": client, "asked": f"{agent}@{universe}"}
            _refusals.warning("refused: %s", error, extra=extra)
            raise
        return AuthenticatedAgent(universe, agent, None, "")

    def _by_token(self, token: str, universe: str, agent: str, client: str) -> AuthenticatedAgent:
        if self._tokens is None:
            raise NotAllowed("This server has no tokens; sign the challenge with the agent's key")
        authorizer = self._tokens.authenticate({"authorization": f"Bearer {token}"}, client)
        for request in (
            LeaveMailbox(agent, "", universe),
            ReadMail(agent, universe=universe),
            ConfirmMail(agent, [], universe),
            ReadReceipts(agent, universe=universe),
        ):
            authorizer.check_allowed(request)
        authorizer.authorize(JoinMailbox(agent, "", universe))
        return AuthenticatedAgent(universe, agent, authorizer.authorize, authorizer.name)

    async def _check_key(self, universe: str, agent: str, key: bytes, signature: bytes, proof: bytes) -> None:
        address = f"{agent}@{universe}"
        # One message for all causes, so that a stranger cannot find out which agents are registered.
        refusal = NotAllowed(f"The signature is not valid for {address}: sign protocol, host and nonce with its key")
        try:
            Ed25519PublicKey.from_public_bytes(checked_public_key(key)).verify(signature, proof)
        except (InvalidSignature, InvalidArgument, ValueError):
            raise refusal from None
        known = (await self._transport.call(GetAgent(agent, universe))).agent
        if known is not None and known.public_key is not None:
            if known.public_key != key:
                raise refusal
        elif self._registration == "closed":
            raise refusal
        else:
            try:
                await self._transport.call(RegisterAgent(agent, key, universe=universe))
            except AgentExists:  # Registered concurrently.
                raise refusal from None
