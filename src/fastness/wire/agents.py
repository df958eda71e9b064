"""Agents: registered names, with the keys that authenticate them."""

import msgspec

from fastness.names import UNIVERSE
from fastness.wire.fields import Limit, Name, NameAfter
from fastness.wire.requests import Operation, Request, Route


class Agent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered agent: its signing key, and the world that receives its mail."""

    name: str
    public_key: bytes | None = None  # Ed25519, 32 bytes.
    world: str | None = None
    registered_ms: int = 0


class AgentsPage(msgspec.Struct, frozen=True):
    """Agents in the order of their names."""

    agents: list[Agent]


class FoundAgent(msgspec.Struct, frozen=True):
    """The agent of that name, if it is registered."""

    agent: Agent | None


class RegisterAgent(Request[Agent], frozen=True, tag="agents.register"):
    """Register an agent. A registered key is kept unless `replace` is set."""

    operation = Operation(
        stores=True,
        http=(Route("PUT", "/v1/agents/{name}", "Register an agent.", wrapper="agent", read_only=("registered_ms",)),),
    )

    name: str
    public_key: bytes | None = None
    world: Name | None = None
    replace: bool = False
    universe: Name = UNIVERSE


class GetAgent(Request[FoundAgent], frozen=True, tag="agents.get"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/agents/{name}", "Read the key of an agent, and the world that receives its mail."),),
    )

    name: str
    universe: Name = UNIVERSE


class ListAgents(Request[AgentsPage], frozen=True, tag="agents.list"):
    operation = Operation(reads=True, stale=True, http=(Route("GET", "/v1/agents", "List the registered agents."),))

    after: NameAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE
