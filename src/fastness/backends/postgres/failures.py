"""The errors of PostgreSQL's answers, by their code."""

from typing import Final

from fastness.backends.postgres.retries import Conflicted, Overloaded
from fastness.errors import DatabaseFailed, DiskFull

_CONFLICTS: Final = frozenset({"40001", "40P01"})  # A serialization failure, a deadlock.

# Out of memory, of locks or of another resource; a lock or a statement took too long. PostgreSQL has aborted the
# transaction. An open transaction of a paused process causes most of these, and ends in seconds.
_OVERLOADS: Final = frozenset({"53000", "53200", "53300", "53400", "55P03", "57014"})


def error_of(state: str, text: str) -> Exception:
    """The error for an answer whose connection still works."""
    if state in _CONFLICTS:
        return Conflicted(text)
    if state in _OVERLOADS:
        return Overloaded(f"{state}: {text}")
    if state == "53100":
        return DiskFull(f"PostgreSQL's disk is full ({text}); nothing was written. Free some space and try again")
    return DatabaseFailed(f"PostgreSQL refused a statement ({state}: {text}); nothing was written")
