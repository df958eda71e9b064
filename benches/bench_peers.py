"""The server against NATS JetStream and Redis: real processes on this machine, everything synced and acknowledged.

    python -m benches.bench_peers                       everything; some ten minutes
    python -m benches.bench_peers puts locks --rounds 3
    python -m benches.bench_peers --quick               whether it works; its figures mean nothing

The clients are Python on the event loop of the standard library; `--uvloop` gives all of them the faster one. A server
that is not here is left out, and the report says why.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benches.contest import say, silence
from benches.peers.scenes import SCENES
from benches.peers.stage import NAMES, Figure, Settings, Stage, table_of
from benches.ycsb import at_least


def main(words: Sequence[str] = ()) -> None:
    given = arguments(words)
    rounds = given.rounds or (1 if given.quick else 7)
    backlog = given.backlog or (20_000 if given.quick else 1_000_000)
    if given.json:
        silence()
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as folder:
        stage = Stage(Settings(rounds, given.quick, backlog, given.uvloop), Path(folder))
        with stage.opened():
            for name, why in stage.absent.items():
                say(f"{NAMES[name]} is left out: {why}.")
            say(", ".join(f"{name} {version}" for name, version in versions(stage).items()) + ".")
            syncs = [stage.disk.rate(stage.settings.part(1_000))]
            figures: list[Figure] = []
            for name in given.scenes or SCENES:
                figures += SCENES[name](stage)
            syncs.append(stage.disk.rate(stage.settings.part(1_000)))
    say(f"A bare write and fdatasync: {syncs[0]:,.0f}/s before the scenes, {syncs[1]:,.0f}/s after them.")
    report(figures)
    if given.json:
        print(msgspec.json.encode(found(stage, figures, syncs)).decode())


def report(figures: list[Figure]) -> None:
    holds = {True: "yes", False: "[bold red]no", None: ""}
    rows = [(each.name, each.measured, each.goal, holds[each.holds]) for each in figures]
    say(table_of("What was asked for", ("figure", "measured", "goal", "holds"), rows))


def versions(stage: Stage) -> dict[str, str]:
    return {NAMES[name]: server.version for name, server in stage.servers.items() if server.version}


def found(stage: Stage, figures: list[Figure], syncs: list[float]) -> dict[str, Any]:
    return {
        "settings": stage.settings._asdict(),
        "versions": versions(stage),
        "left_out": {NAMES[name]: why for name, why in stage.absent.items()},
        "fdatasyncs_per_second": syncs,
        "measured": stage.rates,
        "figures": [each._asdict() for each in figures],
    }


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"{', '.join(SCENES)}; all if none is named")
    parser.add_argument("--rounds", type=at_least(1), help="that count; medians are taken of them [7]")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, one round")
    parser.add_argument("--backlog", type=at_least(1), help="messages of the backlog [1,000,000]")
    parser.add_argument("--uvloop", action="store_true", help="run all clients on uvloop")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    given = parser.parse_args(words)
    unknown = [name for name in given.scenes if name not in SCENES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such scene; there are {', '.join(SCENES)}")
    return given


if __name__ == "__main__":
    main(sys.argv[1:])
