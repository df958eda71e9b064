"""The check of arguments that can be given in more than one way."""

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Protocol, TypeVar

from fastness.errors import InvalidArgument
from fastness.limits import DELAY_SECONDS_MAX
from fastness.wire.type_checks import check_argument, refused

Items = TypeVar("Items")
Key = TypeVar("Key")
Value = TypeVar("Value")


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


def checked_map(name: str, value: Mapping[Key, Value]) -> dict[Key, Value]:
    """A copy of the map.

    Raises:
        InvalidArgument: it is none.
    """
    if not isinstance(value, Mapping):
        raise refused(name, value, "a dictionary")
    return dict(value)


def check_delay_on_close(seconds: float) -> None:
    """Raise InvalidArgument if messages cannot be returned with this delay."""
    if seconds.__class__ not in (int, float) or not 0 <= seconds <= DELAY_SECONDS_MAX:
        raise refused("delay_on_close_seconds", seconds, f"a number from 0 to {DELAY_SECONDS_MAX:,.0f}")


def check_receive_options(extend_for_seconds: float | None, delay_on_close_seconds: float | None) -> None:
    """Raise InvalidArgument if received messages could not be handled so; nothing is received yet."""
    if extend_for_seconds is not None:
        check_argument("extend_for_seconds", extend_for_seconds, float)
    if delay_on_close_seconds is not None:
        check_delay_on_close(delay_on_close_seconds)


def program_name(program: str | Program | None) -> str | None:
    """The name of a program that is given by its name, or itself."""
    if program is None or isinstance(program, str):
        return program
    name = getattr(program, "name", None)
    if not isinstance(name, str):
        raise refused("program", program, "a program, or its name")
    return name
