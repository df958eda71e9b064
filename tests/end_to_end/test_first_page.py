"""docs/start.md, followed literally: installed from a wheel, one shell, a killed worker, and the console in a browser.

Only two things are replaced: the package index by the wheel built from this source, with the dependencies of the
running environment, and the port 9440 by a free one.
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
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start.md"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "@@ end of block"
SECONDS_MAX = 300  # "In under five minutes".
PORT = "9440"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, timeout=300)
    [built] = folder.glob("fastness-*.whl")
    return built


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

    def run(self, code: str, deadline: float) -> str:
        """The output of a block, whose last command must succeed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{code}\necho '{END}' $?\n")
        self._process.stdin.flush()
        output = ""
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.001))
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


def check_in_browser(address: str, seconds: float) -> None:
    """The console shows the job: done, in the second of two deliveries."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        expect.set_options(timeout=min(seconds, 60) * 1_000)
        main = page.locator("main")
        expect(main).to_contain_text('"done_in_attempt": 2')
        expect(main.locator("dt", has_text="State").locator("xpath=following-sibling::dd[1]")).to_have_text("done")
        expect(main.locator("dt", has_text="Deliveries").locator("xpath=following-sibling::dd[1]")).to_have_text("2")
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path; apt-get install chromium")
def test_the_first_page_leads_to_a_recovered_job(wheel: Path, tmp_path: Path) -> None:
    port = free_port()
    packages = sysconfig.get_paths()["purelib"]
    # The dependencies come from this environment. A path in a .pth file is behind the packages of the new environment.
    install = f"pip install --quiet --no-deps --no-index {wheel} && echo {packages} > $(python -c "
    install += "'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])')/dependencies.pth"
    text = PAGE.read_text()
    assert text.count("pip install fastness\n") == 1
    text = text.replace("pip install fastness\n", f"{install}\n").replace(PORT, port)
    hidden = ("FASTNESS_", "PYTHON", "VIRTUAL_ENV", "COVERAGE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "FASTNESS_PORT": port,  # Commands of the page use the default port, which may be in use.
        "FASTNESS_URL": f"http://127.0.0.1:{port}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    work = tmp_path / "work"
    work.mkdir()
    deadline = time.monotonic() + SECONDS_MAX
    shell = Shell(work, environment)
    output, seen = "", ""
    try:
        for language, title, code in BLOCK.findall(text):
            if title:
                (work / "fastness-start" / title).write_text(code)
            elif language == "sh":
                output = shell.run(code, deadline)
                seen += output
                if "/console#" in output:
                    check_in_browser(output.strip(), deadline - time.monotonic())
            else:
                assert language == "text"
                missing = [line for line in code.splitlines() if line not in output]
                assert missing == [], output
        used = shell.run("python -c 'import fastness; print(fastness.__file__)'", deadline)
    finally:
        shell.close()
    assert "/console#" in seen
    assert str(work / "fastness-start" / ".venv") in used
