"""The base classes of all commands: global options before or after the subcommand, aliases, examples in the help."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from fastness.cli import completion
from fastness.cli.completion import Find, Names
from fastness.cli.durations import SECONDS
from fastness.cli.given_options import GlobalOptions, given_options, wants_json

__all__ = ["CommandGroup", "GlobalOptions", "LeafCommand", "given_options", "global_options", "wants_json"]

_GLOBAL_OPTIONS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "--url",
        {"metavar": "URL", "help": "The plane: a server (http://HOST:9440), dir:PATH or postgresql://…"},
    ),
    ("--token", {"metavar": "TOKEN", "help": "Access token. Prefer FASTNESS_TOKEN, which does not show in `ps`."}),
    (
        "--universe",
        {
            "metavar": "NAME",
            "type": Names(completion.universes),
            "help": "The universe (tenant) to work in.  [default: main]",
        },
    ),
    (
        "--context",
        {
            "metavar": "NAME",
            "shell_complete": completion.contexts,
            "help": "Use the URL, token and universe of this saved context.",
        },
    ),
    ("--objects", {"metavar": "URL", "help": "The object store of a dir: or postgresql: plane, if not the default."}),
    ("--ca", {"metavar": "FILE", "help": "Trust server certificates issued by this CA."}),
    ("--cert", {"metavar": "FILE", "help": "The client certificate to present to the server."}),
    ("--key", {"metavar": "FILE", "help": "The private key of --cert."}),
    (
        "--patience",
        {
            "metavar": "SECONDS",
            "type": SECONDS,
            "help": "How long to retry while the server or directory is unavailable.  [default: 5]",
        },
    ),
    ("--json", {"is_flag": True, "default": None, "help": "Print JSON; errors are problem objects."}),
)


def global_options(*, hidden: bool) -> list[click.Parameter]:
    """The global options: shown for the root, hidden for every subcommand."""
    return [
        # The prefix avoids clashes with arguments of commands, such as `key`.
        click.Option(
            [f"global_{name[2:]}", name],
            expose_value=False,
            callback=_store_option,
            hidden=hidden and name != "--json",
            **attributes,
        )
        for name, attributes in _GLOBAL_OPTIONS
    ]


class LeafCommand(click.Command):
    """A command that also accepts the global options, and shows its aliases and examples in its help."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), aliases: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.aliases = aliases
        _add_global_options(self)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.aliases:
            with formatter.section("Aliases"):
                formatter.write(f"  {', '.join(self.aliases)}\n")
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")
        super().format_epilog(ctx, formatter)


class CommandGroup(click.Group):
    """A group of commands about one resource. Without a command, it prints its help."""

    command_class = LeafCommand
    group_class = type

    def __init__(self, *args: Any, completions: Mapping[str, Find] | None = None, **kwargs: Any) -> None:
        """`completions` finds the names that a shell completes, for the arguments and options called like its keys."""
        self.aliases: dict[str, str] = {}
        self.completions = completions or {}
        super().__init__(*args, **kwargs)
        _add_global_options(self)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        super().add_command(cmd, name)
        for parameter in cmd.params:
            if parameter.name in self.completions and parameter.type is click.STRING:
                parameter.type = Names(self.completions[parameter.name])
        if isinstance(cmd, LeafCommand):
            self.aliases |= dict.fromkeys(cmd.aliases, name or cmd.name or "")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            # click would raise the help as an error, which is printed to stderr as one paragraph.
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            names, singular = [*self.list_commands(ctx), *self.aliases], name.removesuffix("s")
            close = [singular] if singular in names else difflib.get_close_matches(name, names)
            hint = f". Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise click.UsageError(f"No such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.aliases:
            with formatter.section("Aliases"):
                formatter.write_dl([(alias, name) for alias, name in self.aliases.items()])
        super().format_epilog(ctx, formatter)


def _add_global_options(command: click.Command) -> None:
    own = {name for parameter in command.params for name in parameter.opts}
    command.params += [option for option in global_options(hidden=True) if not own & set(option.opts)]


def _store_option(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        ctx.find_root().ensure_object(GlobalOptions).values[parameter.opts[0][2:]] = value
