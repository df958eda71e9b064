"""`holdfast agent`: who is known by name, by which key, and which world takes their mail."""

from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli import connect, printing
from holdfast.cli.commands import Noun
from holdfast.encryption import AgentKey
from holdfast.errors import InvalidArgument, NotFound
from holdfast.limits import READ_ENTRIES_MAX
from holdfast.wire.agents import Agent

_KNOWN: Final = ("name", "public_key", "world", "registered_at")


@click.group(cls=Noun)
def agent() -> None:
    """Agents that are known by name."""


@agent.command(
    examples=[
        "holdfast agent register ada --key ada.key",
        "holdfast agent register planner --world plans",
    ]
)
@click.argument("name", metavar="AGENT")
@click.option("--key", "key_file", metavar="FILE", help="The file of the agent's secret key; made if it is not there.")
@click.option("--public-key", metavar="HEX", help="Its public key, if the secret one is elsewhere.")
@click.option("--world", help="Take the agent's mail into the inbox of this world.")
@click.option("--replace", is_flag=True, help="Give it another key than the one it has.")
def register(name: str, key_file: str | None, public_key: str | None, world: str | None, replace: bool) -> None:
    """Know an agent by name. What is not given stays as it is."""
    key = _public_key(key_file, public_key)
    with connect.opened() as plane:
        found = plane.agents.register(name, public_key=key, world=world, replace=replace)
    printing.record(_fields(found))


@agent.command()
@click.argument("name", metavar="AGENT")
def show(name: str) -> None:
    """One agent."""
    with connect.opened() as plane:
        found = plane.agents.get(name)
    if found is None:
        raise NotFound(f"{name} is not registered; holdfast agent register {name}")
    printing.record(_fields(found))


@agent.command("list")
@click.option("--after", default="", help="Begin behind this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """The agents that are registered."""
    with connect.opened() as plane:
        found = plane.agents.known(after=after, limit=limit)
    printing.rows([_fields(each) for each in found], _KNOWN, nothing="No agent is registered.")


def _public_key(key_file: str | None, public_key: str | None) -> bytes | None:
    if key_file is not None and public_key is not None:
        raise InvalidArgument("Give --key or --public-key, not both")
    if public_key is not None:
        try:
            return bytes.fromhex(public_key)
        except ValueError:
            raise InvalidArgument(f"{public_key!r} is no public key; give its 64 hex digits") from None
    if key_file is None:
        return None
    path = Path(key_file)
    if path.exists():
        return AgentKey.load(path).public_key
    key = AgentKey.generate()
    key.save(path)
    click.echo(f"A new key is in {path}; keep it where only the agent can read it.", err=True)
    return key.public_key


def _fields(found: Agent) -> dict[str, Any]:
    return {
        "name": found.name,
        "public_key": None if found.public_key is None else found.public_key.hex(),
        "world": found.world,
        "registered_at": printing.moment(found.registered_ms),
    }
