"""Plots as SVG. All text is escaped, since it may come from users.

Colours are CSS classes of the page (`c1` … `c5`). Lines also differ in their dashes, for print and for colour-blind
readers. Every plot has a title and a description in words.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final, NamedTuple

from holdfast.pipeline.reports import formatting

_WIDTH: Final = 480  # Scaled down on phones, up on desktops.
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
_DASHES: Final = ("", "6 4", "2 3", "10 4 2 4", "1 5")
_POINTS_MARKED: Final = 60  # Longer series have no dots.


class Series(NamedTuple):
    """A line: a value, or None, for each time."""

    name: str
    values: Sequence[float | None]
    color: int = 0  # 1 to 5; 0: by its position.


class Bar(NamedTuple):
    label: str
    value: float
    hint: str = ""


def lines(
    title: str,
    description: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    *,
    unit: str = "count",
    height: int = 210,
) -> str:
    """Values over time, with a legend. The unit is count, bytes or ms; ms uses a logarithmic scale."""
    values = [value for each in series for value in each.values if value is not None]
    if not times or not values:
        return _placeholder(title)
    scale = _SCALES[unit](values, height)
    xs = _x_positions(times)
    parts = [*_value_axis(scale), *_time_axis(times, height)]
    for n, each in enumerate(series):
        color = f"c{each.color or n % 5 + 1}"
        for run in _segments(xs, each.values):
            points = " ".join(f"{x:.1f},{scale.at(value):.1f}" for x, value in run)
            parts.append(f'<polyline class="line {color}" points="{points}"{_dash(n)}/>')
        if len(times) <= _POINTS_MARKED:
            parts += _dots(zip(xs, times, each.values, strict=True), each, scale, color)
    legend = "".join(
        f'<li><svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><line class="line c{each.color or n % 5 + 1}" '
        f'x1="0" y1="4" x2="28" y2="4"{_dash(n)}/></svg>{escape(each.name)}</li>'
        for n, each in enumerate(series)
    )
    return _svg(title, description, height, parts) + f'<ul class="legend">{legend}</ul>'


def bars(
    title: str, description: str, rows: Sequence[Bar], *, format: Callable[[float], str] = formatting.number
) -> str:
    """Horizontal bars, in the given order."""
    if not rows or max(row.value for row in rows) <= 0:
        return _placeholder(title)
    maximum, pitch = max(row.value for row in rows), 38
    parts = []
    for n, row in enumerate(rows):
        y = n * pitch
        width = max(row.value / maximum * (_WIDTH - 80), 2)
        parts.append(
            f"<g><title>{escape(row.hint or row.label)}: {escape(format(row.value))}</title>"
            f'<text class="label" x="0" y="{y + 13}">{escape(formatting.shorten(row.label, 62))}</text>'
            f'<rect class="bar c1" x="0" y="{y + 18}" width="{width:.1f}" height="12" rx="2"/>'
            f'<text class="value" x="{width + 6:.1f}" y="{y + 28}">{escape(format(row.value))}</text></g>'
        )
    return _svg(title, description, len(rows) * pitch, parts)


def grid(
    title: str, description: str, rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[int, int], float]
) -> str:
    """A heat map of rows and columns."""
    if not cells:
        return _placeholder(title)
    left, top, maximum = 128, 92, max(cells.values())
    side = min((_WIDTH - left - 40) / len(columns), 44)
    parts = []
    for n, name in enumerate(columns):
        x = left + (n + 0.5) * side
        parts.append(
            f'<text class="label crowded" transform="translate({x:.1f} {top - 8}) rotate(-45)">'
            f"<title>{escape(name)}</title>{escape(formatting.shorten(name, 16))}</text>"
        )
    for m, name in enumerate(rows):
        y = top + m * side
        parts.append(
            f'<text class="label crowded end" x="{left - 8}" y="{y + side / 2 + 4:.1f}">'
            f"<title>{escape(name)}</title>{escape(formatting.shorten(name, 18))}</text>"
        )
        for n, other in enumerate(columns):
            value = cells.get((m, n), 0)
            x = left + n * side
            hint = f"{name} to {other}: {formatting.number(value)}"
            shade = (
                f'class="cell c1" fill-opacity="{0.15 + 0.85 * math.sqrt(value / maximum):.2f}"'
                if value
                else 'class="cell none"'
            )
            parts.append(
                f'<rect {shade} x="{x + 1:.1f}" y="{y + 1:.1f}" width="{side - 2:.1f}" height="{side - 2:.1f}" rx="3">'
                f"<title>{escape(hint)}</title></rect>"
            )
    return _svg(title, description, round(top + len(rows) * side + 4), parts)


class _Counts:
    """A linear scale from 0 to the maximum, rounded up, with whole-number ticks."""

    format = staticmethod(formatting.short)

    def __init__(self, values: Sequence[float], height: int) -> None:
        self._height = height
        maximum = max(*values, 1)
        step = self._step(maximum / 4)
        self._most = math.ceil(maximum / step - 1e-9) * step
        self.ticks = [n * step for n in range(round(self._most / step) + 1)]

    def at(self, value: float) -> float:
        """The y coordinate of a value."""
        return self._height - _BOTTOM - self._part(value) * (self._height - _TOP - _BOTTOM)

    def _part(self, value: float) -> float:
        return value / self._most

    def _step(self, rough: float) -> float:
        return max(_round_step(rough), 1)


class _Bytes(_Counts):
    """The same with power-of-two ticks, which are round in KiB, MiB and GiB."""

    format = staticmethod(formatting.size)

    def _step(self, rough: float) -> float:
        return 2.0 ** math.ceil(math.log2(rough) - 1e-9)


class _Milliseconds(_Counts):
    """A logarithmic scale: latencies span orders of magnitude."""

    format = staticmethod(formatting.duration)

    def __init__(self, values: Sequence[float], height: int) -> None:
        self._height = height
        low = max((tick for tick in _DURATIONS[:-1] if tick <= min(values)), default=_DURATIONS[0])
        high = min((tick for tick in _DURATIONS if tick >= max(values) and tick > low), default=_DURATIONS[-1])
        self._low, self._high = math.log(low), math.log(high)
        self.ticks = [tick for tick in _DURATIONS if low <= tick <= high]

    def _part(self, value: float) -> float:
        part = (math.log(max(value, _DURATIONS[0])) - self._low) / (self._high - self._low)
        return min(max(part, 0.0), 1.0)


def _svg(title: str, description: str, height: int, parts: Sequence[str]) -> str:
    id = f"plot-{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{id}-t {id}-d">'
        f'<title id="{id}-t">{escape(title)}</title><desc id="{id}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _dash(n: int) -> str:
    return f' stroke-dasharray="{_DASHES[n % 5]}"' if _DASHES[n % 5] else ""


def _placeholder(title: str) -> str:
    return f'<p class="nothing">{escape(title)}: nothing to show yet.</p>'


def _x_positions(times: Sequence[datetime]) -> list[float]:
    first, span = times[0], (times[-1] - times[0]).total_seconds()
    plot_width = _WIDTH - _LEFT - _RIGHT
    if not span:
        return [_LEFT + plot_width / 2] * len(times)
    return [_LEFT + (timestamp - first).total_seconds() / span * plot_width for timestamp in times]


def _segments(xs: Sequence[float], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """Series of at least two points without a gap."""
    run: list[tuple[float, float]] = []
    for x, value in zip(xs, values, strict=True):
        if value is not None:
            run.append((x, value))
            continue
        if len(run) > 1:
            yield run
        run = []
    if len(run) > 1:
        yield run


def _dots(
    points: Iterable[tuple[float, datetime, float | None]],
    series: Series,
    scale: "_Counts",
    color: str,
) -> Iterator[str]:
    for x, timestamp, value in points:
        if value is not None:
            hint = f"{series.name}, {formatting.timestamp(timestamp)}: {scale.format(value)}"
            yield (
                f'<circle class="dot {color}" cx="{x:.1f}" cy="{scale.at(value):.1f}" r="3">'
                f"<title>{escape(hint)}</title></circle>"
            )


def _value_axis(scale: "_Counts") -> Iterator[str]:
    for tick in scale.ticks:
        y = scale.at(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(scale.format(tick))}</text>'


def _time_axis(times: Sequence[datetime], height: int) -> Iterator[str]:
    first, last = times[0], times[-1]
    span = last - first
    steps = [timedelta(hours=hours) for hours in (1, 2, 3, 6, 12)]
    steps += [timedelta(days=days) for days in (1, 2, 7, 14, 30, 90, 365)]
    step = next((step for step in steps if span / step <= 6), steps[-1])
    if not span:
        ticks = [first]
    else:
        midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
        ticks = [midnight + n * step for n in range(1 + math.ceil((last - midnight) / step))]
        ticks = [tick for tick in ticks if first <= tick <= last]
    at = dict(zip(ticks, _x_positions([first, *ticks, last])[1:-1] if span else _x_positions(ticks), strict=True))
    for tick, x in at.items():
        is_hour = step < timedelta(days=1) and tick.hour
        message = (
            formatting.short_timestamp(tick) if not span else f"{tick:%H:%M}" if is_hour else f"{tick.day} {tick:%b}"
        )
        anchor = " end" if x > _WIDTH - 40 else ""
        yield f'<text class="tick middle{anchor}" x="{x:.1f}" y="{height - 8}">{message}</text>'


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, and at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


_DURATIONS: Final = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 864_000_000, 8_640_000_000)
_SCALES: Final = {"count": _Counts, "bytes": _Bytes, "ms": _Milliseconds}
