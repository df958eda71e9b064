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
    from holdfast.handles.entities import AsyncEntities, AsyncTieredTransaction, Entity, EntityChange
    from holdfast.handles.leases import AsyncLease, AsyncLeaseKey
    from holdfast.handles.locks import AsyncLocks
    from holdfast.handles.mailboxes import AsyncMailbox
    from holdfast.handles.messages import AsyncMessage
    from holdfast.handles.opening import Opening
    from holdfast.handles.pairs import AsyncPairs
    from holdfast.handles.plane import AsyncPlane
    from holdfast.handles.queues import AsyncQueue
    from holdfast.handles.receipts import AsyncPutReceipt
    from holdfast.handles.states import AsyncState, Document
    from holdfast.handles.sync.activity import Activity
    from holdfast.handles.sync.agents import Agents
    from holdfast.handles.sync.atomic import Atomic
    from holdfast.handles.sync.backups import Backups
    from holdfast.handles.sync.blobs import Blobs
    from holdfast.handles.sync.entities import Entities, TieredTransaction
    from holdfast.handles.sync.leases import Lease, LeaseKey
    from holdfast.handles.sync.locks import Locks
    from holdfast.handles.sync.mailboxes import Mailbox
    from holdfast.handles.sync.messages import Message
    from holdfast.handles.sync.pairs import Pairs
    from holdfast.handles.sync.plane import Plane
    from holdfast.handles.sync.queues import Queue
    from holdfast.handles.sync.receipts import PutReceipt
    from holdfast.handles.sync.states import State
    from holdfast.handles.sync.tokens import Tokens
    from holdfast.handles.sync.within import Within
    from holdfast.handles.sync.worlds import Inbox, Snapshots, World
    from holdfast.handles.task_control import Reject, RetryLater
    from holdfast.handles.tokens import AsyncTokens
    from holdfast.handles.within import AsyncWithin
    from holdfast.handles.workers import AsyncWorker, RestartPolicy, Worker, WorkerStats
    from holdfast.handles.worlds import AsyncInbox, AsyncSnapshots, AsyncWorld, Reducer
    from holdfast.kv import Subspace, Transaction
    from holdfast.plane import fenced
    from holdfast.tasks.app import Task, TaskApp
    from holdfast.tasks.chains import Chain, Group, Signature, group
    from holdfast.tasks.default_app import task
    from holdfast.tasks.jobs import Job, current_job
    from holdfast.tasks.workers import TaskWorker
    from holdfast.tiers import Tier, TierPolicy
    from holdfast.wire.agents import Agent
    from holdfast.wire.entities import EntityKind, Written
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
    from holdfast.wire.space import Collected, LastCollection, SpaceReport, SpaceUse, StandbyStatus, StorageStatus
    from holdfast.wire.states import UpdatedState
    from holdfast.wire.tokens import NewToken, TokenInfo
    from holdfast.wire.transport import HeldLock, LockStats
    from holdfast.wire.worlds import Record, Segment, Snapshot

__all__ = [
    "Activity",
    "Agent",
    "AgentKey",
    "Agents",
    "AsyncActivity",
    "AsyncAgents",
    "AsyncAtomic",
    "AsyncBackups",
    "AsyncBlobs",
    "AsyncEntities",
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
    "AsyncSnapshots",
    "AsyncState",
    "AsyncTieredTransaction",
    "AsyncTokens",
    "AsyncWithin",
    "AsyncWorker",
    "AsyncWorld",
    "Atomic",
    "Backups",
    "Blobs",
    "Chain",
    "Clock",
    "Collected",
    "Control",
    "Delivery",
    "Document",
    "DomainEvent",
    "Effect",
    "EffectReceipt",
    "Entities",
    "Entity",
    "EntityChange",
    "EntityKind",
    "Entry",
    "Envelope",
    "Failure",
    "Group",
    "HeldLock",
    "HoldfastError",
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
    "PutReceipt",
    "Queue",
    "QueuePolicy",
    "QueueStats",
    "Receipt",
    "Record",
    "Reducer",
    "Reject",
    "RestartPolicy",
    "Restored",
    "RetryAdvice",
    "RetryLater",
    "Schedule",
    "SealBinding",
    "Segment",
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
    "Timer",
    "TimerFired",
    "TokenInfo",
    "Tokens",
    "Transaction",
    "Unsealed",
    "UpdatedState",
    "Verdict",
    "Within",
    "Worker",
    "WorkerStats",
    "World",
    "Written",
    "connect",
    "connect_async",
    "current_job",
    "fenced",
    "group",
    "open",
    "open_async",
    "task",
]

