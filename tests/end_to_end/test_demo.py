"""`fastness demo`: every claim holds, a failed claim is listed, and no process or file remains."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from tests.support.forked import start_python

FASTNESS = ["-m", "fastness.cli"]
CHAPTERS = [
    "The server",
    "Mail to offline agents",
    "A worker is killed while it works",
    "A message that no worker can decode",
    "Three durability tiers, field by field",
    "Worlds: journals, snapshots and restores",
    "The server is killed",
]
CLAIMS = 29  # Without Spark.
SPARK = "The pipeline: tables, audit and report"
SPARK_CLAIMS = 7


class DemoRunner:
    """Runs the demo in a new folder, with its own folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder / "folder", folder / "temporary"
        self.folder.mkdir()
        self.temporary.mkdir()
        self._mark = uuid.uuid4().hex  # In the environment of every process of the demo.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self.environment = {
            **kept,
            "DEMO_TEST": self._mark,
            "TMPDIR": str(self.temporary),
            "COLUMNS": "80",
            "PYTHONUNBUFFERED": "1",
            "FASTNESS_URL": "http://127.0.0.1:1",  # Another plane, which the demo must not use.
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start Python with these arguments."""
        return start_python(
            arguments,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run Python to its end. Returns its output."""
        process = self.start(*arguments)
        out, err = process.communicate()
        assert process.returncode == code, (process.returncode, out, err)
        return out

    def processes(self) -> list[str]:
        """The command lines of the demo's processes that run."""
        return [cmdline for mark, cmdline in _running() if self._mark in mark]

    def remaining(self) -> list[str]:
        """The remaining processes, files and folders."""
        return [*self.processes(), *map(str, (*self.temporary.rglob("*"), *self.folder.rglob("*")))]


def _running() -> Iterator[tuple[str, str]]:
    """The environment and the command line of each running process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "environ").read_text(errors="replace"), (folder / "cmdline").read_text(errors="replace")
        except OSError:  # The process has ended, or belongs to another user.
            continue


@pytest.fixture
def demo(tmp_path: Path) -> DemoRunner:
    return DemoRunner(tmp_path)


def chapters(claims: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(claim["chapter"] for claim in claims))


@pytest.mark.rotating
def test_every_claim_holds_and_nothing_remains(demo: DemoRunner) -> None:
    result = json.loads(demo.run(*FASTNESS, "demo", "--without-spark", "--json"))
    claims = result["claims"]
    assert [claim for claim in claims if not claim["holds"]] == []
    assert result["ok"]
    assert chapters(claims) == CHAPTERS
    assert len(claims) == CLAIMS
    assert all(claim["claim"] and claim["checked"] and claim["figure"] for claim in claims)
    assert demo.remaining() == []


@pytest.mark.nightly  # Takes over a minute on a busy machine.
def test_the_demo_with_spark_writes_a_report(demo: DemoRunner) -> None:
    result = json.loads(demo.run(*FASTNESS, "demo", "--json"))
    claims = result["claims"]
    assert [claim for claim in claims if not claim["holds"]] == []
    assert chapters(claims) == [*CHAPTERS, SPARK]
    assert len(claims) == CLAIMS + SPARK_CLAIMS
    report = demo.folder / "fastness-demo-report.html"
    assert result["report"] == str(report)
    assert "All 6 worlds passed the audit" in report.read_text()
    assert demo.remaining() == [str(report)]


BROKEN = """
from fastness.cli.main import root
from fastness.handles.sync.queues import Queue
from fastness.handles.sync.worlds import World
from fastness.wire.restores import Restored

receive, restore = Queue.receive_many, World.restore
dropped = []


def receive_all_but_one(self, *args, **options):
    batch = receive(self, *args, **options)
    if self.name == "morning" and batch and not dropped:
        dropped.append(batch.pop())
    return batch


def restore_less(self, reducer):
    found = restore(self, reducer)
    return Restored({**found.state, "stars": 0}, found.height)


Queue.receive_many, World.restore = receive_all_but_one, restore_less
root.main(["demo", "--without-spark", "--keep", "kept"])
"""


@pytest.mark.nightly  # A second run of the whole demo.
def test_failed_claims_are_listed_and_the_demo_fails(demo: DemoRunner) -> None:
    text = demo.run("-c", BROKEN, code=1)
    assert f"2 of {CLAIMS} claims do not hold:" in text
    failed = text.partition("claims do not hold:")[2]
    assert "every restore equals a full replay, byte for byte" in " ".join(failed.split())
    assert "nothing that was acknowledged is lost" in " ".join(failed.split())
    assert text.count("✗") == 4  # Each in its chapter, and in the table.
    assert max(map(len, text.partition("To explore the data")[0].splitlines())) <= 80

    # The kept data can be opened as a plane.
    assert list(demo.temporary.iterdir()) == []
    assert demo.processes() == []
    with fastness.open(f"dir:{demo.folder / 'kept' / 'data'}") as plane:
        assert plane.queue("tickets").stats().acked_total == 145
        assert len(plane.worlds()) == 6


RAISING = """
from fastness.cli.main import root
from fastness.errors import MailboxFull
from fastness.handles.sync.mailboxes import Mailbox


def send(self, to, body, **options):
    raise MailboxFull("The mailbox is full")


Mailbox.send = send
root.main(["demo", "--without-spark"])
"""


def test_a_chapter_that_raises_is_a_failed_claim(demo: DemoRunner) -> None:
    text = demo.run("-c", RAISING, code=1)
    assert "MailboxFull: The mailbox is full" in text
    assert "1 of 3 claims do not hold:" in text
    assert demo.remaining() == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.rotating)])
def test_an_interrupted_demo_leaves_nothing(demo: DemoRunner, number: signal.Signals) -> None:
    process = demo.start(*FASTNESS, "demo", "--without-spark")
    assert process.stdout is not None
    while "The agents connect" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate()
    assert (process.returncode, err.strip()) == (130, "fastness: interrupted")
    assert demo.remaining() == []


def test_a_non_empty_folder_is_rejected(demo: DemoRunner) -> None:
    (demo.folder / "mine.txt").write_text("mine")
    process = demo.start(*FASTNESS, "demo", "--without-spark", "--keep", ".")
    out, err = process.communicate()
    assert (process.returncode, out) == (9, "")
    assert "is not empty; choose a new folder for --keep" in err
    assert demo.remaining() == [str(demo.folder / "mine.txt")]


@pytest.mark.parametrize("module", ["pyspark", "deltalake"])
def test_missing_spark_is_reported_before_the_demo_starts(demo: DemoRunner, module: str) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; from fastness.cli.main import root; root.main(['demo'])"
    process = demo.start("-c", without)
    out, err = process.communicate()
    assert (process.returncode, out) == (9, "")
    assert "pip install '.[spark]'" in err
    assert "fastness demo --without-spark" in err
    assert demo.remaining() == []
