"""A plane with data of every kind, and for each class of requests one that it can execute."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from fastness.backends.objects import open_objects
from fastness.kv import Database, Subspace, Transaction
from fastness.layers.lock_records import session_key
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.idempotency import keyed_call_of
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier, TierPolicy
from fastness.wire.activity import EndSession, ListLogs, LogRecords, ReadLog
from fastness.wire.agents import RegisterAgent
from fastness.wire.atomic import CommitAtomic
from fastness.wire.backups import BeginBackup, EndBackup
from fastness.wire.blobs import GetBlob, OpenBlob, PinBlob, PutBlob, WriteBlob
from fastness.wire.collections import CommitRows, DeleteRow, KnownRow, PutRow, WaitForRows
from fastness.wire.effects import (
    ClaimedEffect,
    ClaimEffects,
    CompleteEffect,
    EffectInfo,
    ExtendEffect,
    FailEffect,
    ReleaseEffects,
)
from fastness.wire.encryption import EnableEncryption, RewriteValues, RotateKey, ShowEncryption
from fastness.wire.entities import DeleteEntity, EntityWrite, ListKinds, PutEntity, WriteEntities
from fastness.wire.hosting import (
    ClaimWorlds,
    CommitTurn,
    FailTurn,
    GivenBack,
    ReleaseWorlds,
    RenewWorlds,
    ResumeWorld,
    RetryAside,
    SendToWorld,
    SetProgram,
    SetSendPolicy,
)
from fastness.wire.inboxes import Control, Effect
from fastness.wire.ingress import SYNCED, Push, PushItem, PushMany, ShowIngress, WatchPushes
from fastness.wire.leases import AcquireLease, BreakLease, DescribeLease, KeepLease, LeaseProof, ListWaits, ReleaseLease
from fastness.wire.locks import AcquireLocks, EndLockSession, LockSession, ReleaseLocks, RenewLocks, ShowLockStats
from fastness.wire.mail import (
    BlockSender,
    ConfirmMail,
    JoinMailbox,
    LeaveMailbox,
    MailPolicy,
    NewMail,
    ReadMail,
    ReadReceipts,
    SeeReceipts,
    SendMail,
    SetMailPolicy,
)
from fastness.wire.nodes import ListNodes
from fastness.wire.pairs import DeletePair, PutPair
from fastness.wire.planes import MarkRestored, RaiseFormat
from fastness.wire.queues import (
    AckMessages,
    CancelMessage,
    CancelMessages,
    ChangeVisibility,
    DeleteMessages,
    DeleteQueue,
    ExtendMessages,
    GetMessage,
    GetQueueStats,
    GetResult,
    MessageLease,
    MoveMessages,
    NackMessages,
    NewMessage,
    NewResult,
    PauseKey,
    PauseQueue,
    PurgeQueue,
    PutMessages,
    QueuePolicy,
    ReceiveMessages,
    RedriveMessages,
    RejectMessages,
    RemoveSchedule,
    SetQueuePolicy,
    SetSchedule,
    SurveyQueues,
    UpdateMessage,
    VisibilityChange,
    WaitForCancel,
)
from fastness.wire.quotas import GetUsage, Quota, SetQuota
from fastness.wire.requests import Request
from fastness.wire.runs import CancelRun, DeleteRun, GetRun, SignalRun, StartRun, UpdateRun
from fastness.wire.space import CollectGarbage, ShowSpace, ShowStorage
from fastness.wire.sqs import (
    CancelMoveTask,
    CreateSqsQueue,
    DeleteSqsQueue,
    PurgeSqsQueue,
    SetSqsAttributes,
    StartMoveTask,
    TagSqsQueue,
    UntagSqsQueue,
)
from fastness.wire.states import RemoveState, UpdateState
from fastness.wire.tokens import CreateToken, RevokeToken
from fastness.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CheckRestore,
    CheckWorld,
    CommitSnapshot,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    DrainInbox,
    ForkWorld,
    PromoteSnapshot,
    PutItem,
    ReadJournal,
    SetManifest,
)

GENESIS = hashlib.sha256(b"\xf6").hexdigest()  # The blob of the first snapshot of each world.


class PopulatedPlane:
    """A plane with data of every kind."""

    def __init__(self, database: Database, clock: ManualClock) -> None:
        policy = TierPolicy({"task.title": Tier.CRITICAL})
        self.transport = EmbeddedTransport(Services(database, open_objects("memory:"), clock=clock, policy=policy))
        self.clock = clock
        call = self.transport.call
        call(CreateWorld("w"))
        call(AppendEntries("w", [b"\x01", b"\x02"], 0))
        call(CreateWorld("caller"))
        call(PutItem("caller", Control(command="go", effects=(Effect("mail", b"1"), Effect("call", b"2")))))
        call(DrainInbox("caller"))
        (self.effect,) = call(ClaimEffects(["mail"], "ada")).effects
        call(PutItem("w", Control(command="go")))
        call(CreateWorld("old"))
        call(ChangeWorld("old", "archived"))
        call(StartRun("ended", "r-0"))
        call(CancelRun("r-0", force=True))
        call(StartRun("flow", "r-1"))
        self.run_fence = call(ClaimWorlds(["workflow:flow"], "ada")).worlds[0].fence
        self.locks = LockSession("a-secret-of-the-session")
        call(AcquireLocks(self.locks, "claim", [["record_id", "task/1"]], owner="ada", lease_seconds=3_600.0))
        self.lease = LeaseProof(*self._granted(call(AcquireLease("held", "ada", 60.0))))
        call(UpdateState("s", b"\x01"))
        call(PutEntity("task", "one", {"title": b"\x01", "note": b"\x01"}, 0))
        put = call(PutMessages("jobs", [NewMessage(bytes([number])) for number in range(6)])).receipts
        self.waiting = put[-1].id
        answered = call(PutMessages("answers", [NewMessage(b"x")])).receipts[0]
        call(AckMessages("answers", self._leases("answers", 1), results=[NewResult(b"42")]))
        self.answered = answered.id
        self.leases = self._leases("jobs", 3)
        call(SetSchedule("jobs", "daily", "0 0 * * *", NewMessage(b"x")))
        for name in ("sqs", "moving"):
            call(CreateSqsQueue(f"{name}-dead"))
            arn = f"arn:aws:sqs:us-east-1:000000000000:{name}-dead"
            call(CreateSqsQueue(name, {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn})}, {"b": "1"}))
            call(PutMessages(name, [NewMessage(b"x")]))
            call(PutMessages(f"{name}-dead", [NewMessage(b"x") for _ in range(3)]))
        self.move_task = call(StartMoveTask("moving-dead", per_second=1)).handle
        self.token = call(CreateToken("t", ["*"], ["queue:put"], "0" * 64)).id
        self.mail = call(SendMail("ada", [NewMail("bob", b"hi")])).mails[0].id
        call(CreateWorld("hosted", program="p"))
        for command in ("aside", "next"):
            call(PutItem("hosted", Control(command=command)))
        self.claim = call(ClaimWorlds(["p"], "h1", lease_seconds=3_600.0)).worlds[0]
        call(CommitTurn("hosted", "h1", self.claim.fence, 0, 0, aside=[(0, "bad")]))
        call(CreateWorld("w", universe="other"))
        call(SetSendPolicy(["other"]))
        call(SetSendPolicy(accepts_from=["main"], universe="other"))
        for name in ("ready", "stopped", "idle"):
            call(CreateWorld(name, program=name))
            call(PutItem(name, Control(command="go")))
        self.idle = call(ClaimWorlds(["idle"], "h1", lease_seconds=3_600.0)).worlds[0]
        call(CommitTurn("idle", "h1", self.idle.fence, 0, 0))
        stopped = call(ClaimWorlds(["stopped"], "h1")).worlds[0]
        call(FailTurn("stopped", "h1", stopped.fence, "bad", is_stopped=True))
        call(PutPair(b"zz", b"1"))
        call(LogRecords("s", [b"{}"]))

    def send(self, request: Request[Any], key: str = "k") -> Any:
        return self.transport.call(request, keyed_call_of(self.transport, request, key, again=True))

    def everything(self) -> list[Any]:
        """The key space without stored results of calls, and the session log."""
        begin, end = Subspace("once").range()
        pairs = self.transport.services.database.read(Transaction.scan, b"", b"\xff" * 8, limit=10_000)
        self.transport.services.log().flush()
        logged = self.transport.call(ReadLog("s", "activity")).records
        return [pair for pair in pairs if not begin <= pair[0] < end] + [each.record for each in logged]

    def stored_snapshot(self) -> PromoteSnapshot:
        """The promotion of a snapshot that is only stored."""
        self.transport.call(CommitSnapshot("w", b"\x01", 2, promote=False))
        return PromoteSnapshot("w", 2)

    def many_dead_letters(self) -> RedriveMessages:
        """A redrive of more messages than one transaction moves."""
        for _ in range(2):
            self.transport.call(PutMessages("died", [NewMessage(b"x") for _ in range(150)]))
            self.transport.call(RejectMessages("died", self._leases("died", 150)))
        return RedriveMessages("died", limit=270)

    def _leases(self, queue: str, count: int) -> list[MessageLease]:
        received = self.transport.call(ReceiveMessages(queue, "ada", count)).messages
        return [MessageLease(each.id, each.lease_id, each.fence) for each in received]

    @staticmethod
    def _granted(granted: Any) -> tuple[str, str, int]:
        return granted.key, granted.lease_id, granted.fence


def of(effect: EffectInfo) -> tuple[str, int, int, int]:
    return effect.world, effect.height, effect.number, effect.fence


PAUSED, OPEN = QueuePolicy(paused=True), QueuePolicy()

# A write of each class that takes a key, and what comes between it and its repetition, which would not show otherwise.
WRITES: dict[type[Request[Any]], Callable[[PopulatedPlane], list[Request[Any]]]] = {
    PutPair: lambda _: [PutPair(b"zz", b"2"), PutPair(b"zz", b"3")],
    MarkRestored: lambda _: [MarkRestored(1), MarkRestored(2)],
    DeletePair: lambda _: [DeletePair(b"zz"), PutPair(b"zz", b"3")],
    PinBlob: lambda _: [PinBlob(GENESIS, pinned=False), PinBlob(GENESIS)],
    CreateWorld: lambda _: [CreateWorld("w2")],
    ChangeWorld: lambda _: [ChangeWorld("w", "paused"), ChangeWorld("w", "active")],
    ForkWorld: lambda _: [ForkWorld("w", "copy", 2), ChangeWorld("copy", "paused")],
    AppendEntries: lambda _: [AppendEntries("w", [b"\x03"], 2)],
    SetManifest: lambda _: [SetManifest("w", "0" * 64, 2)],
    PromoteSnapshot: lambda populated: [populated.stored_snapshot(), ChangeWorld("w", "paused")],
    CommitSnapshot: lambda _: [CommitSnapshot("w", b"\x01", 2), ChangeWorld("w", "paused")],
    DrainInbox: lambda _: [DrainInbox("w"), PutItem("w", Control(command="stop"))],
    PutItem: lambda _: [PutItem("w", Control(command="stop"))],
    StartRun: lambda _: [StartRun("flow", "r-2")],
    SignalRun: lambda _: [SignalRun("r-1", "go")],
    CancelRun: lambda _: [CancelRun("r-1"), CancelRun("r-1", force=True)],
    UpdateRun: lambda populated: [
        UpdateRun("r-1", populated.run_fence, published=published) for published in (b"\x01", b"\x02")
    ],
    ClaimEffects: lambda _: [ClaimEffects(["call"], "ada")],
    ReleaseEffects: lambda populated: [ReleaseEffects([ClaimedEffect(*of(populated.effect))])],
    CompleteEffect: lambda populated: [CompleteEffect(*of(populated.effect))],
    FailEffect: lambda populated: [FailEffect(*of(populated.effect), "no answer")],
    ExtendEffect: lambda populated: [ExtendEffect(*of(populated.effect), 60.0)],
    SetProgram: lambda _: [SetProgram("w", "p"), SetProgram("w", "q")],
    ResumeWorld: lambda _: [ResumeWorld("stopped"), SetProgram("stopped", None)],
    CommitTurn: lambda populated: [CommitTurn("hosted", "h1", populated.claim.fence, 1, 1)],
    FailTurn: lambda populated: [FailTurn("hosted", "h1", populated.claim.fence, "bad")],
    RetryAside: lambda _: [RetryAside("hosted", 0)],
    SendToWorld: lambda populated: [SendToWorld("hosted", "h1", populated.claim.fence, "w", "other", "hello")],
    SetSendPolicy: lambda _: [SetSendPolicy(["a"]), SetSendPolicy(["b"])],
    AcquireLease: lambda _: [AcquireLease("free", "ada")],
    KeepLease: lambda populated: [KeepLease(populated.lease, 60.0)],
    ReleaseLease: lambda populated: [ReleaseLease(populated.lease)],
    BreakLease: lambda populated: [BreakLease(populated.lease.key, populated.lease.fence)],
    UpdateState: lambda _: [UpdateState("s", b"\x02"), UpdateState("s", b"\x03")],
    RemoveState: lambda _: [RemoveState("s")],
    CommitRows: lambda _: [
        CommitRows("notes", [PutRow("p", ("a",), b"1", if_version=0)]),
        CommitRows("notes", [PutRow("p", ("a",), b"2", if_version=1), DeleteRow("p", ("b",))]),
    ],
    WriteEntities: lambda _: [WriteEntities([EntityWrite("task", "one", {"title": b"\x02"})])],
    PutEntity: lambda _: [PutEntity("task", "one", {"note": b"\x02"}, 1)],
    DeleteEntity: lambda _: [DeleteEntity("task", "one"), PutEntity("task", "one", {"note": b"\x02"}, 2)],
    LogRecords: lambda _: [LogRecords("s", [b'{"n":1}'])],
    PutMessages: lambda _: [PutMessages("jobs", [NewMessage(b"x")])],
    ReceiveMessages: lambda _: [ReceiveMessages("jobs", "ada")],
    RenewLocks: lambda populated: [RenewLocks(populated.locks, 3_600.0)],
    ReleaseLocks: lambda populated: [ReleaseLocks(populated.locks, "claim")],
    EndLockSession: lambda populated: [EndLockSession(session_key(populated.locks).number)],
    AckMessages: lambda populated: [AckMessages("jobs", populated.leases)],
    NackMessages: lambda populated: [NackMessages("jobs", populated.leases)],
    RejectMessages: lambda populated: [RejectMessages("jobs", populated.leases)],
    ExtendMessages: lambda populated: [ExtendMessages("jobs", populated.leases, 60.0)],
    ChangeVisibility: lambda populated: [
        ChangeVisibility("jobs", [VisibilityChange(lease, 0.0) for lease in populated.leases])
    ],
    DeleteQueue: lambda _: [DeleteQueue("jobs", force=True), PutMessages("jobs", [NewMessage(b"x")])],
    PurgeQueue: lambda _: [PurgeQueue("jobs"), PutMessages("jobs", [NewMessage(b"x")])],
    RedriveMessages: lambda populated: [populated.many_dead_letters()],
    SetQueuePolicy: lambda _: [SetQueuePolicy("jobs", PAUSED), SetQueuePolicy("jobs", OPEN)],
    CreateSqsQueue: lambda _: [CreateSqsQueue("new", {}, {"a": "1"}), TagSqsQueue("new", {"a": "2"})],
    SetSqsAttributes: lambda _: [
        SetSqsAttributes("sqs", {"DelaySeconds": delay}) for delay in ("1", "2")
    ],
    DeleteSqsQueue: lambda _: [DeleteSqsQueue("sqs")],
    PurgeSqsQueue: lambda _: [PurgeSqsQueue("sqs"), PutMessages("sqs", [NewMessage(b"x")])],
    TagSqsQueue: lambda _: [TagSqsQueue("sqs", {"a": value}) for value in ("1", "2")],
    UntagSqsQueue: lambda _: [UntagSqsQueue("sqs", ["b"]), TagSqsQueue("sqs", {"b": "2"})],
    StartMoveTask: lambda _: [StartMoveTask("sqs-dead", per_second=1)],
    CancelMoveTask: lambda populated: [CancelMoveTask(populated.move_task)],
    PauseQueue: lambda _: [PauseQueue("jobs"), PauseQueue("jobs", paused=False)],
    UpdateMessage: lambda populated: [UpdateMessage("jobs", populated.waiting, number) for number in (9, 1)],
    DeleteMessages: lambda populated: [DeleteMessages("jobs", [populated.waiting])],
    MoveMessages: lambda populated: [MoveMessages("jobs", [populated.waiting], "slow")],
    PauseKey: lambda _: [PauseKey("jobs", "k", seconds=60.0), PauseKey("jobs", "k")],
    SetSchedule: lambda _: [SetSchedule("jobs", "rare", "0 0 * * 0", NewMessage(b"x")), RemoveSchedule("jobs", "rare")],
    RemoveSchedule: lambda _: [RemoveSchedule("jobs", "daily")],
    CommitAtomic: lambda populated: [CommitAtomic([AckMessages("jobs", populated.leases), UpdateState("s", b"\x02")])],
    CreateToken: lambda _: [CreateToken("u", ["*"], ["queue:put"], "1" * 64)],
    RevokeToken: lambda populated: [RevokeToken(populated.token)],
    SendMail: lambda _: [SendMail("ada", [NewMail("bob", b"more")])],
    JoinMailbox: lambda _: [JoinMailbox("bob", "one"), JoinMailbox("bob", "two")],
    LeaveMailbox: lambda populated: [LeaveMailbox("bob", "one"), JoinMailbox("bob", "one")],
    ConfirmMail: lambda populated: [ConfirmMail("bob", [populated.mail])],
    SeeReceipts: lambda _: [SeeReceipts("ada", 0)],
    BlockSender: lambda _: [BlockSender("bob", "ada"), BlockSender("bob", "ada", blocked=False)],
    SetMailPolicy: lambda _: [SetMailPolicy(MailPolicy(5)), SetMailPolicy(MailPolicy(6))],
    RegisterAgent: lambda _: [RegisterAgent("ada", b"a" * 32), RegisterAgent("ada", b"b" * 32, replace=True)],
}  # fmt: skip


Make = Callable[[PopulatedPlane], Request[Any]]

# A request of each class that may be executed twice.
REPEATABLES: dict[type[Request[Any]], Make] = {
    ClaimWorlds: lambda _: ClaimWorlds(["ready"], "h1"),
    RenewWorlds: lambda populated: RenewWorlds([("hosted", populated.claim.fence)], "h1", 3_600.0),
    ReleaseWorlds: lambda populated: ReleaseWorlds([GivenBack("idle", populated.idle.fence, 1)], "h1"),
    PutBlob: lambda _: PutBlob(b"bytes"),
    CollectGarbage: lambda _: CollectGarbage(),
    EnableEncryption: lambda _: EnableEncryption("main"),
    RotateKey: lambda _: RotateKey("main"),
    RewriteValues: lambda _: RewriteValues("main"),
    WriteBlob: lambda _: WriteBlob(),
    DeleteRun: lambda _: DeleteRun("r-0"),
    DeleteWorld: lambda _: DeleteWorld("old"),
    CompactWorld: lambda _: CompactWorld("w", 1, 0),
    EndSession: lambda _: EndSession("s"),
    BeginBackup: lambda _: BeginBackup(),
    EndBackup: lambda _: EndBackup("0" * 32),
    CancelMessage: lambda populated: CancelMessage("jobs", populated.waiting),
    CancelMessages: lambda populated: CancelMessages("jobs", [populated.waiting, populated.leases[0].id]),
    ReadMail: lambda _: ReadMail("bob"),
    Push: lambda _: Push("bob", "t", "text/plain", b"x", "k", SYNCED),
    PushMany: lambda _: PushMany([PushItem("bob", "t", "text/plain", b"x", "k")], SYNCED),
    AcquireLocks: lambda _: AcquireLocks(LockSession("another-secret-id"), "claim", [["entity_type", "note"]]),
    RaiseFormat: lambda _: RaiseFormat(),
    SetQuota: lambda _: SetQuota("main", Quota(messages=1_000)),
}
# A read of each class.
READS: dict[type[Request[Any]], Make] = {
    GetBlob: lambda _: GetBlob(GENESIS),
    OpenBlob: lambda _: OpenBlob(GENESIS),
    ReadJournal: lambda _: ReadJournal("w", 0),
    GetRun: lambda _: GetRun("r-1"),
    DescribeLease: lambda _: DescribeLease("held"),
    ReadLog: lambda _: ReadLog(),
    ListLogs: lambda _: ListLogs(),
    GetQueueStats: lambda _: GetQueueStats("jobs"),
    GetMessage: lambda populated: GetMessage("jobs", populated.waiting),
    GetResult: lambda populated: GetResult("answers", populated.answered),
    WaitForCancel: lambda populated: WaitForCancel("jobs", populated.leases, 0.0),
    WaitForRows: lambda _: WaitForRows("notes", [KnownRow("p", ("a",), 1)], 0.0),
    SurveyQueues: lambda _: SurveyQueues(),
    CheckWorld: lambda _: CheckWorld("w"),
    CheckRestore: lambda _: CheckRestore("w"),
    ListKinds: lambda _: ListKinds(),
    ListWaits: lambda _: ListWaits(),
    ShowLockStats: lambda _: ShowLockStats(),
    ReadReceipts: lambda _: ReadReceipts("ada"),
    ShowSpace: lambda _: ShowSpace(),
    ShowStorage: lambda _: ShowStorage(),
    ListNodes: lambda _: ListNodes(),
    ShowEncryption: lambda _: ShowEncryption(),
    WatchPushes: lambda populated: WatchPushes(after=populated.transport.call(WatchPushes()).position),
    ShowIngress: lambda _: ShowIngress(),
    GetUsage: lambda _: GetUsage("main"),
}


def request_of(populated: PopulatedPlane, kind: type[Request[Any]]) -> Request[Any] | None:
    """A request of a class that can be executed; None if there is none above."""
    if kind in WRITES:
        return WRITES[kind](populated)[0]
    make = REPEATABLES.get(kind) or READS.get(kind)
    return None if make is None else make(populated)
