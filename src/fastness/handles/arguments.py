"""The check of arguments that can be given in more than one way."""

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Protocol, TypeVar

from fastness.errors import InvalidArgument
from fastness.limits import DELAY_SECONDS_MAX

Items = TypeVar("Items")


class Program(Protocol):
    """A program of a host, which has a name."""

    @property
    def name(self) -> str: ...


def checked_items(items: Items, instead: str) -> Items:
    """The items, unchanged; `instead` says in an error what to call.

    Raises:
        InvalidArgument: it is one item. A map, text and bytes can be iterated too, but over keys, letters and numbers.
    """
    if isinstance(items, Mapping | str | bytes | bytearray | memoryview) or not isinstance(
        items, Iterable | AsyncIterable
    ):
        raise InvalidArgument(f"A list of items is needed, not one {type(items).__name__}; {instead}")
    return items


def check_delay_on_close(seconds: float) -> None:
    """Raise InvalidArgument if messages cannot be returned with this delay."""
    if seconds.__class__ not in (int, float) or not 0 <= seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"delay_on_close_seconds is {seconds!r}; give 0 to {DELAY_SECONDS_MAX:.0f}")


def program_name(program: str | Program | None) -> str | None:
    """The name of a program that is given by its name, or itself."""
    return program if program is None or isinstance(program, str) else program.name
