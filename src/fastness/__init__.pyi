"""Generated from fastness/__init__.py by tools/make_twins.py; change that file instead."""

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
from fastness.hosts.apps import HostApp, adapter, program, workflow
from fastness.hosts.host import AsyncHost, HostStats
from fastness.hosts.programs import Event, Program, TurnContext
from fastness.hosts.step_context import StepContext, current_step
from fastness.hosts.threads import Host
from fastness.hosts.workflows.retry import Retry
from fastness.hosts.workflows.run import WorkflowRun
from fastness.hosts.workflows.workflow import Workflow
from fastness.kv.keys import Subspace
from fastness.kv.transactions import Transaction
from fastness.opening import connect, connect_async, open, open_async
from fastness.plane import fenced
from fastness.tasks.app import Task, TaskApp, task
from fastness.tasks.chains import Chain, Group, Signature, group
from fastness.tasks.jobs import Job, current_job
from fastness.tasks.workers import TaskWorker
from fastness.tiers import Tier, TierPolicy
from fastness.version import __version__ as __version__
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

_MODULE_OF: dict[str, str]
# fmt: off
__all__ = \
["Clock", "AgentKey", "SealBinding", "Unsealed", "CommandKeys", "FileKeys", "KeyProvider", "FastnessError",
"RetryAdvice", "AsyncActivity", "AsyncAgents", "AsyncAtomic", "AsyncAudit", "AsyncBackups", "AsyncBlobs",
"AsyncCollection", "AsyncEffectClaim", "AsyncEffects", "AsyncEncryption", "AsyncEntities", "AsyncTieredTransaction",
"Entity", "EntityChange", "AsyncHosting", "AsyncIngress", "AsyncPushListener", "AsyncPushWatch", "AsyncLease",
"AsyncLeaseKey", "AsyncLocks", "AsyncMailbox", "AsyncMessage", "Opening", "AsyncPairs", "AsyncPlane", "AsyncQueue",
"AsyncQuotas", "AsyncPutReceipt", "AsyncRun", "AsyncWorkflows", "AsyncState", "Document", "Activity", "Agents",
"Atomic", "Audit", "Backups", "Blobs", "Collection", "EffectClaim", "Effects", "Encryption", "Entities",
"TieredTransaction", "Hosting", "Ingress", "PushListener", "PushWatch", "Lease", "LeaseKey", "Locks", "Mailbox",
"Message", "Pairs", "Plane", "Queue", "Quotas", "PutReceipt", "Run", "Workflows", "State", "Timers", "Tokens", "Within",
"Inbox", "Snapshots", "World", "Reject", "RetryLater", "TaskDeferred", "AsyncTimers", "AsyncTokens", "AsyncWithin",
"AsyncWorker", "RestartPolicy", "Worker", "WorkerOutcome", "WorkerStats", "AsyncInbox", "AsyncSnapshots", "AsyncWorld",
"Reducer", "EffectCall", "HostApp", "adapter", "program", "workflow", "AsyncHost", "HostStats", "Event", "Program",
"TurnContext", "StepContext", "current_step", "Host", "Retry", "WorkflowRun", "Workflow", "Subspace", "Transaction",
"connect", "connect_async", "open", "open_async", "fenced", "Task", "TaskApp", "task", "Chain", "Group", "Signature",
"group", "Job", "current_job", "TaskWorker", "Tier", "TierPolicy", "Agent", "AuditEntry", "AuditPage", "ChangedRow",
"ChangedRows", "DeleteRow", "DeleteRows", "KnownRow", "PartitionPage", "PutRow", "Row", "RowChange", "RowKey",
"RowPage", "Attempted", "EffectInfo", "EffectPage", "EncryptionStatus", "Rewritten", "UniverseEncryption", "EntityKind",
"Written", "AsideItem", "ClaimedWorld", "HostingInfo", "RenewedWorld", "SendPolicy", "TurnCommitted", "Control",
"DomainEvent", "Effect", "EffectReceipt", "InboundMessage", "InboxItem", "Timer", "TimerFired", "DataPush",
"IngressStats", "NewDataPush", "Pushed", "LockSessionInfo", "Envelope", "MailboxSize", "MailCount", "MailPolicy",
"MailReceipt", "NewMail", "SentMail", "NodeLoad", "Nodes", "NodeStatus", "PlaneParent", "PlaneStatus", "Delivery",
"Failure", "FoundMessage", "FoundMessages", "KeyInfo", "LeasedMessage", "MessageEvent", "MessageEvents", "MessageInfo",
"MessageState", "NewMessage", "Outcome", "QueuePolicy", "QueueStats", "Receipt", "Schedule", "Quota", "Usage", "Entry",
"Restored", "Verdict", "TimelineEvent", "RunInfo", "Runs", "Collected", "LastCollection", "SpaceReport", "SpaceUse",
"StandbyStatus", "StorageStatus", "UpdatedState", "TimerInfo", "TimerPage", "NewToken", "TokenInfo", "AsyncHeldLock",
"HeldLock", "LockStats", "Record", "Segment", "Snapshot"]
