"""The executor: every call of a plane in this process passes through it, however it came.

    a call of a thread  (`Executor`) ───────────────────────┐
    calls of an event loop  (`AsyncExecutor`) ──────────────┼─► fields checked ─► guards ─► handler ─► commit ─► events
    the calls of a stream frame  (`AsyncExecutor.call_all`) ┘                                                  published

A call whose handler is one transaction is a `Work`. On an event loop, works of the same moment share a transaction and
a sync: a single caller has its own transaction, at once; while others wait for their sync, the calls of a tick share
the next one. The calls of a frame share one: a snapshot if all of them read, otherwise a commit at the strongest tier
that a call asks for. Calls that share a transaction stay isolated: one that raises has written nothing and does not
affect the others.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastness.errors import Closed, CommitUnknown, FastnessError, InvalidArgument
from fastness.kv import Database, Event, Transaction
from fastness.kv.batch import BatchedCall, run_batch, run_isolated
from fastness.kv.execution import check_tier
from fastness.layers.idempotency import KeyedCall, keyed_call, store_result, stored_result
from fastness.layers.quotas import quotas_of
from fastness.limits import READ_BATCH_REPLY_BYTES
from fastness.plane.atomic import execute_all
from fastness.plane.handlers import Handler, low_space_error, run_guarded
from fastness.plane.operations import handler_of
from fastness.plane.services import Services
from fastness.plane.sharing import share_queues
from fastness.plane.stores import AsyncStores, Stores
from fastness.plane.unknown_commits import may_repeat, repeat, repeat_async
from fastness.tiers import Tier
from fastness.wire.answers import read_answer
from fastness.wire.atomic import Answers, CommitAtomic
from fastness.wire.frames import Call, encode
from fastness.wire.mail import MailReceipts, Mails
from fastness.wire.requests import Answer, Request
from fastness.wire.type_checks import check_types

_CRITICAL = Tier.CRITICAL  # Attribute access on an enumeration costs as much as the rest of the check of a call.
_IMPORTANT = Tier.IMPORTANT
_ENVELOPE_BYTES = 256  # The estimate for a mail without its body, and for a receipt.


class Work(NamedTuple):
    """A call that is one transaction."""

    handler: Handler
    request: Request[Any]
    call: KeyedCall | None = None


def execute_work(tx: Transaction, work: Work) -> Any:
    """The answer to a call, or the stored one if a call with its key was executed before."""
    handler, request, call = work
    if call is None:
        return run_guarded(tx, handler, request)
    before = stored_result(tx, call)
    if before is not None:
        return read_answer(request, before)
    answer = run_guarded(tx, handler, request)
    store_result(tx, call, answer)
    return answer


def execute_alone(tx: Transaction, work: Work) -> Any:
    """The answer to the only call of a transaction."""
    if tx.writer:
        share_queues(tx, (work.request,))
    return execute_work(tx, work)


def execute(tx: Transaction, request: Request[Answer]) -> Answer:
    """Execute `request` inside a transaction that the caller commits.

    Raises:
        InvalidArgument: it needs more than one transaction.
    """
    handler = handler_of(request)
    check_types(request)
    if handler.run is None:
        raise InvalidArgument(f"{type(request).__name__} takes more than one commit; send it by itself")
    return run_guarded(tx, handler, request)


class Executor(Stores):
    """Executes the calls of threads, while they wait."""

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
        handler, database = handler_of(request), self.services.database
        check_types(request)
        answer: Answer
        if handler.reads_only:
            read = database.stale.read if request.operation.stale else database.read
            answer = read(run_guarded, handler, request, tier=request.tier)
        elif handler.run is not None:
            work = Work(handler, request, call)
            answer = database.transact(execute_alone, work, tier=request.tier)
        else:
            answer = served(self, handler, request, call)
        return answer


class AsyncExecutor(AsyncStores):
    """Executes the calls of event loops, without blocking them."""

    def __init__(self, services: Services, **options: Any) -> None:
        super().__init__(services, **options)
        self._batchers: dict[asyncio.AbstractEventLoop, Batcher] = {}  # There is rarely more than one event loop.

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
        handler, database = handler_of(request), self.services.database
        check_types(request)
        answer: Answer
        if handler.reads_only:
            read = database.stale.read_async if request.operation.stale else database.read_async
            answer = await read(run_guarded, handler, request, tier=request.tier)
        elif handler.run is None:
            answer = served(self, handler, request, call)
            if handler.immediate is None:
                answer = await answer  # type: ignore[misc]
        elif request.tier is _CRITICAL and not self.services.shared:
            answer = await self._batcher().call(Work(handler, request, call))
        else:
            work = Work(handler, request, call)
            answer = await database.transact_async(execute_alone, work, tier=request.tier)
        return answer

    def _batcher(self) -> "Batcher":
        """The batcher of the running event loop. PostgreSQL's committer does its own batching."""
        loop = asyncio.get_running_loop()
        found = self._batchers.get(loop)
        if found is None:
            for closed in [each for each in self._batchers if each.is_closed()]:
                del self._batchers[closed]
            found = self._batchers[loop] = Batcher(self.services.database)
        return found

    async def call_all(self, calls: Sequence[Call], is_wanted: "Callable[[], bool] | None" = None) -> list[object]:
        """The answers to the first of the calls, or the errors that they raised: of as many as fit one batch.

        A caller with more calls than answers sends the rest in another batch. Every call must be `is_batchable`. None
        is executed if `is_wanted` is false when the transaction starts: their sender will send them again.
        """
        services = self.services
        batch = Batch(services, is_wanted)
        repeats, any_again = services.repeats, any(call.again for call in calls)
        repeated = repeats.received(again=any_again)
        first = repeats.received(again=False) if any_again else repeated
        for each in calls:
            try:
                is_new = repeated if each.again else first
                batch.add(each.request, None if each.key is None else keyed_call(each.key, each.request, is_new))
            except FastnessError as error:
                batch.refuse(error)
        database = services.database
        if batch.writes:
            run = database.transact_async
        else:
            run = (database.stale if batch.may_be_stale else database).read_async
        events: list[Event] = []
        outcomes: list[object]
        try:
            try:
                outcomes, events = await run(batch.run, tier=batch.tier)
            except CommitUnknown as error:
                if any(call.key is None and call.request.operation.takes_key for call in calls):
                    raise
                outcomes, events = await repeat_async(partial(run, batch.run, tier=batch.tier), error)
        except FastnessError as error:
            outcomes = [error] * len(calls)
        if events:  # Published after the answers are sent.
            asyncio.get_running_loop().call_soon(services.database.publish, events)
        return outcomes


