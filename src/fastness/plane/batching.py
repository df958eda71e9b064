"""Batching: calls made at the same time share one transaction and one sync.

    callers on one event loop (`CallBatcher`)
        a single caller ──► its own transaction, at once
        others wait for their sync: the calls of this tick ──► one transaction ──► one sync ──► each its own answer

    the calls of one stream frame (`call_batch`)
        only reads ──► one snapshot
        otherwise ──► one transaction, at the strongest tier that a call requests

A transaction of an embedded store costs about as much as a small operation, so many callers would do twice the work
without this. Calls stay isolated: one that raises has written nothing and does not affect the others.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastness.errors import Closed, CommitUnknown, FastnessError
from fastness.kv import Database, Transaction
from fastness.kv.batch import BatchedCall, run_batch, run_isolated
from fastness.kv.execution import check_tier
from fastness.layers.idempotency import IsNewCall, keyed_call, run_idempotent
from fastness.limits import READ_BATCH_REPLY_BYTES
from fastness.plane.atomic import execute_all
from fastness.plane.handlers import BEST_EFFORT_READS, Run
from fastness.plane.operations import OPERATIONS, handler_of
from fastness.plane.services import HasServices, Services
from fastness.plane.sharing import share_queues
from fastness.plane.unknown_commits import repeat_async
from fastness.tiers import Tier
from fastness.wire.answers import read_answer
from fastness.wire.atomic import Answers, CommitAtomic
from fastness.wire.frames import Call, encode
from fastness.wire.mail import MailReceipts, Mails
from fastness.wire.requests import Answer, Request

Events = list[tuple[Any, ...]]

_CRITICAL = Tier.CRITICAL  # Attribute access on an enumeration costs as much as the rest of the check of a call.
_IMPORTANT = Tier.IMPORTANT
_TRANSACTIONS = frozenset(
    kind for kind, handler in OPERATIONS.items() if handler.run is not None and kind not in BEST_EFFORT_READS
)
_ENVELOPE_BYTES = 256  # The estimate for a mail without its body, and for a receipt.


class CallBatcher:
    """Batches the CRITICAL calls of one event loop. Calls of other tiers wait for no sync, so they gain nothing."""

    def __init__(self, database: Database, publish: Callable[[Events], None]) -> None:
        self._transact = database.transact_async
        self._publish = publish
        self._in_flight = 0
        self._works: list[BatchedCall] = []
        self._callers: list[asyncio.Future[Any]] = []  # One for each of `_works`.
        self._tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.

    async def call(self, run: Run, request: Request[Answer]) -> Answer:
        """The result of `run(tx, request)`, once it is synced."""
        self._in_flight += 1
        try:
            if self._in_flight == 1:
                events: Events = []
                try:
                    answer: Answer = await self._transact(_run_one, run, request, events, tier=Tier.CRITICAL)
                except asyncio.CancelledError:  # It no longer waits for the sync, but its call is committed.
                    self._publish(events)
                    raise
                if events:
                    self._publish(events)
                return answer
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Answer] = loop.create_future()
            self._works.append((run, request))
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
                outcomes, events = await self._transact(_run_works, works, tier=Tier.CRITICAL)
            except BaseException as error:
                for caller in callers:
                    if not caller.done():
                        caller.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            if events:
                self._publish(events)
            for caller, outcome in zip(callers, outcomes, strict=False):
                if caller.done():
                    continue  # The caller was cancelled, and its call is committed.
                if isinstance(outcome, Exception):
                    caller.set_exception(outcome)
                else:
                    caller.set_result(outcome)
            works, callers = works[len(outcomes) :], callers[len(outcomes) :]


def _run_one(tx: Transaction, run: Run, request: Request[Answer], events: Events) -> Answer:
    answer: Answer = run(tx, request)
    events[:] = tx.events
    return answer


def _run_works(tx: Transaction, works: list[BatchedCall]) -> tuple[list[object], Events]:
    return run_batch(tx, works, Exception), tx.events


def is_batchable(request: Request[Any]) -> bool:
    """Whether a request is exactly one transaction."""
    if request.__class__ in _TRANSACTIONS:
        return True
    handler = handler_of(request)
    if handler.run is not None:  # A read whose class may be sent with `best_effort`, without it.
        return True
    if handler.run_without_waiting is None:
        return isinstance(request, CommitAtomic)
    return not getattr(request, "wait_seconds", 0)


def may_be_stale(requests: Iterable[Request[Any]]) -> bool:
    """Whether a standby may serve all of these requests."""
    return all(request.operation.stale for request in requests)


def _always() -> bool:
    return True


async def call_batch(
    stores: HasServices, calls: Sequence[Call], is_wanted: Callable[[], bool] = _always
) -> list[object]:
    """The answers to the first of the calls, or the errors that they raised: of as many as fit one batch.

    A caller with more calls than answers sends the rest in another batch. Every call must be `is_batchable`. None is
    executed if `is_wanted` is false when the transaction starts: their sender will send them again.
    """
    repeats = stores.services.repeats
    any_again = any(call.again for call in calls)
    repeated = repeats.received(again=any_again)
    first = repeats.received(again=False) if any_again else repeated
    works: list[BatchedCall] = []
    answers: _ReadAnswers | None = None
    tier, writes = _IMPORTANT, False
    for call in calls:
        request: Request[Any] = call.request
        if request.tier is _CRITICAL:
            tier = _CRITICAL
        elif request.tier is not _IMPORTANT:
            works.append((_refuse, request.tier))
            continue
        handler = handler_of(request)
        if handler.reads_only:
            answers = answers or _ReadAnswers()
            works.append((answers.read, (handler.run, request)))
            continue
        writes = True
        if handler.run_without_waiting is not None:
            answers = answers or _ReadAnswers()
            works.append((answers.read, (handler.run_without_waiting, request)))
            continue
        if handler.run is not None:
            work: BatchedCall = handler.run, request
        else:
            assert isinstance(request, CommitAtomic), "the caller has checked is_batchable"
            work = partial(_execute_isolated, request=request), stores.services
        works.append(work if call.key is None else _keyed(work, request, call.key, repeated if call.again else first))
    database = stores.services.database
    requests = [call.request for call in calls] if writes and stores.services.shared else []
    events: Events = []
    outcomes: list[object]
    if writes:
        run = database.transact_async
    else:
        run = (database.stale if may_be_stale(call.request for call in calls) else database).read_async
    try:
        try:
            outcomes, events = await run(_run_wanted, works, answers, is_wanted, requests, tier=tier)
        except CommitUnknown as error:
            if any(call.key is None and call.request.operation.takes_key for call in calls):
                raise
            attempt = partial(run, _run_wanted, works, answers, is_wanted, requests, tier=tier)
            outcomes, events = await repeat_async(attempt, error)
    except FastnessError as error:
        outcomes = [error] * len(calls)
    if events:  # Published after the answers are sent.
        asyncio.get_running_loop().call_soon(stores.services.publish, events)
    return outcomes


class _ReadAnswers:
    """Bounds the size of the answers to the reads of one batch."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    def read(self, tx: Transaction, work: BatchedCall) -> object:
        run, request = work
        answer = run(tx, request)
        # The relay reads mail and receipts constantly, and encoding them costs as much as reading them.
        if answer.__class__ is Mails:
            self._bytes += sum([len(mail.body) + _ENVELOPE_BYTES for mail in answer.mails])
        elif answer.__class__ is MailReceipts:
            self._bytes += len(answer.receipts) * _ENVELOPE_BYTES
        else:
            self._bytes += len(encode(answer))
        return answer

    def reset(self) -> None:
        """Start from zero: a transaction may run again."""
        self._bytes = 0

    def is_full(self) -> bool:
        return self._bytes > READ_BATCH_REPLY_BYTES


