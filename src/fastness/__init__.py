"""A durable plane for fleets of agents: work queues, mail, locks, state and event-sourced history.

import fastness

with fastness.open("dir:./data") as plane:
    plane.queue("jobs").put({"n": 1})

This module exports the public API, with every type that a user annotates with. A name is imported when it is first
used, so that a client does not load the storage engine, and an embedded plane does not load the client.
"""

# ruff: noqa: I001 (isort would put each `X as X` of a module on a line of its own)

from importlib import import_module
from typing import TYPE_CHECKING, Final

from fastness.version import __version__ as __version__

if TYPE_CHECKING:  # `X as X` exports a name for type checkers, and `_EXPORTS` when it is used.
    from fastness.clock import Clock as Clock
    from fastness.encryption import AgentKey as AgentKey, SealBinding as SealBinding, Unsealed as Unsealed
    from fastness.encryption_keys import CommandKeys as CommandKeys, FileKeys as FileKeys, KeyProvider as KeyProvider
    from fastness.errors import FastnessError as FastnessError, RetryAdvice as RetryAdvice
    from fastness.handles.activity import AsyncActivity as AsyncActivity
    from fastness.handles.agents import AsyncAgents as AsyncAgents
    from fastness.handles.atomic import AsyncAtomic as AsyncAtomic
    from fastness.handles.audit import AsyncAudit as AsyncAudit
    from fastness.handles.backups import AsyncBackups as AsyncBackups
    from fastness.handles.blobs import AsyncBlobs as AsyncBlobs
    from fastness.handles.collections import AsyncCollection as AsyncCollection
    from fastness.handles.effects import AsyncEffectClaim as AsyncEffectClaim, AsyncEffects as AsyncEffects
    from fastness.handles.encryption import AsyncEncryption as AsyncEncryption
    from fastness.handles.entities import (
        AsyncEntities as AsyncEntities,
        AsyncTieredTransaction as AsyncTieredTransaction,
        Entity as Entity,
        EntityChange as EntityChange,
    )
    from fastness.handles.hosting import AsyncHosting as AsyncHosting
    from fastness.handles.ingress import (
        AsyncIngress as AsyncIngress,
        AsyncPushListener as AsyncPushListener,
        AsyncPushWatch as AsyncPushWatch,
    )
    from fastness.handles.leases import AsyncLease as AsyncLease, AsyncLeaseKey as AsyncLeaseKey
    from fastness.handles.locks import AsyncLocks as AsyncLocks
    from fastness.handles.mailboxes import AsyncMailbox as AsyncMailbox
    from fastness.handles.messages import AsyncMessage as AsyncMessage
    from fastness.handles.opening import Opening as Opening
    from fastness.handles.pairs import AsyncPairs as AsyncPairs
    from fastness.handles.plane import AsyncPlane as AsyncPlane
    from fastness.handles.queues import AsyncQueue as AsyncQueue
    from fastness.handles.quotas import AsyncQuotas as AsyncQuotas
    from fastness.handles.receipts import AsyncPutReceipt as AsyncPutReceipt
    from fastness.handles.runs import AsyncRun as AsyncRun, AsyncWorkflows as AsyncWorkflows
    from fastness.handles.states import AsyncState as AsyncState, Document as Document
    from fastness.handles.sync.activity import Activity as Activity
    from fastness.handles.sync.agents import Agents as Agents
    from fastness.handles.sync.atomic import Atomic as Atomic
    from fastness.handles.sync.audit import Audit as Audit
    from fastness.handles.sync.backups import Backups as Backups
    from fastness.handles.sync.blobs import Blobs as Blobs
    from fastness.handles.sync.collections import Collection as Collection
    from fastness.handles.sync.effects import EffectClaim as EffectClaim, Effects as Effects
    from fastness.handles.sync.encryption import Encryption as Encryption
    from fastness.handles.sync.entities import Entities as Entities, TieredTransaction as TieredTransaction
    from fastness.handles.sync.hosting import Hosting as Hosting
    from fastness.handles.sync.ingress import Ingress as Ingress, PushListener as PushListener, PushWatch as PushWatch
    from fastness.handles.sync.leases import Lease as Lease, LeaseKey as LeaseKey
    from fastness.handles.sync.locks import Locks as Locks
    from fastness.handles.sync.mailboxes import Mailbox as Mailbox
    from fastness.handles.sync.messages import Message as Message
    from fastness.handles.sync.pairs import Pairs as Pairs
    from fastness.handles.sync.plane import Plane as Plane
    from fastness.handles.sync.queues import Queue as Queue
    from fastness.handles.sync.quotas import Quotas as Quotas
    from fastness.handles.sync.receipts import PutReceipt as PutReceipt
    from fastness.handles.sync.runs import Run as Run, Workflows as Workflows
    from fastness.handles.sync.states import State as State
    from fastness.handles.sync.timers import Timers as Timers
    from fastness.handles.sync.tokens import Tokens as Tokens
    from fastness.handles.sync.within import Within as Within
    from fastness.handles.sync.worlds import Inbox as Inbox, Snapshots as Snapshots, World as World
    from fastness.handles.task_control import Reject as Reject, RetryLater as RetryLater, TaskDeferred as TaskDeferred
    from fastness.handles.timers import AsyncTimers as AsyncTimers
    from fastness.handles.tokens import AsyncTokens as AsyncTokens
    from fastness.handles.within import AsyncWithin as AsyncWithin
    from fastness.handles.workers import (
        AsyncWorker as AsyncWorker,
        RestartPolicy as RestartPolicy,
        Worker as Worker,
        WorkerOutcome as WorkerOutcome,
        WorkerStats as WorkerStats,
    )
    from fastness.handles.worlds import (
        AsyncInbox as AsyncInbox,
        AsyncSnapshots as AsyncSnapshots,
        AsyncWorld as AsyncWorld,
        Reducer as Reducer,
    )
    from fastness.hosts.adapters import EffectCall as EffectCall
    from fastness.hosts.apps import HostApp as HostApp, adapter as adapter, program as program, workflow as workflow
    from fastness.hosts.host import AsyncHost as AsyncHost, HostStats as HostStats
    from fastness.hosts.programs import Event as Event, Program as Program, TurnContext as TurnContext
    from fastness.hosts.step_context import StepContext as StepContext, current_step as current_step
    from fastness.hosts.threads import Host as Host
    from fastness.hosts.workflows.retry import Retry as Retry
    from fastness.hosts.workflows.run import WorkflowRun as WorkflowRun
    from fastness.hosts.workflows.workflow import Workflow as Workflow
    from fastness.kv import Subspace as Subspace, Transaction as Transaction
    from fastness.opening import (
        connect as connect,
        connect_async as connect_async,
        open as open,  # noqa: A004 (the name that users know)
        open_async as open_async,
    )
    from fastness.plane import fenced as fenced
    from fastness.tasks.app import Task as Task, TaskApp as TaskApp, task as task
    from fastness.tasks.chains import Chain as Chain, Group as Group, Signature as Signature, group as group
    from fastness.tasks.jobs import Job as Job, current_job as current_job
    from fastness.tasks.workers import TaskWorker as TaskWorker
    from fastness.tiers import Tier as Tier, TierPolicy as TierPolicy
    from fastness.wire.agents import Agent as Agent
    from fastness.wire.audit import AuditEntry as AuditEntry, AuditPage as AuditPage
    from fastness.wire.collections import (
        ChangedRow as ChangedRow,
        ChangedRows as ChangedRows,
        DeleteRow as DeleteRow,
        DeleteRows as DeleteRows,
        KnownRow as KnownRow,
        PartitionPage as PartitionPage,
        PutRow as PutRow,
        Row as Row,
        RowChange as RowChange,
        RowKey as RowKey,
        RowPage as RowPage,
    )
    from fastness.wire.effects import Attempted as Attempted, EffectInfo as EffectInfo, EffectPage as EffectPage
    from fastness.wire.encryption import (
        EncryptionStatus as EncryptionStatus,
        Rewritten as Rewritten,
        UniverseEncryption as UniverseEncryption,
    )
    from fastness.wire.entities import EntityKind as EntityKind, Written as Written
    from fastness.wire.hosting import (
        AsideItem as AsideItem,
        ClaimedWorld as ClaimedWorld,
        HostingInfo as HostingInfo,
        RenewedWorld as RenewedWorld,
        SendPolicy as SendPolicy,
        TurnCommitted as TurnCommitted,
    )
    from fastness.wire.inboxes import (
        Control as Control,
        DomainEvent as DomainEvent,
        Effect as Effect,
        EffectReceipt as EffectReceipt,
        InboundMessage as InboundMessage,
        InboxItem as InboxItem,
        Timer as Timer,
        TimerFired as TimerFired,
    )
    from fastness.wire.ingress import (
        DataPush as DataPush,
        IngressStats as IngressStats,
        NewDataPush as NewDataPush,
        Pushed as Pushed,
    )
    from fastness.wire.locks import LockSessionInfo as LockSessionInfo
    from fastness.wire.mail import (
        Envelope as Envelope,
        MailCount as MailCount,
        MailPolicy as MailPolicy,
        MailReceipt as MailReceipt,
        MailboxSize as MailboxSize,
        NewMail as NewMail,
        SentMail as SentMail,
    )
    from fastness.wire.nodes import NodeLoad as NodeLoad, NodeStatus as NodeStatus, Nodes as Nodes
    from fastness.wire.planes import PlaneParent as PlaneParent, PlaneStatus as PlaneStatus
    from fastness.wire.queues import (
        Delivery as Delivery,
        Failure as Failure,
        FoundMessage as FoundMessage,
        FoundMessages as FoundMessages,
        KeyInfo as KeyInfo,
        LeasedMessage as LeasedMessage,
        MessageEvent as MessageEvent,
        MessageEvents as MessageEvents,
        MessageInfo as MessageInfo,
        MessageState as MessageState,
        NewMessage as NewMessage,
        Outcome as Outcome,
        QueuePolicy as QueuePolicy,
        QueueStats as QueueStats,
        Receipt as Receipt,
        Schedule as Schedule,
    )
    from fastness.wire.quotas import Quota as Quota, Usage as Usage
    from fastness.wire.restores import Entry as Entry, Restored as Restored, Verdict as Verdict
    from fastness.wire.run_timeline import TimelineEvent as TimelineEvent
    from fastness.wire.runs import RunInfo as RunInfo, Runs as Runs
    from fastness.wire.space import (
        Collected as Collected,
        LastCollection as LastCollection,
        SpaceReport as SpaceReport,
        SpaceUse as SpaceUse,
        StandbyStatus as StandbyStatus,
        StorageStatus as StorageStatus,
    )
    from fastness.wire.states import UpdatedState as UpdatedState
    from fastness.wire.timers import TimerInfo as TimerInfo, TimerPage as TimerPage
    from fastness.wire.tokens import NewToken as NewToken, TokenInfo as TokenInfo
    from fastness.wire.transport import AsyncHeldLock as AsyncHeldLock, HeldLock as HeldLock, LockStats as LockStats
    from fastness.wire.worlds import Record as Record, Segment as Segment, Snapshot as Snapshot

