"""A fork copies an open database into a second process, which must not touch it.

The child would write to the same log through the same descriptors, without the threads that keep it in order, and
damage what the parent wrote. So in the child every database of the parent is closed to use from its first moment.
"""

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Something open that a forked child must let go of."""

    def forget_after_fork(self) -> None:
        """Refuse all use from now on, and give nothing back: it belongs to the parent."""
        ...


_open: "WeakSet[Forkable]" = WeakSet()


def forget_in_children(database: Forkable) -> None:
    """Have `database` forgotten in every child that this process forks."""
    _open.add(database)


def _after_fork() -> None:
    for database in list(_open):
        database.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
