"""The check of arguments that are lists of items."""

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import TypeVar

from holdfast.errors import InvalidArgument

Items = TypeVar("Items")


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
