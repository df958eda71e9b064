"""Invalidates open databases in a forked child process.

A fork copies an open database into a second process. The child would write to the same log through the same
descriptors, without the threads that order the writes, and damage the parent's data. So every database that the parent
has open raises Closed in the child.
"""

import os
from typing import Protocol
from weakref import WeakSet


class ForkSensitive(Protocol):
    """An open resource that a forked child must not use."""

    def invalidate_after_fork(self) -> None:
        """Reject all further use, and release nothing: the resources belong to the parent."""
        ...


_open: "WeakSet[ForkSensitive]" = WeakSet()


def invalidate_in_children(database: ForkSensitive) -> None:
    """Invalidate `database` in every child that this process forks."""
    _open.add(database)


def _after_fork() -> None:  # pragma: no cover - Forked children are not measured.
    for database in list(_open):
        database.invalidate_after_fork()


os.register_at_fork(after_in_child=_after_fork)
