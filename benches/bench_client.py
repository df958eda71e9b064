"""The client for threads against one server process, optionally in turns with the client of another commit.

    python -m benches client
    python -m benches.bench_client --against HEAD~1 --rounds 15
    python -m benches.bench_client --data memory:

Each client is a process; they take turns of a fraction of a second, and share the server, which is that of this code.
Medians of the turns. Processor time is that of all threads of the client process, and of the server process in the same
turn: on a busy machine it says more than the rate. There, run it as `chrt -r 1 python -m benches.bench_client`.

Each process has a session of its own. Linux shares a busy core between sessions first (autogroups): a client and a
server of one session alternate on one core and share its time, and a client with more threads gets more of it by moving
the server to another core. The rates of a single caller would show that, and not the client.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.table import Table

from benches.comparison import echo

ROOT: Final = Path(__file__).parents[1]
CHILD: Final = Path(__file__).with_name("client_process.py")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class Workload(NamedTuple):
    name: str
    threads: int
    operations: int


WORKLOADS: Final = (
    Workload("put", 1, 400),
    Workload("receive and ack", 1, 200),
    Workload("put", 8, 1_600),
    Workload("put", 32, 3_200),
    Workload("receive and ack", 8, 800),
)


class Turn(NamedTuple):
    """What one operation took, in seconds."""

    wall: float
    client: float
    server: float


class Client:
    """A client process, with the code in `root`."""

    def __init__(self, root: Path, url: str, name: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(root / "src")}
        command = [sys.executable, str(CHILD), url, name]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._read() == "ready"

    def run(self, workload: Workload) -> dict[str, float]:
        assert self._process.stdin is not None
        task = {"workload": workload.name, "threads": workload.threads, "operations": workload.operations}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        taken: dict[str, float] = json.loads(self._read())
        return taken

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main(argv: Sequence[str] = ()) -> None:
    options = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="fastness-client-") as folder, ExitStack() as stack:
        roots = {"this code": ROOT}
        if options.against:
            roots = {options.against: stack.enter_context(worktree(options.against, Path(folder)))} | roots
        server, port = stack.enter_context(serving(options.data or f"dir:{folder}/data"))
        clients = {}
        for number, (name, root) in enumerate(roots.items()):
            clients[name] = Client(root, f"http://127.0.0.1:{port}", f"queue-{number}")
            stack.callback(clients[name].close)
        for workload in WORKLOADS:
            echo(table(workload, race(clients, workload, server.pid, options.rounds)))


def race(clients: dict[str, Client], workload: Workload, server: int, rounds: int) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in clients}
    for round_ in range(rounds + 1):
        for name, client in clients.items():
            before = cpu_seconds_of(server)
            taken = client.run(workload)
            server_seconds = cpu_seconds_of(server) - before
            if round_:  # The first round is a warm-up.
                seconds = (taken["seconds"], taken["cpu_seconds"], server_seconds)
                turns[name].append(Turn(*(each / workload.operations for each in seconds)))
    return turns


def table(workload: Workload, turns: dict[str, list[Turn]]) -> Table:
    title = f"{workload.name}, {workload.threads} {'thread' if workload.threads == 1 else 'threads'}"
    result = Table(title=title, title_justify="left", min_width=100)
    result.add_column("client", ratio=1)
    for column in ("operations/s", "against the first (quartiles)", "client CPU µs", "server CPU µs"):
        result.add_column(column, justify="right")
    first = next(iter(turns.values()))
    for name, each in turns.items():
        ratios = sorted(theirs.wall / turn.wall for theirs, turn in zip(first, each, strict=True))
        quarter = len(ratios) // 4
        result.add_row(
            name,
            f"{1 / median(turn.wall for turn in each):,.0f}",
            f"{median(ratios):.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})",
            f"{median(turn.client for turn in each) * 1e6:,.0f}",
            f"{median(turn.server for turn in each) * 1e6:,.0f}",
        )
    return result


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of another commit."""
    path = folder / "worktree"
    subprocess.run(["git", "worktree", "add", "--detach", str(path), commit], cwd=ROOT, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True, capture_output=True)


@contextmanager
def serving(data: str) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    command = [sys.executable, "-m", "fastness.cli", "serve", "--data", data, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server, int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.terminate()


def cpu_seconds_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def arguments(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_client", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--against", metavar="COMMIT", help="another commit, whose client takes turns with this one")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each client [7]")
    parser.add_argument("--data", help="the server's data, as in memory: [a new directory]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