def served(stores: Any, handler: Handler, request: Request[Any], call: KeyedCall | None) -> Any:
    """What the handler of a request that is no transaction returns."""
    if handler.stores:
        database = stores.services.database
        if database.low_space:
            raise low_space_error()
        if database.usage is not None:
            quotas_of(database).check_request(request)
    serve = handler.serve or handler.immediate
    assert serve is not None, "a handler has one of the three"
    return serve(stores, request, call) if handler.takes_call and call is not None else serve(stores, request)


def is_batchable(request: Request[Any]) -> bool:
    """Whether a request is exactly one transaction."""
    handler = handler_of(request)
    if handler.run is not None:
        return True
    if handler.run_without_waiting is None:
        return isinstance(request, CommitAtomic)
    return not getattr(request, "wait_seconds", 0)


class Batcher:
    """Batches the CRITICAL calls of one event loop. Calls of other tiers wait for no sync, so they gain nothing."""

    def __init__(self, database: Database) -> None:
        self._transact = database.transact_async
        self._in_flight = 0
        self._works: list[BatchedCall] = []
        self._callers: list[asyncio.Future[Any]] = []  # One for each of `_works`.
        self._tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.

    async def call(self, work: Work) -> Any:
        """The answer to a call, once it is synced."""
        self._in_flight += 1
        try:
            if self._in_flight == 1:
                return await self._transact(execute_work, work, tier=_CRITICAL)
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            self._works.append((execute_work, work))
            self._callers.append(future)
            if len(self._works) == 1:
                loop.call_soon(self._start)
            return await future
        finally:
            self._in_flight -= 1

    def _start(self) -> None:
        works, self._works = self._works, []
        callers, self._callers = self._callers, []
        task = asyncio.get_running_loop().create_task(self._commit(works, callers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, works: list[BatchedCall], callers: "list[asyncio.Future[Any]]") -> None:
        while works:
            try:
                outcomes = await self._transact(run_batch, works, Exception, tier=_CRITICAL)
            except BaseException as error:
                for caller in callers:
                    if not caller.done():
                        caller.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            for caller, outcome in zip(callers, outcomes, strict=False):
                if caller.done():
                    continue  # The caller was cancelled, and its call is committed.
                if isinstance(outcome, Exception):
                    caller.set_exception(outcome)
                else:
                    caller.set_result(outcome)
            works, callers = works[len(outcomes) :], callers[len(outcomes) :]


class Batch:
    """The calls of a frame, which share a transaction."""

    def __init__(self, services: Services, is_wanted: Callable[[], bool] | None) -> None:
        self.tier = _IMPORTANT
        self.writes = False
        self.may_be_stale = True  # A standby may serve all of it.
        self._services = services
        self._is_wanted = is_wanted
        self._works: list[BatchedCall] = []
        self._requests: list[Request[Any]] = []
        self._answer_bytes = 0

    def add(self, request: Request[Any], call: KeyedCall | None) -> None:
        """Add a call.

        Raises:
            Validation: a field has not its type, or is out of its bounds, or no transaction has its tier.
        """
        check_types(request)
        if request.tier is _CRITICAL:
            self.tier = _CRITICAL
        elif request.tier is not _IMPORTANT:
            check_tier(request.tier)
        self._requests.append(request)
        self.may_be_stale &= request.operation.stale
        handler = handler_of(request)
        if handler.reads_only:
            self._works.append((self._read, (handler.run, request)))
            return
        self.writes = True
        if handler.run_without_waiting is not None:
            self._works.append((self._read, (handler.run_without_waiting, request)))
            return
        if handler.run is None:
            handler = Handler(run=self._execute_list)
        self._works.append((execute_work, Work(handler, request, call)))

    def refuse(self, error: FastnessError) -> None:
        """Add a call that is answered with this error."""
        self._works.append((_raise, error))

    def run(self, tx: Transaction) -> tuple[list[object], list[Event]]:
        """The outcomes of the calls, and the events to publish after they were sent."""
        # A call that is sent for the first time skips the lookup of its key, so it must not run after its own
        # repetition. A server marks a connection as ended before it reads the next connection of the same client, and
        # transactions of an embedded store run one at a time. So this transaction either runs before the repetition,
        # which then finds the key, or sees here that the connection ended. (On a shared store no call counts as new.)
        if self._is_wanted is not None and not self._is_wanted():
            raise Closed("The connection ended before the call was executed; send it again")
        if tx.writer and self.writes:
            share_queues(tx, self._requests)
        self._answer_bytes = 0  # A transaction may run again.
        outcomes = run_batch(tx, self._works, should_stop=self._is_full)
        events, tx.events = tx.events, []
        return outcomes, events

    def _is_full(self) -> bool:
        """Whether the answers to its reads are as large as one frame should be."""
        return self._answer_bytes > READ_BATCH_REPLY_BYTES

    def _read(self, tx: Transaction, work: BatchedCall) -> object:
        run, request = work
        answer = run(tx, request)
        # The relay reads mail and receipts constantly, and encoding them costs as much as reading them.
        if answer.__class__ is Mails:
            self._answer_bytes += sum([len(mail.body) + _ENVELOPE_BYTES for mail in answer.mails])
        elif answer.__class__ is MailReceipts:
            self._answer_bytes += len(answer.receipts) * _ENVELOPE_BYTES
        else:
            self._answer_bytes += len(encode(answer))
        return answer

    def _execute_list(self, tx: Transaction, request: CommitAtomic) -> Answers:
        """A list that fails halfway has often written, which would make the whole batch run again."""
        answers: Answers = run_isolated(tx, partial(execute_all, request=request), self._services)
        return answers


def _raise(tx: Transaction, error: FastnessError) -> None:
    del tx
    raise error
