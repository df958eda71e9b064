"""Every operation can be sent twice: it only reads, is repeatable, or has a key and is executed once."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.errors import FastnessError, IdempotencyKeyReused
from fastness.kv import Database, Subspace, Transaction
from fastness.layers.lock_records import session_key
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.idempotency import keyed_call_of
from fastness.plane.operations import OPERATIONS
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier, TierPolicy
from fastness.wire.activity import EndSession, ListLogs, LogRecords, ReadLog
from fastness.wire.agents import RegisterAgent
from fastness.wire.atomic import CommitAtomic
from fastness.wire.backups import BeginBackup, EndBackup, ListBackup, OpenBackup
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
from fastness.wire.health_checks import RunCheckups
from fastness.wire.hosting import (
    ClaimWorlds,
    CommitTurn,
    FailTurn,
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

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
KEYED = [kind for kind in OPERATIONS if kind.operation.takes_key]
REPEATABLE = [kind for kind in OPERATIONS if kind.operation.repeatable]


# Declarations.


def test_transactions_that_only_read_run_on_snapshots() -> None:
    for kind, handler in OPERATIONS.items():
        if handler.run is not None:
            assert handler.reads_only == kind.operation.reads, kind.__name__


def test_every_operation_reads_or_is_repeatable_or_takes_a_key() -> None:
    for kind, handler in OPERATIONS.items():
        assert not (kind.operation.reads and kind.operation.repeatable), kind.__name__
        if handler.run is not None:
            assert kind.operation.reads or kind.operation.takes_key, kind.__name__
        else:
            assert handler.takes_call == kind.operation.takes_key, kind.__name__


def test_the_protocol_lists_repeatable_operations_with_the_reason() -> None:
    rows = re.findall(r"^\| `([a-z._]+)` \| (.*) \|$", PROTOCOL.read_text(), re.MULTILINE)
    reasons = {kind.__struct_config__.tag: kind.operation.repeatable for kind in REPEATABLE}
    assert reasons.items() <= dict(rows).items()


GENESIS = hashlib.sha256(b"\xf6").hexdigest()  # The blob of the first snapshot of each world.

# A populated in which every operation has something to do.


@pytest.fixture(autouse=True)
def no_move_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no loop move messages between two looks at the data."""
    monkeypatch.setattr(Services, "_note_sqs_work", lambda _: None)


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
        for _ in range(2):
            call(PutMessages("died", [NewMessage(b"x") for _ in range(150)]))
            call(RejectMessages("died", self._leases("died", 150)))
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
        for name in ("ready", "stopped"):
            call(CreateWorld(name, program=name))
            call(PutItem(name, Control(command="go")))
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

    def _leases(self, queue: str, count: int) -> list[MessageLease]:
        received = self.transport.call(ReceiveMessages(queue, "ada", count)).messages
        return [MessageLease(each.id, each.lease_id, each.fence) for each in received]

    @staticmethod
    def _granted(granted: Any) -> tuple[str, str, int]:
        return granted.key, granted.lease_id, granted.fence


@pytest.fixture
def populated(database: Database, clock: ManualClock) -> Iterator[PopulatedPlane]:
    populated = PopulatedPlane(database, clock)
    yield populated
    populated.transport.close()


def of(effect: EffectInfo) -> tuple[str, int, int, int]:
    return effect.world, effect.height, effect.number, effect.fence


PAUSED, OPEN = QueuePolicy(paused=True), QueuePolicy()

