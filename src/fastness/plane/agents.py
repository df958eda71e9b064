"""Handlers of agent requests."""

from fastness.kv import Transaction
from fastness.layers import agents
from fastness.names import checked_agent, checked_name
from fastness.plane.handlers import transaction
from fastness.wire.agents import Agent, AgentsPage, FoundAgent, GetAgent, ListAgents, RegisterAgent


@transaction
def register(tx: Transaction, request: RegisterAgent) -> Agent:
    universe = checked_name("universe", request.universe)
    return agents.register(
        tx,
        universe,
        checked_agent(request.name, universe),
        public_key=request.public_key,
        world=None if request.world is None else checked_name("world", request.world),
        replace=request.replace,
    )


@transaction
def get(tx: Transaction, request: GetAgent) -> FoundAgent:
    universe = checked_name("universe", request.universe)
    return FoundAgent(agents.find(tx, universe, checked_agent(request.name, universe)))


@transaction
def page(tx: Transaction, request: ListAgents) -> AgentsPage:
    after = checked_name("agent", request.after) if request.after else ""
    return AgentsPage(agents.page(tx, checked_name("universe", request.universe), after=after, limit=request.limit))
