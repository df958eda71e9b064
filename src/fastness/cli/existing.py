"""What must exist: a mistyped name is an error, instead of something that is empty or that the command makes.

A token that does not allow to look is not told, and what the command does may be allowed.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastness.cli import connect
from fastness.errors import NotAllowed, QueueNotFound
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.queues import Queue
from fastness.limits import READ_ENTRIES_MAX


@contextmanager
def open_queue(name: str) -> Iterator[Queue]:
    """The queue `name` of the plane of the current command.

    Raises:
        QueueNotFound: it does not exist; with the nearest name.
    """
    with connect.open_plane() as plane:
        check_queue(plane, name)
        yield plane.queue(name)


def check_queue(plane: Plane, name: str) -> None:
    """Raise QueueNotFound, with the nearest name, if a queue does not exist."""
    try:
        with suppress(NotAllowed):
            plane.queue(name).stats(must_exist=True)
    except QueueNotFound:
        raise QueueNotFound(f"Queue {name} does not exist; {_advice(plane, name)}") from None


def check_world(plane: Plane, name: str | None) -> None:
    """Raise WorldNotFound if a world is named and does not exist."""
    if name is not None:
        with suppress(NotAllowed):
            plane.world(name).describe()


def _advice(plane: Plane, name: str) -> str:
    with suppress(NotAllowed):
        for nearest in difflib.get_close_matches(name, plane.queues(limit=READ_ENTRIES_MAX), n=1):
            return f"did you mean {nearest}?"
    return "list them with: fastness queue list"
