"""Formats numbers, bytes, durations and times for people."""

from datetime import datetime
from typing import Final

_MISSING: Final = "\N{EN DASH}"  # For missing values.


def number(value: float | None) -> str:
    """1,234 and 0.5."""
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def counted(value: float | None, one: str, many: str) -> str:
    """1 dead letter, 2 dead letters."""
    return f"{number(value)} {one if value == 1 else many}"


def short(value: float) -> str:
    """1.2 k, for axes."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return _three_digits(value)


def size(value: float | None) -> str:
    """12.5 MiB."""
    if value is None:
        return _MISSING
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{_three_digits(value / (1 << power))} {unit}"
    return f"{value:.0f} B"


def duration(value: float | None) -> str:
    """Milliseconds as 412 ms, 3.2 s, 5 min, 2.5 h, 3 d."""
    if value is None:
        return _MISSING
    for length, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if value >= length:
            return f"{_three_digits(value / length)} {unit}"
    return f"{_three_digits(value)} ms"


def share(part: float, whole: float) -> str:
    """12 %; a dash if `whole` is 0."""
    return _MISSING if not whole else f"{part / whole:.1%}".replace(".0%", "%").replace("%", " %")


def timestamp(at: datetime | None) -> str:
    """2026-11-15 11:20 UTC."""
    return _MISSING if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def short_timestamp(at: datetime | None) -> str:
    """15 Nov, 11:20; at midnight only 15 Nov."""
    if at is None:
        return _MISSING
    return f"{at.day} {at:%b, %H:%M}" if at.hour or at.minute else f"{at.day} {at:%b}"


def shorten(text: str, characters: int) -> str:
    """The text, shortened to at most `characters` with an ellipsis."""
    return text if len(text) <= characters else text[: characters - 1].rstrip() + "…"


def _three_digits(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
