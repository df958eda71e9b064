"""Charts over time, drawn in the browser by uPlot. All text is escaped, since it may come from users.

A chart is a figure with its data as JSON and a table of the same numbers. The page's script draws the chart and closes
the table; without scripts the table stays open. Lines differ in colour (CSS variables `--c1` … `--c5`) and in their
dashes, for print and for colour-blind readers.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fastness.pipeline.reports import formatting
from fastness.pipeline.reports.components import Column, placeholder, table
from fastness.pipeline.reports.facts import Row

Dash: TypeAlias = Literal["solid", "dashed", "dotted"]
Unit: TypeAlias = Literal["count", "bytes", "ms"]
_FORMATS: Final[dict[Unit, Callable[[float | None], str]]] = {
    "count": formatting.number,
    "bytes": formatting.size,
    "ms": formatting.duration,
}
_DASHES: Final[tuple[Dash, ...]] = ("solid", "dashed", "dotted")
_COLOURS: Final = 5


class Series(NamedTuple):
    """A line: a value, or None, for each time."""

    name: str
    values: Sequence[float | None]
    colour: int = 0  # 1 to 5; 0: by its position.
    dash: Dash | None = None  # None: by its position.


class _Line(msgspec.Struct, frozen=True):
    name: str
    colour: int
    dash: Dash
    values: list[float | None]


class _Chart(msgspec.Struct, frozen=True):
    """What the script reads."""

    unit: Unit
    times: list[int]  # Unix time in seconds.
    series: list[_Line]


def lines(
    title: str,
    description: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    *,
    unit: Unit = "count",
) -> str:
    """Values over time, with a legend and a table. The unit ms uses a logarithmic scale."""
    if not times or all(value is None for each in series for value in each.values):
        return placeholder(f"{title}: nothing to show yet.")
    drawn = [
        _Line(
            each.name,
            each.colour or n % _COLOURS + 1,
            each.dash or _DASHES[n % len(_DASHES)],
            list(each.values),
        )
        for n, each in enumerate(series)
    ]
    legend = "".join(f'<li><i class="key c{line.colour} {line.dash}"></i>{escape(line.name)}</li>' for line in drawn)
    label = escape(f"{title}. {description}")
    return (
        f'<figure class="chart"><div class="plot" role="img" aria-label="{label}" hidden></div>'
        f'<ul class="legend" hidden>{legend}</ul><p class="readout" aria-hidden="true" hidden></p>'
        f'<script type="application/json">{_json(_Chart(unit, [int(at.timestamp()) for at in times], drawn))}</script>'
        f"<details open><summary>{escape(title)} as a table</summary>{_numbers(title, times, series, unit)}</details>"
        "</figure>"
    )


def _numbers(title: str, times: Sequence[datetime], series: Sequence[Series], unit: Unit) -> str:
    write = _FORMATS[unit]

    def column(n: int) -> Column:
        return Column(series[n].name, lambda row: write(row["values"][n]))

    rows: list[Row] = [{"at": at, "values": [each.values[n] for each in series]} for n, at in enumerate(times)]
    timed = Column("Time", lambda row: formatting.timestamp(row["at"]), "text")
    return table(title, rows, [timed, *(column(n) for n in range(len(series)))])


def _json(chart: _Chart) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(chart).decode().replace("<", "\\u003c")
