"""The commands and calls that messages suggest: each of them exists, and the important ones are run."""

import ast
import functools
import inspect
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner, Result

import fastness
from fastness.cli import exit_codes
from fastness.cli.commands import LeafCommand
from fastness.cli.main import root

Cli = Callable[..., Result]

SOURCE: Final = Path(fastness.__file__).parent
MENTION: Final = re.compile(r"\bfastness (?=[a-z-])")
# A suggested command is in backticks or $(…), or ends the message after a colon, or is the whole text.
COMMAND: Final = re.compile(r"(?:`|\$\()fastness ([^`)]+)(?:`|\))|(?:: |^)fastness ([^`]+?)[.]?$")
CALL: Final = re.compile(r"\bfastness\.(\w+)\(([^)]*)\)")
PLACEHOLDER: Final = "1"  # For a part of a message that is known only when it is raised: a name, a path or a number.


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, except docstrings."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(each.value for each in node.body[:1] if isinstance(each, ast.Expr))
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


@functools.cache
def texts() -> list[str]:
    """The texts in the source code that mention a command or a call, and are not examples of the help."""
    examples = {example for command in all_commands(root) for example in getattr(command, "examples", ())}
    modules = [code for file in SOURCE.rglob("*.py") if is_relevant(code := file.read_text())]
    found = {text for code in modules for text in literals(ast.parse(code))}
    return sorted(filter(is_relevant, found - examples))


def is_relevant(text: str) -> bool:
    return bool(MENTION.search(text) or CALL.search(text))


def all_commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from all_commands(command.get_command(ctx, name) or root)


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that a message suggests, without `fastness`."""
    return [shlex.split(quoted or last) for quoted, last in COMMAND.findall(text.strip())]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Result]:
    """Parses a command line with all its arguments, without running the command."""
    monkeypatch.setattr(LeafCommand, "invoke", lambda _self, _ctx: None)
    monkeypatch.setattr("fastness.cli.mcp.serve", lambda _agent: None)  # A group that does something itself.
    return lambda words: CliRunner().invoke(root, words)


def test_every_suggested_command_parses(parse: Callable[[list[str]], Result]) -> None:
    checked = 0
    for text in texts():
        commands = commands_in(text)
        assert len(commands) == len(MENTION.findall(text)), f"put the command in backticks, or last: {text}"
        for words in commands:
            result = parse(words)
            assert result.exit_code == 0, (text, result.stderr)
            checked += 1
    assert checked > 20


def test_every_suggested_call_exists() -> None:
    calls = [call for text in texts() for call in CALL.findall(text)]
    assert len(calls) > 3
    for name, arguments in calls:
        options = set(re.findall(r"(\w+)=", arguments))
        assert options <= set(inspect.signature(getattr(fastness, name)).parameters), (name, arguments)


def test_every_example_of_the_help_parses(parse: Callable[[list[str]], Result]) -> None:
    checked = 0
    for command in all_commands(root):
        for example in getattr(command, "examples", ()):
            for part in re.split(r"\|\|?|&&|;(?! …)| > | {2,}#|\)\"", example):
                words = shlex.split(part.partition("$(")[2] or part)
                if words[:1] == ["fastness"]:
                    result = parse(words[1:])
                    assert result.exit_code == 0, (example, result.stderr)
                    checked += 1
    assert checked > 50


def test_a_wrong_suggestion_is_found(parse: Callable[[list[str]], Result]) -> None:
    (missing_option,) = commands_in("There is no token; create one with `fastness token create`")
    assert parse(missing_option).exit_code == 2
    (unknown,) = commands_in("Nothing there; list it with: fastness queue lst 1.")
    assert unknown == ["queue", "lst", "1"]
    assert parse(unknown).exit_code == 2
    assert MENTION.search("run fastness doctor to find all damage")
    assert commands_in("run fastness doctor to find all damage") == []


# The important ones, run as they are printed.


def suggested(result: Result, **placeholders: str) -> list[list[str]]:
    """The commands that an error suggests, with the values of their placeholders, without the one that explains it."""
    message, _, explained = result.stderr.rstrip("\n").rpartition("\n")
    assert explained.startswith("help: fastness explain ")
    return [[placeholders.get(word, word) for word in words] for words in commands_in(message)]


def test_the_plane_that_is_missing_is_created_as_suggested(cli: Cli, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'a plane'}"
    serve, put = suggested(cli("--url", url, "queue", "list", code=4))
    assert serve == ["serve", "--data", url]
    cli(*put)
    assert "QUEUE" in cli("--url", url, "queue", "list").stdout


def test_an_agent_is_registered_as_suggested(cli: Cli) -> None:
    cli("mail", "send", "ada", "bob", "x")
    (register,) = suggested(cli("agent", "show", "ada", code=4))
    cli(*register)
    cli("agent", "show", "ada")


def test_a_context_is_added_as_suggested(cli: Cli, tmp_path: Path) -> None:
    (add,) = suggested(cli("--context", "lab", "queue", "list", code=4), URL=f"dir:{tmp_path / 'data'}")
    cli(*add)
    cli("queue", "put", "jobs", "x", "--context", "lab")


def test_a_message_is_leased_as_suggested(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("queue", "put", "jobs", "x")
    (get,) = suggested(cli("queue", "ack", code=2), QUEUE="jobs")
    for line in cli(*get).stdout.splitlines():
        name, _, value = shlex.split(line)[1].partition("=")
        monkeypatch.setenv(name, value)
    cli("queue", "ack")
    assert os.environ["FASTNESS_QUEUE_NAME"] == "jobs"


def test_schedules_are_listed_as_suggested(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x")
    (listed,) = suggested(cli("queue", "schedule", "delete", "jobs", "nightly", code=4))
    assert "No schedules" in cli(*listed).stderr


def test_an_incomplete_backup_is_completed_as_suggested(cli: Cli, tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"large" * 10_000)
    hash = cli("blob", "put", str(body)).stdout.strip()
    stored = next((tmp_path / "data" / "objects" / "cas" / "main" / "sha256").glob(hash + "*"))
    stored.unlink()
    backup, again = str(tmp_path / "backup"), str(tmp_path / "again")
    ((doctor,),) = suggested(cli("backup", backup, code=exit_codes.DAMAGED))
    assert hash in cli(doctor, code=exit_codes.DAMAGED).stdout
    shutil.copy(body, stored)
    (complete,) = suggested(cli("restore", backup, again, code=4), URL=f"dir:{tmp_path / 'data'}")
    cli(*complete)
    cli("restore", backup, again)
