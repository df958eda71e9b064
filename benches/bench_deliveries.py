"""Deliveries of queues: this code against an earlier commit and against peers, in turns.

    python -m benches deliveries                                all lines but the long ones; some minutes
    python -m benches.bench_deliveries embedded workers         lines by name
    python -m benches.bench_deliveries depth space              the long ones, with a million messages
    python -m benches.bench_deliveries --before HEAD~1 --json results.json
    python -m benches.bench_deliveries --scale 0.02 --rounds 1  a smoke test

Each contestant is a process with its own code, which takes turns with the others; those over the network have a server
process of the same code. The first round is a warm-up, and figures are medians of the turns. Processor time is that of
all threads of the client process, RocksDB's included, and of the server: on a busy machine it says more than the rate.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from benches.comparison import echo
from benches.deliveries.lines import LINES, LONG, THIS, Arena, Figures, Result, figures_table, worktree
from benches.deliveries.races import ROOT, table_of
from benches.ycsb import at_least

BEFORE: Final = "1c2b247"  # The last commit whose deliveries have a lease for each message.


def main(argv: Sequence[str] = ()) -> None:
    options = arguments(argv)
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory(prefix="fastness-deliveries-") as folder, ExitStack() as stack:
        sources = {}
        try:
            sources[options.before] = stack.enter_context(worktree(options.before, Path(folder)))
        except subprocess.CalledProcessError as error:
            echo(f"{options.before} is skipped: {error.stderr.decode().strip()}.")
        sources[THIS] = ROOT / "src"
        arena = Arena(Path(folder), sources, options.rounds, options.scale)
        for name in options.lines or [name for name in LINES if name not in LONG]:
            results[name] = []
            for result in LINES[name](arena):
                echo(figures_table(result) if isinstance(result, Figures) else table_of(result))
                results[name].append(result)
    if options.json:
        found = {"before": options.before, "rounds": options.rounds, "scale": options.scale, "lines": results}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


def arguments(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_deliveries", description=(__doc__ or "").partition("\n")[0]
    )
    lines = ", ".join(LINES)
    parser.add_argument("lines", nargs="*", metavar="LINE", help=f"{lines}; default: all but {' and '.join(LONG)}")
    parser.add_argument("--before", metavar="COMMIT", default=BEFORE, help=f"the earlier code [{BEFORE}]")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="measured turns of each contestant [5]")
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the messages of each turn [1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.lines if name not in LINES]
    if unknown:
        parser.error(f"unknown line {', '.join(unknown)}; choose from {lines}")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
