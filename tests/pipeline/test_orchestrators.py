"""The examples for Airflow and Dagster: they compile, and their commands are valid and run."""

import ast
import importlib.util
import json
import shlex
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from holdfast.cli.main import root
from holdfast.pipeline import jobs
from holdfast.pipeline.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = [EXAMPLES / "airflow" / "holdfast_dag.py", EXAMPLES / "dagster" / "holdfast_assets.py"]
planes = SimpleNamespace(**run_path(str(Path(__file__).with_name("planes.py"))))
_WITHOUT_SPARK = ("report", "publish", "status")


def commands(file: Path) -> list[list[str]]:
    """The command lines of an example: texts that start with `holdfast`, and lists of words that do."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "bash_command":
            found.append(shlex.split(ast.literal_eval(node.value)))
        elif isinstance(node, ast.List) and all(isinstance(each, ast.Constant) for each in node.elts):
            words = ast.literal_eval(node)
            if words[:1] == ["holdfast"]:
                found.append(words)
    return found


COMMANDS = [(file.parent.name, words) for file in FILES for words in commands(file)]


def test_examples_have_commands() -> None:
    assert [name for name, _ in COMMANDS] == ["airflow"] * 6 + ["dagster"] * 2


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_example_compiles(file: Path) -> None:
    compile(file.read_text(), str(file), "exec")


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[" ".join(words[1:]) for _, words in COMMANDS])
def test_command_of_an_example_can_be_parsed(name: str, words: list[str]) -> None:
    command: click.Command = root
    rest = words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest.pop(0))
        assert found is not None, (name, words)
        command = found
    context = command.make_context(words[-1], rest, parent=click.Context(root))
    assert context.args == []


def test_commands_that_need_no_spark_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = planes.build(tmp_path / "data", worlds=2, entries=20)
    jobs.run("ingest", None, Config(data=built.url, lake=str(tmp_path / "lake")))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for _, words in COMMANDS:
        if words[2] in _WITHOUT_SPARK:
            environment = {"HOLDFAST_URL": built.url, "HOLDFAST_LAKE": "lake"}
            result = CliRunner().invoke(root, words[1:], env=environment)
            assert result.exit_code == 0, (words, result.output)
            ran += 1
    assert ran == 4
    assert (tmp_path / "lake.duckdb").exists()


@pytest.mark.nightly
def test_full_run_of_the_dagster_example_has_the_fields_that_it_reads(tmp_path: Path) -> None:
    built = planes.build(tmp_path / "data", worlds=2, entries=20)
    [words] = [words for name, words in COMMANDS if name == "dagster" and words[2] == "run"]
    environment = {"HOLDFAST_URL": built.url, "HOLDFAST_LAKE": str(tmp_path / "lake")}
    result = CliRunner().invoke(root, words[1:], env=environment)
    assert result.exit_code == 0, result.output
    results = {each["job"]: each for each in json.loads(result.stdout)}
    assert results["ingest"]["rows"]["journal"] == built.entries
    assert results["audit"]["findings"] == []


@pytest.mark.skipif(importlib.util.find_spec("dagster") is None, reason="Dagster is not installed")
def test_dagster_loads_its_example() -> None:
    assert "definitions" in run_path(str(FILES[1]))


@pytest.mark.skipif(importlib.util.find_spec("airflow") is None, reason="Airflow is not installed")
def test_airflow_loads_its_example() -> None:
    assert "ingest" in run_path(str(FILES[0]))
