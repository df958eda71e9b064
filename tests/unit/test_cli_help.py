"""The help of commands: complete summaries, and no module that the help does not need."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec
import pytest
from click.testing import Result

from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.wire.fields import described_fields
from fastness.wire.mail import MailPolicy
from fastness.wire.queues import NewMessage, QueuePolicy
from fastness.wire.quotas import Quota
from fastness.wire.type_checks import bounds_of
from tests.support.failures import Failures

Cli = Callable[..., Result]
COLUMNS = 80
HEAVY = {"asyncio", "msgspec", "psycopg", "pyspark", "rich", "rocksdict", "ssl", "uvicorn"}
HEAVY |= {f"fastness.{name}" for name in ("backends", "client", "handles", "kv", "layers", "plane", "server", "wire")}
OF_THE_ROOT = {"commands", "completion", "durations", "exit_codes", "given_options", "main"}


def all_groups(command: click.Command = root, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every group of commands."""
    if isinstance(command, click.Group):
        yield words
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from all_groups(command.get_command(ctx, name) or root, *words, name)


GROUPS = list(all_groups())


def words_of(group: tuple[str, ...]) -> str:
    return " ".join(group) or "root"


def loaded(code: str, *words: str, **environment: str) -> tuple[str, set[str]]:
    """The output of a Python program, and the modules that it has loaded at its end."""
    listing = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    done = subprocess.run(
        [sys.executable, "-c", listing + code, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, set(done.stderr.split())


def test_the_help_lists_groups_of_commands_and_exit_codes(cli: Cli) -> None:
    text = cli("--help").stdout
    for heading in ("Start here", "Messages", "Agents", "Data", "Operate"):
        assert f"\n{heading}:\n" in text
    for code in exit_codes.MEANINGS:
        assert f"\n  {code} " in text


def test_every_summary_is_a_complete_sentence_on_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures()
    for group in GROUPS:
        with failures.of(group):
            monkeypatch.setenv("COLUMNS", str(COLUMNS))
            text = cli(*group, "--help").stdout
            command: Any = root
            assert "..." not in text.replace("[ARGS]...", "")
            for word in group:
                command = command.get_command(click.Context(command), word)
            ctx = click.Context(command)
            names = command.list_commands(ctx)
            for name in names:
                summary = command.get_command(ctx, name).get_short_help_str(limit=1_000)
                assert f"\n  {name:<{max(map(len, names))}}  {summary}\n" in text
                assert summary[0].isupper()
                assert summary.endswith(".")
    failures.check()


@pytest.mark.parametrize(
    ("words", "completed", "shown"),
    [
        (["--help"], None, "Start here:"),
        ([], None, "Operate:"),
        (["--version"], None, "fastness "),
        ([], "", "plain,queue"),
        ([], "work", "plain,worker\nplain,workflow\n"),
        ([], "--un", "plain,--universe"),
    ],
    ids=["help", "no command", "version", "completion of all", "completion of some", "completion of an option"],
)
def test_what_needs_no_command_imports_none(words: list[str], completed: str | None, shown: str) -> None:
    environment = {} if completed is None else {"_FASTNESS_COMPLETE": "bash_complete"}
    typed = {"COMP_WORDS": f"fastness {completed}", "COMP_CWORD": "1"}
    output, modules = loaded("from fastness.cli.main import main; main()", *words, **environment, **typed)
    assert shown in output
    assert modules & HEAVY == set()
    assert {name for name in modules if name.startswith("fastness.cli.")} <= {f"fastness.cli.{n}" for n in OF_THE_ROOT}


def test_the_help_of_groups_loads_no_storage_engine_server_or_spark() -> None:
    names = [words[0] for words in GROUPS if words]
    code = "import click; from fastness.cli.main import root; [root.get_command(click.Context(root), n) for n in {!r}]"
    _, modules = loaded(code.format(names))
    assert "fastness.cli.pipeline" in modules
    assert modules & {"fastness.backends", "fastness.server", "psycopg", "pyspark", "rocksdict", "uvicorn"} == set()


@pytest.mark.parametrize("noun", ["locks", "workflows", "effects", "timers", "collections", "nodes", "states"])
def test_a_plural_noun_gets_the_singular_as_a_suggestion(cli: Cli, noun: str) -> None:
    assert f"No such command '{noun}'. Did you mean '{noun[:-1]}'?" in cli(noun, "list", code=2).stderr


def test_a_group_without_a_command_prints_its_help(cli: Cli) -> None:
    failures = Failures()
    for group in [each for each in GROUPS if each != ("mcp",)]:
        with failures.of(group):
            bare = cli(*group)
            assert (bare.stdout, bare.stderr) == (cli(*group, "--help").stdout, "")
            assert ("\nCommands:\n" if group else "\nStart here:\n") in bare.stdout
    failures.check()


@pytest.mark.parametrize(
    ("words", "meant"),
    [(("queu",), "queue"), (("wrold", "list"), "world"), (("queue", "pat"), "put"), (("queue", "enqeue"), "enqueue")],
    ids=" ".join,
)
def test_a_misspelt_command_gets_a_suggestion(cli: Cli, words: tuple[str, ...], meant: str) -> None:
    assert f"Did you mean '{meant}'" in cli(*words, code=2).stderr


def test_aliases_work_and_are_in_the_help(cli: Cli) -> None:
    cli("queue", "enqueue", "jobs", "1")
    cli("queue", "send", "jobs", "2")
    assert [
        json.loads(cli("queue", verb, "jobs", "--block", "1s", "--json").stdout)["payload"]
        for verb in ("dequeue", "receive")
    ] == [1, 2]
    assert "\n  enqueue  put\n" in cli("queue", "--help").stdout
    assert "\nAliases:\n  enqueue, send\n" in cli("queue", "put", "--help").stdout
    commands = cli("queue", "--help").stdout.partition("\nAliases:\n")[0]
    assert "enqueue" not in commands


@pytest.mark.parametrize(
    ("words", "struct", "others"),
    [
        (("queue", "put"), NewMessage, {"file", "lines", "tier"}),
        (("queue", "schedule", "add"), NewMessage, {"file", "timezone"}),
        (("queue", "policy"), QueuePolicy, {"paused"}),
        (("quota", "set"), Quota, set()),
        (("mail", "policy"), MailPolicy, set()),
    ],
    ids=str,
)
def test_each_field_with_help_is_an_option_with_its_bounds(
    words: tuple[str, ...], struct: type[msgspec.Struct], others: set[str]
) -> None:
    command: Any = root
    for word in words:
        command = command.get_command(click.Context(command), word)
    options = {each.name: each for each in command.params if isinstance(each, click.Option) and each.expose_value}
    fields = {field.name: field for field in described_fields(struct)}
    assert options.keys() - others == fields.keys() - others
    for name in options.keys() & fields.keys():
        assert options[name].help
        kind: Any = options[name].type
        if isinstance(kind, click.IntRange):
            bounds = bounds_of(fields[name].type)
            assert (kind.min, kind.max) == (bounds.get("minimum"), bounds.get("maximum"))
