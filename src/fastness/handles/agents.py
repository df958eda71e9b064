"""Agents: registered names, with their keys and worlds."""

from fastness.handles.handle import AsyncHandle
from fastness.wire.agents import Agent, GetAgent, ListAgents, RegisterAgent


class AsyncAgents(AsyncHandle):
    """The registered agents of a universe."""

    async def register(
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
        return await self._transport.call(RegisterAgent(name, public_key, world, replace, self._universe))

    async def get(self, name: str) -> Agent | None:
        """The agent of that name, or None."""
        return (await self._transport.call(GetAgent(name, self._universe))).agent

    async def known(self, *, after: str = "", limit: int = 100) -> list[Agent]:
        """At most `limit` agents in the order of their names."""
        return (await self._transport.call(ListAgents(after, limit, self._universe))).agents
