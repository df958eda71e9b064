"""The examples for Airflow and Dagster: they compile, and their commands are valid and run."""

import ast
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import venv
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fastness.cli.main import root
from fastness.pipeline import jobs
from fastness.pipeline.config import Config
from tests.pipeline import planes

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = [EXAMPLES / "airflow" / "fastness_dag.py", EXAMPLES / "dagster" / "fastness_assets.py"]
_WITHOUT_SPARK = ("report", "publish", "status")


def commands(file: Path) -> list[list[str]]:
    """The command lines of an example: texts that start with `fastness`, and lists of words that do."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "bash_command":
            found.append(shlex.split(ast.literal_eval(node.value)))
        elif isinstance(node, ast.List) and all(isinstance(each, ast.Constant) for each in node.elts):
            words = ast.literal_eval(node)
            if words[:1] == ["fastness"]:
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
            environment = {"FASTNESS_URL": built.url, "FASTNESS_LAKE": "lake"}
            result = CliRunner().invoke(root, words[1:], env=environment)
            assert result.exit_code == 0, (words, result.output)
            ran += 1
    assert ran == 4
    assert (tmp_path / "lake.duckdb").exists()


@pytest.mark.nightly
def test_full_run_of_the_dagster_example_has_the_fields_that_it_reads(tmp_path: Path) -> None:
    built = planes.build(tmp_path / "data", worlds=2, entries=20)
    [words] = [words for name, words in COMMANDS if name == "dagster" and words[2] == "run"]
    environment = {"FASTNESS_URL": built.url, "FASTNESS_LAKE": str(tmp_path / "lake")}
    result = CliRunner().invoke(root, words[1:], env=environment)
    assert result.exit_code == 0, result.output
    results = {each["job"]: each for each in json.loads(result.stdout)}
    assert results["ingest"]["rows"]["journal"] == built.entries
    assert results["audit"]["findings"] == []


def install(tmp_path: Path, package: str) -> Path:
    """The programs of a new environment with a package, whose dependencies differ from ours."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", package], check=True)
    return programs


def environment(tmp_path: Path) -> dict[str, str]:
    """Variables for a process that runs an example on a small plane, with our `fastness` in its path."""
    built = planes.build(tmp_path / "data", worlds=2, entries=20)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FASTNESS_URL": built.url, "FASTNESS_LAKE": str(tmp_path / "lake")}


@pytest.mark.nightly
def test_dagster_runs_its_example(tmp_path: Path) -> None:
    script = f"""
from runpy import run_path
definitions = run_path({str(FILES[1])!r})["definitions"]
result = definitions.resolve_job_def("fastness_pipeline").execute_in_process()
print(result.success, [event.asset_key.to_user_string() for event in result.get_asset_materialization_events()])
"""
    python = install(tmp_path, "dagster==1.13.28") / "python"
    variables = environment(tmp_path) | {"DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", script], env=variables, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "True ['lake', 'catalogue']"
    assert (tmp_path / "lake.duckdb").exists()


@pytest.mark.nightly
def test_airflow_runs_its_example(tmp_path: Path) -> None:
    airflow = install(tmp_path, "apache-airflow==3.3.2") / "airflow"
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "dag.py").write_text(FILES[0].read_text().replace("/srv/fastness", str(tmp_path)))
    variables = environment(tmp_path) | {
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    for words in (["db", "migrate"], ["dags", "reserialize"], ["dags", "test", "fastness_pipeline"]):
        subprocess.run([airflow, *words], env=variables, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "home" / "airflow.db")) as database:
        tasks = dict(database.execute("SELECT task_id, state FROM task_instance"))
    assert tasks == dict.fromkeys(("ingest", "audit", "rollup", "report", "publish", "status"), "success")
    assert (tmp_path / "lake.duckdb").exists()
