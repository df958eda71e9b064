"""A durable plane for fleets of agents: work queues, mail, locks, state and event-sourced history.

import fastness

with fastness.open("dir:./data") as plane:
    plane.queue("jobs").put({"n": 1})

This module exports the public API, with every type that a user annotates with. A name is imported when it is first
used, so that a client does not load the storage engine, and an embedded plane does not load the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from fastness.version import __version__ as __version__

if TYPE_CHECKING:
    from fastness.clock import Clock
    from fastness.encryption import AgentKey, SealBinding, Unsealed
    from fastness.encryption_keys import CommandKeys, FileKeys, KeyProvider
    from fastness.errors import FastnessError, RetryAdvice
    from fastness.handles.activity import AsyncActivity
    from fastness.handles.agents import AsyncAgents
    from fastness.handles.atomic import AsyncAtomic
    from fastness.handles.audit import AsyncAudit
    from fastness.handles.backups import AsyncBackups
    from fastness.handles.blobs import AsyncBlobs
    from fastness.handles.collections import AsyncCollection
    from fastness.handles.effects import AsyncEffectClaim, AsyncEffects
    from fastness.handles.encryption import AsyncEncryption
    from fastness.handles.entities import AsyncEntities, AsyncTieredTransaction, Entity, EntityChange
    from fastness.handles.hosting import AsyncHosting
    from fastness.handles.ingress import AsyncIngress, AsyncPushListener, AsyncPushWatch
    from fastness.handles.leases import AsyncLease, AsyncLeaseKey
    from fastness.handles.locks import AsyncLocks
    from fastness.handles.mailboxes import AsyncMailbox
    from fastness.handles.messages import AsyncMessage
    from fastness.handles.opening import Opening
    from fastness.handles.pairs import AsyncPairs
    from fastness.handles.plane import AsyncPlane
    from fastness.handles.queues import AsyncQueue
    from fastness.handles.quotas import AsyncQuotas
    from fastness.handles.receipts import AsyncPutReceipt
    from fastness.handles.runs import AsyncRun, AsyncWorkflows
    from fastness.handles.states import AsyncState, Document
    from fastness.handles.sync.activity import Activity
    from fastness.handles.sync.agents import Agents
    from fastness.handles.sync.atomic import Atomic
    from fastness.handles.sync.audit import Audit
    from fastness.handles.sync.backups import Backups
    from fastness.handles.sync.blobs import Blobs
    from fastness.handles.sync.collections import Collection
    from fastness.handles.sync.effects import EffectClaim, Effects
    from fastness.handles.sync.encryption import Encryption
    from fastness.handles.sync.entities import Entities, TieredTransaction
    from fastness.handles.sync.hosting import Hosting
    from fastness.handles.sync.ingress import Ingress, PushListener, PushWatch
    from fastness.handles.sync.leases import Lease, LeaseKey
    from fastness.handles.sync.locks import Locks
    from fastness.handles.sync.mailboxes import Mailbox
    from fastness.handles.sync.messages import Message
    from fastness.handles.sync.pairs import Pairs
    from fastness.handles.sync.plane import Plane
    from fastness.handles.sync.queues import Queue
    from fastness.handles.sync.quotas import Quotas
    from fastness.handles.sync.receipts import PutReceipt
    from fastness.handles.sync.runs import Run, Workflows
    from fastness.handles.sync.states import State
    from fastness.handles.sync.timers import Timers
    from fastness.handles.sync.tokens import Tokens
    from fastness.handles.sync.within import Within
    from fastness.handles.sync.worlds import Inbox, Snapshots, World
    from fastness.handles.task_control import Reject, RetryLater, TaskDeferred
    from fastness.handles.timers import AsyncTimers
    from fastness.handles.tokens import AsyncTokens
    from fastness.handles.within import AsyncWithin
    from fastness.handles.workers import AsyncWorker, RestartPolicy, Worker, WorkerOutcome, WorkerStats
    from fastness.handles.worlds import AsyncInbox, AsyncSnapshots, AsyncWorld, Reducer
    from fastness.hosts.adapters import EffectCall
    from fastness.hosts.apps import HostApp
    from fastness.hosts.default_app import adapter, program, workflow
    from fastness.hosts.host import AsyncHost, HostStats
    from fastness.hosts.programs import Event, Program, TurnContext
    from fastness.hosts.step_context import StepContext, current_step
    from fastness.hosts.threads import Host
    from fastness.hosts.workflows.retry import Retry
    from fastness.hosts.workflows.run import WorkflowRun
    from fastness.hosts.workflows.workflow import Workflow
    from fastness.kv import Subspace, Transaction
    from fastness.opening import connect, connect_async, open, open_async  # noqa: A004 (the name that users know)
    from fastness.plane import fenced
    from fastness.tasks.app import Task, TaskApp
    from fastness.tasks.chains import Chain, Group, Signature, group
    from fastness.tasks.default_app import task
    from fastness.tasks.jobs import Job, current_job
    from fastness.tasks.workers import TaskWorker
    from fastness.tiers import Tier, TierPolicy
    from fastness.wire.agents import Agent
    from fastness.wire.audit import AuditEntry, AuditPage
    from fastness.wire.collections import (
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
    from fastness.wire.effects import Attempted, EffectInfo, EffectPage
    from fastness.wire.encryption import EncryptionStatus, Rewritten, UniverseEncryption
    from fastness.wire.entities import EntityKind, Written
    from fastness.wire.hosting import AsideItem, ClaimedWorld, HostingInfo, RenewedWorld, SendPolicy, TurnCommitted
    from fastness.wire.inboxes import (
        Control,
        DomainEvent,
        Effect,
        EffectReceipt,
        InboundMessage,
        InboxItem,
        Timer,
        TimerFired,
    )
    from fastness.wire.ingress import DataPush, IngressStats, NewDataPush, Pushed
    from fastness.wire.locks import LockSessionInfo
    from fastness.wire.mail import Envelope, MailboxSize, MailCount, MailPolicy, MailReceipt, NewMail, SentMail
    from fastness.wire.nodes import NodeLoad, Nodes, NodeStatus
    from fastness.wire.planes import PlaneParent, PlaneStatus
    from fastness.wire.queues import (
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
    from fastness.wire.quotas import Quota, Usage
    from fastness.wire.restores import Entry, Restored, Verdict
    from fastness.wire.run_timeline import TimelineEvent
    from fastness.wire.runs import RunInfo, Runs
    from fastness.wire.space import Collected, LastCollection, SpaceReport, SpaceUse, StandbyStatus, StorageStatus
    from fastness.wire.states import UpdatedState
    from fastness.wire.timers import TimerInfo, TimerPage
    from fastness.wire.tokens import NewToken, TokenInfo
    from fastness.wire.transport import AsyncHeldLock, HeldLock, LockStats
    from fastness.wire.worlds import Record, Segment, Snapshot

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
    "FastnessError",
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
    "Activity": "fastness.handles.sync.activity",
    "Agent": "fastness.wire.agents",
    "AgentKey": "fastness.encryption",
    "Agents": "fastness.handles.sync.agents",
    "AsideItem": "fastness.wire.hosting",
    "AsyncActivity": "fastness.handles.activity",
    "AsyncAgents": "fastness.handles.agents",
    "AsyncAtomic": "fastness.handles.atomic",
    "AsyncAudit": "fastness.handles.audit",
    "AsyncBackups": "fastness.handles.backups",
    "AsyncBlobs": "fastness.handles.blobs",
    "AsyncCollection": "fastness.handles.collections",
    "AsyncEffectClaim": "fastness.handles.effects",
    "AsyncEffects": "fastness.handles.effects",
    "AsyncEncryption": "fastness.handles.encryption",
    "AsyncEntities": "fastness.handles.entities",
    "AsyncHeldLock": "fastness.wire.transport",
    "AsyncHost": "fastness.hosts.host",
    "AsyncHosting": "fastness.handles.hosting",
    "AsyncInbox": "fastness.handles.worlds",
    "AsyncIngress": "fastness.handles.ingress",
    "AsyncLease": "fastness.handles.leases",
    "AsyncLeaseKey": "fastness.handles.leases",
    "AsyncLocks": "fastness.handles.locks",
    "AsyncMailbox": "fastness.handles.mailboxes",
    "AsyncMessage": "fastness.handles.messages",
    "AsyncPairs": "fastness.handles.pairs",
    "AsyncPlane": "fastness.handles.plane",
    "AsyncPushListener": "fastness.handles.ingress",
    "AsyncPushWatch": "fastness.handles.ingress",
    "AsyncPutReceipt": "fastness.handles.receipts",
    "AsyncQueue": "fastness.handles.queues",
    "AsyncQuotas": "fastness.handles.quotas",
    "AsyncRun": "fastness.handles.runs",
    "AsyncSnapshots": "fastness.handles.worlds",
    "AsyncState": "fastness.handles.states",
    "AsyncTieredTransaction": "fastness.handles.entities",
    "AsyncTimers": "fastness.handles.timers",
    "AsyncTokens": "fastness.handles.tokens",
    "AsyncWithin": "fastness.handles.within",
    "AsyncWorker": "fastness.handles.workers",
    "AsyncWorkflows": "fastness.handles.runs",
    "AsyncWorld": "fastness.handles.worlds",
    "Atomic": "fastness.handles.sync.atomic",
    "Audit": "fastness.handles.sync.audit",
    "AuditEntry": "fastness.wire.audit",
    "AuditPage": "fastness.wire.audit",
    "Attempted": "fastness.wire.effects",
    "Backups": "fastness.handles.sync.backups",
    "Blobs": "fastness.handles.sync.blobs",
    "ChangedRow": "fastness.wire.collections",
    "ChangedRows": "fastness.wire.collections",
    "Chain": "fastness.tasks.chains",
    "ClaimedWorld": "fastness.wire.hosting",
    "Clock": "fastness.clock",
    "Collected": "fastness.wire.space",
    "Collection": "fastness.handles.sync.collections",
    "CommandKeys": "fastness.encryption_keys",
    "Control": "fastness.wire.inboxes",
    "DataPush": "fastness.wire.ingress",
    "DeleteRow": "fastness.wire.collections",
    "DeleteRows": "fastness.wire.collections",
    "Delivery": "fastness.wire.queues",
    "Document": "fastness.handles.states",
    "DomainEvent": "fastness.wire.inboxes",
    "Effect": "fastness.wire.inboxes",
    "EffectCall": "fastness.hosts.adapters",
    "EffectClaim": "fastness.handles.sync.effects",
    "EffectInfo": "fastness.wire.effects",
    "EffectPage": "fastness.wire.effects",
    "EffectReceipt": "fastness.wire.inboxes",
    "Effects": "fastness.handles.sync.effects",
    "Encryption": "fastness.handles.sync.encryption",
    "EncryptionStatus": "fastness.wire.encryption",
    "Entities": "fastness.handles.sync.entities",
    "Entity": "fastness.handles.entities",
    "EntityChange": "fastness.handles.entities",
    "EntityKind": "fastness.wire.entities",
    "Entry": "fastness.wire.restores",
    "Envelope": "fastness.wire.mail",
    "Event": "fastness.hosts.programs",
    "Failure": "fastness.wire.queues",
    "FileKeys": "fastness.encryption_keys",
    "Group": "fastness.tasks.chains",
    "HeldLock": "fastness.wire.transport",
    "FastnessError": "fastness.errors",
    "Host": "fastness.hosts.threads",
    "HostApp": "fastness.hosts.apps",
    "HostStats": "fastness.hosts.host",
    "Hosting": "fastness.handles.sync.hosting",
    "HostingInfo": "fastness.wire.hosting",
    "InboundMessage": "fastness.wire.inboxes",
    "Inbox": "fastness.handles.sync.worlds",
    "InboxItem": "fastness.wire.inboxes",
    "Ingress": "fastness.handles.sync.ingress",
    "IngressStats": "fastness.wire.ingress",
    "Job": "fastness.tasks.jobs",
    "KeyInfo": "fastness.wire.queues",
    "KnownRow": "fastness.wire.collections",
    "KeyProvider": "fastness.encryption_keys",
    "LastCollection": "fastness.wire.space",
    "Lease": "fastness.handles.sync.leases",
    "LeaseKey": "fastness.handles.sync.leases",
    "FoundMessage": "fastness.wire.queues",
    "FoundMessages": "fastness.wire.queues",
    "LeasedMessage": "fastness.wire.queues",
    "LockSessionInfo": "fastness.wire.locks",
    "LockStats": "fastness.wire.transport",
    "Locks": "fastness.handles.sync.locks",
    "MailCount": "fastness.wire.mail",
    "MailPolicy": "fastness.wire.mail",
    "MailReceipt": "fastness.wire.mail",
    "Mailbox": "fastness.handles.sync.mailboxes",
    "MailboxSize": "fastness.wire.mail",
    "Message": "fastness.handles.sync.messages",
    "MessageEvent": "fastness.wire.queues",
    "MessageEvents": "fastness.wire.queues",
    "MessageInfo": "fastness.wire.queues",
    "NewDataPush": "fastness.wire.ingress",
    "NewMail": "fastness.wire.mail",
    "NewMessage": "fastness.wire.queues",
    "NewToken": "fastness.wire.tokens",
    "NodeLoad": "fastness.wire.nodes",
    "NodeStatus": "fastness.wire.nodes",
    "Nodes": "fastness.wire.nodes",
    "Opening": "fastness.handles.opening",
    "Pairs": "fastness.handles.sync.pairs",
    "PartitionPage": "fastness.wire.collections",
    "Plane": "fastness.handles.sync.plane",
    "PlaneParent": "fastness.wire.planes",
    "PlaneStatus": "fastness.wire.planes",
    "Program": "fastness.hosts.programs",
    "PushListener": "fastness.handles.sync.ingress",
    "PushWatch": "fastness.handles.sync.ingress",
    "Pushed": "fastness.wire.ingress",
    "PutReceipt": "fastness.handles.sync.receipts",
    "PutRow": "fastness.wire.collections",
    "Queue": "fastness.handles.sync.queues",
    "MessageState": "fastness.wire.queues",
    "Outcome": "fastness.wire.queues",
    "QueuePolicy": "fastness.wire.queues",
    "QueueStats": "fastness.wire.queues",
    "Quota": "fastness.wire.quotas",
    "Quotas": "fastness.handles.sync.quotas",
    "Receipt": "fastness.wire.queues",
    "Record": "fastness.wire.worlds",
    "Reducer": "fastness.handles.worlds",
    "Reject": "fastness.handles.task_control",
    "RenewedWorld": "fastness.wire.hosting",
    "RestartPolicy": "fastness.handles.workers",
    "Restored": "fastness.wire.restores",
    "Retry": "fastness.hosts.workflows.retry",
    "RetryAdvice": "fastness.errors",
    "RetryLater": "fastness.handles.task_control",
    "Rewritten": "fastness.wire.encryption",
    "Row": "fastness.wire.collections",
    "RowChange": "fastness.wire.collections",
    "RowKey": "fastness.wire.collections",
    "RowPage": "fastness.wire.collections",
    "Run": "fastness.handles.sync.runs",
    "RunInfo": "fastness.wire.runs",
    "Runs": "fastness.wire.runs",
    "Schedule": "fastness.wire.queues",
    "SealBinding": "fastness.encryption",
    "Segment": "fastness.wire.worlds",
    "SendPolicy": "fastness.wire.hosting",
    "SentMail": "fastness.wire.mail",
    "Signature": "fastness.tasks.chains",
    "Snapshot": "fastness.wire.worlds",
    "Snapshots": "fastness.handles.sync.worlds",
    "SpaceReport": "fastness.wire.space",
    "SpaceUse": "fastness.wire.space",
    "StandbyStatus": "fastness.wire.space",
    "State": "fastness.handles.sync.states",
    "StepContext": "fastness.hosts.step_context",
    "StorageStatus": "fastness.wire.space",
    "Subspace": "fastness.kv",
    "Task": "fastness.tasks.app",
    "TaskApp": "fastness.tasks.app",
    "TaskDeferred": "fastness.handles.task_control",
    "TaskWorker": "fastness.tasks.workers",
    "Tier": "fastness.tiers",
    "TierPolicy": "fastness.tiers",
    "TieredTransaction": "fastness.handles.sync.entities",
    "TimelineEvent": "fastness.wire.run_timeline",
    "Timer": "fastness.wire.inboxes",
    "TimerFired": "fastness.wire.inboxes",
    "TimerInfo": "fastness.wire.timers",
    "TimerPage": "fastness.wire.timers",
    "Timers": "fastness.handles.sync.timers",
    "TokenInfo": "fastness.wire.tokens",
    "Tokens": "fastness.handles.sync.tokens",
    "Transaction": "fastness.kv",
    "TurnCommitted": "fastness.wire.hosting",
    "TurnContext": "fastness.hosts.programs",
    "UniverseEncryption": "fastness.wire.encryption",
    "Unsealed": "fastness.encryption",
    "UpdatedState": "fastness.wire.states",
    "Usage": "fastness.wire.quotas",
    "Verdict": "fastness.wire.restores",
    "Within": "fastness.handles.sync.within",
    "Worker": "fastness.handles.workers",
    "WorkerOutcome": "fastness.handles.workers",
    "WorkerStats": "fastness.handles.workers",
    "Workflow": "fastness.hosts.workflows.workflow",
    "WorkflowRun": "fastness.hosts.workflows.run",
    "Workflows": "fastness.handles.sync.runs",
    "World": "fastness.handles.sync.worlds",
    "Written": "fastness.wire.entities",
    "adapter": "fastness.hosts.default_app",
    "connect": "fastness.opening",
    "connect_async": "fastness.opening",
    "current_job": "fastness.tasks.jobs",
    "current_step": "fastness.hosts.step_context",
    "fenced": "fastness.plane",
    "group": "fastness.tasks.chains",
    "open": "fastness.opening",
    "open_async": "fastness.opening",
    "program": "fastness.hosts.default_app",
    "task": "fastness.tasks.default_app",
    "workflow": "fastness.hosts.default_app",
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
