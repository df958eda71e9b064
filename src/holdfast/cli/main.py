"""`holdfast`: the root of all commands, its global options, and what happens when one fails."""

import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

import click

from holdfast import __version__
from holdfast.cli import exit_codes
from holdfast.cli.commands import Globals, Noun, Verb, global_options

# Where each command is; a file is loaded when its command is asked for.
_COMMANDS: Final = {
    "demo": "demo:demo",
    "serve": "serving:serve",
    "queue": "queues:queue",
    "mail": "mail:mail",
    "agent": "agents:agent",
    "lock": "leases:lock",
    "state": "states:state",
    "world": "worlds:world",
    "entity": "entities:entity",
    "blob": "blobs:blob",
    "activity": "activity:activity",
    "token": "tokens:token",
    "context": "contexts:context",
    "bench": "bench:bench",
    "backup": "backups:backup",
    "restore": "restores:restore",
    "migrate": "migrations:migrate",
    "doctor": "doctor:doctor",
    "pipeline": "pipeline:pipeline",
}
_ENVIRONMENT: Final = (
    ("HOLDFAST_URL, HOLDFAST_TOKEN, HOLDFAST_UNIVERSE, HOLDFAST_OBJECTS", "as the options of those names"),
    ("HOLDFAST_CA, HOLDFAST_CERT, HOLDFAST_KEY", "as the options of those names"),
    ("HOLDFAST_LAKE", "as --lake of `holdfast pipeline`"),
    ("HOLDFAST_CONTEXT", "the context to use, where nothing says a URL"),
    ("HOLDFAST_QUEUE_*, HOLDFAST_LOCK_KEY, …", "what `queue get`, `lock acquire` and `lock run` export"),
)


class Root(Noun):
    """All commands, and the one place where errors become words and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = _COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(f"holdfast.cli.{module}"), name)
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Environment"):
            formatter.write_dl(_ENVIRONMENT)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in exit_codes.MEANINGS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command that `args` name, and exit with its code."""
        del standalone_mode
        words = list(sys.argv[1:] if args is None else args)
        extra.setdefault("obj", Globals())
        try:
            code = super().main(
                words,
                prog_name or "holdfast",
                complete_var or "_HOLDFAST_COMPLETE",
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except (Exception, KeyboardInterrupt) as error:
            # Looked for in the words: a command line that is wrong was not understood so far.
            exit_codes.tell(error, as_json="--json" in takewhile(lambda word: word != "--", words))
            sys.exit(exit_codes.code_of(error))
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=Root, params=global_options(hidden=False), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast", message="%(prog)s %(version)s")
def root() -> None:
    """Holdfast: queues, locks, state and history for fleets of agents.

    Commands go to the server at --url, or straight to a data directory that nobody has open (--url dir:./data).
    Global options stand before the noun or behind the verb, as you like.
    """


@root.command(
    examples=[
        'eval "$(holdfast completion bash)"                     # in ~/.bashrc',
        'eval "$(holdfast completion zsh)"                      # in ~/.zshrc',
        "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
    ],
    cls=Verb,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands and options."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "holdfast", "_HOLDFAST_COMPLETE").source())


def main() -> NoReturn:
    """The entry point."""
    root.main()
