"""The types of published events, shared by everything that commits transactions."""

from collections.abc import Callable, Sequence
from typing import Any

Event = tuple[Any, ...]  # What `Transaction.emit` collects: a kind, what it happened to, and details of that kind.
Publish = Callable[[Sequence[Event]], None]  # Called with a transaction's events once it is committed.


def discard(events: Sequence[Event]) -> None:
    """Publish to no subscriber."""
    del events
