"""Draw the plots of docs/benchmarks.md from the figures in its tables: python -m benches.page

Each image has its figures in its metadata, so that a test can detect a page that changed after its images were drawn
(`tests/unit/test_benchmark_page.py`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
IMAGES: Final = ROOT / "docs" / "plots"
FIGURES: Final = "Figures"  # The metadata key.

Rows = dict[str, dict[str, float]]


class Plot(NamedTuple):
    """An image: its title, its unit, and a panel for each table, named by the heading of the table's first column."""

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
    """The figures of an image: by table, by row, by column."""
    if plot == PEERS:
        return {"The server, against NATS JetStream and Redis": _peer_rates(text)}
    return {table: _rates(text, table) for table in PLOTS[plot].tables}


def main() -> None:
    from benches import plots

    text = PAGE.read_text()
    IMAGES.mkdir(exist_ok=True)
    for name in (*PLOTS, PEERS):
        title, unit, _ = PLOTS.get(name, Plot("The server, against its peers", "a second", ()))
        plotted = figures(text, name)
        page, panels = plots.page(title, len(plotted), panel_inches=4.2 if name == PEERS else 2.4)
        for axes, (table, rows) in zip(panels, plotted.items(), strict=True):
            plots.bars(axes, rows, table, unit)
        plots.save(page, IMAGES / f"{name}.png", {FIGURES: json.dumps(plotted, sort_keys=True)})


def _rates(text: str, table: str) -> Rows:
    """The rates of a table with a name and a rate per row. A repeated name is about the workload of the row above."""
    rows: Rows = {}
    for cells in _rows_of(text, table):
        name = _plain_text(cells[0])
        if (number := _first_number(cells[1])) is not None:
            name = f"{name}, the same" if name in rows else name
            rows[name] = {"rate": float(number.replace(",", ""))}
    return rows


def _peer_rates(text: str) -> Rows:
    """The rows of the comparison with peers in which all three have a rate."""
    columns = ("Fastness", "NATS", "Redis")
    rows: Rows = {}
    for cells in _rows_of(text, "measure", having=columns):
        rates = [re.match(r"([\d,]+)/s", cell) for cell in cells[-3:]]
        if all(rates):
            rows[_plain_text(cells[0])] = {
                name: float(rate[1].replace(",", "")) for name, rate in zip(columns, rates, strict=True) if rate
            }
    return rows


def _rows_of(text: str, first: str, having: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The rows of the table whose first column has this heading, and that has the columns `having`."""
    lines = iter(text.splitlines())
    for line in lines:
        head = _cells(line)
        if head[:1] != [first] or not set(having) <= set(head):
            continue
        next(lines)  # The separator below the heading.
        for row in lines:
            if not row.startswith("|"):
                return
            yield _cells(row)
    return


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _plain_text(cell: str) -> str:
    return cell.replace("*", "").replace("`", "")


def _first_number(cell: str) -> str | None:
    match = re.match(r"[\d,]+(\.\d+)?", cell)
    return match[0] if match else None


if __name__ == "__main__":
    main()
