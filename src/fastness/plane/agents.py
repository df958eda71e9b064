"""Handlers of agent requests."""

from fastness.kv import Transaction
from fastness.layers import agents
from fastness.names import checked_agent
from fastness.plane.handlers import transaction
from fastness.wire.agents import Agent, AgentsPage, FoundAgent, GetAgent, ListAgents, RegisterAgent


@transaction
def register(tx: Transaction, request: RegisterAgent) -> Agent:
    return agents.register(
        tx,
        request.universe,
        checked_agent(request.name, request.universe),
        public_key=request.public_key,
        world=request.world,
        replace=request.replace,
    )


@transaction
def get(tx: Transaction, request: GetAgent) -> FoundAgent:
    return FoundAgent(agents.find(tx, request.universe, checked_agent(request.name, request.universe)))


@transaction
def page(tx: Transaction, request: ListAgents) -> AgentsPage:
    return AgentsPage(agents.page(tx, request.universe, after=request.after, limit=request.limit))
