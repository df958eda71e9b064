"""`fastness context`: several servers, by name."""

import click

from fastness.cli import completion, printing
from fastness.cli.commands import CommandGroup, given_options
from fastness.context_file import DEFAULT_URL, FIELDS, Context, Contexts, load, named_context, save
from fastness.errors import InvalidArgument
from fastness.names import checked_name

context = CommandGroup()


@context.command(examples=["fastness context add prod --url https://plane.example:9440 --token fnt_…"])
@click.argument("name")
@click.option("--use", is_flag=True, help="Make this the current context.")
def add(name: str, use: bool) -> None:
    """Save the given --url, --token and others as NAME.

    The others are --universe, --objects, --ca, --cert and --key.
    """
    name, stored = checked_name("context", name), load()
    fields = {field: given_options()[field] for field in FIELDS if given_options().get(field)}
    if "url" not in fields:
        raise InvalidArgument(f"Context {name} needs a URL; give --url, for example --url {DEFAULT_URL}")
    contexts = {**stored.contexts, name: Context(**fields)}
    current = name if use or stored.current is None else stored.current
    save(Contexts(current, contexts))
    printing.result(
        f"Saved context {name} for {fields['url']}; the current context is {current}",
        {"name": name, "current": current},
    )


@context.command("list")
def list_() -> None:
    """List the contexts, without their tokens."""
    stored = load()
    found = [
        {
            "name": name,
            "current": name == stored.current,
            "url": each.url,
            "universe": each.universe,
            "has_token": each.token is not None,
        }
        for name, each in sorted(stored.contexts.items())
    ]
    printing.rows(found, ("name", "current", "url", "universe", "has_token"), empty="No contexts.")


@context.command()
@click.argument("name", shell_complete=completion.contexts)
def use(name: str) -> None:
    """Make NAME the current context."""
    stored = load()
    named_context(stored, name)
    save(Contexts(name, stored.contexts))
    printing.result(f"The current context is {name}", {"current": name})


@context.command()
@click.argument("name", shell_complete=completion.contexts)
def delete(name: str) -> None:
    """Delete a context."""
    stored = load()
    named_context(stored, name)
    others = {each: about for each, about in stored.contexts.items() if each != name}
    save(Contexts(None if stored.current == name else stored.current, others))
    printing.result(f"Deleted context {name}", {"deleted": name})
