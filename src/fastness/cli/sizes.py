"""Sizes on the command line: 67108864, 64MiB, 1.5GiB, 10GB."""

import re
from typing import Any, Final

import click

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1_024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1_000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d*)?) ?([a-z]*)\Z", re.IGNORECASE)


class Size(click.ParamType[int]):
    """A number of bytes, or a number with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.match(value)
        unit = None if match is None else _UNITS.get(match[2].lower())
        if match is None or unit is None:
            self.fail(f"{value!r} is not a size; use bytes, or a number with KiB, MiB, GiB or TiB", param, ctx)
        return round(float(match[1]) * unit)


SIZE: Final = Size()


def size_text(size: int) -> str:
    """12.5 MiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):,.1f} {unit}"
    return f"{size:,} bytes" if size != 1 else "1 byte"