# The names of each module: what `import *` and `dir` list, and what is imported when it is first used. Those that are
# generated from an asynchronous handle are not repeated here.
_EXPORTS: Final = {
    "clock": "Clock",
    "encryption": "AgentKey SealBinding Unsealed",
    "encryption_keys": "CommandKeys FileKeys KeyProvider",
    "errors": "FastnessError RetryAdvice",
    "handles.activity": "AsyncActivity",
    "handles.agents": "AsyncAgents",
    "handles.atomic": "AsyncAtomic",
    "handles.audit": "AsyncAudit",
    "handles.backups": "AsyncBackups",
    "handles.blobs": "AsyncBlobs",
    "handles.collections": "AsyncCollection",
    "handles.effects": "AsyncEffectClaim AsyncEffects",
    "handles.encryption": "AsyncEncryption",
    "handles.entities": "AsyncEntities AsyncTieredTransaction Entity EntityChange",
    "handles.hosting": "AsyncHosting",
    "handles.ingress": "AsyncIngress AsyncPushListener AsyncPushWatch",
    "handles.leases": "AsyncLease AsyncLeaseKey",
    "handles.locks": "AsyncLocks",
    "handles.mailboxes": "AsyncMailbox",
    "handles.messages": "AsyncMessage",
    "handles.opening": "Opening",
    "handles.pairs": "AsyncPairs",
    "handles.plane": "AsyncPlane",
    "handles.queues": "AsyncQueue",
    "handles.quotas": "AsyncQuotas",
    "handles.receipts": "AsyncPutReceipt",
    "handles.runs": "AsyncRun AsyncWorkflows",
    "handles.states": "AsyncState Document",
    "handles.task_control": "Reject RetryLater TaskDeferred",
    "handles.timers": "AsyncTimers",
    "handles.tokens": "AsyncTokens",
    "handles.within": "AsyncWithin",
    "handles.workers": "AsyncWorker RestartPolicy Worker WorkerOutcome WorkerStats",
    "handles.worlds": "AsyncInbox AsyncSnapshots AsyncWorld Reducer",
    "hosts.adapters": "EffectCall",
    "hosts.apps": "HostApp adapter program workflow",
    "hosts.host": "AsyncHost HostStats",
    "hosts.programs": "Event Program TurnContext",
    "hosts.step_context": "StepContext current_step",
    "hosts.threads": "Host",
    "hosts.workflows.retry": "Retry",
    "hosts.workflows.run": "WorkflowRun",
    "hosts.workflows.workflow": "Workflow",
    "kv": "Subspace Transaction",
    "opening": "connect connect_async open open_async",
    "plane": "fenced",
    "tasks.app": "Task TaskApp task",
    "tasks.chains": "Chain Group Signature group",
    "tasks.jobs": "Job current_job",
    "tasks.workers": "TaskWorker",
    "tiers": "Tier TierPolicy",
    "wire.agents": "Agent",
    "wire.audit": "AuditEntry AuditPage",
    "wire.collections": "ChangedRow ChangedRows DeleteRow DeleteRows KnownRow PartitionPage PutRow Row RowChange "
    "RowKey RowPage",
    "wire.effects": "Attempted EffectInfo EffectPage",
    "wire.encryption": "EncryptionStatus Rewritten UniverseEncryption",
    "wire.entities": "EntityKind Written",
    "wire.hosting": "AsideItem ClaimedWorld HostingInfo RenewedWorld SendPolicy TurnCommitted",
    "wire.inboxes": "Control DomainEvent Effect EffectReceipt InboundMessage InboxItem Timer TimerFired",
    "wire.ingress": "DataPush IngressStats NewDataPush Pushed",
    "wire.locks": "LockSessionInfo",
    "wire.mail": "Envelope MailCount MailPolicy MailReceipt MailboxSize NewMail SentMail",
    "wire.nodes": "NodeLoad NodeStatus Nodes",
    "wire.planes": "PlaneParent PlaneStatus",
    "wire.queues": "Delivery Failure FoundMessage FoundMessages KeyInfo LeasedMessage MessageEvent MessageEvents "
    "MessageInfo MessageState NewMessage Outcome QueuePolicy QueueStats Receipt Schedule",
    "wire.quotas": "Quota Usage",
    "wire.restores": "Entry Restored Verdict",
    "wire.run_timeline": "TimelineEvent",
    "wire.runs": "RunInfo Runs",
    "wire.space": "Collected LastCollection SpaceReport SpaceUse StandbyStatus StorageStatus",
    "wire.states": "UpdatedState",
    "wire.timers": "TimerInfo TimerPage",
    "wire.tokens": "NewToken TokenInfo",
    "wire.transport": "AsyncHeldLock HeldLock LockStats",
    "wire.worlds": "Record Segment Snapshot",
}
_MODULES: Final = {name: f"fastness.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_MODULES.update(
    (name.removeprefix("Async"), module.replace("handles", "handles.sync"))
    for name, module in list(_MODULES.items())
    if name.startswith("Async") and ".handles." in module and name.removeprefix("Async") not in _MODULES
)
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import an exported name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
