"""What an error of PostgreSQL means for the transaction that got it.

conflict, overload          run it again
lost connection             run it again on a new connection; CommitUnknown if a commit was under way
read-only, in recovery      another server is the primary now: the same as a lost connection
unreplicated commit         CommitUnknown
"""

from typing import Final

from holdfast.backends.postgres.retries import Conflicted, Disconnected, Overloaded
from holdfast.errors import CommitUnknown, DatabaseFailed, DiskFull, Unreachable

_CONFLICTS: Final = frozenset({"40001", "40P01"})  # A serialization failure, a deadlock.

# Out of memory, of predicate locks or of another resource; a lock or a statement took too long. PostgreSQL has aborted
# the transaction. An open transaction of a paused process causes most of these, and ends in seconds.
_OVERLOADS: Final = frozenset({"53000", "53200", "53300", "53400", "55P03", "57014"})

_READ_ONLY: Final = "25006"  # A write on a standby, or on a server whose transactions are read-only.
_NOT_IN_STATE: Final = "55000"  # Among others: a function that only a primary has was called during recovery.
# The server is shutting down, has crashed, or starts; or an administrator ended this session.
_ENDED: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05"})


def failure_of(state: str, text: str, *, connected: bool, uncertain: bool) -> Exception:
    """The exception for an error with the SQLSTATE `state`.

    `connected` is whether the connection still works, and `uncertain` whether the statement commits.
    """
    if state in _CONFLICTS:
        return Conflicted(text)
    if state in _OVERLOADS:
        return Overloaded(f"{state}: {text}")
    if is_demoted(state, text):
        return Disconnected(text)  # PostgreSQL refused the statement, so nothing is uncertain.
    if state in _ENDED or not connected:
        if uncertain:
            return CommitUnknown(
                f"PostgreSQL's answer to a commit was lost ({text}); check whether the write was stored"
            )
        return Disconnected(text)
    if state == "53100":
        return DiskFull(f"PostgreSQL's disk is full ({text}); nothing was written. Free some space and try again")
    return DatabaseFailed(f"PostgreSQL refused a statement ({state}: {text}); nothing was written")


def is_demoted(state: str, text: str) -> bool:
    """Whether an error says that this server is not the primary; its connection must be replaced."""
    return state == _READ_ONLY or (state == _NOT_IN_STATE and "recovery" in text)


def is_unreplicated(severity: str | None, function: str | None) -> bool:
    """Whether a notice says that a commit stopped waiting for its synchronous standby.

    PostgreSQL has committed locally then, and answers with success: the transaction is visible, and a failover may lose
    it. The text of the notice depends on the server's language, the function that sends it does not.
    """
    return severity == "WARNING" and function == "SyncRepWaitForLSN"


def unreplicated_error(*, committed: bool) -> CommitUnknown | Unreachable:
    """The error of a commit that is on one server only, or of a read that may have seen such a commit."""
    if not committed:
        return Unreachable("PostgreSQL's synchronous standby does not answer, so what was read may be lost; try again")
    return CommitUnknown(
        "PostgreSQL's synchronous standby did not confirm a commit in time: a failover may lose it. Check the standby, "
        "then check whether the write was stored"
    )
