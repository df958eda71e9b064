"""The transports of a plane in this process: the executor, with the streams and the life of the plane."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from fastness.errors import InvalidArgument
from fastness.layers.blobs import Verify
from fastness.limits import AUDIT_CLOSE_SECONDS
from fastness.plane.executor import AsyncExecutor, Executor, execute
from fastness.plane.handlers import Serve
from fastness.plane.operations import handler_of
from fastness.plane.services import Services
from fastness.plane.within import AsyncWithinTransport, WithinTransport
from fastness.runtime.locks.table import CallerLocks
from fastness.wire.requests import Answer, Request
from fastness.wire.type_checks import check_types


class EmbeddedTransport(Executor):
    """Executes requests while the caller's thread waits."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self.lock_sessions = services.lock_sessions
        self.lease_renewer = services.lease_renewer
        self.on_data_push = self.ingress.on_data_push
        self.execute = execute

    @property
    def locks(self) -> Callable[[str], CallerLocks] | None:
        """The lock table of a universe; None if several processes share the locks."""
        services = self.services
        return None if services.shared_locks else services.caller_locks

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


class AsyncEmbeddedTransport(AsyncExecutor):
    """Executes requests without blocking the caller's event loop."""

    def __init__(self, services: Services, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self.lock_sessions = services.lock_sessions
        self.lease_renewer = services.lease_renewer
        self.on_data_push = self.ingress.on_data_push
        self.execute = execute

    @property
    def locks(self) -> Callable[[str], CallerLocks] | None:
        """The lock table of a universe; None if several processes share the locks."""
        services = self.services
        return None if services.shared_locks else services.caller_locks

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


def _served(request: Request[Any]) -> Serve:
    """The handler of a request that has a stream."""
    serve = handler_of(request).serve
    if serve is None:
        raise InvalidArgument("This operation has no stream; use call()")
    check_types(request)
    return serve
