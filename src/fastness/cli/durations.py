"""Durations on the command line: 30, 1.5, 500ms, 5m, 2h, 7d."""

import math
import re
from enum import Enum
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

_UNITS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|)\Z")


class NoValue(Enum):
    """The word none on the command line. An option that is not given is None."""

    NONE = "none"


class Seconds(click.ParamType[float]):
    """A number of seconds, or a number with a unit."""

    name = "seconds"

    def __init__(self, *, forever: bool = False) -> None:
        self._allows_forever = forever

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        if self._allows_forever and value == "forever":
            return math.inf
        match = _DURATION.match(value)
        if match is None:
            also = ", or forever" if self._allows_forever else ""
            self.fail(f"{value!r} is not a duration; use seconds, or a number with ms, s, m, h or d{also}", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class OrNone(click.ParamType[Any]):
    """A value of another type, or the word none, which removes the current value."""

    def __init__(self, kind: "click.ParamType[Any]") -> None:
        self._kind = kind
        self.name = f"{kind.name.removesuffix(' range')}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NoValue.NONE if value in ("none", NoValue.NONE) else self._kind.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return self._kind.shell_complete(ctx, param, incomplete)


SECONDS: Final = Seconds()
WAIT: Final = Seconds(forever=True)
