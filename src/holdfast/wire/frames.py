"""Frames of the stream: many calls in one, many answers in one.

    client ──►  [hello]                 which client this is, and what it may do
    client ──►  [call, call, …]         each with a number of its own; a bare number cancels the call that has it
    server ──►  [reply, reply, …]       in any order; what was committed in one group is answered in one frame

A frame is one binary WebSocket message, MessagePack. A call has a key if its outcome must not be doubled: a client that
did not hear the answer sends the same call again with the same key, marked as `again`.
"""

from typing import Any, Final

import msgspec

from holdfast.wire.activity import EndSession, ListLogs, LogRecords, ReadLog
from holdfast.wire.agents import GetAgent, ListAgents, RegisterAgent
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.backups import BeginBackup, EndBackup
from holdfast.wire.blobs import FindBlob, GetBlob, PutBlob
from holdfast.wire.entities import (
    DeleteEntity,
    GetEntity,
    ListKinds,
    PutEntity,
    ReadChanges,
    ScanEntities,
    WriteEntities,
)
from holdfast.wire.leases import AcquireLease, CheckLease, DescribeLease, KeepLease, ListLeases, ListWaits, ReleaseLease
from holdfast.wire.mail import (
    BlockSender,
    ConfirmMail,
    CountMail,
    GetMailPolicy,
    JoinMailbox,
    LeaveMailbox,
    ListBlocks,
    ListMailboxes,
    ReadMail,
    ReadReceipts,
    SeeReceipts,
    SendMail,
    SetMailPolicy,
)
from holdfast.wire.pairs import GetPair, ScanPairs
from holdfast.wire.problems import Problem
from holdfast.wire.queues import (
    AckMessages,
    CheckMessages,
    ExtendMessages,
    GetQueuePolicy,
    GetQueueStats,
    ListQueues,
    ListSchedules,
    NackMessages,
    PauseQueue,
    PeekMessages,
    PurgeQueue,
    PutMessages,
    ReceiveMessages,
    RedriveMessages,
    RejectMessages,
    RemoveSchedule,
    SetQueuePolicy,
    SetSchedule,
    SurveyQueues,
)
from holdfast.wire.states import GetState, RemoveState, UpdateState
from holdfast.wire.tokens import CreateToken, ListTokens, RevokeToken
from holdfast.wire.universes import ListUniverses
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CheckWorld,
    CommitSnapshot,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    DescribeWorld,
    DrainInbox,
    ForkWorld,
    GetBaseline,
    GetCursor,
    ListSegments,
    ListSnapshots,
    ListWorlds,
    PutItem,
    ReadInbox,
    ReadJournal,
    SetManifest,
    SurveyWorlds,
)

# Everything that may be asked over the network. Raw writes to the key space may not: they could break any layer.
AnyRequest = (
    PutMessages | AckMessages | NackMessages | RejectMessages | ExtendMessages | ReceiveMessages
    | CheckMessages | PeekMessages | GetQueueStats | ListQueues | SurveyQueues | PurgeQueue | RedriveMessages
    | GetQueuePolicy | SetQueuePolicy | PauseQueue | SetSchedule | RemoveSchedule | ListSchedules
    | AcquireLease | KeepLease | ReleaseLease | CheckLease | DescribeLease | ListLeases | ListWaits
    | GetState | UpdateState | RemoveState
    | GetEntity | ScanEntities | ListKinds | ReadChanges | WriteEntities | PutEntity | DeleteEntity
    | LogRecords | ReadLog | ListLogs | EndSession
    | PutBlob | GetBlob | FindBlob
    | ListUniverses
    | CreateWorld | DescribeWorld | ListWorlds | SurveyWorlds | CheckWorld | ChangeWorld | DeleteWorld | ForkWorld
    | AppendEntries | ReadJournal
    | SetManifest | CommitSnapshot | GetBaseline | ListSnapshots | CompactWorld | ListSegments
    | DrainInbox | PutItem | ReadInbox | GetCursor
    | GetPair | ScanPairs | CommitAtomic
    | CreateToken | ListTokens | RevokeToken
    | BeginBackup | EndBackup
    | SendMail | JoinMailbox | LeaveMailbox | ReadMail | ConfirmMail | CountMail | ReadReceipts | SeeReceipts
    | BlockSender | ListBlocks | ListMailboxes | GetMailPolicy | SetMailPolicy
    | RegisterAgent | GetAgent | ListAgents
)  # fmt: skip

PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of each side."""

    protocol: int
    session: str  # Names the client across its connections, so that a new one takes over from an old one.
    calls_max: int = 0  # The server's: how many calls may be under way.


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request with a number. A `key` makes its outcome happen once, however often it is sent."""

    number: int
    request: AnyRequest
    key: str | None = None
    again: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of that number, or the problem with it."""

    number: int
    answer: Any = None
    problem: Problem | None = None


class ReplyOnTheWay(msgspec.Struct, frozen=True, array_like=True):
    """A reply whose answer is decoded by whoever knows its type."""

    number: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    problem: Problem | None = None


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_calls = msgspec.msgpack.Decoder(list[Call | int]).decode  # A bare number cancels the call that has it.
decode_replies = msgspec.msgpack.Decoder(list[ReplyOnTheWay]).decode