_MODULES: Final = {
    "Activity": "holdfast.handles.sync.activity",
    "Agent": "holdfast.wire.agents",
    "AgentKey": "holdfast.encryption",
    "Agents": "holdfast.handles.sync.agents",
    "AsyncActivity": "holdfast.handles.activity",
    "AsyncAgents": "holdfast.handles.agents",
    "AsyncAtomic": "holdfast.handles.atomic",
    "AsyncBackups": "holdfast.handles.backups",
    "AsyncBlobs": "holdfast.handles.blobs",
    "AsyncEntities": "holdfast.handles.entities",
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
    "AsyncSnapshots": "holdfast.handles.worlds",
    "AsyncState": "holdfast.handles.states",
    "AsyncTieredTransaction": "holdfast.handles.entities",
    "AsyncTokens": "holdfast.handles.tokens",
    "AsyncWithin": "holdfast.handles.within",
    "AsyncWorker": "holdfast.handles.workers",
    "AsyncWorld": "holdfast.handles.worlds",
    "Atomic": "holdfast.handles.sync.atomic",
    "Backups": "holdfast.handles.sync.backups",
    "Blobs": "holdfast.handles.sync.blobs",
    "Chain": "holdfast.tasks.chains",
    "Clock": "holdfast.clock",
    "Collected": "holdfast.wire.space",
    "Control": "holdfast.wire.inboxes",
    "Delivery": "holdfast.wire.queues",
    "Document": "holdfast.handles.states",
    "DomainEvent": "holdfast.wire.inboxes",
    "Effect": "holdfast.wire.inboxes",
    "EffectReceipt": "holdfast.wire.inboxes",
    "Entities": "holdfast.handles.sync.entities",
    "Entity": "holdfast.handles.entities",
    "EntityChange": "holdfast.handles.entities",
    "EntityKind": "holdfast.wire.entities",
    "Entry": "holdfast.wire.restores",
    "Envelope": "holdfast.wire.mail",
    "Failure": "holdfast.wire.queues",
    "Group": "holdfast.tasks.chains",
    "HeldLock": "holdfast.wire.transport",
    "HoldfastError": "holdfast.errors",
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
    "PutReceipt": "holdfast.handles.sync.receipts",
    "Queue": "holdfast.handles.sync.queues",
    "QueuePolicy": "holdfast.wire.queues",
    "QueueStats": "holdfast.wire.queues",
    "Receipt": "holdfast.wire.queues",
    "Record": "holdfast.wire.worlds",
    "Reducer": "holdfast.handles.worlds",
    "Reject": "holdfast.handles.task_control",
    "RestartPolicy": "holdfast.handles.workers",
    "Restored": "holdfast.wire.restores",
    "RetryAdvice": "holdfast.errors",
    "RetryLater": "holdfast.handles.task_control",
    "Schedule": "holdfast.wire.queues",
    "SealBinding": "holdfast.encryption",
    "Segment": "holdfast.wire.worlds",
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
    "Timer": "holdfast.wire.inboxes",
    "TimerFired": "holdfast.wire.inboxes",
    "TokenInfo": "holdfast.wire.tokens",
    "Tokens": "holdfast.handles.sync.tokens",
    "Transaction": "holdfast.kv",
    "Unsealed": "holdfast.encryption",
    "UpdatedState": "holdfast.wire.states",
    "Verdict": "holdfast.wire.restores",
    "Within": "holdfast.handles.sync.within",
    "Worker": "holdfast.handles.workers",
    "WorkerStats": "holdfast.handles.workers",
    "World": "holdfast.handles.sync.worlds",
    "Written": "holdfast.wire.entities",
    "current_job": "holdfast.tasks.jobs",
    "fenced": "holdfast.plane",
    "group": "holdfast.tasks.chains",
    "task": "holdfast.tasks.default_app",
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
