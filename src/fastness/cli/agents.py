"""`fastness agent`: registered agents, with their public keys and the worlds that receive their mail."""

from pathlib import Path
from typing import Any

import click

from fastness.cli import completion, connect, printing
from fastness.cli.commands import CommandGroup
from fastness.cli.operations import operation
from fastness.encryption import AgentKey
from fastness.errors import InvalidArgument
from fastness.wire.agents import Agent, GetAgent, ListAgents


def _fields(found: Agent) -> dict[str, Any]:
    key = None if found.public_key is None else found.public_key.hex()
    return {**printing.fields(found), "public_key": key}


agent = CommandGroup(completions={"name": completion.agents, "world": completion.worlds})


@agent.command(
    examples=[
        "fastness agent register ada --key ada.key",
        "fastness agent register planner --world plans",
    ]
)
@click.argument("name", metavar="AGENT")
@click.option("--key", "key_file", metavar="FILE", help="The agent's secret key file. Created if it does not exist.")
@click.option("--public-key", metavar="HEX", help="The agent's public key, if the secret key is stored elsewhere.")
@click.option("--world", help="Deliver the agent's mail to this world's inbox.")
@click.option("--replace", is_flag=True, help="Replace the agent's existing key.")
def register(name: str, key_file: str | None, public_key: str | None, world: str | None, replace: bool) -> None:
    """Register an agent, or update it. Options that are not given keep their values."""
    key = _public_key(key_file, public_key)
    with connect.open_plane(create=True) as plane:
        found = plane.agents.register(name, public_key=key, world=world, replace=replace)
    printing.record(_fields(found))


operation(
    agent,
    "show",
    GetAgent,
    show=lambda found: _fields(found.agent),
    missing="Agent {name} is not registered; register it with: fastness agent register {name}",
)
operation(agent, "list", ListAgents, columns=("name", "public_key", "world", "registered_at"), show=_fields)


def _public_key(key_file: str | None, public_key: str | None) -> bytes | None:
    if key_file is not None and public_key is not None:
        raise InvalidArgument("Give --key or --public-key, not both")
    if public_key is not None:
        try:
            return bytes.fromhex(public_key)
        except ValueError:
            raise InvalidArgument(f"{public_key!r} is not a public key; give 64 hex digits") from None
    if key_file is None:
        return None
    path = Path(key_file)
    if path.exists():
        return AgentKey.load(path).public_key
    key = AgentKey.generate()
    key.save(path)
    click.echo(f"Created the secret key {path}; keep it where only the agent can read it.", err=True)
    return key.public_key
