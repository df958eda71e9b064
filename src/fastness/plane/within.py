"""The transports of `plane.within`: requests are executed in a transaction of the caller's own connection.

request ──► is it possible there? ──► its handler, in the caller's transaction ──► the caller commits or rolls back
        └─► a large body: stored before, by a commit of its own

Only a request that can be one of several operations in a commit (`Operation.atomic`) is possible, and the reads that
those need. Events are not published, because no one here knows whether the caller commits; except due times, which are
hints to the sweeper.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

from fastness.errors import NestedTransaction, NotTransactional
from fastness.kv import Event, Result, Transaction
from fastness.layers.field_tiers import BestEffortWritten
from fastness.layers.queues import QueueDue
from fastness.plane.atomic import execute_step
from fastness.plane.executor import execute
from fastness.plane.services import Services
from fastness.plane.sharing import share_queues
from fastness.tiers import Tier
from fastness.wire.blobs import PutBlob
from fastness.wire.collections import GetRows, ScanRows
from fastness.wire.entities import GetEntity, WriteEntities
from fastness.wire.requests import Answer, Request
from fastness.wire.states import GetState
from fastness.wire.transport import AsyncTransport, LeaseRenewer, LockSessions, LockTable, Transport
from fastness.wire.type_checks import check_types
from fastness.wire.worlds import DescribeWorld

_READS: Final = (GetState, GetEntity, GetRows, ScanRows, DescribeWorld)
_STORED_BEFORE: Final = (PutBlob,)  # If the caller rolls back, nothing names the blob, and it is deleted later.
_Events = list[Event]


class _Within:
    """What both transports have in common."""

    def __init__(self, services: Services, connection: object) -> None:
        self._services = services
        self._transaction = services.database.within(connection)
        self.execute = execute

    @property
    def locks(self) -> Callable[[str], LockTable] | None:
        return None if self._services.shared_locks else self._services.caller_locks

    @property
    def lock_sessions(self) -> LockSessions:
        return self._services.lock_sessions

    @property
    def lease_renewer(self) -> LeaseRenewer:
        return self._services.lease_renewer

    @property
    def on_data_push(self) -> None:
        """No listener: a push cannot be part of a transaction."""
        return

    def _publish_due(self, events: _Events) -> None:
        due = [event for event in events if isinstance(event, QueueDue)]
        if due:
            self._services.database.publish(due)


class WithinTransport(_Within):
    """Executes requests in a transaction of the caller's connection, while the caller's thread waits."""

    def __init__(self, services: Services, connection: object, outside: Transport) -> None:
        super().__init__(services, connection)
        self._outside = outside

    def call(self, request: Request[Answer]) -> Answer:
        """The answer to `request`.

        Raises:
            NotTransactional: it cannot be part of a transaction.
        """
        if type(request) in _STORED_BEFORE:
            return self._outside.call(request)
        _check(request)
        answer: Answer
        answer, events = self._transaction.run(_run, self._services, request)
        self._publish_due(events)
        return answer

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        del chunks
        raise _error(request)

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        raise _error(request)

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` in the caller's transaction, whose commit decides the durability."""
        del tier
        result: Result
        result, events = self._transaction.run(_collect, work, args, kwargs)
        self._publish_due(events)
        return result

    def within(self, connection: object) -> NoReturn:
        raise _nested_error(connection)

    def reopen(self) -> None:
        self._outside.reopen()

    def close(self) -> None:
        """Do nothing: the caller ends the transaction."""


class AsyncWithinTransport(_Within):
    """Executes requests in a transaction of the caller's connection, without blocking the event loop."""

    def __init__(self, services: Services, connection: object, outside: AsyncTransport) -> None:
        super().__init__(services, connection)
        self._outside = outside

    async def call(self, request: Request[Answer]) -> Answer:
        """The answer to `request`.

        Raises:
            NotTransactional: it cannot be part of a transaction.
        """
        if type(request) in _STORED_BEFORE:
            return await self._outside.call(request)
        _check(request)
        answer: Answer
        answer, events = await self._transaction.run_async(_run, self._services, request)
        self._publish_due(events)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        del chunks
        raise _error(request)

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        raise _error(request)

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` in the caller's transaction, whose commit decides the durability."""
        del tier
        result: Result
        result, events = await self._transaction.run_async(_collect, work, args, kwargs)
        self._publish_due(events)
        return result

    def within(self, connection: object) -> NoReturn:
        raise _nested_error(connection)

    async def reopen(self) -> None:
        await self._outside.reopen()

    async def close(self) -> None:
        """Do nothing: the caller ends the transaction."""


def _run(tx: Transaction, services: Services, request: Request[Answer]) -> tuple[Answer, _Events]:
    share_queues(tx, (request,))
    answer = execute_step(tx, services, request)
    if isinstance(request, WriteEntities) and any(isinstance(event, BestEffortWritten) for event in tx.events):
        raise NotTransactional(
            "BEST_EFFORT fields go to the session log, which is no part of the transaction; write them with "
            "plane.entities, after your commit"
        )
    return answer, tx.events


def _collect(
    tx: Transaction, work: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Result, _Events]:
    return work(tx, *args, **kwargs), tx.events


def _check(request: Request[Answer]) -> None:
    check_types(request)
    if not request.operation.atomic and not isinstance(request, _READS):
        raise _error(request)
    if isinstance(request, GetEntity) and request.best_effort:
        raise NotTransactional(
            "BEST_EFFORT fields are in the session logs, which are no part of the transaction; read them with "
            "plane.entities"
        )


def _error(request: Request[Any]) -> NotTransactional:
    return NotTransactional(
        f"{request.__struct_config__.tag} cannot be part of your transaction; call it on the plane itself, before "
        "the transaction begins or after its commit"
    )


def _nested_error(connection: object) -> NestedTransaction:
    return NestedTransaction(f"These handles already write in a transaction; call plane.within({connection!r}) instead")
