"""How a session notices that its server is not the primary any more, and that a commit was not replicated.

PostgreSQL reports neither as a lost connection. A server that became read-only keeps its connections and refuses
writes. A commit waits for its synchronous standby for ever: `statement_timeout` does not apply to it, and it does not
notice that its client has gone, so the locks of its transaction stay. So a session cancels it. PostgreSQL then ends the
wait, and answers with success and a warning: the transaction is visible, and a failover may lose it.
"""

from contextlib import suppress
from typing import Any, Final

import psycopg

from fastness import limits
from fastness.errors import CommitUnknown, Unreachable

_READ_ONLY: Final = "25006"  # A write on a standby, or on a server whose transactions are read-only.
_NOT_IN_STATE: Final = "55000"  # Among others: a function that only a primary has was called during recovery.

# Whether everything up to the log position $1 is durable: on the disk of this server, and if it has synchronous
# standbys, on the disks of as many as a commit waits for. A role without pg_read_all_stats does not see the positions
# of standbys; then this is false, and a synced commit finds out.
IS_DURABLE: Final = r"""SELECT CASE WHEN current_setting('synchronous_standby_names') = ''
    THEN pg_current_wal_flush_lsn() >= $1::pg_lsn
    ELSE (SELECT count(*) FILTER (WHERE flush_lsn >= $1::pg_lsn)
            >= coalesce(substring(current_setting('synchronous_standby_names') FROM '(\d+)\s*\(')::int, 1)
        FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))
    END"""


def cancel_statement(connection: "psycopg.Connection[Any]") -> None:
    """Ask PostgreSQL to end a statement that does not answer. If it does, the answer comes as usual."""
    with suppress(psycopg.Error):
        connection.cancel_safe(timeout=limits.CANCEL_SECONDS_MAX)


def is_demoted(state: str, text: str) -> bool:
    """Whether an error says that this server is not the primary: nothing was written, and another one may be."""
    return state == _READ_ONLY or (state == _NOT_IN_STATE and "recovery" in text)


def is_unreplicated(severity: str | None, function: str | None) -> bool:
    """Whether a notice says that a commit stopped waiting for its synchronous standby.

    The text of the notice depends on the server's language, the function that sends it does not.
    """
    return severity == "WARNING" and function == "SyncRepWaitForLSN"


def unreplicated_error(*, wrote: bool) -> CommitUnknown | Unreachable:
    """The error of a commit that is on one server only, or of a read that may have seen such a commit."""
    if not wrote:
        return Unreachable("PostgreSQL's synchronous standby does not answer, so what was read may be lost; try again")
    return CommitUnknown(
        "PostgreSQL's synchronous standby did not confirm a commit in time: a failover may lose it. Check the standby, "
        "then check whether the write was stored"
    )
