"""The transports of a plane in this process: a request goes straight to its handler.

request ──► handler ──► transaction: transact or read, then publish its events
                   ├──► service: a store, which waits, streams or commits several times
                   └──► immediate: answered from memory
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastness.errors import CommitUnknown, InvalidArgument
from fastness.layers.blobs import Verify
from fastness.layers.idempotency import KeyedCall
from fastness.limits import AUDIT_CLOSE_SECONDS
from fastness.plane.batching import CallBatcher
from fastness.plane.handlers import Handler, Serve
from fastness.plane.idempotency import idempotent
from fastness.plane.operations import execute, handler_of
from fastness.plane.services import Services
from fastness.plane.sharing import run_alone
from fastness.plane.stores import AsyncStores, Stores
from fastness.plane.unknown_commits import may_repeat, repeat, repeat_async
from fastness.plane.within import AsyncWithinTransport, WithinTransport
from fastness.runtime.locks.table import CallerLocks
from fastness.tiers import Tier
from fastness.wire.requests import Answer, Request
from fastness.wire.type_checks import check_types


class EmbeddedTransport(Stores):
    """Executes requests while the caller's thread waits."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self.lock_sessions = services.lock_sessions
        self.lease_renewer = services.lease_renewer
        self.on_data_push = self.ingress.on_data_push
        self.execute = execute
        self._transact = services.database.transact
        self._read = services.database.read
        self._read_stale = services.database.stale.read

    @property
    def locks(self) -> Callable[[str], CallerLocks] | None:
        """The lock table of a universe; None if several processes share the locks."""
        services = self.services
        return None if services.shared_locks else services.caller_locks

    def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Answer:
        """The answer to `request`; `call` is its idempotency key, if it has one."""
        if not self.services.shared:
            return self._execute(request, call)
        try:
            return self._execute(request, call)
        except CommitUnknown as error:
            if not may_repeat(request, call):
                raise
            return repeat(lambda: self._execute(request, call), error)

    def _execute(self, request: Request[Answer], call: KeyedCall | None) -> Answer:
        handler = handler_of(request)
        check_types(request)
        answer: Answer
        if handler.reads_only:
            read = self._read_stale if request.operation.stale else self._read
            answer = read(handler.run, request, tier=request.tier)  # type: ignore[arg-type]
        elif handler.run is not None:
            run = handler.run if call is None else idempotent(handler.run, call)
            answer, events = self._transact(run_alone, run, request, tier=request.tier)
            if events:
                self.services.publish(events)
        elif handler.immediate is not None:
            answer = handler.immediate(self, request, *_third(handler, call))
        else:
            assert handler.serve is not None, "a handler has one of the three"
            answer = handler.serve(self, request, *_third(handler, call))
        return answer

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        """The answer to a request whose body is streamed."""
        answer: Answer = _served(request)(self, request, chunks)
        return answer

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        """The body of the answer, as a stream."""
        stream: Iterator[bytes] = _served(request)(self, request)
        return stream

    def within(self, connection: object) -> WithinTransport:
        """A transport that executes requests in the open transaction of the caller's own connection."""
        return WithinTransport(self.services, connection, self)

    def reopen(self) -> None:
        """Open the key space again after a failure."""
        self.services.database.reopen()

    def close(self) -> None:
        """Store what the ingress has accepted, stop what runs beside the key space, and close it."""
        self.ingress.close()
        self.services.stop()


class AsyncEmbeddedTransport(AsyncStores):
    """Executes requests without blocking the caller's event loop."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self.lock_sessions = services.lock_sessions
        self.lease_renewer = services.lease_renewer
        self.on_data_push = self.ingress.on_data_push
        self.execute = execute
        self._transact = services.database.transact_async
        self._read = services.database.read_async
        self._read_stale = services.database.stale.read_async
        self._batchers: dict[asyncio.AbstractEventLoop, CallBatcher] = {}  # There is rarely more than one event loop.

    @property
    def locks(self) -> Callable[[str], CallerLocks] | None:
        """The lock table of a universe; None if several processes share the locks."""
        services = self.services
        return None if services.shared_locks else services.caller_locks

    def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Coroutine[Any, Any, Answer]:
        """The answer to `request`; `call` is its idempotency key, if it has one."""
        # Not a coroutine function itself: one more coroutine would cost every call of an embedded plane time.
        return self._execute_shared(request, call) if self.services.shared else self._execute(request, call)

    async def _execute_shared(self, request: Request[Answer], call: KeyedCall | None) -> Answer:
        try:
            return await self._execute(request, call)
        except CommitUnknown as error:
            if not may_repeat(request, call):
                raise
            return await repeat_async(lambda: self._execute(request, call), error)

    async def _execute(self, request: Request[Answer], call: KeyedCall | None) -> Answer:
        handler = handler_of(request)
        check_types(request)
        run = handler.run if handler.run is None or call is None else idempotent(handler.run, call)
        answer: Answer
        if handler.reads_only:
            read = self._read_stale if request.operation.stale else self._read
            answer = await read(handler.run, request, tier=request.tier)  # type: ignore[arg-type]
        elif run is not None and request.tier is Tier.CRITICAL and not self.services.shared:
            answer = await self._batcher().call(run, request)
        elif run is not None:
            answer, events = await self._transact(run_alone, run, request, tier=request.tier)
            if events:
                self.services.publish(events)
        elif handler.immediate is not None:
            answer = handler.immediate(self, request, *_third(handler, call))
        else:
            assert handler.serve is not None, "a handler has one of the three"
            answer = await handler.serve(self, request, *_third(handler, call))
        return answer

    def _batcher(self) -> CallBatcher:
        """The batcher of the running event loop. PostgreSQL's committer does its own batching."""
        loop = asyncio.get_running_loop()
        found = self._batchers.get(loop)
        if found is None:
            for closed in [each for each in self._batchers if each.is_closed()]:
                del self._batchers[closed]
            found = self._batchers[loop] = CallBatcher(self.services.database, self.services.publish)
        return found

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        """The answer to a request whose body is streamed."""
        answer: Answer = await _served(request)(self, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        """The body of the answer, as a stream."""
        stream: AsyncIterator[bytes] = await _served(request)(self, request)
        return stream

    def within(self, connection: object) -> AsyncWithinTransport:
        """A transport that executes requests in the open transaction of the caller's own connection."""
        return AsyncWithinTransport(self.services, connection, self)

    async def reopen(self) -> None:
        """Open the key space again after a failure."""
        await asyncio.to_thread(self.services.database.reopen)

    async def close(self) -> None:
        """Store what the ingress has accepted, stop what runs beside the key space, and close it."""
        loop = asyncio.get_running_loop()
        if recorded := {task for task in self.services.recorded_calls if task.get_loop() is loop}:
            _, late = await asyncio.wait(recorded, timeout=AUDIT_CLOSE_SECONDS)
            for task in late:
                task.cancel()
        await self.ingress.close()
        await asyncio.to_thread(self.services.stop)  # It syncs and joins threads, which would block the event loop.


def _third(handler: Handler, call: KeyedCall | None) -> tuple[KeyedCall, ...]:
    return (call,) if handler.takes_call and call is not None else ()


def _served(request: Request[Any]) -> Serve:
    """The handler of a request that has a stream."""
    serve = handler_of(request).serve
    if serve is None:
        raise InvalidArgument("This operation has no stream; use call()")
    check_types(request)
    return serve
