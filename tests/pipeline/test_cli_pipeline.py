"""`holdfast pipeline`: what it prints, for people and programs, and the code that it ends with."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

import holdfast
from holdfast.cli import exit_codes
from holdfast.cli.main import root
from holdfast.cli.pipeline import _cause
from holdfast.pipeline import jobs

planes = SimpleNamespace(**run_path(str(Path(__file__).with_name("planes.py"))))
END_TO_END = Path(__file__).parents[1] / "end_to_end"
processes = SimpleNamespace(**run_path(str(END_TO_END / "processes.py")))
certificates = run_path(str(END_TO_END / "test_serving.py"))["certificates"]
Hf = Callable[..., Result]
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
WAIT_SECONDS = 120


@pytest.fixture
def built(tmp_path: Path) -> Any:
    return planes.build(tmp_path / "data", worlds=3, entries=150, messages=40, mails=20, activity=10)


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hf:
    """Runs `holdfast pipeline` in this process, on the Spark that is there if the test has one."""
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(root, ["pipeline", *words])
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `holdfast pipeline` in a process of its own."""
    command = [*HOLDFAST, "pipeline", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


# What it prints.


def test_a_job_tells_programs_everything(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    words = ("ingest", "--data", built.url, "--lake", str(tmp_path / "lake"), "--json")
    told = json.loads(hf(*words).stdout)
    assert told["job"] == "ingest"
    assert told["ok"] is True
    assert told["rows"]["journal"] == built.entries
    assert told["findings"] == []
    assert json.loads(hf(*words).stdout)["rows"]["journal"] == 0
    assert spark.range(3).count() == 3  # It was there before, and still is.


def test_a_whole_run_is_a_table_for_people(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    said = hf("run", "--data", built.path, "--lake", str(tmp_path / "lake")).stdout.splitlines()
    assert said[0].split() == ["job", "verdict", "rows", "seconds"]
    assert [line.split()[:2] for line in said[1 : 1 + len(jobs.WHOLE)]] == [[name, "ok"] for name in jobs.WHOLE]
    assert f"journal {built.entries:,}" in said[1]


def test_damage_is_named_and_ends_with_its_own_code(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    start, _ = planes.flip_byte(tmp_path / "data", built.worlds[1])
    words = ("--data", built.url, "--lake", str(tmp_path / "lake"))
    said = hf("run", *words, code=exit_codes.DAMAGED).stdout
    assert all(f"\n{name} " in f"\n{said}" for name in jobs.WHOLE)  # Findings keep no other job from running.
    assert f"✗ audit: main/{built.worlds[1]} at {start}: " in said
    told = json.loads(hf("audit", *words, "--json", code=exit_codes.DAMAGED).stdout)
    found = [(finding["world"], finding["height"]) for finding in told["findings"]]
    assert told["ok"] is False
    assert (built.worlds[1], start) in found
    assert {world for world, _ in found} == {built.worlds[1]}


def test_only_the_universes_that_are_named_are_read(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    other = planes.build(tmp_path / "data", worlds=1, entries=20, universe="other")
    words = ("ingest", "--data", built.url, "--lake", str(tmp_path / "lake"), "--json")
    assert json.loads(hf(*words, "--universe", "other").stdout)["rows"]["journal"] == other.entries
    both = json.loads(hf(*words, "--universe", "other", "--universe", "main").stdout)
    assert both["rows"]["journal"] == built.entries


def test_rows_of_a_file_are_loaded_once(hf: Hf, spark: SparkSession, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    holdfast.open(url).close()
    rows = tmp_path / "jobs.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "say": "hello"}) + "\n" for n in range(25)))
    words = ("load", str(rows), "--data", url, "--queue", "jobs", "--name", "first", "--key", "id", "--json")
    assert json.loads(hf(*words).stdout)["rows"] == {"queues": 25}
    hf(*words)
    with holdfast.open(url) as plane:
        assert plane.queue("jobs").stats().ready == 25


def test_a_server_behind_tls_is_read_and_written_with_certificates(
    hf: Hf, spark: SparkSession, built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pem = certificates(tmp_path)
    rows = tmp_path / "jobs.jsonl"
    rows.write_text('{"id": 1}\n{"id": 2}\n')
    server = processes.Server(
        tmp_path, tls_cert=pem["server_cert"], tls_key=pem["server_key"], tls_client_ca=pem["ca_cert"]
    )
    try:
        known = ("--ca", "ca-cert.pem", "--cert", "client-cert.pem")  # In the folder that the command runs in.
        words = ("ingest", "--data", server.url, "--lake", str(tmp_path / "lake"), "--json", "--patience", "1")
        assert json.loads(hf(*words, *known, "--key", "client-key.pem").stdout)["rows"]["journal"] == built.entries
        hf(*words, "--ca", "ca-cert.pem", code=9)
        assert "--ca" in hf(*words, "--ca", "nowhere.pem", code=9).stderr
        monkeypatch.setenv("HOLDFAST_KEY", "client-key.pem")  # A load calls something else its key.
        loaded = hf("load", str(rows), "--data", server.url, "--queue", "new", "--name", "x", *known, "--key", "id")
        assert "queues 2" in loaded.stdout
    finally:
        server.kill()


def test_a_lake_is_cleaned(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    hf("ingest", "--data", built.url, "--lake", lake)
    assert "vacuum" in hf("vacuum", "--lake", lake).stdout


def test_a_report_starts_no_spark(hf: Hf, tmp_path: Path) -> None:
    done = run("report", "--lake", str(tmp_path / "lake"), "--json", JAVA_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lake" / "reports" / "latest.html").exists()


# What goes wrong.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ingest", "--data", "dir:x"], 2, "--lake"),
        (["ingest", "--data", "dir:x", "--lake", "ftp://x"], 2, "no place for a lake"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--storage", "word"], 2, "NAME=VALUE"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--universe", ""], 2, "universe"),
        (["ingest", "--data", "dir:x", "--lake", "y", "--nonsense"], 2, "--nonsense"),
        (["load", "x.json", "--data", "dir:x"], 2, "--name"),
        (["load", "x.json", "--name", "x", "--universe", "a", "--universe", "b"], 2, "one universe"),
        (["ingest", "--data", "http://127.0.0.1:99999", "--lake", "y"], 2, "99999"),
        (["ingest", "--data", "http://[::1", "--lake", "y"], 2, "[::1"),
        (["ingest", "--data", "https://127.0.0.1:1", "--lake", "y", "--ca", "/no/such"], 9, "--ca"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said_before_spark_starts(
    hf: Hf, words: list[str], code: int, said: str
) -> None:
    assert said in hf(*words, code=code).stderr


@pytest.mark.parametrize(
    ("data", "code"),
    [("dir:/nowhere/at/all", 4), ("http://127.0.0.1:1", 9), ("ftp://x", 2), ("postgresql://x@127.0.0.1:1/x", 9)],
)
def test_a_plane_that_is_not_there_has_a_code(
    hf: Hf, spark: SparkSession, data: str, code: int, tmp_path: Path
) -> None:
    words = ("ingest", "--data", data, "--lake", str(tmp_path / "lake"), "--patience", "0.5", "--json")
    said = hf(*words, code=code).stderr
    assert json.loads(said)["detail"]


def test_a_lake_that_cannot_be_written_has_a_code(hf: Hf, spark: SparkSession, built: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = hf("ingest", "--data", built.url, "--lake", str(tmp_path / "file" / "lake"), code=9).stderr
    assert str(tmp_path / "file") in said


@pytest.mark.parametrize("module", ["pyspark", "pyarrow", "deltalake"])
def test_without_the_extra_it_is_said_what_to_install(module: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from holdfast.cli.main import main; main()"
    words = ["pipeline", "ingest", "--data", "dir:x", "--lake", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 9
    assert "pip install 'holdfast[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["pipeline", "--help"], ["pipeline", "run", "--help"]])
def test_help_does_not_wait_for_spark(words: list[str]) -> None:
    code = f"""
import sys
from holdfast.cli.main import root
try: root.main({words!r})
except SystemExit: print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded & {"pyspark", "pyarrow", "deltalake", "pandas", "py4j"} == set()
    assert "holdfast.cli.main" in loaded


def test_no_java_is_told_in_one_line(built: Any, tmp_path: Path) -> None:
    done = run("ingest", "--data", built.url, "--lake", str(tmp_path / "lake"), JAVA_HOME="/nowhere")
    assert done.returncode == 9
    assert done.stderr.startswith("holdfast: Spark did not start: ")
    assert done.stderr.count("\n") == 1


# Reducers that a test holds on to: workers find this file by PYTHONPATH.
SLOW = """
import pathlib, time
def fold(state, entry):
    pathlib.Path({flag!r}).touch()
    time.sleep(0.05)
    return (state or 0) + 1
"""


@pytest.mark.nightly
def test_an_interrupt_in_the_middle_ends_with_130_and_one_line(built: Any, tmp_path: Path) -> None:
    flag = tmp_path / "folding"
    (tmp_path / "slowly.py").write_text(SLOW.format(flag=str(flag)))
    words = ["audit", "--data", built.url, "--lake", str(tmp_path / "lake"), "--reducer", "slowly:fold"]
    terminal, follower = pty.openpty()  # Bars are for terminals.
    said: list[bytes] = []
    listener = threading.Thread(target=listen, args=(terminal, said))
    listener.start()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TERM": "xterm"}
    command = [*HOLDFAST, "pipeline", *words]
    with subprocess.Popen(command, env=environment, stderr=follower, start_new_session=True) as process:
        os.close(follower)
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not flag.exists():
                assert process.poll() is None, said
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # As a terminal does, to all of them.
            assert process.wait(WAIT_SECONDS) == exit_codes.INTERRUPTED
        finally:
            process.kill()
    listener.join()
    text = b"".join(said).decode(errors="replace")
    assert "audit" in text
    assert "Traceback" not in text
    assert text.rstrip().endswith("holdfast: interrupted")


def listen(terminal: int, said: list[bytes]) -> None:
    """All that is written to a terminal, until nobody holds its other end any more."""
    with suppress(OSError):
        while part := os.read(terminal, 65_536):
            said.append(part)
    os.close(terminal)


def test_the_cause_of_a_failure_is_found_in_what_spark_says() -> None:
    worker = (
        "Job aborted:\nTraceback (most recent call last):\n  File x\nholdfast.errors.X: the cause\n\n\tat org.apache"
    )
    assert _cause(worker) == "holdfast.errors.X: the cause"
    assert (
        _cause("[TABLE] There is no table\nof that name\nJVM stacktrace:\nat org")
        == "[TABLE] There is no table of that name"
    )
