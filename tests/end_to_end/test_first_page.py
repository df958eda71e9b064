"""docs/start.md, followed literally from a clone: installed, one shell, a killed worker, and the console in a browser.

The clone has the files of the working tree, in a folder of its own. The dependencies come from the package index that
pip is configured for. One thing is replaced: the port 9440, by a free one.
"""

import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from smoke import interpreter

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start.md"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "@@ end of block"
SILENT_SECONDS_MAX = 900  # Without any output. Only a command that hangs takes as long.
PORT = "9440"


class Shell:
    """One bash in which the blocks run one after the other, as a reader types them."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "-u", "-o", "pipefail"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def run(self, code: str) -> str:
        """The output of a block, whose last command must succeed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{code}\necho '{END}' $?\n")
        self._process.stdin.flush()
        output = ""
        while True:
            line = self._lines.get(timeout=SILENT_SECONDS_MAX)
            assert line is not None, f"the shell ended in:\n{code}\n{output}"
            if line.startswith(END):
                assert line.split()[-1] == "0", f"{code}\n{output}"
                return output
            output += line

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # Also ends what a failed block left running.
        self._process.communicate()
        self._reader.join()


def free_port() -> str:
    """A free port below the ephemeral range, so that no outgoing connection can take it before it is used."""
    for _ in range(100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return str(probe.getsockname()[1])
    pytest.fail("no free port found")


def check_in_browser(address: str) -> None:
    """The console shows the job: done, in the second of two deliveries."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        expect.set_options(timeout=60_000)
        main = page.locator("main")
        expect(main).to_contain_text('"done_in_attempt": 2')
        expect(main.locator("dt", has_text="State").locator("xpath=following-sibling::dd[1]")).to_have_text("done")
        expect(main.locator("dt", has_text="Deliveries").locator("xpath=following-sibling::dd[1]")).to_have_text("2")
        browser.close()


@pytest.fixture(scope="module")
def _package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips the test if pip cannot download a small package."""
    [package] = re.findall(r"^cronsim==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    folder = str(tmp_path_factory.mktemp("download"))
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "--dest", folder, package]
    if subprocess.run(download, capture_output=True, check=False, timeout=300).returncode:
        pytest.skip("no package index reached; connect this machine to a network, or configure pip for a mirror")


def clone(folder: Path) -> None:
    """Copy the files of the working tree: those of the repository, and new ones that it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no Git repository; clone Fastness")
    for name in done.stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.thorough
@pytest.mark.usefixtures("_package_index")
@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_the_first_page_leads_from_a_clone_to_a_recovered_job(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on the path or in pyenv; pyenv install {version}")
    folder = tmp_path / "fastness"
    clone(folder)
    # Not a virtual environment, which could lend its packages.
    base = subprocess.check_output([python, "-c", "import sys; print(sys.base_prefix)"], text=True).strip()
    port = free_port()
    hidden = ("FASTNESS_", "PYTHON", "VIRTUAL_ENV", "COVERAGE", "MAKE", "MFLAGS", "XDG_CONFIG_HOME")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {
        "PATH": f"{base}/bin:/usr/local/bin:/usr/bin:/bin",
        "FASTNESS_PORT": port,  # Commands of the page use the default port, which may be in use.
        "FASTNESS_URL": f"http://127.0.0.1:{port}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    if version != "3.11":  # Which the Makefile prefers.
        environment["PYTHON"] = f"python{version}"
    (tmp_path / "config").mkdir()
    configured = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    (tmp_path / "config" / "pip").symlink_to(configured / "pip")  # The index may be a mirror.
    shell = Shell(folder, environment)
    work, output, seen = folder / "build" / "start", "", ""
    try:
        for language, title, code in BLOCK.findall(PAGE.read_text().replace(PORT, port)):
            if title:
                (work / title).write_text(code)
            elif language == "sh":
                output = shell.run(code)
                seen += output
                if "/console#" in output and CHROMIUM is not None:
                    check_in_browser(output.strip())
            else:
                assert language == "text"
                missing = [line for line in code.splitlines() if line not in output]
                assert missing == [], output
        used = shell.run("python -c 'import fastness, sys; print(fastness.__file__, sys.prefix, sys.version)'")
    finally:
        shell.close()
    assert "/console#" in seen
    imported, prefix, running = used.split()[:3]
    assert imported == str(folder / "src" / "fastness" / "__init__.py")
    assert prefix == str(folder / ".venv")
    assert running.startswith(f"{version}.")
