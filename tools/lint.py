"""Run the checks of `make lint`, as many at a time as there are cores.

python tools/lint.py              all; exit 1 if one fails, with its output
python tools/lint.py mypy ruff    some
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
_BIN: Final = Path(sys.executable).parent
_CORES: Final = len(os.sched_getaffinity(0))
_NO_WORKER: Final = "Failed to establish connection with worker"

# The longest first. The commands of a part run one after the other: the documents use the cache of mypy on the code.
PARTS: Final = {
    "mypy": (f"mypy --num-workers {_CORES}", "python tools/check_documents.py"),
    "twins": ("python tools/make_options.py --check", "python tools/make_twins.py --check"),
    "names": ("python tools/check_names.py",),
    "reference": ("python tools/make_reference.py --check",),
    "api-examples": ("python tools/make_api_examples.py --check",),
    "manual": ("python tools/make_manual.py --check",),
    "ruff": ("ruff check .", "ruff format --check ."),
    "clocks": ("python tools/check_clocks.py",),
    "links": ("python tools/check_links.py",),
    "imports": ("lint-imports",),
    "sqs-shapes": ("python tools/make_sqs_shapes.py --check",),
    "vendored": ("python tools/vendor.py --check",),
    "dashboard": ("python tools/make_dashboard.py --check",),
}
_running: Final[set[subprocess.Popen[str]]] = set()


class Result(NamedTuple):
    part: str
    seconds: float
    output: str  # Of the commands that failed; empty if all passed.


def main() -> None:
    unknown = sorted(set(sys.argv[1:]) - PARTS.keys())
    if unknown:
        sys.exit(f"There is no check {', '.join(unknown)}; the checks are: {', '.join(PARTS)}")
    chosen = [part for part in PARTS if part in sys.argv[1:]] or list(PARTS)
    started = time.monotonic()
    failed = []
    try:
        for result in results(chosen):
            print(f"{'failed' if result.output else 'passed'} {result.part} in {result.seconds:.1f} s", flush=True)
            print(result.output, end="", flush=True)
            failed += [result.part] if result.output else []
    except KeyboardInterrupt:
        sys.exit(130)
    verdict = f"failed: {', '.join(failed)}" if failed else "all passed"
    print(f"{len(chosen)} checks in {time.monotonic() - started:.0f} s, {verdict}")
    sys.exit(1 if failed else 0)


def results(parts: list[str]) -> Iterator[Result]:
    """The results of the parts, in their order."""
    with ThreadPoolExecutor(_CORES) as pool:
        try:
            yield from pool.map(run, parts)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for command in _running.copy():
                command.terminate()
            raise


def run(part: str) -> Result:
    started, output = time.monotonic(), ""
    for command in PARTS[part]:
        code, printed = execute(command)
        if _NO_WORKER in printed:  # mypy gives its workers 3 s to start, which a busy machine may not.
            code, printed = execute("mypy")
        if code:
            output += f"$ {command}\n{printed}"
        if code < 0:
            break  # Interrupted: the next command must not start.
    return Result(part, time.monotonic() - started, output)


def execute(command: str) -> tuple[int, str]:
    """The exit code of a command, and what it has printed."""
    program, *arguments = command.split()
    with subprocess.Popen(
        [str(_BIN / program), *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        _running.add(running)
        printed, _ = running.communicate()
        _running.discard(running)
    return running.returncode, printed


if __name__ == "__main__":
    main()
