"""Closes what a program leaves open when it ends.

Without this, the interpreter would end daemon threads inside RocksDB, which can abort the process, and buffered records
would be lost. A program should still call `close` itself: then it sees the errors.

Resources are closed after the program's own threads have ended, the last one opened first. A forked child closes none:
they belong to its parent.
"""

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Final, Protocol

_log = logging.getLogger("fastness.closing")


class Closable(Protocol):
    """An open resource with threads or buffers."""

    def close_at_exit(self) -> None:
        """Write what is buffered, and end all threads. Does nothing if it is closed."""
        ...


_open: Final["weakref.WeakValueDictionary[int, Closable]"] = weakref.WeakValueDictionary()  # By order of opening.
_kept: Final[dict[int, Closable]] = {}  # Those that must be closed even if the program has dropped them.
_numbers: Final = itertools.count()


def close_at_exit(resource: Closable) -> None:
    """Close `resource` when the program ends, if it is still open then."""
    _open[next(_numbers)] = resource


def keep_until_exit(resource: Closable) -> Callable[[], None]:
    """As `close_at_exit`, also if nothing else refers to it any more. Call the returned function once it is closed."""
    number = next(_numbers)
    _open[number] = _kept[number] = resource

    def forget() -> None:
        _kept.pop(number, None)

    return forget


@atexit.register
def _close_all() -> None:
    for number in sorted(_open.keys(), reverse=True):
        resource = _open.get(number)
        if resource is None:  # pragma: no cover - Another thread dropped it meanwhile.
            continue
        try:
            resource.close_at_exit()
        except Exception as error:
            _log.warning("closing at the end of the program failed: %s", error)


def _forget_all() -> None:  # pragma: no cover - Forked children are not measured.
    _open.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_forget_all)
