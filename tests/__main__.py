"""Runs the tests on all cores: `python -m tests [FILE or FOLDER ...] [-- PYTEST ARGUMENTS]`.

One process imports what most tests need, starts one PostgreSQL and one fork server for child processes, and then forks
a process for each list of test files: nothing is imported, collected or started twice. The tests of Spark
are one list, and those in a browser another. The folder of the run is in memory where that has room: on a disk most
tests wait for it. When the run ends, also by Ctrl-C or SIGTERM, every process that it started is killed, and the folder
is removed.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = ROOT / "build" / "test-seconds.json"  # By test, of the runs before: the longest list begins first.
BYTES_A_SECOND: Final = 8_000  # Of a test file that has not run yet.
LISTS_A_PROCESS: Final = 8
TOGETHER: Final = {"tests/browser": "", "tests/pipeline": r"\bspark[,:\"]"}  # One list of files, by what is in them.
IMPORTS: Final = (
    "celery.apps.worker",
    "celery.bin.celery",
    "fastness.cli.main",
    "fastness.client.transport",
    "fastness.handles.sync.plane",
    "fastness.server.mcp.endpoint",
    "fastness.server.serving",
    "fastness.testing",
    "kombu.transport.SQS",
)
MEMORY: Final = Path("/dev/shm")
MEMORY_BYTES_MIN: Final = 8 << 30
NO_TESTS: Final = 5  # The exit code of pytest when all tests of a list are deselected.
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


class Stopped(BaseException):
    """The run was interrupted."""


@dataclass
class Outcome:
    """What the tests of a list did."""

    counts: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Recorder:
    """A pytest plugin that records the outcome."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = self.outcome
        outcome.seconds[report.nodeid] += report.duration
        if report.failed:
            outcome.counts["failed" if report.when == "call" else "errors"] += 1
            outcome.failures.append(report.nodeid)
        elif report.skipped:
            outcome.counts["skipped"] += 1
            outcome.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            outcome.counts["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.counts["errors"] += 1
            self.outcome.failures.append(report.nodeid)
        elif report.skipped:
            self.outcome.counts["skipped"] += 1
            self.outcome.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


@dataclass
class Running:
    """A process that runs a list of files."""

    files: list[str]
    output: Path
    started: float


class Run:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.coverage: bool = arguments.coverage
        self.pytest_arguments: list[str] = arguments.pytest
        self.processes: int = arguments.processes
        self.total = Outcome()
        self.running: dict[int, Running] = {}
        self.before: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        self._weights: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self.before.items():
            self._weights[test.partition("::")[0]] += seconds

    def run(self, files: list[str]) -> None:
        waiting = list(self._lists(files))
        count = len(waiting)
        for done in range(count):
            while waiting and len(self.running) < self.processes:
                self._start(waiting.pop(0), len(waiting))
            self._finish_one(f"[{done + 1:{len(str(count))}}/{count}]")

    def _weight(self, file: str) -> float:
        return self._weights[file] or (ROOT / file).stat().st_size / BYTES_A_SECOND

    def _lists(self, files: list[str]) -> Iterator[list[str]]:
        """The lists of files, the longest first."""
        lists = []
        for folder, text in TOGETHER.items():  # They share a Chromium, and a Spark.
            of_folder = [file for file in files if file.startswith(folder)]
            lists.append([file for file in of_folder if re.search(text, (ROOT / file).read_text())])
        together = {file for found in lists for file in found}
        alone = sorted(set(files) - together, key=self._weight, reverse=True)
        enough = sum(map(self._weight, alone)) / (self.processes * LISTS_A_PROCESS)
        filled = 0.0
        for file in alone:
            weight = self._weight(file)
            if not filled or filled + weight > enough:
                lists.append([])
                filled = 0.0
            lists[-1].append(file)
            filled += weight
        return (files for files in lists if files)

    def _start(self, files: list[str], number: int) -> None:
        output = self.folder / f"output-{number}"
        sys.stdout.flush()
        if pid := os.fork():
            self.running[pid] = Running(files, output, time.monotonic())
            return
        code = 1
        try:
            code = self._run_list(files, output)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _run_list(self, files: list[str], output: Path) -> int:
        """Run the tests of some files in this process, which was forked for them."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not any(files[0].startswith(folder) for folder in TOGETHER):
            os.nice(5)  # The two long lists must not be the last ones.
        os.setpgid(0, 0)  # A signal that a test sends to its group does not reach the run.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, own in ((nothing, 0), (to, 1), (to, 2)):
            os.dup2(fd, own)
        measuring = None
        if self.coverage:
            import coverage

            measuring = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"), data_suffix=True)
            measuring.start()
        import pytest

        recorder = Recorder()
        arguments = [
            "--config-file=pyproject.toml",
            "-q",
            "--no-header",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            str(output.with_suffix(".files")),
            *self.pytest_arguments,
            *files,
        ]
        code = pytest.main(arguments, plugins=[recorder])
        if measuring is not None:
            measuring.stop()
            measuring.save()
        output.with_suffix(".json").write_text(json.dumps(vars(recorder.outcome)))
        return int(code)

    def _finish_one(self, progress: str) -> None:
        while True:
            pid, status = os.waitpid(-1, 0)
            if (ended := self.running.pop(pid, None)) is not None:
                break
        code = os.waitstatus_to_exitcode(status)
        result = ended.output.with_suffix(".json")
        if result.exists():
            outcome = Outcome(**{name: _loaded(value) for name, value in json.loads(result.read_text()).items()})
        else:
            outcome = Outcome()
        if code not in (0, NO_TESTS) and not outcome.failures:  # It ended early, or an argument is wrong.
            outcome.counts["errors"] += 1
            outcome.failures = ended.files
        for name, value in vars(outcome).items():
            vars(self.total)[name] += value
        shutil.rmtree(ended.output.with_suffix(".files"), ignore_errors=True)
        names = f"{ended.files[0]} and {len(ended.files) - 1} more" if ended.files[1:] else ended.files[0]
        seconds = time.monotonic() - ended.started
        print(f"{progress} {names}: {_counts(outcome.counts)}, {seconds:.0f} s", flush=True)
        if outcome.failures:
            print(f"The process ended with {code}.")
            print(ended.output.read_text(errors="backslashreplace"), flush=True)


def _loaded(value: Any) -> Any:
    return value if isinstance(value, list) else Counter(value)


def _counts(counts: Counter[str]) -> str:
    shown = ("passed", *(name for name in ("failed", "errors", "skipped") if counts[name]))
    return ", ".join(f"{counts[name]} {name}" for name in shown)


def files_of(paths: list[str]) -> list[str]:
    """The test files at these paths, relative to the root of the repository."""
    found = []
    for path in paths:
        place = Path(path).resolve()
        found += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    return [os.path.relpath(file, ROOT) for file in found]


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from descendants(child)


def stop_everything() -> None:
    """Kill every process that descends from this one, until there is none."""
    while found := list(descendants(os.getpid())):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def part() -> int:
    """The part of the rotating tests that the commit chooses."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(head[:8] or "0", 16)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests", description="Run the tests on all cores.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="test files and folders")
    parser.add_argument("--all", action="store_true", help="every test on every backend, as before a release")
    parser.add_argument("--changed", metavar="COMMIT", help="only what the changes since this commit can reach")
    parser.add_argument("--coverage", action="store_true", help="measure which lines run")
    parser.add_argument("--processes", type=int, default=3 * len(os.sched_getaffinity(0)), help="at the same time")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser.parse_args(arguments[:end])
    for path in given.paths:
        if not Path(path).exists():
            parser.error(f"there is no file or folder {path}")
    given.pytest = arguments[end + 1 :]
    given.pytest += [] if given.all else ["-m", "not thorough and not nightly", f"--part={part()}"]
    return given


def main(arguments: list[str]) -> int:
    given = parsed(arguments)
    started = time.monotonic()
    os.chdir(ROOT)
    files = files_of(given.paths)
    if given.changed is not None:
        from tests.support.changed import changed_files, tests_of, whole_files

        changed = changed_files(given.changed)
        reached = set(tests_of(changed))
        files = [file for file in files if file in reached]
        given.pytest += [f"--whole={file}" for file in whole_files(changed)]
        print(f"{len(files)} files of tests can be reached by what changed since {given.changed}.")
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # What a test leaves behind becomes a child of this process.
    folder = Path(tempfile.mkdtemp(prefix="fastness-", dir=_place()))
    folder.chmod(0o755)
    run = Run(given, folder)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _stop)
    stopped = False
    try:
        prepare(folder, given)
        run.run(files)
    except Stopped:
        stopped = True
    finally:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        stop_everything()
        shutil.rmtree(folder, ignore_errors=True)
    total = run.total
    if not stopped:
        SECONDS.parent.mkdir(exist_ok=True)
        others = {test: seconds for test, seconds in run.before.items() if test.partition("::")[0] not in files}
        SECONDS.write_text(json.dumps({**others, **total.seconds}, indent=1))
    if total.failures:
        print("To repeat the failures: .venv/bin/pytest " + shlex.join(total.failures))
    why = "; ".join(f"{count}: {reason}" for reason, count in total.skips.most_common())
    print(
        f"{'stopped: ' if stopped else ''}{total.counts['passed']} passed, {len(total.failures)} failed, "
        f"{total.counts['skipped']} skipped{f' ({why})' if why else ''}, {time.monotonic() - started:.0f} s"
    )
    return 1 if stopped or total.failures or not total.counts["passed"] else 0


def _place() -> Path | None:
    """Where the folder of the run is: in TMPDIR if that is set, else in memory if there is room."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN
    return MEMORY if has_room and "TMPDIR" not in os.environ else None


def prepare(folder: Path, given: argparse.Namespace) -> None:
    """Import, create and start what the tests share."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    runtime = folder / "runtime"  # Without a private one the package of PostgreSQL warns.
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    from tests.support import forked
    from tests.support.postgres import SERVER, THROWAWAY, PostgresServer

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    if given.coverage:
        shutil.rmtree(ROOT / "build" / "coverage", ignore_errors=True)
        (ROOT / "build" / "coverage").mkdir(parents=True)
    else:  # Under coverage each process imports for itself: the lines that run then are measured, too.
        for module in IMPORTS:
            importlib.import_module(module)
        gc.freeze()
        address = folder / "fork-server"
        forked.serve_forks(address)
        os.environ[forked.ADDRESS] = str(address)
        with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
            importlib.import_module("pytest").main(["--version", "-W", "ignore"])  # Imports its plugins, too.
    os.environ[SERVER] = PostgresServer(**THROWAWAY).url
    gc.freeze()


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
