"""The plots of the benchmarks, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

mpl.use("Agg")

COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#edae49")


def page(title: str, panels: int, *, panel_inches: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty page with panels below each other."""
    figure = Figure(figsize=(10, panel_inches * panels), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def latencies_over_time(axes: Axes, seconds: Sequence[float], milliseconds: Mapping[str, Sequence[float]]) -> None:
    """Draw a line for each percentile, on a logarithmic axis."""
    for color, (name, values) in zip(COLORS, milliseconds.items(), strict=False):
        axes.plot(seconds, values, label=name, color=color, linewidth=1.6)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    _finish(axes, "Time to acquire, by second of the run", "time in acquire (ms, logarithmic)")


def contention_over_time(axes: Axes, seconds: Sequence[float], percent: Mapping[str, Sequence[float]]) -> None:
    """Draw a line for each level: the share of acquisitions in that second that had to wait."""
    for color, (level, values) in zip(COLORS, percent.items(), strict=False):
        axes.plot(seconds, values, label=level, color=color, linewidth=1.6)
    axes.set_ylim(bottom=0)
    _finish(axes, "Contention by level", "acquisitions that had to wait (%)")


def bars(
    axes: Axes, rows: Mapping[str, Mapping[str, float]], title: str, x_label: str, *, logarithmic: bool = False
) -> None:
    """Draw a group of bars for each row, the first one on top, each bar with its value."""
    names = list(next(iter(rows.values())))
    height = 0.8 / len(names)
    for index, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        positions = [row + index * height for row in range(len(rows))]
        drawn = axes.barh(positions, [row[name] for row in rows.values()], height * 0.9, label=name, color=color)
        axes.bar_label(drawn, fmt="{:,.3g}" if logarithmic else "{:,.0f}", padding=3, fontsize=8)
    axes.set_yticks([row + (0.8 - height) / 2 for row in range(len(rows))], list(rows), fontsize=8)
    axes.invert_yaxis()
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3, axis="x", linewidth=0.5)
    axes.margins(x=0.12)
    if len(names) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)


def save(figure: Figure, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the page as an image, in the format of the path's suffix."""
    figure.savefig(path, metadata=dict(metadata or {}))


def _finish(axes: Axes, title: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("time since the start (s)")
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
