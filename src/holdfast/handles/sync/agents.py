"""Generated from handles/agents.py by tools/make_twins.py; change that file instead."""

from holdfast.wire import Transport
from holdfast.wire.agents import Agent, GetAgent, ListAgents, RegisterAgent


class Agents:
    """The agents of a universe that are known by name."""

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    def register(
        self, name: str, *, public_key: bytes | None = None, world: str | None = None, replace: bool = False
    ) -> Agent:
        """Know an agent by name; what is not given stays as it is.

        Args:
            public_key: the Ed25519 key that it proves itself with, 32 bytes.
            world: takes the agent's mail into its inbox from now on.
            replace: give it another key than the one it has.

        Raises:
            AgentExists: it has another key.
        """
        return self._transport.call(RegisterAgent(name, public_key, world, replace, self._universe))

    def get(self, name: str) -> Agent | None:
        """The agent of that name, or None."""
        return (self._transport.call(GetAgent(name, self._universe))).agent

    def known(self, *, after: str = "", limit: int = 100) -> list[Agent]:
        """At most `limit` agents in the order of their names."""
        return (self._transport.call(ListAgents(after, limit, self._universe))).agents
