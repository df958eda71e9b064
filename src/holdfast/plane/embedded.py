"""The ports of a plane in this process: a request goes straight to the key space and the parts that run beside it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from holdfast import __version__
from holdfast.errors import InvalidArgument
from holdfast.kv import Result, Transaction
from holdfast.layers.blobs import Verify
from holdfast.layers.idempotency import KeyedCall
from holdfast.plane.batching import CallBatcher
from holdfast.plane.formats import FORMAT
from holdfast.plane.idempotency import run_only_once
from holdfast.plane.operations import Operation, execute, operation_of
from holdfast.plane.services import Services
from holdfast.runtime.backups import AsyncBackupStore
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.dispatcher import AsyncDispatcher
from holdfast.runtime.entities import AsyncEntityStore
from holdfast.runtime.ingress.ingress import Ingress
from holdfast.runtime.leases import AsyncLeaseWaiter
from holdfast.runtime.mail_waiting import AsyncMailWaiter
from holdfast.runtime.maintenance.checkpoints import Checkpoints
from holdfast.runtime.queues import AsyncQueueStore
from holdfast.runtime.sync.backups import BackupStore
from holdfast.runtime.sync.blobs import BlobStore
from holdfast.runtime.sync.dispatcher import Dispatcher
from holdfast.runtime.sync.entities import EntityStore
from holdfast.runtime.sync.leases import LeaseWaiter
from holdfast.runtime.sync.mail_waiting import MailWaiter
from holdfast.runtime.sync.queues import QueueStore
from holdfast.runtime.sync.worlds import WorldStore
from holdfast.runtime.worlds import AsyncWorldStore
from holdfast.threads import run_in_thread
from holdfast.tiers import Tier
from holdfast.wire.requests import Answer, Request


class EmbeddedTransport:
    """Executes requests while the caller's thread waits."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        self.services = services
        self.locks = services.locks
        self.lease_renewer = services.lease_renewer
        self.execute = execute
        self.blobs = BlobStore(services.database, services.objects, verify=verify)
        self.worlds = WorldStore(services.database, services.objects, self.blobs)
        self.leases = LeaseWaiter(services.database, services.clock, services.publish)
        self.entities = EntityStore(services.database, services.locks, services.log, services.policy, services.session)
        dispatcher = Dispatcher(services.database, services.clock, services.waits, services.publish)
        self.queues = QueueStore(services.database, dispatcher, self.blobs, services.publish)
        self.mail = MailWaiter(services.database, services.clock, services.waits, services.publish)
        self.backups = BackupStore(_checkpoints(services), services.objects, self.run_in_thread)
        self._transact = services.database.transact
        self._read = services.database.read

    def call(self, request: Request[Answer], once: KeyedCall | None = None) -> Answer:
        """The answer to `request`; `once` is what `plane.once` makes of the key of a call that may be sent twice."""
        operation = operation_of(request)
        answer: Answer
        if operation.reads_only:
            answer = self._read(operation.run, request, tier=request.tier)  # type: ignore[arg-type]
        elif operation.run is not None:
            run = operation.run if once is None else run_only_once(operation.run, once)
            answer, events = self._transact(_noting, run, (request,), {}, tier=request.tier)
            if events:
                self.services.publish(events)
        elif operation.at_once is not None:
            answer = operation.at_once(self, request, *_keyed(operation, once))
        else:
            answer = _server(operation)(self, request, *_keyed(operation, once))
        return answer

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        answer: Answer = _server(operation_of(request))(self, request, chunks)
        return answer

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        stream: Iterator[bytes] = _server(operation_of(request))(self, request)
        return stream

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        result: Result
        result, events = self._transact(_noting, work, args, kwargs, tier=tier)
        if events:
            self.services.publish(events)
        return result

    def run_in_thread(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Call something that waits for files or stores."""
        return function(*args, **kwargs)

    def close(self) -> None:
        self.services.stop()


class AsyncEmbeddedTransport:
    """Executes requests while the caller's event loop goes on."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        self.services = services
        self.locks = services.locks
        self.lease_renewer = services.lease_renewer
        self.execute = execute
        self.blobs = AsyncBlobStore(services.database, services.objects, verify=verify)
        self.worlds = AsyncWorldStore(services.database, services.objects, self.blobs)
        self.leases = AsyncLeaseWaiter(services.database, services.clock, services.publish)
        self.entities = AsyncEntityStore(
            services.database, services.locks, services.log, services.policy, services.session
        )
        dispatcher = AsyncDispatcher(services.database, services.clock, services.waits, services.publish)
        self.queues = AsyncQueueStore(services.database, dispatcher, self.blobs, services.publish)
        self.mail = AsyncMailWaiter(services.database, services.clock, services.waits, services.publish)
        self.ingress = Ingress(
            services.database,
            self.blobs,
            services.publish,
            clock=services.clock,
            locks=services.resources,
            pushes_per_minute=services.pushes_per_minute,
        )
        self.backups = AsyncBackupStore(_checkpoints(services), services.objects, self.run_in_thread)
        self._transact = services.database.transact_async
        self._read = services.database.read_async
        self._gatherings: dict[asyncio.AbstractEventLoop, CallBatcher] = {}  # There is rarely more than one event loop.

    async def call(self, request: Request[Answer], once: KeyedCall | None = None) -> Answer:
        """The answer to `request`; `once` is what `plane.once` makes of the key of a call that may be sent twice."""
        operation = operation_of(request)
        run = operation.run if operation.run is None or once is None else run_only_once(operation.run, once)
        answer: Answer
        if operation.reads_only:
            answer = await self._read(operation.run, request, tier=request.tier)  # type: ignore[arg-type]
        elif run is not None and request.tier is Tier.CRITICAL and not self.services.shared:
            answer = await self._gathering().call(run, request)
        elif run is not None:
            answer, events = await self._transact(_noting, run, (request,), {}, tier=request.tier)
            if events:
                self.services.publish(events)
        elif operation.at_once is not None:
            answer = operation.at_once(self, request, *_keyed(operation, once))
        else:
            answer = await _server(operation)(self, request, *_keyed(operation, once))
        return answer

    def _gathering(self) -> CallBatcher:
        """The calls of the event loop that runs on this thread. PostgreSQL's committer gathers by itself."""
        loop = asyncio.get_running_loop()
        found = self._gatherings.get(loop)
        if found is None:
            for closed in [each for each in self._gatherings if each.is_closed()]:
                del self._gatherings[closed]
            found = self._gatherings[loop] = CallBatcher(self.services.database, self.services.publish)
        return found

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        answer: Answer = await _server(operation_of(request))(self, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        stream: AsyncIterator[bytes] = await _server(operation_of(request))(self, request)
        return stream

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        result: Result
        result, events = await self._transact(_noting, work, args, kwargs, tier=tier)
        if events:
            self.services.publish(events)
        return result

    async def run_in_thread(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Call something that waits for files or stores, on a thread of its own."""
        return await run_in_thread(function, *args, **kwargs)

    async def close(self) -> None:
        await self.ingress.close()  # What was accepted is stored first.
        # Closing syncs and waits for threads, which an event loop must not.
        await asyncio.to_thread(self.services.stop)


def _checkpoints(services: Services) -> Checkpoints:
    return Checkpoints(
        services.database, services.objects, services.logs, flush=services.flush_logs, written_by=(FORMAT, __version__)
    )


def _noting(
    tx: Transaction, work: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Result, list[tuple[Any, ...]]]:
    """Run `work`; its result, and what is to be told of it once it is committed."""
    return work(tx, *args, **kwargs), tx.events


def _keyed(operation: Operation, once: KeyedCall | None) -> tuple[KeyedCall, ...]:
    return (once,) if operation.keyed and once is not None else ()


def _server(operation: Operation) -> Callable[..., Any]:
    if operation.serve is None:
        raise InvalidArgument("This operation has no stream; call it instead")
    return operation.serve
