"""Stores: what handlers use beyond one transaction. One class waits on the caller's thread, the other on an event loop.

A handler is written once for both: it returns what a store's method returns, an answer or an awaitable of one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias, Union

from fastness.kv import Result, Transaction
from fastness.kv.formats import FORMAT
from fastness.layers.blobs import Verify
from fastness.plane.handlers import low_space_error
from fastness.plane.services import Services
from fastness.runtime.backups import AsyncBackupStore
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.dispatcher import AsyncDispatcher
from fastness.runtime.effects import AsyncEffectWaiter
from fastness.runtime.entities import AsyncEntityStore
from fastness.runtime.hosting import AsyncHostingStore
from fastness.runtime.ingress.ingress import Ingress
from fastness.runtime.ingress.threaded import ThreadedIngress
from fastness.runtime.leases import AsyncLeaseWaiter
from fastness.runtime.mail_waiting import AsyncMailWaiter
from fastness.runtime.maintenance.checkpoints import Checkpoints
from fastness.runtime.queues import AsyncQueueStore
from fastness.runtime.row_waiting import AsyncRowWaiter
from fastness.runtime.runs import AsyncRunStore
from fastness.runtime.shared_locks import AsyncSharedLockWaiter
from fastness.runtime.sync.backups import BackupStore
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.dispatcher import Dispatcher
from fastness.runtime.sync.effects import EffectWaiter
from fastness.runtime.sync.entities import EntityStore
from fastness.runtime.sync.hosting import HostingStore
from fastness.runtime.sync.leases import LeaseWaiter
from fastness.runtime.sync.mail_waiting import MailWaiter
from fastness.runtime.sync.queues import QueueStore
from fastness.runtime.sync.row_waiting import RowWaiter
from fastness.runtime.sync.runs import RunStore
from fastness.runtime.sync.shared_locks import SharedLockWaiter
from fastness.runtime.sync.worlds import WorldStore
from fastness.runtime.worlds import AsyncWorldStore
from fastness.threads import run_in_thread
from fastness.tiers import Tier
from fastness.version import __version__
from fastness.wire.requests import Answer

Served: TypeAlias = Answer | Awaitable[Answer]  # What a handler returns: with AsyncStores it is awaited.
Streamed: TypeAlias = Iterator[bytes] | Awaitable[AsyncIterator[bytes]]


class Stores:
    """The stores of a plane whose callers wait on their own threads."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        self.services = services
        self.blobs = BlobStore(services.database, services.objects, verify=verify)
        self.worlds = WorldStore(services.database, services.objects, self.blobs)
        self.runs = RunStore(services.database, self.worlds, services.clock, services.consumers)
        waits = services.database, services.clock, services.consumers
        self.effects, self.leases = EffectWaiter(*waits), LeaseWaiter(*waits)
        self.mail, self.rows = MailWaiter(*waits), RowWaiter(*waits)
        self.shared_locks = SharedLockWaiter(*waits, services.lock_counters)
        self.hosting = HostingStore(*waits, services.revived_runs)
        self.entities = EntityStore(
            services.database,
            tables=services.locks,
            shares_locks=lambda: services.shared_locks,
            waiter=self.shared_locks,
            activity=services.log,
            policy=services.policy,
            session=services.session,
            best_effort=services.best_effort,
            run_in_thread=self.run_in_thread,
        )
        dispatcher = Dispatcher(*waits, services.waiting_consumers)
        self.queues, self.stale_queues = (
            QueueStore(
                database,
                dispatcher,
                self.blobs,
                clock=services.clock,
                options=services.consumers,
                worker=services.worker,
            )
            for database in (services.database, services.database.stale)
        )
        blobs = AsyncBlobStore(services.database, services.objects, verify=verify)
        self.ingress = ThreadedIngress(_ingress(services, blobs))
        self.backups = BackupStore(_checkpoints(services), services.objects, self.run_in_thread)

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit."""
        result: Result = self.services.database.transact(_run_with_space, work, args, kwargs, tier=tier)
        return result

    def run_in_thread(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Call a function that blocks on files or stores."""
        return function(*args, **kwargs)


class AsyncStores:
    """The stores of a plane whose callers wait on an event loop."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        self.services = services
        self.blobs = AsyncBlobStore(services.database, services.objects, verify=verify)
        self.worlds = AsyncWorldStore(services.database, services.objects, self.blobs)
        self.runs = AsyncRunStore(services.database, self.worlds, services.clock, services.consumers)
        waits = services.database, services.clock, services.consumers
        self.effects, self.leases = AsyncEffectWaiter(*waits), AsyncLeaseWaiter(*waits)
        self.mail, self.rows = AsyncMailWaiter(*waits), AsyncRowWaiter(*waits)
        self.shared_locks = AsyncSharedLockWaiter(*waits, services.lock_counters)
        self.hosting = AsyncHostingStore(*waits, services.revived_runs)
        self.entities = AsyncEntityStore(
            services.database,
            tables=services.locks,
            shares_locks=lambda: services.shared_locks,
            waiter=self.shared_locks,
            activity=services.log,
            policy=services.policy,
            session=services.session,
            best_effort=services.best_effort,
            run_in_thread=self.run_in_thread,
        )
        dispatcher = AsyncDispatcher(*waits, services.waiting_consumers)
        self.queues, self.stale_queues = (
            AsyncQueueStore(
                database,
                dispatcher,
                self.blobs,
                clock=services.clock,
                options=services.consumers,
                worker=services.worker,
            )
            for database in (services.database, services.database.stale)
        )
        self.ingress = _ingress(services, self.blobs)
        self.backups = AsyncBackupStore(_checkpoints(services), services.objects, self.run_in_thread)

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit."""
        result: Result = await self.services.database.transact_async(_run_with_space, work, args, kwargs, tier=tier)
        return result

    async def run_in_thread(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Call a function that blocks on files or stores in a thread."""
        return await run_in_thread(function, *args, **kwargs)


AnyStores: TypeAlias = Union[Stores, AsyncStores]  # noqa: UP007


def _run_with_space(
    tx: Transaction, work: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Result:
    """The result of `work`. While the disk is nearly full, a transaction that writes must also delete something."""
    result = work(tx, *args, **kwargs)
    if tx.low_space and tx.writes and not tx.cleared and None not in tx.writes.values():
        raise low_space_error()
    return result


def _ingress(services: Services, blobs: AsyncBlobStore) -> Ingress:
    return Ingress(services.database, blobs, clock=services.clock, pushes_per_minute=services.pushes_per_minute)


def _checkpoints(services: Services) -> Checkpoints:
    return Checkpoints(
        services.database, services.objects, services.logs, flush=services.flush_logs, written_by=(FORMAT, __version__)
    )
