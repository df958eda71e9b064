"""What it takes to send a request again whose answer was lost.

    it only reads (`READS`)               nothing: it is answered again
    it is the same twice (`SAME_TWICE`)   nothing: what it does is done already, and stays done
    anything else                         a key, under which it happens once

A request that is in neither list has a key, so one that somebody forgets to sort is safe.
"""

from typing import Any, Final

from holdfast.wire.activity import EndSession, ListLogs, ReadLog
from holdfast.wire.agents import GetAgent, ListAgents
from holdfast.wire.backups import BeginBackup, EndBackup, ListBackup, OpenBackup
from holdfast.wire.blobs import FindBlob, GetBlob, OpenBlob, PutBlob, WriteBlob
from holdfast.wire.entities import GetEntity, ListKinds, ReadChanges, ScanEntities
from holdfast.wire.health_checks import RunCheckups
from holdfast.wire.leases import CheckLease, DescribeLease, ListLeases, ListWaits
from holdfast.wire.mail import (
    CountMail,
    GetMailPolicy,
    ListBlocks,
    ListMailboxes,
    ReadMail,
    ReadReceipts,
)
from holdfast.wire.pairs import GetPair, ScanPairs
from holdfast.wire.queues import (
    CheckMessages,
    GetQueuePolicy,
    GetQueueStats,
    ListQueues,
    ListSchedules,
    PeekMessages,
    SurveyQueues,
)
from holdfast.wire.requests import Request
from holdfast.wire.states import GetState
from holdfast.wire.tokens import ListTokens
from holdfast.wire.universes import ListUniverses
from holdfast.wire.worlds import (
    CheckWorld,
    CompactWorld,
    DeleteWorld,
    DescribeWorld,
    GetBaseline,
    GetCursor,
    ListSegments,
    ListSnapshots,
    ListWorlds,
    ReadInbox,
    ReadJournal,
    SurveyWorlds,
)

READS: Final[frozenset[type[Request[Any]]]] = frozenset(
    {
        GetPair, ScanPairs, GetBlob, FindBlob, OpenBlob, GetState, GetEntity, ScanEntities, ReadChanges, ListKinds,
        ListUniverses, DescribeWorld, ListWorlds, SurveyWorlds, CheckWorld, ReadJournal, GetBaseline, ListSnapshots,
        ListSegments, ReadInbox, GetCursor, CheckLease, DescribeLease, ListLeases, ListWaits,
        CheckMessages, PeekMessages, GetQueueStats, ListQueues, SurveyQueues,
        GetQueuePolicy, ListSchedules, ListTokens, ReadLog, ListLogs,
        CountMail, ReadReceipts, ListBlocks, ListMailboxes, GetMailPolicy, GetAgent, ListAgents,
        ListBackup, OpenBackup, RunCheckups,
    }
)  # fmt: skip

SAME_TWICE: Final[dict[type[Request[Any]], str]] = {
    PutBlob: "the same bytes have the same name, and are stored once",
    WriteBlob: "the same bytes have the same name, and are stored once",
    DeleteWorld: "a deleted world stays deleted, and its name taken",
    CompactWorld: "what was moved is not moved again; only the answer differs",
    EndSession: "a file that was closed stays closed",
    BeginBackup: "a checkpoint that nobody uses goes by itself",
    EndBackup: "a backup that has ended stays so; only the answer differs",
    ReadMail: "reading removes nothing, and a sender is told once that its mail was delivered",
}


def takes_key(kind: type[Request[Any]]) -> bool:
    """Whether requests of this type must have a key to be sent again."""
    return kind not in READS and kind not in SAME_TWICE
