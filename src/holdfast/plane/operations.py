"""The table of operations, and the one way to carry any of them out.

    request ──► its operation ──► answer

An operation is a function over a transaction (`run`), or one that needs more than that: bodies, object stores, waiting
(`serve`). Every door (a handle, an HTTP endpoint, a stream frame, an atomic list) comes through here, so whatever must
hold for every operation is said once.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.plane import (
    activity,
    agents,
    atomic,
    backups,
    blobs,
    entities,
    leases,
    mail,
    pairs,
    queues,
    states,
    tokens,
    universes,
    worlds,
)
from holdfast.wire.activity import EndSession, ListLogs, LogRecords, ReadLog
from holdfast.wire.agents import GetAgent, ListAgents, RegisterAgent
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.backups import BeginBackup, EndBackup, ListBackup, OpenBackup
from holdfast.wire.blobs import FindBlob, GetBlob, OpenBlob, PutBlob, WriteBlob
from holdfast.wire.entities import (
    DeleteEntity,
    GetEntity,
    ListKinds,
    PutEntity,
    ReadChanges,
    ScanEntities,
    WriteEntities,
)
from holdfast.wire.health_checks import RunCheckups
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
from holdfast.wire.pairs import DeletePair, GetPair, PutPair, ScanPairs
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
from holdfast.wire.requests import Answer, Request
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


class Operation(msgspec.Struct, frozen=True):
    """How a request type is carried out: exactly one of `run`, `serve` and `at_once`."""

    run: Callable[[Transaction, Any], Any] | None = None
    reads_only: bool = False  # A snapshot serves it, so it never waits for a writer.
    serve: Callable[..., Any] | None = None  # Called with the port; returns an awaitable on an event loop.
    at_once: Callable[..., Any] | None = None  # Called with the port; answers without waiting for anything.
    now: Callable[[Transaction, Any], Any] | None = None  # Of `serve`: all there is to it if nobody is to wait.
    keyed: bool = False  # One of these two, and takes a third argument: what makes it happen once.


OPERATIONS: Final[dict[type[Request[Any]], Operation]] = {
    GetPair: Operation(pairs.get, reads_only=True),
    ScanPairs: Operation(pairs.scan, reads_only=True),
    PutPair: Operation(pairs.put),
    DeletePair: Operation(pairs.delete),
    PutBlob: Operation(serve=blobs.put),
    GetBlob: Operation(serve=blobs.get),
    FindBlob: Operation(blobs.find, reads_only=True),
    WriteBlob: Operation(serve=blobs.write),
    OpenBlob: Operation(serve=blobs.open),
    ListUniverses: Operation(universes.names, reads_only=True),
    CreateWorld: Operation(worlds.create),
    ChangeWorld: Operation(worlds.change),
    DeleteWorld: Operation(serve=worlds.delete),
    ForkWorld: Operation(serve=worlds.fork, keyed=True),
    DescribeWorld: Operation(worlds.describe, reads_only=True),
    ListWorlds: Operation(worlds.names, reads_only=True),
    SurveyWorlds: Operation(worlds.survey, reads_only=True),
    CheckWorld: Operation(serve=worlds.check),
    AppendEntries: Operation(worlds.append),
    ReadJournal: Operation(serve=worlds.read),
    SetManifest: Operation(worlds.set_manifest),
    CommitSnapshot: Operation(serve=worlds.commit_snapshot, keyed=True),
    GetBaseline: Operation(worlds.baseline, reads_only=True),
    ListSnapshots: Operation(worlds.list_snapshots, reads_only=True),
    CompactWorld: Operation(serve=worlds.compact),
    ListSegments: Operation(worlds.list_segments, reads_only=True),
    DrainInbox: Operation(worlds.drain),
    PutItem: Operation(worlds.put_item),
    ReadInbox: Operation(worlds.read_inbox, reads_only=True),
    GetCursor: Operation(worlds.cursor, reads_only=True),
    AcquireLease: Operation(serve=leases.acquire, keyed=True),
    KeepLease: Operation(leases.keepalive),
    ReleaseLease: Operation(leases.release),
    CheckLease: Operation(leases.check, reads_only=True),
    DescribeLease: Operation(serve=leases.describe),
    ListLeases: Operation(leases.page, reads_only=True),
    ListWaits: Operation(serve=leases.waits),
    GetState: Operation(states.get, reads_only=True),
    UpdateState: Operation(states.update),
    RemoveState: Operation(states.remove),
    GetEntity: Operation(entities.get, reads_only=True),
    ScanEntities: Operation(entities.scan, reads_only=True),
    ListKinds: Operation(serve=entities.kinds),
    ReadChanges: Operation(entities.history, reads_only=True),
    WriteEntities: Operation(serve=entities.write, keyed=True),
    PutEntity: Operation(serve=entities.put, keyed=True),
    DeleteEntity: Operation(serve=entities.delete, keyed=True),
    LogRecords: Operation(at_once=activity.log, keyed=True),
    ReadLog: Operation(serve=activity.read),
    ListLogs: Operation(serve=activity.files),
    EndSession: Operation(serve=activity.end),
    PutMessages: Operation(queues.put),
    ReceiveMessages: Operation(serve=queues.receive, keyed=True),
    AckMessages: Operation(queues.ack),
    NackMessages: Operation(queues.nack),
    RejectMessages: Operation(queues.reject),
    ExtendMessages: Operation(queues.extend),
    CheckMessages: Operation(queues.check, reads_only=True),
    PeekMessages: Operation(queues.peek, reads_only=True),
    GetQueueStats: Operation(serve=queues.stats),
    ListQueues: Operation(queues.names, reads_only=True),
    SurveyQueues: Operation(serve=queues.survey),
    PurgeQueue: Operation(serve=queues.purge, keyed=True),
    RedriveMessages: Operation(serve=queues.redrive, keyed=True),
    GetQueuePolicy: Operation(queues.get_policy, reads_only=True),
    SetQueuePolicy: Operation(queues.set_policy),
    PauseQueue: Operation(queues.pause),
    SetSchedule: Operation(queues.set_schedule),
    RemoveSchedule: Operation(queues.remove_schedule),
    ListSchedules: Operation(queues.list_schedules, reads_only=True),
    CommitAtomic: Operation(serve=atomic.commit, keyed=True),
    CreateToken: Operation(tokens.create),
    ListTokens: Operation(tokens.page, reads_only=True),
    RevokeToken: Operation(tokens.revoke),
    BeginBackup: Operation(serve=backups.begin),
    ListBackup: Operation(serve=backups.files),
    OpenBackup: Operation(serve=backups.open),
    EndBackup: Operation(serve=backups.end),
    RunCheckups: Operation(serve=backups.examine),
    SendMail: Operation(mail.send),
    JoinMailbox: Operation(mail.join),
    LeaveMailbox: Operation(mail.leave),
    ReadMail: Operation(serve=mail.read, now=mail.read_now),
    ConfirmMail: Operation(mail.confirm),
    CountMail: Operation(mail.count, reads_only=True),
    ReadReceipts: Operation(serve=mail.receipts, now=mail.receipts_now),
    SeeReceipts: Operation(mail.see),
    BlockSender: Operation(mail.block),
    ListBlocks: Operation(mail.blocks, reads_only=True),
    ListMailboxes: Operation(mail.names, reads_only=True),
    GetMailPolicy: Operation(mail.get_policy, reads_only=True),
    SetMailPolicy: Operation(mail.set_policy),
    RegisterAgent: Operation(agents.register),
    GetAgent: Operation(agents.get, reads_only=True),
    ListAgents: Operation(agents.page, reads_only=True),
}


def operation_of(request: Request[Answer]) -> Operation:
    """The operation behind a request.

    Raises:
        InvalidArgument: it is no request, or one that this plane does not know.
    """
    operation = OPERATIONS.get(type(request))
    if operation is None:
        raise InvalidArgument(f"{type(request).__name__} is no operation of this plane; send one of holdfast.wire")
    return operation


def execute(tx: Transaction, request: Request[Answer]) -> Answer:
    """Carry `request` out inside a transaction that somebody else commits.

    Raises:
        InvalidArgument: it needs more than a transaction.
    """
    run = operation_of(request).run
    if run is None:
        raise InvalidArgument(f"{type(request).__name__} does more than one commit can; send it by itself")
    answer: Answer = run(tx, request)
    return answer
