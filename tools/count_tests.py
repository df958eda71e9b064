"""Count the tests for the table in docs/explanation/testing.md.

python tools/count_tests.py           print the table
python tools/count_tests.py --write   write it to the page

Tests are counted with `pytest --collect-only`; crash points by running the test that counts them.
"""

import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fastness.testing.conformance import CHECKS
from fastness.testing.conformance.objects import OBJECT_CHECKS
from fastness.testing.conformance.stores import STORE_CHECKS
from fastness.testing.conformance.worlds import WORLD_CHECKS
from fastness.testing.scenarios import SCENARIOS

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "explanation" / "testing.md"
BEGIN, END = "<!-- counted -->\n", "<!-- /counted -->\n"
SEEDS: Final = 100  # tests/simulation/test_simulation.py
NIGHTLY_SEEDS: Final = 10_000
KILLS: Final = 18  # The default of --kills; the queue test uses a third of it, mail and tiers a sixth each.
MIGRATION_KILLS: Final = 6


def main() -> None:
    table = "\n".join(table_lines())
    if "--write" not in sys.argv[1:]:
        print(table)
        return
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table + "\n" + END + rest.split(END)[1])


def table_lines() -> list[str]:
    """The table, line by line."""
    every, nightly = collect("not nightly"), collect("nightly")
    by_folder = Counter(test.split("/")[1] for test in every)
    broken = [test for test in every if "_found" in test and "simulation" in test]
    points = [int(found) for found in re.findall(r"(\d+) points covered", _run("tests/faults/test_protocols.py", "-s"))]
    machines = _lines_with(r"^class \w+\(RuleBasedStateMachine\)", "tests")
    kills = KILLS + KILLS // 3 + 2 * (KILLS // 6) + MIGRATION_KILLS
    folders = ", ".join(f"{count:,} in {folder}" for folder, count in by_folder.most_common())
    rows = [
        ("tests in every run", f"{len(every):,}", folders),
        ("tests in `make nightly`", f"{len(nightly):,}", "long simulations, soaks, more examples"),
        ("conformance checks of a key space", f"{len(CHECKS)}", "each on memory, RocksDB and PostgreSQL"),
        (
            "conformance checks of object stores, worlds, and both combined",
            f"{len(OBJECT_CHECKS)}, {len(WORLD_CHECKS)}, {len(STORE_CHECKS)}",
            "each on every applicable backend",
        ),
        ("state machines against plain models", f"{machines}", "`tests/properties/`"),
        (
            "simulated histories in every run",
            f"{len(SCENARIOS) * SEEDS:,}",
            f"{len(SCENARIOS)} scenarios, {SEEDS} seeds each; {NIGHTLY_SEEDS:,} seeds each in `make nightly`",
        ),
        ("deliberately broken systems that must be detected", f"{len(broken)}", "`tests/simulation/`"),
        (
            "steps of multi-step operations with a crash after each",
            f"{sum(points)}",
            f"{sum(points) // 3} on each of three backends, `tests/faults/test_protocols.py`",
        ),
        ("real processes killed with SIGKILL in the crash tests", f"{kills}", "`make crash` kills one 500 times"),
    ]
    today = datetime.now(UTC).date().isoformat()
    return [
        f"Counted on {today} by `python tools/count_tests.py`:",
        "",
        "| what | count | where |",
        "|---|---:|---|",
        *(f"| {label} | {number} | {where} |" for label, number, where in rows),
    ]


def collect(marker: str) -> list[str]:
    """The ids of the tests with a marker."""
    output = _run("--collect-only", "-m", marker)
    return [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _lines_with(pattern: str, folder: str) -> int:
    return sum(len(re.findall(pattern, path.read_text(), re.MULTILINE)) for path in (ROOT / folder).rglob("*.py"))


if __name__ == "__main__":
    main()