# A request of each class, and an operation between its two sendings where a repetition would not show otherwise.
SAMPLES: dict[type[Request[Any]], Callable[[PopulatedPlane], list[Request[Any]]]] = {
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
    RedriveMessages: lambda _: [RedriveMessages("died", limit=270)],
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


def test_every_keyed_operation_is_tested() -> None:
    assert SAMPLES.keys() == set(KEYED)


def outcome(populated: PopulatedPlane, work: Callable[[], Any]) -> Any:
    try:
        answer = work()
    except FastnessError as error:
        answer = error.code
    return answer, populated.everything()


@pytest.mark.parametrize("kind", KEYED, ids=lambda kind: kind.__name__)
def test_a_repeated_write_is_executed_once(populated: PopulatedPlane, kind: type[Request[Any]]) -> None:
    request, *meanwhile = SAMPLES[kind](populated)
    assert type(request) is kind
    first = populated.send(request)
    populated.clock.advance_ms(1_000)
    for other in meanwhile:
        populated.transport.call(other)
    before = populated.everything()
    again = outcome(populated, lambda: populated.send(request))
    assert again == (first, before)
    with pytest.raises(IdempotencyKeyReused):
        populated.send(changed(request))
    assert populated.everything() == before
    # The test could fail: without its key it is done again, or refused, or answered differently.
    is_harmless = kind in (SeeReceipts, AckMessages, ReleaseEffects)
    assert is_harmless or outcome(populated, lambda: populated.transport.call(request)) != again


def changed(request: Request[Any]) -> Request[Any]:
    if isinstance(request, LogRecords):  # Remembered in memory, apart from all others.
        return LogRecords("s", [b'{"n":2}'])
    return PurgeQueue("jobs") if isinstance(request, CommitAtomic) else CommitAtomic([])


# Operations without keys.


def acquire_as_one_attempt(populated: PopulatedPlane) -> Any:
    """Acquire locks. A claim has a random name for the call that asked last, which is not compared here."""
    with patch("fastness.runtime.sync.shared_locks.token_hex", return_value="attempt"):
        return populated.transport.call(
            AcquireLocks(LockSession("another-secret-id"), "claim", [["entity_type", "note"]])
        )


def repeatable_requests(populated: PopulatedPlane) -> dict[type[Request[Any]], Callable[[], Any]]:
    call, claims = populated.transport.call, [("hosted", populated.claim.fence)]
    return {
        ClaimWorlds: lambda: call(ClaimWorlds(["ready"], "h1")),
        RenewWorlds: lambda: call(RenewWorlds(claims, "h1", 3_600.0)),
        ReleaseWorlds: lambda: call(ReleaseWorlds(claims, "h1")),
        PutBlob: lambda: call(PutBlob(b"bytes")),
        CollectGarbage: lambda: call(CollectGarbage()),
        EnableEncryption: lambda: call(EnableEncryption("main")),
        RotateKey: lambda: call(RotateKey("main")),
        RewriteValues: lambda: call(RewriteValues("main")),
        WriteBlob: lambda: populated.transport.send(WriteBlob(), iter([bytes(20_000)])),
        DeleteRun: lambda: call(DeleteRun("r-0")),
        DeleteWorld: lambda: call(DeleteWorld("old")),
        CompactWorld: lambda: call(CompactWorld("w", 1, 0)),
        EndSession: lambda: call(EndSession("s")),
        BeginBackup: lambda: call(BeginBackup()),
        EndBackup: lambda: call(EndBackup("0" * 32)),
        CancelMessage: lambda: call(CancelMessage("jobs", populated.waiting)),
        CancelMessages: lambda: call(CancelMessages("jobs", [populated.waiting, populated.leases[0].id])),
        ReadMail: lambda: call(ReadMail("bob")),
        Push: lambda: call(Push("bob", "t", "text/plain", b"x", "k", SYNCED)),
        PushMany: lambda: call(PushMany([PushItem("bob", "t", "text/plain", b"x", "k")], SYNCED)),
        AcquireLocks: lambda: acquire_as_one_attempt(populated),
        RaiseFormat: lambda: call(RaiseFormat()),
        SetQuota: lambda: call(SetQuota("main", Quota(messages=1_000))),
    }


@pytest.mark.parametrize("kind", REPEATABLE, ids=lambda kind: kind.__name__)
def test_a_repeatable_operation_leaves_the_same_data(populated: PopulatedPlane, kind: type[Request[Any]]) -> None:
    populated.transport.call(CommitSnapshot("w", b"\x01", 2))
    work = repeatable_requests(populated)[kind]
    first = outcome(populated, work)
    assert outcome(populated, work)[1] == first[1]
    assert outcome(populated, work)[0] == first[0] or kind in (
        ClaimWorlds,
        CompactWorld,
        BeginBackup,
        Push,
        PushMany,
    )  # They tell what they have done.


def test_services_that_read_write_nothing(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    database = MemoryDatabase(clock=clock)
    populated = PopulatedPlane(database, clock)
    hash = populated.transport.call(PutBlob(b"bytes")).hash
    reads: list[Request[Any]] = [
        GetBlob(hash),
        OpenBlob(hash),
        ReadJournal("w", 0),
        GetRun("r-1"),
        DescribeLease("held"),
        ReadLog(),
        ListLogs(),
        GetQueueStats("jobs"),
        GetMessage("jobs", populated.waiting),
        GetResult("answers", populated.answered),
        WaitForCancel("jobs", populated.leases, 0.0),
        WaitForRows("notes", [KnownRow("p", ("a",), 1)], 0.0),
        SurveyQueues(),
        SurveyQueues(text="job"),
        CheckWorld("w"),
        CheckRestore("w"),
        ListKinds(),
        ListWaits(),
        ShowLockStats(),
        ReadReceipts("ada"),
        ShowSpace(),
        ShowStorage(),
        ListNodes(),
        ShowEncryption(),
        WatchPushes(),
        ShowIngress(),
        GetUsage("main"),
    ]
    streams = {ListBackup, OpenBackup, RunCheckups}  # They read a copy, and have their own tests.
    assert {type(request) for request in reads} | streams == {
        kind for kind, handler in OPERATIONS.items() if kind.operation.reads and handler.run is None
    }
    before = populated.everything()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("it writes")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transact", refuse)
        for request in reads:
            found = (
                populated.transport.receive(request)
                if isinstance(request, OpenBlob)
                else populated.transport.call(request)
            )
            assert found is not None
    assert populated.everything() == before
    populated.transport.close()
