"""The `fastness` command: the root of all subcommands, its global options, and its error handling."""

import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

import click

from fastness.cli import exit_codes
from fastness.cli.commands import CommandGroup, GlobalOptions, LeafCommand, global_options
from fastness.version import __version__

# The module and name of each command. A module is imported when its command is used.
_COMMANDS: Final = {
    "demo": "demo:demo",
    "serve": "serving:serve",
    "worker": "worker:worker",
    "host": "host:host",
    "queue": "queues:queue",
    "message": "messages:message",
    "mail": "mail:mail",
    "push": "push:push",
    "agent": "agents:agent",
    "lock": "leases:lock",
    "locks": "locks:locks",
    "state": "states:state",
    "world": "worlds:world",
    "workflows": "workflows:workflows",
    "effects": "effects:effects",
    "timers": "timers:timers",
    "entity": "entities:entity",
    "collections": "collections:collections",
    "blob": "blobs:blob",
    "activity": "activity:activity",
    "token": "tokens:token",
    "quota": "quotas:quota",
    "audit": "audit:audit",
    "context": "contexts:context",
    "bench": "bench:bench",
    "encryption": "encryption:encryption",
    "backup": "backups:backup",
    "restore": "restores:restore",
    "migrate": "migrations:migrate",
    "doctor": "doctor:doctor",
    "explain": "explain:explain",
    "status": "status:status",
    "top": "top:top",
    "nodes": "nodes:nodes",
    "upgrade": "nodes:upgrade",
    "mark-restored": "status:mark_restored",
    "gc": "space:gc",
    "space": "space:space",
    "mcp": "mcp:mcp",
    "pipeline": "pipeline:pipeline",
}
ENVIRONMENT: Final = (
    ("FASTNESS_URL, FASTNESS_TOKEN, FASTNESS_UNIVERSE, FASTNESS_OBJECTS", "defaults for the options of the same names"),
    ("FASTNESS_CA, FASTNESS_CERT, FASTNESS_KEY", "defaults for the options of the same names"),
    ("FASTNESS_ENCRYPTION_KEY_FILE, FASTNESS_ENCRYPTION_COMMAND", "the master keys of encrypted universes"),
    ("FASTNESS_LAKE", "default for --lake of `fastness pipeline`"),
    ("FASTNESS_LINEAGE, FASTNESS_LINEAGE_TOKEN", "where `fastness pipeline` sends OpenLineage events"),
    ("FASTNESS_CONTEXT", "the context to use if no URL is given"),
    ("FASTNESS_QUEUE_*, FASTNESS_LOCK_KEY, …", "exported by `queue get`, `lock acquire` and `lock run`"),
)


class Root(CommandGroup):
    """All commands, and the only place where errors become messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = _COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(f"fastness.cli.{module}"), name)
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Environment"):
            formatter.write_dl(ENVIRONMENT)
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
        """Run the command in `args`, and exit with its code."""
        del standalone_mode
        arguments = list(sys.argv[1:] if args is None else args)
        extra.setdefault("obj", GlobalOptions())
        try:
            code = super().main(
                arguments,
                prog_name or "fastness",
                complete_var or "_FASTNESS_COMPLETE",
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except (Exception, KeyboardInterrupt) as error:
            # Searches the raw arguments, because an invalid command line is not parsed that far.
            exit_codes.report(error, as_json="--json" in takewhile(lambda argument: argument != "--", arguments))
            sys.exit(exit_codes.code_of(error))
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=Root, params=global_options(hidden=False), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fastness", message="%(prog)s %(version)s")
def root() -> None:
    """Fastness: queues, locks, state and history for fleets of agents.

    Commands call the server at --url, or open a data directory that no other process has open (--url dir:./data).
    Global options can be given before or after the subcommand.
    """


@root.command(
    examples=[
        'eval "$(fastness completion bash)"                     # in ~/.bashrc',
        'eval "$(fastness completion zsh)"                      # in ~/.zshrc',
        "fastness completion fish > ~/.config/fish/completions/fastness.fish",
    ],
    cls=LeafCommand,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "fastness", "_FASTNESS_COMPLETE").source())


def main() -> NoReturn:
    """The entry point of the `fastness` command."""
    root.main()
