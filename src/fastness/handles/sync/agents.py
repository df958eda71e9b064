"""Generated from handles/agents.py by tools/make_twins.py; change that file instead."""

from fastness.handles.sync.handle import Handle
from fastness.wire.agents import Agent, GetAgent, ListAgents, RegisterAgent


class Agents(Handle):
    """The registered agents of a universe."""

    def register(
        self, name: str, *, public_key: bytes | None = None, world: str | None = None, replace: bool = False
    ) -> Agent:
        """Register an agent, or change its registration; arguments that are not given stay as they are.

        Args:
            public_key: the Ed25519 key that it authenticates with, 32 bytes.
            world: receives the agent's mail in its inbox from now on.
            replace: allow a different key than the registered one.

        Raises:
            AgentExists: it is registered with another key.
            InvalidArgument: the key has the wrong length, or is weak: signatures with it would prove nothing.
        """
        return self._transport.call(RegisterAgent(name, public_key, world, replace, self._universe))

    def get(self, name: str) -> Agent | None:
        """The agent of that name, or None."""
        return (self._transport.call(GetAgent(name, self._universe))).agent

    def known(self, *, after: str = "", limit: int = 100) -> list[Agent]:
        """At most `limit` agents in the order of their names."""
        return (self._transport.call(ListAgents(after, limit, self._universe))).agents
