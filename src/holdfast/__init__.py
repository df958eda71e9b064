"""A durable plane for fleets of agents: work queues, mail, locks, state and event-sourced history.

import holdfast

with holdfast.open("dir:./data") as plane:
    plane.queue("jobs").put({"n": 1})

This module exports the public API, with every type that a user annotates with. A name is imported when it is first
used, so that a client does not load the storage engine, and an embedded plane does not load the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from holdfast.limits import GC_EVERY_SECONDS, GC_GRACE_SECONDS
from holdfast.names import UNIVERSE, checked_name
from holdfast.version import __version__ as __version__

if TYPE_CHECKING:
    import os
    import ssl

    from holdfast.clock import Clock
    from holdfast.encryption import AgentKey, SealBinding, Unsealed
    from holdfast.errors import HoldfastError, RetryAdvice
    from holdfast.handles.activity import AsyncActivity
    from holdfast.handles.agents import AsyncAgents
    from holdfast.handles.atomic import AsyncAtomic
    from holdfast.handles.backups import AsyncBackups
    from holdfast.handles.blobs import AsyncBlobs
    from holdfast.handles.effects import AsyncEffectClaim, AsyncEffects
    from holdfast.handles.entities import AsyncEntities, AsyncTieredTransaction, Entity, EntityChange
    from holdfast.handles.hosting import AsyncHosting
    from holdfast.handles.leases import AsyncLease, AsyncLeaseKey
    from holdfast.handles.locks import AsyncLocks
    from holdfast.handles.mailboxes import AsyncMailbox
    from holdfast.handles.messages import AsyncMessage
    from holdfast.handles.opening import Opening
    from holdfast.handles.pairs import AsyncPairs
    from holdfast.handles.plane import AsyncPlane
    from holdfast.handles.queues import AsyncQueue
    from holdfast.handles.receipts import AsyncPutReceipt
    from holdfast.handles.runs import AsyncRun, AsyncWorkflows
    from holdfast.handles.states import AsyncState, Document
    from holdfast.handles.sync.activity import Activity
    from holdfast.handles.sync.agents import Agents
    from holdfast.handles.sync.atomic import Atomic
    from holdfast.handles.sync.backups import Backups
    from holdfast.handles.sync.blobs import Blobs
    from holdfast.handles.sync.effects import EffectClaim, Effects
    from holdfast.handles.sync.entities import Entities, TieredTransaction
    from holdfast.handles.sync.hosting import Hosting
    from holdfast.handles.sync.leases import Lease, LeaseKey
    from holdfast.handles.sync.locks import Locks
    from holdfast.handles.sync.mailboxes import Mailbox
    from holdfast.handles.sync.messages import Message
    from holdfast.handles.sync.pairs import Pairs
    from holdfast.handles.sync.plane import Plane
    from holdfast.handles.sync.queues import Queue
    from holdfast.handles.sync.receipts import PutReceipt
    from holdfast.handles.sync.runs import Run, Workflows
    from holdfast.handles.sync.states import State
    from holdfast.handles.sync.timers import Timers
    from holdfast.handles.sync.tokens import Tokens
    from holdfast.handles.sync.within import Within
    from holdfast.handles.sync.worlds import Inbox, Snapshots, World
    from holdfast.handles.task_control import Reject, RetryLater
    from holdfast.handles.timers import AsyncTimers
    from holdfast.handles.tokens import AsyncTokens
    from holdfast.handles.within import AsyncWithin
    from holdfast.handles.workers import AsyncWorker, RestartPolicy, Worker, WorkerStats
    from holdfast.handles.worlds import AsyncInbox, AsyncSnapshots, AsyncWorld, Reducer
    from holdfast.hosts.adapters import EffectCall
    from holdfast.hosts.apps import HostApp
    from holdfast.hosts.default_app import adapter, program, workflow
    from holdfast.hosts.host import AsyncHost, HostStats
    from holdfast.hosts.programs import Event, Program, TurnContext
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
    from holdfast.wire.effects import Attempted, EffectInfo, EffectPage
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
    from holdfast.wire.mail import Envelope, MailboxSize, MailCount, MailPolicy, MailReceipt, NewMail, SentMail
    from holdfast.wire.nodes import NodeLoad, Nodes, NodeStatus
    from holdfast.wire.planes import PlaneParent, PlaneStatus
    from holdfast.wire.queues import (
        Delivery,
        Failure,
        KeyInfo,
        LeasedMessage,
        MessageEvent,
        MessageEvents,
        MessageInfo,
        NewMessage,
        QueuePolicy,
        QueueStats,
        Receipt,
        Schedule,
    )
    from holdfast.wire.restores import Entry, Restored, Verdict
    from holdfast.wire.run_timeline import TimelineEvent
    from holdfast.wire.runs import RunInfo, Runs
    from holdfast.wire.space import Collected, LastCollection, SpaceReport, SpaceUse, StandbyStatus, StorageStatus
    from holdfast.wire.states import UpdatedState
    from holdfast.wire.timers import TimerInfo, TimerPage
    from holdfast.wire.tokens import NewToken, TokenInfo
    from holdfast.wire.transport import HeldLock, LockStats
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
    "AsyncBackups",
    "AsyncBlobs",
    "AsyncEffectClaim",
    "AsyncEffects",
    "AsyncEntities",
    "AsyncHost",
    "AsyncHosting",
    "AsyncInbox",
    "AsyncLease",
    "AsyncLeaseKey",
    "AsyncLocks",
    "AsyncMailbox",
    "AsyncMessage",
    "AsyncPairs",
    "AsyncPlane",
    "AsyncPutReceipt",
    "AsyncQueue",
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
    "Attempted",
    "Backups",
    "Blobs",
    "Chain",
    "ClaimedWorld",
    "Clock",
    "Collected",
    "Control",
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
    "Entities",
    "Entity",
    "EntityChange",
    "EntityKind",
    "Entry",
    "Envelope",
    "Event",
    "Failure",
    "Group",
    "HeldLock",
    "HoldfastError",
    "Host",
    "HostApp",
    "HostStats",
    "Hosting",
    "HostingInfo",
    "InboundMessage",
    "Inbox",
    "InboxItem",
    "Job",
    "KeyInfo",
    "LastCollection",
    "Lease",
    "LeaseKey",
    "LeasedMessage",
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
    "PutReceipt",
    "Queue",
    "QueuePolicy",
    "QueueStats",
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
    "StorageStatus",
    "Subspace",
    "Task",
    "TaskApp",
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
    "Unsealed",
    "UpdatedState",
    "Verdict",
    "Within",
    "Worker",
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
    "fenced",
    "group",
    "open",
    "open_async",
    "program",
    "task",
    "workflow",
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
    "AsyncBackups": "holdfast.handles.backups",
    "AsyncBlobs": "holdfast.handles.blobs",
    "AsyncEffectClaim": "holdfast.handles.effects",
    "AsyncEffects": "holdfast.handles.effects",
    "AsyncEntities": "holdfast.handles.entities",
    "AsyncHost": "holdfast.hosts.host",
    "AsyncHosting": "holdfast.handles.hosting",
    "AsyncInbox": "holdfast.handles.worlds",
    "AsyncLease": "holdfast.handles.leases",
    "AsyncLeaseKey": "holdfast.handles.leases",
    "AsyncLocks": "holdfast.handles.locks",
    "AsyncMailbox": "holdfast.handles.mailboxes",
    "AsyncMessage": "holdfast.handles.messages",
    "AsyncPairs": "holdfast.handles.pairs",
    "AsyncPlane": "holdfast.handles.plane",
    "AsyncPutReceipt": "holdfast.handles.receipts",
    "AsyncQueue": "holdfast.handles.queues",
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
    "Attempted": "holdfast.wire.effects",
    "Backups": "holdfast.handles.sync.backups",
    "Blobs": "holdfast.handles.sync.blobs",
    "Chain": "holdfast.tasks.chains",
    "ClaimedWorld": "holdfast.wire.hosting",
    "Clock": "holdfast.clock",
    "Collected": "holdfast.wire.space",
    "Control": "holdfast.wire.inboxes",
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
    "Entities": "holdfast.handles.sync.entities",
    "Entity": "holdfast.handles.entities",
    "EntityChange": "holdfast.handles.entities",
    "EntityKind": "holdfast.wire.entities",
    "Entry": "holdfast.wire.restores",
    "Envelope": "holdfast.wire.mail",
    "Event": "holdfast.hosts.programs",
    "Failure": "holdfast.wire.queues",
    "Group": "holdfast.tasks.chains",
    "HeldLock": "holdfast.wire.transport",
    "HoldfastError": "holdfast.errors",
    "Host": "holdfast.hosts.threads",
    "HostApp": "holdfast.hosts.apps",
    "HostStats": "holdfast.hosts.host",
    "Hosting": "holdfast.handles.sync.hosting",
    "HostingInfo": "holdfast.wire.hosting",
    "InboundMessage": "holdfast.wire.inboxes",
    "Inbox": "holdfast.handles.sync.worlds",
    "InboxItem": "holdfast.wire.inboxes",
    "Job": "holdfast.tasks.jobs",
    "KeyInfo": "holdfast.wire.queues",
    "LastCollection": "holdfast.wire.space",
    "Lease": "holdfast.handles.sync.leases",
    "LeaseKey": "holdfast.handles.sync.leases",
    "LeasedMessage": "holdfast.wire.queues",
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
    "NewMail": "holdfast.wire.mail",
    "NewMessage": "holdfast.wire.queues",
    "NewToken": "holdfast.wire.tokens",
    "NodeLoad": "holdfast.wire.nodes",
    "NodeStatus": "holdfast.wire.nodes",
    "Nodes": "holdfast.wire.nodes",
    "Opening": "holdfast.handles.opening",
    "Pairs": "holdfast.handles.sync.pairs",
    "Plane": "holdfast.handles.sync.plane",
    "PlaneParent": "holdfast.wire.planes",
    "PlaneStatus": "holdfast.wire.planes",
    "Program": "holdfast.hosts.programs",
    "PutReceipt": "holdfast.handles.sync.receipts",
    "Queue": "holdfast.handles.sync.queues",
    "QueuePolicy": "holdfast.wire.queues",
    "QueueStats": "holdfast.wire.queues",
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
    "State": "holdfast.handles.sync.states",
    "StandbyStatus": "holdfast.wire.space",
    "StorageStatus": "holdfast.wire.space",
    "Subspace": "holdfast.kv",
    "Task": "holdfast.tasks.app",
    "TaskApp": "holdfast.tasks.app",
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
    "Unsealed": "holdfast.encryption",
    "UpdatedState": "holdfast.wire.states",
    "Verdict": "holdfast.wire.restores",
    "Within": "holdfast.handles.sync.within",
    "Worker": "holdfast.handles.workers",
    "WorkerStats": "holdfast.handles.workers",
    "Workflows": "holdfast.handles.sync.runs",
    "Workflow": "holdfast.hosts.workflows.workflow",
    "WorkflowRun": "holdfast.hosts.workflows.run",
    "World": "holdfast.handles.sync.worlds",
    "Written": "holdfast.wire.entities",
    "adapter": "holdfast.hosts.default_app",
    "current_job": "holdfast.tasks.jobs",
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


def open(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    activity: str | None = None,
    tiers: "TierPolicy | str | os.PathLike[str] | None" = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    disk_reserve_bytes: int | None = None,
    gc_every_seconds: float | None = GC_EVERY_SECONDS,
    gc_grace_seconds: float = GC_GRACE_SECONDS,
    activity_keep_seconds: float | None = None,
    activity_bytes_max: int | None = None,
    archived_keep_seconds: float | None = None,
    archived_bytes_max: int | None = None,
    dead_letter_bytes_max: int | None = None,
    read_from: str = "primary",
    clock: "Clock | None" = None,
) -> "Plane":
    """Open the plane at `url` in this process: `memory:`, `dir:PATH` or `postgresql://...`.

    Args:
        universe: the tenant to work in.
        objects: the object store for large values (`dir:`, `s3://`, `az://`, `gs://`); `PATH/objects` by default.
        activity: the folder of session logs; `PATH/activity` by default.
        tiers: the tier of each entity field, as a policy or the path of a TOML file.
        verify_blobs: whether blobs are verified when they are read: always, sampled or never.
        compact_every_seconds: compact journals into `objects` in the background at this interval; off by default.
        disk_reserve_bytes: refuse new data with DiskFull while less of the disk is free; 64 MiB by default, 0 is never.
        gc_every_seconds: how often blobs that nothing names are deleted in the background; None for never.
        gc_grace_seconds: how long a blob that nothing names is kept.
        activity_keep_seconds: how long session logs in `objects` are kept; for ever by default.
        activity_bytes_max: how many bytes of session logs a universe keeps in `objects`; without a limit by default.
        archived_keep_seconds: how long an archived world is kept before it is deleted; for ever by default.
        archived_bytes_max: how many bytes of archived worlds' journals a universe keeps; without a limit by default.
        dead_letter_bytes_max: how many bytes of dead letters a universe keeps; without a limit by default.
        read_from: "standby" lets lists, statistics and other reads that may be stale come from a standby of PostgreSQL.
        clock: replaces the wall clock, for tests.
    """
    from holdfast.handles.sync.plane import Plane
    from holdfast.plane import Options, open_plane
    from holdfast.runtime.maintenance.space_options import SpaceOptions

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        disk_reserve_bytes=disk_reserve_bytes,
        gc_every_seconds=gc_every_seconds,
        space=SpaceOptions(
            grace_seconds=gc_grace_seconds,
            log_keep_seconds=activity_keep_seconds,
            log_bytes_max=activity_bytes_max,
            archived_keep_seconds=archived_keep_seconds,
            archived_bytes_max=archived_bytes_max,
            dead_letter_bytes_max=dead_letter_bytes_max,
        ),
        read_from=read_from,
        clock=clock,
    )
    return Plane(open_plane(url, options), universe)


def open_async(
    url: str,
    *,
    universe: str = UNIVERSE,
    objects: str | None = None,
    activity: str | None = None,
    tiers: "TierPolicy | str | os.PathLike[str] | None" = None,
    verify_blobs: str = "always",
    compact_every_seconds: float | None = None,
    disk_reserve_bytes: int | None = None,
    gc_every_seconds: float | None = GC_EVERY_SECONDS,
    gc_grace_seconds: float = GC_GRACE_SECONDS,
    activity_keep_seconds: float | None = None,
    activity_bytes_max: int | None = None,
    archived_keep_seconds: float | None = None,
    archived_bytes_max: int | None = None,
    dead_letter_bytes_max: int | None = None,
    read_from: str = "primary",
    clock: "Clock | None" = None,
) -> "Opening":
    """`open` for asyncio: await it, or enter it with `async with`."""
    from holdfast.handles.opening import Opening
    from holdfast.handles.plane import AsyncPlane
    from holdfast.plane import Options, open_plane_async
    from holdfast.runtime.maintenance.space_options import SpaceOptions

    universe = checked_name("universe", universe)
    options = Options(
        objects=objects,
        activity=activity,
        tiers=tiers,
        verify_blobs=verify_blobs,
        compact_every_seconds=compact_every_seconds,
        disk_reserve_bytes=disk_reserve_bytes,
        gc_every_seconds=gc_every_seconds,
        space=SpaceOptions(
            grace_seconds=gc_grace_seconds,
            log_keep_seconds=activity_keep_seconds,
            log_bytes_max=activity_bytes_max,
            archived_keep_seconds=archived_keep_seconds,
            archived_bytes_max=archived_bytes_max,
            dead_letter_bytes_max=dead_letter_bytes_max,
        ),
        read_from=read_from,
        clock=clock,
    )

    async def opening() -> AsyncPlane:
        return AsyncPlane(await open_plane_async(url, options), universe)

    return Opening(opening())


def connect(
    url: str,
    *,
    token: str | None = None,
    universe: str = UNIVERSE,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Plane":
    """Connect to the server at `url`, as in `http://127.0.0.1:9440`; returns the same handles as `open`.

    Args:
        token: the access token; not needed for a server on a loopback address without tokens.
        tls: the TLS context for an `https://` address; by default the system's certificates are trusted.
        patience_seconds: how long calls wait for an unavailable server before they raise Unreachable. When it is
            back they are sent again, and are executed once.
    """
    from holdfast.client.transport import RemoteTransport
    from holdfast.handles.sync.plane import Plane

    universe = checked_name("universe", universe)
    return Plane(RemoteTransport(_server(url), token=token, tls=tls, patience_seconds=patience_seconds), universe)


def connect_async(
    url: str,
    *,
    token: str | None = None,
    universe: str = UNIVERSE,
    tls: "ssl.SSLContext | None" = None,
    patience_seconds: float = 30.0,
) -> "Opening":
    """`connect` for asyncio: await it, or enter it with `async with`."""
    from holdfast.client.transport import AsyncRemoteTransport
    from holdfast.handles.opening import Opening
    from holdfast.handles.plane import AsyncPlane

    universe = checked_name("universe", universe)
    url = _server(url)

    async def opening() -> AsyncPlane:
        transport = AsyncRemoteTransport(url, token=token, tls=tls, patience_seconds=patience_seconds)
        return AsyncPlane(transport, universe)

    return Opening(opening())


def _server(url: object) -> str:
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        return url
    import os

    from holdfast.errors import InvalidUrl

    text = str(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str):
        raise InvalidUrl(f"A URL is text, not {type(url).__name__}; write http://HOST:PORT")
    scheme, colon, rest = text.partition(":")
    if scheme in ("postgresql", "postgres"):
        raise InvalidUrl('PostgreSQL is opened in this process, with holdfast.open("postgresql://…")')
    if text == "memory:" or scheme == "dir" or not colon:
        opened = text if colon else f"dir:{text}"
        raise InvalidUrl(
            f'{text} is not the address of a server; open it in this process with holdfast.open("{opened}")'
        )
    if rest.isdigit():
        raise InvalidUrl(f"{text!r} has no scheme; write http://{text}")
    raise InvalidUrl(f"{scheme!r} is not the scheme of a server; write http://HOST:PORT")
