"""Draw docs/benchmarks.md: python -m benches.page

Only figures that are in the page are drawn, and each image carries them in its metadata, so a test can tell when the
page has changed and the images have not (`tests/unit/test_benchmark_page.py`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
IMAGES: Final = ROOT / "docs" / "plots"
FIGURES: Final = "Figures"  # The key of the metadata.

Rows = dict[str, dict[str, float]]


class Plot(NamedTuple):
    """An image: its title, and a panel for each table, by the words of the table's first column."""

    title: str
    unit: str
    tables: tuple[str, ...]


PLOTS: Final = {
    "rocksdb": Plot(
        "The key space on RocksDB",
        "a second",
        (
            "one caller, every commit synced",
            "256 callers on one event loop, each waits for its own synced commit",
            "8 threads, each waits for its own synced commit",
            "one caller, IMPORTANT (in the log, not synced)",
        ),
    ),
    "postgres": Plot(
        "The key space on PostgreSQL",
        "commits a second",
        ("one caller", "many callers, each waits for its own synced commit"),
    ),
    "worlds": Plot("Worlds", "events a second", ("append in batches of 256, every batch synced", "replay")),
}
PEERS: Final = "peers"


def figures(text: str, plot: str) -> dict[str, Rows]:
    """What an image shows: by table, by row, by column."""
    if plot == PEERS:
        return {"The server, against NATS JetStream and Redis": _peers(text)}
    return {table: _rates(text, table) for table in PLOTS[plot].tables}


def main() -> None:
    from benches import plots

    text = PAGE.read_text()
    IMAGES.mkdir(exist_ok=True)
    for name in (*PLOTS, PEERS):
        title, unit, _ = PLOTS.get(name, Plot("The server, against its peers", "a second", ()))
        shown = figures(text, name)
        page, panels = plots.page(title, len(shown), panel_inches=4.2 if name == PEERS else 2.4)
        for axes, (table, rows) in zip(panels, shown.items(), strict=True):
            plots.bars(axes, rows, table, unit)
        plots.save(page, IMAGES / f"{name}.png", {FIGURES: json.dumps(shown, sort_keys=True)})


def _rates(text: str, table: str) -> Rows:
    """A table with a name and a rate in each row. A second row of one name is about the work of the row above it."""
    found: Rows = {}
    for cells in _rows_of(text, table):
        name = _plain(cells[0])
        if (number := _first_number(cells[1])) is not None:
            name = f"{name}, the same" if name in found else name
            found[name] = {"rate": float(number.replace(",", ""))}
    return found


def _peers(text: str) -> Rows:
    """The rows of the race with peers in which all three have a rate."""
    columns = ("Holdfast", "NATS", "Redis")
    found: Rows = {}
    for cells in _rows_of(text, "measure", having=columns):
        rates = [re.match(r"([\d,]+)/s", cell) for cell in cells[-3:]]
        if all(rates):
            found[_plain(cells[0])] = {
                name: float(rate[1].replace(",", "")) for name, rate in zip(columns, rates, strict=True) if rate
            }
    return found


def _rows_of(text: str, first: str, having: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The rows of the table whose first column is headed so."""
    lines = iter(text.splitlines())
    for line in lines:
        head = _cells(line)
        if head[:1] != [first] or not set(having) <= set(head):
            continue
        next(lines)  # The rule below the head.
        for row in lines:
            if not row.startswith("|"):
                return
            yield _cells(row)
    return


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _plain(cell: str) -> str:
    return cell.replace("*", "").replace("`", "")


def _first_number(cell: str) -> str | None:
    found = re.match(r"[\d,]+(\.\d+)?", cell)
    return found[0] if found else None


if __name__ == "__main__":
    main()
