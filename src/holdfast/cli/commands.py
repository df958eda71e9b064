"""What every command has: the global options, before the noun or behind the verb, and examples in its help."""

from collections.abc import Sequence
from typing import Any, Final

import click

from holdfast.cli.durations import SECONDS


def _context_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from holdfast.cli import contexts  # Which stands on this module.

    return contexts.complete(ctx, parameter, incomplete)


_GLOBALS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "--url",
        {"metavar": "URL", "help": "A server (http://HOST:9440), or a plane of its own: dir:PATH, postgresql://…"},
    ),
    ("--token", {"metavar": "TOKEN", "help": "What the server knows you by; HOLDFAST_TOKEN hides it better."}),
    ("--universe", {"metavar": "NAME", "help": "The tenant whose data is meant.  [default: main]"}),
    (
        "--context",
        {
            "metavar": "NAME",
            "shell_complete": _context_names,
            "help": "A context of `holdfast context list`, with URL, token and universe.",
        },
    ),
    ("--objects", {"metavar": "URL", "help": "Where the big bytes of a dir: or postgresql: plane are, if elsewhere."}),
    ("--ca", {"metavar": "FILE", "help": "Trust servers with certificates from this authority."}),
    ("--cert", {"metavar": "FILE", "help": "Show this certificate to the server."}),
    ("--key", {"metavar": "FILE", "help": "The private key of --cert."}),
    (
        "--patience",
        {
            "metavar": "SECONDS",
            "type": SECONDS,
            "help": "How long to try a server or folder that is busy.  [default: 5]",
        },
    ),
    ("--json", {"is_flag": True, "default": None, "help": "Print JSON, and errors as problem objects."}),
)


class Globals:
    """The global options of one command line, as far as they were given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}


def given() -> dict[str, Any]:
    """The global options that were given to the command that runs."""
    found: Globals = click.get_current_context().find_root().obj
    return found.given


def wants_json() -> bool:
    """Whether the command that runs is to print JSON."""
    return bool(given().get("json"))


def global_options(*, hidden: bool) -> list[click.Parameter]:
    """The global options, for the root and, hidden, for every command below it."""
    return [
        # Named apart from the arguments of commands, which have words like `key` too.
        click.Option(
            [f"global_{name[2:]}", name],
            expose_value=False,
            callback=_take,
            hidden=hidden and name != "--json",
            **about,
        )
        for name, about in _GLOBALS
    ]


class Verb(click.Command):
    """A command that takes the global options too, and shows examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        _add_globals(self)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")
        super().format_epilog(ctx, formatter)


class Noun(click.Group):
    """Commands about one thing."""

    command_class = Verb
    group_class = type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _add_globals(self)


def _add_globals(command: click.Command) -> None:
    own = {name for parameter in command.params for name in parameter.opts}
    command.params += [option for option in global_options(hidden=True) if not own & set(option.opts)]


def _take(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and not ctx.resilient_parsing:
        ctx.find_root().obj.given[parameter.opts[0][2:]] = value
