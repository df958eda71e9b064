"""A durable plane for fleets of agents: work queues, mail, locks, state and event-sourced history.

import holdfast

with holdfast.open("dir:./data") as plane:
    plane.queue("jobs").put({"n": 1})

This module exports the public API, with every type that a user annotates with. A name is imported when it is first
used, so that a client does not load the storage engine, and an embedded plane does not load the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from holdfast.opening import connect, connect_async, open, open_async  # noqa: A004 (the name that users know)
from holdfast.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.deprecations import HoldfastDeprecationWarning, deprecated
    from holdfast.encryption import AgentKey, SealBinding, Unsealed
    from holdfast.encryption_keys import CommandKeys, FileKeys, KeyProvider
    from holdfast.errors import HoldfastError, RetryAdvice
    from holdfast.handles.activity import AsyncActivity
    from holdfast.handles.agents import AsyncAgents
    from holdfast.handles.atomic import AsyncAtomic
    from holdfast.handles.audit import AsyncAudit
    from holdfast.handles.backups import AsyncBackups
    from holdfast.handles.blobs import AsyncBlobs
    from holdfast.handles.collections import AsyncCollection
    from holdfast.handles.effects import AsyncEffectClaim, AsyncEffects
    from holdfast.handles.encryption import AsyncEncryption
    from holdfast.handles.entities import AsyncEntities, AsyncTieredTransaction, Entity, EntityChange
    from holdfast.handles.hosting import AsyncHosting
    from holdfast.handles.ingress import AsyncIngress, AsyncPushListener, AsyncPushWatch
    from holdfast.handles.leases import AsyncLease, AsyncLeaseKey
    from holdfast.handles.locks import AsyncLocks
    from holdfast.handles.mailboxes import AsyncMailbox
    from holdfast.handles.messages import AsyncMessage
    from holdfast.handles.opening import Opening
    from holdfast.handles.pairs import AsyncPairs
    from holdfast.handles.plane import AsyncPlane
    from holdfast.handles.queues import AsyncQueue
    from holdfast.handles.quotas import AsyncQuotas
    from holdfast.handles.receipts import AsyncPutReceipt
    from holdfast.handles.runs import AsyncRun, AsyncWorkflows
    from holdfast.handles.states import AsyncState, Document
    from holdfast.handles.sync.activity import Activity
    from holdfast.handles.sync.agents import Agents
    from holdfast.handles.sync.atomic import Atomic
    from holdfast.handles.sync.audit import Audit
    from holdfast.handles.sync.backups import Backups
    from holdfast.handles.sync.blobs import Blobs
    from holdfast.handles.sync.collections import Collection
    from holdfast.handles.sync.effects import EffectClaim, Effects
    from holdfast.handles.sync.encryption import Encryption
    from holdfast.handles.sync.entities import Entities, TieredTransaction
    from holdfast.handles.sync.hosting import Hosting
    from holdfast.handles.sync.ingress import Ingress, PushListener, PushWatch
    from holdfast.handles.sync.leases import Lease, LeaseKey
    from holdfast.handles.sync.locks import Locks
    from holdfast.handles.sync.mailboxes import Mailbox
    from holdfast.handles.sync.messages import Message
    from holdfast.handles.sync.pairs import Pairs
    from holdfast.handles.sync.plane import Plane
    from holdfast.handles.sync.queues import Queue
    from holdfast.handles.sync.quotas import Quotas
    from holdfast.handles.sync.receipts import PutReceipt
    from holdfast.handles.sync.runs import Run, Workflows
    from holdfast.handles.sync.states import State
    from holdfast.handles.sync.timers import Timers
    from holdfast.handles.sync.tokens import Tokens
    from holdfast.handles.sync.within import Within
    from holdfast.handles.sync.worlds import Inbox, Snapshots, World
    from holdfast.handles.task_control import Reject, RetryLater, TaskDeferred
    from holdfast.handles.timers import AsyncTimers
    from holdfast.handles.tokens import AsyncTokens
    from holdfast.handles.within import AsyncWithin
    from holdfast.handles.workers import AsyncWorker, RestartPolicy, Worker, WorkerOutcome, WorkerStats
    from holdfast.handles.worlds import AsyncInbox, AsyncSnapshots, AsyncWorld, Reducer
    from holdfast.hosts.adapters import EffectCall
    from holdfast.hosts.apps import HostApp
    from holdfast.hosts.default_app import adapter, program, workflow
    from holdfast.hosts.host import AsyncHost, HostStats
    from holdfast.hosts.programs import Event, Program, TurnContext
    from holdfast.hosts.step_context import StepContext, current_step
    from holdfast.hosts.threads import Host
    from holdfast.hosts.workflows.retry import Retry
    from holdfast.hosts.workflows.run import WorkflowRun
    from holdfast.hosts.workflows.workflow import Workflow
    from holdfast.kv import Subspace, Transaction
    from holdfast.plane import fenced
    from holdfast.tasks.app import Task, TaskApp
    from holdfast.tasks.chains import Chain, Group, Signature, group
    from holdfast.tasks.default_app import task
    from holdfast.tasks.jobs import Job, current_job
    from holdfast.tasks.workers import TaskWorker
    from holdfast.tiers import Tier, TierPolicy
    from holdfast.wire.agents import Agent
    from holdfast.wire.audit import AuditEntry, AuditPage
    from holdfast.wire.collections import (
        ChangedRow,
        ChangedRows,
        DeleteRow,
        DeleteRows,
        KnownRow,
        PartitionPage,
        PutRow,
        Row,
        RowChange,
        RowKey,
        RowPage,
    )
    from holdfast.wire.effects import Attempted, EffectInfo, EffectPage
    from holdfast.wire.encryption import EncryptionStatus, Rewritten, UniverseEncryption
    from holdfast.wire.entities import EntityKind, Written
    from holdfast.wire.hosting import AsideItem, ClaimedWorld, HostingInfo, RenewedWorld, SendPolicy, TurnCommitted
    from holdfast.wire.inboxes import (
        Control,
        DomainEvent,
        Effect,
        EffectReceipt,
        InboundMessage,
        InboxItem,
        Timer,
        TimerFired,
    )
    from holdfast.wire.ingress import DataPush, IngressStats, NewDataPush, Pushed
    from holdfast.wire.locks import LockSessionInfo
    from holdfast.wire.mail import Envelope, MailboxSize, MailCount, MailPolicy, MailReceipt, NewMail, SentMail
    from holdfast.wire.nodes import NodeLoad, Nodes, NodeStatus
    from holdfast.wire.planes import PlaneParent, PlaneStatus
    from holdfast.wire.queues import (
        Delivery,
        Failure,
        FoundMessage,
        FoundMessages,
        KeyInfo,
        LeasedMessage,
        MessageEvent,
        MessageEvents,
        MessageInfo,
        MessageState,
        NewMessage,
        Outcome,
        QueuePolicy,
        QueueStats,
        Receipt,
        Schedule,
    )
    from holdfast.wire.quotas import Quota, Usage
    from holdfast.wire.restores import Entry, Restored, Verdict
    from holdfast.wire.run_timeline import TimelineEvent
    from holdfast.wire.runs import RunInfo, Runs
    from holdfast.wire.space import Collected, LastCollection, SpaceReport, SpaceUse, StandbyStatus, StorageStatus
    from holdfast.wire.states import UpdatedState
    from holdfast.wire.timers import TimerInfo, TimerPage
    from holdfast.wire.tokens import NewToken, TokenInfo
    from holdfast.wire.transport import AsyncHeldLock, HeldLock, LockStats
    from holdfast.wire.worlds import Record, Segment, Snapshot

__all__ = [
    "Activity",
    "Agent",
    "AgentKey",
    "Agents",
    "AsideItem",
    "AsyncActivity",
    "AsyncAgents",
    "AsyncAtomic",
    "AsyncAudit",
    "AsyncBackups",
    "AsyncBlobs",
    "AsyncEffectClaim",
    "AsyncEffects",
    "AsyncEncryption",
    "AsyncEntities",
    "AsyncHeldLock",
    "AsyncHost",
    "AsyncHosting",
    "AsyncInbox",
    "AsyncIngress",
    "AsyncLease",
    "AsyncLeaseKey",
    "AsyncLocks",
    "AsyncMailbox",
    "AsyncMessage",
    "AsyncPairs",
    "AsyncPlane",
    "AsyncPushListener",
    "AsyncPushWatch",
    "AsyncPutReceipt",
    "AsyncQueue",
    "AsyncQuotas",
    "AsyncRun",
    "AsyncSnapshots",
    "AsyncState",
    "AsyncTieredTransaction",
    "AsyncTimers",
    "AsyncTokens",
    "AsyncWithin",
    "AsyncWorker",
    "AsyncWorkflows",
    "AsyncWorld",
    "Atomic",
    "Audit",
    "AuditEntry",
    "AuditPage",
    "Attempted",
    "Backups",
    "Blobs",
    "Chain",
    "ClaimedWorld",
    "Clock",
    "Collected",
    "CommandKeys",
    "Control",
    "DataPush",
    "Delivery",
    "Document",
    "DomainEvent",
    "Effect",
    "EffectCall",
    "EffectClaim",
    "EffectInfo",
    "EffectPage",
    "EffectReceipt",
    "Effects",
    "Encryption",
    "EncryptionStatus",
    "Entities",
    "Entity",
    "EntityChange",
    "EntityKind",
    "Entry",
    "Envelope",
    "Event",
    "Failure",
    "FileKeys",
    "Group",
    "HeldLock",
    "HoldfastDeprecationWarning",
    "HoldfastError",
    "Host",
    "HostApp",
    "HostStats",
    "Hosting",
    "HostingInfo",
    "InboundMessage",
    "Inbox",
    "InboxItem",
    "Ingress",
    "IngressStats",
    "Job",
    "KeyInfo",
    "KeyProvider",
    "LastCollection",
    "Lease",
    "LeaseKey",
    "FoundMessage",
    "FoundMessages",
    "LeasedMessage",
    "LockSessionInfo",
    "LockStats",
    "Locks",
    "MailCount",
    "MailPolicy",
    "MailReceipt",
    "Mailbox",
    "MailboxSize",
    "Message",
    "MessageEvent",
    "MessageEvents",
    "MessageInfo",
    "NewDataPush",
    "NewMail",
    "NewMessage",
    "NewToken",
    "NodeLoad",
    "NodeStatus",
    "Nodes",
    "Opening",
    "Pairs",
    "Plane",
    "PlaneParent",
    "PlaneStatus",
    "Program",
    "PushListener",
    "PushWatch",
    "Pushed",
    "PutReceipt",
    "Queue",
    "MessageState",
    "Outcome",
    "QueuePolicy",
    "QueueStats",
    "Quota",
    "Quotas",
    "Receipt",
    "Record",
    "Reducer",
    "Reject",
    "RenewedWorld",
    "RestartPolicy",
    "Restored",
    "Retry",
    "RetryAdvice",
    "RetryLater",
    "Rewritten",
    "Run",
    "RunInfo",
    "Runs",
    "Schedule",
    "SealBinding",
    "Segment",
    "SendPolicy",
    "SentMail",
    "Signature",
    "Snapshot",
    "Snapshots",
    "SpaceReport",
    "SpaceUse",
    "State",
    "StandbyStatus",
    "StepContext",
    "StorageStatus",
    "Subspace",
    "Task",
    "TaskApp",
    "TaskDeferred",
    "TaskWorker",
    "Tier",
    "TierPolicy",
    "TieredTransaction",
    "TimelineEvent",
    "Timer",
    "TimerFired",
    "TimerInfo",
    "TimerPage",
    "Timers",
    "TokenInfo",
    "Tokens",
    "Transaction",
    "TurnCommitted",
    "TurnContext",
    "UniverseEncryption",
    "Unsealed",
    "UpdatedState",
    "Usage",
    "Verdict",
    "Within",
    "Worker",
    "WorkerOutcome",
    "WorkerStats",
    "Workflows",
    "Workflow",
    "WorkflowRun",
    "World",
    "Written",
    "adapter",
    "connect",
    "connect_async",
    "current_job",
    "current_step",
    "deprecated",
    "fenced",
    "group",
    "open",
    "open_async",
    "program",
    "task",
    "workflow",
    "AsyncCollection",
    "Collection",
    "ChangedRow",
    "ChangedRows",
    "DeleteRow",
    "DeleteRows",
    "KnownRow",
    "PartitionPage",
    "PutRow",
    "Row",
    "RowChange",
    "RowKey",
    "RowPage",
]

_MODULES: Final = {
    "Activity": "holdfast.handles.sync.activity",
    "Agent": "holdfast.wire.agents",
    "AgentKey": "holdfast.encryption",
    "Agents": "holdfast.handles.sync.agents",
    "AsideItem": "holdfast.wire.hosting",
    "AsyncActivity": "holdfast.handles.activity",
    "AsyncAgents": "holdfast.handles.agents",
    "AsyncAtomic": "holdfast.handles.atomic",
    "AsyncAudit": "holdfast.handles.audit",
    "AsyncBackups": "holdfast.handles.backups",
    "AsyncBlobs": "holdfast.handles.blobs",
    "AsyncCollection": "holdfast.handles.collections",
    "AsyncEffectClaim": "holdfast.handles.effects",
    "AsyncEffects": "holdfast.handles.effects",
    "AsyncEncryption": "holdfast.handles.encryption",
    "AsyncEntities": "holdfast.handles.entities",
    "AsyncHeldLock": "holdfast.wire.transport",
    "AsyncHost": "holdfast.hosts.host",
    "AsyncHosting": "holdfast.handles.hosting",
    "AsyncInbox": "holdfast.handles.worlds",
    "AsyncIngress": "holdfast.handles.ingress",
    "AsyncLease": "holdfast.handles.leases",
    "AsyncLeaseKey": "holdfast.handles.leases",
    "AsyncLocks": "holdfast.handles.locks",
    "AsyncMailbox": "holdfast.handles.mailboxes",
    "AsyncMessage": "holdfast.handles.messages",
    "AsyncPairs": "holdfast.handles.pairs",
    "AsyncPlane": "holdfast.handles.plane",
    "AsyncPushListener": "holdfast.handles.ingress",
    "AsyncPushWatch": "holdfast.handles.ingress",
    "AsyncPutReceipt": "holdfast.handles.receipts",
    "AsyncQueue": "holdfast.handles.queues",
    "AsyncQuotas": "holdfast.handles.quotas",
    "AsyncRun": "holdfast.handles.runs",
    "AsyncSnapshots": "holdfast.handles.worlds",
    "AsyncState": "holdfast.handles.states",
    "AsyncTieredTransaction": "holdfast.handles.entities",
    "AsyncTimers": "holdfast.handles.timers",
    "AsyncTokens": "holdfast.handles.tokens",
    "AsyncWithin": "holdfast.handles.within",
    "AsyncWorker": "holdfast.handles.workers",
    "AsyncWorkflows": "holdfast.handles.runs",
    "AsyncWorld": "holdfast.handles.worlds",
    "Atomic": "holdfast.handles.sync.atomic",
    "Audit": "holdfast.handles.sync.audit",
    "AuditEntry": "holdfast.wire.audit",
    "AuditPage": "holdfast.wire.audit",
    "Attempted": "holdfast.wire.effects",
    "Backups": "holdfast.handles.sync.backups",
    "Blobs": "holdfast.handles.sync.blobs",
    "ChangedRow": "holdfast.wire.collections",
    "ChangedRows": "holdfast.wire.collections",
    "Chain": "holdfast.tasks.chains",
    "ClaimedWorld": "holdfast.wire.hosting",
    "Clock": "holdfast.clock",
    "Collected": "holdfast.wire.space",
    "Collection": "holdfast.handles.sync.collections",
    "CommandKeys": "holdfast.encryption_keys",
    "Control": "holdfast.wire.inboxes",
    "DataPush": "holdfast.wire.ingress",
    "DeleteRow": "holdfast.wire.collections",
    "DeleteRows": "holdfast.wire.collections",
    "Delivery": "holdfast.wire.queues",
    "Document": "holdfast.handles.states",
    "DomainEvent": "holdfast.wire.inboxes",
    "Effect": "holdfast.wire.inboxes",
    "EffectCall": "holdfast.hosts.adapters",
    "EffectClaim": "holdfast.handles.sync.effects",
    "EffectInfo": "holdfast.wire.effects",
    "EffectPage": "holdfast.wire.effects",
    "EffectReceipt": "holdfast.wire.inboxes",
    "Effects": "holdfast.handles.sync.effects",
    "Encryption": "holdfast.handles.sync.encryption",
    "EncryptionStatus": "holdfast.wire.encryption",
    "Entities": "holdfast.handles.sync.entities",
    "Entity": "holdfast.handles.entities",
    "EntityChange": "holdfast.handles.entities",
    "EntityKind": "holdfast.wire.entities",
    "Entry": "holdfast.wire.restores",
    "Envelope": "holdfast.wire.mail",
    "Event": "holdfast.hosts.programs",
    "Failure": "holdfast.wire.queues",
    "FileKeys": "holdfast.encryption_keys",
    "Group": "holdfast.tasks.chains",
    "HeldLock": "holdfast.wire.transport",
    "HoldfastDeprecationWarning": "holdfast.deprecations",
    "HoldfastError": "holdfast.errors",
    "Host": "holdfast.hosts.threads",
    "HostApp": "holdfast.hosts.apps",
    "HostStats": "holdfast.hosts.host",
    "Hosting": "holdfast.handles.sync.hosting",
    "HostingInfo": "holdfast.wire.hosting",
    "InboundMessage": "holdfast.wire.inboxes",
    "Inbox": "holdfast.handles.sync.worlds",
    "InboxItem": "holdfast.wire.inboxes",
    "Ingress": "holdfast.handles.sync.ingress",
    "IngressStats": "holdfast.wire.ingress",
    "Job": "holdfast.tasks.jobs",
    "KeyInfo": "holdfast.wire.queues",
    "KnownRow": "holdfast.wire.collections",
    "KeyProvider": "holdfast.encryption_keys",
    "LastCollection": "holdfast.wire.space",
    "Lease": "holdfast.handles.sync.leases",
    "LeaseKey": "holdfast.handles.sync.leases",
    "FoundMessage": "holdfast.wire.queues",
    "FoundMessages": "holdfast.wire.queues",
    "LeasedMessage": "holdfast.wire.queues",
    "LockSessionInfo": "holdfast.wire.locks",
    "LockStats": "holdfast.wire.transport",
    "Locks": "holdfast.handles.sync.locks",
    "MailCount": "holdfast.wire.mail",
    "MailPolicy": "holdfast.wire.mail",
    "MailReceipt": "holdfast.wire.mail",
    "Mailbox": "holdfast.handles.sync.mailboxes",
    "MailboxSize": "holdfast.wire.mail",
    "Message": "holdfast.handles.sync.messages",
    "MessageEvent": "holdfast.wire.queues",
    "MessageEvents": "holdfast.wire.queues",
    "MessageInfo": "holdfast.wire.queues",
    "NewDataPush": "holdfast.wire.ingress",
    "NewMail": "holdfast.wire.mail",
    "NewMessage": "holdfast.wire.queues",
    "NewToken": "holdfast.wire.tokens",
    "NodeLoad": "holdfast.wire.nodes",
    "NodeStatus": "holdfast.wire.nodes",
    "Nodes": "holdfast.wire.nodes",
    "Opening": "holdfast.handles.opening",
    "Pairs": "holdfast.handles.sync.pairs",
    "PartitionPage": "holdfast.wire.collections",
    "Plane": "holdfast.handles.sync.plane",
    "PlaneParent": "holdfast.wire.planes",
    "PlaneStatus": "holdfast.wire.planes",
    "Program": "holdfast.hosts.programs",
    "PushListener": "holdfast.handles.sync.ingress",
    "PushWatch": "holdfast.handles.sync.ingress",
    "Pushed": "holdfast.wire.ingress",
    "PutReceipt": "holdfast.handles.sync.receipts",
    "PutRow": "holdfast.wire.collections",
    "Queue": "holdfast.handles.sync.queues",
    "MessageState": "holdfast.wire.queues",
    "Outcome": "holdfast.wire.queues",
    "QueuePolicy": "holdfast.wire.queues",
    "QueueStats": "holdfast.wire.queues",
    "Quota": "holdfast.wire.quotas",
    "Quotas": "holdfast.handles.sync.quotas",
    "Receipt": "holdfast.wire.queues",
    "Record": "holdfast.wire.worlds",
    "Reducer": "holdfast.handles.worlds",
    "Reject": "holdfast.handles.task_control",
    "RenewedWorld": "holdfast.wire.hosting",
    "RestartPolicy": "holdfast.handles.workers",
    "Restored": "holdfast.wire.restores",
    "Retry": "holdfast.hosts.workflows.retry",
    "RetryAdvice": "holdfast.errors",
    "RetryLater": "holdfast.handles.task_control",
    "Rewritten": "holdfast.wire.encryption",
    "Row": "holdfast.wire.collections",
    "RowChange": "holdfast.wire.collections",
    "RowKey": "holdfast.wire.collections",
    "RowPage": "holdfast.wire.collections",
    "Run": "holdfast.handles.sync.runs",
    "RunInfo": "holdfast.wire.runs",
    "Runs": "holdfast.wire.runs",
    "Schedule": "holdfast.wire.queues",
    "SealBinding": "holdfast.encryption",
    "Segment": "holdfast.wire.worlds",
    "SendPolicy": "holdfast.wire.hosting",
    "SentMail": "holdfast.wire.mail",
    "Signature": "holdfast.tasks.chains",
    "Snapshot": "holdfast.wire.worlds",
    "Snapshots": "holdfast.handles.sync.worlds",
    "SpaceReport": "holdfast.wire.space",
    "SpaceUse": "holdfast.wire.space",
    "StandbyStatus": "holdfast.wire.space",
    "State": "holdfast.handles.sync.states",
    "StepContext": "holdfast.hosts.step_context",
    "StorageStatus": "holdfast.wire.space",
    "Subspace": "holdfast.kv",
    "Task": "holdfast.tasks.app",
    "TaskApp": "holdfast.tasks.app",
    "TaskDeferred": "holdfast.handles.task_control",
    "TaskWorker": "holdfast.tasks.workers",
    "Tier": "holdfast.tiers",
    "TierPolicy": "holdfast.tiers",
    "TieredTransaction": "holdfast.handles.sync.entities",
    "TimelineEvent": "holdfast.wire.run_timeline",
    "Timer": "holdfast.wire.inboxes",
    "TimerFired": "holdfast.wire.inboxes",
    "TimerInfo": "holdfast.wire.timers",
    "TimerPage": "holdfast.wire.timers",
    "Timers": "holdfast.handles.sync.timers",
    "TokenInfo": "holdfast.wire.tokens",
    "Tokens": "holdfast.handles.sync.tokens",
    "Transaction": "holdfast.kv",
    "TurnCommitted": "holdfast.wire.hosting",
    "TurnContext": "holdfast.hosts.programs",
    "UniverseEncryption": "holdfast.wire.encryption",
    "Unsealed": "holdfast.encryption",
    "UpdatedState": "holdfast.wire.states",
    "Usage": "holdfast.wire.quotas",
    "Verdict": "holdfast.wire.restores",
    "Within": "holdfast.handles.sync.within",
    "Worker": "holdfast.handles.workers",
    "WorkerOutcome": "holdfast.handles.workers",
    "WorkerStats": "holdfast.handles.workers",
    "Workflow": "holdfast.hosts.workflows.workflow",
    "WorkflowRun": "holdfast.hosts.workflows.run",
    "Workflows": "holdfast.handles.sync.runs",
    "World": "holdfast.handles.sync.worlds",
    "Written": "holdfast.wire.entities",
    "adapter": "holdfast.hosts.default_app",
    "current_job": "holdfast.tasks.jobs",
    "current_step": "holdfast.hosts.step_context",
    "deprecated": "holdfast.deprecations",
    "fenced": "holdfast.plane",
    "group": "holdfast.tasks.chains",
    "program": "holdfast.hosts.default_app",
    "task": "holdfast.tasks.default_app",
    "workflow": "holdfast.hosts.default_app",
}


def __getattr__(name: str) -> object:
    """Import an exported name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
