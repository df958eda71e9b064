"""`holdfast demo`, as a newcomer runs it: every claim of it holds, one that does not is named, and nothing is left."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

HOLDFAST = ["-m", "holdfast.cli"]
CHAPTERS = [
    "The server",
    "Mail for agents that are away",
    "A worker is killed in the middle of its work",
    "A message that nobody can read",
    "Three promises, field by field",
    "Agents with a memory",
    "kill -9 for the server itself",
]
CLAIMS = 29  # Without Spark.
SPARK = "Morning: what happened?"
SPARK_CLAIMS = 7


class Newcomer:
    """Somebody in a folder of their own, with a folder for temporary files that nobody else uses."""

    def __init__(self, folder: Path) -> None:
        self.here, self.temporary = folder / "here", folder / "temporary"
        self.here.mkdir()
        self.temporary.mkdir()
        self._mark = uuid.uuid4().hex  # In the environment of every process that comes of it.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        self.environment = {
            **kept,
            "NEWCOMER": self._mark,
            "TMPDIR": str(self.temporary),
            "COLUMNS": "80",
            "HOLDFAST_URL": "http://127.0.0.1:1",  # Of another plane, which is none of the demo's business.
        }

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Run Python with these words."""
        return subprocess.Popen(
            [sys.executable, "-W", "error", *words],
            cwd=self.here,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """Run it to its end; what it says."""
        process = self.start(*words)
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, (process.returncode, out, err)
        return out

    def processes(self) -> list[str]:
        """What runs on their behalf."""
        return [cmdline for mark, cmdline in _running() if self._mark in mark]

    def left(self) -> list[str]:
        """Processes, files and folders that are still there."""
        return [*self.processes(), *map(str, (*self.temporary.rglob("*"), *self.here.rglob("*")))]


def _running() -> Iterator[tuple[str, str]]:
    """The environment and the command line of each process that lives."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "environ").read_text(errors="replace"), (folder / "cmdline").read_text(errors="replace")
        except OSError:  # It ended meanwhile, or is another user's.
            continue


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path)


def chapters(claims: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(claim["chapter"] for claim in claims))


def test_every_claim_of_the_story_holds_and_nothing_is_left(newcomer: Newcomer) -> None:
    ending = json.loads(newcomer.run(*HOLDFAST, "demo", "--without-spark", "--json"))
    claims = ending["claims"]
    assert [claim for claim in claims if not claim["holds"]] == []
    assert ending["ok"]
    assert chapters(claims) == CHAPTERS
    assert len(claims) == CLAIMS
    assert all(claim["claim"] and claim["checked"] and claim["figure"] for claim in claims)
    assert newcomer.left() == []


@pytest.mark.nightly  # Over a minute where others use the machine too; the story without Spark is above.
def test_the_whole_night_with_spark_ends_in_a_report(newcomer: Newcomer) -> None:
    ending = json.loads(newcomer.run(*HOLDFAST, "demo", "--json"))
    claims = ending["claims"]
    assert [claim for claim in claims if not claim["holds"]] == []
    assert chapters(claims) == [*CHAPTERS, SPARK]
    assert len(claims) == CLAIMS + SPARK_CLAIMS
    report = newcomer.here / "holdfast-demo-report.html"
    assert ending["report"] == str(report)
    assert "All 6 worlds are well" in report.read_text()
    assert newcomer.left() == [str(report)]


BROKEN = """
from holdfast.cli.main import root
from holdfast.handles.sync.queues import Queue
from holdfast.handles.sync.worlds import World
from holdfast.wire.restores import Restored

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


def test_claims_that_do_not_hold_are_named_and_the_demo_fails(newcomer: Newcomer) -> None:
    said = newcomer.run("-c", BROKEN, code=1)
    assert f"2 of {CLAIMS} claims do not hold:" in said
    failed = said.partition("claims do not hold:")[2]
    assert "every restore equals a full replay, byte for byte" in " ".join(failed.split())
    assert "nothing that was acknowledged is lost" in " ".join(failed.split())
    assert said.count("✗") == 4  # Each where it was told, and in the table.
    assert max(map(len, said.partition("To look around")[0].splitlines())) <= 80

    # What was to be kept is there, and is a plane like any other.
    assert list(newcomer.temporary.iterdir()) == []
    assert newcomer.processes() == []
    with holdfast.open(f"dir:{newcomer.here / 'kept' / 'data'}") as plane:
        assert plane.queue("tickets").stats().acked_total == 145
        assert len(plane.worlds()) == 6


RAISING = """
from holdfast.cli.main import root
from holdfast.errors import MailboxFull
from holdfast.handles.sync.mailboxes import Mailbox


def send(self, to, body, **options):
    raise MailboxFull("The mailbox is full")


Mailbox.send = send
root.main(["demo", "--without-spark"])
"""


def test_a_chapter_that_fails_is_a_claim_that_does_not_hold(newcomer: Newcomer) -> None:
    said = newcomer.run("-c", RAISING, code=1)
    assert "MailboxFull: The mailbox is full" in said
    assert "1 of 3 claims do not hold:" in said
    assert newcomer.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_interrupts_it_finds_nothing_left(newcomer: Newcomer, number: signal.Signals) -> None:
    process = newcomer.start("-u", *HOLDFAST, "demo", "--without-spark")
    assert process.stdout is not None
    while "The agents come back" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (130, "holdfast: interrupted")
    assert newcomer.left() == []


def test_a_folder_with_something_in_it_is_not_taken(newcomer: Newcomer) -> None:
    (newcomer.here / "mine.txt").write_text("mine")
    process = newcomer.start(*HOLDFAST, "demo", "--without-spark", "--keep", ".")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (9, "")
    assert "is not empty; name a new folder for --keep" in err
    assert newcomer.left() == [str(newcomer.here / "mine.txt")]


@pytest.mark.parametrize("module", ["pyspark", "deltalake"])
def test_whoever_has_no_spark_is_told_before_the_story_begins(newcomer: Newcomer, module: str) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; from holdfast.cli.main import root; root.main(['demo'])"
    process = newcomer.start("-c", without)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (9, "")
    assert "pip install 'holdfast[spark]'" in err
    assert "holdfast demo --without-spark" in err
    assert newcomer.left() == []
