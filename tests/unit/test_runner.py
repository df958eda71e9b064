"""`python -m tests`: its last line, and that an interrupted run leaves nothing behind."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.changed import ROOT, whole_files
from tests.support.forked import start_python
from tests.support.waiting import eventually

OUTCOMES = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_raises_at_its_end(end): pass

@pytest.fixture
def end():
    yield
    raise OSError("the end")

@pytest.mark.parametrize("page", range(3))
def test_page(page): pytest.skip("no browser on the path; apt-get install browser")

@pytest.mark.skipif(True, reason="no browser on the path; apt-get install browser")
def test_marked(): pass

@pytest.mark.thorough
def test_thorough(): pass
"""
ENDS = "import os\ndef test_ends_its_process(): os._exit(3)"
HANGS = """
import os, subprocess, time
def test_hangs(tmp_path):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(os.environ["STARTED"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: PostgreSQL creates a socket below it."""
    with TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def run(folder: Path, **tests: str) -> Iterator["subprocess.Popen[str]"]:
    """A run of these test files."""
    (folder / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "STARTED": str(folder / "started")}
    with start_python(["-m", "tests", folder], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def left_behind(folder: Path) -> list[str]:
    """The processes with this folder in their environment or command, and what is in the folder for temporary files."""
    found = [str(path) for path in (folder / "tmp").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in text and process.name != str(os.getpid()):
            found.append(text.decode(errors="replace"))
    return found


def test_a_run_ends_with_what_passed_failed_and_was_skipped_and_why(folder: Path) -> None:
    with run(folder, outcomes=OUTCOMES, ends=ENDS) as process:
        output, _ = process.communicate()
    *_, repeat, last = output.splitlines()
    assert process.returncode == 1
    assert "assert 1 == 2" in output
    assert "OSError: the end" in output
    assert "::test_fails" in repeat
    assert last.startswith("2 passed, 3 failed, 4 skipped (4: no browser on the path; apt-get install browser), ")
    assert left_behind(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_an_interrupted_run_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    with run(folder, outcomes=OUTCOMES, hangs=HANGS) as process:
        eventually((folder / "started").exists, "the test has started its child")
        process.send_signal(number)
        output, _ = process.communicate()
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("stopped: ")
    assert left_behind(folder) == []


def test_a_change_of_what_is_between_a_client_and_its_plane_runs_every_test_through_a_client() -> None:
    for file in ("client/transport.py", "wire/frames.py", "server/http/routes.py"):
        [whole] = whole_files([f"src/fastness/{file}"])
        assert (ROOT / whole).is_file()
    assert whole_files(["src/fastness/layers/queues/put.py", "tests/conftest.py"]) == []
