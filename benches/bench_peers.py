"""The server, against NATS JetStream and Redis: processes on this machine, all operations synced and acknowledged.

    python -m benches.bench_peers                       everything; some ten minutes
    python -m benches.bench_peers puts locks --rounds 3
    python -m benches.bench_peers --quick               a smoke test

The clients are Python on the standard library's event loop; `--uvloop` runs all of them on uvloop. A server that is not
installed is skipped, and the report says so.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benches.comparison import disable_output, echo
from benches.peers.environment import NAMES, Environment, Figure, Settings, table_of
from benches.peers.workloads import WORKLOADS
from benches.ycsb import at_least


def main(argv: Sequence[str] = ()) -> None:
    options = arguments(argv)
    rounds = options.rounds or (1 if options.quick else 7)
    backlog = options.backlog or (20_000 if options.quick else 1_000_000)
    if options.json:
        disable_output()
    with tempfile.TemporaryDirectory(prefix="fastness-peers-") as folder:
        env = Environment(Settings(rounds, options.quick, backlog, options.uvloop), Path(folder))
        with env.start_servers():
            for name, why in env.absent.items():
                echo(f"{NAMES[name]} is skipped: {why}.")
            echo(", ".join(f"{name} {version}" for name, version in versions(env).items()) + ".")
            syncs = [env.disk.rate(env.settings.part(1_000))]
            figures: list[Figure] = []
            for name in options.workloads or WORKLOADS:
                figures += WORKLOADS[name](env)
            syncs.append(env.disk.rate(env.settings.part(1_000)))
    echo(f"A bare write and fdatasync: {syncs[0]:,.0f}/s before the workloads, {syncs[1]:,.0f}/s after them.")
    report(figures)
    if options.json:
        print(msgspec.json.encode(results(env, figures, syncs)).decode())


def report(figures: list[Figure]) -> None:
    echo(table_of("Summary", ("figure", "measured"), [(each.name, each.measured) for each in figures]))


def versions(env: Environment) -> dict[str, str]:
    return {NAMES[name]: server.version for name, server in env.servers.items() if server.version}


def results(env: Environment, figures: list[Figure], syncs: list[float]) -> dict[str, Any]:
    return {
        "settings": env.settings._asdict(),
        "versions": versions(env),
        "skipped": {NAMES[name]: why for name, why in env.absent.items()},
        "fdatasyncs_per_second": syncs,
        "measured": env.rates,
        "figures": [each._asdict() for each in figures],
    }


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--rounds", type=at_least(1), help="measured rounds, of which the median is taken [7]")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tenth of the operations, one round")
    parser.add_argument("--backlog", type=at_least(1), help="messages in the backlog [1,000,000]")
    parser.add_argument("--uvloop", action="store_true", help="run all clients on uvloop")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args(argv)
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {', '.join(unknown)}; choose from {', '.join(WORKLOADS)}")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