def _execute_isolated(tx: Transaction, services: Services, request: CommitAtomic) -> Answers:
    """A list that fails halfway has often written, which would make the whole batch run again."""
    answers: Answers = run_isolated(tx, partial(execute_all, request=request), services)
    return answers


def _refuse(tx: Transaction, tier: Tier) -> None:
    del tx
    check_tier(tier)


def _keyed(work: BatchedCall, request: Request[Any], key: str, is_new_call: IsNewCall) -> BatchedCall:
    run, argument = work

    def run_keyed(tx: Transaction, argument: object) -> object:
        call = keyed_call(key, request, is_new_call)
        return run_idempotent(tx, call, partial(read_answer, request), run, argument)

    return run_keyed, argument


def _run_wanted(
    tx: Transaction,
    works: Sequence[BatchedCall],
    answers: _ReadAnswers | None,
    is_wanted: Callable[[], bool],
    requests: Sequence[Request[Any]],
) -> tuple[list[object], Events]:
    # A call that is sent for the first time skips the lookup of its key, so it must not run after its own repetition.
    # A server marks a connection as ended before it reads the next connection of the same client, and transactions of
    # an embedded store run one at a time. So this transaction either runs before the repetition, which then finds the
    # key, or sees here that the connection ended. (On a shared store no call counts as new.)
    if not is_wanted():
        raise Closed("The connection ended before the call was executed; send it again")
    share_queues(tx, requests)
    if answers is None:
        return run_batch(tx, works), tx.events
    answers.reset()
    return run_batch(tx, works, should_stop=answers.is_full), tx.events
