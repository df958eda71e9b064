"""`fastness pipeline`: its output for people and programs, and its exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

import fastness
from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.cli.pipeline_runs import _cause
from fastness.pipeline import jobs
from fastness.pipeline.config import Config
from tests.pipeline import planes
from tests.support.certificates import certificates
from tests.support.forked import run_python
from tests.support.server_process import Server
from tests.support.waiting import POLLS_MAX_SPARK, eventually, exit_code

Cli = Callable[..., Result]


@pytest.fixture
def built(tmp_path: Path) -> planes.Built:
    return planes.copy(tmp_path / "data", worlds=3, entries=150, messages=40, mails=20, activity=10)


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> planes.Built:
    """A plane for commands that fail before they read it."""
    return planes.build(tmp_path_factory.mktemp("unread") / "data", worlds=1, entries=10)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `fastness pipeline` in this process, on the active Spark session if there is one."""
    for name in list(os.environ):
        if name.startswith("FASTNESS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(root, ["pipeline", *words])
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `fastness pipeline` in its own process."""
    return run_python(["-m", "fastness.cli", "pipeline", *words], env={**os.environ, **environment})


# Output.


def test_json_output_has_the_whole_job_result(
    cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path
) -> None:
    words = ("ingest", "--data", built.url, "--lake", str(tmp_path / "lake"), "--json")
    job_result = json.loads(cli(*words).stdout)
    assert job_result["job"] == "ingest"
    assert job_result["ok"] is True
    assert job_result["rows"]["journal"] == built.entries
    assert job_result["findings"] == []
    assert json.loads(cli(*words).stdout)["rows"]["journal"] == 0
    assert spark.range(3).count() == 3  # The session is still usable.


@pytest.mark.always
def test_full_run_prints_a_table(cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path) -> None:
    output = cli("run", "--data", built.path, "--lake", str(tmp_path / "lake")).stdout.splitlines()
    assert output[0].split() == ["job", "verdict", "rows", "seconds"]
    assert [line.split()[:2] for line in output[1 : 1 + len(jobs.FULL_RUN)]] == [[name, "ok"] for name in jobs.FULL_RUN]
    assert f"journal {built.entries:,}" in output[1]


@pytest.mark.rotating
def test_findings_are_printed_and_have_their_own_exit_code(
    cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path
) -> None:
    start, _ = planes.flip_byte(tmp_path / "data", built.worlds[1])
    words = ("--data", built.url, "--lake", str(tmp_path / "lake"))
    output = cli("run", *words, code=exit_codes.DAMAGED).stdout
    assert all(f"\n{name} " in f"\n{output}" for name in jobs.FULL_RUN)  # Findings do not stop the other jobs.
    assert f"✗ audit: main/{built.worlds[1]} at {start}: " in output
    job_result = json.loads(cli("audit", *words, "--json", code=exit_codes.DAMAGED).stdout)
    found = [(finding["world"], finding["height"]) for finding in job_result["findings"]]
    assert job_result["ok"] is False
    assert (built.worlds[1], start) in found
    assert {world for world, _ in found} == {built.worlds[1]}


def test_universe_option_restricts_the_job(cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path) -> None:
    other = planes.build(tmp_path / "data", worlds=1, entries=20, universe="other")
    words = ("ingest", "--data", built.url, "--lake", str(tmp_path / "lake"), "--json")
    assert json.loads(cli(*words, "--universe", "other").stdout)["rows"]["journal"] == other.entries
    both = json.loads(cli(*words, "--universe", "other", "--universe", "main").stdout)
    assert both["rows"]["journal"] == built.entries


@pytest.mark.rotating
def test_load_writes_rows_of_a_file_once(cli: Cli, spark: SparkSession, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    fastness.open(url).close()
    rows = tmp_path / "jobs.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "say": "hello"}) + "\n" for n in range(25)))
    words = ("load", str(rows), "--data", url, "--queue", "jobs", "--name", "first", "--key", "id", "--json")
    assert json.loads(cli(*words).stdout)["rows"] == {"queues": 25}
    cli(*words)
    with fastness.open(url) as plane:
        assert plane.queue("jobs").stats().ready == 25


@pytest.mark.rotating
def test_jobs_use_certificates_for_a_tls_server(
    cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pem = certificates(tmp_path)
    rows = tmp_path / "jobs.jsonl"
    rows.write_text('{"id": 1}\n{"id": 2}\n')
    server = Server(tmp_path, tls_cert=pem["server_cert"], tls_key=pem["server_key"], tls_client_ca=pem["ca_cert"])
    try:
        known = ("--ca", "ca-cert.pem", "--cert", "client-cert.pem")  # Relative to the working directory.
        words = ("ingest", "--data", server.url, "--lake", str(tmp_path / "lake"), "--json", "--patience", "1")
        assert json.loads(cli(*words, *known, "--key", "client-key.pem").stdout)["rows"]["journal"] == built.entries
        cli(*words, "--ca", "ca-cert.pem", code=9)
        assert "--ca" in cli(*words, "--ca", "nowhere.pem", code=9).stderr
        monkeypatch.setenv("FASTNESS_KEY", "client-key.pem")  # `load` uses --key for something else.
        loaded = cli("load", str(rows), "--data", server.url, "--queue", "new", "--name", "x", *known, "--key", "id")
        assert "queues 2" in loaded.stdout
    finally:
        server.kill()


def test_vacuum_deletes_unused_files(cli: Cli, spark: SparkSession, built: planes.Built, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    cli("ingest", "--data", built.url, "--lake", lake)
    assert "vacuum" in cli("vacuum", "--lake", lake).stdout


def test_report_does_not_start_spark(built: planes.Built, tmp_path: Path) -> None:
    jobs.run("ingest", None, Config(data=built.url, lake=str(tmp_path / "lake")))
    done = run("report", "--lake", str(tmp_path / "lake"), "--json", JAVA_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lake" / "reports" / "latest.html").exists()


# Errors.


@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["vacuum"],
        ["rollup"],
        ["accept"],
        ["reset", "--all"],
        ["backfill", "--all"],
        ["forget", "--world", "world-0000"],
        ["status"],
    ],
    ids=lambda words: words[0],
)
def test_command_for_an_existing_lake_does_not_make_one(
    cli: Cli, unread: planes.Built, tmp_path: Path, words: list[str]
) -> None:
    error = cli(*words, "--data", unread.url, "--lake", str(tmp_path / "typo"), code=4).stderr
    assert f"There is no lake at {tmp_path / 'typo'}; create one with: fastness pipeline ingest --lake" in error
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (["ingest", "--data", "dir:x"], 2, "--lake"),
        (["ingest", "--data", "dir:x", "--lake", "ftp://x"], 2, "cannot be a lake"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--storage", "word"], 2, "NAME=VALUE"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--universe", ""], 2, "universe"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--nonsense"], 2, "--nonsense"),
        (["load", "x.json", "--data", "dir:x"], 2, "--name"),
        (["load", "x.json", "--name", "x", "--universe", "a", "--universe", "b"], 2, "--universe only once"),
        (["ingest", "--data", "http://127.0.0.1:99999", "--lake", "y"], 2, "99999"),
        (["ingest", "--data", "http://[::1", "--lake", "y"], 2, "[::1"),
        (["ingest", "--data", "https://127.0.0.1:1", "--lake", "y", "--ca", "/no/such"], 9, "--ca"),
        (["ingest", "--data", "dir:/no/such", "--lake", "y"], 4, "There is no plane in /no/such"),
    ],
)
def test_invalid_command_line_fails_before_spark_starts(cli: Cli, words: list[str], code: int, output: str) -> None:
    assert output in cli(*words, code=code).stderr


@pytest.mark.parametrize(
    ("data", "code"),
    [("dir:/nowhere/at/all", 4), ("http://127.0.0.1:1", 9), ("ftp://x", 2), ("postgresql://x@127.0.0.1:1/x", 9)],
)
def test_missing_plane_has_its_exit_code(cli: Cli, spark: SparkSession, data: str, code: int, tmp_path: Path) -> None:
    words = ("ingest", "--data", data, "--lake", str(tmp_path / "lake"), "--patience", "0.5", "--json")
    output = cli(*words, code=code).stderr
    assert json.loads(output)["detail"]


def test_unwritable_lake_has_its_exit_code(cli: Cli, spark: SparkSession, unread: planes.Built, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = cli("ingest", "--data", unread.url, "--lake", str(tmp_path / "file" / "lake"), code=9).stderr
    assert str(tmp_path / "file") in output


@pytest.mark.parametrize("module", ["pyspark", "pyarrow", "deltalake"])
def test_missing_extra_error_says_what_to_install(module: str, unread: planes.Built, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from fastness.cli.main import main; main()"
    words = ["pipeline", "ingest", "--data", unread.url, "--lake", str(tmp_path / "lake")]
    done = run_python(["-c", code, *words])
    assert done.returncode == 9
    assert "pip install '.[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["pipeline", "--help"], ["pipeline", "run", "--help"]])
def test_help_does_not_import_spark(words: list[str]) -> None:
    code = f"""
import sys
from fastness.cli.main import root
try: root.main({words!r})
except SystemExit: print(*sys.modules)
"""
    done = run_python(["-c", code], check=True)
    loaded = set(done.stdout.split())
    assert loaded & {"pyspark", "pyarrow", "deltalake", "pandas", "py4j"} == set()
    assert "fastness.cli.main" in loaded


def test_missing_java_error_is_one_line_and_where_to_get_help(unread: planes.Built, tmp_path: Path) -> None:
    words = ["ingest", "--data", unread.url, "--lake", str(tmp_path / "lake")]
    command = [sys.executable, "-m", "fastness.cli", "pipeline", *words]  # As an operator runs it, without `-W error`.
    environment = {**os.environ, "JAVA_HOME": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9
    error, help = done.stderr.splitlines()
    assert error.startswith("fastness: Spark did not start: ")
    assert help == "help: fastness explain unreachable"


# Reducers that block until the test continues; workers find this file through PYTHONPATH.
SLOW = """
import pathlib, time
def fold(state, entry):
    pathlib.Path({flag!r}).touch()
    time.sleep(0.05)
    return (state or 0) + 1
"""


@pytest.mark.thorough
def test_interrupted_job_exits_with_130_and_one_line(built: planes.Built, tmp_path: Path) -> None:
    flag = tmp_path / "folding"
    (tmp_path / "slowly.py").write_text(SLOW.format(flag=str(flag)))
    words = ["audit", "--data", built.url, "--lake", str(tmp_path / "lake"), "--reducer", "slowly:fold"]
    terminal, follower = pty.openpty()  # Progress bars need a terminal.
    output: list[bytes] = []
    listener = threading.Thread(target=read_terminal, args=(terminal, output))
    listener.start()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TERM": "xterm"}
    command = [sys.executable, "-m", "fastness.cli", "pipeline", *words]
    with subprocess.Popen(command, env=environment, stderr=follower, start_new_session=True) as process:
        os.close(follower)
        try:
            eventually(lambda: flag.exists() or process.poll() is not None, lambda: output, polls_max=POLLS_MAX_SPARK)
            os.killpg(process.pid, signal.SIGINT)  # To the whole process group, as a terminal does.
            assert exit_code(process, polls_max=POLLS_MAX_SPARK) == exit_codes.INTERRUPTED
        finally:
            process.kill()
    listener.join()
    text = b"".join(output).decode(errors="replace")
    assert "audit" in text
    assert "Traceback" not in text
    assert text.rstrip().endswith("fastness: interrupted")


def read_terminal(terminal: int, output: list[bytes]) -> None:
    """Read a terminal until its other end is closed."""
    with suppress(OSError):
        while part := os.read(terminal, 65_536):
            output.append(part)
    os.close(terminal)


def test_cause_of_a_spark_failure_is_extracted() -> None:
    worker = (
        "Job aborted:\nTraceback (most recent call last):\n  File x\nfastness.errors.X: the cause\n\n\tat org.apache"
    )
    assert _cause(worker) == "fastness.errors.X: the cause"
    assert (
        _cause("[TABLE] There is no table\nof that name\nJVM stacktrace:\nat org")
        == "[TABLE] There is no table of that name"
    )
