"""Report what `make coverage` has measured with coverage.py, by package.

    python tools/report_coverage.py            the table, and build/coverage/coverage.json and coverage.xml for tools
    python tools/report_coverage.py --lines    also the lines and branches that no test has run

A process that is killed leaves no data, or damaged data: then the figures are too low, so the table says so and the
minimums are not enforced. Without any data the exit code is 0, too: only what was measured can be too low.
"""

import argparse
import gc
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
from coverage.exceptions import CoverageException, CoverageWarning

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "coverage"
CONFIG = ROOT / "pyproject.toml"
PACKAGE = Path("src/fastness")
# Per cent of statements and branches. What cannot run is marked `pragma: no cover`, with the reason.
MINIMUMS = {"kv": 99.0, "layers": 99.0, "runtime/locks": 99.0}


@dataclass
class Counts:
    """Statements and branches, and how many of them ran."""

    statements: int = 0
    statements_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        self.statements += summary["num_statements"]
        self.statements_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    @property
    def per_cent(self) -> float:
        return 100.0 * (self.statements_run + self.branches_run) / max(self.statements + self.branches, 1)


def combine(measured: coverage.Coverage) -> int:
    """Combine the files of all processes; how many of them were damaged."""
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        measured.combine(data_paths=[str(FOLDER)])
        gc.collect()  # coverage.py leaves the connections to damaged files open, and Python 3.13 warns about them.
    measured.save()
    return sum(issubclass(warning.category, CoverageWarning) for warning in damaged)


def package_of(file: str) -> str:
    """The package that a file counts for: `layers` for `src/fastness/layers/queues/keys.py`."""
    folders = Path(file).relative_to(PACKAGE).parts[:-1]
    if folders[:2] == ("runtime", "locks"):
        return "runtime/locks"
    return folders[0] if folders else "(top)"


def counted(files: dict[str, Any]) -> dict[str, Counts]:
    """The counts of each package."""
    packages: dict[str, Counts] = {}
    for file, measured in files.items():
        packages.setdefault(package_of(file), Counts()).add(measured["summary"])
    return packages


def table(packages: dict[str, Counts]) -> str:
    total = Counts()
    rows = [f"{'package':<16}{'statements':>12}{'missed':>8}{'branches':>10}{'missed':>8}{'covered':>10}{'minimum':>9}"]
    for name, counts in [*sorted(packages.items()), ("total", total)]:
        if counts is not total:
            for field in vars(total):
                setattr(total, field, getattr(total, field) + getattr(counts, field))
        minimum = f"{MINIMUMS[name]:.1f} %" if name in MINIMUMS else ""
        rows.append(
            f"{name:<16}{counts.statements:>12,}{counts.statements - counts.statements_run:>8,}{counts.branches:>10,}"
            f"{counts.branches - counts.branches_run:>8,}{counts.per_cent:>8.1f} %{minimum:>9}"
        )
    return "\n".join(rows)


def missing(files: dict[str, Any]) -> str:
    """The lines and branches of each file that no test has run."""
    rows = []
    for file, measured in sorted(files.items()):
        lines = [str(line) for line in measured["missing_lines"]]
        arcs = [f"{start}->{'exit' if end < 0 else end}" for start, end in measured["missing_branches"]]
        if lines or arcs:
            rows.append(f"{file}: {' '.join([*lines, *arcs])}")
    return "\n".join(rows)


def too_low(packages: dict[str, Counts]) -> list[str]:
    """What is wrong with the packages that have a minimum."""
    return [
        f"The tests cover {packages[name].per_cent:.2f} % of {name}; the minimum is {minimum} %. "
        "Run `make coverage` to see what no test runs."
        for name, minimum in MINIMUMS.items()
        if name in packages and packages[name].per_cent < minimum
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Report what `make coverage` has measured, by package.")
    parser.add_argument("--lines", action="store_true", help="also list the lines and branches that no test has run")
    arguments = parser.parse_args()
    measured = coverage.Coverage(config_file=str(CONFIG))
    try:
        fresh = any(FOLDER.glob("data.*"))
        damaged = combine(measured) if fresh else 0
        measured.load()
        measured.json_report(outfile=str(FOLDER / "coverage.json"))
        measured.xml_report(outfile=str(FOLDER / "coverage.xml"))
        files = json.loads((FOLDER / "coverage.json").read_bytes())["files"]
    except (CoverageException, OSError) as error:
        print(f"Coverage is not reported: {error}")
        return 0
    packages = counted(files)
    if arguments.lines:
        print(missing(files), end="\n\n")
    print(table(packages))
    if damaged:
        print(f"Damaged data files: {damaged}. The figures are too low, so no minimum is enforced.")
        return 0
    wrong = too_low(packages)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
