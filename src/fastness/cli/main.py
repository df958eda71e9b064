"""The `fastness` command: the root of all subcommands, its global options, and its error handling."""

import importlib
import inspect
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from fastness.cli import exit_codes
from fastness.cli.commands import CommandGroup, GlobalOptions, LeafCommand, global_options
from fastness.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# The module and summary of each command. The module is imported when the command is used; the docstring of the command
# goes on where the summary ends.
_GROUPS: Final = {
    "Start here": {
        "demo": ("demo", "Run a demonstration with real processes, and check it."),
        "serve": ("serving", "Serve a plane over HTTP and WebSocket."),
        "worker": ("worker", "Run the tasks of a Python module."),
        "host": ("host", "Run the programs and workflows of a Python module."),
        "status": ("status", "Show the version, the id and the lineage of the plane."),
        "top": ("top", "Show rates, depths, waits and nodes of a universe, live."),
        "context": ("contexts", "Save servers by name, and choose one."),
        "explain": ("explain", "Explain an error code."),
        "completion": ("main", "Print the completion script of a shell."),
    },
    "Messages": {
        "queue": ("queues", "Put, consume and manage the messages of queues."),
        "message": ("messages", "Search, show, change, move and delete messages."),
        "mail": ("mail", "Send mail between agents, kept until it is confirmed."),
        "push": ("push", "Push data to agents with little delay."),
    },
    "Agents": {
        "agent": ("agents", "Register agents and list them."),
        "world": ("worlds", "Manage the journals, inboxes and snapshots of agents."),
        "workflow": ("workflows", "Start, signal, cancel and inspect runs of workflows."),
        "effect": ("effects", "List, claim and complete the calls that worlds ask for."),
        "timer": ("timers", "List the timers of worlds."),
        "activity": ("activity", "Write and read session logs."),
        "mcp": ("mcp", "Serve an agent over MCP, with queues as its tools."),
    },
    "Data": {
        "lease": ("leases", "Own keys exclusively, on any machine."),
        "lock": ("locks", "Show and end the sessions that hold ordered locks."),
        "state": ("states", "Read and write versioned documents."),
        "entity": ("entities", "Read and write records whose fields have tiers."),
        "collection": ("collections", "Show collections, their partitions and their rows."),
        "blob": ("blobs", "Store and read blobs, addressed by their SHA-256 hash."),
        "pipeline": ("pipeline", "Copy history into lake tables on Spark, and audit it."),
    },
    "Operate": {
        "token": ("tokens", "Manage access tokens."),
        "quota": ("quotas", "Limit what a universe may hold and do."),
        "audit": ("audit", "Show who did what, when and from where."),
        "encryption": ("encryption", "Encrypt stored data, and change the keys."),
        "node": ("nodes", "List the nodes that share a plane on PostgreSQL."),
        "upgrade": ("nodes", "Raise the data format of a plane on PostgreSQL."),
        "backup": ("backups", "Copy a consistent snapshot of all data."),
        "restore": ("restores", "Restore a backup to a new data directory."),
        "mark-restored": ("status", "Begin another lineage after a restore by other tools."),
        "migrate": ("migrations", "Copy a plane to another storage, and compare the two."),
        "doctor": ("doctor", "Check that stored data is complete and undamaged."),
        "space": ("space", "Show what is kept in all universes."),
        "gc": ("space", "Delete blobs that nothing names."),
        "bench": ("bench", "Measure puts, receives and acks."),
    },
}
_COMMANDS: Final = {name: found for group in _GROUPS.values() for name, found in group.items()}
ENVIRONMENT: Final = (
    ("FASTNESS_URL, FASTNESS_TOKEN, FASTNESS_UNIVERSE, FASTNESS_OBJECTS", "defaults for the options of the same names"),
    ("FASTNESS_CA, FASTNESS_CERT, FASTNESS_KEY", "defaults for the options of the same names"),
    ("FASTNESS_ENCRYPTION_KEY_FILE, FASTNESS_ENCRYPTION_COMMAND", "the master keys of encrypted universes"),
    ("FASTNESS_LAKE", "default for --lake of `fastness pipeline`"),
    ("FASTNESS_LINEAGE, FASTNESS_LINEAGE_TOKEN", "where `fastness pipeline` sends OpenLineage events"),
    ("FASTNESS_CONTEXT", "the context to use if no URL is given"),
    ("FASTNESS_QUEUE_*, FASTNESS_LEASE_KEY, …", "exported by `queue get`, `lease acquire` and `lease run`"),
)


class Root(CommandGroup):
    """All commands, and the only place where errors become messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            module, summary = _COMMANDS[cmd_name]
            command = getattr(importlib.import_module(f"fastness.cli.{module}"), cmd_name.replace("-", "_"))
            command.help = f"{summary}\n\n{inspect.cleandoc(command.help or '')}".rstrip()
            self.add_command(command, cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, _COMMANDS))
        for group, commands in _GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[str]]":
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=summary) for name, (_, summary) in _COMMANDS.items()]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(each for each in found if each.value.startswith(incomplete)), *options]

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
        options = extra.setdefault("obj", GlobalOptions()).values
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
            is_asked = "--json" in takewhile(lambda argument: argument != "--", arguments)
            exit_codes.report(error, as_json=is_asked or bool(options.get("json")))
            sys.exit(exit_codes.code_of(error))
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=Root, params=global_options(hidden=False), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fastness", message="%(prog)s %(version)s")
def root() -> None:
    """Fastness: queues, leases, state and history for fleets of agents.

    Commands call the server at --url, or open a data directory that no other process has open (--url dir:./data).
    Global options can be given before or after the subcommand.
    """


@click.command(
    cls=LeafCommand,
    examples=[
        'eval "$(fastness completion bash)"                     # in ~/.bashrc',
        'eval "$(fastness completion zsh)"                      # in ~/.zshrc',
        "fastness completion fish > ~/.config/fish/completions/fastness.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "fastness", "_FASTNESS_COMPLETE").source())


def main() -> NoReturn:
    """The entry point of the `fastness` command."""
    root.main()
